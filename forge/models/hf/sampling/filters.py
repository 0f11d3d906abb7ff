"""Filters of a batch of rows, as forge.sampling defines them: temperature, top-k, top-p, min-p.

Owns the search for each row's cut, in plain torch. Knows no request. sample.cu finds
the same cuts without an order of the vocabulary.

    token    0    1    2    3    4        gaps to the largest logit, in steps of 2^-15
    gap      0   90   40   90   90        in order of (gap, token): 0 2 1 3 4
    kept     x    x    x    .    .        top_k 3: the cut is (90, 1)

Always true: a cut is a gap and a token. Kept are the tokens with a smaller gap, and those with this
gap up to this token. All numbers are integers, so the order of a sum does not matter.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from forge.sampling import EXP2_COEFFICIENTS, GAP_STEPS, IMPOSSIBLE, LOG2_E, MAX_GAP

MAX_SINGLE = torch.finfo(torch.float32).max

MAX_TOPK = 1024
"""Leading tokens up to which torch.topk selects them; for more the vocabulary is sorted."""


class FilterParams(NamedTuple):
    """Filters of n rows after temperature, on the device.

    top_k     [n] float64; most tokens kept; the size of the vocabulary keeps all
    top_p     [n] float64; mass of the tokens that top-k left; 1 keeps all
    max_gap   [n] float64; largest gap that min-p keeps
    """

    top_k: Tensor
    top_p: Tensor
    max_gap: Tensor


class Cuts(NamedTuple):
    """Last token that is kept of each row, in order of (gap, token).

    gaps     [n] int64
    tokens   [n] int64; the size of the vocabulary where all tokens of the gap are kept
    """

    gaps: Tensor
    tokens: Tensor


def compute_gaps(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Return forge.sampling.logit_gaps of each row, int64 [n, V].

    logits                [n, V] any float dtype
    inverse_temperature   [n] float64
    """
    singles = logits.float().clamp(-MAX_SINGLE, MAX_SINGLE)
    top = singles.amax(1, keepdim=True)
    differences = torch.where(singles < top, top - singles, 0.0)  # NaN: the row fails
    gaps = differences.mul_(inverse_temperature.float()[:, None]).clamp_(max=32.0)
    steps = gaps.mul_(GAP_STEPS).long().clamp_(max=MAX_GAP)
    return torch.where(logits > -inf, steps, IMPOSSIBLE)


def gap_weights(gaps: Tensor) -> Tensor:
    """Return forge.sampling.gap_weight of each gap, int64."""
    exponents = (gaps << 11) * LOG2_E >> 32
    fractions = (exponents & (1 << 25) - 1) << 7
    *coefficients, power = EXP2_COEFFICIENTS
    powers = torch.full_like(gaps, power)
    for coefficient in reversed(coefficients):
        powers = coefficient - _product_high(fractions, powers)
    return powers >> (exponents >> 25)


def find_cuts(gaps: Tensor, params: FilterParams, max_top_k: int) -> Cuts:
    """Return where the filters of each row end.

    gaps        [n, V] int64
    max_top_k   leading tokens whose order is enough for every row; V for a row that has neither
                top-k nor top-p. 0 where no row has one
    """
    size = gaps.shape[1]
    cut_gaps, cut_tokens = torch.full_like(gaps[:, 0], MAX_GAP), torch.full_like(gaps[:, 0], size)
    if max_top_k:
        keys = gaps * size + torch.arange(size, device=gaps.device)
        if max_top_k <= MAX_TOPK:
            ordered = keys.topk(max_top_k, dim=1, largest=False).values
        else:
            ordered = keys.sort(dim=1).values
        ranks = torch.arange(ordered.shape[1], device=gaps.device)
        top_k = params.top_k.long()[:, None]
        weights = gap_weights(ordered // size).masked_fill_(ranks >= top_k, 0)
        masses = weights.cumsum(1)
        min_mass = (params.top_p[:, None] * masses[:, -1:].double()).ceil_().long()
        # A token is kept while the mass before it is under the least mass. The first always is.
        num_kept = 1 + (masses[:, :-1] < min_mass).sum(1, keepdim=True)
        num_kept = torch.where(params.top_p[:, None] < 1.0, torch.minimum(num_kept, top_k), top_k)
        last = ordered.gather(1, num_kept.clamp_(max=ordered.shape[1]) - 1)[:, 0]
        cut_gaps, cut_tokens = last // size, last % size
    max_gaps = params.max_gap.long()
    return Cuts(
        torch.minimum(cut_gaps, max_gaps), cut_tokens.masked_fill(max_gaps < cut_gaps, size)
    )


def kept_mask(gaps: Tensor, cuts: Cuts) -> Tensor:
    """Return whether the filters keep each token, bool [n, V].

    gaps   [n, V] int64
    """
    tokens = torch.arange(gaps.shape[1], device=gaps.device)
    cut_gaps, cut_tokens = cuts.gaps[:, None], cuts.tokens[:, None]
    return (gaps < cut_gaps) | ((gaps == cut_gaps) & (tokens <= cut_tokens))


def _product_high(fractions: Tensor, factors: Tensor) -> Tensor:
    """Return the upper 32 bits of the products of two unsigned 32-bit numbers, held in int64."""
    # The product may exceed 63 bits, so the lower half of a fraction is multiplied alone.
    high, low = fractions >> 16, fractions & 0xFFFF
    return (high * factors + (low * factors >> 16)) >> 16
