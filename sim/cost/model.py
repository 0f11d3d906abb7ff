"""CostModel: the interface of everything that predicts how long a step takes.

Owns the protocol. Knows no clock: sim/clock.py advances virtual time by these durations.
"""

from __future__ import annotations

from typing import Protocol

from forge.seam import StepPlan


class CostModel(Protocol):
    """Durations of steps, in nanoseconds, as pure functions of a plan."""

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the device for the whole plan."""
        ...

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return `step_ns` of a uniform decode step: one token a row, and no events.

        total_kv_len   positions before those tokens, summed over the rows
        max_kv_len     positions before the token of the longest row
        """
        ...

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the time of the host from the previous commit to the launch.

        Of a uniform decode step it depends on the number of rows alone.
        """
        ...

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the time of the host from the result to the delivery of its tokens.

        Of a uniform decode step it depends on the number of rows alone.
        """
        ...
