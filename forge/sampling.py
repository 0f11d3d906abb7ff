"""The normative arithmetic of choosing a token, in plain Python floats. Pure functions.

Owns the order of operations and the noise. Knows no model, batch or clock. Every other sampler
(a device's) is tested against this file.

    logits ─ mask, allowed ids ─ bias ─ min_tokens ─ penalties ─┬─ argmax              greedy
                                                                └─ /T ─ top-k ─ top-p ─ min-p
                                                                   ─ + noise ─ argmax  sampled

The filters see integers: how far a token's logit is below the largest, after temperature, in steps
of 2^-15. Tokens in one step are equally likely to them. So sums of probabilities are sums of
integers, and a device that adds them in another order finds the same set.

Randomness is an argument. The noise of token t at position p is a function of (seed, p, purpose, t)
and nothing else, so batch composition, chunking, preemption and planning ahead cannot change what
is drawn. The draw is argmax(logit / T + Gumbel noise), which samples the softmax exactly (Gumbel
1954), needs no normalisation, and lets two models draw with the same noise.

The counter is splitmix64 (Steele, Lea and Flood 2014): integer arithmetic only, so a device repeats
the same 32 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, exp, inf, isfinite, isnan, log
from typing import NamedTuple

from forge.request import SamplingParams, TokenLogprob

PLAIN, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Purposes of a draw.

A token of the output, a draft under `rejection`, its acceptance, its residual.

Under `coupled` a draft is a plain draw.
"""

NO_ALLOWED_TOKEN = "the model rules out every token that is allowed here"
"""Error of a row none of whose allowed ids is possible."""

GAP_STEPS = 1 << 15
"""Steps of a gap in one unit of a logit after temperature."""

MAX_GAP = 255 * 4096 - 1
"""Largest gap, of all tokens that are 31.9 or more below the most likely one."""

IMPOSSIBLE = MAX_GAP + 1
"""Gap of a token whose logit is -inf."""

LOG2_E = 0xB8AA3B29
"""log2(e) in 31 fractional bits."""

EXP2_COEFFICIENTS = (4294967061, 2977027382, 1031563053, 237510004, 39560409, 4069712)
"""2^-f for f in [0, 1) in 32 fractional bits, within 6e-8: c0 - f * (c1 - f * (c2 - ...))."""

_MAX_SINGLE = 3.4028234663852886e38
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class TokenLogit(NamedTuple):
    """A token that may be drawn and its logit after temperature."""

    token: int
    logit: float


def mix(x: int) -> int:
    """Return the splitmix64 finaliser of x: a bijection of 64-bit integers.

    Every bit depends on all.
    """
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw_key(seed: int, position: int, purpose: int) -> int:
    """Return the 64-bit key of one draw. `position` is the absolute position of the token."""
    return mix(mix(mix(seed + _GOLDEN) + position) + purpose * _GOLDEN)


def uniform(key: int, index: int) -> float:
    """Return a uniform number on (0, 1), never an end.

    32 bits and a half, keyed by (key, index).
    """
    return ((mix(key + (index + 1) * _GOLDEN) >> 32) + 0.5) * 2.0**-32


def gumbel(key: int, token: int) -> float:
    """Return standard Gumbel noise of `token` under `key`."""
    return -log(-log(uniform(key, token)))


def choice_seed(seed: int, index: int) -> int:
    """Return the unsigned 64-bit seed of choice `index`. Choice 0 draws as with n = 1."""
    seed &= _MASK
    return seed if index == 0 else mix(seed ^ mix(index))


def invalid_logits_reason(logits: Sequence[float]) -> str | None:
    """Return why these logits cannot be sampled, or None. -inf is an impossible token."""
    if isfinite(sum(logits)):
        return None  # the common case, in one pass
    if any(map(isnan, logits)):
        return "the model's logits are not finite: NaN"
    max_logit = max(logits)
    if max_logit == inf or max_logit == -inf:
        return f"the model's logits are not finite: their maximum is {max_logit}"
    return None


def process_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Iterable[int],
    mask: bytes | None = None,
) -> list[float]:
    """Return the logits after mask, allowed ids, bias, min_tokens and penalties, in that order.

    The logits that bias and penalties reach are rounded to single precision after each.

    prompt, output   tokens before the position, split where the output begins
    end_ids          ids masked while `output` is shorter than min_tokens
    mask             ids that may be chosen, as in Row.masks; None: every id

    Repetition penalty: Keskar et al. 2019 (CTRL), prompt and output. Presence and frequency: output
    only. Where min_tokens would leave nothing possible its mask is not applied.
    """
    processed = list(logits)
    if mask is not None:
        processed = [x if mask[t >> 3] >> (t & 7) & 1 else -inf for t, x in enumerate(logits)]
    if params.allowed_token_ids is not None:
        processed = [-inf] * len(logits)
        for token in params.allowed_token_ids:
            processed[token] = logits[token]
    for token, bias in params.logit_bias:
        processed[token] = round_single(processed[token] + bias)
    if len(output) < params.min_tokens:
        masked = processed.copy()
        for token in (*end_ids, *params.stop_token_ids):
            masked[token] = -inf
        if max(masked) > -inf:
            processed = masked
    if params.has_penalties:
        _apply_penalties(processed, params, prompt, output)
    return processed


def round_single(value: float) -> float:
    """Return the number of single precision that is nearest. -inf stays.

    A finite number beyond the range becomes the last one within.
    """
    if value == -inf:
        return value
    (single,) = array("f", (max(-_MAX_SINGLE, min(value, _MAX_SINGLE)),))
    return single


def _apply_penalties(
    logits: list[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> None:
    counts: dict[int, int] = {}
    for token in output:
        counts[token] = counts.get(token, 0) + 1
    repetition = params.repetition_penalty
    for token in dict.fromkeys((*prompt, *counts)):
        value = logits[token]
        value = value / repetition if value > 0 else value * repetition
        if count := counts.get(token):
            value -= params.presence_penalty + params.frequency_penalty * count
        logits[token] = round_single(value)


def logit_gaps(logits: Sequence[float], temperature: float) -> list[int]:
    """Return how far each logit is below the largest, after temperature, in steps of 2^-15.

    IMPOSSIBLE for -inf, and at most MAX_GAP for any other. The arithmetic is in single precision:
    the logits, a difference, a product with 1 / T, and then the integer part. A finite logit beyond
    the range of single precision counts as the last number within.
    """
    singles = array("f", logits)  # rounds to single precision
    if inf in singles or -inf in singles:
        singles = array("f", [max(-_MAX_SINGLE, min(x, _MAX_SINGLE)) for x in logits])
    top = max(singles)
    (scale,) = array("f", [1.0 / temperature])
    differences = array("f", [min(top - x, _MAX_SINGLE) for x in singles])
    # MAX_GAP is a single exactly. The product of two singles is exact here, so it is rounded once.
    max_scaled = MAX_GAP / GAP_STEPS
    scaled = array("f", [min(difference * scale, max_scaled) for difference in differences])
    return [
        IMPOSSIBLE if x == -inf else int(gap * GAP_STEPS)
        for x, gap in zip(logits, scaled, strict=True)
    ]


def gap_weight(gap: int) -> int:
    """Return 2^32 * exp(-gap / 2^15) as an integer, with an error of at most 300.

    It is 0 where the logit is 22.2 or more below the largest, and never rises with the gap. Integer
    arithmetic, so that every device has the same weights.
    """
    exponent = (gap << 11) * LOG2_E >> 32  # base 2, with 25 fractional bits
    fraction = (exponent & (1 << 25) - 1) << 7
    c0, c1, c2, c3, c4, c5 = EXP2_COEFFICIENTS
    power = c4 - (fraction * c5 >> 32)
    power = c2 - (fraction * (c3 - (fraction * power >> 32)) >> 32)
    power = c0 - (fraction * (c1 - (fraction * power >> 32)) >> 32)
    return power >> (exponent >> 25)


def min_p_gap(min_p: float) -> int:
    """Return the largest gap that min-p keeps."""
    if min_p == 0.0:
        return MAX_GAP
    return min(int(-log(min_p) * GAP_STEPS), MAX_GAP)


def filter_logits(logits: Sequence[float], params: SamplingParams) -> list[TokenLogit]:
    """Return the tokens left by temperature, top-k, top-p and min-p, in order of their gaps.

    Of equal gaps the lower id comes first. top-p is over what top-k left, renormalised: the
    shortest beginning of that order with the mass. Never empty.
    """
    scale = 1.0 / params.temperature
    gaps = logit_gaps(logits, params.temperature)
    kept = sorted(range(len(logits)), key=gaps.__getitem__)
    if params.top_k:
        del kept[params.top_k :]
    max_gap = min_p_gap(params.min_p)
    if params.top_p < 1.0:
        weights = [gap_weight(gaps[token]) for token in kept]
        min_mass = ceil(params.top_p * sum(weights))
        mass, count = 0, 0
        while mass < min_mass:
            mass += weights[count]
            count += 1
        del kept[count:]
    return [TokenLogit(token, logits[token] * scale) for token in kept if gaps[token] <= max_gap]


def sample_token(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """Return the token at `position`, given logits that `process_logits` has returned."""
    if params.greedy:
        return logits.index(max(logits))
    if params.has_filters:
        kept = filter_logits(logits, params)
    else:  # the same tokens in another order, which a draw does not depend on
        scale = 1.0 / params.temperature
        kept = [TokenLogit(token, x * scale) for token, x in enumerate(logits) if x != -inf]
    return draw_token(kept, draw_key(seed, position, PLAIN))


def draw_token(kept: Iterable[TokenLogit], key: int) -> int:
    """Return a token of `kept`, with probabilities softmax(logit), by the noise under `key`."""
    # Where two scores are equal the lower id wins, as in greedy.
    return min((-(logit + gumbel(key, token)), token) for token, logit in kept)[1]


def probabilities(kept: Sequence[TokenLogit]) -> dict[int, float]:
    """Return softmax(logit) of `kept`, in its order; every other token has 0."""
    top = max(c.logit for c in kept)
    weights = [exp(c.logit - top) for c in kept]
    total = sum(weights)
    return {c.token: weight / total for c, weight in zip(kept, weights, strict=True)}


def draw_from_weights(weights: Mapping[int, float], key: int) -> int:
    """Return a token drawn with probability proportional to its weight, which is above 0."""
    return draw_token([TokenLogit(token, log(weight)) for token, weight in weights.items()], key)


def token_logprob(logits: Sequence[float], token: int, count: int) -> TokenLogprob:
    """Return the log probability of `token` and of the `count` most likely, from raw logits."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:count] if count else []
    return listed_logprob(logits, token, order)


def output_logprob(logits: Sequence[float], token: int, params: SamplingParams) -> TokenLogprob:
    """Return what comes with an output token of a request with `logprobs`, from raw logits."""
    if params.logprob_token_ids:
        return listed_logprob(logits, token, params.logprob_token_ids)
    return token_logprob(logits, token, params.logprobs or 0)


def listed_logprob(logits: Sequence[float], token: int, ids: Iterable[int]) -> TokenLogprob:
    """Return the log probabilities of `token` and of the ids, from raw logits."""
    top = max(logits)
    total = top + log(sum(exp(x - top) for x in logits))
    return TokenLogprob(token, logits[token] - total, tuple((t, logits[t] - total) for t in ids))
