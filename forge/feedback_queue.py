"""Lanes: the order in which jobs of unknown length run, so that long ones do not delay short ones.

Owns who runs and who waits. Knows no process and no clock: whoever runs the jobs says which have
ended and which have used up what their lane allows.

    add ──► lane 0: many slots, small limits ──ran_out──► lane 1: few slots, larger ──ran_out──►
                 │                                            │                         refused
                 └───────────────── ended ────────────────────┘

A job begins again in the next lane. So a short job waits for the little time of lane 0 times the
jobs before it, however long those would run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job", bound=Hashable)


class QueueLevel(NamedTuple):
    """Bounds of one lane.

    slots        jobs that run at the same time
    cpu_s        processor time of each job
    memory_mib   memory of each job
    max_waiting  jobs that may wait for a slot after they ran out in the lane before
    """

    slots: int
    cpu_s: float
    memory_mib: int
    max_waiting: int


COMPILE_LEVELS = (
    QueueLevel(slots=16, cpu_s=0.05, memory_mib=8, max_waiting=0),
    QueueLevel(slots=1, cpu_s=2.0, memory_mib=16, max_waiting=32),
)
"""Of compilations. Nearly all structures compile within 0.03 s and 6 MiB. Schemas of 400 ranges of
numbers or of 400 formats take 0.16 s, and the first of them 11 MiB. The processes of both lanes
take at most 144 MiB together."""


class Demotion(Enum):
    """What became of a job that ran out of time or memory.

    DEMOTED      it waits in the next lane
    LAST_LEVEL   it is gone: there is no lane with more
    LEVEL_FULL   it is gone: as many wait in the next lane as may
    """

    DEMOTED = "on"
    LAST_LEVEL = "no lane"
    LEVEL_FULL = "no room"


class FeedbackQueue(Generic[Job]):
    """Jobs on their way through the lanes. Each is in one place."""

    def __init__(self, levels: Sequence[QueueLevel]) -> None:
        self._levels = tuple(levels)
        self._waiting: list[deque[Job]] = [deque() for _ in levels]
        self._running: list[set[Job]] = [set() for _ in levels]

    def add(self, job: Job) -> None:
        """Let the job wait in the first lane."""
        self._waiting[0].append(job)

    def contains(self, job: Job) -> bool:
        """Return whether the job waits or runs in a lane."""
        return any(job in jobs for jobs in (*self._waiting, *self._running))

    def start_jobs(self) -> list[tuple[Job, QueueLevel]]:
        """Start what has a slot, in the order of arrival; return each with its lane."""
        started = []
        for level, waiting, running in zip(self._levels, self._waiting, self._running, strict=True):
            while waiting and len(running) < level.slots:
                job = waiting.popleft()
                running.add(job)
                started.append((job, level))
        return started

    def remove(self, job: Job) -> None:
        """Free the place of a job that has ended or that nobody waits for. O(jobs that wait)."""
        for waiting, running in zip(self._waiting, self._running, strict=True):
            running.discard(job)
            if job in waiting:
                waiting.remove(job)

    def demote(self, job: Job) -> Demotion:
        """Take a running job that used up a limit to the next lane, if there is one with room."""
        (index,) = (i for i, running in enumerate(self._running) if job in running)
        self._running[index].remove(job)
        next_index = index + 1
        if next_index == len(self._levels):
            return Demotion.LAST_LEVEL
        if len(self._waiting[next_index]) >= self._levels[next_index].max_waiting:
            return Demotion.LEVEL_FULL
        self._waiting[next_index].append(job)
        return Demotion.DEMOTED
