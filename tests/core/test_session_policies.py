"""Policies for sessions: whose turn each admits, which session it evicts, how long it lets wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from forge.invariants import audit
from forge.policies import policy_names
from forge.policy import Candidate, PolicyContext, oldest_overtaken
from forge.policy_loader import load_policy
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.sessions import Session
from tests.core.builders import (
    NO_CONTEXT,
    config,
    hash_model,
    request,
    scheduler,
    serve,
    step,
)
from tests.core.reference import compute_expected
from tests.core.test_policy import create_candidate
from tests.core.test_sessions import cached, finish, turn


def admitted(s: Scheduler) -> list[int]:
    """Serve all requests, auditing each step, and return their ids in order of admission."""
    order: list[int] = []
    while s.has_work:
        step(s)
        order += s.new_request_ids
        audit(s)
    return order


def pressed(name: str, blocks: int, **numbers: int) -> Scheduler:
    """Return a scheduler with that policy, `blocks` blocks of four tokens and one slot."""
    options: dict[str, Any] = {"max_num_seqs": 1, **numbers}
    return scheduler(policy=load_policy(name), blocks=blocks, **options)


# Working set.


def test_a_session_that_does_not_fit_with_older_ones_waits_for_their_end() -> None:
    """Twenty blocks; a and b have eight each, so c waits while a runs, and d as well."""
    s = pressed("working-set", 20)
    finish(s, turn(0, range(32), "a"), turn(1, range(100, 132), "b"))
    s.add(turn(2, range(200, 232), "c"))
    s.add(turn(3, [*range(32), 1], "a", max_tokens=9))
    step(s)
    assert [x.request.id for x in s.running.values()] == [3]
    s.add(turn(4, range(300, 304), "d"))
    s.add(turn(5, [*range(100, 132), 1], "b", end=True))
    s.end_session(("", "a"))
    assert admitted(s) == [5, 2, 4]


def test_the_oldest_session_goes_on_where_nothing_runs() -> None:
    """No session fits with the paused one, and yet the device does not idle."""
    s = pressed("working-set", 12)
    finish(s, turn(0, range(40), "a"))
    s.add(turn(1, range(100, 140), "b"))
    s.add(turn(2, range(200, 240), "c"))
    assert admitted(s) == [1, 2]


def test_a_request_without_a_session_waits_for_none() -> None:
    s = pressed("working-set", 20, max_num_seqs=2)
    finish(s, turn(0, range(32), "a"), turn(1, range(100, 132), "b"))
    s.add(turn(2, [*range(32), 1], "a", max_tokens=9))
    step(s)
    s.add(turn(3, range(200, 232), "c"))
    s.add(request(4, range(300, 304), max_tokens=1))
    step(s)
    assert {x.request.id for x in s.running.values()} | set(s.new_request_ids) == {2, 4}


def test_blocks_that_sessions_share_count_once() -> None:
    """Three sessions of seven blocks, six of them the same, fit in twelve blocks."""
    s = pressed("working-set", 12, max_num_seqs=2)
    system = list(range(24))
    finish(s, *(turn(n, [*system, 50 + n, 60 + n], name) for n, name in enumerate("abc")))
    s.add(turn(3, [*system, 52, 62, 7, 7, 1], "c"))
    s.add(turn(4, [*system, 50, 60, 7, 7, 1], "a"))
    step(s)
    assert s.new_request_ids == [4, 3], "both are in the working set, and the older goes first"


def test_newer_sessions_do_not_pass_one_that_does_not_fit() -> None:
    """While a runs there is room for d and not for c, and d does not take it."""
    s = pressed("working-set", 20, max_num_seqs=2)
    finish(s, turn(0, range(32), "a"))
    s.add(turn(1, [*range(32), 1], "a", max_tokens=9))
    step(s)
    s.add(turn(2, range(200, 240), "c"))
    s.add(turn(3, range(300, 304), "d"))
    step(s)
    assert s.new_request_ids == []
    assert admitted(s) == [2, 3]


def test_a_tenant_s_paused_sessions_take_no_more_than_its_share() -> None:
    """One tenant's five sessions fill the cache; the other's first session is admitted at once."""
    s = pressed("working-set", 40, max_num_seqs=2)
    for n in range(5):
        start = 100 * n
        finish(s, turn(n, range(start, start + 28), str(n), tenant="busy"))
    s.add(request(5, range(700, 704), max_tokens=9))
    step(s)
    s.add(turn(6, range(900, 940), "new", tenant="busy"))
    s.add(turn(7, range(800, 840), "x", tenant="calm"))
    step(s)
    assert s.new_request_ids == [7]


def test_the_newest_session_outside_the_working_set_is_evicted_first() -> None:
    s = pressed("working-set", 20)
    for n, name in enumerate("abc"):
        finish(s, turn(n, range(100 * n, 100 * n + 20), name))
    finish(s, turn(3, [*range(20), 7, 7, *range(50, 74)], "a"))
    lengths = [cached(s, range(n, n + 20)) for n in (0, 100, 200)]
    assert lengths[0] == 5 and lengths[1] == 5 and lengths[2] < 5


def test_of_two_sessions_outside_the_working_set_the_newer_is_evicted() -> None:
    """Twenty-three blocks: a and b are inside, c and d outside, and one block is needed."""
    s = pressed("working-set", 23)
    for n, (name, length) in enumerate((("a", 24), ("b", 24), ("c", 28), ("d", 12))):
        finish(s, turn(n, range(100 * n, 100 * n + length), name))
    finish(s, request(9, range(900, 908), max_tokens=1))
    assert [len(session.chain) for session in s.sessions.values()] == [6, 6, 7, 2]


# The others.


def test_session_fcfs_admits_turns_by_the_age_of_their_session() -> None:
    s = pressed("session-fcfs", 60)
    finish(s, turn(0, range(8), "a"), turn(1, range(8), "b"))
    s.add(turn(2, range(9), "c"))
    s.add(turn(3, range(9), "b"))
    s.add(turn(4, range(9), "a"))
    assert admitted(s) == [4, 3, 2]


def test_session_fcfs_admits_a_request_without_a_session_in_its_place() -> None:
    s = pressed("session-fcfs", 60)
    finish(s, turn(0, range(8), "a"))
    s.add(request(1, range(50, 60), max_tokens=1))
    s.add(turn(2, range(9), "a"))
    assert admitted(s) == [1, 2]


def test_attained_service_admits_the_session_that_was_served_least() -> None:
    s = pressed("attained-service", 60)
    s.policy.admit.__globals__["FIRST_LEVEL_TOKENS"] = 8
    finish(s, turn(0, range(50), "long"), turn(1, range(90, 94), "short"))
    s.add(turn(2, range(55), "long"))
    s.add(turn(3, range(90, 96), "short"))
    assert admitted(s) == [3, 2]


def test_attained_service_preempts_the_session_served_most_for_one_served_little() -> None:
    s = pressed("attained-service", 60)
    s.policy.admit.__globals__["FIRST_LEVEL_TOKENS"] = 4
    finish(s, turn(0, range(40), "long", max_tokens=1))
    s.add(turn(1, range(41), "long", max_tokens=20))
    step(s)
    s.add(turn(2, range(9), "short"))
    plan, _ = step(s)
    assert [event.seq_id for event in plan.preempted] == [1]
    assert admitted(s) == []
    assert s.num_preemptions == 1


@pytest.mark.parametrize(("slots", "priority"), [(2, 0), (1, 1)])
def test_attained_service_preempts_for_no_free_slot_and_no_less_urgent_class(
    slots: int, priority: int
) -> None:
    s = pressed("attained-service", 60, max_num_seqs=slots)
    s.policy.admit.__globals__["FIRST_LEVEL_TOKENS"] = 4
    s.add(turn(1, range(41), "long", max_tokens=20))
    step(s)
    s.add(request(2, range(9), priority=priority, max_tokens=1))
    plan, _ = step(s)
    assert not plan.preempted


def test_fair_queueing_admits_the_tenant_that_was_served_least() -> None:
    s = pressed("fair-queueing", 60)
    for n in range(3):
        s.add(turn(n, range(20), "", tenant="busy"))
    s.add(turn(3, range(40, 48), "", tenant="calm"))
    s.add(turn(4, range(50, 58), "", tenant="calm"))
    assert admitted(s) == [0, 3, 4, 1, 2]


def test_fair_queueing_counts_the_output_of_a_sequence_that_runs() -> None:
    """Busy has a prompt of 4 and twenty tokens of output so far: 44. Calm has 8 and one: 10."""
    s = pressed("fair-queueing", 60, max_num_seqs=2)
    s.add(turn(0, range(4), "", tenant="busy", max_tokens=80, ignore_eos=True))
    s.add(turn(1, range(40, 48), "", tenant="calm", max_tokens=1))
    for _ in range(20):
        step(s)
    s.add(turn(2, range(60, 64), "", tenant="busy"))
    s.add(turn(3, range(80, 84), "", tenant="calm"))
    step(s)
    assert s.new_request_ids == [3]


def test_fair_queueing_saves_up_no_service_for_a_tenant_that_was_away() -> None:
    """After four requests of one tenant the other returns, and gets one turn in two, not four."""
    s = pressed("fair-queueing", 400)
    number = 0
    finish(s, turn(99, range(900, 908), "", tenant="calm"))
    for number in range(6):
        s.add(turn(number, range(20 * number, 20 * number + 16), "", tenant="busy"))
    for _ in range(8):
        step(s)
    for number in range(6, 12):
        s.add(turn(number, range(20 * number, 20 * number + 16), "", tenant="calm"))
    order = admitted(s)
    assert [n >= 6 for n in order[:4]].count(True) <= 3


def test_predicted_shortest_learns_how_long_outputs_are() -> None:
    """Prompts of eight tokens had outputs of twenty, those of thirty had one."""
    s = pressed("predicted-shortest", 60)
    finish(
        s,
        request(0, range(8), max_tokens=20, ignore_eos=True),
        request(1, range(30), max_tokens=1),
    )
    s.add(request(2, range(40, 49), max_tokens=20, ignore_eos=True))
    s.add(request(3, range(50, 70), max_tokens=1))
    assert admitted(s) == [3, 2]


def test_longest_prefix_admits_what_is_cached_before_it_is_evicted() -> None:
    s = pressed("longest-prefix", 60)
    finish(s, request(0, range(16), max_tokens=1))
    s.add(request(1, range(50, 60), max_tokens=1))
    s.add(request(2, range(8), max_tokens=1))
    s.add(request(3, range(16), max_tokens=1))
    assert admitted(s) == [3, 2, 1]


# All of them.


def test_the_oldest_overtaken_sequence_of_the_most_urgent_class_is_found() -> None:
    line = [
        create_candidate(0)._replace(num_overtaken=2),
        create_candidate(1)._replace(num_overtaken=3),
        create_candidate(2, priority=1)._replace(num_overtaken=9),
    ]
    assert oldest_overtaken(line, 3) == line[1]
    assert oldest_overtaken(line, 4) is None


@pytest.mark.parametrize("name", ["working-set", "session-fcfs", "longest-prefix"])
def test_no_sequence_is_overtaken_more_often_than_the_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless old session passes a new one until the bound, and not once more."""
    policy = load_policy(name)
    monkeypatch.setitem(policy.admit.__globals__, "MAX_OVERTAKEN", 5)
    s = scheduler(blocks=24, max_num_seqs=1, policy=policy)
    finish(s, turn(0, range(64), "old"))
    s.add(turn(1, range(64), "old"))
    step(s)
    s.add(turn(2, range(500, 560), "new"))
    order = []
    for number in range(3, 20):
        s.add(turn(number, range(64), "old"))
        while s.has_work and len(s.waiting) > (2 not in order):
            step(s)
            order += s.new_request_ids
    assert order.index(2) == 5


@cache
def random_turns(seed: int) -> list[tuple[Request, list[int]]]:
    """Return requests of random tenants, each with its expected tokens, which no policy changes."""
    rng = Random(seed)
    m = hash_model(scheduler())
    contexts: dict[tuple[str, str], list[int]] = {}
    turns: list[tuple[Request, list[int]]] = []
    for number in range(30):
        key = rng.choice("xy"), rng.choice(["", "a", "b", "c"])
        context = contexts.setdefault(key, [rng.randrange(200)])
        context += [rng.randrange(200) for _ in range(rng.randrange(6))]
        if len(context) > 30:
            del context[rng.randrange(4) :]
            context.append(3)
        each = Request(
            number,
            tuple(context),
            SamplingParams(max_tokens=rng.randrange(1, 9), seed=number, ignore_eos=True),
            tenant=key[0],
            session_id=key[1],
            session_end=bool(key[1]) and rng.random() < 0.2,
            cache_salt=key[0],
        )
        turns.append((each, list(compute_expected(m, config(), each).tokens)))
    return turns


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_every_policy_serves_sessions_token_for_token(name: str, seed: int) -> None:
    """Random turns of random tenants, depth 1 and 2, in a cache that is far too small."""
    depth = 1 + seed % 2
    s = scheduler(
        policy=load_policy(name), blocks=14, max_num_seqs=3, depth=depth, max_num_batched_tokens=16
    )
    m = hash_model(s)
    turns = random_turns(seed)
    for batch in (turns[:12], turns[12:20], turns[20:]):
        for each, _ in batch:
            s.add(each)
        served = serve(s, m, depth=depth)
        audit(s)
        for each, expected in batch:
            assert served.tokens[each.id, 0] == expected


def test_policies_for_sessions_are_first_come_first_served_without_them() -> None:
    for name in ("working-set", "session-fcfs"):
        line: Sequence[Candidate] = [create_candidate(3), create_candidate(5)]
        assert load_policy(name).admit(line, NO_CONTEXT) is line[0]


# Pauses of the working set.


def paused_session(name: str, paused_at: int) -> Session:
    return Session(("", name), num_turns=1, num_tokens=60, paused_at=paused_at)


def pauses_context(mean: float, work: int, *sessions: Session) -> PolicyContext:
    """Return the context of 25 blocks of four tokens after eight pauses of this mean."""
    pauses: Any = load_policy("working-set").initial_state
    return NO_CONTEXT._replace(
        work=work,
        num_blocks=25,
        sessions={session.key: session for session in sessions},
        state=pauses._replace(number=8, mean=mean),
        num_session_blocks=100,
    )


def set_of(context: PolicyContext) -> set[str | int]:
    members: Any = load_policy("working-set").admit.__globals__["working_set"]
    return {name for _, name in members((), context)}


def test_sessions_whose_pauses_outlast_the_cache_are_not_waited_for() -> None:
    """The cache holds 100 tokens. With more in a mean pause, keeping blocks is not worth it."""
    session = paused_session("a", 1000)
    assert set_of(pauses_context(100.0, 1010, session)) == {"a"}
    assert set_of(pauses_context(101.0, 1010, session)) == set()
    session.num_live = 1
    assert set_of(pauses_context(101.0, 1010, session)) == {"a"}


def test_a_session_that_pauses_far_longer_than_others_is_not_waited_for() -> None:
    old, new = paused_session("old", 1000), paused_session("new", 1100)
    assert set_of(pauses_context(50.0, 1200, old, new)) == {"old"}
    assert set_of(pauses_context(50.0, 1201, old, new)) == {"new"}


def test_a_pause_is_learned_when_a_paused_session_goes_on() -> None:
    policy = load_policy("working-set")
    s = scheduler(policy=policy, blocks=60)
    finish(s, turn(0, range(8)))
    paused_at = s.sessions["", "a"].paused_at
    finish(s, request(1, range(50, 70), max_tokens=1))
    assert s.policy_calls.state == policy.initial_state
    s.add(turn(2, range(12)))
    assert s.policy_calls.state == (1, s.work - paused_at) and s.work > paused_at
    s.add(turn(3, range(12)))
    assert s.policy_calls.state == (1, s.work - paused_at), "it did not pause before this turn"


def test_no_pause_is_learned_when_a_session_is_recognised() -> None:
    """Its first request was in no session, so when that ended is not known."""
    policy = load_policy("working-set")
    s = scheduler(policy=policy, blocks=60)
    s.add(request(0, range(8), max_tokens=5))
    tokens = s.sequences[0].tokens
    finish(s, request(1, range(50, 70), max_tokens=1))
    s.add(request(2, [*tokens, 1], max_tokens=1))
    assert list(s.sessions) == [("", 0)]
    assert s.policy_calls.state == policy.initial_state
    finish(s)
    s.add(request(3, [*tokens, 1, 2], max_tokens=1))
    assert s.policy_calls.state.number == 1
