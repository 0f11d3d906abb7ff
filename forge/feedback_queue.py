"""FeedbackQueue: the order of jobs of unknown length, so that long ones do not delay short ones.

Owns which jobs run and which wait. Knows no process and no clock: its caller runs the jobs, and
reports which have ended and which have used up the limits of their level.

    add ──► level 0: many slots, small limits ─demote─► level 1: few slots, larger ─demote─► refused
                 │                                            │
                 └───────────────── remove ───────────────────┘

A job starts over in the next level. So a short job waits at most the small limit of level 0 for
each job before it, however long those jobs would run.

Always true: a job waits or runs in one level. A multilevel feedback queue: Corbato 1962.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job", bound=Hashable)


class QueueLevel(NamedTuple):
    """Limits of one level.

    slots        jobs that run at the same time
    cpu_s        processor time of each job
    memory_mib   memory of each job
    max_waiting  jobs that may wait for a slot after they were demoted from the level before
    """

    slots: int
    cpu_s: float
    memory_mib: int
    max_waiting: int


COMPILE_LEVELS = (
    QueueLevel(slots=16, cpu_s=0.05, memory_mib=8, max_waiting=0),
    QueueLevel(slots=1, cpu_s=2.0, memory_mib=16, max_waiting=32),
)
"""Levels of compilations. Nearly all structures compile in the first (0.03 s, 6 MiB). A schema of
400 ranges needs the second (0.16 s, 11 MiB). Their costs: wiki/Structured-output.md."""


class Demotion(Enum):
    """Outcome for a job that used up its processor time or memory.

    DEMOTED      the job waits in the next level
    LAST_LEVEL   the job was removed: no level has larger limits
    LEVEL_FULL   the job was removed: the next level has `max_waiting` jobs already
    """

    DEMOTED = "on"
    LAST_LEVEL = "no lane"
    LEVEL_FULL = "no room"


class FeedbackQueue(Generic[Job]):
    """Jobs on their way through the levels. Each waits or runs in one level."""

    def __init__(self, levels: Sequence[QueueLevel]) -> None:
        self._levels = tuple(levels)
        self._waiting: list[deque[Job]] = [deque() for _ in levels]
        self._running: list[set[Job]] = [set() for _ in levels]

    def add(self, job: Job) -> None:
        """Let the job wait in the first level."""
        self._waiting[0].append(job)

    def contains(self, job: Job) -> bool:
        """Return whether the job waits or runs."""
        return any(job in jobs for jobs in (*self._waiting, *self._running))

    def start_jobs(self) -> list[tuple[Job, QueueLevel]]:
        """Start each job that has a slot, in order of arrival; return each with its level."""
        started = []
        for level, waiting, running in zip(self._levels, self._waiting, self._running, strict=True):
            while waiting and len(running) < level.slots:
                job = waiting.popleft()
                running.add(job)
                started.append((job, level))
        return started

    def remove(self, job: Job) -> None:
        """Remove a job that has ended or whose result is not needed. O(waiting jobs)."""
        for waiting, running in zip(self._waiting, self._running, strict=True):
            running.discard(job)
            if job in waiting:
                waiting.remove(job)

    def demote(self, job: Job) -> Demotion:
        """Move a running job that used up a limit to the next level, if that has room."""
        (index,) = (i for i, running in enumerate(self._running) if job in running)
        self._running[index].remove(job)
        next_index = index + 1
        if next_index == len(self._levels):
            return Demotion.LAST_LEVEL
        if len(self._waiting[next_index]) >= self._levels[next_index].max_waiting:
            return Demotion.LEVEL_FULL
        self._waiting[next_index].append(job)
        return Demotion.DEMOTED
