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


class Lane(NamedTuple):
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


LANES = (
    Lane(slots=16, cpu_s=0.05, memory_mib=8, max_waiting=0),
    Lane(slots=1, cpu_s=2.0, memory_mib=16, max_waiting=32),
)
"""Of compilations. Nearly all structures compile within 0.03 s and 6 MiB. Schemas of 400 ranges of
numbers or of 400 formats take 0.16 s, and the first of them 11 MiB. The processes of both lanes
take at most 144 MiB together."""


class Moved(Enum):
    """What became of a job that ran out of time or memory.

    ON       it waits in the next lane
    NO_LANE  it is gone: there is no lane with more
    NO_ROOM  it is gone: as many wait in the next lane as may
    """

    ON = "on"
    NO_LANE = "no lane"
    NO_ROOM = "no room"


class Lanes(Generic[Job]):
    """Jobs on their way through the lanes. Each is in one place."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._waiting: list[deque[Job]] = [deque() for _ in lanes]
        self._running: list[set[Job]] = [set() for _ in lanes]

    def add(self, job: Job) -> None:
        """Let the job wait in the first lane."""
        self._waiting[0].append(job)

    def has(self, job: Job) -> bool:
        """Return whether the job waits or runs in a lane."""
        return any(job in jobs for jobs in (*self._waiting, *self._running))

    def due(self) -> list[tuple[Job, Lane]]:
        """Start what has a slot, in the order of arrival; return each with its lane."""
        started = []
        for lane, waiting, running in zip(self._lanes, self._waiting, self._running, strict=True):
            while waiting and len(running) < lane.slots:
                job = waiting.popleft()
                running.add(job)
                started.append((job, lane))
        return started

    def remove(self, job: Job) -> None:
        """Free the place of a job that has ended or that nobody waits for. O(jobs that wait)."""
        for waiting, running in zip(self._waiting, self._running, strict=True):
            running.discard(job)
            if job in waiting:
                waiting.remove(job)

    def ran_out(self, job: Job) -> Moved:
        """Take a running job that used up a limit to the next lane, if there is one with room."""
        (place,) = (i for i, running in enumerate(self._running) if job in running)
        self._running[place].remove(job)
        after = place + 1
        if after == len(self._lanes):
            return Moved.NO_LANE
        if len(self._waiting[after]) >= self._lanes[after].max_waiting:
            return Moved.NO_ROOM
        self._waiting[after].append(job)
        return Moved.ON
