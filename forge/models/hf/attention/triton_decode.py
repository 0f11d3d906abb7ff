"""DecodeAttention: attention of rows of one token over the paged KV cache, in one kernel.

Owns the choice of kernel, the Triton kernel, how it splits a step, and its scratch memory. Knows no
plan and no weights.

    steps of few rows              the Triton kernel below
    of MIN_CUDA_ROWS and more      decode_cuda.py, on Hopper, where it has the layer's shape

    program (head h, row r, split s)       the q heads that share key head h, one sequence, a part
                                           of its positions
      tables[slot] ─► blocks ─► scores ─► running max, sum, output      FlashAttention's recurrence
      split 0 also takes the new token from the QKV projection: norm, rotation, write to its block
      the last split to finish adds up the partial results in scratch   Flash-Decoding

Always true: slots, lengths and tables are read on the device, so a CUDA graph can hold the kernel
and nothing is planned. `tile_size` is the unit of a split: with tiles of 64 a sequence of 513
positions reads 576 at most.

The kernel launches while the projection before it still runs (programmatic dependent launch, see
ops/small_gemm.py). Measurements: wiki/Attention.md, "The decode kernel".
Dao et al. 2022 (FlashAttention), Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (paging).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forge.models.hf.attention.interface import LayerSpec, QKNormRope
from forge.models.hf.kv_cache import KVCache

if TYPE_CHECKING:
    from forge.models.hf.attention.decode_cuda import CudaDecodeAttention

_LOG2_E = tl.constexpr(1.4426950408889634)
_GROUP_PADDED = tl.constexpr(16)
"""Rows of a tensor core's smallest tile; the q heads of one key head are padded to it."""


class SplitConfig(NamedTuple):
    """Split of a step's sequences among programs.

    num_splits       most splits of a sequence; a short one has fewer
    tile_size        positions that a program reads at once
    num_warps        warps of a program
    num_stages       tiles in flight
    min_split_size   positions of a split, where the sequence has more; a multiple of `tile_size`
    """

    num_splits: int
    tile_size: int
    num_warps: int
    num_stages: int
    min_split_size: int


TWO_SPLIT_CONFIG = SplitConfig(2, 64, 2, 3, 512)

DECODE_CONFIGS = (
    (2, SplitConfig(32, 64, 4, 3, 64)),
    (3, SplitConfig(16, 64, 4, 3, 64)),
    (5, SplitConfig(8, 64, 4, 3, 64)),
    (9, SplitConfig(8, 32, 2, 3, 32)),
    (24, SplitConfig(4, 64, 2, 2, 256)),
    (144, TWO_SPLIT_CONFIG),
)
"""(limit, config): steps of fewer rows than the limit use it; larger ones use ONE_SPLIT_CONFIG.

Measured on an H200: wiki/Attention.md, "The decode kernel".
"""

MIN_CUDA_ROWS = 17
"""Rows from which decode.cu computes a step, where it has its shape: wiki/Attention.md."""

ONE_SPLIT_CONFIG = SplitConfig(1, 128, 4, 2, 128)
"""Config of steps of many rows.

4 % more tokens/s than TWO_SPLIT_CONFIG: wiki/Attention.md, "Many".
"""


MIXED_CONFIGS = (
    (16, SplitConfig(8, 32, 2, 3, 32)),
    (65, SplitConfig(8, 64, 4, 3, 256)),
    (129, SplitConfig(4, 64, 2, 2, 256)),
)
"""(limit, config) for rows of one token next to longer rows; larger ones use TWO_SPLIT_CONFIG.

A captured graph has more rows than the step, and most read nothing. So few rows must be fast
without many splits. Measured on an H200: wiki/Attention.md, "Longer rows".
"""


def select_decode_config(num_rows: int, head_dim: int) -> SplitConfig:
    """Return the config of a step in which every row has one token."""
    # Tiles of ONE_SPLIT_CONFIG fit into shared memory for heads of 128, not for twice that.
    largest_config = ONE_SPLIT_CONFIG if head_dim <= 128 else TWO_SPLIT_CONFIG
    return next(
        (config for row_limit, config in DECODE_CONFIGS if num_rows < row_limit), largest_config
    )


def select_mixed_config(num_rows: int) -> SplitConfig:
    """Return the config of rows of one token next to longer rows, unused rows included."""
    return next(
        (config for row_limit, config in MIXED_CONFIGS if num_rows < row_limit), TWO_SPLIT_CONFIG
    )


def _norm_rope_heads(
    start: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    row_mask: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
) -> tl.tensor:
    # Return heads at `start` [rows, 1] after norm and rotation, [rows, head_dim]. The arithmetic is
    # that of ops/triton_ops.py.
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    partner = tl.where(dims < ROTARY_DIM // 2, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
    rotates = row_mask & (dims < ROTARY_DIM)
    x = tl.load(start + dims, mask=row_mask & (dims < HEAD_DIM), other=0.0)
    x_partner = tl.load(start + partner, mask=rotates, other=0.0)
    normed = x.to(tl.float32)
    normed_partner = x_partner.to(tl.float32)
    if weight is not None:
        norm_weight = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        partner_norm_weight = tl.load(weight + partner, mask=dims < ROTARY_DIM, other=0.0).to(
            tl.float32
        )
        scale = tl.rsqrt(tl.sum(normed * normed, 1) / HEAD_DIM + eps)[:, None]
        normed = (
            ((normed * scale).to(x.dtype).to(tl.float32) * norm_weight).to(x.dtype).to(tl.float32)
        )
        normed_partner = (normed_partner * scale).to(x.dtype).to(tl.float32) * partner_norm_weight
        normed_partner = normed_partner.to(x.dtype).to(tl.float32)
    rotated = normed * cos + tl.where(dims < ROTARY_DIM // 2, -normed_partner, normed_partner) * sin
    return rotated.to(x.dtype)


norm_rope_heads = triton.jit(_norm_rope_heads)


def _apply_softcap(scores: tl.tensor, cap: tl.constexpr) -> tl.tensor:
    # Return cap * tanh(scores / cap), or the scores where the cap is 0.
    if cap > 0.0:
        doubled = tl.exp(2.0 * scores / cap)
        scores = cap * (1.0 - 2.0 / (doubled + 1.0))
    return scores


apply_softcap = triton.jit(_apply_softcap)


def _decode_attention(
    q: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm_weight: tl.tensor,
    k_norm_weight: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    block_tables: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial_outs: tl.tensor,
    partial_stats: tl.tensor,
    split_counters: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FUSED_QKV: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    block_table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    cached_len = kv_len - 1 if FUSED_QKV else kv_len
    first = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    split_size = tl.maximum(
        tl.cdiv(tl.cdiv(cached_len - first, NUM_SPLITS), TILE_SIZE) * TILE_SIZE, MIN_SPLIT_SIZE
    )
    row_splits = tl.cdiv(cached_len - first, split_size)
    if FUSED_QKV:
        row_splits = tl.maximum(row_splits, 1)
    if split >= tl.maximum(row_splits, 1):
        return  # It reads and writes nothing, so it need not wait for the kernel before.
    begin = first + split * split_size
    end = tl.minimum(begin + split_size, cached_len)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    head_offsets = head * head_stride + dims
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Returns after the wait: if every program returned before it, this kernel would end without
    # waiting, and the next kernel could start before the one before this has written.
    if not FUSED_QKV:
        if row_splits == 0:
            return
    group_index = tl.arange(0, _GROUP_PADDED)[:, None]
    group_mask = group_index < GROUP
    q_starts = (
        q
        + row.to(tl.int64) * q_stride
        + (head * GROUP + tl.where(group_mask, group_index, 0)) * HEAD_DIM
    )
    if FUSED_QKV:
        rope_offsets = (kv_len - 1).to(tl.int64) * ROTARY_DIM + dims[None, :]
        cos_values = tl.load(cos + rope_offsets, mask=dims[None, :] < ROTARY_DIM, other=1.0)
        sin_values = tl.load(sin + rope_offsets, mask=dims[None, :] < ROTARY_DIM, other=0.0)
        queries = norm_rope_heads(
            q_starts,
            q_norm_weight,
            cos_values,
            sin_values,
            group_mask,
            eps,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            ROTARY_DIM,
        )
    else:
        queries = tl.load(
            q_starts + dims[None, :], mask=group_mask & (dims[None, :] < HEAD_DIM), other=0.0
        )
    running_max = tl.full([_GROUP_PADDED], -float("inf"), tl.float32)
    running_sum = tl.zeros([_GROUP_PADDED], tl.float32)
    acc = tl.zeros([_GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for start in tl.range(begin, end, TILE_SIZE, num_stages=NUM_STAGES):
        tokens = start + tl.arange(0, TILE_SIZE)
        tile_mask = tokens < end
        block_ids = tl.load(block_table + tokens // BLOCK_SIZE, mask=tile_mask, other=0).to(
            tl.int64
        )
        token_offsets = block_ids * block_stride + tokens % BLOCK_SIZE * token_stride
        kv_offsets = token_offsets[:, None] + head_offsets[None, :]
        kv_mask = tile_mask[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = apply_softcap(scores, SOFTCAP) * _LOG2_E
        scores = tl.where(tile_mask[None, :], scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        v = tl.load(values + kv_offsets, mask=kv_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    if FUSED_QKV:
        if split == 0:
            k_start = q + row.to(tl.int64) * q_stride + (Q_HEADS + head) * HEAD_DIM
            zero = tl.zeros([1, 1], tl.int32)
            all_rows = zero == 0
            k_new = norm_rope_heads(
                k_start + zero,
                k_norm_weight,
                cos_values,
                sin_values,
                all_rows,
                eps,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                ROTARY_DIM,
            )
            v_new = tl.load(k_start + KV_HEADS * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
            block_id = tl.load(block_table + (kv_len - 1) // BLOCK_SIZE).to(tl.int64)
            offset = (
                block_id * block_stride + (kv_len - 1) % BLOCK_SIZE * token_stride + head_offsets
            )
            k_flat = tl.reshape(k_new, [HEAD_DIM_PADDED])
            tl.store(keys + offset, k_flat, mask=dims < HEAD_DIM)
            tl.store(values + offset, v_new, mask=dims < HEAD_DIM)
            score = tl.sum(queries.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            score = apply_softcap(score, SOFTCAP) * _LOG2_E
            new_max = tl.maximum(running_max, score)
            weight = tl.exp2(score - new_max)
            rescale = tl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + weight
            acc = acc * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
            running_max = new_max
    out_cells = (
        out + (row.to(tl.int64) * Q_HEADS + head * GROUP + group_index) * HEAD_DIM + dims[None, :]
    )
    out_mask = group_mask & (dims[None, :] < HEAD_DIM)
    if row_splits == 1:
        tl.store(out_cells, (acc / running_sum[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        offset = (row * KV_HEADS + head) * NUM_SPLITS
        kv_offsets = group_index * HEAD_DIM_PADDED + dims[None, :]
        group_range = tl.arange(0, _GROUP_PADDED)
        tl.store(
            partial_outs
            + (offset + split).to(tl.int64) * (_GROUP_PADDED * HEAD_DIM_PADDED)
            + kv_offsets,
            acc,
            mask=group_mask,
        )
        tl.store(partial_stats + (offset + split) * (2 * _GROUP_PADDED) + group_range, running_max)
        tl.store(
            partial_stats + (offset + split) * (2 * _GROUP_PADDED) + _GROUP_PADDED + group_range,
            running_sum,
        )
        # All threads have written their part before one thread counts the split as finished.
        tl.debug_barrier()
        num_finished = tl.atomic_add(split_counters + row * KV_HEADS + head, 1, sem="acq_rel")
        if num_finished == row_splits - 1:
            tl.store(split_counters + row * KV_HEADS + head, 0)
            running_max = tl.full([_GROUP_PADDED], -float("inf"), tl.float32)
            running_sum = tl.zeros([_GROUP_PADDED], tl.float32)
            acc = tl.zeros([_GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
            for i in tl.range(0, row_splits, 1, num_stages=1):
                stats_offsets = partial_stats + (offset + i) * (2 * _GROUP_PADDED) + group_range
                part_top = tl.load(stats_offsets, volatile=True)
                part_total = tl.load(stats_offsets + _GROUP_PADDED, volatile=True)
                part = (
                    partial_outs
                    + (offset + i).to(tl.int64) * (_GROUP_PADDED * HEAD_DIM_PADDED)
                    + kv_offsets
                )
                part_acc = tl.load(part, mask=group_mask, other=0.0, volatile=True)
                new_max = tl.maximum(running_max, part_top)
                rescale, weight = tl.exp2(running_max - new_max), tl.exp2(part_top - new_max)
                running_sum = running_sum * rescale + part_total * weight
                acc = acc * rescale[:, None] + part_acc * weight[:, None]
                running_max = new_max
            tl.store(
                out_cells, (acc / running_sum[:, None]).to(out.dtype.element_ty), mask=out_mask
            )


decode_attention = triton.jit(
    _decode_attention,
    do_not_specialize=["table_stride"],
    # Their alignment differs from step to step. Without this, each is a new kernel.
    do_not_specialize_on_alignment=["slots", "kv_lens"],
)


def _create_cuda_kernel(
    kv_cache: KVCache, spec: LayerSpec, *, pdl: bool
) -> CudaDecodeAttention | None:
    if kv_cache.data.device.type != "cuda":
        return None
    # The bindings of CUDA are installed only where torch has CUDA.
    from forge.models.hf.attention.decode_cuda import CudaDecodeAttention, has_kernel

    return CudaDecodeAttention(kv_cache, spec, pdl=pdl) if has_kernel(kv_cache, spec) else None


class DecodeAttention:
    """Decode kernel of one KV cache, and the scratch memory of its splits.

    pdl   launch while the kernel before still runs (sm_90 or later)
    """

    def __init__(self, kv_cache: KVCache, layers: Sequence[LayerSpec], *, pdl: bool) -> None:
        spec = layers[0]
        assert spec.num_heads <= 16 * spec.num_kv_heads, f"{spec} shares keys among too many heads"
        self._kv_cache = kv_cache
        self._layers = layers
        self._pdl = pdl
        self._launch_options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        self._head_dim_padded = max(64, triton.next_power_of_2(spec.head_dim))
        device = kv_cache.data.device
        self._cuda_kernel = _create_cuda_kernel(kv_cache, spec, pdl=pdl)
        max_partials = spec.num_kv_heads * max(
            rows
            * max(
                select_decode_config(rows, spec.head_dim).num_splits,
                select_mixed_config(rows).num_splits,
            )
            for rows in range(1, kv_cache.num_slots + 1)
        )
        self._partial_outs = torch.empty(
            max_partials * 16 * self._head_dim_padded, dtype=torch.float32, device=device
        )
        self._partial_stats = torch.empty(max_partials * 32, dtype=torch.float32, device=device)
        # Zeroed once: the last split of each sequence resets its counter.
        self._split_counters = torch.zeros(
            kv_cache.num_slots * spec.num_kv_heads, dtype=torch.int32, device=device
        )

    def attend(self, layer_index: int, queries: Tensor, slots: Tensor, kv_lens: Tensor) -> Tensor:
        """Return the outputs of rows whose keys and values are all in their blocks, like `queries`.

        queries          [rows, heads, head_dim]
        slots, kv_lens   [rows] int32; kv_lens counts the row's own token
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self.attend_into(out, layer_index, queries, slots, kv_lens)
        return out

    def attend_into(
        self, out: Tensor, layer_index: int, queries: Tensor, slots: Tensor, kv_lens: Tensor
    ) -> None:
        """Write the outputs of `attend` to `out`.

        Rows with KV length 0 leave their part of it unchanged.
        """
        assert queries.stride()[1:] == (queries.shape[2], 1), (
            f"queries have strides {queries.stride()}"
        )
        assert out.is_contiguous(), f"out has strides {out.stride()}"
        spec = self._layers[layer_index]
        kernel = self._cuda_kernel_for(len(queries), spec)
        if kernel is not None:
            kernel.attend_into(out, layer_index, queries, slots, kv_lens, spec.scale)
            return
        no_rope = QKNormRope(queries, queries, None, None, 0.0)
        self._launch_kernel(layer_index, queries, no_rope, slots, kv_lens, out, fused_qkv=False)

    def attend_qkv(
        self, layer_index: int, qkv: Tensor, rope: QKNormRope, slots: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """Return outputs from the QKV projection and write the new keys and values to their blocks.

        qkv              [rows, (heads + 2 * kv_heads) * head_dim]
        slots, kv_lens   [rows] int32; kv_lens counts the row's own token
        Outputs are [rows, heads * head_dim].
        """
        spec = self._layers[layer_index]
        out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
        kernel = self._cuda_kernel_for(len(qkv), spec)
        if kernel is not None and kernel.has_rope(rope):
            kernel.attend_qkv_into(out, layer_index, qkv, rope, slots, kv_lens, spec.scale)
            return out
        self._launch_kernel(layer_index, qkv, rope, slots, kv_lens, out, fused_qkv=True)
        return out

    def warmup_calls(self, rope: QKNormRope) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every variant. They write to the scratch block."""
        variants = {(spec.window, spec.softcap): index for index, spec in enumerate(self._layers)}
        for layer_index in variants.values():
            yield from self._layer_warmup_calls(layer_index, rope)

    def _layer_warmup_calls(
        self, layer_index: int, rope: QKNormRope
    ) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every config of one layer."""
        kv_cache, spec = self._kv_cache, self._layers[layer_index]
        cuda_kernel = self._cuda_kernel_for(MIN_CUDA_ROWS, spec)
        fuses_qkv = cuda_kernel is not None and cuda_kernel.has_rope(rope)
        row_counts = [
            *(row_limit - 1 for row_limit, _ in (*DECODE_CONFIGS, *MIXED_CONFIGS)),
            DECODE_CONFIGS[-1][0],
            MIN_CUDA_ROWS - 1,
            MIN_CUDA_ROWS,
        ]
        for num_rows in row_counts:
            slots = torch.full_like(self._split_counters[:1], kv_cache.scratch_slot).expand(
                num_rows
            )
            q = kv_cache.data.new_zeros(
                num_rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
            )
            kv_lens = torch.ones_like(slots).contiguous()
            slots = slots.contiguous()
            rows = (slots, kv_lens)
            if not fuses_qkv or num_rows < MIN_CUDA_ROWS:
                yield partial(self.attend_qkv, layer_index, q.flatten(1), rope, *rows)
            # One call compiles both kernels of decode.cu.
            if cuda_kernel is None or num_rows <= MIN_CUDA_ROWS:
                yield partial(self.attend, layer_index, q[:, : spec.num_heads], *rows)

    def _cuda_kernel_for(self, num_rows: int, spec: LayerSpec) -> CudaDecodeAttention | None:
        """Return the kernels of decode.cu where they compute this step of this layer, else None."""
        kernel = self._cuda_kernel
        has_step = kernel is not None and MIN_CUDA_ROWS <= num_rows <= kernel.max_rows
        return kernel if has_step and not spec.window and not spec.softcap else None

    def _launch_kernel(
        self,
        layer_index: int,
        q: Tensor,
        rope: QKNormRope,
        slots: Tensor,
        kv_lens: Tensor,
        out: Tensor,
        *,
        fused_qkv: bool,
    ) -> None:
        kv_cache, spec, rows = self._kv_cache, self._layers[layer_index], len(q)
        config = (
            select_decode_config(rows, spec.head_dim) if fused_qkv else select_mixed_config(rows)
        )
        keys, values = kv_cache.keys[layer_index], kv_cache.values[layer_index]
        scratch = (self._partial_outs, self._partial_stats, self._split_counters)
        strides = (q.stride(0), kv_cache.block_tables.stride(0), *keys.stride()[:3])
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        decode_attention[(spec.num_kv_heads, rows, config.num_splits)](
            *(q, rope.cos, rope.sin, rope.q_norm_weight, rope.k_norm_weight),
            *(slots, kv_lens, kv_cache.block_tables, keys, values, out, *scratch),
            *(rope.eps, spec.scale, *strides, spec.softcap, spec.window, *shape),
            *(
                self._head_dim_padded,
                rope.cos.shape[-1] if fused_qkv else 0,
                kv_cache.block_size,
                config.tile_size,
            ),
            *(config.num_splits, config.min_split_size, config.num_stages, fused_qkv, self._pdl),
            num_warps=config.num_warps,
            **self._launch_options,
        )
