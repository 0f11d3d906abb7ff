"""Clock and VirtualClockModel: steps that take the time of a cost model, on an integer clock.

Owns virtual time. Knows no workload and no scheduler: it receives plans. Reads no real clock, so
the time of the host does not leak into a run.

    host      |plan n|launch|............wait............|commit n-1|plan n+1|
    device           |------ step n-1 ------|------ step n ------|

The device runs one step at a time. A step begins when it is launched and the previous step has
ended. Its result is available at its end; waiting for it advances the clock.

    device           |-- step n --|        |-- step n+1 --|
    to device        |---- loads of n ----|                    a plan is a barrier for moves too
    to host          |- stores of n -|

Moves of a plan begin with its rows, both directions at once. The next step begins after them.
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


class LinkCost(NamedTuple):
    """Nanoseconds of the moves of a plan in one direction.

    move_ns    of each plan that has some
    block_ns   of each block
    """

    move_ns: int
    block_ns: int

    def moves_ns(self, num_blocks: int) -> int:
        """Return the time of so many blocks, 0 for none."""
        return self.move_ns + num_blocks * self.block_ns if num_blocks else 0


FREE_LINK = LinkCost(0, 0)


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
    link             durations of moves between device and host memory
    last_step        the step whose result was read last, or None
    device_free_ns   end of the last launched step and of its moves
    """

    def __init__(
        self, model: Model, clock: Clock, cost: CostModel, link: LinkCost = FREE_LINK
    ) -> None:
        super().__init__(model)
        self.clock = clock
        self.cost = cost
        self.link = link
        self.last_step: VirtualClockStep | None = None
        self.device_free_ns = 0

    def forward(self, plan: StepPlan) -> VirtualClockStep:
        """Launch the plan. Advances the clock over planning and launch."""
        self.clock.advance(self.cost.plan_ns(plan))
        step = self._model.forward(plan)
        begin_ns = max(self.clock.now_ns, self.device_free_ns)
        # A plan of moves alone launches no step.
        is_launched = plan.rows or plan.copies
        end_ns = begin_ns + (self.cost.step_ns(plan) if is_launched else 0)
        num_moved = max(len(plan.stores), len(plan.loads))
        self.device_free_ns = max(end_ns, begin_ns + self.link.moves_ns(num_moved))
        return VirtualClockStep(step, plan, begin_ns, end_ns, self)
