"""CostModel: the interface of everything that predicts how long a step takes.

Owns the protocol. Knows no clock: sim/clock.py advances virtual time by these durations.
"""

from __future__ import annotations

from typing import Protocol

from forge.seam import StepPlan


class CostModel(Protocol):
    """What things take, in nanoseconds. Pure functions of a plan."""

    def step_ns(self, plan: StepPlan) -> int:
        """The device, for the whole plan."""
        ...

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """`step_ns` of a plan in which every row is one more token and nothing was decided.

        total_kv_len, max_kv_len   positions before those tokens: in all, and of the longest
                                   sequence
        """
        ...

    def plan_ns(self, plan: StepPlan) -> int:
        """The host, from the end of the commit before to the launch. By rows alone if quiet."""
        ...

    def commit_ns(self, plan: StepPlan) -> int:
        """The host, from the result to the tokens being told. By rows alone if quiet."""
        ...
