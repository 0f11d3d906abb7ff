"""Leap: over stretches in which nothing is decided, without making their plans.

Owns the shortcut, and with it a view into scheduler and engine that nobody else has. Works on a
LengthModel, whose tokens need no computing. What it must equal is the run step by step: the tests
compare the log, the measures and the state.

    stepwise   plan, launch, wait, commit; again and again         some 20 us a step
    a leap     n times the clock's recurrence; then n tokens, n positions, and the blocks and hashes
               of n steps, in the order in which the steps would have taken them

A stretch ends before anything can happen: an arrival, a sequence near its end, a block that is not
there. It does not begin while somebody waits and a slot is free, or a prompt is computed.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.scheduler import Scheduler
from forge.seam import Row, StepOutput, StepPlan
from forge.sequence import Sequence
from sim.clock import TimedStep
from sim.lengths import ONE, TOKEN, KnownStep
from sim.log import Log, is_quiet
from sim.measures import Measures
from sim.world import World

SHORTEST = 2
"""Steps below which a leap costs more than it saves."""


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
    scheduler = world.engine.scheduler
    sequences = list(scheduler.running.values())
    if not _undecided(world, scheduler, sequences):
        return False
    most = _most_steps(scheduler, sequences)
    if most < SHORTEST:
        return False
    plan = _plan(scheduler, sequences, 0)
    stretch = _timed(world, plan, most)
    steps = len(stretch.told_ns)
    if not steps:
        return False
    _advance(scheduler, sequences, steps)
    if scheduler.ledger:
        _relaunch(world, _plan(scheduler, sequences, -1), stretch)
    world.model.free_ns = stretch.end_ns
    world.clock.reach(stretch.told_ns[-1])
    world.measures.gain_each([s.request.id for s in sequences], stretch.told_ns)
    world.num_steps += steps
    world.engine.num_steps += steps
    if log is not None:
        log.committed(plan, stretch.told_ns[-1], steps)
    return True


def _undecided(world: World, scheduler: Scheduler, sequences: list[Sequence]) -> bool:
    """The plan in flight and the next are one more token of every running sequence."""
    if scheduler._filling or scheduler._stepwise or not sequences:
        return False
    if scheduler.waiting and scheduler._free_slots:
        return False
    if scheduler._admitted or scheduler._preempted or scheduler._finished:
        return False
    if world.engine._undelivered or len(scheduler.ledger) != scheduler.config.depth - 1:
        return False
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
    """Steps before a sequence comes near its end, or blocks run out."""
    pool = scheduler.pool
    steps = min(s.heed - len(s.tokens) for s in sequences) - 2

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
    step = scheduler._next_step + ahead
    return StepPlan(step, rows, scheduler.pool.num_blocks, scheduler.pool.block_size)


def _timed(world: World, plan: StepPlan, most: int) -> _Stretch:
    """Up to `most` steps from `plan` on, none of which begins when an event is due."""
    cost, rows = world.model.cost, len(plan.rows)
    starts = [row.start for row in plan.rows]
    num_kv, most_kv = sum(starts), max(starts)
    plan_ns, commit_ns = cost.plan_ns(plan), cost.commit_ns(plan)
    now_ns, free_ns, due_ns = world.clock.now_ns, world.model.free_ns, world.next_ns
    in_flight = world.engine._in_flight
    begin_ns = awaited_ns = free_ns
    if in_flight:
        pending = in_flight[0][1]
        assert isinstance(pending, TimedStep), "the engine's model is on no clock"
        awaited_ns = pending.end_ns
    told_ns: list[int] = []
    while len(told_ns) < most and (due_ns is None or now_ns < due_ns):
        now_ns += plan_ns
        begin_ns = now_ns if now_ns > free_ns else free_ns
        free_ns = begin_ns + cost.decode_ns(rows, num_kv, most_kv)
        if not in_flight:
            awaited_ns = free_ns
        if awaited_ns > now_ns:
            now_ns = awaited_ns
        awaited_ns = free_ns
        now_ns += commit_ns
        told_ns.append(now_ns)
        num_kv += rows
        most_kv += 1
    return _Stretch(told_ns, begin_ns, free_ns)


def _advance(scheduler: Scheduler, sequences: list[Sequence], steps: int) -> None:
    """`steps` tokens for each sequence; blocks and hashes in the order of the steps."""
    pool, size = scheduler.pool, scheduler.config.block_size
    behind = len(scheduler.ledger)  # steps by which a commit is behind its plan
    before = {s.id: s.table.num_tokens for s in sequences}
    places = {seq_id: place for place, seq_id in enumerate(pool.tables)}
    events: list[tuple[int, int, int, Sequence]] = []
    for place, s in enumerate(sequences):
        first = s.table.capacity - before[s.id] + 1
        events += ((i, 0, places[s.id], s) for i in range(first, steps + 1, size))
        first = (behind - before[s.id]) % size or size
        events += ((i, 1, place, s) for i in range(first, steps + 1, size))
        s.tokens += [TOKEN] * steps
    events.sort(key=lambda event: event[:3])
    for step, commits, _, s in events:
        if commits:
            end = before[s.id] + step - behind
            scheduler.sharing.publish(s, end - 1, end)
        else:
            s.table.num_tokens = before[s.id] + step - 1
            pool.grow(s.id, 1)
    for s in sequences:
        s.table.num_tokens = before[s.id] + steps
        s.committed += steps
        s.told = len(s.table.blocks)
    scheduler.planned_tokens += steps * len(sequences)
    scheduler._next_step += steps


def _relaunch(world: World, plan: StepPlan, stretch: _Stretch) -> None:
    """The plan in flight is the last one of the stretch."""
    output = StepOutput(plan.step, (ONE,) * len(plan.rows))
    step = TimedStep(KnownStep(output), plan, stretch.begin_ns, stretch.end_ns, world.model)
    world.engine.scheduler.ledger[0] = plan
    world.engine._in_flight[0] = (plan, step)
