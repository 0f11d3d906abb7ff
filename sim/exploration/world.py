"""Tiny worlds: a scheduler with a few blocks, requests that come again and again, and all actions.

Owns the worlds, the actions that are possible in a state, and what each does. Knows no search. The
scheduler is the one that serves. No model runs: the tokens of a step are part of the action.

    add 0    add 1     a request of this kind arrives; it may arrive again after it has ended
    schedule           the next plan, while fewer than `depth` are in flight
    commit go end      commit the oldest plan: its first row goes on, its second samples an end id
    abort 1            the client of the second oldest live request disconnects
    end 0, expire 0    the client ends the oldest open session; it was paused for too long
    commit fail go     the first row of the oldest plan has no result
    void               a step fails: every plan in flight is dropped
    resize 4, reset    the pool gets another size; every block is unpublished

Always true: every action is a value, so a path of actions leads to the same state in any process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import NamedTuple

from forge.config import EngineConfig
from forge.errors import NeverFits
from forge.invariants import PlanAudit, audit
from forge.policy import Policy
from forge.request import Delta, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import Row, RowOutput, StepOutput, StepPlan
from forge.sequence import GrammarMatcher
from forge.sessions import Session

END_TOKEN, TOKEN, OTHER_TOKEN = range(3)
VOCAB_SIZE = 3

ADD, SCHEDULE, COMMIT = "add", "schedule", "commit"
ABORT, VOID, RESIZE, RESET = "abort", "void", "resize", "reset"
END_SESSION, EXPIRE = "end", "expire"
KINDS = (ADD, SCHEDULE, COMMIT, ABORT, VOID, RESIZE, RESET, END_SESSION, EXPIRE)
GO, END, FAIL = "go", "end", "fail"
OUTPUTS = {
    GO: RowOutput((TOKEN,)),
    END: RowOutput((END_TOKEN,)),
    FAIL: RowOutput(error="the row failed"),
}
NO_SAMPLE = RowOutput()

FAULTS = (ABORT, FAIL, VOID, RESET)
"""Kinds of faults besides the sizes of the pool."""

CLOSES = (END_SESSION, EXPIRE)
"""Ways in which a session closes: by its client, or by a timer while it is paused."""

PROGRESS = (ADD, SCHEDULE, COMMIT, *CLOSES)


class Action(NamedTuple):
    """Something that happens to the scheduler.

    number     add: kind of request; abort: of the live requests, oldest first; resize: blocks; end,
               expire: of the open sessions, oldest first
    outcomes   commit: of each row of a live sequence: go, end or fail
    """

    kind: str
    number: int = 0
    outcomes: tuple[str, ...] = ()

    @property
    def is_progress(self) -> bool:
        """True where it happens in a run without faults: an arrival, a plan, a result, a close."""
        return self.kind in PROGRESS and FAIL not in self.outcomes

    def __str__(self) -> str:
        number = str(self.number) if self.kind in (ADD, ABORT, RESIZE, *CLOSES) else ""
        return " ".join(filter(None, (self.kind, number, *self.outcomes)))


class TinyWorld(NamedTuple):
    """Sizes, requests and faults of a world.

    menu     requests with ids 0, 1, ...
    kinds    of each request: the lowest id of one that is equal but for the id. Requests of one
             kind are interchangeable
    faults   of FAULTS and CLOSES; none: nothing fails
    sizes    blocks that the pool may be resized to

    The id of a request can name a recognised session. A request that arrives once more then has
    the next free one of the ids that are equal modulo the size of the menu.
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

    def kind(self, request_id: int) -> int:
        """Return the kind of a request."""
        return self.kinds[request_id % len(self.menu)]

    def arriving_number(self, kind: int, scheduler: Scheduler) -> int | None:
        """Return the number in the menu of the next request of the kind, or None: all are live."""
        live = [request_id % len(self.menu) for request_id in scheduler.requests]
        for number, other_kind in enumerate(self.kinds):
            if other_kind == kind and number not in live:
                return number
        return None

    def create_request(self, number: int, scheduler: Scheduler) -> Request:
        """Return the request of the menu, with an id that names no session."""
        named = {name for _, name in (*scheduler.sessions, *scheduler.session_tips.values())}
        request_id = next(i for i in count(number, len(self.menu)) if i not in named)
        return _with_id(self.menu[number], request_id)


@cache
def _with_id(request: Request, request_id: int) -> Request:
    return replace(request, id=request_id)


class State(NamedTuple):
    """The scheduler, and the audit that folds its plans."""

    scheduler: Scheduler
    plan_audit: PlanAudit


class AnyTokenMatcher(GrammarMatcher):
    """Matcher that allows every token. Planned ahead, its rows get their masks one plan later."""

    mask = b"\x07"

    def draft_masks(self, drafts: object) -> list[bytes]:
        """Return no mask: there are no drafts."""
        return []

    def feed(self, token: int) -> bool:
        """Return False: no output is complete before its length."""
        return False

    def check_end(self) -> None:
        """Allow every end."""


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
    if scheduler.can_plan and len(scheduler.ledger) < world.config.depth:
        yield Action(SCHEDULE)
    has_result = bool(scheduler.ledger) and not awaits_masks(scheduler)
    if has_result:
        rows = list(live_rows(scheduler, scheduler.ledger[0]))
        for outcomes in product(*[_outcomes(scheduler, row) for row in rows]):
            yield Action(COMMIT, outcomes=outcomes)
    for kind in sorted(set(world.kinds)):
        if world.arriving_number(kind, scheduler) is not None:
            yield Action(ADD, kind)
    # Where all wait for a paused session its timer always ends that.
    can_expire = EXPIRE in world.faults or (scheduler.sequences and not scheduler.can_plan)
    for index, session in enumerate(scheduler.sessions.values()):
        if END_SESSION in world.faults and not session.has_ended:
            yield Action(END_SESSION, index)
        if can_expire and session.is_paused:
            yield Action(EXPIRE, index)
    if ABORT in world.faults:
        for index in range(len(scheduler.requests)):
            yield Action(ABORT, index)
    if has_result and FAIL in world.faults:
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


def awaits_masks(scheduler: Scheduler) -> bool:
    """Return whether the only plan in flight has no result before the next plan: a row is late."""
    if len(scheduler.ledger) != 1:
        return False
    plan = scheduler.ledger[0]
    return any(plan.rows[index].seq_id in scheduler.sequences for index in plan.late_rows)


def live_rows(scheduler: Scheduler, plan: StepPlan) -> Iterator[Row]:
    """Yield the rows of the plan whose sequences have not ended since."""
    return (row for row in plan.rows if row.seq_id in scheduler.sequences)


def perform(world: TinyWorld, state: State, action: Action) -> StepPlan | None:
    """Perform the action, and check it. Return the plan that it made, if any.

    Raises AssertionError where a check fails, and whatever the scheduler raises.
    """
    scheduler, kind = state.scheduler, action.kind
    expected = [(s.request.id, s.choice) for s in scheduler.sequences.values()]
    paused_before = {s.last_turn for s in scheduler.sessions.values() if s.is_paused}
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
        number = world.arriving_number(action.number, scheduler)
        assert number is not None, f"every request of kind {action.number} is live"
        request = world.create_request(number, scheduler)
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
    elif kind == RESET:
        scheduler.reset_prefix_cache()
    else:
        _close_session(scheduler, list(scheduler.sessions.values())[action.number], kind)
    newly_paused = {s.last_turn for s in scheduler.sessions.values() if s.is_paused} - paused_before
    assert {s.last_turn for s in scheduler.take_paused_sessions()} == newly_paused, "timers"
    for delta in deltas:
        assert (delta.request_id, delta.choice) in expected, f"{delta} is of no open choice"
        if delta.finish is not None:
            expected.remove((delta.request_id, delta.choice))
    open_choices = [(s.request.id, s.choice) for s in scheduler.sequences.values()]
    assert expected == open_choices, f"open choices are {open_choices}, deltas leave {expected}"
    return plan


def _close_session(scheduler: Scheduler, session: Session, kind: str) -> None:
    was_paused = session.is_paused
    if kind == END_SESSION:
        assert scheduler.end_session(session.key), "an open session was not found"
    else:
        assert not scheduler.expire_session(session.key, session.last_turn - 1), "an old timer"
        assert scheduler.expire_session(session.key, session.last_turn), "it has not expired"
    is_open = scheduler.sessions.get(session.key) is session
    assert is_open != was_paused, "a session closes when no request of it is live"


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
