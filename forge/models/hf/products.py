"""Products of a few rows with a weight: each weight is read from memory once, and nothing waits.

Owns the kernels that stream weights, their tiles, and the early launch of a kernel. Knows no model
and no order of operations: kernels.py calls these.

A decode step is a chain of kernels that each read some megabytes of weights once. Where a kernel
ends, the memory idles until the next one has started. So each kernel is launched early
(programmatic dependent launch), asks for its weights, and only then waits for what it depends on:

    kernel A   [ weights | wait | x | multiply | store ]
    kernel B          [ weights | wait ........ | x | multiply | store ]
    memory     ======================================================    no gap

A program has `outputs` rows of w and all of x, M = 1 to 4 rows. It asks for `depth` pieces of its
rows of w ahead, multiplies each piece by that of every row of x, and adds:

    w     outputs rows   |piece 0|piece 1|piece 2| ...     from memory, once
                             x       x       x
    x           M rows   |piece 0|piece 1|piece 2| ...     from the caches, by every program
                             +       +       +
    sums   M x outputs   one program's, in registers, in a fixed order

A piece is 256 columns per warp: 8 of two bytes per thread, one load of 16 bytes. The norm before a
product is part of it: (x * norm) @ w.T, times 1 / rms(x) at the end, all of it in fp32. The order
in which an output is summed depends on M and the tile, and on no other row.

Invariant: every kernel waits before it reads what another kernel wrote and before it writes. The
wait is for the whole kernel before, which itself waited for the one before that: so it is for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SMALL_ROWS = 4
"""A thread's sums and the unrolled code grow with the rows: more of them are for tensor cores."""


class RowTile(NamedTuple):
    """How a product of few rows is cut. Pieces are 256 * warps columns wide.

    outputs   rows of w in one program, a power of two, at least 2
    depth     pieces of each row of w asked for before the first is used
    """

    outputs: int
    warps: int
    depth: int


class Tiles(NamedTuple):
    """Tiles measured on one card, by (M, K, N) of x [M, K] and w [N, K], and a rule without one."""

    measured: Mapping[tuple[int, int, int], RowTile]

    def row(self, m: int, k: int, n: int) -> RowTile:
        """For m rows of x, 1 to 4. Three are cut like four."""
        if m == 3:
            return self.row(4, k, n)
        if (m, k, n) in self.measured:
            return self.measured[m, k, n]
        return _ruled(k, n) if m == 1 else _ruled_for_more(self.row(1, k, n), m, k, n)


def _pieces_of(k: int, warps: int) -> int:
    return -(-k // (256 * warps))


def _cut(k: int, outputs: int, warps: int) -> RowTile:
    """Half of each row in flight: 2 to 6 pieces, in at most 64 registers of a thread."""
    return RowTile(outputs, warps, min(max(2, -(-_pieces_of(k, warps) // 2)), 6, 16 // outputs))


def _ruled(k: int, n: int) -> RowTile:
    """For one row of a shape that nobody measured.

    Many outputs: many programs of one warp. Few: four warps share the columns, unless more than a
    tenth of their lanes had none. Long rows: few outputs, or the unrolled code would be very long.
    """
    if k > 8192:
        outputs, warps = 2, 2
    elif n >= 4096:
        outputs, warps = 4, 1
    else:
        outputs, warps = 4 if n >= 2048 else 2, 4
    while warps > 1 and _pieces_of(k, warps) * 256 * warps > 1.1 * k:
        warps //= 2
    return _cut(k, outputs, warps)


def _ruled_for_more(one: RowTile, m: int, k: int, n: int) -> RowTile:
    """For 2 to 4 rows, from the tile for one.

    Four outputs, where they are many, share what is read and normed of x. More warps where one
    would run through very long code: it has a product for every row, output and piece.
    """
    outputs, warps = 4 if n >= 2048 else one.outputs, one.warps
    while warps < 8 and m * outputs * _pieces_of(k, warps) > 160:
        warps *= 2
    return _cut(k, outputs, warps)


H200 = Tiles(
    {
        (1, 1024, 4096): RowTile(4, 1, 2),
        (1, 1024, 6144): RowTile(4, 1, 2),
        (1, 1024, 151936): RowTile(4, 1, 2),
        (1, 2048, 1024): RowTile(2, 2, 2),
        (1, 2560, 6144): RowTile(4, 1, 4),
        (1, 2560, 19456): RowTile(2, 1, 5),
        (1, 2560, 151936): RowTile(4, 1, 4),
        (1, 3072, 1024): RowTile(2, 4, 2),
        (1, 4096, 2560): RowTile(4, 4, 2),
        (1, 4096, 4096): RowTile(2, 1, 6),
        (1, 4096, 6144): RowTile(2, 1, 6),
        (1, 4096, 28672): RowTile(2, 4, 4),
        (1, 4096, 128256): RowTile(4, 4, 4),
        (1, 9728, 2560): RowTile(2, 2, 6),
        (1, 14336, 4096): RowTile(4, 2, 7),
        (2, 1024, 4096): RowTile(8, 4, 1),
        (2, 1024, 6144): RowTile(4, 1, 2),
        (2, 1024, 151936): RowTile(4, 1, 2),
        (2, 2048, 1024): RowTile(2, 1, 8),
        (2, 2560, 6144): RowTile(4, 1, 3),
        (2, 2560, 19456): RowTile(8, 1, 2),
        (2, 2560, 151936): RowTile(4, 1, 4),
        (2, 3072, 1024): RowTile(4, 4, 3),
        (2, 4096, 2560): RowTile(4, 4, 2),
        (2, 9728, 2560): RowTile(4, 2, 4),
        (4, 1024, 4096): RowTile(4, 1, 4),
        (4, 1024, 6144): RowTile(4, 1, 2),
        (4, 1024, 151936): RowTile(4, 1, 2),
        (4, 2048, 1024): RowTile(2, 4, 2),
        (4, 2560, 6144): RowTile(4, 1, 3),
        (4, 2560, 19456): RowTile(4, 1, 4),
        (4, 2560, 151936): RowTile(8, 1, 2),
        (4, 3072, 1024): RowTile(2, 2, 6),
        (4, 4096, 2560): RowTile(4, 2, 3),
        (4, 9728, 2560): RowTile(4, 4, 4),
    }
)
"""What `python -m bench.kernels` printed on an H200. Without an entry, the rule decides."""


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
def _pieces(
    x: tl.tensor, first: tl.constexpr, M: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tuple:
    # M pieces, one of each row of x.
    each = ()
    for t in tl.static_range(M):
        each += (piece(x + t * K, first, K, WIDTH),)
    return each


pieces = triton.jit(_pieces)


def _folded(products: tl.tensor, M: tl.constexpr) -> tl.tensor:
    # [R, WIDTH / 8] of [R, WIDTH]: the sum of what one thread holds, which moves nothing. One row
    # stays as it is: it has the registers for eight sums apiece, and so adds for free.
    if M == 1:
        return products
    else:  # in its own branch: the compiler takes one type of result
        return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 8, 8]), 2)


folded = triton.jit(_folded)


@no_type_check  # its tuples grow as the compiler unrolls
def _row_sums(
    x: tl.tensor,
    starts: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    residual: tl.tensor,
    eps: tl.tensor,
    n: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> tl.tuple:
    # M times [R] fp32: norm(x) times the rows of w at starts [R, 1], and what bias and residual
    # [R] point at, the latter n apart. Waits. Loads stand before the arithmetic, so that their
    # delays overlap.
    PIECES: tl.constexpr = (K + WIDTH - 1) // WIDTH
    AHEAD: tl.constexpr = DEPTH if DEPTH < PIECES else PIECES
    # As many pieces of x on their way for several rows as for one: it comes from near.
    NEAR: tl.constexpr = (AHEAD + M - 1) // M
    WIDE: tl.constexpr = WIDTH if M == 1 else WIDTH // 8
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
    for i in tl.static_range(NEAR):
        inputs += (pieces(x, i * WIDTH, M, K, WIDTH),)
    before = ()
    totals = ()
    squares = ()
    for t in tl.static_range(M):
        if residual is not None:
            before += (tl.load(residual + t * n).to(tl.float32),)
        totals += (tl.zeros([starts.shape[0], WIDE], tl.float32),)
        squares += (tl.zeros([1, WIDE], tl.float32),)
    for i in tl.static_range(PIECES):
        if i + AHEAD < PIECES:
            weights += (weight_piece(starts, (i + AHEAD) * WIDTH, K, WIDTH),)
        if i + NEAR < PIECES:
            inputs += (pieces(x, (i + NEAR) * WIDTH, M, K, WIDTH),)
        if norm is not None:
            if i + AHEAD < PIECES:
                scales += (piece(norm, (i + AHEAD) * WIDTH, K, WIDTH),)
        grown = ()
        grown_squares = ()
        for t in tl.static_range(M):
            column = inputs[i][t].to(tl.float32)
            if norm is not None:
                grown_squares += (squares[t] + folded(column * column, M),)
                column *= scales[i].to(tl.float32)
            grown += (totals[t] + folded(weights[i].to(tl.float32) * column, M),)
        totals = grown
        squares = grown_squares
    results = ()
    for t in tl.static_range(M):
        sums = tl.sum(totals[t], 1)
        if norm is not None:
            sums *= tl.rsqrt(tl.sum(tl.sum(squares[t], 1), 0) / K + eps)
        if bias is not None:
            sums += constant
        if residual is not None:
            sums += before[t]
        results += (sums,)
    return results


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
    M: tl.constexpr,
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
    sums = row_sums(x, starts, bias, norm, residual, eps, n, M, K, WIDTH, DEPTH, PDL)
    for t in tl.static_range(M):
        tl.store(out + t * n + rows, sums[t].to(out.dtype.element_ty), mask=rows < n)


row_linear = triton.jit(_row_linear, do_not_specialize=["n"])


def _row_gate_up(
    x: tl.tensor,
    w: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    n: tl.tensor,
    M: tl.constexpr,
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
    sums = row_sums(x, starts, None, norm, None, eps, n, M, K, WIDTH, DEPTH, PDL)
    places = tl.program_id(0) * HALF + tl.arange(0, HALF)
    for t in tl.static_range(M):
        gate, up = tl.split(tl.reshape(sums[t], [HALF, 2]))
        y = gate * tl.sigmoid(gate) * up
        tl.store(out + t * n + places, y.to(out.dtype.element_ty), mask=places < n)


row_gate_up = triton.jit(_row_gate_up, do_not_specialize=["n"])


def check(x: Tensor, w: Tensor) -> None:
    """Pass if a product of x [M, K] and w [N, K] is one for these kernels."""
    rows = x.shape[0]
    assert 1 <= rows <= SMALL_ROWS, f"{rows} rows, and this product is for 1 to {SMALL_ROWS}"
    assert x.is_contiguous() and w.is_contiguous(), f"x {x.stride()}, w {w.stride()} apart"
