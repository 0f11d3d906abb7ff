"""The end of a process that several threads look at, and its exit code.

Owns the wait for both. Knows no rank: the engine's process is waited for in the same way.

    thread 1   wait on the sentinel ─► waitpid ─────────── stores the exit code
    thread 2   wait on the sentinel ───── waitpid: no child ── exit code None ─► waits for thread 1

multiprocessing takes the exit code by waitpid, which one thread alone gets. Until that thread has
stored it, the process has no exit code and seems alive for the others.
"""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import Protocol

EXIT_CODE_TIMEOUT_S = 5.0
"""Seconds to wait for another thread that has collected an exit code, and runs on at once."""

POLL_S = 0.001


class ProcessEnd(Protocol):
    """Process of multiprocessing, or one with its methods.

    One that is no child of this process has `is_child` False: it never has an exit code here.
    """

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...


def has_ended(process: ProcessEnd, timeout_s: float) -> bool:
    """Wait until the process has ended, or for so many seconds. Return whether it has."""
    return bool(wait([process.sentinel], timeout_s))


def collect_exit_code(process: ProcessEnd, timeout_s: float) -> int | None:
    """Wait for the end, or for so many seconds, and return the exit code.

    None where the process still runs, or where its exit code is for another process.
    """
    if not has_ended(process, timeout_s):
        return None
    timeout_s = EXIT_CODE_TIMEOUT_S if getattr(process, "is_child", True) else 0.0
    deadline_s = time.monotonic() + timeout_s
    while (exit_code := process.exitcode) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return exit_code
