"""Autoscaling: the number of replicas by the queue time of their engines.

Owns the rule. Reads no clock: Ray delays each change by its own settings. A queue that grows is the
one sign that a fleet is too small whatever the prompts are; a count of requests is not, since the
prompts of two requests differ by a factor of a thousand.

    mean wait above the target           half of the replicas more, at least one
    none waits, and the rest would hold  one replica less
    what runs, at half of their rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

QUEUE_METRIC = "queue_s"
ROWS_METRIC = "used_rows"
MAX_USED_ROWS = 0.5
"""Share of the rows of the batch that the replicas which remain may use after one is stopped."""


class ReplicaSample(NamedTuple):
    """Load of a replica.

    queue_s     how long the request has waited that waits longest for its first step
    used_rows   sequences that run, as a share of those that may
    """

    queue_s: float
    used_rows: float


def num_replicas_for(
    samples: Sequence[ReplicaSample], num_replicas: int, target_queue_s: float
) -> int:
    """Return how many replicas there should be. Without samples it is as many as there are."""
    if not samples:
        return num_replicas
    if sum(each.queue_s for each in samples) / len(samples) > target_queue_s:
        return num_replicas + max(1, num_replicas // 2)
    used_rows = sum(each.used_rows for each in samples) * num_replicas / len(samples)
    is_idle = all(each.queue_s == 0 for each in samples)
    if is_idle and used_rows <= MAX_USED_ROWS * (num_replicas - 1):
        return num_replicas - 1
    return num_replicas


class QueueTimePolicy:
    """Ray Serve's form of a policy for autoscaling: `num_replicas_for` on what replicas report."""

    def __init__(self, target_queue_s: float) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        used_rows = metrics.get(ROWS_METRIC, {})
        samples = [
            ReplicaSample(queue_s, used_rows.get(replica, 0.0))
            for replica, queue_s in metrics.get(QUEUE_METRIC, {}).items()
        ]
        return num_replicas_for(samples, context.target_num_replicas, self._target_queue_s), {}
