"""Clock and TimedModel: a model whose steps take what a cost model says, on a clock of integers.

Owns virtual time. Knows no workload and no scheduler: it sees plans. Time of the host never leaks:
nothing here reads a real clock.

    host      |plan n|launch|............wait............|commit n-1|plan n+1|
    device           |------ step n-1 ------|------ step n ------|

A device runs one step after the other. A step begins when it is launched and the one before it has
ended; its result is there when it has ended; waiting for it puts the clock forward.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from forge.models.around import Around
from forge.seam import Model, PendingStep, StepOutput, StepPlan


class Cost(Protocol):
    """What things take, in nanoseconds. Pure functions of a plan."""

    def step_ns(self, plan: StepPlan) -> int:
        """The device, for the whole plan."""
        ...

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        """`step_ns` of a plan in which every row is one more token and nothing was decided.

        num_kv, most_kv   positions before those tokens: in all, and of the longest sequence
        """
        ...

    def plan_ns(self, plan: StepPlan) -> int:
        """The host, from the end of the commit before to the launch. By rows alone if quiet."""
        ...

    def commit_ns(self, plan: StepPlan) -> int:
        """The host, from the result to the tokens being told. By rows alone if quiet."""
        ...


class Clock:
    """Now, in nanoseconds since the world began. Only goes forward."""

    def __init__(self) -> None:
        self.now_ns = 0

    def pass_ns(self, duration_ns: int) -> None:
        """So much time goes by."""
        assert duration_ns >= 0, f"{duration_ns=}"
        self.now_ns += duration_ns

    def reach(self, time_ns: int) -> None:
        """It is `time_ns`, or later already."""
        if time_ns > self.now_ns:
            self.now_ns = time_ns


class TimedStep(NamedTuple):
    """A step that ends at `end_ns`."""

    step: PendingStep
    plan: StepPlan
    begin_ns: int
    end_ns: int
    model: TimedModel

    def result(self) -> StepOutput:
        """The output, once the clock has reached the step's end and the host has looked at it."""
        model = self.model
        model.clock.reach(self.end_ns)
        output = self.step.result()
        model.clock.pass_ns(model.cost.commit_ns(self.plan))
        model.last = self
        return output


class TimedModel(Around):
    """A model on a virtual clock.

    cost      what steps take; may be put in the place of another between two steps
    last      the step whose result was read last, or None
    free_ns   when the device has done all that was launched
    """

    def __init__(self, model: Model, clock: Clock, cost: Cost) -> None:
        super().__init__(model)
        self.clock = clock
        self.cost = cost
        self.last: TimedStep | None = None
        self.free_ns = 0

    def forward(self, plan: StepPlan) -> TimedStep:
        """The plan is launched once the host is done with it."""
        self.clock.pass_ns(self.cost.plan_ns(plan))
        step = self._model.forward(plan)
        begin_ns = max(self.clock.now_ns, self.free_ns)
        self.free_ns = begin_ns + self.cost.step_ns(plan)
        return TimedStep(step, plan, begin_ns, self.free_ns, self)
