"""Clock and VirtualClockModel: steps that take the time of a cost model, on an integer clock.

Owns virtual time. Knows no workload and no scheduler: it receives plans. Reads no real clock, so
the time of the host does not leak into a run.

    host      |plan n|launch|............wait............|commit n-1|plan n+1|
    device           |------ step n-1 ------|------ step n ------|

The device runs one step at a time. A step begins when it is launched and the previous step has
ended. Its result is available at its end; waiting for it advances the clock.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.models.model_wrapper import ModelWrapper
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sim.cost.model import CostModel


class Clock:
    """Nanoseconds since the start of the world. The clock only goes forward."""

    def __init__(self) -> None:
        self.now_ns = 0

    def advance(self, duration_ns: int) -> None:
        """Add this duration."""
        assert duration_ns >= 0, f"{duration_ns=}"
        self.now_ns += duration_ns

    def wait_until(self, time_ns: int) -> None:
        """Advance to `time_ns`, if it is in the future."""
        if time_ns > self.now_ns:
            self.now_ns = time_ns


class VirtualClockStep(NamedTuple):
    """A pending step that runs on the device from `begin_ns` to `end_ns`."""

    pending: PendingStep
    plan: StepPlan
    begin_ns: int
    end_ns: int
    model: VirtualClockModel

    def result(self) -> StepOutput:
        """Return the output. Advances the clock to the end of the step and over the commit."""
        model = self.model
        model.clock.wait_until(self.end_ns)
        output = self.pending.result()
        model.clock.advance(model.cost.commit_ns(self.plan))
        model.last_step = self
        return output


class VirtualClockModel(ModelWrapper):
    """A model on a virtual clock.

    cost             durations of steps; may be replaced between two steps
    last_step        the step whose result was read last, or None
    device_free_ns   end of the last launched step
    """

    def __init__(self, model: Model, clock: Clock, cost: CostModel) -> None:
        super().__init__(model)
        self.clock = clock
        self.cost = cost
        self.last_step: VirtualClockStep | None = None
        self.device_free_ns = 0

    def forward(self, plan: StepPlan) -> VirtualClockStep:
        """Launch the plan. Advances the clock over planning and launch."""
        self.clock.advance(self.cost.plan_ns(plan))
        step = self._model.forward(plan)
        begin_ns = max(self.clock.now_ns, self.device_free_ns)
        self.device_free_ns = begin_ns + self.cost.step_ns(plan)
        return VirtualClockStep(step, plan, begin_ns, self.device_free_ns, self)
