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
from sim.clock import TimedModel, TimedStep
from sim.lengths import ONE, TOKEN, KnownStep
from sim.log import Log, is_quiet
from sim.measures import Measures
from sim.world import World

SHORTEST = 2
"""Steps below which a leap costs more than it saves."""


Taken: TypeAlias = tuple[int, int, int]
"""Step of a stretch, row and block: the row takes the block in that step."""


class _Stretch(NamedTuple):
    """Steps that were timed.

    told_ns            when the tokens of each step were told
    begin_ns, end_ns   of the step that was launched last
    """

    told_ns: list[int]
    begin_ns: int
    end_ns: int


def run_leaping(world: World, log: Log | None = None) -> Measures:
    """The world is run to its end, as `world.run` does. `log` must be its only watcher."""
    while True:
        world.happen()
        if not _leap(world, log) and not world.advance():
            return world.measures


def _leap(world: World, log: Log | None) -> bool:
    """The world is some quiet steps further, or is as it was."""
    scheduler, model = world.engine.scheduler, world.model
    assert isinstance(model, TimedModel), "the world's clock is the machine's"
    if not _undecided(world, scheduler):
        return False
    sequences = list(scheduler.running.values())
    most = _most_steps(scheduler, sequences)
    if most < SHORTEST or not _in_flight_alike(scheduler, sequences):
        return False
    plan = _plan(scheduler, sequences, 0)
    stretch = _timed(world, model, plan, most)
    steps = len(stretch.told_ns)
    taken = _advance(scheduler, sequences, steps)
    scheduler._finished.clear()
    in_flight = tuple(scheduler.ledger)
    if in_flight:
        last = _taking(_plan(scheduler, sequences, -1), taken, steps - 1)
        _relaunch(world.engine, model, last, stretch)
    model.free_ns = stretch.end_ns
    now_ns = stretch.told_ns[-1]
    world.clock.reach(now_ns)
    world.measures.gain_each([s.request.id for s in sequences], stretch.told_ns)
    world.num_steps += steps
    world.engine.num_steps += steps
    ended = [s for s in sequences if len(s.tokens) == s.limit]
    deltas = [scheduler._finish(s, FinishReason.LENGTH) for s in ended]
    if log is not None:
        _write(log, (*in_flight, plan), taken, stretch.told_ns)
        log.stepped(None, deltas, now_ns)
    world.tell(deltas, now_ns)
    return True


def _write(log: Log, plans: tuple[StepPlan, ...], taken: list[Taken], told_ns: list[int]) -> None:
    """The log has the steps that were told: the one in flight, if any, and those of the stretch."""
    behind, steps, plan = len(plans) - 1, len(told_ns), plans[-1]
    log.committed(plans[0] if behind else _taking(plan, taken, 0), told_ns[0])
    if steps > 1:
        later = [(k + behind - 1, row, block) for k, row, block in taken if 0 < k + behind < steps]
        log.committed(_quiet(plan), told_ns[-1], steps - 1, later)


def _undecided(world: World, scheduler: Scheduler) -> bool:
    """Somebody runs, nobody comes or goes, and the plans in flight are as many as there may be."""
    if scheduler._filling or scheduler._stepwise or not scheduler.running:
        return False
    if scheduler.waiting and scheduler._free_slots:
        return False
    # With a plan in flight that one still has a row of whoever has ended.
    if scheduler._admitted or scheduler._preempted or (scheduler._finished and scheduler.ledger):
        return False
    in_flight = len(scheduler.ledger)
    return not world.engine._undelivered and in_flight == scheduler.config.depth - 1


def _in_flight_alike(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    """The plan in flight is one more token of every running sequence."""
    ids = [s.id for s in sequences]
    return all(is_quiet(p) and [row.seq_id for row in p.rows] == ids for p in scheduler.ledger)


def _most_steps(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """Steps in which each sequence gains a token, the last maybe its last, and finds its block.

    Below SHORTEST where something else comes first.
    """
    pool, pending, left = scheduler.pool, 1 - len(scheduler.ledger), []
    for s in sequences:
        known = len(s.tokens)
        if known - s.table.num_tokens != pending or s.params.n > 1 or TOKEN in s.stop_ids:
            return 0
        if s.told < len(s.table.blocks):
            return 0  # a policy has passed it over when it had its block: its next row names that
        # 0 before the first token: a prompt's last token alone looks like any other.
        heed = s.plain_to
        if heed == s.limit - 1 and pending:
            heed = s.limit  # nobody has planned behind the end
        left.append(heed - known)
    steps = min(left)

    def missing(steps: int) -> int:
        ends = ((s.table.num_tokens + steps, len(s.table.blocks)) for s in sequences)
        # One that was preempted often holds more than it needs now: that is nobody else's.
        return sum(max(0, pool.blocks_for(end) - blocks) for end, blocks in ends)

    # Counted only where they could be too many.
    while steps >= SHORTEST and pool.available < len(sequences) * pool.blocks_for(steps):
        if missing(steps) <= pool.available:
            break
        steps //= 2
    return steps


def _plan(scheduler: Scheduler, sequences: list[Sequence], ahead: int) -> StepPlan:
    """One more token of each sequence: the next plan, or with ahead = -1 the one made last."""
    rows = []
    for s in sequences:
        start = s.table.num_tokens + ahead
        # By place, as the scheduler makes its own: a third of what names cost.
        row = (s.id, s.epoch, s.slot, start, (TOKEN,), (), 0, (), 1, None, (), ())
        rows.append(tuple.__new__(Row, row))
    pool, finished = scheduler.pool, tuple(scheduler._finished)
    step = scheduler._next_step + ahead
    return StepPlan(step, tuple(rows), pool.num_blocks, pool.block_size, finished=finished)


def _taking(plan: StepPlan, taken: list[Taken], step: int) -> StepPlan:
    """The plan with the blocks that its rows take, as step `step` of a stretch."""
    blocks = {row: block for k, row, block in taken if k == step}
    if not blocks:
        return plan
    rows = list(plan.rows)
    for row, block in blocks.items():
        rows[row] = rows[row]._replace(new_blocks=(block,))
    return plan._replace(rows=tuple(rows))


def _quiet(plan: StepPlan) -> StepPlan:
    """Those behind it take what this one takes, but for the tokens before."""
    return plan._replace(finished=()) if plan.finished else plan


def _timed(world: World, model: TimedModel, plan: StepPlan, most: int) -> _Stretch:
    """Up to `most` steps from `plan` on, none of which begins when an event is due."""
    starts = [row.start for row in plan.rows]
    rows, num_kv, most_kv = len(starts), sum(starts), max(starts)
    steps_ns = map(model.cost.decode_ns, repeat(rows, most), count(num_kv, rows), count(most_kv))
    due_ns = inf if world.next_ns is None else world.next_ns
    timed = _timed_ahead if world.engine._in_flight else _timed_alone
    return timed(model, plan, steps_ns, due_ns)


def _timed_alone(
    model: TimedModel, plan: StepPlan, steps_ns: Iterator[int], due_ns: float
) -> _Stretch:
    """Each step is awaited before the next is planned. The first may tell of those who ended."""
    cost, now_ns = model.cost, model.clock.now_ns
    assert model.free_ns <= now_ns, f"the device is at work until {model.free_ns}, now {now_ns}"
    next(steps_ns)  # that would be the first, had nobody ended
    step_ns, commit_ns = cost.step_ns(plan), cost.commit_ns(plan)
    now_ns += cost.plan_ns(plan) + step_ns + commit_ns
    told_ns = [now_ns]
    if now_ns < due_ns:
        later = _quiet(plan)
        commit_ns = cost.commit_ns(later)
        host_ns = cost.plan_ns(later) + commit_ns
        for step_ns in steps_ns:
            now_ns += host_ns + step_ns
            told_ns.append(now_ns)
            if now_ns >= due_ns:
                break
    end_ns = now_ns - commit_ns
    return _Stretch(told_ns, end_ns - step_ns, end_ns)


def _timed_ahead(
    model: TimedModel, plan: StepPlan, steps_ns: Iterator[int], due_ns: float
) -> _Stretch:
    """Each step is planned while the one before it is at work. All are quiet."""
    plan_ns, commit_ns = model.cost.plan_ns(plan), model.cost.commit_ns(plan)
    now_ns = model.clock.now_ns
    begin_ns = end_ns = model.free_ns
    told_ns: list[int] = []
    for step_ns in steps_ns:
        now_ns += plan_ns
        before_ns, begin_ns = end_ns, max(now_ns, end_ns)
        end_ns = begin_ns + step_ns
        now_ns = max(now_ns, before_ns) + commit_ns
        told_ns.append(now_ns)
        if now_ns >= due_ns:
            break
    return _Stretch(told_ns, begin_ns, end_ns)


def _advance(scheduler: Scheduler, sequences: list[Sequence], steps: int) -> list[Taken]:
    """`steps` tokens for each sequence; blocks and hashes in the order of the steps.

    The blocks that were taken, in the order of steps and rows.
    """
    # Tables are asked for blocks in their own order, results come in that of the rows.
    assert list(scheduler.pool.tables) == list(scheduler.running), "tables are not in order of rows"
    pool, sharing, size = scheduler.pool, scheduler.sharing, scheduler.config.block_size
    caching = scheduler.config.enable_prefix_caching
    events: list[tuple[int, bool, int]] = []  # step, whether its commit, place of the row
    for place, s in enumerate(sequences):
        edge = s.table.capacity - s.table.num_tokens + 1
        events += [(step, False, place) for step in range(edge, steps + 1, size)]
        s.tokens += [TOKEN] * steps
        s.table.num_tokens += steps
        if caching:
            edge = size - s.committed % size
            events += [(step, True, place) for step in range(edge, steps + 1, size)]
            # All at once: half of what they cost when each is published.
            sharing.hash_blocks(s, (s.committed + steps) // size)
        s.committed += steps
    events.sort()
    taken: list[Taken] = []
    if caching:
        for step, commits, place in events:
            s = sequences[place]
            if commits:
                end = s.committed - steps + step
                sharing.publish(s, end - 1, end)
            else:
                (block,) = pool.lengthen((s.id,))
                taken.append((step - 1, place, block))
    else:
        # Nobody finds a block again, so all can be taken before any is filled.
        blocks = pool.lengthen([sequences[place].id for _, _, place in events])
        taken = [(e[0] - 1, e[2], block) for e, block in zip(events, blocks, strict=True)]
    for s in sequences:
        s.told = len(s.table.blocks)
    scheduler.planned_tokens += steps * len(sequences)
    scheduler._next_step += steps
    return taken


def _relaunch(engine: Engine, model: TimedModel, plan: StepPlan, stretch: _Stretch) -> None:
    """The plan in flight is the last one of the stretch."""
    output = KnownStep(plan.step, (ONE,) * len(plan.rows))
    step = TimedStep(output, plan, stretch.begin_ns, stretch.end_ns, model)
    engine.scheduler.ledger[0] = plan
    engine._in_flight[0] = (plan, step)
