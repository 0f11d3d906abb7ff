"""Constant and affine cost models, in integer nanoseconds.

Owns the simplest models. roofline.py needs the figures of a GPU and of a model, table.py needs a
calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.seam import StepPlan
from forge.sim.units import NS_PER_MS


@dataclass(frozen=True)
class ConstantCost:
    """The same time for every step, and none for the host."""

    ns: int = NS_PER_MS

    def step_ns(self, plan: StepPlan) -> int:
        return self.ns

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        return self.ns

    def plan_ns(self, plan: StepPlan) -> int:
        return 0

    def commit_ns(self, plan: StepPlan) -> int:
        return 0


@dataclass(frozen=True)
class AffineCost:
    """A base time, and a time for each row and each token.

    base_ns, row_ns, token_ns   of the device
    host_ns, host_row_ns        of the host; half of it before the launch, half after the result
    """

    base_ns: int
    row_ns: int = 0
    token_ns: int = 0
    host_ns: int = 0
    host_row_ns: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the device."""
        tokens = self.token_ns * plan.num_tokens if self.token_ns else 0
        return self.base_ns + self.row_ns * len(plan.rows) + tokens

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the time of the device for one token a row."""
        return self.base_ns + (self.row_ns + self.token_ns) * num_rows

    def plan_ns(self, plan: StepPlan) -> int:
        """Return half of the time of the host."""
        return (self.host_ns + self.host_row_ns * len(plan.rows)) // 2

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the other half of the time of the host."""
        return (self.host_ns + self.host_row_ns * len(plan.rows)) // 2
