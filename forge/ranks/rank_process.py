"""Main function of a rank other than 0: its signals, its lifeline and its last words.

Owns how a rank begins and ends. Knows nothing of what it runs: `run_rank` receives the context.

    starting process ── lifeline ──► SIGIO, which ends this process: no Python, no lock is needed
                     ◄── reports ─── b"ready", once; then b"failed: ..." or nothing

A rank that waits in a kernel for one that has ended never returns to Python, so it cannot notice
that the starting process has ended. The kernel of the system sends SIGIO instead, whose default
action ends the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from forge.errors import InvalidConfig, one_line
from forge.log import nonblocking_logging
from forge.ranks.rank_context import FollowerContext

LOG = logging.getLogger("forge.ranks")

READY = b"ready"
FAILED_PREFIX = b"failed: "

RunRank = Callable[..., None]
"""Runs a rank until the ring ends: takes its context, `report_ready` and further arguments."""


def end_with_parent(lifeline: Connection) -> None:
    """Let the system end this process at once when the other end of the pipe closes."""
    fd = lifeline.fileno()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):  # It closed before the system was set to send a signal.
        os._exit(1)


def ignore_end_signals() -> None:
    """Ignore SIGINT and SIGTERM, which a terminal sends to every process of the group.

    The starting process decides when a rank ends.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)


def log_failure(rank: int, error: BaseException) -> None:
    """Log why a rank has ended: a refused option in one line, anything else with a traceback.

    The ranks refuse an option together, and the starting process reports it as well.
    """
    exc_info = None if isinstance(error, InvalidConfig) else error
    LOG.error("rank %d has ended: %s", rank, one_line(error), exc_info=exc_info)


def run_rank_process(
    rank_context: FollowerContext, run_rank: RunRank, args: tuple[Any, ...]
) -> None:
    """Run a rank in this process, and report its error, if any, before it ends."""
    ignore_end_signals()
    end_with_parent(rank_context.lifeline)
    with nonblocking_logging():
        try:
            run_rank(rank_context, lambda: rank_context.reports.send_bytes(READY), *args)
        except BaseException as error:  # the starting process reports it
            log_failure(rank_context.rank, error)
            text = f"{type(error).__name__}: {one_line(error)}"
            rank_context.reports.send_bytes(FAILED_PREFIX + text.encode(errors="replace"))
            sys.exit(1)
    # Nothing is left to save, and the interpreter takes seconds to free every object of a model.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
