"""Exact distributions of a speculative round, in fractions, by running the acceptance rules.

Owns the sum over every random choice of a round: drafts, acceptances, residual draws, and the
plain draws after it. Knows no rule: it calls forge.acceptance and adds up its results.

    drafts d1..dk         each with q(d_i | drafts before)            every one of them
    u_1..u_k              (0, 1) cut where a decision can change       every interval, at both ends
    residual, bonus       named by a number that is no token, and      their weights, normalised
                          replaced by each token they may be
    after the round       p, up to k + 1 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from typing import TypeAlias

from forge.acceptance import RejectionInput, is_accepted, rejection_sample, residual

Distribution: TypeAlias = Mapping[int, Fraction]
"""Probability of each token; an absent token has probability 0."""
Context: TypeAlias = tuple[int, ...]
TokenModel: TypeAlias = Callable[[Context], Distribution]
"""A model: the distribution of the next token for each context."""

ONE = Fraction(1)
MARGIN = Fraction(1, 2**40)
"""Distance from the ends of an interval at which a decision is evaluated."""
RESIDUAL_DRAW, BONUS_DRAW = 100, 200
"""Names of draws in a round: numbers above every token."""


@cache
def grid_distributions(size: int, parts: int) -> tuple[Distribution, ...]:
    """Return every distribution on `size` tokens whose probabilities are multiples of 1 / parts."""
    shares = (s for s in product(range(parts + 1), repeat=size) if sum(s) == parts)
    return tuple({t: Fraction(n, parts) for t, n in enumerate(s) if n} for s in shares)


def mix_models(
    grid: tuple[Distribution, ...], first: Distribution, start: int, stride: int
) -> TokenModel:
    """Return a model with `first` at the empty context and the grid's distributions elsewhere."""

    def distribution(context: Context) -> Distribution:
        if not context:
            return first
        index = start
        for token in context:
            index = index * 37 + stride * (token + 1)
        return grid[index % len(grid)]

    return distribution


def plain_sequences(
    p: TokenModel, length: int, prefix: Context = ()
) -> Iterator[tuple[Context, Fraction]]:
    """Return every sequence of `length` plain draws after the context, with its probability."""
    if len(prefix) == length:
        yield prefix, ONE
        return
    for token, share in p(prefix).items():
        for whole, rest in plain_sequences(p, length, (*prefix, token)):
            yield whole, share * rest


def decisions(trial: RejectionInput) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield a `u` for every interval with a constant decision, and the interval's length."""
    p, q = Fraction(trial.p), Fraction(trial.q)
    threshold = min(ONE, p / q) if q else ONE
    for low, high in ((Fraction(0), threshold), (threshold, ONE)):
        if low < high:
            ends = (low + MARGIN, high - MARGIN)
            outcomes = [is_accepted(trial._replace(u=u)) for u in ends]
            assert outcomes[0] == outcomes[1], f"{trial} changes between {low} and {high}"
            yield ends[0], high - low


def round_outputs(
    p: TokenModel, q: TokenModel, drafts: Context
) -> Iterator[tuple[Context, Fraction]]:
    """Yield each output of a round with these drafts, draws by name, and its probability."""
    trials = [
        RejectionInput(
            d, p(drafts[:i]).get(d, Fraction(0)), q(drafts[:i])[d], Fraction(0), RESIDUAL_DRAW + i
        )
        for i, d in enumerate(drafts)
    ]
    for cases in product(*map(decisions, trials)):
        share = ONE
        for _, length in cases:
            share *= length
        decided_trials = [trial._replace(u=u) for trial, (u, _) in zip(trials, cases, strict=True)]
        yield rejection_sample(decided_trials, BONUS_DRAW), share


def last_token_distribution(
    p: TokenModel, q: TokenModel, drafts: Context, emitted: Context
) -> Iterator[tuple[int, Fraction]]:
    """Yield the possible values of the last emitted token, with their probabilities."""
    last, before = emitted[-1], emitted[:-1]
    assert before == drafts[: len(before)], f"{emitted} does not begin with drafts of {drafts}"
    if last == BONUS_DRAW:
        assert before == drafts, f"a bonus token after {before}, of the drafts {drafts}"
        weights: Mapping[int, Fraction] = p(drafts)
    else:
        assert last == RESIDUAL_DRAW + len(before), f"{last} at position {len(before)}"
        weights = residual(p(before), q(before))
    total = sum(weights.values())
    yield from ((token, weight / total) for token, weight in weights.items())


def speculative_distribution(p: TokenModel, q: TokenModel, k: int) -> dict[Context, Fraction]:
    """Return the distribution of the first k + 1 tokens: a round of k drafts, then plain draws."""
    found: dict[Context, Fraction] = {}
    for drafts, draft_probability in plain_sequences(q, k):
        cases: dict[Context, Fraction] = {}
        for emitted, share in round_outputs(p, q, drafts):
            cases[emitted] = cases.get(emitted, Fraction(0)) + share
        for emitted, share in cases.items():
            for token, token_probability in last_token_distribution(p, q, drafts, emitted):
                prefix = (*emitted[:-1], token)
                for whole, rest in plain_sequences(p, k + 1, prefix):
                    add = draft_probability * share * token_probability * rest
                    found[whole] = found.get(whole, Fraction(0)) + add
    return {whole: share for whole, share in found.items() if share}


def mean_emitted(p: TokenModel, q: TokenModel, k: int) -> Fraction:
    """Return the mean number of tokens of a round of k drafts."""
    return sum(
        (
            draft_probability * share * len(emitted)
            for drafts, draft_probability in plain_sequences(q, k)
            for emitted, share in round_outputs(p, q, drafts)
        ),
        Fraction(0),
    )
