"""A world on the clock of the machine: requests, waits and metrics equal those in virtual time."""

from __future__ import annotations

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.seam import PendingStep, StepOutput, StepPlan
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.cost.simple import AffineCost
from forge.sim.length_model import LengthModel
from forge.sim.wall_clock import SPIN_NS, WallClock, WallClockModel
from forge.sim.workloads.workload import (
    FixedArrivals,
    PoissonWorkload,
    RequestArrival,
    create_request,
    fixed_lengths,
)
from forge.sim.world import World

MS = 1_000_000


class FakeClock:
    """A clock that advances on reads, on sleeps and on waits for a step.

    read_ns        nanoseconds that each read takes
    oversleep_ns   nanoseconds that each sleep exceeds its argument
    """

    def __init__(self, reading: int = 1, late: int = 0) -> None:
        self.time_ns = 5 * MS
        self.read_ns, self.oversleep_ns = reading, late
        self.sleeps: list[float] = []

    def now(self) -> int:
        self.time_ns += self.read_ns
        return self.time_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time_ns += round(seconds * 1e9) + self.oversleep_ns


class FakeDevice:
    """A model whose launches take 2 ms and whose device takes 10 ms a step, one step at a time."""

    def __init__(self, machine: FakeClock, launch_ms: int = 2) -> None:
        self._machine = machine
        self._launch_ns = launch_ms * MS
        self._model = LengthModel()
        self._free_ns = 0
        self.vocab_size = self._model.vocab_size
        self.num_layers = self._model.num_layers
        self.eos_token = self._model.eos_token

    def forward(self, plan: StepPlan) -> PendingStep:
        self._machine.time_ns += self._launch_ns
        self._free_ns = max(self._free_ns, self._machine.time_ns) + 10 * MS
        return _FakeStep(self._machine, self._free_ns, self._model.forward(plan))


class _FakeStep:
    def __init__(self, machine: FakeClock, end_ns: int, step: PendingStep) -> None:
        self._machine, self._end_ns, self._step = machine, end_ns, step

    def result(self) -> StepOutput:
        self._machine.time_ns = max(self._machine.time_ns, self._end_ns)
        return self._step.result()


def config(depth: int = 2) -> EngineConfig:
    return EngineConfig(num_blocks=64, block_size=16, depth=depth, max_num_seqs=8)


def world(
    machine: FakeClock, depth: int, *arrivals: tuple[int, int, int], launch_ms: int = 2
) -> tuple[World, WallClockModel]:
    """Return a world of requests, each (at_ns, prompt, output), on a fake machine."""
    clock = WallClock(machine.now, machine.sleep)
    live = WallClockModel(FakeDevice(machine, launch_ms), clock, record=True)
    listed = [
        (at, create_request(i, prompt, output)) for i, (at, prompt, output) in enumerate(arrivals)
    ]
    workload = FixedArrivals(tuple(RequestArrival(at, request) for at, request in listed))
    return World(Engine(live, config(depth)), live, workload), live


def test_the_clock_begins_when_it_is_made_and_is_never_before_what_was_waited_for():
    machine = FakeClock()
    clock = WallClock(machine.now, machine.sleep)
    assert 0 <= clock.now_ns < 10
    clock.wait_until(30 * MS)
    assert 30 * MS <= clock.now_ns < 30 * MS + 10
    clock.wait_until(1 * MS)
    assert machine.sleeps == [machine.sleeps[0]]
    assert machine.sleeps[0] <= (30 * MS - SPIN_NS) / 1e9


def test_a_sleep_that_is_too_long_ends_the_wait():
    machine = FakeClock(late=50 * MS)
    clock = WallClock(machine.now, machine.sleep)
    clock.wait_until(30 * MS)
    assert len(machine.sleeps) == 1
    assert clock.now_ns >= 79 * MS


def test_a_world_waits_for_arrivals_and_counts_from_their_times():
    machine = FakeClock()
    run, _ = world(machine, 1, (0, 4, 1), (100 * MS, 4, 1))
    measures = run.run()
    # Launched at once, because the machine was idle: 2 ms and 10 ms, and some reads.
    assert measures.ttft.count == 2
    assert 12 * MS <= measures.ttft.max_ns < 12 * MS + 100
    assert 112 * MS <= measures.end_ns < 112 * MS + 100


def test_a_request_that_came_during_a_step_counts_from_when_it_came():
    run, _ = world(FakeClock(), 1, (0, 4, 1), (3 * MS, 4, 1))
    measures = run.run()
    # The second waits for the end at 12 ms, then takes 12 ms itself.
    assert 21 * MS <= measures.ttft.max_ns < 21 * MS + 100


def test_the_time_of_a_step_is_that_of_the_device():
    _, live = ran = world(FakeClock(), 2, (0, 4, 4))
    ran[0].run()
    took = [step.ns for step in live.timings]
    assert len(took) == 4
    # The first is launched on an idle device, the others while one runs.
    assert all(10 * MS - 100 <= ns <= 10 * MS + 100 for ns in took)
    assert [step.plan.step for step in live.timings] == [0, 1, 2, 3]


def test_a_timing_has_the_times_of_launch_read_and_result():
    run, live = world(FakeClock(reading=0), 2, (0, 4, 4))
    run.run()
    times = [[ns // MS for ns in step[2:]] for step in live.timings]
    # Each is launched while the previous one runs, and read when that one was ready.
    assert times == [[0, 2, 4, 12], [2, 4, 14, 22], [12, 14, 24, 32], [22, 24, 32, 42]]
    assert not any(step.finished_early for step in live.timings)


def test_a_step_that_ends_before_its_result_is_read_finished_early():
    run, live = world(FakeClock(reading=0), 2, (0, 4, 4), launch_ms=15)
    run.run()
    times = [[ns // MS for ns in step[2:]] for step in live.timings]
    # A launch takes longer than a step, so each step ends before the launch of the next one does.
    # The last one has no next.
    assert times == [[0, 15, 30, 30], [15, 30, 45, 45], [30, 45, 60, 60], [45, 60, 60, 70]]
    assert [step.finished_early for step in live.timings] == [True, True, True, False]
    assert [step.ns // MS for step in live.timings] == [15, 15, 15, 10]


def test_timings_are_kept_only_while_recording():
    machine = FakeClock()
    live = WallClockModel(FakeDevice(machine), WallClock(machine.now, machine.sleep))
    World(Engine(live, config()), live, FixedArrivals(())).run()
    engine = Engine(live, config())
    engine.submit(create_request(0, 4, 4))
    while engine.has_work:
        engine.step()
    assert live.timings == []


def test_a_prediction_with_the_true_costs_equals_the_real_run():
    lengths = fixed_lengths(40, 6)
    machine = FakeClock(reading=100)
    live = WallClockModel(FakeDevice(machine), WallClock(machine.now, machine.sleep))
    workload = PoissonWorkload(30.0, 40, lengths)
    real = World(Engine(live, config()), live, workload).run()

    class Cost(AffineCost):
        def plan_ns(self, plan: StepPlan) -> int:
            return 2 * MS

    timed = VirtualClockModel(LengthModel(), Clock(), Cost(10 * MS, 0, 0))
    predicted = World(Engine(timed, config()), timed, workload).run()
    for name in ("ttft", "itl", "latency"):
        one, other = getattr(predicted, name), getattr(real, name)
        assert (one.count, one.total_ns) == (other.count, pytest.approx(other.total_ns, rel=1e-3))
        assert one.max_ns == pytest.approx(other.max_ns, rel=1e-3)
    assert predicted.end_ns == pytest.approx(real.end_ns, rel=1e-3)
