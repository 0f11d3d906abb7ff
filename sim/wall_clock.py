"""WallClock and WallClockModel: a World drives a real engine in real time.

Owns the only real waiting of a World. World, workload and metrics are those of the simulator. A
prediction and the run it predicts differ in the model and its clock only. No simulation imports
this module.

    predicted    Engine on VirtualClockModel(LengthModel)    Clock        times of a cost table
    real         Engine on WallClockModel(HFModel)           WallClock    measured times

Step times are recorded on request, in the order and the batches in which an engine runs them; the
table is compared with them. If the device finished a step before its result was read, the time of
the step is only an upper bound: the device waited for the host.

    host      |called  launched|..commit, plan..|result read    ready|
    device                     |------------ the step ---------------|    the host waits
    device                     |-- the step --|                           the device waits
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from forge.models.model_wrapper import ModelWrapper
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sim.clock import VirtualClockStep

SPIN_NS = 200_000
"""The last part of a wait spins on the clock: a sleep may take longer than its argument."""


class WallClock:
    """Real nanoseconds since it was created."""

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
        return self._read_ns() - self._begin_ns

    def wait_until(self, time_ns: int) -> None:
        """Wait until `time_ns`; return at once if it has passed."""
        while (left_ns := time_ns - self.now_ns) > 0:
            if left_ns > SPIN_NS:
                self._sleep((left_ns - SPIN_NS) / 1e9)


MIN_WAIT_SHARE = 0.1
"""Share of a step's time below which the host did not wait for it, but only read its result."""


class StepTiming(NamedTuple):
    """A step and its times on the clock of the model.

    ns            from its launch or the previous result, whichever was later, to its own result
    called_ns     start of the launch; launched_ns: its end
    asked_ns      start of the read of the result; ready_ns: its end
    """

    plan: StepPlan
    ns: int
    called_ns: int
    launched_ns: int
    asked_ns: int
    ready_ns: int

    @property
    def finished_early(self) -> bool:
        """True where the device finished before the result was read, so `ns` is an upper bound."""
        return self.ready_ns - self.asked_ns < MIN_WAIT_SHARE * self.ns


class WallClockStep(NamedTuple):
    """A pending step that was launched from `called_ns` to `launched_ns`."""

    pending: PendingStep
    plan: StepPlan
    called_ns: int
    launched_ns: int
    model: WallClockModel

    def result(self) -> StepOutput:
        """Return the output of the model, and report the time of the read."""
        asked_ns = self.model.clock.now_ns
        output = self.pending.result()
        self.model.on_result(self, asked_ns)
        return output


class WallClockModel(ModelWrapper):
    """A model on the clock of the machine.

    timings     of every step, while `record` is true
    last_step   None: only the device has the begin and the end of a step
    """

    def __init__(self, model: Model, clock: WallClock, record: bool = False) -> None:
        super().__init__(model)
        self.last_step: VirtualClockStep | None = None
        self.clock = clock
        self.record = record
        self.timings: list[StepTiming] = []
        self._last_ready_ns = 0

    def forward(self, plan: StepPlan) -> WallClockStep:
        """Launch the plan, and note when."""
        called_ns = self.clock.now_ns
        step = self._model.forward(plan)
        return WallClockStep(step, plan, called_ns, self.clock.now_ns, self)

    def on_result(self, step: WallClockStep, asked_ns: int) -> None:
        """Record the timing of a step whose result was read just now."""
        now_ns = self.clock.now_ns
        if self.record:
            ns = max(1, now_ns - max(step.launched_ns, self._last_ready_ns))
            times = (step.called_ns, step.launched_ns, asked_ns, now_ns)
            self.timings.append(StepTiming(step.plan, ns, *times))
        self._last_ready_ns = now_ns
