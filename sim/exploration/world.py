"""Tiny worlds: a scheduler with a few blocks, requests that come again and again, and all actions.

Owns the worlds, the actions that are possible in a state, and what each does. Knows no search. The
scheduler is the one that serves. No model runs: the tokens of a step are part of the action.

    add 0    add 1     a request of this kind arrives; it may arrive again after it has ended
    schedule           the next plan, while fewer than `depth` are in flight
    commit go end      commit the oldest plan: its first row goes on, its second samples an end id
    abort 1            the client of the second oldest live request disconnects
    commit fail go     the first row of the oldest plan has no result
    void               a step fails: every plan in flight is dropped
    resize 4, reset    the pool gets another size; every block is unpublished

Always true: every action is a value, so a path of actions leads to the same state in any process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from forge.config import EngineConfig
from forge.errors import NeverFits
from forge.invariants import PlanAudit, audit
from forge.policy import Policy
from forge.request import Delta, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import Row, RowOutput, StepOutput, StepPlan
from forge.sequence import GrammarMatcher

END_TOKEN, TOKEN, OTHER_TOKEN = range(3)
VOCAB_SIZE = 3

ADD, SCHEDULE, COMMIT = "add", "schedule", "commit"
ABORT, VOID, RESIZE, RESET = "abort", "void", "resize", "reset"
KINDS = (ADD, SCHEDULE, COMMIT, ABORT, VOID, RESIZE, RESET)
GO, END, FAIL = "go", "end", "fail"
OUTPUTS = {
    GO: RowOutput((TOKEN,)),
    END: RowOutput((END_TOKEN,)),
    FAIL: RowOutput(error="the row failed"),
}
NO_SAMPLE = RowOutput()

FAULTS = (ABORT, FAIL, VOID, RESET)
"""Kinds of faults besides the sizes of the pool."""


class Action(NamedTuple):
    """Something that happens to the scheduler.

    number     add: kind of request; abort: of the live requests, oldest first; resize: blocks
    outcomes   commit: of each row of a live sequence: go, end or fail
    """

    kind: str
    number: int = 0
    outcomes: tuple[str, ...] = ()

    @property
    def is_progress(self) -> bool:
        """True where it is an arrival, a plan or a result: what happens in a run without faults."""
        return self.kind in (ADD, SCHEDULE) or (self.kind == COMMIT and FAIL not in self.outcomes)

    def __str__(self) -> str:
        number = str(self.number) if self.kind in (ADD, ABORT, RESIZE) else ""
        return " ".join(filter(None, (self.kind, number, *self.outcomes)))


class TinyWorld(NamedTuple):
    """Sizes, requests and faults of a world.

    menu     requests with ids 0, 1, ...
    kinds    of each request: the lowest id of one that is equal but for the id. Requests of one
             kind are interchangeable
    faults   of FAULTS; none: nothing fails
    sizes    blocks that the pool may be resized to
    """

    name: str
    config: EngineConfig
    menu: tuple[Request, ...]
    kinds: tuple[int, ...]
    faults: tuple[str, ...] = FAULTS
    sizes: tuple[int, ...] = ()

    def with_depth(self, depth: int) -> TinyWorld:
        """Return the world with up to `depth` plans in flight. Raises InvalidConfig."""
        return self._replace(config=replace(self.config, depth=depth))

    def arriving_id(self, kind: int, scheduler: Scheduler) -> int | None:
        """Return the lowest id of a request of the kind that is not live, or None."""
        for request_id, other_kind in enumerate(self.kinds):
            if other_kind == kind and request_id not in scheduler.requests:
                return request_id
        return None


class State(NamedTuple):
    """The scheduler, and the audit that folds its plans."""

    scheduler: Scheduler
    plan_audit: PlanAudit


class AnyTokenMatcher:
    """Matcher that allows every token: its sequence is planned one commit at a time."""

    mask = b"\x07"

    def draft_masks(self, drafts: object) -> list[bytes]:
        """Return no mask: there are no drafts."""
        return []

    def feed(self, token: int) -> bool:
        """Return False: no output is complete before its length."""
        return False


MATCHER = AnyTokenMatcher()


def create_matcher(params: SamplingParams) -> GrammarMatcher | None:
    """Return the matcher of outputs with a structure."""
    return None if params.structure is None else MATCHER


def create_state(world: TinyWorld, policy: Policy) -> State:
    """Return the state of the world before anything happens."""
    scheduler = Scheduler(
        world.config, VOCAB_SIZE, (END_TOKEN,), policy, create_matcher=create_matcher
    )
    return State(scheduler, PlanAudit(scheduler))


def possible_actions(world: TinyWorld, state: State) -> Iterator[Action]:
    """Yield the actions of a state: those of an engine's loop first, then arrivals, then faults.

    States that are equal but for names have the same actions in the same order.
    """
    scheduler = state.scheduler
    if scheduler.sequences and len(scheduler.ledger) < world.config.depth:
        yield Action(SCHEDULE)
    if scheduler.ledger:
        rows = list(live_rows(scheduler, scheduler.ledger[0]))
        for outcomes in product(*[_outcomes(scheduler, row) for row in rows]):
            yield Action(COMMIT, outcomes=outcomes)
    for kind in sorted(set(world.kinds)):
        if world.arriving_id(kind, scheduler) is not None:
            yield Action(ADD, kind)
    if ABORT in world.faults:
        for index in range(len(scheduler.requests)):
            yield Action(ABORT, index)
    if scheduler.ledger and FAIL in world.faults:
        for index in range(len(rows)):
            outcomes = tuple(FAIL if index == i else GO for i in range(len(rows)))
            yield Action(COMMIT, outcomes=outcomes)
    if scheduler.ledger and VOID in world.faults:
        yield Action(VOID)
    if RESET in world.faults and scheduler.pool.num_published_blocks:
        yield Action(RESET)
    for num_blocks in world.sizes:
        if num_blocks != scheduler.pool.num_blocks:
            yield Action(RESIZE, num_blocks)


def _outcomes(scheduler: Scheduler, row: Row) -> tuple[str, ...]:
    """Return the outcomes of a row that did not fail."""
    can_end = END_TOKEN in scheduler.sequences[row.seq_id].stop_ids
    return (GO, END) if row.num_samples and can_end else (GO,)


def live_rows(scheduler: Scheduler, plan: StepPlan) -> Iterator[Row]:
    """Yield the rows of the plan whose sequences have not ended since."""
    return (row for row in plan.rows if row.seq_id in scheduler.sequences)


def perform(world: TinyWorld, state: State, action: Action) -> StepPlan | None:
    """Perform the action, and check it. Return the plan that it made, if any.

    Raises AssertionError where a check fails, and whatever the scheduler raises.
    """
    scheduler, kind = state.scheduler, action.kind
    expected = [(s.request.id, s.choice) for s in scheduler.sequences.values()]
    deltas: list[Delta] = []
    plan = None
    if kind == SCHEDULE:
        plan = scheduler.schedule()
        if plan is not None:
            state.plan_audit(plan)
            for row in plan.rows:
                assert not (row.masks and row.refs), f"row {row} has a mask from before its input"
    elif kind == COMMIT:
        oldest = scheduler.ledger[0]
        deltas = scheduler.commit(oldest, _output(scheduler, oldest, action.outcomes))
    elif kind == ADD:
        request_id = world.arriving_id(action.number, scheduler)
        assert request_id is not None, f"every request of kind {action.number} is live"
        request = world.menu[request_id]
        try:
            scheduler.add(request)
        except NeverFits:  # the pool is small now
            return None
        expected += [(request.id, choice) for choice in range(request.params.n)]
    elif kind == ABORT:
        deltas = scheduler.abort(list(scheduler.requests)[action.number])
    elif kind == VOID:
        deltas = scheduler.void("the step failed")
    elif kind == RESIZE:
        try:
            scheduler.resize(action.number)
        except NeverFits:  # a live request could not finish
            return None
    else:
        scheduler.reset_prefix_cache()
    for delta in deltas:
        assert (delta.request_id, delta.choice) in expected, f"{delta} is of no open choice"
        if delta.finish is not None:
            expected.remove((delta.request_id, delta.choice))
    open_choices = [(s.request.id, s.choice) for s in scheduler.sequences.values()]
    assert expected == open_choices, f"open choices are {open_choices}, deltas leave {expected}"
    return plan


def check(state: State) -> None:
    """Assert every invariant of the state, and two orders that `forge.invariants` leaves open."""
    scheduler = state.scheduler
    audit(scheduler)
    assert list(scheduler.pool.tables) == list(scheduler.running), "tables are in another order"
    assert list(scheduler.sequences) == sorted(scheduler.sequences), "sequences are out of order"


def _output(scheduler: Scheduler, plan: StepPlan, outcomes: tuple[str, ...]) -> StepOutput:
    """Return the output of the plan. Rows of ended sequences go on: their results are dropped."""
    remaining = iter(outcomes)
    rows = []
    for row in plan.rows:
        outcome = next(remaining) if row.seq_id in scheduler.sequences else GO
        rows.append(NO_SAMPLE if outcome == GO and not row.num_samples else OUTPUTS[outcome])
    return StepOutput(plan.step, tuple(rows))
