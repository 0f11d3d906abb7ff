"""Bound of a step: how many prompt tokens fit into the time of a step that has decodes.

Owns the prediction and the rule. Knows no sequence, policy or clock: times come from a table of
integers, so equal inputs give equal decisions on every machine.

    us │                          ┌────       512 tokens: one CUDA graph
       │- - - - - - -┌────────────┘- - - -    bound
       │   ┌─────────┘            ^
       │───┘                      └ the largest step within the bound: a graph is filled
       └──────────────────────────────────    tokens of the step

Always true: while prompts wait, a step computes at least 1 / MIN_TOKENS_DIVISOR of the tokens that
the token budget allows. So prompts advance under every bound, also one that decodes alone exceed.

Agrawal et al. 2024 (Sarathi-Serve): a token budget from a latency objective.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from forge.config import MixedStepCosts

MIN_TOKENS_DIVISOR = 8
"""A step computes at least what the budget allows, divided by this: see wiki/Scheduling.md."""


class PendingPrompt(NamedTuple):
    """Part of a prompt that a step may compute: `num_pending` tokens after `start` positions."""

    start: int
    num_pending: int


def max_prompt_tokens(
    costs: MixedStepCosts,
    max_step_us: int,
    prompts: Sequence[PendingPrompt],
    num_decodes: int,
    num_decode_positions: int,
) -> int:
    """Return the most prompt tokens, in the order of `prompts`, of a step within the bound.

    num_decode_positions   positions before all decode rows together

    At least 1 / MIN_TOKENS_DIVISOR of the pending tokens, and as many more as take no longer.
    O(log(tokens) * prompts).
    """
    num_pending = sum(prompt.num_pending for prompt in prompts)

    def step_us(num_tokens: int) -> int:
        pairs = count_pairs(prompts, num_tokens)
        return predict_step_us(costs, num_decodes + num_tokens, num_decode_positions, pairs)

    least = -(-num_pending // MIN_TOKENS_DIVISOR)
    limit_us = max(max_step_us, step_us(least))
    # A larger step never takes less time, so a binary search finds the largest.
    first_too_long = bisect_left(range(num_pending + 1), True, key=lambda n: step_us(n) > limit_us)
    return first_too_long - 1


def count_pairs(prompts: Sequence[PendingPrompt], num_tokens: int) -> int:
    """Return the query-key pairs of the first `num_tokens` pending tokens."""
    pairs = 0
    for start, num_pending in prompts:
        chunk = min(num_tokens, num_pending)
        pairs += chunk * start + chunk * (chunk + 1) // 2
        num_tokens -= chunk
    return pairs


def predict_step_us(
    costs: MixedStepCosts, num_tokens: int, num_decode_positions: int, num_pairs: int
) -> int:
    """Return the predicted time of a step in microseconds, rounded down."""
    attention_us = costs.position_ns * num_decode_positions // 1000
    return (
        _interpolate_us(costs.tokens, num_tokens)
        + attention_us
        + costs.pair_ps * num_pairs // 10**6
    )


def _interpolate_us(points: Sequence[tuple[int, int]], num_tokens: int) -> int:
    """Return the time at `num_tokens`: constant below the first point, linear between two."""
    index = bisect_left(points, num_tokens, key=lambda point: point[0])
    if index == 0:
        return points[0][1]
    if index == len(points):
        last_tokens, last_us = points[-1]
        return last_us * num_tokens // last_tokens
    (low, low_us), (high, high_us) = points[index - 1], points[index]
    return (low_us * (high - num_tokens) + high_us * (num_tokens - low)) // (high - low)
