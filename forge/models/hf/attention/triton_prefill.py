"""PrefillAttention: attention of rows of any length over the paged KV cache, in one Triton kernel.

Owns the kernel and its tiles. Knows no plan and no weights.

    queries    row 0 [ t t t t t t t ]   row 1 [ t t ]   row 2 [ t t t t ]     tokens of a step
    packed     a token's query heads of one key head follow each other: token * group + head
    programs   (key head, tile): `block_m` packed queries of one row, the last tile of all first
    row        found in `query_starts`; its keys by its block table

    keys       | tile 0 | tile 1 | tile 2 | diagonal |        FlashAttention's recurrence
    scores       q k0     q k1     q k2     q k3              tensor cores
    softmax         w0       w1       w2       w3             other units, at the same time as
    output       0        w0 v0    w1 v1    w2 v2     w3 v3   products of the tile before

Always true: rows, lengths and tables are read on the device. So a CUDA graph can hold the kernel:
its grid depends on the numbers of tokens and rows only. A row's outputs do not depend on the other
rows, bit for bit: keys are added in tiles of `block_n` from position 0, the same for every config
of a head size, and no sequence is split.

Packed queries read each key once per group. A tile of them has few tokens, so little of a diagonal
tile is wasted. Masks are applied in tiles that need one.
Measurements: wiki/Attention.md, "Prompts without a plan".
Dao 2023 (FlashAttention-2), Shah et al. 2024 (overlap of softmax and GEMM), Kwon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.models.hf.attention.interface import LayerSpec, RowSpan
from forge.models.hf.attention.triton_decode import apply_softcap
from forge.models.hf.buffers import Int32Array, pin
from forge.models.hf.kv_cache import KVCache

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.0e38)
"""First running maximum. It is finite, so that a row may read no key of its first tile."""

_ROW_CHUNK = tl.constexpr(128)
"""Rows among which a program searches at once."""


class PrefillConfig(NamedTuple):
    """Tiles of one program.

    block_m           packed queries; 64 for every 4 warps
    block_n           keys; the same for all configs of a head size, or outputs depend on the batch
    num_stages        tiles of keys and of values in flight
    overlap_softmax   multiply weights and values one tile late, while the softmax runs
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    overlap_softmax: bool


class PrefillConfigs(NamedTuple):
    """Configs of one head size: `small` where a step has fewer than `min_programs` large tiles."""

    small: PrefillConfig
    large: PrefillConfig
    min_programs: int

    def select_config(self, num_packed: int, num_kv_heads: int) -> PrefillConfig:
        """Return the config of a step of `num_packed` queries for each key head."""
        num_programs = -(-num_packed // self.large.block_m) * num_kv_heads
        return self.large if num_programs >= self.min_programs else self.small


H200_CONFIGS = (
    (
        64,
        PrefillConfigs(
            PrefillConfig(64, 128, 4, 2, True), PrefillConfig(128, 128, 8, 2, True), 132
        ),
    ),
    (
        128,
        PrefillConfigs(
            PrefillConfig(64, 128, 4, 2, True), PrefillConfig(128, 128, 8, 2, True), 132
        ),
    ),
    (
        256,
        PrefillConfigs(
            PrefillConfig(64, 64, 4, 2, False), PrefillConfig(128, 64, 8, 2, False), 132
        ),
    ),
)
"""(limit, configs) of an H200 for heads of up to `limit` in the cache.

Chosen from compiled code, which wiki/Attention.md has in "Prompts without a plan"; other tiles were
not measured.
An H200 has 132 multiprocessors. With 64 keys a tile ptxas serializes the overlapped products.
"""


def select_prefill_configs(head_dim: int) -> PrefillConfigs:
    """Return the configs for heads of `head_dim` in the cache."""
    return next(configs for limit, configs in H200_CONFIGS if head_dim <= limit)


class PrefillRows(NamedTuple):
    """Rows of a step, on the device.

    slots          [rows] int32
    query_starts   [rows + 1] int32, ascending; row r has tokens [query_starts[r], [r + 1])
    kv_lens        [rows] int32; positions that each row reads, its own tokens last
    A row without tokens reads and writes nothing. Neither do tokens outside of all rows.
    """

    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor


def upload_prefill_rows(spans: Sequence[RowSpan], device: torch.device) -> PrefillRows:
    """Return the rows on the device, from one copy. Their tokens must follow each other."""
    numbers: Int32Array = np.zeros((3, len(spans) + 1), np.int32)
    first_token = spans[0].first_token if spans else 0
    for index, span in enumerate(spans):
        assert span.first_token == first_token, f"{span} does not begin at token {first_token}"
        numbers[:, index] = span.slot, span.end, first_token
        first_token += span.end - span.start
    numbers[2, -1] = first_token
    host = pin(numbers) if device.type == "cuda" else torch.from_numpy(numbers)
    slots, kv_lens, query_starts = host.to(device, non_blocking=True)
    return PrefillRows(slots[:-1], query_starts, kv_lens[:-1])


def _load_tile(
    kv: tl.tensor,
    block_table: tl.tensor,
    start: tl.tensor,
    kv_len: tl.tensor,
    head_row: tl.tensor,
    is_read: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    # Return positions [start, start + BLOCK_N) of one head, [BLOCK_N, head_dim]: zeros where not
    # `is_read`. Where that is None, positions from kv_len on are anything that some block holds.
    # A block has BLOCK_ROWS rows of head_dim numbers, those of this head from head_row on. Block
    # ids are scalars where a tile has one or two: addresses are then scalars and constant offsets.
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    if BLOCK_SIZE % BLOCK_N == 0:
        block_id = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        tile = kv + (block_id * BLOCK_ROWS + head_row + start % BLOCK_SIZE) * HEAD_DIM
        cells = tile + (offsets * HEAD_DIM)[:, None] + dims[None, :]
    elif BLOCK_SIZE * 2 == BLOCK_N:
        entry = block_table + start // BLOCK_SIZE
        block_id = tl.load(entry).to(tl.int64)
        next_id = tl.load(entry + 1, mask=start + BLOCK_SIZE < kv_len, other=0).to(tl.int64)
        first_cell = (block_id * BLOCK_ROWS + head_row) * HEAD_DIM
        next_cell = (next_id * BLOCK_ROWS + head_row - BLOCK_SIZE) * HEAD_DIM
        row_cells = tl.where(offsets < BLOCK_SIZE, first_cell, next_cell)
        cells = kv + row_cells[:, None] + (offsets * HEAD_DIM)[:, None] + dims[None, :]
    else:
        keys = start + offsets
        block_ids = tl.load(block_table + keys // BLOCK_SIZE, mask=keys < kv_len, other=0)
        rows = block_ids.to(tl.int64) * BLOCK_ROWS + head_row + keys % BLOCK_SIZE
        cells = kv + (rows * HEAD_DIM)[:, None] + dims[None, :]
    if is_read is None:
        result = tl.load(cells)
    else:
        result = tl.load(cells, mask=is_read[:, None], other=0.0)
    return result


load_tile = triton.jit(_load_tile)


def _find_row(
    query_starts: tl.tensor,
    num_rows: tl.tensor,
    tile: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    # Return the last row whose tiles begin at `tile` or before, or -1. Row r has the tiles from
    # query_starts[r] * GROUP // BLOCK_M + r on. That is enough for all rows before it, each of
    # which may end in a part of a tile.
    row = -1
    for chunk in range(0, num_rows, _ROW_CHUNK):
        rows = chunk + tl.arange(0, _ROW_CHUNK)
        in_step = rows < num_rows
        starts = tl.load(query_starts + rows, mask=in_step, other=0)
        row += tl.sum((in_step & (starts * GROUP // BLOCK_M + rows <= tile)).to(tl.int32))
    return row


find_row = triton.jit(_find_row)


def _prefill_attention(
    q: tl.tensor,
    out: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    query_starts: tl.tensor,
    kv_lens: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP_SOFTMAX: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCK_ROWS: tl.constexpr = 2 * KV_HEADS * BLOCK_SIZE
    head = tl.program_id(0)
    tile = num_tiles - 1 - tl.program_id(1)
    row = find_row(query_starts, num_rows, tile, GROUP, BLOCK_M)
    if row < 0:
        return
    first_token = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - first_token
    first = (tile - (first_token * GROUP // BLOCK_M + row)) * BLOCK_M
    num_packed = num_queries * GROUP
    if first >= num_packed:
        return
    kv_len = tl.load(kv_lens + row)
    block_table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    row_start = kv_len - num_queries
    first_position = row_start + first // GROUP
    last_position = row_start + (tl.minimum(first + BLOCK_M, num_packed) - 1) // GROUP

    packed = first + tl.arange(0, BLOCK_M)
    tokens = packed // GROUP - first // GROUP
    positions = first_position + tokens
    head_offsets = (head * GROUP + packed % GROUP) * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM_PADDED)
    mask = (packed < num_packed)[:, None] & (dims < HEAD_DIM)[None, :]
    tile_token = (first_token + first // GROUP).to(tl.int64)
    q_cells = q + tile_token * q_stride + (tokens * q_stride + head_offsets)[:, None]
    queries = tl.load(q_cells + dims[None, :], mask=mask, other=0.0)

    key_row, value_row = head * BLOCK_SIZE, (KV_HEADS + head) * BLOCK_SIZE
    row_max = tl.full([BLOCK_M], _LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    # Weights stay in fp32 until their product: in a narrow type Triton would carry them from tile
    # to tile through shared memory, and the product would not run alongside the softmax.
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    no_offsets = tl.zeros([BLOCK_N], tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, last_position + 1, BLOCK_N, num_stages=NUM_STAGES):
        k = load_tile(
            kv, block_table, start, kv_len, key_row, None,
            HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N,
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if OVERLAP_SOFTMAX:
            # The first of these has no tile: it multiplies zeros by zeros. Were it left out, the
            # first softmax would run alone.
            v = load_tile(
                kv, block_table, tl.maximum(start - BLOCK_N, begin), kv_len, value_row,
                start + no_offsets > begin, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N,
            )  # fmt: skip
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        if SOFTCAP > 0.0:
            scores = apply_softcap(scores * scale, SOFTCAP)
            factor = _LOG2_E
        else:
            factor = scale * _LOG2_E
        needs_mask = start + BLOCK_N > first_position + 1
        if WINDOW > 0:
            needs_mask = needs_mask | (start <= last_position - WINDOW)
        if needs_mask:
            keys = start + offsets
            is_read = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_read = is_read & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_read, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        if not OVERLAP_SOFTMAX:
            v = load_tile(
                kv, block_table, start, kv_len, value_row, start + offsets < kv_len,
                HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N,
            )  # fmt: skip
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    if OVERLAP_SOFTMAX:
        start = last_position // BLOCK_N * BLOCK_N
        v = load_tile(
            kv, block_table, start, kv_len, value_row, start + offsets < kv_len,
            HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N,
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    out_cells = out + tile_token * out_stride + (tokens * out_stride + head_offsets)[:, None]
    outputs = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out_cells + dims[None, :], outputs, mask=mask)


prefill_attention = triton.jit(
    _prefill_attention,
    do_not_specialize=["num_rows", "num_tiles", "table_stride"],
    # Their alignment differs from step to step. Without this, each is a new kernel.
    do_not_specialize_on_alignment=["slots", "query_starts", "kv_lens"],
)


class PrefillAttention:
    """Prefill kernel of one KV cache, without a plan and without scratch memory."""

    def __init__(self, kv_cache: KVCache, layers: Sequence[LayerSpec]) -> None:
        head_dim = kv_cache.spec.head_dim
        assert head_dim & (head_dim - 1) == 0, f"heads of {head_dim} in the cache"
        for spec in layers:
            # Scores are multiplied after their maximum is taken.
            assert spec.scale > 0.0, f"{spec} has a scale that is not positive"
        self._kv_cache = kv_cache
        self._layer_data = list(kv_cache.data)
        self._layers = layers
        self._configs = select_prefill_configs(head_dim)

    def attend(self, layer_index: int, queries: Tensor, rows: PrefillRows) -> Tensor:
        """Return the outputs of tokens whose keys and values are all in their blocks.

        queries   [tokens, heads, head_dim]; outputs have the same shape
        Tokens outside of all rows have undefined outputs.
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self.attend_into(out, layer_index, queries, rows)
        return out

    def attend_into(
        self, out: Tensor, layer_index: int, queries: Tensor, rows: PrefillRows
    ) -> None:
        """Write the outputs of `attend` to `out`; leave tokens outside of all rows unchanged."""
        spec = self._layers[layer_index]
        num_packed = len(queries) * spec.num_heads // spec.num_kv_heads
        config = self._configs.select_config(num_packed, spec.num_kv_heads)
        self.launch_config(config, out, layer_index, queries, rows)

    def launch_config(
        self,
        config: PrefillConfig,
        out: Tensor,
        layer_index: int,
        queries: Tensor,
        rows: PrefillRows,
    ) -> None:
        """Run `attend_into` with the tiles of `config`."""
        kv_cache, spec = self._kv_cache, self._layers[layer_index]
        for name, each in (("queries", queries), ("out", out)):
            assert each.stride()[1:] == (spec.head_dim, 1), f"{name} has strides {each.stride()}"
        num_rows, group_size = len(rows.slots), spec.num_heads // spec.num_kv_heads
        num_tiles = len(queries) * group_size // config.block_m + num_rows
        if not num_tiles:
            return
        prefill_attention[(spec.num_kv_heads, num_tiles)](
            *(queries, out, self._layer_data[layer_index], kv_cache.block_tables, *rows),
            *(num_rows, num_tiles, spec.scale),
            *(queries.stride(0), out.stride(0), kv_cache.block_tables.stride(0)),
            *(spec.softcap, spec.window, spec.num_heads, spec.num_kv_heads, spec.head_dim),
            *(kv_cache.spec.head_dim, kv_cache.block_size, config.block_m, config.block_n),
            *(config.num_stages, config.overlap_softmax),
            num_warps=config.num_warps,
        )

    def warmup_calls(self) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every variant. They read the scratch block."""
        kv_cache = self._kv_cache
        rows = upload_prefill_rows([RowSpan(kv_cache.scratch_slot, 0, 1, 0)], kv_cache.data.device)
        variants = {(spec.window, spec.softcap): index for index, spec in enumerate(self._layers)}
        for layer_index in variants.values():
            spec = self._layers[layer_index]
            queries = kv_cache.data.new_zeros(1, spec.num_heads, spec.head_dim)
            for config in (self._configs.small, self._configs.large):
                yield partial(
                    self.launch_config,
                    config,
                    torch.empty_like(queries),
                    layer_index,
                    queries,
                    rows,
                )
