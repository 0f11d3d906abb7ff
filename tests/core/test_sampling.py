"""The normative arithmetic of sampling: literal cases, oracles, the distribution of draws."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import erfc, exp, inf, log, nan, sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.request import SamplingParams
from forge.sampling import (
    GAP_STEPS,
    IMPOSSIBLE,
    MAX_GAP,
    PLAIN,
    choice_seed,
    draw_key,
    filter_logits,
    gap_weight,
    gumbel,
    invalid_logits_reason,
    logit_gaps,
    min_p_gap,
    mix,
    output_logprob,
    probabilities,
    process_logits,
    sample_token,
    token_logprob,
    uniform,
)

DRAWS = 12_000
SAMPLED = SamplingParams()


def log_weights(*weights: float) -> list[float]:
    """Return logits whose softmax is in proportion to `weights`; 0 is an impossible token."""
    return [log(weight) if weight else -inf for weight in weights]


def kept_tokens(weights: tuple[float, ...], **params: Any) -> list[int]:
    return [c.token for c in filter_logits(log_weights(*weights), SamplingParams(**params))]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [exp(x - top) for x in logits]
    return [weight / sum(weights) for weight in weights]


def p_value(observed: list[int], expected: list[float]) -> float:
    """Return the probability of a fit as bad as this or worse (Pearson 1900).

    The tail of chi-square is that of Wilson and Hilferty 1931, within a tenth down to 0.001.
    """
    total = sum(observed)
    assert min(expected) * total >= 5, "too few draws for the rarest cell"
    chi2 = sum(
        (count - total * p) ** 2 / (total * p) for count, p in zip(observed, expected, strict=True)
    )
    spread = 2.0 / (9.0 * (len(expected) - 1))
    z = ((chi2 / (len(expected) - 1)) ** (1 / 3) - (1 - spread)) / sqrt(spread)
    return 0.5 * erfc(z / sqrt(2.0))


def splitmix64(state: int, count: int) -> list[int]:
    """Return outputs of the published generator, by division instead of shifts and masks."""
    out = []
    for _ in range(count):
        state = (state + 11400714819323198485) % 2**64
        z = (state ^ (state // 2**30)) * 13787848793156543929 % 2**64
        z = (z ^ (z // 2**27)) * 10723151780598845931 % 2**64
        out.append(z ^ (z // 2**31))
    return out


# The tests' own arithmetic.


@pytest.mark.parametrize(
    ("degrees", "chi2", "tail"),
    [(1, 3.841, 0.05), (4, 9.488, 0.05), (5, 20.515, 0.001), (15, 30.578, 0.01)],
)
def test_the_p_value_agrees_with_the_printed_table(degrees: int, chi2: float, tail: float) -> None:
    """Two cells are off by d, the rest fit: chi-square is 2 d^2 / expected, for any table."""
    cells = degrees + 1
    each = 10**9
    off = round(sqrt(chi2 * each / 2))
    observed = [each + off, each - off] + [each] * (cells - 2)
    assert p_value(observed, [1 / cells] * cells) == pytest.approx(tail, rel=0.15)


# Noise.


def test_mix_is_the_published_splitmix64() -> None:
    """Output i of splitmix64 for state s is mix(s + (i + 1) * golden)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    golden = 0x9E3779B97F4A7C15
    assert splitmix64(1234567, 5) == published
    assert [mix(1234567 + (index + 1) * golden) for index in range(5)] == published


@given(st.integers(0, 2**64 - 1))
def test_mix_agrees_with_a_second_implementation(state: int) -> None:
    assert mix(state + 0x9E3779B97F4A7C15) == splitmix64(state, 1)[0]


@given(st.integers(-(2**70), 2**70))
def test_mix_uses_the_low_64_bits_of_any_integer(x: int) -> None:
    assert mix(x) == mix(x % 2**64)
    assert 0 <= mix(x) < 2**64


def test_uniform_is_the_high_half_of_the_generators_outputs() -> None:
    outputs = splitmix64(1234567, 5)
    drawn = [uniform(1234567, index) for index in range(5)]
    assert drawn == [(output // 2**32 + 0.5) / 2**32 for output in outputs]


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "key"),
    [
        (0, 0, 0, 0x33FE8BD4F9C57863),
        (1, 0, 0, 0x0A385EF24FA6A992),
        (0, 1, 0, 0x943AFB10D107F8FD),
        (0, 0, 1, 0x568A9B0B1A2C05EC),
        (-1, 5, 0, 0x9AE7C8374756401F),
        (2**63 - 1, 1000, 3, 0xBC7CB1474D02D4DD),
    ],
)
def test_draw_keys_have_known_answers(seed: int, position: int, purpose: int, key: int) -> None:
    """Literals for implementations elsewhere; the second implementation gives the same."""

    def finalise(x: int) -> int:
        return splitmix64((x - 11400714819323198485) % 2**64, 1)[0]

    by_hand = finalise(
        finalise(finalise(seed + 11400714819323198485) + position) + purpose * 11400714819323198485
    )
    assert draw_key(seed, position, purpose) == key == by_hand


def unmix(output: int) -> int:
    """Return the x with mix(x) == output, by inverting each line of the finaliser in reverse."""

    def unshift(x: int, shift: int) -> int:
        result = x
        for _ in range(64 // shift + 1):
            result = x ^ (result >> shift)
        return result

    x = unshift(output, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(x, 30)


@given(st.integers(0, 2**64 - 1))
def test_mix_can_be_undone_so_it_maps_no_two_states_to_one(output: int) -> None:
    assert mix(unmix(output)) == output


@pytest.mark.parametrize(("output", "drawn"), [(0, 2.0**-33), (2**64 - 1, 1.0 - 2.0**-33)])
def test_uniform_never_reaches_its_ends(output: int, drawn: float) -> None:
    """The keys that give the least and the greatest output there is."""
    key = unmix(output) - 0x9E3779B97F4A7C15
    assert uniform(key, 0) == drawn
    assert 0.0 < drawn < 1.0
    assert -4.0 < gumbel(key, 0) < 24.0


def test_uniform_fills_the_unit_interval_evenly() -> None:
    bins = Counter(int(64 * uniform(7, index)) for index in range(DRAWS))
    assert p_value([bins[i] for i in range(64)], [1 / 64] * 64) > 1e-4


def test_no_two_draws_share_a_key() -> None:
    names = list(product(range(-2, 8), range(40), range(4)))
    assert len({draw_key(*name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("other", "index"),
    [
        (lambda seed, position: draw_key(seed + 1, position, PLAIN), 0),
        (lambda seed, position: draw_key(seed, position + 1, PLAIN), 0),
        (lambda seed, position: draw_key(seed, position, PLAIN + 1), 0),
        (lambda seed, position: draw_key(position, seed, PLAIN), 0),
        (lambda seed, position: draw_key(choice_seed(seed, 1), position, PLAIN), 0),
        (lambda seed, position: draw_key(seed, position, PLAIN), 1),
    ],
    ids=["seed", "position", "purpose", "swapped", "choice", "token"],
)
def test_draws_under_different_names_are_independent(other: Any, index: int) -> None:
    """Pairs of draws that differ in one part of the name fill a 4 x 4 table evenly."""
    pairs: Counter[tuple[int, ...]] = Counter()
    for i in range(5_000):
        seed, position = 3 + i // 100, 1_000 + i % 100
        one = uniform(draw_key(seed, position, PLAIN), 0)
        two = uniform(other(seed, position), index)
        pairs[int(4 * one), int(4 * two)] += 1
    assert p_value([pairs[cell] for cell in product(range(4), repeat=2)], [1 / 16] * 16) > 1e-4


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_choice_zero_draws_as_a_request_with_one_choice(seed: int) -> None:
    assert choice_seed(seed, 0) == seed


def test_a_negative_seed_is_its_64_bits() -> None:
    assert choice_seed(-1, 0) == 2**64 - 1
    assert choice_seed(-(2**63), 0) == 2**63
    assert choice_seed(-1, 3) == choice_seed(2**64 - 1, 3)


def test_choices_of_all_seeds_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in range(-8, 8) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


# The candidates.


def test_temperature_divides_the_logits() -> None:
    two = filter_logits([1.0, 3.0, -2.0], SamplingParams(temperature=0.5))
    assert two == [(1, 6.0), (0, 2.0), (2, -4.0)]


def test_candidates_come_most_likely_first_and_ties_by_lower_id() -> None:
    assert kept_tokens((1, 4, 2, 4, 1)) == [1, 3, 2, 0, 4]


def test_an_impossible_token_is_no_candidate() -> None:
    assert kept_tokens((0, 4, 0, 1)) == [1, 3]


@pytest.mark.parametrize(
    ("top_k", "tokens"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (4, [1, 3, 2, 0]), (99, None)]
)
def test_top_k_keeps_the_k_most_likely_and_of_equals_the_lower_id(
    top_k: int, tokens: list[int] | None
) -> None:
    weights = (1, 4, 2, 4, 1)
    assert kept_tokens(weights, top_k=top_k) == (tokens or kept_tokens(weights))


@pytest.mark.parametrize(
    ("top_p", "count"),
    [(5e-324, 1), (0.24, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.9999999, 4)],
)
def test_top_p_stops_at_the_token_that_reaches_the_mass(top_p: float, count: int) -> None:
    """Four equal tokens: a quarter of the mass each, without rounding."""
    assert kept_tokens((1, 1, 1, 1), top_p=top_p) == list(range(count))


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.4, 0.6, 0.7, 0.9, 0.96])
def test_no_smaller_set_reaches_the_mass_that_top_p_asks(top_p: float) -> None:
    weights = (3, 9, 1, 5, 2, 7)
    chosen = kept_tokens(weights, top_p=top_p)
    assert sum(weights[token] for token in chosen) >= top_p * sum(weights)
    fewer = combinations(weights, len(chosen) - 1)
    assert max(sum(subset) for subset in fewer) < top_p * sum(weights)


@pytest.mark.parametrize(
    ("min_p", "tokens"),
    [(0.0, [1, 2, 0, 3]), (0.24, [1, 2, 0]), (0.26, [1, 2]), (0.49, [1, 2]), (0.51, [1]), (1, [1])],
)
def test_min_p_is_a_share_of_the_most_likely(min_p: float, tokens: list[int]) -> None:
    assert kept_tokens((2, 8, 4, 1), min_p=min_p) == tokens


def test_min_p_one_keeps_every_token_that_is_as_likely_as_the_first() -> None:
    assert kept_tokens((4, 1, 4, 4), min_p=1.0) == [0, 2, 3]


def test_the_least_min_p_there_is_keeps_all() -> None:
    assert kept_tokens((2, 8, 4, 1), min_p=5e-324) == [1, 2, 0, 3]


def test_gaps_count_steps_below_the_largest_logit_after_temperature() -> None:
    """One step is 2^-15. A quarter of a logit is 8,192 of them, and twice that at T = 0.5."""
    assert logit_gaps([2.0, 1.75, -inf, 2.0], 1.0) == [0, 8192, IMPOSSIBLE, 0]
    assert logit_gaps([2.0, 1.75, -inf, 2.0], 0.5) == [0, 16384, IMPOSSIBLE, 0]


@pytest.mark.parametrize("depth", [32.0, 1e6, 1e38, 3e38])
def test_a_logit_far_below_the_largest_has_the_largest_gap(depth: float) -> None:
    assert logit_gaps([0.0, -depth], 1.0) == [0, MAX_GAP]
    assert logit_gaps([3e38, 3e38 - 2 * depth], 1e-5)[0] == 0


def test_a_logit_beyond_single_precision_is_the_last_number_within() -> None:
    assert logit_gaps([1e300, 0.0, 2e300, -1e300], 1.0) == [0, MAX_GAP, 0, MAX_GAP]
    assert logit_gaps([-inf, -1e300, -2e300], 1.0) == [IMPOSSIBLE, 0, 0]


def test_the_only_allowed_token_is_drawn_whatever_its_penalty_makes_of_its_logit() -> None:
    least = -3.3895313892515355e38  # of bfloat16: what some models mask with
    params = SamplingParams(allowed_token_ids=(1,), repetition_penalty=1.5, top_k=2, top_p=0.9)
    adjusted = process_logits([0.0, least, 1.0], params, [1], [], ())
    assert sample_token(adjusted, params, seed=3, position=5) == 1


def test_probabilities_are_those_of_equals_far_from_zero() -> None:
    """A step is less than the distance of two such numbers after temperature."""
    kept = filter_logits([2e5, 2e5 + 2**-7], SamplingParams(temperature=1e-5))
    assert probabilities(kept)[1] == 1.0


def test_weights_are_those_of_the_exponential() -> None:
    for gap in (*range(0, MAX_GAP, 1009), 1, 22712, 22713, MAX_GAP):
        assert abs(gap_weight(gap) - 2**32 * exp(-gap / GAP_STEPS)) < 300
    assert gap_weight(IMPOSSIBLE) == 0


@pytest.mark.long
def test_weights_never_rise_with_the_gap() -> None:
    weights = list(map(gap_weight, range(IMPOSSIBLE + 1)))
    assert weights == sorted(weights, reverse=True)


def test_tokens_within_a_step_are_equally_likely_to_the_filters() -> None:
    """Half a step lies between them: the lower id goes first, and is kept alone."""
    half = 0.5 / GAP_STEPS
    assert [c.token for c in filter_logits([1.0 - half, 1.0], SamplingParams(top_p=0.5))] == [0]


def test_top_k_of_one_is_greedy_for_any_gap() -> None:
    params = SamplingParams(top_k=1)
    assert params.greedy
    assert sample_token([1.0, 1.0 + 1e-9], params, seed=3, position=5) == 1


@pytest.mark.parametrize(
    ("min_p", "gap"), [(1.0, 0), (0.0, MAX_GAP), (0.5, 22713), (1e-30, MAX_GAP)]
)
def test_min_p_is_a_largest_gap(min_p: float, gap: int) -> None:
    assert min_p_gap(min_p) == gap


def test_temperature_comes_before_top_p_and_min_p() -> None:
    """At T = 0.5 the weights 4 2 2 are 16 4 4: the first alone holds two thirds of the mass."""
    assert kept_tokens((4, 2, 2), top_p=0.6) == [0, 1]
    assert kept_tokens((4, 2, 2), top_p=0.6, temperature=0.5) == [0]
    assert kept_tokens((4, 2, 2), min_p=0.4) == [0, 1, 2]
    assert kept_tokens((4, 2, 2), min_p=0.4, temperature=0.5) == [0]


def test_top_p_is_applied_to_the_result_of_top_k() -> None:
    """The first token has 40 % of 4 3 2 1, and 57 % of the 4 3 that top-k leaves."""
    assert kept_tokens((4, 3, 2, 1), top_p=0.5) == [0, 1]
    assert kept_tokens((4, 3, 2, 1), top_p=0.5, top_k=2) == [0]


def test_min_p_comes_after_top_p() -> None:
    """The other way round min-p would leave 5 3, of which the first has 62%."""
    assert kept_tokens((10, 6, 3, 1), top_p=0.6, min_p=0.5) == [0, 1]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    st.integers(0, 9),
    st.integers(1, 997),
    st.integers(0, 997),
)
def test_candidates_agree_with_an_oracle_in_whole_numbers(
    weights: list[int], top_k: int, top_p: int, min_p: int
) -> None:
    """Weights are integers and 997 is prime, so no threshold falls on a rounding error."""
    order = sorted((t for t, w in enumerate(weights) if w), key=lambda t: (-weights[t], t))
    order = order[: top_k or None]
    total = sum(weights[t] for t in order)
    expected, mass = [], 0
    for token in order:
        if Fraction(mass, total) < Fraction(top_p, 997):
            expected.append(token)
            mass += weights[token]
    floor = Fraction(min_p, 997) * weights[order[0]]
    expected = [token for token in expected if weights[token] >= floor]
    got = kept_tokens(tuple(weights), top_k=top_k, top_p=top_p / 997, min_p=min_p / 997)
    assert got == expected


# Allowed ids, bias, min_tokens, penalties.


def adjust_logits(
    logits: list[float], prompt: Any = (), output: Any = (), **params: Any
) -> list[float]:
    return process_logits(logits, SamplingParams(**params), prompt, output, (0,))


def test_neutral_params_change_no_logit() -> None:
    assert adjust_logits([1.0, -inf, 0.5], [1], [2, 2]) == [1.0, -inf, 0.5]


def test_the_models_logits_are_left_alone() -> None:
    logits = [1.0, 2.0, 3.0]
    adjust_logits(
        logits,
        [1],
        [2],
        logit_bias={0: 1.0},
        min_tokens=2,
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    assert logits == [1.0, 2.0, 3.0]


def test_allowed_ids_make_every_other_token_impossible() -> None:
    assert adjust_logits([1.0, 2.0, 3.0], allowed_token_ids=[2, 0]) == [1.0, -inf, 3.0]


def test_a_mask_makes_every_token_impossible_whose_bit_is_not_set() -> None:
    logits = [float(t) for t in range(10)]
    kept = process_logits(logits, SamplingParams(), [5], [], (), b"\x04\x02")
    assert kept == [-inf, -inf, 2.0, *[-inf] * 6, 9.0]


def test_bias_is_added_and_revives_no_forbidden_token() -> None:
    assert adjust_logits([1.0, 2.0, 3.0], logit_bias={0: -3.0, 2: 0.5}) == [-2.0, 2.0, 3.5]
    assert adjust_logits([1.0, 2.0], allowed_token_ids=[0], logit_bias={1: 100.0}) == [1.0, -inf]


def test_end_and_stop_ids_are_masked_until_min_tokens_are_out() -> None:
    params = {"min_tokens": 2, "stop_token_ids": [3]}
    assert adjust_logits([9.0, 1.0, 1.0, 9.0], [5], [], **params) == [-inf, 1.0, 1.0, -inf]
    assert adjust_logits([9.0, 1.0, 1.0, 9.0], [5], [1], **params) == [-inf, 1.0, 1.0, -inf]
    assert adjust_logits([9.0, 1.0, 1.0, 9.0], [5], [1, 2], **params) == [9.0, 1.0, 1.0, 9.0]


def test_min_tokens_counts_output_and_not_prompt() -> None:
    assert adjust_logits([9.0, 1.0], [1, 1, 1], [], min_tokens=1) == [-inf, 1.0]


def test_a_min_tokens_mask_that_would_leave_nothing_is_not_applied() -> None:
    assert adjust_logits([9.0, 1.0], allowed_token_ids=[0], min_tokens=2) == [9.0, -inf]
    assert adjust_logits([9.0, -inf], min_tokens=2) == [9.0, -inf]


def test_repetition_penalty_lowers_the_chance_of_a_token_of_either_sign() -> None:
    """Dividing a negative logit would raise it: that is the classic mistake."""
    logits = [2.0, -2.0, 0.0, 1.0]
    assert adjust_logits(logits, [0, 1], repetition_penalty=2.0) == [1.0, -4.0, 0.0, 1.0]
    for token in (0, 1):
        after = softmax(adjust_logits(logits, [token], repetition_penalty=1.3))
        assert after[token] < softmax(logits)[token]


def test_repetition_penalty_under_one_raises_the_chance_of_either_sign() -> None:
    logits = [2.0, -2.0, 0.0]
    for token in (0, 1):
        after = softmax(adjust_logits(logits, [token], repetition_penalty=0.5))
        assert after[token] > softmax(logits)[token]


def test_repetition_penalty_is_applied_once_however_often_a_token_occurred() -> None:
    once = adjust_logits([4.0, -4.0], [0], [1], repetition_penalty=2.0)
    assert (
        adjust_logits([4.0, -4.0], [0, 0, 1], [1, 1, 0], repetition_penalty=2.0)
        == once
        == [2.0, -8.0]
    )


def test_presence_penalty_is_subtracted_once_and_frequency_penalty_per_occurrence() -> None:
    assert adjust_logits([1.0] * 3, (), [1, 2, 2, 2], presence_penalty=0.5) == [1.0, 0.5, 0.5]
    assert adjust_logits([1.0] * 3, (), [1, 2, 2, 2], frequency_penalty=0.5) == [1.0, 0.5, -0.5]


def test_presence_and_frequency_count_output_and_not_prompt() -> None:
    both = {"presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert adjust_logits([1.0] * 3, [1, 1, 2], [], **both) == [1.0] * 3
    assert adjust_logits([1.0] * 3, [1, 1, 2], [2], **both) == [1.0, 1.0, -1.0]


def test_negative_penalties_raise_the_logits_of_output_tokens() -> None:
    both = {"presence_penalty": -1.0, "frequency_penalty": -0.5}
    assert adjust_logits([1.0, 1.0], (), [1, 1], **both) == [1.0, 3.0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    """1 - 2 is negative and doubles; the other way round the result would be -1.5."""
    assert adjust_logits([1.0], [0], logit_bias={0: -2.0}, repetition_penalty=2.0) == [-2.0]


def test_the_repetition_penalty_comes_before_the_other_two() -> None:
    assert adjust_logits([2.0], (), [0], repetition_penalty=2.0, presence_penalty=0.5) == [0.5]


def test_logits_that_bias_and_penalties_reach_are_rounded_to_single_precision() -> None:
    """0.1 has no single precision; 7 * 0.1 and 0.1 / 0.7 are of these numbers, rounded once."""
    assert adjust_logits([0.1, 0.1], logit_bias={0: 0.25}) == [0.3499999940395355, 0.1]
    after = adjust_logits([0.1, -0.1, 0.1], (1,), [0], repetition_penalty=0.7, presence_penalty=0.1)
    assert after == [0.04285714402794838, -0.07000000029802322, 0.1]


def test_a_logit_that_a_penalty_moves_beyond_single_precision_stays_finite() -> None:
    largest = 3.4028234663852886e38
    assert adjust_logits([3e38, 1.0], (0, 1), repetition_penalty=0.5) == [largest, 2.0]


def test_an_impossible_token_stays_impossible_under_every_penalty() -> None:
    after = adjust_logits(
        [-inf, 1.0],
        [0],
        [0],
        logit_bias={0: 100.0},
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
    )
    assert after == [-inf, 1.0]


@given(
    st.lists(st.integers(-16, 16), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.integers(-8, 8),
    st.integers(-8, 8),
    st.dictionaries(st.integers(0, 3), st.integers(-9, 9), max_size=3),
    st.none() | st.sets(st.integers(0, 3), min_size=1),
    st.integers(0, 4),
)
def test_adjusted_agrees_with_an_oracle_token_by_token(
    quarters: list[int],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: int,
    frequency: int,
    bias: dict[int, int],
    allowed: set[int] | None,
    min_tokens: int,
) -> None:
    """Every number is a multiple of a power of two, so both sides are exact."""
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence / 4,
        frequency_penalty=frequency / 4,
        logit_bias=bias,
        allowed_token_ids=allowed if allowed is None else sorted(allowed),
        min_tokens=min_tokens,
        stop_token_ids=[2],
    )
    possible = {0, 1, 2, 3} if allowed is None else allowed
    if len(output) < min_tokens and possible - {0, 2}:
        possible = possible - {0, 2}
    expected = []
    for token in range(4):
        x = Fraction(quarters[token], 4) + bias.get(token, 0)
        if token in prompt or token in output:
            x = x / Fraction(repetition) if x > 0 else x * Fraction(repetition)
        if token in output:
            x -= Fraction(presence, 4) + Fraction(frequency, 4) * output.count(token)
        expected.append(float(x) if token in possible else -inf)
    assert process_logits([q / 4 for q in quarters], params, prompt, output, (0,)) == expected


# The draw.


def test_greedy_takes_the_most_likely_and_of_equals_the_lower_id() -> None:
    greedy = SamplingParams(temperature=0)
    assert sample_token([0.0, 3.0, 1.0, 3.0], greedy, 5, 0) == 1
    assert sample_token([-inf, -2.0, -2.0], greedy, 5, 0) == 1


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-40, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    """Divided by 1e-40 the last three would all be infinite, and the first of them would win."""
    logits = [1.0, 1e300, 2e300, 2e300]
    assert sample_token(logits, SamplingParams(temperature=temperature), 1, 1) == 2


def test_top_k_one_is_greedy_under_every_seed() -> None:
    params = SamplingParams(top_k=1, temperature=2.0)
    assert {sample_token([0.0, 3.0, 1.0, 3.0], params, seed, 0) for seed in range(200)} == {1}


def test_the_least_sampled_temperature_takes_the_most_likely() -> None:
    params = SamplingParams(temperature=1e-5)
    assert {sample_token([0.0, 1.0, 0.5], params, seed, 0) for seed in range(200)} == {1}


SAMPLING_CASES = [
    ({}, (8, 4, 2, 1, 1)),
    ({"temperature": 0.5}, (64, 16, 4, 1, 1)),
    ({"top_k": 3}, (8, 4, 2, 0, 0)),
    ({"top_p": 0.7}, (8, 4, 0, 0, 0)),
    ({"min_p": 0.2}, (8, 4, 2, 0, 0)),
    (
        {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.4},
        (sqrt(8), sqrt(4), sqrt(2), 0, 0),
    ),
]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_draw_without_filters_is_the_draw_with_filters_that_keep_every_token(
    temperature: float,
) -> None:
    logits = [log(1 + token % 7) for token in range(20)] + [-inf] * 3
    plain = SamplingParams(temperature=temperature)
    filtered = SamplingParams(temperature=temperature, top_k=len(logits))
    assert (plain.has_filters, filtered.has_filters) == (False, True)
    drawn = [sample_token(logits, plain, 11, position) for position in range(60)]
    assert drawn == [sample_token(logits, filtered, 11, position) for position in range(60)]
    assert len(set(drawn)) > 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "law"), SAMPLING_CASES, ids=[str(params) for params, _ in SAMPLING_CASES]
)
def test_draws_at_successive_positions_follow_the_law(
    params: dict[str, Any], law: tuple[float, ...]
) -> None:
    """Weights 8 4 2 1 1, stored out of order; `law` is what remains of them, by hand."""
    ids = (3, 0, 4, 1, 2)
    logits = [0.0] * 5
    for token, logit in zip(ids, log_weights(8, 4, 2, 1, 1), strict=True):
        logits[token] = logit
    sampling = SamplingParams(**params)
    drawn = Counter(sample_token(logits, sampling, 11, position) for position in range(DRAWS))
    possible = [(token, weight) for token, weight in zip(ids, law, strict=True) if weight]
    assert drawn.keys() == {token for token, _ in possible}
    chances = [weight / sum(law) for _, weight in possible]
    assert p_value([drawn[token] for token, _ in possible], chances) > 1e-4


def test_draws_under_successive_seeds_follow_the_law() -> None:
    """Users count seeds up from 0: neighbouring seeds must not give neighbouring draws."""
    drawn = Counter(
        sample_token(log_weights(8, 4, 2, 1, 1), SAMPLED, seed, 9) for seed in range(DRAWS)
    )
    assert p_value([drawn[t] for t in range(5)], [w / 16 for w in (8, 4, 2, 1, 1)]) > 1e-4


def test_a_token_says_nothing_about_the_next() -> None:
    """Pairs of tokens at neighbouring positions follow the product of the two distributions."""
    logits = log_weights(3, 2, 1)
    pairs: Counter[tuple[int, ...]] = Counter(
        (sample_token(logits, SAMPLED, 5, 2 * i), sample_token(logits, SAMPLED, 5, 2 * i + 1))
        for i in range(DRAWS // 4)
    )
    cells = list(product(range(3), repeat=2))
    chances = [(3 - a) * (3 - b) / 36 for a, b in cells]
    assert p_value([pairs[cell] for cell in cells], chances) > 1e-4


def test_the_same_name_draws_the_same_token() -> None:
    logits = log_weights(8, 4, 2, 1, 1)
    first = [sample_token(logits, SAMPLED, 3, position) for position in range(100)]
    assert [sample_token(logits, SAMPLED, 3, position) for position in range(100)] == first
    assert [sample_token(logits, SAMPLED, 4, position) for position in range(100)] != first


def test_noise_belongs_to_the_token_so_losing_a_loser_changes_nothing() -> None:
    """If noise were assigned by rank, forbidding one token would redraw all the others."""
    for position in range(200):
        logits = log_weights(1, 1, 1, 1)
        winner = sample_token(logits, SAMPLED, 3, position)
        logits[(winner + 1) % 4] = -inf
        assert sample_token(logits, SAMPLED, 3, position) == winner


def test_a_constant_added_to_every_logit_changes_no_draw() -> None:
    logits = [0.0, 1.0, -2.0, 0.5]
    for position in range(200):
        shifted = [x + 1024.0 for x in logits]
        assert sample_token(shifted, SAMPLED, 3, position) == sample_token(
            logits, SAMPLED, 3, position
        )


def test_two_models_that_agree_draw_the_same_token_most_of_the_time() -> None:
    """With the same noise, two distributions differ only outside of their overlap, here 0.9.

    With separate noise they would agree on sum(p * q), a third.
    """
    target, draft = log_weights(5, 3, 2), log_weights(4, 4, 2)
    same = sum(
        sample_token(target, SAMPLED, 8, position) == sample_token(draft, SAMPLED, 8, position)
        for position in range(2_000)
    )
    assert same > 0.8 * 2_000


# Logits that cannot be sampled.


@pytest.mark.parametrize(
    ("logits", "why"),
    [
        ([0.0, nan, 1.0], "NaN"),
        ([nan, 0.0], "NaN"),
        ([inf, nan], "NaN"),
        ([0.0, inf], "maximum is inf"),
        ([-inf, -inf], "maximum is -inf"),
    ],
)
def test_logits_that_are_not_finite_are_named(logits: list[float], why: str) -> None:
    message = invalid_logits_reason(logits)
    assert message is not None
    assert why in message


@pytest.mark.parametrize("logits", [[0.0], [-inf, -1e300], [1e300, -inf, 2.0]])
def test_one_possible_token_is_enough(logits: list[float]) -> None:
    assert invalid_logits_reason(logits) is None


# Log probabilities.


def test_log_probabilities_are_of_the_whole_vocabulary() -> None:
    weights = (1, 5, 2)
    for token, weight in enumerate(weights):
        assert token_logprob(log_weights(*weights), token, 0).logprob == pytest.approx(
            log(weight / 8)
        )


@given(st.lists(st.floats(-1e4, 1e4) | st.just(-inf), min_size=1, max_size=9))
def test_probabilities_sum_to_one_without_overflow(logits: list[float]) -> None:
    logits = [*logits, 9999.0]
    total = sum(exp(token_logprob(logits, token, 0).logprob) for token in range(len(logits)))
    assert total == pytest.approx(1.0, abs=1e-9)


def test_the_most_likely_are_listed_in_order_and_ties_by_lower_id() -> None:
    chosen = token_logprob(log_weights(1, 4, 2, 4, 5), 0, 4)
    assert chosen.token == 0
    assert [token for token, _ in chosen.top] == [4, 1, 3, 2]
    assert [p for _, p in chosen.top] == pytest.approx(log_weights(5 / 16, 4 / 16, 4 / 16, 2 / 16))


def test_listed_ids_have_their_log_probabilities_in_the_order_of_the_list() -> None:
    params = SamplingParams(logprobs=4, logprob_token_ids=[3, 0])
    logits = log_weights(1, 4, 2, 4, 5)
    chosen = output_logprob(logits, 1, params)
    assert chosen.token == 1 and chosen.logprob == pytest.approx(log(4 / 16))
    assert [token for token, _ in chosen.top] == [3, 0]
    assert [p for _, p in chosen.top] == pytest.approx(log_weights(4 / 16, 1 / 16))
    assert output_logprob(logits, 1, SamplingParams(logprobs=4)) == token_logprob(logits, 1, 4)


def test_no_list_is_made_without_a_request_for_one() -> None:
    assert token_logprob([0.0, 0.0], 1, 0).top == ()
    assert len(token_logprob([0.0, 0.0], 1, 20).top) == 2


def test_an_impossible_token_has_log_probability_minus_infinity() -> None:
    assert token_logprob([0.0, -inf], 1, 0).logprob == -inf
