"""Bound of a step: the prompt tokens of a mixed step follow from a table of measured times."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forge.config import MixedStepCosts
from forge.policy import POLICIES
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.step_bound import (
    MIN_TOKENS_DIVISOR,
    PendingPrompt,
    count_pairs,
    max_prompt_tokens,
    predict_step_us,
)
from tests.core.builders import next_plan, request, row_spans, scheduler, step

STAIRS = MixedStepCosts(((16, 3000), (17, 4000), (32, 4000), (33, 6000), (64, 6000)))
"""Graphs of 16, 32 and 64 tokens, and no time for attention."""


def prompt(num_pending: int, start: int = 0) -> PendingPrompt:
    return PendingPrompt(start, num_pending)


# The prediction.


@pytest.mark.parametrize(
    ("num_tokens", "us"),
    [(1, 3000), (16, 3000), (17, 4000), (24, 4000), (33, 6000), (64, 6000), (128, 12_000)],
)
def test_a_step_takes_the_time_of_its_graph_and_above_the_last_one_in_proportion(
    num_tokens: int, us: int
) -> None:
    assert predict_step_us(STAIRS, num_tokens, 0, 0) == us


def test_between_two_points_the_time_is_linear_and_rounded_down() -> None:
    costs = MixedStepCosts(((10, 100), (13, 200)))
    assert [predict_step_us(costs, n, 0, 0) for n in (10, 11, 12, 13)] == [100, 133, 166, 200]


def test_attention_adds_positions_of_decodes_and_pairs_of_chunks() -> None:
    costs = MixedStepCosts(((1, 1000),), position_ns=35, pair_ps=700)
    assert predict_step_us(costs, 1, 2000, 100_000) == 1000 + 70 + 70


def test_pairs_are_those_of_the_first_tokens_in_order() -> None:
    prompts = [prompt(2, start=10), prompt(4)]
    by_hand = {0: 0, 1: 11, 2: 11 + 12, 3: 23 + 1, 6: 23 + 1 + 2 + 3 + 4}
    assert {n: count_pairs(prompts, n) for n in by_hand} == by_hand


# The rule.


@pytest.mark.parametrize(
    ("max_step_us", "num_tokens"), [(3000, 12), (3999, 12), (4000, 28), (6000, 60), (7000, 70)]
)
def test_a_step_is_as_large_as_the_bound_allows_and_fills_its_graph(
    max_step_us: int, num_tokens: int
) -> None:
    """Four decodes take a part of each graph: 16 - 4, 32 - 4, 64 - 4."""
    assert max_prompt_tokens(STAIRS, max_step_us, [prompt(90)], 4, 0) == num_tokens


def test_what_fits_is_computed_at_once() -> None:
    assert max_prompt_tokens(STAIRS, 6000, [prompt(20), prompt(5)], 4, 0) == 25


def test_decodes_with_long_contexts_leave_less_time_for_prompts() -> None:
    costs = STAIRS._replace(position_ns=1000)
    assert max_prompt_tokens(costs, 6000, [prompt(90)], 4, 0) == 60
    assert max_prompt_tokens(costs, 6000, [prompt(90)], 4, 1999) == 28
    assert max_prompt_tokens(costs, 6000, [prompt(90)], 4, 2001) == 12


def test_a_chunk_after_many_positions_is_smaller() -> None:
    costs = MixedStepCosts(((1, 1000), (1001, 2000)), pair_ps=10**6)
    assert max_prompt_tokens(costs, 3000, [prompt(120, start=0)], 0, 0) == 61
    assert max_prompt_tokens(costs, 3000, [prompt(120, start=100)], 0, 0) == 18


def test_under_a_bound_below_the_decode_step_an_eighth_of_the_prompts_advances() -> None:
    linear = MixedStepCosts(((1, 100), (1001, 1100)))
    assert max_prompt_tokens(linear, 1, [prompt(160)], 8, 0) == 20
    assert max_prompt_tokens(linear, 1, [prompt(1)], 8, 10**9) == 1


def test_tokens_that_take_no_longer_than_the_least_ones_are_computed_too() -> None:
    """An eighth of 48 tokens is 6, and a graph of 16 computes 8 decodes and 8 of them."""
    assert max_prompt_tokens(STAIRS, 1, [prompt(48)], 8, 0) == 8


@pytest.mark.parametrize("seed", range(50))
def test_the_result_is_the_largest_within_the_bound(seed: int) -> None:
    rng = Random(seed)
    tokens = sorted(rng.sample(range(1, 200), rng.randint(1, 6)))
    times = sorted(rng.randint(1, 5000) for _ in tokens)
    costs = MixedStepCosts(
        tuple(zip(tokens, times, strict=True)), rng.choice((0, 50)), rng.choice((0, 10**5))
    )
    prompts = [prompt(rng.randint(1, 60), rng.randint(0, 90)) for _ in range(rng.randint(1, 4))]
    num_decodes, num_positions, bound_us = rng.randint(0, 40), rng.randint(0, 4000), 3000

    def step_us(n: int) -> int:
        return predict_step_us(costs, num_decodes + n, num_positions, count_pairs(prompts, n))

    pending = sum(each.num_pending for each in prompts)
    least = -(-pending // MIN_TOKENS_DIVISOR)
    fitting = [n for n in range(pending + 1) if step_us(n) <= bound_us or n <= least]
    largest = max_prompt_tokens(costs, bound_us, prompts, num_decodes, num_positions)
    assert largest == max(n for n in range(pending + 1) if step_us(n) <= step_us(fitting[-1]))


# The scheduler.


def bounded(max_step_ms: float | None, **numbers: Any) -> Scheduler:
    return scheduler(
        max_step_ms=max_step_ms, mixed_costs=STAIRS, max_num_batched_tokens=128, **numbers
    )


def start_decode(s: Scheduler) -> None:
    """Let request 0 decode."""
    s.add(request(0, range(3), max_tokens=50, ignore_eos=True))
    step(s)


def chunk_lens(plan: StepPlan, seq_id: int) -> list[int]:
    return [end - start for id, start, end in row_spans(plan) if id == seq_id]


@pytest.mark.parametrize(("max_step_ms", "chunk"), [(3.0, 15), (4.0, 31), (6.0, 63), (None, 100)])
def test_a_prompt_beside_a_decode_gets_the_tokens_within_the_bound(
    max_step_ms: float | None, chunk: int
) -> None:
    s = bounded(max_step_ms)
    start_decode(s)
    s.add(request(1, range(100), max_tokens=2))
    assert chunk_lens(next_plan(s), 1) == [chunk]


def test_a_decode_with_a_long_context_leaves_less_time_for_a_prompt() -> None:
    """A position takes 100 us: with 3 of them 700 us are left of a graph's 1000, with 13 none."""
    costs = STAIRS._replace(position_ns=100_000)
    chunks = []
    for prompt_len in (3, 13):
        s = scheduler(max_step_ms=5.0, mixed_costs=costs, max_num_batched_tokens=128)
        s.add(request(0, range(prompt_len), max_tokens=50, ignore_eos=True))
        step(s)
        s.add(request(1, range(100, 200), max_tokens=2))
        chunks += chunk_lens(next_plan(s), 1)
    assert chunks == [31, 15]


def test_a_later_chunk_of_a_prompt_is_smaller() -> None:
    """A pair takes 10 us, so the second chunk also pays for the positions of the first."""
    costs = MixedStepCosts(((1, 1000), (1001, 1100)), pair_ps=10**7)
    s = scheduler(max_step_ms=3.0, mixed_costs=costs, max_num_batched_tokens=128)
    start_decode(s)
    s.add(request(1, range(100), max_tokens=2))
    chunks = [chunk for _ in range(3) for chunk in chunk_lens(step(s)[0], 1)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 19 > chunks[1]


def test_a_step_that_delays_no_decode_is_not_bounded() -> None:
    s = bounded(3.0)
    s.add(request(0, range(100), max_tokens=2))
    assert row_spans(next_plan(s)) == [(0, 0, 100)]


def test_without_a_table_steps_are_not_bounded() -> None:
    s = scheduler(max_step_ms=3.0, max_num_batched_tokens=128)
    start_decode(s)
    s.add(request(1, range(100), max_tokens=2))
    assert chunk_lens(next_plan(s), 1) == [100]


def test_the_token_budget_is_a_bound_too() -> None:
    s = scheduler(max_step_ms=60.0, mixed_costs=STAIRS, max_num_batched_tokens=20)
    start_decode(s)
    s.add(request(1, range(100), max_tokens=2))
    assert chunk_lens(next_plan(s), 1) == [19]


def test_prompts_that_the_token_budget_has_no_room_for_do_not_count() -> None:
    """127 tokens of 128 are left, an eighth of them 16, and a graph of 32 has room for 31."""
    s = bounded(0.001, blocks=200)
    start_decode(s)
    for id in (1, 2, 3):
        s.add(request(id, range(100 * id, 100 * id + 100), max_tokens=2))
    assert [chunk_lens(next_plan(s), id) for id in (1, 2, 3)] == [[31], [], []]


def test_a_prompt_ends_under_a_bound_that_no_step_keeps_and_decodes_go_on() -> None:
    """Each step computes an eighth of what is left and fills its graph: 15 tokens here."""
    s = bounded(0.001)
    start_decode(s)
    s.add(request(1, range(100), max_tokens=1, ignore_eos=True))
    chunks = []
    while len(s.sequences) == 2:
        plan, _ = step(s)
        assert chunk_lens(plan, 0) == [1]
        chunks += chunk_lens(plan, 1)
    assert chunks == [15] * 6 + [10]


def test_a_long_prompt_does_not_fill_the_token_budget_under_a_low_bound() -> None:
    """An eighth of 128 tokens, and not of the 2,000 that wait: a graph of 16, with the decode."""
    s = bounded(0.001, blocks=1000, max_model_len=4000)
    start_decode(s)
    s.add(request(1, range(2000), max_tokens=1, ignore_eos=True))
    assert [chunk_lens(step(s)[0], 1) for _ in range(3)] == [[31]] * 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_splits_the_bounded_budget(policy: str) -> None:
    """prefill-first gives the decode's token to the prompt."""
    s = bounded(4.0, policy=POLICIES[policy])
    start_decode(s)
    s.add(request(1, range(100), max_tokens=2))
    plan = next_plan(s)
    assert sum(end - start for _, start, end in row_spans(plan)) == 32
