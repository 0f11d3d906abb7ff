"""Fast-forward: over stretches in which nothing is decided, without a plan for each step.

Owns the times of such a stretch and its lines in the log. Changes no sequence and no block: the
engine advances them. Works on a LengthModel, whose tokens need no computing. A run that is
fast-forwarded equals the run step by step in its log, its metrics and its state; tests compare.

    step by step   plan, launch, wait, commit; again and again        some 20 us a step
    fast-forward   n times the clock's recurrence, then one call      less than 1 us a step

A stretch ends before anything can be decided: an arrival, a missing block, and with one plan in
flight the end of a sequence. Without a plan in flight it ends with that end. Its first plan may
report sequences that finished before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from math import inf
from typing import NamedTuple

from forge.seam import StepPlan
from forge.sim.clock import VirtualClockModel, VirtualClockStep
from forge.sim.decision_log import DecisionLog
from forge.sim.length_model import FILLER_TOKEN, ONE_TOKEN, CompletedStep
from forge.sim.metrics import RunMetrics
from forge.sim.world import World
from forge.uniform_steps import BlockAllocation

MIN_STEPS = 2
"""Steps below which a fast-forward takes longer than the steps."""


class _StepTimes(NamedTuple):
    """Times of a stretch of steps.

    commit_times_ns              when the tokens of each committed step are delivered
    last_begin_ns, last_end_ns   of the step that is launched last
    """

    commit_times_ns: list[int]
    last_begin_ns: int
    last_end_ns: int


def run_fast_forward(world: World, log: DecisionLog | None = None) -> RunMetrics:
    """Run the world to its end, as `world.run` does, and return its metrics.

    log   the only observer of the world, or None
    """
    while True:
        world.process_events()
        if not _fast_forward(world, log) and not world.step_engine():
            return world.metrics


def _fast_forward(world: World, log: DecisionLog | None) -> bool:
    """Advance the world by some uniform steps, or return False and change nothing.

    False where fewer than MIN_STEPS are uniform, or a running request has several choices.
    """
    engine, model = world.engine, world.model
    assert isinstance(model, VirtualClockModel), "the world's clock is the machine's"
    max_steps = engine.num_uniform_steps(FILLER_TOKEN)
    if max_steps < MIN_STEPS:
        return False
    sequences = list(engine.scheduler.running.values())
    if any(s.params.n > 1 for s in sequences):
        return False
    in_flight = tuple(engine.scheduler.ledger)
    if not in_flight and model.device_free_ns > world.clock.now_ns:
        return False  # moves of the last plan go on
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.num_tokens == len(plan.rows) == len(sequences)
    times = _time_steps(world, model, plan, max_steps, len(in_flight))
    steps, now_ns = len(times.commit_times_ns), times.commit_times_ns[-1]

    def launch(last_plan: StepPlan) -> VirtualClockStep:
        output = CompletedStep(last_plan.step, (ONE_TOKEN,) * len(last_plan.rows))
        return VirtualClockStep(output, last_plan, times.last_begin_ns, times.last_end_ns, model)

    result = engine.fast_forward(steps, FILLER_TOKEN, launch)
    model.device_free_ns = times.last_end_ns
    world.clock.wait_until(now_ns)
    world.metrics.record_decode_steps([s.request.id for s in sequences], times.commit_times_ns)
    world.num_steps += steps
    if log is not None:
        _log_steps(log, (*in_flight, plan), result.allocations, times.commit_times_ns)
        log.on_step(None, result.deltas, now_ns)
    world.record_deltas(result.deltas, now_ns)
    world.queue_expiries(now_ns)
    return True


def _log_steps(
    log: DecisionLog,
    plans: tuple[StepPlan, ...],
    allocations: list[BlockAllocation],
    commit_times_ns: list[int],
) -> None:
    """Log the committed steps of a stretch: the first one, then all others at once.

    plans   the plan that was in flight, if any, and the first plan of the stretch
    """
    num_in_flight, steps, plan = len(plans) - 1, len(commit_times_ns), plans[-1]
    log.record_steps(plans[0], commit_times_ns[0])
    if steps > 1:
        later_allocations = [
            (k + num_in_flight - 1, row, block)
            for k, row, block in allocations
            if k + num_in_flight < steps
        ]
        if not num_in_flight:
            plan = _later_plan(plan)
        log.record_steps(plan, commit_times_ns[-1], steps - 1, later_allocations)


def _later_plan(plan: StepPlan) -> StepPlan:
    """Return what stands for every later plan of a stretch, in the log and in costs.

    It is `plan` without new blocks and without finished sequences.
    """
    rows = plan.rows
    if any(row.new_blocks for row in rows):
        rows = tuple(row._replace(new_blocks=()) if row.new_blocks else row for row in rows)
    return plan._replace(rows=rows, finished=()) if plan.finished or rows is not plan.rows else plan


def _time_steps(
    world: World, model: VirtualClockModel, plan: StepPlan, max_steps: int, num_in_flight: int
) -> _StepTimes:
    """Time up to `max_steps` steps from `plan` on, none of which begins when an event is due.

    num_in_flight   plans in flight before `plan`: 0 or 1
    """
    kv_lens = [row.start for row in plan.rows]
    rows, num_kv, most_kv = len(kv_lens), sum(kv_lens), max(kv_lens)
    steps_ns = map(
        model.cost.decode_ns, repeat(rows, max_steps), count(num_kv, rows), count(most_kv)
    )
    next_event_ns = inf if world.next_event_ns is None else world.next_event_ns
    time_steps = _time_pipelined if num_in_flight else _time_synchronous
    return time_steps(model, plan, steps_ns, next_event_ns)


def _time_synchronous(
    model: VirtualClockModel, plan: StepPlan, steps_ns: Iterator[int], next_event_ns: float
) -> _StepTimes:
    """Time steps each of which ends before the next is planned (depth 1)."""
    cost, now_ns = model.cost, model.clock.now_ns
    assert model.device_free_ns <= now_ns, (
        f"the device is at work until {model.device_free_ns}, now {now_ns}"
    )
    next(steps_ns)  # of the first step, whose plan may report finished sequences: timed below
    step_ns, commit_ns = cost.step_ns(plan), cost.commit_ns(plan)
    now_ns += cost.plan_ns(plan) + step_ns + commit_ns
    commit_times_ns = [now_ns]
    if now_ns < next_event_ns:
        next_plan = _later_plan(plan)
        commit_ns = cost.commit_ns(next_plan)
        host_ns = cost.plan_ns(next_plan) + commit_ns
        for step_ns in steps_ns:
            now_ns += host_ns + step_ns
            commit_times_ns.append(now_ns)
            if now_ns >= next_event_ns:
                break
    end_ns = now_ns - commit_ns
    return _StepTimes(commit_times_ns, end_ns - step_ns, end_ns)


def _time_pipelined(
    model: VirtualClockModel, plan: StepPlan, steps_ns: Iterator[int], next_event_ns: float
) -> _StepTimes:
    """Time steps each of which is planned while the one before runs (depth 2)."""
    plan_ns, commit_ns = model.cost.plan_ns(plan), model.cost.commit_ns(plan)
    now_ns = model.clock.now_ns
    begin_ns = end_ns = model.device_free_ns
    commit_times_ns: list[int] = []
    for step_ns in steps_ns:
        now_ns += plan_ns
        previous_end_ns, begin_ns = end_ns, max(now_ns, end_ns)
        end_ns = begin_ns + step_ns
        now_ns = max(now_ns, previous_end_ns) + commit_ns
        commit_times_ns.append(now_ns)
        if now_ns >= next_event_ns:
            break
    return _StepTimes(commit_times_ns, begin_ns, end_ns)
