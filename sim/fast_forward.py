"""Leap: over stretches in which nothing is decided, without making their plans.

Owns the shortcut, and with it a view into scheduler and engine that nobody else has. Works on a
LengthModel, whose tokens need no computing. What it must equal is the run step by step: the tests
compare the log, the measures and the state.

    stepwise   plan, launch, wait, commit; again and again         some 20 us a step
    a leap     n times the clock's recurrence; then n tokens, n positions, and the blocks and hashes
               of n steps, in the order in which the steps would have taken them

A stretch ends before anything can happen: an arrival, a block that is not there. With one step in
flight it ends with that in which a sequence has its last token; where plans are ahead of tokens,
before it. It does not begin while somebody waits and a slot is free, or a prompt is computed. Its
first plan may tell of those who have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from math import inf
from typing import NamedTuple, TypeAlias

from forge.engine import Engine
from forge.request import FinishReason
from forge.scheduler import Scheduler
from forge.seam import Row, StepPlan
from forge.sequence import Sequence
from forge.sim.clock import VirtualClockModel, VirtualClockStep
from forge.sim.decision_log import DecisionLog, is_uniform
from forge.sim.length_model import FILLER_TOKEN, ONE_TOKEN, CompletedStep
from forge.sim.metrics import RunMetrics
from forge.sim.world import World

MIN_STEPS = 2
"""Steps below which a leap costs more than it saves."""


BlockAllocation: TypeAlias = tuple[int, int, int]
"""Step of a stretch, row and block: the row takes the block in that step."""


class _StepTimes(NamedTuple):
    """Steps that were timed.

    commit_times_ns              when the tokens of each step were told
    last_begin_ns, last_end_ns   of the step that was launched last
    """

    commit_times_ns: list[int]
    last_begin_ns: int
    last_end_ns: int


def run_fast_forward(world: World, log: DecisionLog | None = None) -> RunMetrics:
    """The world is run to its end, as `world.run` does. `log` must be its only watcher."""
    while True:
        world.process_events()
        if not _fast_forward(world, log) and not world.step_engine():
            return world.metrics


def _fast_forward(world: World, log: DecisionLog | None) -> bool:
    """The world is some quiet steps further, or is as it was."""
    scheduler, model = world.engine.scheduler, world.model
    assert isinstance(model, VirtualClockModel), "the world's clock is the machine's"
    if not _can_fast_forward(world, scheduler):
        return False
    sequences = list(scheduler.running.values())
    max_steps = _max_steps(scheduler, sequences)
    if max_steps < MIN_STEPS or not _has_same_rows_in_flight(scheduler, sequences):
        return False
    plan = _create_decode_plan(scheduler, sequences, 0)
    times = _time_steps(world, model, plan, max_steps)
    steps = len(times.commit_times_ns)
    allocations = _advance_sequences(scheduler, sequences, steps)
    scheduler._finished_events.clear()
    in_flight = tuple(scheduler.ledger)
    if in_flight:
        last_plan = _with_new_blocks(
            _create_decode_plan(scheduler, sequences, -1), allocations, steps - 1
        )
        _replace_in_flight(world.engine, model, last_plan, times)
    model.device_free_ns = times.last_end_ns
    now_ns = times.commit_times_ns[-1]
    world.clock.wait_until(now_ns)
    world.metrics.record_decode_steps([s.request.id for s in sequences], times.commit_times_ns)
    world.num_steps += steps
    world.engine.num_steps += steps
    finished = [s for s in sequences if len(s.tokens) == s.max_len]
    deltas = [scheduler._finish(s, FinishReason.LENGTH) for s in finished]
    if log is not None:
        _log_steps(log, (*in_flight, plan), allocations, times.commit_times_ns)
        log.on_step(None, deltas, now_ns)
    world.record_deltas(deltas, now_ns)
    return True


def _log_steps(
    log: DecisionLog,
    plans: tuple[StepPlan, ...],
    allocations: list[BlockAllocation],
    commit_times_ns: list[int],
) -> None:
    """The log has the steps that were told: the one in flight, if any, and those of the stretch."""
    num_in_flight, steps, plan = len(plans) - 1, len(commit_times_ns), plans[-1]
    log.record_steps(
        plans[0] if num_in_flight else _with_new_blocks(plan, allocations, 0), commit_times_ns[0]
    )
    if steps > 1:
        later_allocations = [
            (k + num_in_flight - 1, row, block)
            for k, row, block in allocations
            if 0 < k + num_in_flight < steps
        ]
        log.record_steps(_without_finished(plan), commit_times_ns[-1], steps - 1, later_allocations)


def _can_fast_forward(world: World, scheduler: Scheduler) -> bool:
    """Somebody runs, nobody comes or goes, and the plans in flight are as many as there may be."""
    if scheduler._prefilling or scheduler._gate.sequences or not scheduler.running:
        return False
    if scheduler.waiting and scheduler._free_slots:
        return False
    # With a plan in flight that one still has a row of whoever has ended.
    if (
        scheduler._admitted_events
        or scheduler._preempted_events
        or (scheduler._finished_events and scheduler.ledger)
    ):
        return False
    in_flight = len(scheduler.ledger)
    return not world.engine._undelivered_deltas and in_flight == scheduler.config.depth - 1


def _has_same_rows_in_flight(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    """The plan in flight is one more token of every running sequence."""
    ids = [s.id for s in sequences]
    return all(is_uniform(p) and [row.seq_id for row in p.rows] == ids for p in scheduler.ledger)


def _max_steps(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """Steps in which each sequence gains a token, the last maybe its last, and finds its block.

    Below SHORTEST where something else comes first.
    """
    pool, pending, steps_left = scheduler.pool, 1 - len(scheduler.ledger), []
    for s in sequences:
        num_tokens = len(s.tokens)
        if (
            num_tokens - s.table.num_tokens != pending
            or s.params.n > 1
            or FILLER_TOKEN in s.stop_ids
        ):
            return 0
        if s.num_synced_blocks < len(s.table.blocks):
            return 0  # a policy has passed it over when it had its block: its next row names that
        # 0 before the first token: a prompt's last token alone looks like any other.
        inspect_from = s.inspect_from
        if inspect_from == s.max_len - 1 and pending:
            inspect_from = s.max_len  # nobody has planned behind the end
        steps_left.append(inspect_from - num_tokens)
    steps = min(steps_left)

    def num_missing_blocks(steps: int) -> int:
        ends = ((s.table.num_tokens + steps, len(s.table.blocks)) for s in sequences)
        # One that was preempted often holds more than it needs now: that is nobody else's.
        return sum(max(0, pool.num_blocks_for(end) - blocks) for end, blocks in ends)

    # Counted only where they could be too many.
    while steps >= MIN_STEPS and pool.num_free_blocks < len(sequences) * pool.num_blocks_for(steps):
        if num_missing_blocks(steps) <= pool.num_free_blocks:
            break
        steps //= 2
    return steps


def _create_decode_plan(
    scheduler: Scheduler, sequences: list[Sequence], step_offset: int
) -> StepPlan:
    """One more token of each sequence: the next plan, or with ahead = -1 the one made last."""
    rows = []
    for s in sequences:
        start = s.table.num_tokens + step_offset
        # By place, as the scheduler makes its own: a third of what names cost.
        row = (s.id, s.epoch, s.slot, start, (FILLER_TOKEN,), (), 0, (), 1, None, (), ())
        rows.append(tuple.__new__(Row, row))
    pool, finished = scheduler.pool, tuple(scheduler._finished_events)
    step = scheduler._next_step + step_offset
    return StepPlan(step, tuple(rows), pool.num_blocks, pool.block_size, finished=finished)


def _with_new_blocks(plan: StepPlan, allocations: list[BlockAllocation], step: int) -> StepPlan:
    """The plan with the blocks that its rows take, as step `step` of a stretch."""
    blocks = {row: block for k, row, block in allocations if k == step}
    if not blocks:
        return plan
    rows = list(plan.rows)
    for row, block in blocks.items():
        rows[row] = rows[row]._replace(new_blocks=(block,))
    return plan._replace(rows=tuple(rows))


def _without_finished(plan: StepPlan) -> StepPlan:
    """Those behind it take what this one takes, but for the tokens before."""
    return plan._replace(finished=()) if plan.finished else plan


def _time_steps(
    world: World, model: VirtualClockModel, plan: StepPlan, max_steps: int
) -> _StepTimes:
    """Up to `max_steps` steps from `plan` on, none of which begins when an event is due."""
    kv_lens = [row.start for row in plan.rows]
    rows, num_kv, most_kv = len(kv_lens), sum(kv_lens), max(kv_lens)
    steps_ns = map(
        model.cost.decode_ns, repeat(rows, max_steps), count(num_kv, rows), count(most_kv)
    )
    next_event_ns = inf if world.next_event_ns is None else world.next_event_ns
    time_steps = _time_pipelined if world.engine._in_flight else _time_synchronous
    return time_steps(model, plan, steps_ns, next_event_ns)


def _time_synchronous(
    model: VirtualClockModel, plan: StepPlan, steps_ns: Iterator[int], next_event_ns: float
) -> _StepTimes:
    """Each step is awaited before the next is planned. The first may tell of those who ended."""
    cost, now_ns = model.cost, model.clock.now_ns
    assert model.device_free_ns <= now_ns, (
        f"the device is at work until {model.device_free_ns}, now {now_ns}"
    )
    next(steps_ns)  # that would be the first, had nobody ended
    step_ns, commit_ns = cost.step_ns(plan), cost.commit_ns(plan)
    now_ns += cost.plan_ns(plan) + step_ns + commit_ns
    commit_times_ns = [now_ns]
    if now_ns < next_event_ns:
        next_plan = _without_finished(plan)
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
    """Each step is planned while the one before it is at work. All are quiet."""
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


def _advance_sequences(
    scheduler: Scheduler, sequences: list[Sequence], steps: int
) -> list[BlockAllocation]:
    """`steps` tokens for each sequence; blocks and hashes in the order of the steps.

    The blocks that were taken, in the order of steps and rows.
    """
    # Tables are asked for blocks in their own order, results come in that of the rows.
    assert list(scheduler.pool.tables) == list(scheduler.running), "tables are not in order of rows"
    pool, sharing, size = scheduler.pool, scheduler.prefix_cache, scheduler.config.block_size
    caching = scheduler.config.enable_prefix_caching
    events: list[tuple[int, bool, int]] = []  # step, whether its commit, place of the row
    for row_index, s in enumerate(sequences):
        first_step = s.table.capacity - s.table.num_tokens + 1
        events += [(step, False, row_index) for step in range(first_step, steps + 1, size)]
        s.tokens += [FILLER_TOKEN] * steps
        s.table.num_tokens += steps
        if caching:
            first_step = size - s.num_committed % size
            events += [(step, True, row_index) for step in range(first_step, steps + 1, size)]
            # All at once: half of what they cost when each is published.
            sharing.extend_hashes(s, (s.num_committed + steps) // size)
        s.num_committed += steps
    events.sort()
    allocations: list[BlockAllocation] = []
    if caching:
        for step, is_commit, row_index in events:
            s = sequences[row_index]
            if is_commit:
                end = s.num_committed - steps + step
                sharing.publish(s, end - 1, end)
            else:
                (block,) = pool.grow_full_tables((s.id,))
                allocations.append((step - 1, row_index, block))
    else:
        # Nobody finds a block again, so all can be taken before any is filled.
        blocks = pool.grow_full_tables([sequences[row_index].id for _, _, row_index in events])
        allocations = [(e[0] - 1, e[2], block) for e, block in zip(events, blocks, strict=True)]
    for s in sequences:
        s.num_synced_blocks = len(s.table.blocks)
    scheduler.num_planned_tokens += steps * len(sequences)
    scheduler._next_step += steps
    return allocations


def _replace_in_flight(
    engine: Engine, model: VirtualClockModel, plan: StepPlan, stretch: _StepTimes
) -> None:
    """The plan in flight is the last one of the stretch."""
    output = CompletedStep(plan.step, (ONE_TOKEN,) * len(plan.rows))
    step = VirtualClockStep(output, plan, stretch.last_begin_ns, stretch.last_end_ns, model)
    engine.scheduler.ledger[0] = plan
    engine._in_flight[0] = (plan, step)
