"""Cost models: what a step takes, from what its plan says. In integer nanoseconds.

Owns the simplest ones; roofline.py needs a GPU's and a model's figures, table.py a calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.seam import StepPlan
from forge.sim.units import NS_PER_MS


@dataclass(frozen=True)
class ConstantCost:
    """Every step takes the same, and the host nothing."""

    ns: int = NS_PER_MS

    def step_ns(self, plan: StepPlan) -> int:
        """The same."""
        return self.ns

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """The same."""
        return self.ns

    def plan_ns(self, plan: StepPlan) -> int:
        """Nothing."""
        return 0

    def commit_ns(self, plan: StepPlan) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True)
class AffineCost:
    """A step takes `base` and so much for each row and each token; the host so much a row."""

    base_ns: int
    row_ns: int = 0
    token_ns: int = 0
    host_ns: int = 0
    host_row_ns: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        """Of the device."""
        tokens = self.token_ns * plan.num_tokens if self.token_ns else 0
        return self.base_ns + self.row_ns * len(plan.rows) + tokens

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """A token a row."""
        return self.base_ns + (self.row_ns + self.token_ns) * num_rows

    def plan_ns(self, plan: StepPlan) -> int:
        """Half of the host's."""
        return (self.host_ns + self.host_row_ns * len(plan.rows)) // 2

    def commit_ns(self, plan: StepPlan) -> int:
        """The other half."""
        return (self.host_ns + self.host_row_ns * len(plan.rows)) // 2
