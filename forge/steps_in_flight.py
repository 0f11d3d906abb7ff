"""StepsInFlight: plans that a model computes, and whose results are not read yet.

Owns their order. Knows no scheduler. At most `depth` are in flight after a step of the engine.

    launch(plan) ─► |P0, step 0| |P1, step 1| ─► take_oldest() ─► (P0, output of step 0)

Always true: an output that `take_oldest` returns is that of its plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from forge.seam import Model, PendingStep, StepOutput, StepPlan


class StepsInFlight:
    """Queue of plans with their pending steps, oldest first. One engine owns it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepPlan, PendingStep]] = deque()

    def __len__(self) -> int:
        """Return the number of plans in flight."""
        return len(self._steps)

    @property
    def plans(self) -> list[StepPlan]:
        """Plans, oldest first."""
        return [plan for plan, _ in self._steps]

    def launch(self, plan: StepPlan, model: Model) -> None:
        """Let the model begin the plan."""
        self._steps.append((plan, model.forward(plan)))

    def take_oldest(self) -> tuple[StepPlan, StepOutput]:
        """Remove the oldest plan, wait for its output and return both.

        Raises ValueError for an output of another plan.
        """
        plan, pending = self._steps.popleft()
        output = pending.result()
        if (output.step, len(output.rows)) != (plan.step, len(plan.rows)):
            raise ValueError(
                f"step {output.step} with {len(output.rows)} rows is no result of step {plan.step} "
                f"with {len(plan.rows)}"
            )
        return plan, output

    def replace(self, steps: Iterable[tuple[StepPlan, PendingStep]]) -> None:
        """Put these steps in place of those in flight."""
        self._steps = deque(steps)
