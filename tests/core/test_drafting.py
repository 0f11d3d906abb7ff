"""Drafts in plans: rows with drafts, the draft model's rows, and the blocks that are freed.

Plans and results are literal; no model runs. Whole engines are in test_speculation.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from forge.config import Speculation, StepCosts
from forge.draft_length import CHECK_INTERVAL_STEPS
from forge.drafting import NO_DRAFTER, ModelDrafter, ProposerDrafter, create_drafter
from forge.proposers import NGramProposer, OracleProposer, Proposer
from forge.request import Delta, SamplingParams, Structure
from forge.scheduler import Scheduler
from forge.seam import DraftRef, RowOutput, StepOutput, StepPlan, TokenRef, Verified
from tests.core.builders import EOS, VOCAB, check_block_pool, config, next_plan, request

COSTLY_DRAFTS = StepCosts(((1, 1.0), (64, 64.0)), ((1, 1.0), (64, 64.0)))
"""Costs under which no draft pays."""


def create_scheduler(
    k: int, proposer: Proposer | None = None, *, spec: dict[str, Any] | None = None, **numbers: Any
) -> Scheduler:
    """Return a scheduler with k drafts a row."""
    numbers = {"block_size": 2, "blocks": 256} | numbers
    chosen = config(speculation=Speculation(num_tokens=k, **(spec or {})), **numbers)
    return Scheduler(chosen, VOCAB, (EOS,), drafter=create_drafter(chosen, proposer))


def get_drafter(s: Scheduler) -> ModelDrafter:
    assert isinstance(s.drafter, ModelDrafter)
    return s.drafter


def commit_tokens(
    s: Scheduler, plan: StepPlan, *rows: tuple[int, ...], undrafted: tuple[int, ...] = ()
) -> list[Delta]:
    """Commit these tokens for the plan: all but the last are accepted drafts."""
    outputs = []
    for row, tokens in zip(plan.rows, rows, strict=True):
        verified = tuple(Verified(token) for token in tokens[: len(row.drafts)])
        outputs.append(RowOutput(tokens, verified=verified))
    deltas = s.commit(plan, StepOutput(plan.step, tuple(outputs), undrafted))
    check_block_pool(s.pool)
    if isinstance(s.drafter, ModelDrafter):
        check_block_pool(s.drafter.pool)
    return deltas


def start_request(s: Scheduler, **params: Any) -> None:
    """Start request 0, with its prompt 5 6 7 and its first token, 8."""
    s.add(request(0, (5, 6, 7), **{"max_tokens": 20, "ignore_eos": True, **params}))
    commit_tokens(s, next_plan(s), (8,))


# The draft model's plans.


def test_the_draft_model_computes_the_prompt_alongside_the_target_and_samples_nothing() -> None:
    s = create_scheduler(2)
    s.add(request(0, (5, 6, 7), max_tokens=9))
    plan = next_plan(s)
    (each,) = plan.drafts
    (row,) = each.rows
    assert (each.step, row.start, row.tokens, row.num_samples) == (0, 0, (5, 6, 7), 0)
    assert row.new_blocks == (0, 1) and row.bind is not None and row.bind.proposes
    assert plan.rows[0].bind is not None and not plan.rows[0].bind.proposes


def test_the_draft_model_is_bound_without_parameters_of_reports() -> None:
    s = create_scheduler(2)
    reported = {"logprobs": 2, "stop": ("x",), "structure": Structure.regex("a")}
    s.add(request(0, (5, 6, 7), max_tokens=9, temperature=0.5, **reported))
    plan = next_plan(s)
    ((row,),) = (each.rows for each in plan.drafts)
    assert row.bind is not None
    assert row.bind.params == SamplingParams(max_tokens=9, temperature=0.5)


def test_a_row_with_drafts_is_the_last_token_and_a_name_for_each_draft() -> None:
    s = create_scheduler(2)
    start_request(s)
    plan = next_plan(s)
    (row,) = plan.rows
    assert (row.start, row.tokens, row.num_samples) == (3, (8,), 3)
    assert row.drafts == (DraftRef(0, 0), DraftRef(1, 0)) and row.end == 6
    first, second = plan.drafts
    assert (first.step, second.step) == (1, 2)
    assert [(r.start, r.tokens, r.refs, r.num_samples) for r in first.rows] == [(3, (8,), (), 1)]
    assert [(r.start, r.tokens, r.refs, r.num_samples) for r in second.rows] == [
        (4, (), (TokenRef(1, 0),), 1)
    ]


@pytest.mark.parametrize(
    ("tokens", "target_start", "draft_start", "draft_tokens"),
    [((9, 3, 4), 6, 5, (3, 4)), ((9, 3), 5, 5, (3,)), ((9,), 4, 4, (9,))],
)
def test_after_a_round_both_models_continue_from_the_confirmed_tokens(
    tokens: tuple[int, ...], target_start: int, draft_start: int, draft_tokens: tuple[int, ...]
) -> None:
    """After full acceptance the draft model has not computed the last draft: it gets two tokens."""
    s = create_scheduler(2)
    start_request(s)
    commit_tokens(s, next_plan(s), tokens)
    assert s.running[0].tokens == [5, 6, 7, 8, *tokens]
    plan = next_plan(s)
    assert plan.rows[0].start == target_start
    (row,) = plan.drafts[0].rows
    assert (row.start, row.tokens, row.num_samples) == (draft_start, draft_tokens, 1)


def test_blocks_of_rejected_drafts_go_back_to_both_pools() -> None:
    """I35: blocks of two. 4 tokens and 5 drafts take five blocks; two are left afterwards."""
    s = create_scheduler(5)
    start_request(s)
    pool = get_drafter(s).pool
    plan = next_plan(s)
    assert (s.pool.num_used_blocks, pool.num_used_blocks) == (5, 4)
    commit_tokens(s, plan, (9,))
    assert (s.pool.num_used_blocks, pool.num_used_blocks) == (2, 2)
    assert s.running[0].table.num_tokens == 4 == pool.tables[0].num_tokens
    row = next_plan(s).rows[0]
    assert (row.keep, len(row.new_blocks)) == (2, 3), "the row sends the blocks again"


def test_blocks_that_were_sent_with_drafts_are_not_sent_again() -> None:
    """Blocks of two: six computed tokens fill three, and the next row needs two more."""
    s = create_scheduler(2)
    start_request(s)
    commit_tokens(s, next_plan(s), (9, 10, 11))
    row = next_plan(s).rows[0]
    assert (row.start, row.end, row.keep, len(row.new_blocks)) == (6, 9, 3, 2)


def test_blocks_of_accepted_drafts_stay() -> None:
    s = create_scheduler(5)
    start_request(s)
    commit_tokens(s, next_plan(s), (9, 9, 9, 9, 9, 9))
    assert (s.pool.num_used_blocks, get_drafter(s).pool.num_used_blocks) == (5, 4)


def test_the_last_token_and_its_drafts_are_counted_as_planned() -> None:
    s = create_scheduler(2)
    start_request(s)
    before = s.num_planned_tokens
    assert (next_plan(s).num_tokens, s.num_planned_tokens - before) == (3, 3)


def test_a_row_has_no_more_drafts_than_the_output_can_take() -> None:
    """I40: one of 3 tokens is known; after one draft comes the last."""
    s = create_scheduler(5)
    start_request(s, max_tokens=3)
    plan = next_plan(s)
    assert len(plan.rows[0].drafts) == 1 and len(plan.drafts) == 1
    assert commit_tokens(s, plan, (9, 9))[0].tokens == (9, 9)
    assert not s.has_work


def test_the_last_token_is_decoded_without_drafts() -> None:
    s = create_scheduler(5)
    start_request(s, max_tokens=2)
    plan = next_plan(s)
    assert not plan.rows[0].drafts and not plan.drafts


def test_drafts_use_the_budget_that_other_rows_leave() -> None:
    """Eight positions: two decodes leave six, the first takes four of them, the second two."""
    s = create_scheduler(4, max_num_batched_tokens=8, max_num_seqs=2)
    for index in range(2):
        s.add(request(index, (5, 6 + index), max_tokens=20, ignore_eos=True))
    commit_tokens(s, next_plan(s), (8,), (8,))
    plan = next_plan(s)
    assert [len(row.drafts) for row in plan.rows] == [4, 2]
    assert plan.num_tokens == 8
    assert [len(each.rows) for each in plan.drafts] == [2, 2, 1, 1]


def test_drafts_take_blocks_that_are_free_and_preempt_no_sequence() -> None:
    """Four blocks of two: the sequence holds two, and the others have room for 4 drafts."""
    s = create_scheduler(9, blocks=4, max_model_len=9)
    start_request(s, max_tokens=None)
    plan = next_plan(s)
    assert len(plan.rows[0].drafts) == 4 and not plan.preempted
    assert s.pool.num_free_blocks == 0


def test_a_draft_pool_that_is_full_leaves_the_sequence_without_drafts() -> None:
    """I38: one block of two cannot hold the prompt. The draft model computes what fits."""
    s = create_scheduler(3, spec={"num_blocks": 1})
    start_request(s)
    plan = next_plan(s)
    assert not plan.rows[0].drafts and plan.rows[0].num_samples == 1
    assert get_drafter(s).pool.num_used_blocks == 1
    commit_tokens(s, plan, (9,))
    assert s.running[0].tokens[-1] == 9


def test_a_draft_pool_that_is_nearly_full_shortens_the_drafts() -> None:
    """Three blocks of two: 4 tokens are known, and positions 4 and 5 are left for d1 and d2.

    The last draft, d3, needs no position: the draft model never computes it.
    """
    s = create_scheduler(5, spec={"num_blocks": 3})
    start_request(s)
    assert len(next_plan(s).rows[0].drafts) == 3


def test_the_draft_model_catches_up_within_its_budget_before_it_drafts() -> None:
    """After a failure the draft model has nothing: 20 tokens are computed again, four a plan."""
    s = create_scheduler(1, max_num_batched_tokens=4, max_num_seqs=1)
    s.add(request(0, range(5, 25), max_tokens=200, ignore_eos=True))
    for _ in range(4):
        commit_tokens(s, next_plan(s), ())
    commit_tokens(s, next_plan(s), (8,), undrafted=(0,))
    for _ in range(tokens_until_inspection(s)):
        plan = next_plan(s)
        assert not plan.drafts
        commit_tokens(s, plan, (8,))
    num_tokens = []
    while not (plan := next_plan(s)).rows[0].drafts:
        num_tokens.append(plan.drafts[0].num_tokens)
        commit_tokens(s, plan, (8,))
    assert set(num_tokens) == {4} and len(num_tokens) > 10
    assert plan.drafts[0].rows[0].bind is None


# What the draft model shares.


def prefix_scheduler() -> Scheduler:
    s = create_scheduler(2, max_num_seqs=2)
    start_request(s, max_tokens=6)
    return s


def test_a_later_sequence_begins_on_the_draft_models_blocks_of_the_same_prefix() -> None:
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 10, 11))
    s.add(request(1, (5, 6, 7, 8, 9, 4), max_tokens=6))
    row = next_plan(s).drafts[0].rows[-1]
    assert (row.seq_id, row.start, len(row.new_blocks)) == (1, 4, 3)


def test_a_prompt_that_is_cached_in_whole_blocks_leaves_its_last_block_to_be_computed() -> None:
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 10, 11))
    s.add(request(1, (5, 6, 7, 8), max_tokens=6))
    row = next_plan(s).drafts[0].rows[-1]
    assert (row.seq_id, row.start, row.tokens) == (1, 2, (7, 8))


def test_a_prompt_with_one_token_after_its_cached_blocks_begins_at_that_token() -> None:
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 10, 11))
    s.add(request(1, (5, 6, 7, 8, 9), max_tokens=6))
    row = next_plan(s).drafts[0].rows[-1]
    assert (row.seq_id, row.start, row.tokens) == (1, 4, (9,))


@pytest.mark.parametrize(("prompt", "num_drafts"), [(range(1, 42), 2), (range(101, 142), 0)])
def test_only_a_prompt_that_is_not_cached_costs_the_draft_model_time(
    prompt: range, num_drafts: int
) -> None:
    """An output of 20 tokens saves the time to compute one prompt token, and not that of 41."""
    costs = StepCosts(((1, 1.0),), ((1, 0.1),), catch_up=((1, 1.0), (100, 100.0)))
    s = create_scheduler(2, spec={"costs": costs})
    s.add(request(0, range(1, 42), max_tokens=400, ignore_eos=True))
    commit_tokens(s, next_plan(s), (8,))
    commit_tokens(s, next_plan(s), (9, 10, 11))
    s.add(request(1, prompt, max_tokens=20, ignore_eos=True))
    next_plan(s)
    assert s.running[1].num_drafts == num_drafts


def test_rejected_drafts_are_in_neither_prefix_cache() -> None:
    """I35: drafts 9 10 were fed after 8. 9 was right and 10 was wrong: 8 9 fills no block."""
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 3))
    for pool in (s.pool, get_drafter(s).pool):
        # Position 5 held the rejected draft: blocks 0 and 1 are full of confirmed tokens.
        assert len(pool._hash_by_block) == 2
        assert pool.lookup(s.running[0].hashes[1:]) == pool.tables[0].blocks[:2]


def test_drafts_that_were_right_are_in_both_prefix_caches() -> None:
    """Six tokens are confirmed and computed by the target; the draft model computed five."""
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 10, 11))
    assert len(s.pool._hash_by_block) == 3 and len(get_drafter(s).pool._hash_by_block) == 2


def test_a_reset_forgets_what_the_draft_model_has_computed_too() -> None:
    s = prefix_scheduler()
    commit_tokens(s, next_plan(s), (9, 3))
    s.reset_prefix_cache()
    assert not s.pool._hash_by_block and not get_drafter(s).pool._hash_by_block


def test_without_prefix_caching_the_draft_model_publishes_nothing() -> None:
    s = create_scheduler(2, enable_prefix_caching=False)
    start_request(s)
    commit_tokens(s, next_plan(s), (9, 10, 11))
    assert not get_drafter(s).pool._hash_by_block


# Failures and ends.


def tokens_until_inspection(s: Scheduler) -> int:
    """Return the number of tokens until the controller inspects the only sequence."""
    return s.drafter.review_len(s.running[0]) - len(s.running[0].tokens)


def test_a_sequence_whose_drafts_failed_rests_and_then_catches_up_again() -> None:
    s = create_scheduler(2, max_num_batched_tokens=256)
    start_request(s, max_tokens=200)
    commit_tokens(s, next_plan(s), (9,), undrafted=(0,))
    assert not get_drafter(s).pool.tables and get_drafter(s).seq_ids == set()
    assert 3 * CHECK_INTERVAL_STEPS <= tokens_until_inspection(s) <= 4 * CHECK_INTERVAL_STEPS
    for _ in range(tokens_until_inspection(s)):
        plan = next_plan(s)
        assert not plan.drafts and plan.rows[0].num_samples == 1
        commit_tokens(s, plan, (9,))
    (row,) = next_plan(s).drafts[0].rows
    assert row.bind is not None and row.keep == 0
    # No block of a failed round was published.
    assert row.start == 0 and row.end == len(s.running[0].tokens)


def test_a_sequence_that_found_no_block_drafts_again_after_its_rest() -> None:
    """The draft model has 78 blocks of two, and the prompts need 81.

    Both sequences rest, as after a failure. Sequence 0 ends, and sequence 1 has enough blocks.
    """
    s = create_scheduler(2, spec={"num_blocks": 78}, max_num_batched_tokens=256)
    s.add(request(0, range(1, 151), max_tokens=3, ignore_eos=True))
    s.add(request(1, range(201, 213), max_tokens=200, ignore_eos=True))
    commit_tokens(s, next_plan(s), (8,), (8,))
    plan = next_plan(s)
    assert [len(row.drafts) for row in plan.rows] == [0, 0]
    commit_tokens(s, plan, (8,), (8,))
    assert get_drafter(s).pool.num_used_blocks == 0
    commit_tokens(s, next_plan(s), (8,), (8,))
    assert list(s.running) == [1]
    left = s.drafter.review_len(s.running[1]) - len(s.running[1].tokens)
    assert 3 * CHECK_INTERVAL_STEPS <= left <= 4 * CHECK_INTERVAL_STEPS
    for _ in range(left):
        plan = next_plan(s)
        assert not plan.rows[0].drafts
        commit_tokens(s, plan, (8,))
    for _ in range(3):
        plan = next_plan(s)
        assert len(plan.rows[0].drafts) == 2
        commit_tokens(s, plan, (8, 8, 8))


def test_a_draft_failure_of_a_sequence_that_has_ended_changes_nothing() -> None:
    s = create_scheduler(2)
    start_request(s, max_tokens=2)
    commit_tokens(s, next_plan(s), (9,), undrafted=(0, 77))
    assert not s.has_work


@pytest.mark.parametrize("how", ["abort", "end", "void"])
def test_the_draft_models_blocks_go_with_the_targets(how: str) -> None:
    s = create_scheduler(2)
    start_request(s, max_tokens=3)
    plan = next_plan(s)
    pool = get_drafter(s).pool
    assert pool.num_used_blocks > 0
    if how == "abort":
        s.abort(0)
    elif how == "void":
        s.void("the model failed")
    else:
        commit_tokens(s, plan, (9, 9))
    assert pool.num_used_blocks == s.pool.num_used_blocks == 0 and not get_drafter(s).seq_ids


def test_a_resumed_sequence_is_computed_by_the_draft_model_again() -> None:
    s = create_scheduler(2)
    start_request(s)
    next_plan(s)
    s.void("the model failed")
    plan = next_plan(s)
    (row,) = plan.drafts[0].rows
    assert row.bind is not None and row.epoch == 1 and row.keep == 0


def test_a_result_of_before_a_preemption_keeps_its_tokens_and_frees_nothing_twice() -> None:
    """The sequence lost its blocks while its drafts were verified: accepted tokens stay."""
    s = create_scheduler(2)
    start_request(s)
    plan = next_plan(s)
    s._preempt(s.running[0], "another needs the blocks")
    (delta,) = commit_tokens(s, plan, (9, 10))
    assert delta.tokens == (9, 10) and s.waiting[0].tokens == [5, 6, 7, 8, 9, 10]
    assert s.pool.num_used_blocks == 0
    (row,) = next_plan(s).rows
    assert (row.epoch, row.start, row.tokens) == (1, 2, (7, 8, 9, 10)), "5 6 are in the cache"


@pytest.mark.parametrize("tokens", [(9, 10, 11, 12), ()])
def test_a_row_with_more_tokens_than_it_may_have_or_none_ends_its_request(
    tokens: tuple[int, ...],
) -> None:
    s = create_scheduler(2)
    start_request(s)
    (delta,) = commit_tokens(s, next_plan(s), tokens)
    assert delta.error is not None and f"{len(tokens)} tokens, 3 were planned" in delta.error


# Stops within a round. I32, I40.


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop"),
    [
        ({"stop_token_ids": (10,)}, (9, 10), "stop", 10),
        ({"max_tokens": 4}, (9, 10, 11), "length", None),
        ({"max_tokens": 4, "stop_token_ids": (11,)}, (9, 10, 11), "stop", 11),
    ],
)
def test_tokens_after_an_end_within_a_round_are_dropped(
    params: dict[str, Any], tokens: tuple[int, ...], finish: str, stop: int | None
) -> None:
    """A stop before the limit takes precedence, and the limit is never exceeded."""
    s = create_scheduler(3)
    start_request(s, **params)
    plan = next_plan(s)
    (delta,) = commit_tokens(s, plan, (9, 10, 11, 12)[: len(plan.rows[0].drafts) + 1])
    assert delta.finish is not None
    assert (delta.tokens, delta.finish.value, delta.stop_token) == (tokens, finish, stop)


def test_an_end_id_within_a_round_ends_the_output_there() -> None:
    s = create_scheduler(3)
    start_request(s, ignore_eos=False)
    (delta,) = commit_tokens(s, next_plan(s), (9, EOS, 11, 12))
    assert (delta.tokens, delta.stop_token) == ((9, EOS), EOS)


def test_a_stop_before_min_tokens_does_not_end_a_round_and_a_later_one_does() -> None:
    s = create_scheduler(4)
    start_request(s, stop_token_ids=(10,), min_tokens=4)
    (delta,) = commit_tokens(s, next_plan(s), (10, 9, 10, 9, 9))
    assert (delta.tokens, delta.stop_token) == ((10, 9, 10), 10)


def test_a_token_that_is_none_of_the_vocabulary_ends_the_request_and_is_not_taken() -> None:
    """I36: the token is outside of the vocabulary."""
    s = create_scheduler(3)
    start_request(s)
    (delta,) = commit_tokens(s, next_plan(s), (9, VOCAB, 11))
    assert delta.error is not None and "vocabulary" in delta.error
    assert not s.has_work


# Running ahead.


def test_a_sequence_with_drafts_waits_for_each_commit_and_one_without_runs_ahead() -> None:
    s = create_scheduler(2, depth=2)
    start_request(s)
    next_plan(s)
    assert s.schedule() is None and len(s.ledger) == 1
    s = create_scheduler(2, depth=2, spec={"costs": COSTLY_DRAFTS})
    start_request(s)
    assert not next_plan(s).rows[0].drafts
    second = next_plan(s)
    assert second.rows[0].refs and len(s.ledger) == 2


def test_how_many_drafts_a_row_has_changes_at_commits_only() -> None:
    s = create_scheduler(4, spec={"costs": StepCosts(((1, 1.0), (64, 1.5)), ((1, 0.1), (64, 0.2)))})
    start_request(s, max_tokens=480)
    chosen = []
    for turn in range(240):
        before = s.running[0].num_drafts
        plan = next_plan(s)
        assert s.running[0].num_drafts == before
        row = plan.rows[0]
        assert len(row.drafts) == before
        right = before if turn < 20 else 0
        commit_tokens(s, plan, (9,) * (right + 1))
        chosen.append(before)
    assert {4, 1, 0} <= set(chosen)


# Guesses.


def test_a_proposed_draft_is_certain_and_needs_no_plan_of_a_model() -> None:
    s = create_scheduler(3, spec={"method": "ngram"})
    s.add(request(0, (5, 6, 7, 5), max_tokens=20))
    commit_tokens(s, next_plan(s), (6,))
    plan = next_plan(s)
    assert plan.rows[0].drafts == (7, 5, 6) and not plan.drafts
    commit_tokens(s, plan, (7, 3))
    assert not next_plan(s).rows[0].drafts, "7 3 was not there before"


def test_a_sequence_without_proposals_runs_ahead_and_is_inspected_again() -> None:
    s = create_scheduler(3, NGramProposer(), depth=2)
    start_request(s)
    first, second = next_plan(s), next_plan(s)
    assert second.rows[0].refs
    commit_tokens(s, first, (5,))
    commit_tokens(s, second, (6,))
    assert next_plan(s).rows[0].drafts == (7, 8, 5), "5 6 was there before"


def test_an_oracle_proposes_no_more_than_fits() -> None:
    s = create_scheduler(4, OracleProposer({0: (8, 9, 10, 11, 12)}, 1.0, VOCAB))
    start_request(s, max_tokens=4)
    assert next_plan(s).rows[0].drafts == (9, 10)


def test_the_drafter_is_as_the_configuration_says() -> None:
    draft = config(speculation=Speculation())
    assert create_drafter(config(), None) is create_drafter(config(), NGramProposer()) is NO_DRAFTER
    assert isinstance(create_drafter(draft, None), ModelDrafter)
    assert isinstance(create_drafter(draft, NGramProposer()), ProposerDrafter)
    assert isinstance(
        create_drafter(config(speculation=Speculation(method="ngram")), None), ProposerDrafter
    )


def test_without_speculation_no_row_has_drafts_and_no_draft_model_can_fail() -> None:
    s = Scheduler(config(), VOCAB, (EOS,))
    s.add(request(0, (5, 6, 7, 8), max_tokens=3))
    plan = next_plan(s)
    sequence = s.running[0]
    assert NO_DRAFTER.propose(sequence, 4) == () == NO_DRAFTER.take_plans()
    assert NO_DRAFTER.review_len(sequence) == sequence.max_len == 7
    with pytest.raises(AssertionError, match="none is configured"):
        s.commit(plan, StepOutput(plan.step, (RowOutput((9,)),), undrafted=(0,)))
