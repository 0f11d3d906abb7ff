"""A schema that harms the process that compiles it.

The process imports this module to unpickle such a schema. It imports no other test module: that
would take the process longer than all its work.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def abort_process(text: str) -> None:
    os.abort()


def exit_process(text: str) -> None:
    os._exit(7)


def kill_process(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_base_exception(text: str) -> None:
    raise BaseException("as a panic in Rust is one")


def raise_key_error(text: str) -> None:
    raise KeyError(text)


def raise_memory_error(text: str) -> None:
    raise MemoryError


def run_out_of_memory_in_a_panic(text: str) -> None:
    """Write what Rust does, and wait for a lock that is never released, as it does then."""
    os.write(2, b"memory allocation of 5795635 bytes failed\n")
    signal.pause()


class FaultySchema(str):
    """A schema whose `fault` runs in the process that reads it."""

    fault: Callable[[str], None]

    def startswith(self, *_: object) -> bool:
        self.fault(str(self))
        return False
