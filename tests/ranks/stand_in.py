"""Ranks that compute nothing, and end or hang at a stage that a test chooses.

lead(context, stage)             rank 0: sends steps while it is in stage "steps", then waits
follow(context, ..., stage, n)   another rank: reads steps; rank n fails in `stage`
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from forge.ranks.rank_context import FollowerContext, LeaderContext
from forge.ranks.rank_process import end_with_parent, ignore_end_signals

STEP, LAST_STEP = b"step", b"last step"


def kill_this_process() -> None:
    """End without a last word, as a driver's fault or the kernel's memory limit ends a process."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang_with_the_interpreter() -> None:
    """Never return, and let no other thread of Python run: a kernel that waits for a lost rank."""
    while True:
        ctypes.PyDLL(None).pause()


def follow(
    rank_context: FollowerContext, report_ready: Callable[[], None], stage: str, failing_rank: int
) -> None:
    """Read steps until the ring ends. Rank `failing_rank` ends in `stage`."""
    fails = rank_context.rank == failing_rank
    if fails and stage == "raises while loading":
        raise ValueError(f"no weights for rank {rank_context.rank}")
    if fails and stage == "killed while loading":
        kill_this_process()
    reader = rank_context.open_reader()
    report_ready()
    while (message := reader.receive()) is not None:
        if message == LAST_STEP:
            if fails and stage == "killed in a step":
                kill_this_process()
            if fails and stage == "raises in a step":
                raise ArithmeticError("an illegal memory access")
            if stage in ("killed in a step", "raises in a step", "rank 0 killed in a step"):
                hang_with_the_interpreter()
    if fails and stage == "killed at shutdown":
        kill_this_process()
    if fails and stage == "hangs at shutdown":
        hang_with_the_interpreter()


def lead(rank_context: LeaderContext, stage: str) -> None:
    """Run rank 0 in a process of its own: three steps, and the one in which `stage` ends it."""
    ignore_end_signals()
    assert rank_context.lifeline is not None, "this process is not the one that started the ranks"
    end_with_parent(rank_context.lifeline)
    with rank_context.open_writer() as writer:
        for step in (STEP, STEP, STEP, LAST_STEP):
            writer.send([step])
        if stage == "rank 0 killed in a step":
            kill_this_process()
        if stage in ("killed in a step", "raises in a step", "killed while serving"):
            hang_with_the_interpreter()
