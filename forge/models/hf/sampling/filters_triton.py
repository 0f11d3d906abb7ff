"""Filtered sampling as Triton kernels: no order of the vocabulary, no sort and no host read.

Owns the search for a row's cut on a CUDA device. Imported only where logits are on one. The cuts
are those of filters.py, integer for integer.

    gaps of a row     0 ─────────────── 8 ──────────────────────────── MAX_GAP
    pass 1            [ 255 bins of 4096 steps: how many tokens, and at most and least what mass ]
    pass 2                  [ bins of 32 or more ]     around the bins that may hold the cut
    pass 3                     [ bins of 1 ]           one gap a bin: counts give exact masses
    cut                            └── gap, and the last token of those with this gap

A pass counts the gaps of every tile of every row, and then `narrow_row` chooses the bins that may
hold the cut. top-k needs counts alone and three passes. For top-p the mass within a bin has bounds;
the masses before, below the middle of, and within the chosen bins are exact. A choice of one bin
leaves a span of one; of more bins the next choice is on one side of their middle. So a search ends.
The first passes use all of the GPU; `finish_search` is a loop of one program for each row that
needs more of them.

Always true: arithmetic is that of forge.sampling, in integers and single precision without fused
operations. Scores and ties are those of gumbel.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.models.hf.sampling.gumbel_triton import pick, splitmix
from forge.sampling import EXP2_COEFFICIENTS, GAP_STEPS, IMPOSSIBLE, LOG2_E, MAX_GAP

TILE = 8192
"""Tokens of a program that counts gaps."""

SCORE_TILE = 2048
"""Tokens of a program that draws noise, in float64."""

_BINS = tl.constexpr(256)
_NUM_USED_BINS = tl.constexpr(255)
"""The last bin counts the gaps that are outside."""

_NUM_STATE = 8
"""Fields of a row's search: stage, first, end, middle, num_before, min_mass, cut, num_ties."""

_DONE, _TOP_K, _TOP_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUM_PASSES = 3
"""Passes that find the cut of every top-k, and of nearly every top-p. Twice as many where a row has
top-p, which may follow top-k."""

_MAX_GAP, _IMPOSSIBLE = tl.constexpr(MAX_GAP), tl.constexpr(IMPOSSIBLE)
_GAP_STEPS, _LOG2_E = tl.constexpr(float(GAP_STEPS)), tl.constexpr(LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2_COEFFICIENTS)
_ALL = tl.constexpr(2**31 - 1)
"""Ties that are kept where all are."""

_NO_TOKEN = tl.constexpr(2**31 - 1)
_MAX_SINGLE = tl.constexpr(torch.finfo(torch.float32).max)


def _single(raw: tl.tensor) -> tl.tensor:
    """Return the logits in single precision, and within its range."""
    return tl.minimum(tl.maximum(raw.to(tl.float32), -_MAX_SINGLE), _MAX_SINGLE)


single = triton.jit(_single)


def _gap(raw: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return forge.sampling.logit_gaps, int32. top and scale are float32."""
    x = single(raw)
    difference = tl.where(x < top, top - x, 0.0)
    steps = (tl.minimum(difference * scale, 32.0) * _GAP_STEPS).to(tl.int32)
    return tl.where(raw > -float("inf"), tl.minimum(steps, _MAX_GAP), _IMPOSSIBLE)


def _weight(gap: tl.tensor) -> tl.tensor:
    """Return forge.sampling.gap_weight, int64."""
    exponent = ((gap.to(tl.uint32) << 11).to(tl.uint64) * _LOG2_E) >> 32
    fraction = (exponent & ((1 << 25) - 1)) << 7
    power = _C4 - ((fraction * _C5) >> 32)
    power = _C3 - ((fraction * power) >> 32)
    power = _C2 - ((fraction * power) >> 32)
    power = _C1 - ((fraction * power) >> 32)
    power = _C0 - ((fraction * power) >> 32)
    return (power >> (exponent >> 25)).to(tl.int64)


_gap_jit, _weight_jit = triton.jit(_gap), triton.jit(_weight)


def _shift(span: tl.tensor) -> tl.tensor:
    """Return the least shift with which the used bins cover `span` gaps."""
    covered = tl.full([16], _NUM_USED_BINS, tl.int64) << tl.arange(0, 16).to(tl.int64)
    return tl.sum((span > covered).to(tl.int64), 0)


_shift_jit = triton.jit(_shift)


def _load_gaps(
    logits: tl.tensor, tokens: tl.tensor, vocab_size: tl.tensor, top: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """Return the gaps of tokens of a row; IMPOSSIBLE beyond the vocabulary."""
    raw = tl.load(logits + tokens, mask=tokens < vocab_size, other=-float("inf"))
    return _gap_jit(raw, top, scale)


_load_gaps_jit = triton.jit(_load_gaps)


def _sum_where(condition: tl.tensor, values: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(condition, values, 0), 0)


_sum_where_jit = triton.jit(_sum_where)


def _narrow(
    counts: tl.tensor,
    mass_before: tl.tensor,
    mass_low: tl.tensor,
    mass_high: tl.tensor,
    stage: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    middle: tl.tensor,
    num_before: tl.tensor,
    min_mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Return the next state of a row's search, from the counts of a pass. All numbers are int64.

    counts                     [256]; tokens in each bin of [first, end)
    mass_before, _low, _high   exact masses of gaps before `first`, of those before `middle`, and of
                               those from there to `end`; 0 where the row has no top-p
    num_before                 top-k: tokens with gaps before `first`
    min_mass                   top-p: least mass of the tokens that are kept; -1 until it is known
    """
    bins = tl.arange(0, _BINS).to(tl.int64)
    shift = _shift_jit(end - first)
    starts = tl.minimum(first + (bins << shift), end - 1)
    ends = tl.minimum(first + ((bins + 1) << shift), end)
    most = counts * _weight_jit(starts)
    least = counts * _weight_jit(ends - 1)
    mass_end = mass_before + mass_low + mass_high

    # top-k: the bin of the k-th token.
    totals = tl.cumsum(counts, 0) + num_before
    k_bin = tl.min(tl.where(totals >= top_k, bins, _BINS), 0)
    k_found = k_bin < _BINS
    k_before = num_before + _sum_where_jit(bins < k_bin, counts)
    k_resolved = (shift == 0) | (k_found == 0)
    k_cut = tl.where(k_found, first + k_bin, _IMPOSSIBLE)
    k_ties = tl.where(k_found, top_k - k_before, 0)
    k_mass = tl.where(k_found, mass_before + _sum_where_jit(bins < k_bin, most), mass_end)
    k_weight = _weight_jit(k_cut)
    total = tl.where(stage == _TOP_K, k_mass + k_ties * k_weight, mass_end)
    new_min_mass = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    p_mass = tl.where((stage == _TOP_K) | (min_mass < 0), new_min_mass, min_mass)
    in_k_ties = p_mass > k_mass
    k_p_ties = (p_mass - k_mass + k_weight - 1) // tl.maximum(k_weight, 1)

    # top-p: the bins that may hold the token with which the mass is reached.
    most_sums, least_sums = tl.cumsum(most, 0), tl.cumsum(least, 0)
    upper = tl.minimum(mass_before + most_sums, mass_end - (tl.sum(least, 0) - least_sums))
    lower = tl.maximum(mass_before + least_sums, mass_end - (tl.sum(most, 0) - most_sums))
    # The middle is within a bin where that is the last one, which then ends at it.
    last_low = ((middle - first + (1 << shift) - 1) >> shift) - 1
    mass_middle = mass_before + mass_low
    upper = tl.where(bins <= last_low, tl.minimum(upper, mass_middle), upper)
    lower = tl.where(bins >= last_low, tl.maximum(lower, mass_middle), lower)
    p_first = tl.min(tl.where(upper >= p_mass, bins, _NUM_USED_BINS - 1), 0)
    p_last = tl.maximum(tl.min(tl.where(lower >= p_mass, bins, _NUM_USED_BINS - 1), 0), p_first)
    p_resolved = shift == 0
    p_cut = first + p_first
    p_under = mass_before + _sum_where_jit(bins < p_first, most)
    p_weight = tl.maximum(_weight_jit(p_cut), 1)
    p_ties = (p_mass - p_under + p_weight - 1) // p_weight

    is_k = stage == _TOP_K
    k_ends = k_resolved & ((top_p >= 1.0) | in_k_ties)
    k_goes_to_p = k_resolved & (k_ends == 0)
    next_stage = tl.where(
        is_k,
        tl.where(k_ends, _DONE, tl.where(k_goes_to_p, _TOP_P, _TOP_K)),
        tl.where(p_resolved, _DONE, _TOP_P),
    )
    chosen_first = tl.where(is_k, k_bin, p_first)
    num_chosen = tl.where(is_k, 1, p_last - p_first + 1)
    next_first = first + (chosen_first << shift)
    next_end = tl.minimum(next_first + (num_chosen << shift), end)
    next_middle = tl.where(
        num_chosen == 1, next_end, next_first + (((num_chosen + 1) // 2) << shift)
    )
    restarts = is_k & k_goes_to_p
    next_first = tl.where(restarts, 0, next_first)
    next_end = tl.where(restarts, k_cut, next_end)
    next_middle = tl.where(restarts, k_cut, next_middle)
    cut = tl.where(is_k, k_cut, p_cut)
    ties = tl.where(is_k, tl.where(top_p >= 1.0, k_ties, k_p_ties), p_ties)
    return (
        next_stage.to(tl.int64),
        next_first,
        next_end,
        next_middle,
        k_before,
        p_mass,
        cut,
        ties,
    )


_narrow_jit = triton.jit(_narrow)


def _max_tile(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tile_tops: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write the largest logit of a tile, in single precision. NaN counts as -inf."""
    row, tile = tl.program_id(0), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    start = logits + tl.load(rows + row) * row_stride
    x = tl.load(start + tokens, mask=tokens < vocab_size, other=-float("inf"))
    top = tl.max(single(tl.where(x == x, x, -float("inf"))), 0)
    tl.store(tile_tops + row * tl.num_programs(1) + tile, top)


def _start(
    tile_tops: tl.tensor,
    tiles: tl.tensor,
    numbers: tl.tensor,
    vocab_size: tl.tensor,
    tops: tl.tensor,
    states: tl.tensor,
    TILES: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Write a row's largest logit and the first state of its search."""
    row = tl.program_id(0)
    tile_range = tl.arange(0, TILES)
    tile_values = tl.load(
        tile_tops + row * tiles + tile_range, mask=tile_range < tiles, other=-float("inf")
    )
    tl.store(tops + row, tl.max(tile_values, 0))
    top_k = tl.load(numbers + row * NUM_NUMBERS + 2)
    top_p = tl.load(numbers + row * NUM_NUMBERS + 3)
    stage = tl.where(top_k < vocab_size, _TOP_K, tl.where(top_p < 1.0, _TOP_P, _DONE))
    state = states + row * NUM_STATE
    tl.store(state, stage)
    tl.store(state + 1, 0)
    tl.store(state + 2, _IMPOSSIBLE)
    tl.store(state + 3, _IMPOSSIBLE)
    tl.store(state + 4, 0)
    tl.store(state + 5, -1)
    tl.store(state + 6, _MAX_GAP)
    tl.store(state + 7, _ALL)


def _count_tile(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    states: tl.tensor,
    tile_counts: tl.tensor,
    tile_masses: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Count the gaps of a tile in the bins of its row's search, and sum three masses."""
    row, tile = tl.program_id(0), tl.program_id(1)
    state = states + row * NUM_STATE
    if tl.load(state) != _DONE:
        first, end, middle = tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
        shift = _shift_jit(end - first).to(tl.int32)
        start = logits + tl.load(rows + row) * row_stride
        scale = tl.load(numbers + row * NUM_NUMBERS).to(tl.float32)
        top = tl.load(tops + row)
        tokens = tile * TILE + tl.arange(0, TILE)
        gap = _load_gaps_jit(start, tokens, vocab_size, top, scale)
        low, high = first.to(tl.int32), end.to(tl.int32)
        bins = tl.where((gap >= low) & (gap < high), (gap - low) >> shift, _NUM_USED_BINS)
        index = row * tl.num_programs(1) + tile
        tl.store(tile_counts + index * _BINS + tl.arange(0, _BINS), tl.histogram(bins, _BINS))
        if tl.load(numbers + row * NUM_NUMBERS + 3) < 1.0:
            weight = _weight_jit(gap)
            before = _sum_where_jit(gap < low, weight)
            through_low = _sum_where_jit(gap < middle.to(tl.int32), weight)
            through_high = _sum_where_jit(gap < high, weight)
            tl.store(tile_masses + index * 3, before)
            tl.store(tile_masses + index * 3 + 1, through_low - before)
            tl.store(tile_masses + index * 3 + 2, through_high - through_low)


def _narrow_row(
    tile_counts: tl.tensor,
    tile_masses: tl.tensor,
    tiles: tl.tensor,
    numbers: tl.tensor,
    states: tl.tensor,
    TILES: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Add up the tiles of a row, and write the next state of its search."""
    row = tl.program_id(0)
    state = states + row * NUM_STATE
    stage = tl.load(state)
    if stage != _DONE:
        tile_range, bins = tl.arange(0, TILES), tl.arange(0, _BINS)
        index = row * tiles + tile_range
        tile_mask = tile_range < tiles
        used = tile_mask[:, None] & (bins < _NUM_USED_BINS)[None, :]
        cells = tl.load(tile_counts + index[:, None] * _BINS + bins[None, :], mask=used, other=0)
        counts = tl.sum(cells, 0).to(tl.int64)
        top_p = tl.load(numbers + row * NUM_NUMBERS + 3)
        # Without top-p the masses were not written, and nothing depends on them.
        masses = tile_masses + index * 3
        before = tl.sum(tl.load(masses, mask=tile_mask, other=0), 0)
        low = tl.sum(tl.load(masses + 1, mask=tile_mask, other=0), 0)
        high = tl.sum(tl.load(masses + 2, mask=tile_mask, other=0), 0)
        stage, first, end, middle, num_before, min_mass, cut, ties = _narrow_jit(
            counts,
            before,
            low,
            high,
            stage,
            tl.load(state + 1),
            tl.load(state + 2),
            tl.load(state + 3),
            tl.load(state + 4),
            tl.load(state + 5),
            tl.load(numbers + row * NUM_NUMBERS + 2).to(tl.int64),
            top_p,
        )
        tl.store(state, stage)
        tl.store(state + 1, first)
        tl.store(state + 2, end)
        tl.store(state + 3, middle)
        tl.store(state + 4, num_before)
        tl.store(state + 5, min_mass)
        tl.store(state + 6, cut)
        tl.store(state + 7, ties)


def _finish(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    states: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Repeat passes over a row until its cut is found."""
    row = tl.program_id(0)
    state = states + row * NUM_STATE
    stage = tl.load(state)
    if stage != _DONE:
        start = logits + tl.load(rows + row) * row_stride
        scale = tl.load(numbers + row * NUM_NUMBERS).to(tl.float32)
        top_k = tl.load(numbers + row * NUM_NUMBERS + 2).to(tl.int64)
        top_p = tl.load(numbers + row * NUM_NUMBERS + 3)
        top = tl.load(tops + row)
        first, end, middle = tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
        num_before, min_mass = tl.load(state + 4), tl.load(state + 5)
        cut, ties = tl.load(state + 6), tl.load(state + 7)
        bins = tl.arange(0, _BINS)
        while stage != _DONE:
            shift = _shift_jit(end - first).to(tl.int32)
            counts = tl.zeros([_BINS], tl.int64)
            before = tl.full([], 0, tl.int64)
            through_low = tl.full([], 0, tl.int64)
            through_high = tl.full([], 0, tl.int64)
            for tile_start in range(0, vocab_size, TILE):
                tokens = tile_start + tl.arange(0, TILE)
                gap = _load_gaps_jit(start, tokens, vocab_size, top, scale)
                inside = (gap >= first.to(tl.int32)) & (gap < end.to(tl.int32))
                offset = (gap - first.to(tl.int32)) >> shift
                counts += tl.histogram(tl.where(inside, offset, _NUM_USED_BINS), _BINS).to(tl.int64)
                weight = _weight_jit(gap)
                before += _sum_where_jit(gap < first, weight)
                through_low += _sum_where_jit(gap < middle, weight)
                through_high += _sum_where_jit(gap < end, weight)
            counts = tl.where(bins < _NUM_USED_BINS, counts, 0)
            stage, first, end, middle, num_before, min_mass, cut, ties = _narrow_jit(
                counts,
                before,
                through_low - before,
                through_high - through_low,
                stage,
                first,
                end,
                middle,
                num_before,
                min_mass,
                top_k,
                top_p,
            )
        tl.store(state, stage)
        tl.store(state + 6, cut)
        tl.store(state + 7, ties)


def _count_ties(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    states: tl.tensor,
    tile_ties: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Count the tokens of a tile whose gap is that of the cut, where not all of them are kept."""
    row, tile = tl.program_id(0), tl.program_id(1)
    state = states + row * NUM_STATE
    if tl.load(state + 7) != _ALL:
        start = logits + tl.load(rows + row) * row_stride
        scale = tl.load(numbers + row * NUM_NUMBERS).to(tl.float32)
        tokens = tile * TILE + tl.arange(0, TILE)
        gap = _load_gaps_jit(start, tokens, vocab_size, tl.load(tops + row), scale)
        num_ties = tl.sum((gap == tl.load(state + 6)).to(tl.int32), 0)
        tl.store(tile_ties + row * tl.num_programs(1) + tile, num_ties)


def _write_cut(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    states: tl.tensor,
    tile_ties: tl.tensor,
    tiles: tl.tensor,
    cut_gaps: tl.tensor,
    cut_tokens: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
    NUM_STATE: tl.constexpr,
) -> None:
    """Write a row's cut: min-p's, or the search's with the last of its ties that is kept."""
    row = tl.program_id(0)
    state = states + row * NUM_STATE
    cut, num_kept = tl.load(state + 6), tl.load(state + 7)
    max_gap = tl.load(numbers + row * NUM_NUMBERS + 4).to(tl.int64)
    token = tl.full([], 0, tl.int64) + vocab_size
    if (cut <= max_gap) & (num_kept != _ALL):
        tile_range = tl.arange(0, TILES)
        ties = tl.load(tile_ties + row * tiles + tile_range, mask=tile_range < tiles, other=0).to(
            tl.int64
        )
        sums = tl.cumsum(ties, 0)
        tile = tl.min(tl.where(sums >= num_kept, tile_range, TILES - 1), 0)
        rank = num_kept - _sum_where_jit(tile_range < tile, ties)
        start = logits + tl.load(rows + row) * row_stride
        scale = tl.load(numbers + row * NUM_NUMBERS).to(tl.float32)
        tokens = tile * TILE + tl.arange(0, TILE)
        gap = _load_gaps_jit(start, tokens, vocab_size, tl.load(tops + row), scale)
        is_tie = (gap == cut).to(tl.int32)
        found = (tl.cumsum(is_tie, 0) == rank) & (is_tie == 1)
        token = tl.min(tl.where(found, tokens, vocab_size), 0).to(tl.int64)
    tl.store(cut_gaps + row, tl.minimum(cut, max_gap))
    tl.store(cut_tokens + row, token)


def _score_kept(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    cut_gaps: tl.tensor,
    cut_tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    best: tl.tensor,
    best_token: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
) -> None:
    """Write the best score among a tile's tokens that the filters keep, and its token."""
    row, tile = tl.program_id(0), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    token_mask = tokens < vocab_size
    start = logits + tl.load(rows + row) * row_stride
    raw = tl.load(start + tokens, mask=token_mask, other=-float("inf"))
    inverse_temperature = tl.load(numbers + row * NUM_NUMBERS)
    noise_scale = tl.load(numbers + row * NUM_NUMBERS + 1)
    gap = _gap_jit(raw, tl.load(tops + row), inverse_temperature.to(tl.float32))
    cut = tl.load(cut_gaps + row)
    kept = (gap < cut) | ((gap == cut) & (tokens <= tl.load(cut_tokens + row)))
    x = raw.to(tl.float64)
    has_nan = tl.max((x != x).to(tl.int32), 0)
    score = tl.where(kept & (x == x), x * inverse_temperature, -float("inf"))
    # A greedy row has no noise, and a tile of which nothing is kept needs none.
    if noise_scale * tl.max(kept.to(tl.float64), 0) > 0.0:
        golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        slot = tl.load(slots + row).to(tl.int64)
        key = splitmix(tl.load(seeds + slot).to(tl.uint64) + golden)
        # The purpose is PLAIN, which is 0 and adds nothing.
        key = splitmix(splitmix(key + tl.load(positions + row).to(tl.uint64)))
        bits = splitmix(key + (tokens + 1).to(tl.uint64) * golden) >> 32
        uniform = (bits.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
        score = score - tl.log(-tl.log(uniform))
    score = tl.where(x == float("inf"), float("inf"), score)
    best_score = tl.max(score, 0)
    token = tl.min(tl.where((score == best_score) & token_mask, tokens, _NO_TOKEN), 0)
    index = row * tl.num_programs(1) + tile
    tl.store(best + index, tl.where(has_nan > 0, float("nan"), best_score))
    tl.store(best_token + index, token)


max_tile, start_search = triton.jit(_max_tile), triton.jit(_start)
count_tile, narrow_row = triton.jit(_count_tile), triton.jit(_narrow_row)
finish_search, count_ties = triton.jit(_finish), triton.jit(_count_ties)
write_cut, score_kept = triton.jit(_write_cut), triton.jit(_score_kept)


def find_cuts_cuda(
    logits: Tensor,
    rows: Tensor,
    numbers: Tensor,
    *,
    has_order: bool,
    has_top_p: bool,
    tile: int = TILE,
    num_passes: int = NUM_PASSES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit and the cut of each row: float32, int64 and int64 [n].

    logits      [R, V] any float dtype; logits of a row are contiguous
    rows        [n] int64; rows of `logits`
    numbers     [n, 5] float64; fields of SamplingNumbers
    has_order   some row has top-k or top-p
    has_top_p   some row has top-p
    num_passes  3, or more where a row has top-p: `finish_search` does what is left

    The launches depend on the two flags alone. Nothing waits for the device.
    """
    assert logits.stride(1) == 1, f"logits of a row have stride {logits.stride(1)}, not 1"
    num_rows, (vocab_size, device) = len(rows), (logits.shape[1], logits.device)
    tiles = triton.cdiv(vocab_size, tile)
    sizes = {"NUM_NUMBERS": numbers.shape[1], "NUM_STATE": _NUM_STATE}
    grid, row_grid = (num_rows, tiles), (num_rows,)
    tile_tops = torch.empty(num_rows, tiles, dtype=torch.float32, device=device)
    tops = torch.empty(num_rows, dtype=torch.float32, device=device)
    states = torch.empty(num_rows, _NUM_STATE, dtype=torch.int64, device=device)
    cut_gaps = torch.empty(num_rows, dtype=torch.int64, device=device)
    cut_tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    tile_counts = torch.empty(num_rows, tiles, _BINS.value, dtype=torch.int32, device=device)
    tile_masses = torch.empty(num_rows, tiles, 3, dtype=torch.int64, device=device)
    tile_ties = tile_counts.view(-1)[: num_rows * tiles]
    padded = triton.next_power_of_2(tiles)
    stride = logits.stride(0)
    kernel_options = {"enable_fp_fusion": False, "num_warps": 8}
    max_tile[grid](logits, stride, rows, tile_tops, vocab_size, TILE=tile, **kernel_options)
    start_search[row_grid](
        tile_tops, tiles, numbers, vocab_size, tops, states, TILES=padded, **sizes
    )
    row_arguments = (logits, stride, rows, tops, numbers, states)
    if has_order:
        for _ in range(num_passes * (1 + has_top_p)):
            count_tile[grid](
                *row_arguments,
                tile_counts,
                tile_masses,
                vocab_size,
                TILE=tile,
                **sizes,
                **kernel_options,
            )
            narrow_row[row_grid](
                tile_counts,
                tile_masses,
                tiles,
                numbers,
                states,
                TILES=padded,
                **sizes,
                **kernel_options,
            )
        if has_top_p:
            finish_search[row_grid](
                *row_arguments, vocab_size, TILE=tile, **sizes, **kernel_options
            )
        count_ties[grid](
            *row_arguments, tile_ties, vocab_size, TILE=tile, **sizes, **kernel_options
        )
    write_cut[row_grid](
        *row_arguments,
        tile_ties,
        tiles,
        cut_gaps,
        cut_tokens,
        vocab_size,
        TILE=tile,
        TILES=padded,
        **sizes,
        **kernel_options,
    )
    return tops, cut_gaps, cut_tokens


def filtered_sample_cuda(
    logits: Tensor,
    rows: Tensor,
    numbers: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    *,
    has_order: bool,
    has_top_p: bool,
) -> tuple[Tensor, Tensor]:
    """Return token and status of each row, int32 [n]: filters, noise and argmax.

    slots, positions   [n] int64; positions of the tokens to sample
    seeds              [N] int64; of each slot
    Other arguments: see `find_cuts_cuda`. Greedy rows, whose noise scale is 0, have no filter.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    tiles = triton.cdiv(vocab_size, SCORE_TILE)
    tops, cut_gaps, cut_tokens = find_cuts_cuda(
        logits, rows, numbers, has_order=has_order, has_top_p=has_top_p
    )
    best = torch.empty(num_rows, tiles, dtype=torch.float64, device=logits.device)
    best_token = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    tokens, status = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    score_kept[(num_rows, tiles)](
        logits,
        logits.stride(0),
        rows,
        tops,
        numbers,
        cut_gaps,
        cut_tokens,
        slots,
        positions,
        seeds,
        best,
        best_token,
        vocab_size,
        TILE=SCORE_TILE,
        NUM_NUMBERS=numbers.shape[1],
        enable_fp_fusion=False,
        num_warps=8,
    )
    pick[(num_rows,)](best, best_token, tiles, tokens, status, TILES=triton.next_power_of_2(tiles))
    return tokens, status
