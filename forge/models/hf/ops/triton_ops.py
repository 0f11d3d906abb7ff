"""TritonOps: the operations between two attention calls, fused, for an NVIDIA GPU.

Owns the kernels that read activations: norm, silu, rotation. The kernels that stream weights are in
small_gemm.py. Meaning and shapes of every operation are those of ops/reference.py. Only rounding
differs: fp32 inside, and one rounding where two operations are one kernel.

    up to max_small_rows tokens                      more
    linear_small, gate_up_small    small_gemm.py     linear, gate_up    skinny_gemm.py for few, then
                                                                        a library's GEMM
        norm before, sum after     inside them       rms_norm, add_rms_norm
    rope_and_cache                 a program each    one program for up to 8 heads of a token
                                   head of a token

Always true: every kernel waits for the one before it (`wait_for_previous_kernel`) before it touches
what a kernel wrote. Before the wait it reads weights only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from forge.models.hf.ops.small_gemm import (
    H200_TILES,
    MAX_SMALL_ROWS,
    SmallGemmTiles,
    check_operands,
    row_gate_up,
    row_linear,
    wait_for_previous_kernel,
)

if TYPE_CHECKING:  # Needs the bindings of CUDA, which are installed only where torch has CUDA.
    from forge.models.hf.ops.skinny_gemm import SkinnyGemm


def _norm_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    column_mask = columns < HIDDEN_SIZE
    scale = tl.load(weight + columns, mask=column_mask, other=0.0)
    wait_for_previous_kernel(PDL)
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE + columns
    row = tl.load(x + offsets, mask=column_mask, other=0.0)
    if residual is not None:
        residual_row = tl.load(residual + offsets, mask=column_mask, other=0.0)
        row = (row.to(tl.float32) + residual_row.to(tl.float32)).to(row.dtype)
        tl.store(residual + offsets, row, mask=column_mask)
    x32 = row.to(tl.float32)
    x32 *= tl.rsqrt(tl.sum(x32 * x32, 0) / HIDDEN_SIZE + eps)
    y = x32.to(row.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + offsets, y.to(row.dtype), mask=column_mask)


norm_rows = triton.jit(_norm_rows)


def _silu_rows(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    wait_for_previous_kernel(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = columns < WIDTH
    token = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + token * (2 * WIDTH) + columns, mask=column_mask, other=0.0)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + columns, mask=column_mask, other=0.0)
    gate32 = gate.to(tl.float32)
    y = (gate32 * tl.sigmoid(gate32)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * WIDTH + columns, y.to(gate.dtype), mask=column_mask)


silu_rows = triton.jit(_silu_rows)


def _rope_heads(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q_norm_weight: tl.tensor,
    k_norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # HEADS_PER_PROGRAM heads of one token, all of them q, k or v: it divides both head counts.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM
    heads = head + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    dim_mask = dims < HEAD_DIM
    # Dimension i turns with i + ROTARY_DIM / 2. A second load is cheaper than a shuffle.
    partner = tl.where(dims < ROTARY_DIM // 2, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
    rotates = dims < ROTARY_DIM
    if q_norm_weight is not None:
        weight = q_norm_weight if head < Q_HEADS else k_norm_weight
        norm_weight = tl.load(weight + dims, mask=dim_mask, other=0.0).to(tl.float32)
        partner_norm_weight = tl.load(weight + partner, mask=rotates, other=0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    start = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + heads) * HEAD_DIM
    kv_index = tl.load(slot_mapping + token).to(tl.int64)
    kv_offset = kv_index // BLOCK_SIZE * block_stride + kv_index % BLOCK_SIZE * token_stride
    x = tl.load(start + dims, mask=dim_mask, other=0.0)
    if head >= Q_HEADS + KV_HEADS:
        tl.store(
            values + kv_offset + (heads - Q_HEADS - KV_HEADS) * head_stride + dims, x, mask=dim_mask
        )
    else:
        x_partner = tl.load(start + partner, mask=rotates, other=0.0)
        position = tl.load(positions + token).to(tl.int64)
        cos_values = tl.load(cos + position * ROTARY_DIM + dims, mask=rotates, other=1.0)
        sin_values = tl.load(sin + position * ROTARY_DIM + dims, mask=rotates, other=0.0)
        normed = x.to(tl.float32)
        normed_partner = x_partner.to(tl.float32)
        if q_norm_weight is not None:
            scale = tl.rsqrt(tl.sum(normed * normed, 1) / HEAD_DIM + eps)[:, None]
            normed = (
                ((normed * scale).to(x.dtype).to(tl.float32) * norm_weight)
                .to(x.dtype)
                .to(tl.float32)
            )
            normed_partner = (normed_partner * scale).to(x.dtype).to(
                tl.float32
            ) * partner_norm_weight
            normed_partner = normed_partner.to(x.dtype).to(tl.float32)
        rotated = (
            normed * cos_values
            + tl.where(dims < ROTARY_DIM // 2, -normed_partner, normed_partner) * sin_values
        )
        rotated = rotated.to(x.dtype)
        tl.store(
            out + (token * (Q_HEADS + KV_HEADS) + heads) * HEAD_DIM + dims, rotated, mask=dim_mask
        )
        if head >= Q_HEADS:
            tl.store(
                keys + kv_offset + (heads - Q_HEADS) * head_stride + dims, rotated, mask=dim_mask
            )


rope_heads = triton.jit(_rope_heads, do_not_specialize_on_alignment=["positions", "slot_mapping"])


MAX_ROWS_BEFORE_SKINNY = 2
"""`max_small_rows` where there are skinny GEMMs: from 3 rows on those are faster, on an H200."""


class TritonOps:
    """Operations as Triton kernels. Tensors are contiguous, the KV cache excepted.

    pdl           launch every kernel while the one before it still runs (sm_90 or later). Faster
                  inside a CUDA graph; an eager launch takes the host longer with it
    skinny_gemm   kernels of `linear` and `gate_up` for few rows; None: the library's for all
    """

    def __init__(
        self,
        *,
        pdl: bool,
        tiles: SmallGemmTiles = H200_TILES,
        skinny_gemm: SkinnyGemm | None = None,
    ) -> None:
        self._pdl = pdl
        self._tiles = tiles
        self._skinny_gemm = skinny_gemm
        self.max_small_rows = MAX_SMALL_ROWS if skinny_gemm is None else MAX_ROWS_BEFORE_SKINNY
        self._launch_options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return TorchOps.rms_norm of x [T, H]."""
        return self._launch_rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum: TorchOps.add_rms_norm."""
        return self._launch_rms_norm(x, residual, weight, eps)

    def _launch_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        assert x.is_contiguous(), f"x has strides {x.stride()}"
        out = torch.empty_like(x)
        rows, width = x.shape
        if rows:
            block = triton.next_power_of_2(width)
            arguments = (x, residual, weight, out, eps, width, block, self._pdl)
            warps = min(8, max(1, block // 512))
            norm_rows[(rows,)](*arguments, num_warps=warps, **self._launch_options)
        return out

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return TorchOps.linear of x [T, K]."""
        if self._skinny_gemm is not None and self._skinny_gemm.takes(x, w, bias):
            return self._skinny_gemm.linear(x, w, bias)
        return linear(x, w, bias)

    def gate_up(self, x: Tensor, w: Tensor) -> Tensor:
        """Return TorchOps.gate_up of x [T, K]."""
        if self._skinny_gemm is not None and self._skinny_gemm.takes(x, w):
            return self._skinny_gemm.gate_up(x, w)
        gate_up = linear(x, w)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        if rows:
            silu_rows[(rows, -(-width // 1024))](
                gate_up, out, width, 1024, self._pdl, num_warps=4, **self._launch_options
            )
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        keys: Tensor,
        values: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute TorchOps.rope_and_cache.

        Both norms or neither; keys and values have equal strides.
        """
        assert qkv.is_contiguous(), f"qkv has strides {qkv.stride()}"
        assert (q_norm_weight is None) == (k_norm_weight is None), (
            "q and k: one has a norm, one has none"
        )
        assert keys.stride() == values.stride(), (
            f"keys have strides {keys.stride()}, values {values.stride()}"
        )
        tokens, heads = qkv.shape[0], num_heads + 2 * num_kv_heads
        head_dim = qkv.shape[1] // heads
        out = qkv.new_empty(tokens, num_heads + num_kv_heads, head_dim)
        queries_and_keys = out[:, :num_heads], out[:, num_heads:]
        if not tokens:
            return queries_and_keys
        heads_per_program = 1
        # Few tokens: a program per head, for latency. Many: more heads per program.
        while (
            tokens > 64
            and heads_per_program < 8
            and (num_heads | num_kv_heads) % (2 * heads_per_program) == 0
        ):
            heads_per_program *= 2
        strides_and_shape = (*keys.stride()[:3], num_heads, num_kv_heads, head_dim)
        constants = (
            cos.shape[1],
            keys.shape[1],
            heads_per_program,
            triton.next_power_of_2(head_dim),
            self._pdl,
        )
        rope_heads[(tokens, heads // heads_per_program)](
            *(
                qkv,
                cos,
                sin,
                positions,
                slot_mapping,
                keys,
                values,
                q_norm_weight,
                k_norm_weight,
                out,
                eps,
            ),
            *strides_and_shape,
            *constants,
            num_warps=max(1, heads_per_program // 2),
            **self._launch_options,
        )
        return queries_and_keys

    def linear_small(
        self,
        x: Tensor,
        w: Tensor,
        *,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute TorchOps.linear_small for 1 to `max_small_rows` rows."""
        (m, k), n = x.shape, w.shape[0]
        check_operands(x, w)
        if out is None:
            out = x.new_empty(m, n)
        tile = self._tiles.select_tile(m, k, n)
        arguments = (x, w, bias, norm_weight, residual, out, eps)
        constants = (
            n,
            m,
            k,
            tile.num_outputs,
            256 * tile.num_warps,
            tile.prefetch_depth,
            self._pdl,
        )
        grid = (-(-n // tile.num_outputs),)
        row_linear[grid](*arguments, *constants, num_warps=tile.num_warps, **self._launch_options)
        return out

    def gate_up_small(self, x: Tensor, w: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Compute TorchOps.gate_up_small for 1 to `max_small_rows` rows."""
        (m, k), n = x.shape, w.shape[0] // 2
        check_operands(x, w)
        out = x.new_empty(m, n)
        tile = self._tiles.select_tile(m, k, 2 * n)
        constants = (
            n,
            m,
            k,
            tile.num_outputs,
            256 * tile.num_warps,
            tile.prefetch_depth,
            self._pdl,
        )
        grid = (-(-2 * n // tile.num_outputs),)
        row_gate_up[grid](
            x,
            w,
            norm_weight,
            out,
            eps,
            *constants,
            num_warps=tile.num_warps,
            **self._launch_options,
        )
        return out
