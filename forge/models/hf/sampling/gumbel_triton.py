"""Gumbel sampling as two Triton kernels. Imported only where logits are on a CUDA device.

Owns the kernels' grid: many programs for each row, then one that picks the best of their results.

    row 3   [ tile 0 | tile 1 | ... | tile S-1 ]      one program each: best score, its token
                 └────────┴──────────────┴──► best [S]  NaN where the tile holds a NaN
                                              └─ one program: token, status

Always true: arithmetic, order and ties are those of gumbel.py. FP fusion is off: forge.sampling
rounds the multiplication by 1 / T before it adds the noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.models.hf.sampling.status import (
    STATUS_NAN,
    STATUS_NEGATIVE_INF,
    STATUS_OK,
    STATUS_POSITIVE_INF,
)

_TILE = 2048
_NO_TOKEN = tl.constexpr(2**31 - 1)
_STATUS_OK, _STATUS_NAN = tl.constexpr(STATUS_OK), tl.constexpr(STATUS_NAN)
_STATUS_POSITIVE_INF = tl.constexpr(STATUS_POSITIVE_INF)
_STATUS_NEGATIVE_INF = tl.constexpr(STATUS_NEGATIVE_INF)


def _splitmix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


splitmix = triton.jit(_splitmix)


def _score_tile(
    logits: tl.tensor,
    row_stride: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    temperatures: tl.tensor,
    best: tl.tensor,
    best_token: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    token_mask = tokens < vocab_size
    start = logits + row.to(tl.int64) * row_stride
    raw = tl.load(start + tokens, mask=token_mask, other=-float("inf")).to(tl.float64)
    has_nan = tl.max((raw != raw).to(tl.int32), 0)
    score = tl.where(raw != raw, -float("inf"), raw)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    if temperature > 0.0:
        golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        key = splitmix(tl.load(seeds + slot).to(tl.uint64) + golden)
        # The purpose is PLAIN, which is 0 and adds nothing.
        key = splitmix(splitmix(key + tl.load(positions + row).to(tl.uint64)))
        bits = splitmix(key + (tokens + 1).to(tl.uint64) * golden) >> 32
        uniform = (bits.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
        score = score * (1.0 / temperature) - tl.log(-tl.log(uniform))
    best_score = tl.max(score, 0)
    token = tl.min(tl.where((score == best_score) & token_mask, tokens, _NO_TOKEN), 0)
    index = row * tl.num_programs(1) + tile
    tl.store(best + index, tl.where(has_nan > 0, float("nan"), best_score))
    tl.store(best_token + index, token)


def _pick(
    best: tl.tensor,
    best_token: tl.tensor,
    tiles: tl.tensor,
    out_tokens: tl.tensor,
    out_status: tl.tensor,
    TILES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    tile_range = tl.arange(0, TILES)
    tile_mask = tile_range < tiles
    scores = tl.load(best + row * tiles + tile_range, mask=tile_mask, other=-float("inf"))
    tokens = tl.load(best_token + row * tiles + tile_range, mask=tile_mask, other=_NO_TOKEN)
    has_nan = tl.max((scores != scores).to(tl.int32), 0)
    scores = tl.where(scores != scores, -float("inf"), scores)
    best_score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best_score, tokens, _NO_TOKEN), 0)
    status = tl.where(best_score == -float("inf"), _STATUS_NEGATIVE_INF, _STATUS_OK)
    status = tl.where(best_score == float("inf"), _STATUS_POSITIVE_INF, status)
    status = tl.where(has_nan > 0, _STATUS_NAN, status)
    tl.store(out_tokens + row, tl.where(status == _STATUS_OK, token, 0))
    tl.store(out_status + row, status)


# The alignment of a step's inputs differs from step to step. Without this, each is a new kernel.
score_tile = triton.jit(_score_tile, do_not_specialize_on_alignment=["slots", "positions"])
pick = triton.jit(_pick, do_not_specialize_on_alignment=["out_tokens", "out_status"])


def gumbel_sample_cuda(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    out_tokens: Tensor,
    out_status: Tensor,
) -> None:
    """Launch both kernels. Arguments are those of `gumbel_sample`; logits of a row are contiguous.

    Safe inside a CUDA graph: the two scratch tensors come from torch's allocator, in the graph's
    pool.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of a row have stride {logits.stride(1)}, not 1"
    if num_rows == 0:
        return
    tiles = triton.cdiv(vocab_size, _TILE)
    best = torch.empty(num_rows, tiles, dtype=torch.float64, device=logits.device)
    best_token = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    score_tile[(num_rows, tiles)](
        logits,
        logits.stride(0),
        slots,
        positions,
        seeds,
        temperatures,
        best,
        best_token,
        vocab_size,
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    pick[(num_rows,)](
        best, best_token, tiles, out_tokens, out_status, TILES=triton.next_power_of_2(tiles)
    )
