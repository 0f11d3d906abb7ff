"""Autoscaling: more replicas while requests wait, fewer while the others would hold the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge.ray.scaling import QueueTimePolicy, ReplicaSample, num_replicas_for

IDLE, BUSY = ReplicaSample(0.0, 0.0), ReplicaSample(0.0, 0.9)


def waiting(seconds: float) -> ReplicaSample:
    return ReplicaSample(seconds, 1.0)


@pytest.mark.parametrize(
    ("samples", "num_replicas", "expected"),
    [
        ([], 3, 3),
        ([waiting(1.5)], 1, 2),
        ([waiting(1.5)] * 5, 5, 7),
        ([waiting(0.9)] * 2, 2, 2),
        ([waiting(2.5), IDLE], 2, 3),
        ([waiting(1.5), IDLE], 2, 2),
        ([IDLE] * 3, 3, 2),
        ([IDLE], 1, 0),
        ([BUSY] * 3, 3, 3),
        ([BUSY, IDLE, IDLE], 3, 2),
        ([ReplicaSample(0.0, 0.34)] * 3, 3, 3),
        ([ReplicaSample(0.0, 0.33)] * 3, 3, 2),
        ([ReplicaSample(0.1, 0.0)] * 3, 3, 3),
    ],
)
def test_the_number_of_replicas_follows_queue_times(
    samples: list[ReplicaSample], num_replicas: int, expected: int
) -> None:
    assert num_replicas_for(samples, num_replicas, target_queue_s=1.0) == expected


def test_the_policy_reads_what_replicas_report() -> None:
    policy = QueueTimePolicy(target_queue_s=0.5)
    context = SimpleNamespace(
        aggregated_metrics={"queue_s": {"a": 2.0, "b": 0.0}, "used_rows": {"a": 1.0}},
        target_num_replicas=2,
    )
    assert policy(context) == (3, {})
    context.aggregated_metrics = None
    assert policy(context) == (2, {})
