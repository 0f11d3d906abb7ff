"""GEMM kernels for 1 to 4 rows, which stream each weight from memory once.

Owns the kernels, their tiles, and the early launch of a kernel. Knows no model and no order of
operations: triton_ops.py launches these.

A decode step is a chain of kernels that each read some megabytes of weights. Where one ends, memory
idles until the next has started. So each kernel is launched early (programmatic dependent launch),
requests its weights, and only then waits for the kernels that it depends on:

    kernel A   [ weights | wait | x | multiply | store ]
    kernel B          [ weights | wait ........ | x | multiply | store ]
    memory     ======================================================    no gap

A program has `num_outputs` rows of w and all of x, M = 1 to 4 rows. It requests `prefetch_depth`
chunks of its rows of w ahead, multiplies each chunk by that of every row of x, and adds:

    w     outputs rows   |chunk 0|chunk 1|chunk 2| ...     from memory, once
                             x       x       x
    x           M rows   |chunk 0|chunk 1|chunk 2| ...     from the caches, by every program
                             +       +       +
    sums   M x outputs   in registers of one program, in a fixed order

A chunk is 256 columns per warp: 8 of two bytes per thread, one load of 16 bytes. The norm before a
GEMM is part of it: (x * norm) @ w.T, times 1 / rms(x) at the end, all of it in fp32.

Always true: every kernel waits before it reads what another kernel wrote, and before it writes. The
wait is for the whole kernel before, which has waited for its own predecessor: so for all. The order
in which an output is summed depends on M and the tile only.
Measurements: wiki/Fusion.md, "Launched early".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_SMALL_ROWS = 4
"""Most rows of x. A thread's sums and the unrolled code grow with them; tensor cores take more."""


class SmallGemmTile(NamedTuple):
    """Tile of a GEMM of few rows. A chunk is 256 * num_warps columns.

    num_outputs      rows of w in one program; a power of two, at least 2
    prefetch_depth   chunks of each row of w that are requested before the first is used
    """

    num_outputs: int
    num_warps: int
    prefetch_depth: int


class SmallGemmTiles(NamedTuple):
    """Tiles measured on one card, by (M, K, N) of x [M, K] and w [N, K]; a rule for others."""

    measured: Mapping[tuple[int, int, int], SmallGemmTile]

    def select_tile(self, m: int, k: int, n: int) -> SmallGemmTile:
        """Return the tile for m rows of x, 1 to 4. Three rows use the tile of four."""
        if m == 3:
            return self.select_tile(4, k, n)
        if (m, k, n) in self.measured:
            return self.measured[m, k, n]
        return (
            _default_tile(k, n)
            if m == 1
            else _default_multi_row_tile(self.select_tile(1, k, n), m, k, n)
        )


def _num_chunks(k: int, warps: int) -> int:
    """Return the chunks of a row of k columns."""
    return -(-k // (256 * warps))


def _build_tile(k: int, outputs: int, warps: int) -> SmallGemmTile:
    """Return a tile with half of each row in flight: 2 to 6 chunks, 64 registers a thread."""
    return SmallGemmTile(
        outputs, warps, min(max(2, -(-_num_chunks(k, warps) // 2)), 6, 16 // outputs)
    )


def _default_tile(k: int, n: int) -> SmallGemmTile:
    """Return the tile for one row of a shape that was not measured.

    Many outputs of short rows: many programs of one warp. Few outputs: four warps share the
    columns, unless more than a tenth of their lanes would be idle. Long rows: few outputs, since
    the unrolled code grows with k, and half a row or more in flight.
    """
    if k > 8192:
        outputs, warps = 2, 2
    elif n >= 4096 and k >= 4096:
        return _long_row_tile(k, n)
    elif n >= 4096:
        outputs, warps = 4, 1
    else:
        outputs, warps = 4 if n >= 2048 else 2, 4
    return _build_tile(k, outputs, _fitting_warps(k, warps))


def _long_row_tile(k: int, n: int) -> SmallGemmTile:
    """Return the tile for many outputs of 4096 to 8192 columns.

    With 4 outputs a program of one warp these were read at 3.4 TB/s of an H200, with these tiles at
    3.9 to 4.4: bench/results/h200-kernels.json, of 4096 columns.
    """
    if n < 8192:
        return _build_tile(k, 2, 1 if k == 4096 else 2)
    warps = _fitting_warps(k, 4)
    return SmallGemmTile(2, warps, min(6, _num_chunks(k, warps)))


def _fitting_warps(k: int, warps: int) -> int:
    """Return as many warps, or so many fewer that at most a tenth of their lanes is idle."""
    while warps > 1 and _num_chunks(k, warps) * 256 * warps > 1.1 * k:
        warps //= 2
    return warps


def _default_multi_row_tile(
    single_row_tile: SmallGemmTile, m: int, k: int, n: int
) -> SmallGemmTile:
    """Return the tile for 2 to 4 rows, from that for one.

    Four outputs, where there are many, share the loads and the norm of x. More warps shorten the
    unrolled code, which has a product for every row, output and chunk.
    """
    outputs, warps = 4 if n >= 2048 else single_row_tile.num_outputs, single_row_tile.num_warps
    while warps < 8 and m * outputs * _num_chunks(k, warps) > 160:
        warps *= 2
    return _build_tile(k, outputs, warps)


H200_TILES = SmallGemmTiles(
    {
        (1, 1024, 4096): SmallGemmTile(4, 1, 2),
        (1, 1024, 6144): SmallGemmTile(4, 1, 2),
        (1, 1024, 151936): SmallGemmTile(4, 1, 2),
        (1, 2048, 1024): SmallGemmTile(2, 2, 2),
        (1, 2560, 6144): SmallGemmTile(4, 1, 4),
        (1, 2560, 19456): SmallGemmTile(2, 1, 5),
        (1, 2560, 151936): SmallGemmTile(4, 1, 4),
        (1, 3072, 1024): SmallGemmTile(2, 4, 2),
        (1, 4096, 2560): SmallGemmTile(4, 4, 2),
        (1, 4096, 4096): SmallGemmTile(2, 1, 6),
        (1, 4096, 6144): SmallGemmTile(2, 1, 6),
        (1, 4096, 28672): SmallGemmTile(2, 4, 4),
        (1, 4096, 128256): SmallGemmTile(4, 4, 4),
        (1, 9728, 2560): SmallGemmTile(2, 2, 6),
        (1, 14336, 4096): SmallGemmTile(4, 2, 7),
        (2, 1024, 4096): SmallGemmTile(8, 4, 1),
        (2, 1024, 6144): SmallGemmTile(4, 1, 2),
        (2, 1024, 151936): SmallGemmTile(4, 1, 2),
        (2, 2048, 1024): SmallGemmTile(2, 1, 8),
        (2, 2560, 6144): SmallGemmTile(4, 1, 3),
        (2, 2560, 19456): SmallGemmTile(8, 1, 2),
        (2, 2560, 151936): SmallGemmTile(4, 1, 4),
        (2, 3072, 1024): SmallGemmTile(4, 4, 3),
        (2, 4096, 2560): SmallGemmTile(4, 4, 2),
        (2, 9728, 2560): SmallGemmTile(4, 2, 4),
        (4, 1024, 4096): SmallGemmTile(4, 1, 4),
        (4, 1024, 6144): SmallGemmTile(4, 1, 2),
        (4, 1024, 151936): SmallGemmTile(4, 1, 2),
        (4, 2048, 1024): SmallGemmTile(2, 4, 2),
        (4, 2560, 6144): SmallGemmTile(4, 1, 3),
        (4, 2560, 19456): SmallGemmTile(4, 1, 4),
        (4, 2560, 151936): SmallGemmTile(8, 1, 2),
        (4, 3072, 1024): SmallGemmTile(2, 2, 6),
        (4, 4096, 2560): SmallGemmTile(4, 2, 3),
        (4, 9728, 2560): SmallGemmTile(4, 4, 4),
    }
)
"""Tiles that `python -m forge.bench.kernels` printed on an H200; other shapes follow the rule."""


def _wait_for_previous_kernel(PDL: tl.constexpr) -> None:
    # After this, reads and writes of memory that other kernels share are allowed.
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


wait_for_previous_kernel = triton.jit(_wait_for_previous_kernel)


def _load_chunk(
    start: tl.tensor, first: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    # Return columns [first, first + WIDTH) of `start` [.., 1]; zero from column K on.
    columns = first + tl.arange(0, WIDTH)[None, :]
    if first + WIDTH <= K:
        return tl.load(start + columns)
    return tl.load(start + columns, mask=columns < K, other=0.0)


load_chunk = triton.jit(_load_chunk)


def _load_weight_chunk(
    start: tl.tensor, first: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    # `load_chunk` of a weight. It is read once a step, so caches evict it first.
    columns = first + tl.arange(0, WIDTH)[None, :]
    if first + WIDTH <= K:
        return tl.load(start + columns, eviction_policy="evict_first")
    return tl.load(start + columns, mask=columns < K, other=0.0, eviction_policy="evict_first")


load_weight_chunk = triton.jit(_load_weight_chunk)


@no_type_check  # Its tuples grow as the compiler unrolls.
def _load_chunks(
    x: tl.tensor, first: tl.constexpr, M: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tuple:
    # Return M chunks, one of each row of x.
    chunks = ()
    for t in tl.static_range(M):
        chunks += (load_chunk(x + t * K, first, K, WIDTH),)
    return chunks


load_chunks = triton.jit(_load_chunks)


def _reduce_in_thread(products: tl.tensor, M: tl.constexpr) -> tl.tensor:
    # Return [R, WIDTH / 8] from [R, WIDTH]: each thread adds the 8 products that it holds, without
    # a shuffle. With M = 1 the products stay: there are registers for 8 sums a thread.
    if M == 1:
        return products
    else:  # A branch of its own: the compiler allows one type of result in each.
        return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 8, 8]), 2)


reduce_in_thread = triton.jit(_reduce_in_thread)


@no_type_check  # Its tuples grow as the compiler unrolls.
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
    # Return M tensors [R] fp32: norm(x) times the rows of w at starts [R, 1], plus bias [R] and
    # residual [R], whose rows have n elements. Waits for the kernel before. Loads come before
    # the arithmetic, so that their latencies overlap.
    NUM_CHUNKS: tl.constexpr = (K + WIDTH - 1) // WIDTH
    WEIGHT_PREFETCH: tl.constexpr = DEPTH if DEPTH < NUM_CHUNKS else NUM_CHUNKS
    # As many chunks of x in flight for M rows as for one: x comes from the caches.
    INPUT_PREFETCH: tl.constexpr = (WEIGHT_PREFETCH + M - 1) // M
    SUM_WIDTH: tl.constexpr = WIDTH if M == 1 else WIDTH // 8
    weights = ()
    scales = ()
    for i in tl.static_range(WEIGHT_PREFETCH):
        weights += (load_weight_chunk(starts, i * WIDTH, K, WIDTH),)
        if norm is not None:
            scales += (load_chunk(norm, i * WIDTH, K, WIDTH),)
    if bias is not None:
        constant = tl.load(bias).to(tl.float32)
    wait_for_previous_kernel(PDL)
    inputs = ()
    for i in tl.static_range(INPUT_PREFETCH):
        inputs += (load_chunks(x, i * WIDTH, M, K, WIDTH),)
    residuals = ()
    totals = ()
    squares = ()
    for t in tl.static_range(M):
        if residual is not None:
            residuals += (tl.load(residual + t * n).to(tl.float32),)
        totals += (tl.zeros([starts.shape[0], SUM_WIDTH], tl.float32),)
        squares += (tl.zeros([1, SUM_WIDTH], tl.float32),)
    for i in tl.static_range(NUM_CHUNKS):
        if i + WEIGHT_PREFETCH < NUM_CHUNKS:
            weights += (load_weight_chunk(starts, (i + WEIGHT_PREFETCH) * WIDTH, K, WIDTH),)
        if i + INPUT_PREFETCH < NUM_CHUNKS:
            inputs += (load_chunks(x, (i + INPUT_PREFETCH) * WIDTH, M, K, WIDTH),)
        if norm is not None:
            if i + WEIGHT_PREFETCH < NUM_CHUNKS:
                scales += (load_chunk(norm, (i + WEIGHT_PREFETCH) * WIDTH, K, WIDTH),)
        next_totals = ()
        next_squares = ()
        for t in tl.static_range(M):
            column = inputs[i][t].to(tl.float32)
            if norm is not None:
                next_squares += (squares[t] + reduce_in_thread(column * column, M),)
                column *= scales[i].to(tl.float32)
            next_totals += (totals[t] + reduce_in_thread(weights[i].to(tl.float32) * column, M),)
        totals = next_totals
        squares = next_squares
    results = ()
    for t in tl.static_range(M):
        sums = tl.sum(totals[t], 1)
        if norm is not None:
            sums *= tl.rsqrt(tl.sum(tl.sum(squares[t], 1), 0) / K + eps)
        if bias is not None:
            sums += constant
        if residual is not None:
            sums += residuals[t]
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
    # Rows beyond the last read the last one: a load without a mask is one instruction.
    clamped_rows = tl.minimum(rows, n - 1)
    starts = w + clamped_rows.to(tl.int64)[:, None] * K
    if bias is not None:
        bias += clamped_rows
    if residual is not None:
        residual += clamped_rows
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
    # Rows of gate and up alternate, so that each pair ends up adjacent.
    HALF: tl.constexpr = OUTPUTS // 2
    pair_range = tl.arange(0, OUTPUTS)
    rows = tl.minimum(tl.program_id(0) * HALF + pair_range // 2, n - 1) + (pair_range % 2) * n
    starts = w + rows.to(tl.int64)[:, None] * K
    sums = row_sums(x, starts, None, norm, None, eps, n, M, K, WIDTH, DEPTH, PDL)
    out_columns = tl.program_id(0) * HALF + tl.arange(0, HALF)
    for t in tl.static_range(M):
        gate, up = tl.split(tl.reshape(sums[t], [HALF, 2]))
        y = gate * tl.sigmoid(gate) * up
        tl.store(out + t * n + out_columns, y.to(out.dtype.element_ty), mask=out_columns < n)


row_gate_up = triton.jit(_row_gate_up, do_not_specialize=["n"])


def check_operands(x: Tensor, w: Tensor) -> None:
    """Assert that x [M, K] and w [N, K] are operands that these kernels take."""
    rows = x.shape[0]
    assert 1 <= rows <= MAX_SMALL_ROWS, (
        f"{rows} rows, and this product is for 1 to {MAX_SMALL_ROWS}"
    )
    assert x.is_contiguous() and w.is_contiguous(), f"x has strides {x.stride()}, w {w.stride()}"
