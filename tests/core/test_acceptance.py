"""The acceptance rules keep the target's distribution: every case is summed in fractions.

The enumerated code is the code that serves; acceptance_enumeration.py adds up its results. The
last tests use floats: extreme values that a model can give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.acceptance import (
    RejectionInput,
    accept_coupled,
    expected_tokens,
    is_accepted,
    rejection_sample,
    residual,
)
from tests.core.acceptance_enumeration import (
    Context,
    Distribution,
    TokenModel,
    grid_distributions,
    mean_emitted,
    mix_models,
    plain_sequences,
    round_outputs,
    speculative_distribution,
)

HALF = Fraction(1, 2)


def is_exact(p: TokenModel, q: TokenModel, k: int) -> bool:
    """Return whether a round and the tokens after it have exactly the target's distribution."""
    return speculative_distribution(p, q, k) == dict(plain_sequences(p, k + 1))


def check_grid(size: int, parts: int, k: int, turns: Iterable[int]) -> Counter[str]:
    """Check every pair of first distributions on the grid, and count the cases."""
    grid, counts = grid_distributions(size, parts), Counter[str]()
    for turn in turns:
        for i, first in enumerate(grid):
            for j, draft in enumerate(grid):
                p = mix_models(grid, first, 3 * i + j + turn, 1 + turn)
                q = mix_models(grid, draft, i + 5 * j + turn, 2 + turn)
                assert is_exact(p, q, k), f"{size=} {parts=} {k=} {turn=} {first=} {draft=}"
                counts["equal"] += first == draft
                counts["disjoint"] += not first.keys() & draft.keys()
                counts["certain draft"] += len(draft) == 1
                counts["q = 0 where p is not"] += bool(first.keys() - draft.keys())
                counts["p = 0 where q is not"] += bool(draft.keys() - first.keys())
    return counts


KINDS = ("equal", "disjoint", "certain draft", "q = 0 where p is not", "p = 0 where q is not")


# Rejection.


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "parts", "k"),
    [(2, 8, 3), (3, 5, 1), (3, 3, 2), (3, 3, 3), (4, 4, 1), (4, 3, 2), (4, 2, 3)],
)
def test_a_round_and_the_tokens_after_it_have_exactly_the_targets_law(
    size: int, parts: int, k: int
) -> None:
    """Every p and q on a grid; after the first token both depend on the tokens before."""
    counts = check_grid(size, parts, k, turns=(0,))
    assert not [kind for kind in KINDS if not counts[kind]]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "parts", "k", "turns"),
    [
        *((2, parts, k, 9) for parts in (5, 9, 12) for k in (1, 2, 3)),
        *((3, parts, k, 5) for parts in (4, 6) for k in (1, 2, 3)),
        *((4, parts, k, 5) for parts in (2, 3, 4) for k in (1, 2, 3)),
        *((4, parts, 1, 1) for parts in (5, 6)),
    ],
)
def test_every_law_on_finer_grids_is_exactly_the_targets(
    size: int, parts: int, k: int, turns: int
) -> None:
    counts = check_grid(size, parts, k, range(turns))
    assert not [kind for kind in KINDS if not counts[kind]]


def check_tables(parts: int) -> int:
    """Check every table of p and q for two tokens and two drafts, and return their number."""
    grid, tables = grid_distributions(2, parts), 0
    contexts: list[Context] = [(), (0,), (1,)]
    for chosen in product(grid, repeat=6):
        target = dict(zip(contexts, chosen[:3], strict=True))
        draft = dict(zip(contexts, chosen[3:], strict=True))

        def p(context: Context, table: dict[Context, Distribution] = target) -> Distribution:
            return table.get(context, grid[sum(context) % len(grid)])

        def q(context: Context, table: dict[Context, Distribution] = draft) -> Distribution:
            return table[context]

        assert is_exact(p, q, 2), f"{target=} {draft=}"
        tables += 1
    return tables


def test_every_table_of_two_models_over_two_tokens_gives_exactly_the_targets_law() -> None:
    assert check_tables(2) == 3**6


@pytest.mark.soak
def test_every_finer_table_of_two_models_gives_exactly_the_targets_law() -> None:
    assert check_tables(3) == 4**6 and check_tables(5) == 6**6


def test_a_round_emits_the_accepted_drafts_and_one_token_more() -> None:
    """I32: every draft, every decision."""
    p, q = (
        mix_models(grid_distributions(3, 3), grid_distributions(3, 3)[4], 1, 1),
        mix_models(grid_distributions(3, 3), grid_distributions(3, 3)[7], 2, 3),
    )
    lengths = Counter[int]()
    for drafts, _ in plain_sequences(q, 3):
        for emitted, share in round_outputs(p, q, drafts):
            accepted = len(emitted) - 1
            assert emitted[:accepted] == drafts[:accepted] and share > 0
            lengths[accepted] += 1
    assert lengths.keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ({0: HALF, 1: HALF}, {0: HALF, 1: HALF}),
        ({0: HALF, 1: HALF}, {0: Fraction(1)}),
        ({0: Fraction(1)}, {1: Fraction(1)}),
        ({0: Fraction(2, 3), 1: Fraction(1, 3)}, {0: Fraction(1, 4), 1: Fraction(3, 4)}),
    ],
)
def test_a_round_has_as_many_tokens_on_average_as_the_formula_says(
    k: int, p: Distribution, q: Distribution
) -> None:
    """If neither distribution depends on the context, a draft is accepted with sum(min(p, q))."""
    share = sum((min(x, q.get(token, Fraction(0))) for token, x in p.items()), Fraction(0))
    want = sum((share**i for i in range(k + 1)), Fraction(0))
    assert mean_emitted(lambda _: p, lambda _: q, k) == want
    assert expected_tokens(float(share), k) == pytest.approx(float(want))
    if share < 1:
        closed = (1 - float(share) ** (k + 1)) / (1 - float(share))
        assert expected_tokens(float(share), k) == pytest.approx(closed)


def test_all_drafts_accepted_give_one_token_more_than_drafts() -> None:
    """After three accepted drafts the target adds its own fourth token, under both rules."""
    trials = [RejectionInput(token, 0.5, 0.5, 0.999, 9) for token in (4, 5, 6)]
    assert rejection_sample(trials, 7) == (4, 5, 6, 7)
    assert accept_coupled((4, 5, 6), (4, 5, 6, 7)) == (4, 5, 6, 7)


def test_the_first_rejected_draft_ends_the_round_whatever_comes_after() -> None:
    good, bad = RejectionInput(4, 1.0, 0.5, 0.5, 8), RejectionInput(5, 0.0, 0.5, 0.5, 9)
    assert rejection_sample([good, bad, good], 7) == (4, 9)
    assert rejection_sample([bad, good, good], 7) == (9,)


def test_without_drafts_there_is_the_targets_own_token() -> None:
    assert rejection_sample([], 7) == accept_coupled((), (7,)) == (7,)


# The decision and the residual.


@pytest.mark.parametrize(
    ("p", "q", "cut"),
    [(1, 4, Fraction(1, 4)), (3, 4, Fraction(3, 4)), (4, 4, 1), (4, 1, 1), (0, 4, 0)],
)
def test_a_draft_is_accepted_for_u_below_p_over_q(p: int, q: int, cut: Fraction) -> None:
    for n in range(1, 200):
        u = Fraction(n, 200)
        assert is_accepted(RejectionInput(0, Fraction(p, 8), Fraction(q, 8), u, 1)) == (u < cut)


def test_a_draft_with_draft_probability_zero_causes_no_division_by_zero() -> None:
    """q is 0, or so small that p / q is infinite."""
    assert is_accepted(RejectionInput(0, 0.5, 0.0, 0.9, 1))
    assert is_accepted(RejectionInput(0, 0.5, nextafter(0.0, 1.0), 0.9, 1))
    assert not is_accepted(RejectionInput(0, 0.0, 0.0, 0.1, 1)), (
        "impossible under the target: never emitted"
    )


def test_the_residual_is_the_excess_of_the_target_over_the_draft() -> None:
    """I34: max(0, p - q), summing to the rejected share, for all distributions on a grid."""
    for p, q in product(grid_distributions(4, 3), repeat=2):
        weights = residual(p, q)
        assert all(weight > 0 for weight in weights.values())
        if p == q:
            assert weights == p, "nothing is left, and nothing is ever rejected"
            continue
        for token in range(4):
            more = p.get(token, Fraction(0)) - q.get(token, Fraction(0))
            assert weights.get(token, 0) == max(0, more)
        kept = sum(min(share, q.get(token, Fraction(0))) for token, share in p.items())
        assert sum(weights.values()) == 1 - kept


def test_a_token_that_is_impossible_for_the_target_is_in_no_residual() -> None:
    """At a tiny temperature a probability underflows to 0, which has no logarithm."""
    assert residual({0: 1.0, 1: 0.0}, {0: 1.0}) == {0: 1.0}


def test_the_residual_leaves_both_laws_alone() -> None:
    p, q = {0: HALF, 1: HALF}, {0: HALF, 1: HALF}
    weights = residual(p, q)
    weights[0] = Fraction(0)
    assert p == q == {0: HALF, 1: HALF}


@given(
    st.dictionaries(st.integers(0, 5), st.floats(0, 1)).filter(lambda p: any(p.values())),
    st.dictionaries(st.integers(0, 5), st.floats(0, 1)),
)
def test_the_residual_of_floats_is_never_empty_and_never_negative(
    p: dict[int, float], q: dict[int, float]
) -> None:
    """If rounding leaves nothing, the target's distribution is left."""
    weights = residual(p, q)
    assert weights and weights.keys() <= p.keys()
    assert all(0 < weight < inf for weight in weights.values())


# Coupled.


@pytest.mark.parametrize(("size", "k"), [(2, 1), (2, 3), (3, 2), (4, 3)])
def test_coupled_drafts_give_the_first_tokens_of_plain_decoding_and_as_many_as_are_right(
    size: int, k: int
) -> None:
    """All drafts and every deterministic target: with fixed noise any target is deterministic.

    After a correct prefix of drafts, the target's draw equals its plain draw. After a wrong draft,
    no token is taken.
    """
    tokens, accepted = range(size), Counter[int]()
    for drafts in product(tokens, repeat=k):
        for draws in product(tokens, repeat=k + 1):
            own = {drafts[:i]: draw for i, draw in enumerate(draws)}
            plain: Context = ()
            while plain in own:
                plain = (*plain, own[plain])
            assert accept_coupled(drafts, draws) == plain
            accepted[len(plain) - 1] += 1
    assert accepted.keys() == set(range(k + 1))


@pytest.mark.parametrize("k", [1, 2])
def test_coupled_rounds_have_exactly_the_targets_law_for_any_relation_of_drafts_and_noise(
    k: int,
) -> None:
    """The noise is the target's draw after each context; drafts are right, wrong, or constant."""
    grid = grid_distributions(2, 3)
    for i, first in enumerate(grid):
        p = mix_models(grid, first, i, 1)
        contexts = [c for n in range(k + 1) for c in product(range(2), repeat=n)]
        for proposed in (lambda draw: draw, lambda draw: 1 - draw, lambda draw: 0):
            found: Counter[Context] = Counter()
            for draws in product(range(2), repeat=len(contexts)):
                noise = dict(zip(contexts, draws, strict=True))
                share = Fraction(1)
                for context, draw in noise.items():
                    share *= p(context).get(draw, Fraction(0))
                drafts: Context = ()
                for _ in range(k):
                    drafts = (*drafts, proposed(noise[drafts]))
                behind = [noise[drafts[:n]] for n in range(k + 1)]
                emitted = accept_coupled(drafts, behind)
                while len(emitted) <= k:
                    emitted = (*emitted, noise[emitted])
                found[emitted] += share  # type: ignore[assignment]
            assert {c: n for c, n in found.items() if n} == dict(plain_sequences(p, k + 1))
