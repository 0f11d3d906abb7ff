"""Sessions, hostile cases: false recognition, stale timers, bounds, order of eviction, fairness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from forge.blocks import BlockPool, chain_hashes
from forge.config import Speculation
from forge.drafting import create_drafter
from forge.policy import FCFS, Candidate, PolicyContext
from forge.policy_loader import load_policy
from forge.proposers import NGramProposer
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.sessions import MAX_CHAIN_RATIO, Session
from tests.core.builders import (
    EOS,
    VOCAB,
    config,
    create_output,
    next_plan,
    request,
    scheduler,
    step,
)
from tests.core.test_sessions import cached, finish, turn

# Order of eviction.


def test_an_expired_session_is_evicted_from_its_end() -> None:
    """Eight blocks; an expired session has four. One allocation beyond the empty ones."""
    s = scheduler(blocks=8)
    finish(s, turn(0, range(16), max_tokens=1))
    assert s.expire_session(("", "a"), 1)
    finish(s, request(1, range(100, 117), max_tokens=1, prompt_logprobs=0))
    assert s.pool.num_evictions == 1
    assert cached(s, range(16)) == 3


def test_blocks_that_lose_protection_are_evicted_from_the_end() -> None:
    pool = BlockPool(4, 4)
    hashes = list(chain_hashes(b"root", list(range(12)), 4))
    table = pool.open(0, 12)
    for block, block_hash in zip(table.blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(0)
    pool.protect(hashes)
    pool.unprotect(hashes)
    pool.allocate(2)
    assert len(pool.lookup(hashes)) == 2


def test_the_policy_is_called_where_the_prompt_s_own_cached_blocks_are_not_left_for_new_ones() -> (
    None
):
    """Ten blocks. Sessions `a` and `b` pause with three each, and three others are cached.

    The request starts on these three and needs three new ones: two are protected, of `b`.
    """
    calls: list[list[Session]] = []

    def evict(sessions: Sequence[Session], context: PolicyContext) -> Session:
        calls.append(list(sessions))
        return sessions[-1]

    s = scheduler(blocks=10, policy=FCFS._replace(evict=evict))
    finish(s, turn(0, range(100, 112), "a", max_tokens=1))
    finish(s, turn(1, range(200, 212), "b", max_tokens=1))
    finish(s, turn(2, range(12), "c", max_tokens=1))
    assert s.expire_session(("", "c"), 3) and s.pool.num_disposable_blocks == 4
    assert not calls
    finish(s, request(3, range(24), max_tokens=1))
    assert [len(each) for each in calls] == [2]
    assert [cached(s, range(n, n + 12)) for n in (100, 200)] == [3, 1]


# Recognition.


def test_equal_prompts_with_short_outputs_are_no_session() -> None:
    """The last full block of each lies within a prompt that all have: a system prompt."""
    s = scheduler()
    for number in range(4):
        finish(s, request(number, [*range(8), 100 + number], max_tokens=1))
    assert not s.sessions


def test_another_tenant_s_equal_request_does_not_prevent_recognition() -> None:
    s = scheduler()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    finish(s, Request(5, tuple(range(8)), params, tenant="x"))
    finish(s, Request(6, tuple(range(8)), params, tenant="y"))
    finish(s, Request(7, (*range(8), 7, 7, 7, 7, 7, 1, 2), params, tenant="x"))
    assert list(s.sessions) == [("x", 5)]


# Bounds.


def test_chains_that_share_their_blocks_stay_within_the_bound() -> None:
    """Nothing is evicted: 50 sessions of the same eight blocks have 400 hashes, the pool 10."""
    s = scheduler(blocks=10)
    for number in range(50):
        finish(s, turn(number, range(33), str(number), max_tokens=1))
    num_hashes = sum(len(session.chain) for session in s.sessions.values())
    assert num_hashes <= MAX_CHAIN_RATIO * 10


def test_pauses_that_no_timer_reads_do_not_grow_without_bound() -> None:
    """A caller without timers, such as LLM, never reads them."""
    s = scheduler(max_sessions=2)
    for number in range(40):
        finish(s, turn(number, range(5), str(number % 4), max_tokens=1))
    assert len(s.sessions) == 2
    assert len(s._session_table._paused) <= 2


def test_a_timer_of_a_closed_session_does_not_expire_the_next_one_of_its_name() -> None:
    """The client ends `a` and opens it again: the first timer is still set for (a, 1 turn)."""
    s = scheduler()
    finish(s, turn(0, range(6)))
    (first,) = s.take_paused_sessions()
    timer = first.key, first.last_turn
    assert s.end_session(first.key)
    finish(s, turn(1, range(6)))
    assert not s.expire_session(*timer)


def test_drafts_do_not_evict_blocks_of_a_paused_session() -> None:
    """A draft is optional, and so is its block: rejected drafts must not cost a session its cache.

    Five blocks: the paused session has three, the running sequence two.
    """
    calls: list[int] = []

    def evict(sessions: Sequence[Session], context: PolicyContext) -> Session:
        calls.append(len(sessions))
        return sessions[0]

    numbers = config(blocks=5, speculation=Speculation(num_tokens=8, method="ngram"))
    s = Scheduler(
        numbers,
        VOCAB,
        (EOS,),
        FCFS._replace(evict=evict),
        drafter=create_drafter(numbers, NGramProposer()),
    )
    finish(s, turn(0, range(100, 112), "a", max_tokens=1))
    s.add(request(1, (5, 6, 7, 8, 9, 5), max_tokens=12))
    plan = next_plan(s)
    s.commit(plan, create_output(plan, 6))
    plan = next_plan(s)
    assert s.pool.num_evictions == 0 or calls, f"{plan.rows[0].drafts} evicted without the policy"
    assert cached(s, range(100, 112)) == 3


def test_the_end_of_a_session_does_not_demote_what_requests_without_one_use() -> None:
    """A prefix that was cached before is served to others: one session's end must not cost it."""
    s = scheduler(blocks=16)
    finish(s, request(0, range(200, 212), max_tokens=1))
    for number in range(1, 4):
        finish(s, request(number, [*range(12), number], max_tokens=5))
    finish(s, turn(4, [*range(12), 4], "a", tenant="other", end=True, max_tokens=1))
    finish(s, request(5, range(100, 144), max_tokens=1))
    assert cached(s, range(12)) >= cached(s, range(200, 212))


# Waiting.


def test_a_reset_of_the_prefix_cache_ends_the_wait_for_a_paused_session() -> None:
    """The policy waits while the session's blocks are cached: a reset changes its answer."""

    def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        return None if context.num_cached_tokens(waiting[0]) else waiting[0]

    s = scheduler(policy=FCFS._replace(admit=admit))
    finish(s, turn(0, range(8)))
    s.add(request(1, range(9), max_tokens=1))
    assert s.schedule() is None
    s.reset_prefix_cache()
    assert s.can_plan


# Policies.


def test_nothing_is_displaced_for_a_sequence_that_must_wait_for_a_commit() -> None:
    """`short` waits for the prefix that `other` computes, so preempting `long` admits nothing."""
    s = scheduler(
        policy=load_policy("attained-service"),
        blocks=100,
        max_num_seqs=2,
        max_num_batched_tokens=10,
    )
    s.policy.admit.__globals__["FIRST_LEVEL_TOKENS"] = 4
    finish(s, turn(0, range(80), "long", max_tokens=1))
    s.add(turn(1, range(81), "long", max_tokens=30))
    step(s)
    s.add(turn(2, range(200, 260), "other"))
    step(s)
    assert len(s.running) == 2
    s.add(turn(3, range(200, 260), "short"))
    for _ in range(4):
        step(s)
    assert s.sequences[1].num_preemptions == 0


def test_fair_queueing_gives_a_newcomer_no_credit_for_what_others_were_served_before() -> None:
    """No request is live when `new` comes. `old` was served for a long time, and is back."""
    s = scheduler(policy=load_policy("fair-queueing"), blocks=400, max_num_seqs=1)
    for number in range(10):
        finish(s, Request(number, tuple(range(60)), SamplingParams(max_tokens=20), tenant="old"))
    s.add(Request(20, tuple(range(100, 150)), SamplingParams(max_tokens=2), tenant="new"))
    for number in range(21, 30):
        for tenant in ("old", "new"):
            prompt = tuple(range(number, number + 50))
            s.add(
                Request(
                    number + 100 * (tenant == "old"),
                    prompt,
                    SamplingParams(max_tokens=2),
                    tenant=tenant,
                )
            )
    order = []
    while s.has_work:
        step(s)
        order += s.new_request_ids
    assert sum(number > 100 for number in order[:8]) >= 3


def test_fair_queueing_charges_a_preempted_sequence_once() -> None:
    """Recomputing is the scheduler's choice, not service that the tenant requested."""
    policy = load_policy("fair-queueing")
    s = scheduler(policy=policy, blocks=100)
    s.add(Request(0, tuple(range(40)), SamplingParams(max_tokens=8, temperature=0.0), tenant="x"))
    step(s)
    s.void("a step has failed")
    step(s)
    (account,) = cast(tuple[Any, ...], s.policy_calls.state)
    assert account.service == 40


def test_fair_queueing_survives_a_policy_that_is_set_while_requests_are_live() -> None:
    s = scheduler(blocks=100)
    s.add(Request(0, tuple(range(9)), SamplingParams(max_tokens=2), tenant="x"))
    s.policy = load_policy("fair-queueing")
    finish(s)
    (account,) = cast(tuple[Any, ...], s.policy_calls.state)
    assert account.num_live == 0


def test_the_working_set_shrinks_with_a_context_that_was_compacted() -> None:
    """A session of 60 tokens goes on with 8, so another of 60 fits with it in 100."""
    s = scheduler(policy=load_policy("working-set"), blocks=25, max_num_seqs=2)
    finish(s, turn(0, range(60), "a"))
    finish(s, turn(1, range(200, 208), "a"))
    s.add(turn(2, range(200, 212), "a", max_tokens=20))
    step(s)
    s.add(turn(3, range(300, 360), "b"))
    step(s)
    assert len(s.running) == 2


def test_a_session_without_blocks_of_its_own_is_not_offered_for_eviction() -> None:
    """Forty sessions have the same eight blocks. Cutting a chain frees none, and costs a call."""
    calls: list[int] = []

    def evict(sessions: Sequence[Session], context: PolicyContext) -> Session:
        calls.append(len(sessions))
        return sessions[-1]

    s = scheduler(blocks=10, policy=FCFS._replace(evict=evict))
    for number in range(40):
        finish(s, turn(number, range(33), str(number), max_tokens=1))
    assert not calls
    finish(s, request(99, range(100, 112), max_tokens=1))
    assert len(calls) <= 1


def test_a_request_that_was_aborted_in_the_queue_takes_no_room_in_the_working_set() -> None:
    """It was never computed, and its session has no block. Others do not wait for it."""
    s = scheduler(policy=load_policy("working-set"), blocks=25, max_num_seqs=2)
    s.add(turn(0, range(90), "aborted"))
    s.abort(0)
    s.add(turn(1, range(100, 112), "b", max_tokens=20))
    s.add(turn(2, range(200, 212), "c", max_tokens=20))
    step(s)
    step(s)
    assert len(s.running) == 2
