"""Sessions: turns, pauses, ends and expiry; which blocks they demote, and what a policy may do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from forge.blocks import BlockPool, chain_hashes
from forge.errors import PolicyError
from forge.invariants import audit
from forge.policy import (
    FCFS,
    Candidate,
    PolicyContext,
    PolicyEvent,
    PolicyEventKind,
    Split,
)
from forge.request import FinishReason, Request, SamplingParams
from forge.scheduler import MAX_PREEMPTIONS, Scheduler
from forge.sessions import Session, num_common_blocks
from tests.core.builders import (
    config,
    create_output,
    hash_model,
    next_plan,
    request,
    scheduler,
    serve,
    step,
)
from tests.core.reference import compute_expected


def turn(
    id: int,
    prompt: Iterable[int],
    session: str = "a",
    *,
    tenant: str = "",
    end: bool = False,
    pause_s: float | None = None,
    **params: Any,
) -> Request:
    """Return a greedy turn of a session, of two tokens of output unless `params` say otherwise."""
    return Request(
        id,
        tuple(prompt),
        SamplingParams(**{"temperature": 0.0, "max_tokens": 2, **params}),
        tenant=tenant,
        session_id=session,
        session_end=end,
        expected_pause_s=pause_s,
    )


def finish(s: Scheduler, *requests: Request) -> None:
    """Serve these requests to their end, auditing each step."""
    for each in requests:
        s.add(each)
    while s.has_work:
        step(s)
        audit(s)


def cached(s: Scheduler, prompt: Sequence[int]) -> int:
    """Return how many leading blocks of the prompt are cached."""
    size = s.config.block_size
    root = s.prefix_cache.root_hash(request(0, prompt))
    return len(s.pool.lookup(chain_hashes(root, prompt[: len(prompt) // size * size], size)))


# Turns, pauses and ends.


def test_a_session_opens_pauses_and_goes_on() -> None:
    s = scheduler()
    finish(s, turn(0, range(6)))
    session = s.sessions["", "a"]
    assert (session.num_turns, session.num_live, session.is_paused) == (1, 0, True)
    assert (session.num_tokens, session.num_served_tokens, len(session.chain)) == (7, 7, 1)
    assert s.take_paused_sessions() == [session] and s.take_paused_sessions() == []
    s.add(turn(1, [*range(6), 7, 7, 1, 2], pause_s=3.0))
    assert not session.is_paused and session.expected_pause_s == 3.0
    finish(s)
    assert (session.num_turns, session.num_tokens, len(session.chain)) == (2, 11, 2)
    assert session.num_served_tokens == 7 + 7  # the first block was cached


def test_a_session_that_went_on_has_not_paused() -> None:
    s = scheduler()
    finish(s, turn(0, range(6)))
    s.add(turn(1, range(9)))
    assert s.take_paused_sessions() == []


def test_a_session_that_has_closed_since_has_not_paused() -> None:
    s = scheduler()
    finish(s, turn(0, range(6)))
    s.end_session(("", "a"))
    assert s.take_paused_sessions() == []
    finish(s, turn(1, range(6)))
    assert s.take_paused_sessions() == [s.sessions["", "a"]]


def test_a_turn_of_two_choices_ends_with_the_last_one() -> None:
    s = scheduler()
    finish(s, turn(0, range(6), n=2))
    session = s.sessions["", "a"]
    assert (session.num_turns, session.num_live) == (1, 0)
    assert session.num_served_tokens == 7 + 2  # a fork computes the last position of the prompt


def test_the_length_of_a_session_is_that_of_its_longest_turn() -> None:
    s = scheduler()
    finish(s, turn(0, range(20)), turn(1, range(30, 36)))
    assert s.sessions["", "a"].num_tokens == 21


def test_a_turn_that_is_aborted_before_it_runs_leaves_no_chain() -> None:
    s = scheduler()
    s.add(turn(0, range(12)))
    s.abort(0)
    assert s.sessions["", "a"].is_paused and s.sessions["", "a"].chain == []
    audit(s)


def test_the_service_of_a_session_includes_what_was_computed_again() -> None:
    """A prompt of five and a decode; then all six again, since no block is full, and two more."""

    def displace(
        running: Sequence[Candidate], waiting: Sequence[Candidate], context: PolicyContext
    ) -> Candidate | None:
        return running[0] if running[0].num_output == 2 and waiting[0].id == 1 else None

    s = scheduler(max_num_seqs=1, block_size=16, policy=FCFS._replace(displace=displace))
    s.add(turn(0, range(5), max_tokens=4, ignore_eos=True))
    step(s)
    s.add(request(1, [9], priority=-1, max_tokens=1))
    finish(s)
    assert s.num_preemptions == 1
    assert s.sessions["", "a"].num_served_tokens == (5 + 1) + (5 + 3)


def test_sessions_of_two_tenants_never_meet() -> None:
    s = scheduler()
    finish(s, turn(0, range(6), tenant="x"), turn(1, range(6), tenant="y"))
    assert list(s.sessions) == [("x", "a"), ("y", "a")]
    assert s.end_session(("x", "a")) and not s.end_session(("z", "a"))
    assert list(s.sessions) == [("y", "a")]


@pytest.mark.parametrize("by_field", [True, False])
def test_an_ended_session_closes_and_its_blocks_are_evicted_first(by_field: bool) -> None:
    """Ten blocks of four: two of sessions a and b each, and two of a plain request before them."""
    s = scheduler(blocks=10)
    finish(s, request(0, range(200, 208), max_tokens=1))
    finish(s, turn(1, range(8), "a"), turn(2, range(100, 108), "b", end=by_field))
    if not by_field:
        assert s.end_session(("", "b"))
    assert list(s.sessions) == [("", "a")]
    assert s.pool.num_disposable_blocks == 4 + 2 + 2
    finish(s, request(9, range(900, 920), max_tokens=1))
    assert [cached(s, range(n, n + 8)) for n in (0, 100, 200)] == [2, 1, 2]


def test_a_session_that_ends_with_a_live_request_closes_after_it() -> None:
    s = scheduler()
    s.add(turn(0, range(6)))
    step(s)
    assert s.end_session(("", "a")) and list(s.sessions) == [("", "a")]
    step(s)
    assert not s.sessions and s.take_paused_sessions() == []


def test_a_turn_that_does_not_end_the_session_opens_it_again() -> None:
    s = scheduler()
    s.add(turn(0, range(6), end=True))
    s.add(turn(1, range(9)))
    finish(s)
    assert list(s.sessions) == [("", "a")]


def test_blocks_that_another_open_session_has_are_not_demoted() -> None:
    s = scheduler()
    finish(s, turn(0, range(12), "a"), turn(1, [*range(8), 90, 91, 92, 93], "b"))
    s.end_session(("", "a"))
    assert s.pool.num_disposable_blocks == s.pool.num_free_blocks - 3  # two shared, one of b
    s.end_session(("", "b"))
    assert s.pool.num_disposable_blocks == s.pool.num_free_blocks


def test_blocks_of_open_sessions_go_after_all_others() -> None:
    """Eight blocks: two of a session, older, and four of plain requests. Three are needed."""
    s = scheduler(blocks=8)
    finish(s, turn(0, range(8)))
    finish(s, request(1, range(50, 58), max_tokens=1), request(2, range(60, 68), max_tokens=1))
    assert (s.pool.num_cached_blocks, s.pool.num_disposable_blocks) == (6, 6)
    finish(s, request(3, range(70, 90), max_tokens=1))
    assert [cached(s, range(n, n + 8)) for n in (0, 50, 60)] == [2, 0, 1]
    finish(s, request(4, range(90, 118), max_tokens=1))
    assert cached(s, range(8)) == 1, "where no other block is left, protected ones go"


def test_a_protected_block_that_was_computed_again_is_protected() -> None:
    s = scheduler(blocks=4)
    finish(s, turn(0, range(8)))
    finish(s, request(1, range(50, 66), max_tokens=1))
    assert cached(s, range(8)) == 0
    finish(s, turn(1, range(8)))
    assert s.pool.num_disposable_blocks == 2
    audit(s)


def test_a_chain_is_demoted_from_its_end() -> None:
    pool = BlockPool(4, 1)
    pool.open(0, 3)
    for block, key in zip(pool.tables[0].blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(0)
    pool.unprotect([b"a", b"b", b"c", b"x"], demote=True)
    pool.allocate(2)
    assert pool.lookup([b"a", b"b", b"c"]) == [0, 1]


def test_a_used_block_can_be_protected_and_cannot_be_demoted() -> None:
    pool = BlockPool(2, 1)
    pool.open(0, 2)
    pool.publish(0, b"a")
    pool.publish(1, b"b")
    pool.protect([b"a"])
    pool.unprotect([b"b"], demote=True)
    pool.release(0)
    assert (pool.num_cached_blocks, pool.num_disposable_blocks) == (2, 1)
    assert pool.allocate(1) == [1]


def test_reset_and_resize_take_protected_blocks_too() -> None:
    pool = BlockPool(3, 1)
    pool.open(0, 3)
    for block, key in enumerate((b"a", b"b", b"c")):
        pool.publish(block, key)
    pool.protect([b"a", b"c"])
    pool.release(0)
    pool.resize(2)
    assert (pool.num_free_blocks, pool.num_disposable_blocks) == (2, 1)
    pool.reset_cache()
    assert (pool.num_cached_blocks, pool.num_disposable_blocks) == (0, 2)


def test_a_turn_that_diverges_demotes_the_old_branch() -> None:
    """Compaction: the second prompt shares one block of the three that the first turn left."""
    s = scheduler()
    finish(s, turn(0, range(12)))
    s.add(turn(1, [*range(4), *range(70, 76)]))
    step(s)
    assert (len(s.sessions["", "a"].chain), s.sessions["", "a"].num_tokens) == (1, 4)
    assert s.pool.num_disposable_blocks == s.pool.num_free_blocks and cached(s, range(12)) == 3
    audit(s)


def test_a_branch_that_was_cut_is_evicted_before_older_blocks() -> None:
    """Ten blocks: four are empty, two of the old branch are demoted, and one more is needed."""
    s = scheduler(blocks=10)
    finish(s, request(0, range(50, 58), max_tokens=1))
    finish(s, turn(1, range(12)))
    finish(s, turn(2, [*range(4), *range(70, 76)]))
    finish(s, request(3, range(90, 110), max_tokens=1))
    assert [cached(s, range(50, 58)), cached(s, range(12))] == [2, 2]


def test_a_turn_alongside_another_one_demotes_nothing() -> None:
    s = scheduler()
    finish(s, turn(0, range(12)))
    s.add(turn(1, range(13), max_tokens=9))
    s.add(turn(2, [*range(4), 70, 71]))
    step(s)
    assert len(s.sessions["", "a"].chain) == 3
    audit(s)


def test_a_longer_branch_replaces_the_chain() -> None:
    """Two turns run together: one leaves three blocks, the other four, of which one is the same."""
    s = scheduler()
    finish(s, turn(0, range(12)), turn(1, [*range(4), *range(70, 83)], max_tokens=3))
    session = s.sessions["", "a"]
    assert len(session.chain) == len(s.pool.lookup(session.chain)) == 4
    assert s.pool.num_disposable_blocks == s.pool.num_free_blocks - 4
    audit(s)


# Expiry.


def test_only_the_pause_that_the_timer_was_set_for_expires() -> None:
    s = scheduler()
    finish(s, turn(0, range(6)))
    finish(s, turn(1, range(9)))
    assert not s.expire_session(("", "a"), 1)
    s.add(turn(2, range(12)))
    assert not s.expire_session(("", "a"), 2) and not s.expire_session(("", "a"), 3)
    finish(s)
    assert s.expire_session(("", "a"), 3) and not s.sessions


def test_the_blocks_of_an_expired_session_are_as_others() -> None:
    s = scheduler(blocks=8)
    finish(s, turn(0, range(8)))
    finish(s, request(1, range(50, 58), max_tokens=1))
    assert s.expire_session(("", "a"), 1)
    assert s.pool.num_disposable_blocks == 8
    finish(s, request(2, range(60, 80), max_tokens=1))
    assert [cached(s, range(n, n + 8)) for n in (0, 50)] == [2, 1]


@pytest.mark.parametrize(
    ("pause_s", "seconds"), [(None, 60.0), (0.0, 5.0), (10.0, 25.0), (1000.0, 60.0)]
)
def test_a_pause_may_take_twice_as_long_as_expected(pause_s: float | None, seconds: float) -> None:
    assert Session(("", "a"), expected_pause_s=pause_s).time_to_live_s(60.0) == seconds


# Bounds.


def test_beyond_its_bound_a_tenant_s_longest_paused_session_expires() -> None:
    s = scheduler(max_sessions=2)
    finish(s, turn(0, range(6), "a"))
    finish(s, turn(1, range(6), "b"))
    finish(s, turn(2, range(9), "a"))
    finish(s, turn(3, range(6), "c"), turn(4, range(6), "z", tenant="other"))
    assert list(s.sessions) == [("", "a"), ("", "c"), ("other", "z")]


def test_beyond_its_bound_a_tenant_without_a_paused_session_opens_none() -> None:
    s = scheduler(max_sessions=1)
    s.add(turn(0, range(6), "a"))
    s.add(turn(1, range(6), "b"))
    assert list(s.sessions) == [("", "a")] and s.requests[1][0].session is None
    finish(s)


def test_chains_forget_blocks_that_were_evicted() -> None:
    """A hundred sessions of two blocks pass through four blocks: chains stay within the bound."""
    s = scheduler(blocks=4)
    for number in range(100):
        finish(s, turn(number, range(9 * number, 9 * number + 8), str(number)))
        assert len(s.sessions["", str(number)].chain) == 2, "its own blocks are cached"
    assert len(s.sessions) == 100
    assert sum(len(session.chain) for session in s.sessions.values()) <= 4 * 4


# Recognition.


def test_a_request_that_continues_another_one_is_recognised() -> None:
    s = scheduler()
    finish(s, request(5, range(6), max_tokens=4))
    assert not s.sessions
    finish(s, request(6, [*range(6), 7, 7, 7, 7, 1, 2, 3], max_tokens=4))
    session = s.sessions["", 5]
    assert (session.num_turns, len(session.chain)) == (2, 4)
    finish(s, request(7, [*range(6), 7, 7, 7, 7, 1, 2, 3, 7, 7, 7, 7, 9], max_tokens=2))
    assert list(s.sessions) == [("", 5)] and session.num_turns == 3


def test_a_request_that_continues_blocks_that_are_gone_is_not_recognised() -> None:
    """A sleep drops the content of all blocks, and computed again they have the same hashes."""
    s = scheduler()
    finish(s, request(5, range(6), max_tokens=4))
    s.discard_kv("the model sleeps", s.prefix_cache.namespace)
    assert not s.session_tips
    finish(s, request(6, [*range(6), 7, 7, 7, 7, 1, 2, 3], max_tokens=4))
    assert not s.sessions


def test_the_scheduler_lists_what_later_requests_can_continue_and_what_others_have_used() -> None:
    s = scheduler()
    finish(s, request(5, range(6), max_tokens=4))
    (tenant, tip), key = next(iter(s.session_tips.items()))
    assert (tenant, key) == ("", ("", 5)) and s.pool.lookup([tip])
    finish(s, turn(6, range(20, 32)))
    assert not s.blocks_used_by_others
    finish(s, request(7, [*range(20, 28), 1], max_tokens=1))
    assert list(s.blocks_used_by_others) == s.sessions["", "a"].chain[1:2]
    s.end_session(("", "a"))
    assert not s.blocks_used_by_others


def test_the_audit_finds_a_block_of_no_chain_among_those_that_others_have_used() -> None:
    s = scheduler()
    finish(s, turn(0, range(8)))
    s._session_table.used_by_others.add(b"of no chain")
    with pytest.raises(AssertionError):
        audit(s)


def test_a_request_with_the_same_beginning_alone_is_not_recognised() -> None:
    s = scheduler()
    finish(s, request(5, range(12), max_tokens=2))
    finish(s, request(6, [*range(8), 50, 51, 52, 53, 54], max_tokens=2))
    assert not s.sessions


def test_a_recognised_session_begins_with_the_blocks_of_its_first_request() -> None:
    s = scheduler()
    finish(s, request(5, range(6), max_tokens=4))
    s.add(request(6, [*range(6), 7, 7, 7, 7, 1, 2, 3], max_tokens=2))
    assert len(s.sessions["", 5].chain) == 2
    assert s.pool.num_disposable_blocks == s.pool.num_free_blocks - 2
    audit(s)


def test_of_two_requests_that_a_prompt_continues_the_longer_is_its_session() -> None:
    s = scheduler()
    prompt = [0, 1, 2, 3, 4, 5, 7, 7, 7, 7]
    finish(s, request(5, prompt[:6], max_tokens=3), request(7, prompt, max_tokens=4))
    finish(s, request(8, [*prompt, 7, 7, 7, 7, 1], max_tokens=2))
    assert list(s.sessions) == [("", 7)]


def test_another_tenant_s_request_is_not_recognised() -> None:
    s = scheduler()
    finish(s, request(5, [0, 1, 2], max_tokens=3))
    finish(s, Request(6, (0, 1, 2, 7, 7, 3), SamplingParams(max_tokens=1), tenant="other"))
    assert not s.sessions


def test_only_the_latest_ended_requests_can_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.sessions.MAX_TIPS", 20)
    s = scheduler(blocks=4)
    for number in range(21):
        finish(s, request(number, [number, 8, 9], max_tokens=2))
    finish(s, request(21, [0, 8, 9, 7, 7, 1], max_tokens=1))
    assert not s.sessions
    finish(s, request(22, [20, 8, 9, 7, 1], max_tokens=1))
    assert list(s.sessions) == [("", 20)]


def test_without_prefix_caching_no_request_is_recognised() -> None:
    s = scheduler(enable_prefix_caching=False)
    finish(s, request(0, range(8), max_tokens=2))
    finish(s, request(1, range(16), max_tokens=2))
    assert not s.sessions
    finish(s, turn(2, range(8)))
    assert s.sessions["", "a"].chain == []


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("", "", 0),
        ("ab", "", 0),
        ("ab", "ax", 1),
        ("abc", "abc", 3),
        ("ab", "abcd", 2),
        ("x", "y", 0),
    ],
)
def test_the_common_beginning_of_two_chains_is_found(first: str, second: str, common: int) -> None:
    chains = [[text[: n + 1].encode() for n in range(len(text))] for text in (first, second)]
    assert num_common_blocks(*chains) == common


def test_with_a_bound_of_no_sessions_there_are_none() -> None:
    s = scheduler(max_sessions=0)
    finish(s, turn(0, range(6)), request(1, range(6), max_tokens=4))
    finish(s, request(2, [*range(6), 7, 7, 7, 7, 1, 2, 3], max_tokens=4))
    assert not s.sessions and s.pool.num_disposable_blocks == s.pool.num_free_blocks


# What a policy may do with sessions.


def wait_for_sessions(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Admit no new session while one is paused."""
    if any(session.is_paused for session in context.sessions.values()):
        return next((c for c in waiting if c.session and c.session.num_turns > 1), None)
    return waiting[0]


PATIENT = FCFS._replace(admit=wait_for_sessions)


def test_a_policy_may_let_all_wait_for_a_paused_session() -> None:
    s = scheduler(policy=PATIENT)
    finish(s, turn(0, range(6)))
    s.add(turn(1, range(50, 56), "b"))
    states = [s.can_plan, s.schedule() is None, s.can_plan, s.has_work]
    assert states == [True, True, False, True]
    audit(s)
    s.add(turn(2, range(9)))
    assert s.can_plan and [row.seq_id for row in next_plan(s).rows] == [1, 2]


@pytest.mark.parametrize("is_end", [True, False])
def test_the_wait_ends_with_the_session(is_end: bool) -> None:
    s = scheduler(policy=PATIENT)
    finish(s, turn(0, range(6)))
    s.add(turn(1, range(50, 56), "b"))
    assert s.schedule() is None
    assert s.end_session(("", "a")) if is_end else s.expire_session(("", "a"), 1)
    assert s.can_plan and [row.seq_id for row in next_plan(s).rows] == [1]


def test_an_abort_ends_the_wait() -> None:
    s = scheduler(policy=PATIENT)
    finish(s, turn(0, range(6)))
    s.add(turn(1, range(50, 56), "b"))
    s.add(turn(2, range(60, 66), "c"))
    assert s.schedule() is None
    (delta,) = s.abort(1)
    assert delta.finish is FinishReason.ABORT and s.can_plan


def test_another_policy_or_number_of_blocks_ends_the_wait() -> None:
    s = scheduler(policy=PATIENT)
    finish(s, turn(0, range(6)))
    s.add(turn(1, range(50, 56), "b"))
    assert s.schedule() is None
    s.resize(32)
    assert s.can_plan and s.schedule() is None
    s.policy = FCFS
    assert s.can_plan and [row.seq_id for row in next_plan(s).rows] == [1]


def test_a_running_sequence_waits_for_no_paused_session() -> None:
    s = scheduler()
    finish(s, turn(0, range(6)))
    s.policy = FCFS._replace(split=lambda budget, decodes, filling, context: Split(0, (0,)))
    s.add(turn(1, range(50, 56), "b"))
    with pytest.raises(PolicyError, match="0 requests wait, 1 run"):
        s.schedule()


def test_without_a_paused_session_a_policy_must_admit() -> None:
    s = scheduler(policy=FCFS._replace(admit=lambda waiting, context: None))
    s.add(turn(0, range(6)))
    with pytest.raises(PolicyError, match="1 requests wait"):
        s.schedule()


def test_a_policy_chooses_the_session_that_is_evicted() -> None:
    """LRU order evicts session a first; the policy evicts the newest, from its end."""
    offers: list[list[str]] = []

    def newest(sessions: Sequence[Session], context: PolicyContext) -> Session:
        offers.append([str(each.key[1]) for each in sessions])
        return sessions[-1]

    s = scheduler(blocks=10, policy=FCFS._replace(evict=newest))
    for number, name in enumerate("abc"):
        finish(s, turn(number, range(100 * number, 100 * number + 12), name))
    finish(s, request(9, range(900, 908), max_tokens=1))
    assert [cached(s, range(n, n + 12)) for n in (0, 100, 200)] == [3, 3, 2]
    assert offers == [["a", "b", "c"]]
    assert [len(session.chain) for session in s.sessions.values()] == [3, 3, 2]


def test_the_session_of_a_running_request_is_not_offered_for_eviction() -> None:
    offers: list[list[str]] = []

    def first(sessions: Sequence[Session], context: PolicyContext) -> Session:
        offers.append([str(each.key[1]) for each in sessions])
        return sessions[0]

    s = scheduler(blocks=8, policy=FCFS._replace(evict=first))
    finish(s, turn(0, range(8), "a"))
    finish(s, turn(1, range(50, 58), "b"))
    s.add(turn(2, [*range(8), 7, 7], "a", max_tokens=16))
    while s.has_work:
        step(s)
        audit(s)
    assert offers and all(offer == ["b"] for offer in offers)


def test_the_session_of_the_request_to_be_admitted_is_not_offered_for_eviction() -> None:
    """Eight blocks: the turn starts on two, and needs the other six, two of them of session b."""
    offers: list[list[str]] = []

    def first(sessions: Sequence[Session], context: PolicyContext) -> Session:
        offers.append([str(each.key[1]) for each in sessions])
        return sessions[0]

    s = scheduler(blocks=8, policy=FCFS._replace(evict=first))
    finish(s, turn(0, range(8), "a"))
    finish(s, turn(1, range(50, 58), "b"))
    finish(s, turn(2, [*range(8), *range(70, 92)], "a"))
    assert offers == [["b"]]


def test_evicting_a_session_that_is_not_on_offer_is_an_error() -> None:
    s = scheduler(
        blocks=4, policy=FCFS._replace(evict=lambda sessions, context: Session(("", "x")))
    )
    finish(s, turn(0, range(12)))
    s.add(request(1, range(50, 62), max_tokens=1))
    with pytest.raises(PolicyError, match=r"evict returned session \('', 'x'\). Return one of"):
        s.schedule()


def test_a_policy_may_preempt_a_running_sequence_for_a_waiting_one() -> None:
    """One slot: the newest request runs, and the first one is preempted eight times at most."""

    def displace(
        running: Sequence[Candidate], waiting: Sequence[Candidate], context: PolicyContext
    ) -> Candidate | None:
        return running[0] if running and waiting[-1].id > running[0].id else None

    s = scheduler(
        max_num_seqs=1,
        policy=FCFS._replace(admit=lambda w, c: max(w, key=lambda x: x.id), displace=displace),
    )
    s.add(request(0, range(5), max_tokens=40, ignore_eos=True))
    step(s)
    for number in range(1, 12):
        s.add(request(number, [number], max_tokens=1))
        plan, _ = step(s)
        audit(s)
        if number <= MAX_PREEMPTIONS:
            assert [row.seq_id for row in plan.rows] == [number]
            assert [event.why for event in plan.preempted] == ["displaced for a waiting sequence"]
        else:
            assert [row.seq_id for row in plan.rows] == [0] and not plan.preempted
        if number <= MAX_PREEMPTIONS:
            step(s)
    finish(s)


def test_overtaken_sequences_are_counted() -> None:
    counts: list[list[int]] = []

    def newest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        counts.append([c.num_overtaken for c in waiting])
        return max(waiting, key=lambda c: c.id)

    s = scheduler(max_num_seqs=1, policy=FCFS._replace(admit=newest))
    for number in range(3):
        s.add(request(number, [number + 1], max_tokens=1))
    finish(s)
    assert counts == [[0, 0, 0], [1, 1], [2]]


def test_sequences_later_in_the_queue_are_not_overtaken() -> None:
    s = scheduler(max_num_seqs=1, policy=FCFS._replace(admit=lambda waiting, context: waiting[1]))
    for number in range(3):
        s.add(request(number, [number + 1], max_tokens=1))
    step(s)
    assert {x.id: x.num_overtaken for x in s.waiting} == {0: 1, 2: 0}


def test_a_policy_learns_from_events_and_keeps_no_other_memory() -> None:
    """The state is a tuple of what happened; the scheduler hands it to the next decision."""

    def update(state: tuple[str, ...], event: PolicyEvent) -> tuple[str, ...]:
        name = event.candidate.id if event.candidate is not None else "-"
        session = event.session.key[1] if event.session is not None else "-"
        return (*state, f"{event.kind.value} {name} {session}")

    states: list[Any] = []

    def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        states.append(context.state)
        return waiting[0]

    s = scheduler(policy=FCFS._replace(admit=admit, update=update, initial_state=()))
    finish(s, turn(0, range(6), end=True))
    assert states == [("arrived 0 a",)]
    assert s.policy_calls.state == (
        "arrived 0 a",
        "admitted 0 a",
        "finished 0 a",
        "session closed - a",
    )
    assert {kind.value for kind in PolicyEventKind} == {
        *("arrived", "admitted", "preempted", "finished", "session closed")
    }


def test_an_update_that_fails_loses_no_request() -> None:
    def update(state: int, event: PolicyEvent) -> int:
        if event.kind is PolicyEventKind.FINISHED:
            raise ValueError("no")
        return state

    s = scheduler(policy=FCFS._replace(update=update, initial_state=0))
    s.add(request(0, range(3), max_tokens=1))
    s.add(request(1, range(3), max_tokens=2))
    _, deltas = step(s)
    assert deltas[0].finish is FinishReason.LENGTH
    with pytest.raises(PolicyError, match=r"the policy raised ValueError\('no'\) at .*Fix the pol"):
        s.schedule()
    audit(s)
    assert s.schedule() is not None


def test_a_decision_may_depend_on_the_length_of_the_cached_prefix() -> None:
    lengths: list[int] = []

    def longest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        lengths.extend(map(context.num_cached_tokens, waiting))
        return max(waiting, key=context.num_cached_tokens)

    s = scheduler(policy=FCFS._replace(admit=longest))
    finish(s, request(0, range(8), max_tokens=1))
    lengths.clear()
    s.add(request(1, [9] * 8))
    s.add(request(2, range(8)))
    s.add(request(3, range(16)))
    assert next_plan(s).rows[0].seq_id == 3
    assert lengths[:3] == [0, 4, 8]


# Exactness.


@pytest.mark.parametrize("depth", [1, 2])
def test_sessions_change_no_token(depth: int) -> None:
    """Sixteen turns of four sessions share ten blocks, with a policy that evicts the oldest."""
    policy = FCFS._replace(evict=lambda sessions, context: sessions[0])
    s = scheduler(blocks=10, max_num_seqs=3, policy=policy, depth=depth)
    requests = [
        turn(
            number,
            [number % 4, *range(3 + 2 * (number // 4))],
            "abcd"[number % 4],
            end=number == 13,
            max_tokens=6,
            temperature=1.0,
            seed=number,
        )
        for number in range(16)
    ]
    for each in requests:
        s.add(each)
    m = hash_model(s)
    served = serve(s, m, depth=depth)
    audit(s)
    for each in requests:
        assert served.tokens[each.id, 0] == list(compute_expected(m, config(), each).tokens)
    assert served.num_preemptions or s.pool.num_evictions


def test_a_result_in_flight_of_a_displaced_sequence_is_kept() -> None:
    """Depth 2: the victim has a token in flight when it is preempted."""

    def displace(
        running: Sequence[Candidate], waiting: Sequence[Candidate], context: PolicyContext
    ) -> Candidate | None:
        return running[0] if running[0].id == 0 and running[0].num_preemptions < 2 else None

    s = scheduler(max_num_seqs=1, policy=FCFS._replace(displace=displace), depth=2)
    first = request(0, range(5), max_tokens=6, ignore_eos=True)
    second = request(1, range(9, 12), max_tokens=3, ignore_eos=True)
    s.add(first)
    plan = next_plan(s)
    s.add(second)
    assert s.schedule() is None, "its token must be committed before it can be admitted again"
    assert s.sequences[0].slot is None and s.num_preemptions == 1
    s.commit(plan, create_output(plan))
    assert s.sequences[0].tokens == [*range(5), 7]
    audit(s)
    finish(s)
