"""Exact distributions of a speculative round, in fractions, by running the rules that serve.

Owns the sum over everything that chance decides in a round: drafts, acceptances, residual draws,
the plain draws behind. Knows no rule: it calls forge.speculative and adds up what that says.

    drafts d1..dk         each with q(d_i | drafts before)            every one of them
    u_1..u_k              (0, 1) cut where a decision can change       every interval, at both ends
    residual, bonus       named by a number that is no token, and      their weights, normalised
                          spread over what they may be in the end
    behind the round      p, up to k + 1 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from typing import TypeAlias

from forge.speculative import Trial, accepts, rejection, residual

Law: TypeAlias = Mapping[int, Fraction]
"""Probability of each token; one that is not there has 0."""
Context: TypeAlias = tuple[int, ...]
Laws: TypeAlias = Callable[[Context], Law]
"""The law of the token behind each context: a model."""

ONE = Fraction(1)
EDGE = Fraction(1, 2**40)
"""How near to the ends of an interval a decision is looked at."""
INSTEAD, BONUS = 100, 200
"""Names of draws in a round: above every token."""


@cache
def laws(size: int, parts: int) -> tuple[Law, ...]:
    """Every law on `size` tokens whose probabilities are multiples of 1 / parts."""
    shares = (s for s in product(range(parts + 1), repeat=size) if sum(s) == parts)
    return tuple({t: Fraction(n, parts) for t, n in enumerate(s) if n} for s in shares)


def mixed(grid: tuple[Law, ...], first: Law, start: int, stride: int) -> Laws:
    """A model whose first law is `first` and whose others are the grid's, another per context."""

    def law(context: Context) -> Law:
        if not context:
            return first
        place = start
        for token in context:
            place = place * 37 + stride * (token + 1)
        return grid[place % len(grid)]

    return law


def plainly(p: Laws, length: int, prefix: Context = ()) -> Iterator[tuple[Context, Fraction]]:
    """Every way to go on to `length` tokens by plain draws, and its probability."""
    if len(prefix) == length:
        yield prefix, ONE
        return
    for token, share in p(prefix).items():
        for whole, rest in plainly(p, length, (*prefix, token)):
            yield whole, share * rest


def decisions(trial: Trial) -> Iterator[tuple[Fraction, Fraction]]:
    """A `u` for every interval in which the decision is constant, and the interval's length."""
    p, q = Fraction(trial.p), Fraction(trial.q)
    cut = min(ONE, p / q) if q else ONE
    for low, high in ((Fraction(0), cut), (cut, ONE)):
        if low < high:
            ends = (low + EDGE, high - EDGE)
            said = [accepts(trial._replace(u=u)) for u in ends]
            assert said[0] == said[1], f"{trial} changes between {low} and {high}"
            yield ends[0], high - low


def rounds(p: Laws, q: Laws, drafts: Context) -> Iterator[tuple[Context, Fraction]]:
    """What a round with these drafts emits, draws by name, and the probability of each case."""
    trials = [
        Trial(d, p(drafts[:i]).get(d, Fraction(0)), q(drafts[:i])[d], Fraction(0), INSTEAD + i)
        for i, d in enumerate(drafts)
    ]
    for cases in product(*map(decisions, trials)):
        share = ONE
        for _, length in cases:
            share *= length
        judged = [trial._replace(u=u) for trial, (u, _) in zip(trials, cases, strict=True)]
        yield rejection(judged, BONUS), share


def spread(p: Laws, q: Laws, drafts: Context, emitted: Context) -> Iterator[tuple[int, Fraction]]:
    """The last token that was emitted: what its draw may be, and how likely."""
    last, before = emitted[-1], emitted[:-1]
    assert before == drafts[: len(before)], f"{emitted} begins with no {drafts}"
    if last == BONUS:
        assert before == drafts, f"a bonus behind {before}, and {drafts} were the drafts"
        weights: Mapping[int, Fraction] = p(drafts)
    else:
        assert last == INSTEAD + len(before), f"{last} stands in place {len(before)}"
        weights = residual(p(before), q(before))
    total = sum(weights.values())
    yield from ((token, weight / total) for token, weight in weights.items())


def speculated(p: Laws, q: Laws, k: int) -> dict[Context, Fraction]:
    """The law of the first k + 1 tokens: a round of k drafts, and plain draws behind it."""
    found: dict[Context, Fraction] = {}
    for drafts, drawn in plainly(q, k):
        cases: dict[Context, Fraction] = {}
        for emitted, share in rounds(p, q, drafts):
            cases[emitted] = cases.get(emitted, Fraction(0)) + share
        for emitted, share in cases.items():
            for token, chance in spread(p, q, drafts, emitted):
                begun = (*emitted[:-1], token)
                for whole, rest in plainly(p, k + 1, begun):
                    add = drawn * share * chance * rest
                    found[whole] = found.get(whole, Fraction(0)) + add
    return {whole: share for whole, share in found.items() if share}


def mean_emitted(p: Laws, q: Laws, k: int) -> Fraction:
    """Mean tokens of a round of k drafts."""
    return sum(
        (
            drawn * share * len(emitted)
            for drafts, drawn in plainly(q, k)
            for emitted, share in rounds(p, q, drafts)
        ),
        Fraction(0),
    )
