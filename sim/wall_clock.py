"""Live: a model on the clock of the machine, so that a World drives a real engine in real time.

Owns the only waiting that a World can do. The World is the one of the simulator, and so are the
workload and the measures: what differs between a prediction and the run it predicts is the model
and its clock. Nothing that a simulation runs imports this.

    predicted    Engine on TimedModel(LengthModel)    Clock        steps take what a table says
    real         Engine on LiveModel(HFModel)         WallClock    steps take what they take

What steps took is kept where asked: the table is held against them, in the order and the company
in which an engine runs them. A step that was done before its result was asked for took less, and
nobody knows how much: there the device waited for the host.

    host      |called  launched|..commit, plan..|asked      ready|
    device                     |------------ the step -----------|    waited for
    device                     |-- the step --|                       late: the host came after it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from forge.models.model_wrapper import ModelWrapper
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sim.clock import VirtualClockStep

SPIN_NS = 200_000
"""So near to its end a wait asks the clock again and again: a sleep is longer than it is told."""


class WallClock:
    """Nanoseconds since it was made. It goes forward by itself."""

    def __init__(
        self,
        read_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._read_ns = read_ns
        self._sleep = sleep
        self._begin_ns = read_ns()

    @property
    def now_ns(self) -> int:
        """Whole nanoseconds."""
        return self._read_ns() - self._begin_ns

    def wait_until(self, time_ns: int) -> None:
        """It is `time_ns`, or later already."""
        while (left_ns := time_ns - self.now_ns) > 0:
            if left_ns > SPIN_NS:
                self._sleep((left_ns - SPIN_NS) / 1e9)


MIN_WAIT_SHARE = 0.1
"""Share of a step's time below which nobody waited for it: its result is only read."""


class StepTiming(NamedTuple):
    """A step that was run, and when what happened to it, on the model's clock.

    ns   from its launch or the result before, whichever was later, to its own result
    """

    plan: StepPlan
    ns: int
    called_ns: int
    launched_ns: int
    asked_ns: int
    ready_ns: int

    @property
    def finished_early(self) -> bool:
        """The device was done before its result was asked for: it took less than `ns`."""
        return self.ready_ns - self.asked_ns < MIN_WAIT_SHARE * self.ns


class WallClockStep(NamedTuple):
    """A step whose launch began at `called_ns` and was over at `launched_ns`."""

    pending: PendingStep
    plan: StepPlan
    called_ns: int
    launched_ns: int
    model: WallClockModel

    def result(self) -> StepOutput:
        """The model's."""
        asked_ns = self.model.clock.now_ns
        output = self.pending.result()
        self.model.on_result(self, asked_ns)
        return output


class WallClockModel(ModelWrapper):
    """A model on the machine's clock.

    timings     each that was run, while `record`
    last_step   None: when a step began and ended is known to the device alone
    """

    def __init__(self, model: Model, clock: WallClock, record: bool = False) -> None:
        super().__init__(model)
        self.last_step: VirtualClockStep | None = None
        self.clock = clock
        self.record = record
        self.timings: list[StepTiming] = []
        self._last_ready_ns = 0

    def forward(self, plan: StepPlan) -> WallClockStep:
        """The model's."""
        called_ns = self.clock.now_ns
        step = self._model.forward(plan)
        return WallClockStep(step, plan, called_ns, self.clock.now_ns, self)

    def on_result(self, step: WallClockStep, asked_ns: int) -> None:
        """Its result was read: the device had it since its launch or the result before."""
        now_ns = self.clock.now_ns
        if self.record:
            ns = max(1, now_ns - max(step.launched_ns, self._last_ready_ns))
            times = (step.called_ns, step.launched_ns, asked_ns, now_ns)
            self.timings.append(StepTiming(step.plan, ns, *times))
        self._last_ready_ns = now_ns
