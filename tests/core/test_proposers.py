"""Proposers that know tokens: the matches of n-grams, and the tokens that an oracle replaces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.proposers import NGramProposer, OracleProposer


def propose_by_definition(
    tokens: Sequence[int], longest: int, shortest: int, reach: int, max_drafts: int
) -> list[int]:
    """Return what NGramProposer must propose: try every earlier position of every suffix."""
    window = list(tokens)[-reach:]
    for size in range(longest, shortest - 1, -1):
        tail = window[len(window) - size :]
        ends = [e for e in range(size, len(window)) if window[e - size : e] == tail]
        if len(tail) == size and ends:
            return window[ends[-1] : ends[-1] + max_drafts]
    return []


def propose(tokens: Sequence[int], most: int = 3, **options: int) -> tuple[int, ...]:
    return NGramProposer(**options).propose(0, tokens, 1, most)


def test_tokens_that_followed_the_same_tokens_before_are_proposed() -> None:
    assert propose((5, 6, 7, 8, 9, 5, 6)) == (7, 8, 9)
    assert propose((5, 6, 7, 8, 9, 5, 6), most=2) == (7, 8)


def test_a_longer_match_goes_before_a_later_one() -> None:
    """1 2 3 came before 9; 2 3 alone came later, before 8."""
    assert propose((1, 2, 3, 9, 2, 3, 8, 1, 2, 3), most=1) == (9,)


def test_of_matches_of_one_length_the_last_is_taken() -> None:
    assert propose((2, 3, 9, 2, 3, 8, 2, 3), most=1) == (8,)


def test_a_match_may_overlap_the_tail_itself() -> None:
    assert propose((4, 4, 4), most=2) == (4,)
    assert propose((1, 2, 1, 2, 1, 2), most=5) == (1, 2)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (1, 2, 3, 4), (7, 1, 7)])
def test_nothing_is_proposed_without_a_repeated_pair_of_tokens(tokens: tuple[int, ...]) -> None:
    assert propose(tokens) == ()


def test_tokens_beyond_the_search_window_are_not_compared() -> None:
    tokens = (1, 2, 9, *range(10, 20), 1, 2)
    assert propose(tokens, most=1) == (9,)
    assert propose(tokens, most=1, max_lookback=len(tokens)) == (9,)
    assert propose(tokens, most=1, max_lookback=len(tokens) - 1) == ()


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 31),
    st.integers(1, 5),
)
def test_ngrams_agree_with_their_definition(
    tokens: list[int], shortest: int, more: int, reach: int, most: int
) -> None:
    found = propose(tokens, most, max_n=shortest + more, min_n=shortest, max_lookback=reach)
    assert list(found) == propose_by_definition(tokens, shortest + more, shortest, reach, most)


# The oracle.

ORACLE_OUTPUTS = {3: tuple(range(40)), 4: tuple(range(40))}
PROMPT = (1, 2, 3)


def propose_all(oracle: OracleProposer, request_id: int, most: int = 5) -> list[int]:
    """Return the whole output as it is proposed, in pieces of `most`."""
    found: list[int] = []
    while len(found) < 40:
        tokens = (*PROMPT, *ORACLE_OUTPUTS[request_id][: len(found)])
        piece = oracle.propose(request_id, tokens, len(PROMPT), most)
        assert len(piece) == min(most, 40 - len(found))
        found += piece
    return found


def test_an_oracle_of_acceptance_one_replays_the_output_and_of_zero_gives_no_token_of_it() -> None:
    assert propose_all(OracleProposer(ORACLE_OUTPUTS, 1.0, 50), 3) == list(range(40))
    wrong = propose_all(OracleProposer(ORACLE_OUTPUTS, 0.0, 50), 3)
    assert all(token != place and 0 <= token < 50 for place, token in enumerate(wrong))


def test_a_replaced_token_is_in_the_vocabulary() -> None:
    oracle = OracleProposer({3: (1, 0, 1, 1)}, 0.0, 2)
    assert oracle.propose(3, PROMPT, len(PROMPT), 4) == (0, 1, 0, 0)


def test_replaced_tokens_do_not_depend_on_the_number_of_drafts() -> None:
    oracle = OracleProposer(ORACLE_OUTPUTS, 0.5, 50)
    assert propose_all(oracle, 3, 1) == propose_all(oracle, 3, 7) == propose_all(oracle, 3, 40)


def test_requests_and_seeds_have_different_replaced_positions() -> None:
    whole = [
        propose_all(OracleProposer(ORACLE_OUTPUTS, 0.5, 50, seed=seed), request_id, 40)
        for seed in (0, 1)
        for request_id in (3, 4)
    ]
    assert len({tuple(each) for each in whole}) == 4


def test_the_oracle_proposes_nothing_for_other_requests_or_after_the_end() -> None:
    oracle = OracleProposer({3: (5, 6)}, 1.0, 50)
    assert oracle.propose(9, PROMPT, len(PROMPT), 4) == ()
    assert oracle.propose(3, (*PROMPT, 5, 6), len(PROMPT), 4) == ()
    assert oracle.propose(3, (*PROMPT, 5), len(PROMPT), 4) == (6,)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8, 0.95])
def test_each_token_is_left_with_the_chosen_probability_by_itself(acceptance: float) -> None:
    """Within 4 sigma: the share of unchanged tokens, and the share of unchanged pairs."""
    count = 4_000
    oracle = OracleProposer({3: (0,) * count}, acceptance, 50)
    left = [token == 0 for token in oracle.propose(3, PROMPT, len(PROMPT), count)]
    pairs = sum(a and b for a, b in pairwise(left))
    for found, share in ((sum(left), acceptance), (pairs, acceptance**2)):
        assert abs(found / count - share) < 4 * sqrt(share * (1 - share) * 2 / count)


def test_bytes_that_match_between_two_tokens_are_no_match() -> None:
    """Tokens are searched as bytes: ten bytes 01 in three tokens hold the suffix between tokens."""
    one = 0x01010101
    tokens = (one, one, 5, one - 1, one, one >> 8, 7, one, one)
    assert NGramProposer(2, 2).propose(0, tokens, 0, 2) == (5, one - 1)
