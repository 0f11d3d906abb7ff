"""Exploration with sessions: whole worlds, planted bugs, and states that are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Waiting
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forge.blocks import BlockHash, BlockPool
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.policies import policy_names
from forge.policy import FCFS, Candidate, Policy, PolicyContext
from forge.policy_loader import load_policy
from forge.request import Request
from forge.scheduler import Scheduler
from forge.sessions import Session, SessionKey, SessionTable
from forge.sim.exploration import reads as reads_module
from forge.sim.exploration.canonical import Canonicaliser
from forge.sim.exploration.drawing import draw
from forge.sim.exploration.reads import EVERYTHING, NOTHING, REFUSED, Reads, explored_policy
from forge.sim.exploration.search import STARVATION, Counterexample, Report, Search
from forge.sim.exploration.snapshots import Snapshots
from forge.sim.exploration.world import (
    ADD,
    COMMIT,
    GO,
    SCHEDULE,
    Action,
    State,
    TinyWorld,
    create_state,
    perform,
    possible_actions,
)
from forge.sim.exploration.worlds import WORLDS, find_world
from tests.sim.test_exploration import NUM_STATES as WORLDS_WITHOUT
from tests.sim.test_exploration import cycle_of, names, path_of, walk

SESSION_POLICIES = ("fcfs", "session-fcfs", "working-set")


def explore(name: str, depth: int, policy: str, max_states: int = 200_000) -> Report:
    world = find_world(name, depth)
    explored, reads = explored_policy(policy, world)
    return Search(world, explored, reads=reads).run(max_states)


# Whole worlds.

NUM_STATES = {
    ("sessions", "fcfs"): 9848,
    ("sessions", "working-set"): 122_710,
    ("recognised", "fcfs"): 8893,
    ("recognised", "working-set"): 67_764,
    ("crowded", "fcfs"): 1354,
    ("crowded", "working-set"): 3205,
    ("agents", "fcfs"): 10021,
    ("agents", "session-fcfs"): 16644,
    ("agents", "working-set"): 98_482,
}
"""World, policy -> its states with one plan in flight."""

REACHES = {
    "sessions": ("end", "expire", "prefix hit"),
    "recognised": ("end", "expire", "prefix hit"),
    "agents": ("expire", "prefix hit", "preempted", "resumed"),
    "crowded": ("add",),
}


def marks(name: str, policy: str) -> pytest.MarkDecorator:
    """Return the mark of a world that takes seconds, or more than five."""
    return pytest.mark.soak if NUM_STATES[name, policy] > 5_000 else pytest.mark.long


@pytest.mark.parametrize(
    ("name", "policy"), [pytest.param(*each, marks=marks(*each)) for each in NUM_STATES]
)
def test_every_state_of_a_world_with_sessions_is_right(name: str, policy: str) -> None:
    report = explore(name, 1, policy)
    assert report.counterexample is None and report.is_complete
    assert report.num_states == NUM_STATES[name, policy]
    assert [event for event in REACHES[name] if not report.reached[event]] == []


@pytest.mark.parametrize("name", REACHES)
def test_the_first_states_of_a_world_with_sessions_are_right(name: str) -> None:
    """Its later ones take a minute: that is a soak test."""
    report = explore(name, 2, "working-set", max_states=150)
    assert report.counterexample is None and report.num_drained > 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "max_states"), [("sessions", 2000), ("recognised", 2000)])
def test_the_first_states_of_a_large_world_reach_what_it_is_about(
    name: str, max_states: int
) -> None:
    report = explore(name, 1, "fcfs", max_states=max_states)
    assert report.counterexample is None and report.num_drained > 0
    assert [event for event in REACHES[name] if not report.reached[event]] == []


# Starvation.


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, TinyWorld], tuple[Policy, Reads]]:
    """Return a loader of policies without their bound MAX_OVERTAKEN."""

    def load(name: str, world: TinyWorld) -> tuple[Policy, Reads]:
        policy, reads = explored_policy(name, world)
        monkeypatch.setattr(reads_module.load_small(name), "MAX_OVERTAKEN", 10**9)
        return policy, reads._replace(num_overtaken=0)

    return load


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "path", "cycle"),
    [
        (
            "working-set",
            ["add 1", "schedule", "commit end", "add 2", "add 0"],
            ["add 1", "schedule", "commit end end", "add 0"],
        ),
        pytest.param(
            "session-fcfs",
            ["add 1", "schedule", "commit end", "add 2"],
            ["add 0", "add 1", "schedule", "commit end end"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_without_its_bound_a_policy_starves_the_turns_of_new_sessions(
    name: str,
    path: list[str],
    cycle: list[str],
    unbounded: Callable[[str, TinyWorld], tuple[Policy, Reads]],
) -> None:
    world = find_world("agents", 1)
    policy, reads = unbounded(name, world)
    report = Search(world, policy, reads=reads).run(1000)
    assert report.counterexample is not None and report.counterexample.error == STARVATION
    assert (path_of(report), cycle_of(report)) == (path, cycle)


def admit_turns_of_s(waiting: Waiting[Candidate], context: PolicyContext) -> Candidate | None:
    """Let all wait for the turns of session s while it is open."""
    if ("", "s") in context.sessions:
        return next((c for c in waiting if c.session and c.session.key == ("", "s")), None)
    return waiting[0]


WAITS_FOR_S = FCFS._replace(admit=admit_turns_of_s)


def test_a_wait_for_a_paused_session_ends_when_it_expires() -> None:
    """The client sends no further turn: all states of it lead on."""
    world = find_world("agents", 1)
    world = world._replace(menu=world.menu[1:], kinds=(0, 1), faults=())
    one_turn = [Action(ADD, 0), Action(SCHEDULE), Action(COMMIT, outcomes=("end",))]
    state = create_state(world, WAITS_FOR_S)
    for action in (*one_turn, Action(ADD, 1), Action(SCHEDULE)):
        perform(world, state, action)
    assert not state.scheduler.can_plan
    assert [str(action) for action in possible_actions(world, state)] == ["add 0", "expire 0"]
    perform(world, state, Action("expire", 0))
    assert perform(world, state, Action(SCHEDULE)) is not None


def admit_while_none_is_paused(
    waiting: Waiting[Candidate], context: PolicyContext
) -> Candidate | None:
    """Let all wait for each paused session."""
    return None if any(s.is_paused for s in context.sessions.values()) else waiting[0]


PATIENT = FCFS._replace(admit=admit_while_none_is_paused)


@pytest.mark.parametrize("max_states", [100, pytest.param(20_000, marks=pytest.mark.long)])
def test_requests_that_wait_for_paused_sessions_end_since_these_expire(max_states: int) -> None:
    """Nothing fails, and sessions expire where the policy lets all wait, not elsewhere."""
    world = find_world("crowded", 1)
    report = Search(world, PATIENT, reads=NOTHING).run(max_states)
    assert report.counterexample is None
    assert report.num_drained if max_states == 100 else report.reached["expire"]


def test_a_policy_that_waits_for_a_session_starves_others_while_that_goes_on() -> None:
    report = Search(find_world("agents", 1), WAITS_FOR_S, reads=NOTHING).run(300)
    assert report.counterexample is not None and report.counterexample.error == STARVATION
    assert path_of(report) == ["add 0", "schedule", "commit end", "add 2"]
    assert cycle_of(report) == ["add 0", "schedule", "commit end"]


# Planted bugs: the shortest counterexample of each.

Plant = Callable[[pytest.MonkeyPatch], None]


def keep_expired_blocks_protected(patch: pytest.MonkeyPatch) -> None:
    unprotect = BlockPool.unprotect

    def unprotect_demoted(self: BlockPool, hashes: list[BlockHash], *, demote: bool) -> None:
        if demote:
            unprotect(self, hashes, demote=True)

    patch.setattr(BlockPool, "unprotect", unprotect_demoted)


def close_a_live_session_at_its_end(patch: pytest.MonkeyPatch) -> None:
    def end(self: SessionTable, key: SessionKey) -> bool:
        self._close(self.sessions[key], demote=True)
        return True

    patch.setattr(SessionTable, "end", end)


def let_an_old_timer_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "is_paused_since", lambda self, turn: self.is_paused)


def demote_blocks_that_another_chain_has(patch: pytest.MonkeyPatch) -> None:
    def cut(self: SessionTable, session: Session, num_kept: int, *, demote: bool) -> None:
        branch = session.chain[num_kept:]
        del session.chain[num_kept:]
        self._count(branch, -1)
        self._pool.unprotect(branch, demote=demote)

    patch.setattr(SessionTable, "_cut", cut)


def continue_a_session_that_has_closed(patch: pytest.MonkeyPatch) -> None:
    """A tip outlives its session: the next request is a turn of one that is not open."""

    def recognise(self: SessionTable, request: Request, hashes: list[BlockHash]) -> Session | None:
        keys = [self.tips.get((request.tenant, each)) for each in hashes]
        key = next(filter(None, keys), None)
        return None if key is None else self.sessions.get(key, Session(key))

    patch.setattr(SessionTable, "_recognise", recognise)


def remember_blocks_that_no_chain_has(patch: pytest.MonkeyPatch) -> None:
    count = SessionTable._count

    def count_alone(self: SessionTable, hashes: list[BlockHash], change: int) -> None:
        used = set(self.used_by_others)
        count(self, hashes, change)
        self.used_by_others |= used

    patch.setattr(SessionTable, "_count", count_alone)


def report_no_pause_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    abort = Scheduler.abort

    def abort_and_take(self: Scheduler, request_id: int) -> object:
        deltas = abort(self, request_id)
        self.take_paused_sessions()
        return deltas

    patch.setattr(Scheduler, "abort", abort_and_take)


TURN = ("add 0", "schedule", "commit end")
PROTECTED = "_protected_hashes == num_chains"

PLANTED: list[tuple[Plant, str, str, tuple[str, ...]]] = [
    (keep_expired_blocks_protected, "sessions", PROTECTED, (*TURN, "expire 0")),
    (close_a_live_session_at_its_end, "sessions", "a session closes when", ("add 0", "end 0")),
    (let_an_old_timer_close, "sessions", "an old timer", (*TURN, "expire 0")),
    (
        demote_blocks_that_another_chain_has,
        "agents",
        PROTECTED,
        (
            *("add 0", "schedule", "commit go"),
            *("add 2", "schedule", "commit go end", "expire 0"),
        ),
    ),
    (
        continue_a_session_that_has_closed,
        "recognised",
        "KeyError: ('', 0)",
        (
            "add 0",
            "schedule",
            "commit go",
            "schedule",
            "commit go",
            "schedule",
            "commit go",
            "add 1",
        ),
    ),
    (
        remember_blocks_that_no_chain_has,
        "sessions",
        "used_by_others <= num_chains",
        (
            *("add 0", "schedule", "commit go", "add 2", "schedule", "commit go go"),
            *("schedule", "commit go go", "add 2", "schedule", "expire 0"),
        ),
    ),
    (report_no_pause_after_an_abort, "mixed", "timers", ("add 0", "abort 0")),
]
"""Bug, world, part of the error, shortest path."""


@pytest.mark.parametrize(
    ("plant", "name", "error", "path"),
    [
        pytest.param(
            *each,
            id=each[0].__name__,
            marks=[pytest.mark.long] * (each[0] is remember_blocks_that_no_chain_has),
        )
        for each in PLANTED
    ],
)
def test_a_planted_bug_of_sessions_is_found_by_its_shortest_path(
    plant: Plant, name: str, error: str, path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = explore(name, 1, "fcfs")
    assert report.counterexample is not None and error in report.counterexample.error
    assert tuple(path_of(report)) == path


def test_a_wait_that_outlives_the_session_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expiry does not wake the scheduler, so what waited for the session waits forever."""

    def expire(self: Scheduler, key: SessionKey, last_turn: int) -> bool:
        return self._session_table.expire(key, last_turn)

    monkeypatch.setattr(Scheduler, "expire_session", expire)
    report = Search(find_world("agents", 1), WAITS_FOR_S, reads=NOTHING).run(5000)
    assert report.counterexample is not None
    assert report.counterexample.error == "requests are live, and no plan and no result is left"
    assert tuple(path_of(report)) == (*TURN, "add 2", "schedule", "expire 0")


# States that are merged.


def met_twice(
    world: TinyWorld, policy: Policy, canonical: Canonicaliser, draws: Random, num_walks: int
) -> Iterator[tuple[State, State]]:
    """Yield states of equal forms that random walks meet, where the states are not equal.

    Walks go farther than the first states of a search, so more has been forgotten on them.
    """
    snapshots, found = Snapshots(), dict[bytes, bytes]()
    for _ in range(num_walks):
        state = create_state(world, policy)
        for _ in range(draws.choice((10, 30, 60))):
            actions = list(possible_actions(world, state))
            weights = [{SCHEDULE: 6, COMMIT: 6, ADD: 2}.get(each.kind, 1) for each in actions]
            perform(world, state, draws.choices(actions, weights)[0])
            digest = canonical.digest(state.scheduler)
            if digest not in found:
                found[digest] = snapshots.save(state)
                continue
            one = snapshots.load(found[digest])
            if names(one) != names(state):
                yield one, snapshots.load(snapshots.save(state))


@pytest.mark.parametrize(
    ("name", "num_walks", "policy"),
    [
        *(("sessions", 6, "fcfs"), ("recognised", 6, "fcfs")),
        *(("agents", 10, "working-set"), ("mixed", 6, "working-set")),
        pytest.param("crowded", 20, "fcfs", marks=pytest.mark.long),
        *(
            pytest.param(name, num_walks, policy, marks=mark)
            for num_walks, mark in ((12, pytest.mark.long), (300, pytest.mark.soak))
            for name in ("sessions", "recognised", "agents", "crowded", "mixed")
            for policy in SESSION_POLICIES
        ),
    ],
)
def test_states_with_sessions_that_are_merged_have_equal_futures(
    name: str, num_walks: int, policy: str
) -> None:
    world, draws, num_pairs = find_world(name, 2), Random(num_walks), 0
    explored, reads = explored_policy(policy, world)
    canonical = Canonicaliser(world, reads)
    for one, other in met_twice(world, explored, canonical, draws, num_walks):
        num_pairs += 1
        assert walk(world, canonical, one, other, draws) == []
    assert num_pairs > num_walks / 4


class FormWithout(Canonicaliser):
    """A form that lacks one part of each session, or of the state."""

    def __init__(self, world: TinyWorld, reads: Reads, part: str) -> None:
        super().__init__(world, reads)
        self._part = part

    def _session(self, *arguments: Any) -> tuple[Any, ...]:
        values = list(super()._session(*arguments))
        if self._part in SESSION_PARTS:
            values[SESSION_PARTS.index(self._part)] = None
        return tuple(values)

    def form(self, scheduler: Scheduler) -> tuple[Any, ...]:
        values = list(super().form(scheduler))
        if self._part in STATE_PARTS:
            values[STATE_PARTS[self._part]] = None
        return tuple(values)


SESSION_PARTS = (
    *("tenant", "name", "num_live", "has_ended", "expected_pause_s", "chain", "used_by_others"),
    *("num_foreign_blocks", "pause", "num_turns", "paused_at", "num_tokens"),
)
STATE_PARTS = {"can_plan": 4, "sessions": 5, "tips": 6, "work": 7, "policy state": 8}


@pytest.mark.parametrize(
    ("part", "name", "policy"),
    [
        *(("name", "agents", "fcfs"), ("has_ended", "sessions", "fcfs")),
        *(("chain", "mixed", "fcfs"), ("tips", "recognised", "fcfs")),
        ("num_foreign_blocks", "sessions", "fcfs"),
        *(("pause", "crowded", "fcfs"), ("pause", "agents", "working-set")),
        *(("work", "mixed", "working-set"), ("sessions", "agents", "fcfs")),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("used_by_others", "sessions", "fcfs"),
                ("paused_at", "mixed", "working-set"),
                ("policy state", "agents", "working-set"),
            )
        ),
    ],
)
def test_a_form_that_lacks_a_part_merges_states_with_other_futures(
    part: str, name: str, policy: str
) -> None:
    world = find_world(name, 2)
    explored, reads = explored_policy(policy, world)
    assert can_be_separated(world, explored, reads, FormWithout(world, reads, part))


def test_a_form_without_how_often_a_sequence_was_overtaken_merges_too_much() -> None:
    world = find_world("agents", 2)
    explored, reads = explored_policy("working-set", world)
    partial = Canonicaliser(world, reads._replace(num_overtaken=0))
    assert can_be_separated(world, explored, reads, partial)


def test_a_form_without_a_wait_for_a_session_merges_too_much() -> None:
    world = find_world("agents", 2)
    partial = FormWithout(world, NOTHING, "can_plan")
    assert can_be_separated(world, WAITS_FOR_S, NOTHING, partial)


def can_be_separated(
    world: TinyWorld, policy: Policy, reads: Reads, partial: Canonicaliser
) -> bool:
    """Return whether equal actions lead two states that the partial form merges to others."""
    whole, draws = Canonicaliser(world, reads), Random(3)
    return any(
        walk(world, partial, one, other, draws)
        for one, other in met_twice(world, policy, partial, draws, 150)
        if whole.form(one.scheduler) != whole.form(other.scheduler)
    )


# Policies.


@pytest.mark.parametrize("name", policy_names())
def test_a_shipped_policy_is_explored_or_refused_by_name(name: str) -> None:
    world = find_world("agents", 1)
    if name in REFUSED:
        with pytest.raises(InvalidConfig, match=f"'{name}' decides by .* Explore ageing"):
            explored_policy(name, world)
    else:
        policy, reads = explored_policy(name, world)
        assert policy.is_complete and reads is not EVERYTHING


def test_a_policy_file_that_learns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from forge.policy import FCFS\n"
        "policy = FCFS._replace(update=lambda state, event: state, initial_state=0)\n"
    )
    with pytest.raises(InvalidConfig, match="learns, and what it has learned may grow"):
        explored_policy(str(file), find_world("agents", 1))
    file.write_text("from forge.policy import FCFS as policy\n")
    assert explored_policy(str(file), find_world("agents", 1))[1] is EVERYTHING


def test_small_constants_are_those_of_the_exploration_alone() -> None:
    small = reads_module.load_small("working-set")
    assert (small.MAX_OVERTAKEN, small.MAX_PAUSES) == (2, 1)
    shipped = load_policy("working-set").admit.__globals__
    assert (shipped["MAX_OVERTAKEN"], shipped["MAX_PAUSES"]) == (256, 64)


# Names of requests.


def test_a_request_never_has_the_id_of_a_recognised_session() -> None:
    """Ids 0 and 1 come again and again; 0 names a session that its successor continues."""
    world, commit = find_world("recognised", 1), Action(COMMIT, outcomes=(GO,))
    state = create_state(world, FCFS)
    for action in (Action(ADD, 0), *[Action(SCHEDULE), commit] * 3):
        perform(world, state, action)
    assert list(state.scheduler.session_tips.values()) == [("", 0)]
    perform(world, state, Action(ADD, 0))
    assert list(state.scheduler.requests) == [3]
    perform(world, state, Action(ADD, 1))
    assert list(state.scheduler.sessions) == [("", 0)]
    assert list(state.scheduler.requests) == [3, 1]


# The drawing and the command.


def test_a_counterexample_is_drawn_with_its_sessions() -> None:
    world = find_world("sessions", 1)
    commit = Action(COMMIT, outcomes=(GO,))
    actions = (Action(ADD, 0), Action(SCHEDULE), commit, Action(SCHEDULE), commit)
    rest = (Action(SCHEDULE), commit, Action(ADD, 2), Action("expire", 0))
    text = draw(world, FCFS, Counterexample("what failed", (*actions, *rest)))
    assert text.splitlines() == [
        "         action     slots  blocks  queue  in flight                 sessions",
        "      1  add 0      ..     ....    A                                s0*",
        "      2  schedule   A.     A...           A[0:2)                    s0*",
        "      3  commit go  A.     A...                                     s0*",
        "      4  schedule   A.     AA..           A[2:3)                    s0*",
        "      5  commit go  A.     AA..                                     s0*",
        "      6  schedule   A.     AA..           A[3:4)                    s0*",
        "      7  commit go  ..     pp..                                     s2",
        "      8  add 2      ..     pp..    C                                s2",
        "      9  expire 0   ..     cc..    C",
        "         * shared, c cached, . empty; B[0:2) computes positions 0 and 1 of B; "
        "p protected; s2* session s has two blocks and a live request",
        "what failed",
    ]


def test_the_command_names_the_constants_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "agents", "--policy", "working-set", "--states", "50"]
    assert main(["sim", "explore", *words]) == 0
    shown = capsys.readouterr().out
    assert "policy      working-set with MAX_OVERTAKEN = 2, MAX_PAUSES = 1" in shown
    assert main(["sim", "explore", "--policy", "fair-queueing"]) == 2
    assert "'fair-queueing' decides by the service of each tenant" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["fcfs", "working-set"])
def test_three_million_states_of_a_mixed_world_are_right(policy: str) -> None:
    """About an hour each. Two sessions, every fault, six blocks, two plans in flight."""
    report = explore("mixed", 2, policy, max_states=3_000_000)
    assert report.counterexample is None and report.num_states >= 3_000_000
    reached = ("preempted", "forked", "copied", "prefix hit", "resumed", "resize", "end", "expire")
    assert [event for event in reached if not report.reached[event]] == []


def test_every_world_is_explored_by_a_test() -> None:
    assert {name for name, _ in (*WORLDS_WITHOUT, *NUM_STATES)} | {"mixed"} == set(WORLDS)
