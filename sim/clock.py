"""Clock and VirtualClockModel: steps that take what a cost model says, on a clock of integers.

Owns virtual time. Knows no workload and no scheduler: it sees plans. Time of the host never leaks:
nothing here reads a real clock.

    host      |plan n|launch|............wait............|commit n-1|plan n+1|
    device           |------ step n-1 ------|------ step n ------|

A device runs one step after the other. A step begins when it is launched and the one before it has
ended; its result is there when it has ended; waiting for it puts the clock forward.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.models.model_wrapper import ModelWrapper
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sim.cost.model import CostModel


class Clock:
    """Now, in nanoseconds since the world began. Only goes forward."""

    def __init__(self) -> None:
        self.now_ns = 0

    def advance(self, duration_ns: int) -> None:
        """So much time goes by."""
        assert duration_ns >= 0, f"{duration_ns=}"
        self.now_ns += duration_ns

    def wait_until(self, time_ns: int) -> None:
        """It is `time_ns`, or later already."""
        if time_ns > self.now_ns:
            self.now_ns = time_ns


class VirtualClockStep(NamedTuple):
    """A step that ends at `end_ns`."""

    pending: PendingStep
    plan: StepPlan
    begin_ns: int
    end_ns: int
    model: VirtualClockModel

    def result(self) -> StepOutput:
        """The output, once the clock has reached the step's end and the host has looked at it."""
        model = self.model
        model.clock.wait_until(self.end_ns)
        output = self.pending.result()
        model.clock.advance(model.cost.commit_ns(self.plan))
        model.last_step = self
        return output


class VirtualClockModel(ModelWrapper):
    """A model on a virtual clock.

    cost             what steps take; may be put in the place of another between two steps
    last_step        the step whose result was read last, or None
    device_free_ns   when the device has done all that was launched
    """

    def __init__(self, model: Model, clock: Clock, cost: CostModel) -> None:
        super().__init__(model)
        self.clock = clock
        self.cost = cost
        self.last_step: VirtualClockStep | None = None
        self.device_free_ns = 0

    def forward(self, plan: StepPlan) -> VirtualClockStep:
        """The plan is launched once the host is done with it."""
        self.clock.advance(self.cost.plan_ns(plan))
        step = self._model.forward(plan)
        begin_ns = max(self.clock.now_ns, self.device_free_ns)
        self.device_free_ns = begin_ns + self.cost.step_ns(plan)
        return VirtualClockStep(step, plan, begin_ns, self.device_free_ns, self)
