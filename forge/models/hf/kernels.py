"""TritonOps: the arithmetic between two attention calls, fused, for an NVIDIA GPU.

Owns the kernels and their tile sizes. Meaning and shapes of every operation are arithmetic.py's;
only rounding differs: fp32 inside, and one rounding where two operations are one kernel.

A decode step is a chain of kernels that each read some megabytes of weights once. Where a kernel
ends, the memory idles until the next one has started. So each kernel is launched early
(programmatic dependent launch), asks for its weights, and only then waits for what it depends on:

    kernel A   [ weights | wait | x | multiply | store ]
    kernel B          [ weights | wait ........ | x | multiply | store ]
    memory     ======================================================    no gap

Invariant: every kernel waits before it reads what another kernel wrote and before it writes. The
wait is for the whole kernel before, which itself waited for the one before that: so it is for all.

Products with one row multiply and add: each program holds `depth` pieces of its rows in registers.
    w rows   |piece 0|piece 1|piece 2| ...      a piece is 256 columns per warp, 16 bytes per load
Products with 2 to 16 rows go to the tensor cores, padded to 16. Each output is summed by one
program in a fixed order, so a row's result does not depend on how many rows stand beside it.
The norm before a product is part of it: (x * norm) @ w.T, times 1 / rms(x) at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SMALL_ROWS = 16
_TOKENS = tl.constexpr(SMALL_ROWS)
"""Rows of a tensor core's smallest tile."""


class RowTile(NamedTuple):
    """How a product with one row is cut. Pieces are 256 * warps columns wide.

    outputs   rows of w in one program
    depth     pieces of each row asked for before the first is used
    """

    outputs: int
    warps: int
    depth: int


class BlockTile(NamedTuple):
    """How a product with 2 to 16 rows is cut: `stages` tiles of [outputs, columns] in flight."""

    outputs: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles measured on one card, by (K, N) of w [N, K], and a rule for all other shapes."""

    rows: Mapping[tuple[int, int], RowTile]
    blocks: Mapping[tuple[int, int], BlockTile]

    def row(self, k: int, n: int) -> RowTile:
        """For one row. By the rule: enough programs, and all of a row in flight if it fits."""
        if (k, n) in self.rows:
            return self.rows[k, n]
        outputs = 4 if n >= 4096 else 2
        warps = 2 if k % 1024 or k <= 1024 else 4
        # A thread holds 4 registers of every output and piece; beyond 96 few programs fit.
        depth = min(-(-k // (256 * warps)), 96 // (4 * outputs))
        return RowTile(outputs, warps, depth)

    def block(self, k: int, n: int) -> BlockTile:
        """For 2 to 16 rows. By the rule: small where few outputs must fill the device."""
        if (k, n) in self.blocks:
            return self.blocks[k, n]
        if n >= 65536:
            return BlockTile(64, 128, 4, 4)
        return BlockTile(32 if n >= 16384 else 16, 256, 4, 5)


H200 = Tiles(rows={}, blocks={})
"""What `python -m bench.kernels` printed for the shapes of Qwen3-4B and Qwen3-0.6B on an H200."""


def _begin(PDL: tl.constexpr) -> None:
    # Reads and writes of what other kernels share are allowed from here on.
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


begin = triton.jit(_begin)


def _piece(
    start: tl.tensor, first: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    # [.., WIDTH] of `start`, whose last axis is one column; zero beyond column K.
    at = first + tl.arange(0, WIDTH)[None, :]
    if first + WIDTH <= K:
        return tl.load(start + at)
    return tl.load(start + at, mask=at < K, other=0.0)


piece = triton.jit(_piece)


def _weight_piece(
    start: tl.tensor, first: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    # As `piece`, of a weight: read once a step, so it makes room in the caches first.
    at = first + tl.arange(0, WIDTH)[None, :]
    if first + WIDTH <= K:
        return tl.load(start + at, eviction_policy="evict_first")
    return tl.load(start + at, mask=at < K, other=0.0, eviction_policy="evict_first")


weight_piece = triton.jit(_weight_piece)


@no_type_check  # its tuples grow as the compiler unrolls
def _row_sums(
    x: tl.tensor,
    starts: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> tl.tensor:
    # [R] fp32: norm(x) times the rows of w at starts [R, 1], and what bias and residual [R] point
    # at. Waits. All loads stand before the arithmetic, so that their delays overlap.
    PIECES: tl.constexpr = (K + WIDTH - 1) // WIDTH
    AHEAD: tl.constexpr = DEPTH if DEPTH < PIECES else PIECES
    weights = ()
    scales = ()
    for i in tl.static_range(AHEAD):
        weights += (weight_piece(starts, i * WIDTH, K, WIDTH),)
        if norm is not None:
            scales += (piece(norm, i * WIDTH, K, WIDTH),)
    if bias is not None:
        constant = tl.load(bias).to(tl.float32)
    begin(PDL)
    inputs = ()
    for i in tl.static_range(AHEAD):
        inputs += (piece(x, i * WIDTH, K, WIDTH),)
    if residual is not None:
        before = tl.load(residual).to(tl.float32)
    total = tl.zeros([starts.shape[0], WIDTH], tl.float32)
    squares = tl.zeros([1, WIDTH], tl.float32)
    for i in tl.static_range(PIECES):
        if i + AHEAD < PIECES:
            weights += (weight_piece(starts, (i + AHEAD) * WIDTH, K, WIDTH),)
            inputs += (piece(x, (i + AHEAD) * WIDTH, K, WIDTH),)
            if norm is not None:
                scales += (piece(norm, (i + AHEAD) * WIDTH, K, WIDTH),)
        column = inputs[i].to(tl.float32)
        if norm is not None:
            squares += column * column
            column *= scales[i].to(tl.float32)
        total += weights[i].to(tl.float32) * column
    sums = tl.sum(total, 1)
    if norm is not None:
        sums *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    if bias is not None:
        sums += constant
    if residual is not None:
        sums += before
    return sums


row_sums = triton.jit(_row_sums)


def _row_linear(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows beyond the last read the last: a load without a mask is one instruction.
    held = tl.minimum(rows, n - 1)
    starts = w + held.to(tl.int64)[:, None] * K
    if bias is not None:
        bias += held
    if residual is not None:
        residual += held
    sums = row_sums(x, starts, bias, norm, residual, eps, K, WIDTH, DEPTH, PDL)
    tl.store(out + rows, sums.to(out.dtype.element_ty), mask=rows < n)


row_linear = triton.jit(_row_linear, do_not_specialize=["n"])


def _row_gate_up(
    x: tl.tensor,
    w: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # Rows of gate and of up in turn, so that each pair ends up side by side.
    HALF: tl.constexpr = OUTPUTS // 2
    both = tl.arange(0, OUTPUTS)
    rows = tl.minimum(tl.program_id(0) * HALF + both // 2, n - 1) + (both % 2) * n
    starts = w + rows.to(tl.int64)[:, None] * K
    sums = row_sums(x, starts, None, norm, None, eps, K, WIDTH, DEPTH, PDL)
    gate, up = tl.split(tl.reshape(sums, [HALF, 2]))
    places = tl.program_id(0) * HALF + tl.arange(0, HALF)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + places, y.to(out.dtype.element_ty), mask=places < n)


row_gate_up = triton.jit(_row_gate_up, do_not_specialize=["n"])


def _prefetch(
    starts: tl.tensor, K: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
) -> None:
    # The first tiles of w are on their way to the second-level cache, 64 columns a line.
    lines = tl.arange(0, COLUMNS // 64) * 64
    for i in tl.static_range(STAGES):
        if (i + 1) * COLUMNS <= K:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [starts + (i * COLUMNS + lines)[None, :]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


prefetch = triton.jit(_prefetch)


def _block_sums(
    x: tl.tensor,
    starts: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    m: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> tl.tensor:
    # [16, R] fp32: norm(x) of m rows times the rows of w at starts [R, 1]. Waits.
    if PDL:
        prefetch(starts, K, COLUMNS, STAGES)
    begin(PDL)
    tokens = tl.arange(0, _TOKENS)[:, None]
    weights = tl.trans(starts)
    total = tl.zeros([_TOKENS, starts.shape[0]], tl.float32)
    squares = tl.zeros([_TOKENS, COLUMNS // 8], tl.float32)
    for first in tl.range(0, K, COLUMNS, num_stages=STAGES):
        at = first + tl.arange(0, COLUMNS)
        if K % COLUMNS == 0:
            a = tl.load(x + tokens * K + at[None, :], mask=tokens < m, other=0.0)
            b = tl.load(weights + at[:, None], eviction_policy="evict_first")
        else:
            a = tl.load(x + tokens * K + at[None, :], mask=(tokens < m) & (at < K), other=0.0)
            b = tl.load(weights + at[:, None], mask=at[:, None] < K, other=0.0)
        if norm is not None:
            scale = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
            wide = a.to(tl.float32)
            # Eight neighbours are one thread's: a sum over them moves nothing.
            squares += tl.sum(tl.reshape(wide * wide, [_TOKENS, COLUMNS // 8, 8]), 2)
            a = (wide * scale[None, :]).to(b.dtype)
        total = tl.dot(a, b, total, input_precision="ieee")
    if norm is not None:
        total *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return total


block_sums = triton.jit(_block_sums)


def _block_linear(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    starts = w + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * K
    sums = block_sums(x, starts, norm, eps, m, K, COLUMNS, STAGES, PDL)
    tokens = tl.arange(0, _TOKENS)[:, None]
    inside = (tokens < m) & (rows < n)[None, :]
    places = tokens * n + rows[None, :]
    if bias is not None:
        sums += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        sums += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=inside)


block_linear = triton.jit(_block_linear, do_not_specialize=["m", "n"])


def _block_gate_up(
    x: tl.tensor,
    w: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = OUTPUTS // 2
    both = tl.arange(0, OUTPUTS)
    rows = tl.minimum(tl.program_id(0) * HALF + both // 2, n - 1) + (both % 2) * n
    starts = w + rows.to(tl.int64)[:, None] * K
    sums = block_sums(x, starts, norm, eps, m, K, COLUMNS, STAGES, PDL)
    gate, up = tl.split(tl.reshape(sums, [_TOKENS, HALF, 2]))
    tokens = tl.arange(0, _TOKENS)[:, None]
    places = (tl.program_id(0) * HALF + tl.arange(0, HALF))[None, :]
    y = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + tokens * n + places, y, mask=(tokens < m) & (places < n))


block_gate_up = triton.jit(_block_gate_up, do_not_specialize=["m", "n"])


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
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAGE: tl.constexpr,
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
    page = place // PAGE * page_stride + place % PAGE * (KV_HEADS * D_PAGE)
    row = tl.load(start + at, mask=inside, other=0.0)
    if head >= Q_HEADS + KV_HEADS:
        tl.store(values + page + (heads - Q_HEADS - KV_HEADS) * D_PAGE + at, row, mask=inside)
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
        if head < Q_HEADS:
            tl.store(out + (token * Q_HEADS + heads) * D + at, turned, mask=inside)
        else:
            tl.store(keys + page + (heads - Q_HEADS) * D_PAGE + at, turned, mask=inside)


rope_heads = triton.jit(_rope_heads)


def _check_small(x: Tensor, w: Tensor) -> None:
    rows = x.shape[0]
    assert 1 <= rows <= SMALL_ROWS, f"{rows} rows, and this product is for 1 to {SMALL_ROWS}"
    assert x.is_contiguous() and w.is_contiguous(), f"x {x.stride()}, w {w.stride()} apart"


def _columns(tile: BlockTile, x: Tensor) -> int:
    """Columns that take the bytes the tile was measured with, which was in two-byte numbers."""
    return tile.columns * 2 // x.itemsize


class TritonOps:
    """The operations as Triton kernels. Tensors are contiguous (pages: apart from their stride).

    pdl   launch every kernel while the one before it still runs (sm_90 or later). Worth it inside a
          CUDA graph; an eager launch takes the host longer with it
    """

    small_rows = SMALL_ROWS

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

    def _fitting(self, x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
        """What the tensor cores get. float16 is normed beforehand: x * norm may be beyond 65504."""
        if norm is None or x.dtype != torch.float16:
            return x, norm
        return self.rms_norm(x, norm, eps), None

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
    ) -> Tensor:
        """As TorchOps.rope_write. Both norms or neither; pages of keys and values alike."""
        assert qkv.is_contiguous(), f"qkv is {qkv.stride()} apart"
        assert (q_weight is None) == (k_weight is None), "q and k: one has a norm, one has none"
        assert keys.stride() == values.stride(), f"pages {keys.stride()}, {values.stride()} apart"
        tokens, heads = qkv.shape[0], num_heads + 2 * num_kv_heads
        head_dim = qkv.shape[1] // heads
        out = qkv.new_empty(tokens, num_heads, head_dim)
        if not tokens:
            return out
        together = 1
        # Few tokens: a program per head, to be done soon. Many: fewer programs, as fat as can be.
        while tokens > 64 and together < 8 and (num_heads | num_kv_heads) % (2 * together) == 0:
            together *= 2
        pages = (keys.stride(0), num_heads, num_kv_heads, head_dim, keys.shape[3])
        cut = (cos.shape[1], keys.shape[1], together, triton.next_power_of_2(head_dim), self._pdl)
        rope_heads[(tokens, heads // together)](
            *(qkv, cos, sin, positions, where, keys, values, q_weight, k_weight, out, eps),
            *pages,
            *cut,
            num_warps=max(1, together // 2),
            **self._launch,
        )
        return out

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
        """As TorchOps.linear_small, for 1 to 16 rows."""
        (m, k), n = x.shape, w.shape[0]
        _check_small(x, w)
        if out is None:
            out = x.new_empty(m, n)
        if m == 1:
            row = self._tiles.row(k, n)
            fixed = (x, w, bias, norm, residual, out, eps)
            cut = (n, k, row.outputs, 256 * row.warps, row.depth, self._pdl)
            grid = (-(-n // row.outputs),)
            row_linear[grid](*fixed, *cut, num_warps=row.warps, **self._launch)
        else:
            block = self._tiles.block(k, n)
            x, norm = self._fitting(x, norm, eps)
            fixed = (x, w, bias, norm, residual, out, eps)
            cut = (n, k, block.outputs, _columns(block, x), block.stages, self._pdl)
            grid = (-(-n // block.outputs),)
            block_linear[grid](*fixed, m, *cut, num_warps=block.warps, **self._launch)
        return out

    def gate_up_small(self, x: Tensor, w: Tensor, norm: Tensor, eps: float) -> Tensor:
        """As TorchOps.gate_up_small, for 1 to 16 rows."""
        (m, k), n = x.shape, w.shape[0] // 2
        _check_small(x, w)
        out = x.new_empty(m, n)
        if m == 1:
            row = self._tiles.row(k, 2 * n)
            cut = (n, k, row.outputs, 256 * row.warps, row.depth, self._pdl)
            grid = (-(-2 * n // row.outputs),)
            row_gate_up[grid](x, w, norm, out, eps, *cut, num_warps=row.warps, **self._launch)
        else:
            block = self._tiles.block(k, 2 * n)
            x, scale = self._fitting(x, norm, eps)
            fixed = (x, w, scale, out, eps, m)
            cut = (n, k, block.outputs, _columns(block, x), block.stages, self._pdl)
            grid = (-(-2 * n // block.outputs),)
            block_gate_up[grid](*fixed, *cut, num_warps=block.warps, **self._launch)
        return out
