"""TritonOps: the arithmetic between two attention calls, fused, for an NVIDIA GPU.

Owns the kernels that read what the step itself made: norm, silu, rotation. Those that stream the
weights are products.py's. Meaning and shapes of every operation are arithmetic.py's; only rounding
differs: fp32 inside, and one rounding where two operations are one kernel.

    up to small_rows tokens                          more
    linear_small, gate_up_small    products.py       a library's product
        norm before, sum after     inside them       rms_norm, add_rms_norm, silu_mul
    rope_write                     a program each    one program for up to 8 heads of a token
                                   head of a token

Invariant: as in products.py, every kernel waits for the one before it (`begin`) before it touches
what a kernel wrote. What it reads earlier is weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.models.hf.products import (
    H200,
    SMALL_ROWS,
    Tiles,
    begin,
    check,
    row_gate_up,
    row_linear,
)


def _norm_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    at = tl.arange(0, BLOCK)
    inside = at < H
    scale = tl.load(weight + at, mask=inside, other=0.0)
    begin(PDL)
    places = tl.program_id(0).to(tl.int64) * H + at
    row = tl.load(x + places, mask=inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + places, mask=inside, other=0.0)
        row = (row.to(tl.float32) + before.to(tl.float32)).to(row.dtype)
        tl.store(residual + places, row, mask=inside)
    wide = row.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    y = wide.to(row.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + places, y.to(row.dtype), mask=inside)


norm_rows = triton.jit(_norm_rows)


def _silu_rows(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    begin(PDL)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    token = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + token * (2 * WIDTH) + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    y = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * WIDTH + at, y.to(gate.dtype), mask=inside)


silu_rows = triton.jit(_silu_rows)


def _rope_heads(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    where: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # HEADS heads of one token, all of them q, all k or all v: HEADS divides both counts.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    heads = head + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < D
    # Dimension i turns with i + ROT / 2: read it again rather than exchange it.
    partner = tl.where(at < ROT // 2, at + ROT // 2, at - ROT // 2)
    turns = at < ROT
    if q_weight is not None:
        weight = q_weight if head < Q_HEADS else k_weight
        by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        by_across = tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
    begin(PDL)
    start = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + heads) * D
    place = tl.load(where + token).to(tl.int64)
    page = place // PAGE * page_stride + place % PAGE * token_stride
    row = tl.load(start + at, mask=inside, other=0.0)
    if head >= Q_HEADS + KV_HEADS:
        tl.store(values + page + (heads - Q_HEADS - KV_HEADS) * head_stride + at, row, mask=inside)
    else:
        other = tl.load(start + partner, mask=turns, other=0.0)
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * ROT + at, mask=turns, other=1.0)
        s = tl.load(sin + position * ROT + at, mask=turns, other=0.0)
        own = row.to(tl.float32)
        across = other.to(tl.float32)
        if q_weight is not None:
            scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
            own = ((own * scale).to(row.dtype).to(tl.float32) * by).to(row.dtype).to(tl.float32)
            across = (across * scale).to(row.dtype).to(tl.float32) * by_across
            across = across.to(row.dtype).to(tl.float32)
        turned = own * c + tl.where(at < ROT // 2, -across, across) * s
        turned = turned.to(row.dtype)
        tl.store(out + (token * (Q_HEADS + KV_HEADS) + heads) * D + at, turned, mask=inside)
        if head >= Q_HEADS:
            tl.store(keys + page + (heads - Q_HEADS) * head_stride + at, turned, mask=inside)


rope_heads = triton.jit(_rope_heads, do_not_specialize_on_alignment=["positions", "where"])


class TritonOps:
    """The operations as Triton kernels. Tensors are contiguous (pages: apart from their stride).

    pdl   launch every kernel while the one before it still runs (sm_90 or later). Worth it inside a
          CUDA graph; an eager launch takes the host longer with it
    """

    small_rows = SMALL_ROWS
    """Beyond, a library's product on the tensor cores takes over."""

    def __init__(self, *, pdl: bool, tiles: Tiles = H200) -> None:
        self._pdl = pdl
        self._tiles = tiles
        self._launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As TorchOps.rms_norm."""
        return self._normed(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As TorchOps.add_rms_norm."""
        return self._normed(x, residual, weight, eps)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous(), f"x is {x.stride()} apart"
        out = torch.empty_like(x)
        rows, width = x.shape
        if rows:
            block = triton.next_power_of_2(width)
            fixed = (x, residual, weight, out, eps, width, block, self._pdl)
            warps = min(8, max(1, block // 512))
            norm_rows[(rows,)](*fixed, num_warps=warps, **self._launch)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As TorchOps.silu_mul."""
        assert gate_up.is_contiguous(), f"gate_up is {gate_up.stride()} apart"
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        if rows:
            silu_rows[(rows, -(-width // 1024))](
                gate_up, out, width, 1024, self._pdl, num_warps=4, **self._launch
            )
        return out

    def rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        where: Tensor,
        keys: Tensor,
        values: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.rope_write. Both norms or neither; pages of keys and values alike."""
        assert qkv.is_contiguous(), f"qkv is {qkv.stride()} apart"
        assert (q_weight is None) == (k_weight is None), "q and k: one has a norm, one has none"
        assert keys.stride() == values.stride(), f"pages {keys.stride()}, {values.stride()} apart"
        tokens, heads = qkv.shape[0], num_heads + 2 * num_kv_heads
        head_dim = qkv.shape[1] // heads
        out = qkv.new_empty(tokens, num_heads + num_kv_heads, head_dim)
        queries_and_keys = out[:, :num_heads], out[:, num_heads:]
        if not tokens:
            return queries_and_keys
        together = 1
        # Few tokens: a program per head, to be done soon. Many: fewer programs, as fat as can be.
        while tokens > 64 and together < 8 and (num_heads | num_kv_heads) % (2 * together) == 0:
            together *= 2
        pages = (*keys.stride()[:3], num_heads, num_kv_heads, head_dim)
        cut = (cos.shape[1], keys.shape[1], together, triton.next_power_of_2(head_dim), self._pdl)
        rope_heads[(tokens, heads // together)](
            *(qkv, cos, sin, positions, where, keys, values, q_weight, k_weight, out, eps),
            *pages,
            *cut,
            num_warps=max(1, together // 2),
            **self._launch,
        )
        return queries_and_keys

    def linear_small(
        self,
        x: Tensor,
        w: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As TorchOps.linear_small, for 1 to small_rows rows."""
        (m, k), n = x.shape, w.shape[0]
        check(x, w)
        if out is None:
            out = x.new_empty(m, n)
        tile = self._tiles.row(m, k, n)
        fixed = (x, w, bias, norm, residual, out, eps)
        cut = (n, m, k, tile.outputs, 256 * tile.warps, tile.depth, self._pdl)
        grid = (-(-n // tile.outputs),)
        row_linear[grid](*fixed, *cut, num_warps=tile.warps, **self._launch)
        return out

    def gate_up_small(self, x: Tensor, w: Tensor, norm: Tensor, eps: float) -> Tensor:
        """As TorchOps.gate_up_small, for 1 to small_rows rows."""
        (m, k), n = x.shape, w.shape[0] // 2
        check(x, w)
        out = x.new_empty(m, n)
        tile = self._tiles.row(m, k, 2 * n)
        cut = (n, m, k, tile.outputs, 256 * tile.warps, tile.depth, self._pdl)
        grid = (-(-2 * n // tile.outputs),)
        row_gate_up[grid](x, w, norm, out, eps, *cut, num_warps=tile.warps, **self._launch)
        return out
