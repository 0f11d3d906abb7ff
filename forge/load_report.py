"""Load report: how much an engine has to do, as a value for routers and autoscalers.

Owns the figures. Reads the scheduler's state and no clock: the time is an argument.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.scheduler import Scheduler


class LoadReport(NamedTuple):
    """Load of an engine between two steps.

    num_running       sequences with blocks
    num_waiting       sequences without, preempted ones included
    num_free_blocks   blocks that can be allocated, cached ones included
    num_blocks        size of the pool
    queue_s           seconds that the request which has waited longest has waited, of those that
                      have not run; 0 where none waits
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    queue_s: float


def load_report(scheduler: Scheduler, now_s: float) -> LoadReport:
    """Return the load at `now_s`, on the clock of `Request.arrival_s`. O(waiting sequences)."""
    arrivals_s = [each.request.arrival_s for each in scheduler.waiting if each.epoch == 0]
    return LoadReport(
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.pool.num_free_blocks,
        scheduler.pool.num_blocks,
        max(0.0, now_s - min(arrivals_s, default=now_s)),
    )
