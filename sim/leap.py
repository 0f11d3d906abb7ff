"""Leap: over stretches in which nothing is decided, without making their plans.

Owns the shortcut, and with it a view into scheduler and engine that nobody else has. Works on a
LengthModel, whose tokens need no computing. What it must equal is the run step by step: the tests
compare the log, the measures and the state.

    stepwise   plan, launch, wait, commit; again and again         some 20 us a step
    a leap     n times the clock's recurrence; then n tokens, n positions, and the blocks and hashes
               of n steps, in the order in which the steps would have taken them

A stretch ends before anything can happen: an arrival, a sequence's end, a block that is not there.
It does not begin while somebody waits and a slot is free, or a prompt is computed. Its first plan
may tell of those who have ended.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple, TypeAlias

from forge.engine import Engine
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
        if not _leap(world, log) and not world.step():
            return world.measures


def _leap(world: World, log: Log | None) -> bool:
    """The world is some quiet steps further, or is as it was."""
    scheduler, model = world.engine.scheduler, world.model
    assert isinstance(model, TimedModel), "the world's clock is the machine's"
    if not _undecided(world, scheduler):
        return False
    sequences = list(scheduler.running.values())
    most = _most_steps(scheduler, sequences)
    if most < SHORTEST or not _alike(scheduler, sequences):
        return False
    plan = _plan(scheduler, sequences, 0)
    stretch = _timed(world, model, plan, most)
    steps = len(stretch.told_ns)
    if not steps:
        return False
    taken = _advance(scheduler, sequences, steps)
    scheduler._finished.clear()
    if scheduler.ledger:
        # Told are the plan in flight and all but the last: that one is in flight now.
        first, later = scheduler.ledger[0], [each for each in taken if each[0] < steps - 1]
        last = _taking(_plan(scheduler, sequences, -1), taken, steps - 1)
        _relaunch(world.engine, model, last, stretch)
    else:
        first = _taking(plan, taken, 0)
        later = [(step - 1, row, block) for step, row, block in taken if step]
    model.free_ns = stretch.end_ns
    world.clock.reach(stretch.told_ns[-1])
    world.measures.gain_each([s.request.id for s in sequences], stretch.told_ns)
    world.num_steps += steps
    world.engine.num_steps += steps
    if log is not None:
        log.committed(first, stretch.told_ns[0])
        if steps > 1:
            log.committed(_quiet(plan), stretch.told_ns[-1], steps - 1, later)
    return True


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


def _alike(scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    """The plan in flight and those to come are one more token of every running sequence."""
    ids = tuple(s.id for s in sequences)
    for plan in scheduler.ledger:
        if not is_quiet(plan) or tuple(row.seq_id for row in plan.rows) != ids:
            return False
    in_flight = len(scheduler.ledger)
    return all(
        s.num_pending == 1 - in_flight
        and s.num_output  # a prompt's last token alone looks like any other
        and s.watch is None
        and s.guide is None
        and s.params.n == 1
        and TOKEN not in s.stop_ids
        for s in sequences
    )


def _most_steps(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """Steps before a sequence ends, or blocks run out."""
    pool = scheduler.pool
    # The token behind them ends a sequence.
    steps = min([s.heed - len(s.tokens) for s in sequences]) - 1

    def missing(steps: int) -> int:
        ends = ((s.table.num_tokens + steps, len(s.table.blocks)) for s in sequences)
        # One that was preempted often holds more than it needs now: that is nobody else's.
        return sum(max(0, pool.blocks_for(end) - blocks) for end, blocks in ends)

    while steps >= SHORTEST and missing(steps) > pool.available:
        steps //= 2
    return steps


def _plan(scheduler: Scheduler, sequences: list[Sequence], ahead: int) -> StepPlan:
    """One more token of each sequence: the next plan, or with ahead = -1 the one made last."""
    rows = tuple(
        Row(s.id, s.epoch, s.slot or 0, s.table.num_tokens + ahead, (TOKEN,), num_samples=1)
        for s in sequences
    )
    pool, finished = scheduler.pool, tuple(scheduler._finished)
    step = scheduler._next_step + ahead
    return StepPlan(step, rows, pool.num_blocks, pool.block_size, finished=finished)


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
    return plan._replace(finished=())


def _timed(world: World, model: TimedModel, plan: StepPlan, most: int) -> _Stretch:
    """Up to `most` steps from `plan` on, none of which begins when an event is due."""
    cost, rows = model.cost, len(plan.rows)
    starts = [row.start for row in plan.rows]
    num_kv, most_kv = sum(starts), max(starts)
    decode_ns, later = cost.decode_ns, _quiet(plan)
    later_plan_ns, later_commit_ns = cost.plan_ns(later), cost.commit_ns(later)
    plan_ns, step_ns, commit_ns = cost.plan_ns(plan), cost.step_ns(plan), cost.commit_ns(plan)
    now_ns, free_ns = world.clock.now_ns, model.free_ns
    begin_ns = free_ns
    in_flight = bool(world.engine._in_flight)
    due_ns = inf if world.next_ns is None else world.next_ns
    told_ns: list[int] = []
    while now_ns < due_ns and len(told_ns) < most:
        now_ns += plan_ns
        begin_ns = now_ns if now_ns > free_ns else free_ns
        before_ns, free_ns = free_ns, begin_ns + step_ns
        awaited_ns = before_ns if in_flight else free_ns
        now_ns = commit_ns + (awaited_ns if awaited_ns > now_ns else now_ns)
        told_ns.append(now_ns)
        num_kv += rows
        most_kv += 1
        plan_ns, commit_ns = later_plan_ns, later_commit_ns
        step_ns = decode_ns(rows, num_kv, most_kv)
    return _Stretch(told_ns, begin_ns, free_ns)


def _advance(scheduler: Scheduler, sequences: list[Sequence], steps: int) -> list[Taken]:
    """`steps` tokens for each sequence; blocks and hashes in the order of the steps.

    The blocks that were taken, in the order of steps and rows.
    """
    # Tables are asked for blocks in their own order, results come in that of the rows.
    assert list(scheduler.pool.tables) == list(scheduler.running), "tables are not in order of rows"
    pool, sharing, size = scheduler.pool, scheduler.sharing, scheduler.config.block_size
    behind = len(scheduler.ledger)  # steps by which a commit is behind its plan
    events: list[tuple[int, int, int]] = []  # step, whether its commit, place of the row
    for place, s in enumerate(sequences):
        s.tokens += [TOKEN] * steps
        edge = s.table.capacity - s.table.num_tokens + 1
        events += [(step, 0, place) for step in range(edge, steps + 1, size)]
        if scheduler.config.enable_prefix_caching:
            # All at once: half of what they cost when each is published.
            sharing._hash(s, (s.committed + steps) // size)
            edge = size - s.committed % size
            events += [(step, 1, place) for step in range(edge, steps + 1, size)]
    events.sort()
    taken: list[Taken] = []
    for step, commits, place in events:
        s = sequences[place]
        if commits:
            sharing.publish(s, s.committed + step - 1, s.committed + step)
        else:
            s.table.num_tokens = s.table.capacity
            pool.lengthen((s.id,))
            taken.append((step - 1, place, s.table.blocks[-1]))
    for s in sequences:
        s.committed += steps
        s.table.num_tokens = s.committed + behind
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
