"""DecodeAttention: attention of rows with one token each, over pages, in one Triton kernel.

Owns the kernel, how it cuts a step, and its scratch memory. Knows no plan and no weights.

    program (head h, row r, split s)       the q heads that share key head h, one sequence, a part
                                           of its positions
      tables[slot] ─► pages ─► scores ─► running max, sum, output       FlashAttention's recurrence
      split 0 also takes the new token, straight from the product qkv: norm, rotation, its page
      the last split to arrive adds up what all have left in scratch    FlashDecoding

Everything a step says (slots, lengths, tables) is read on the device, so a CUDA graph records it
and nothing is planned. A tile of `positions` is the finest cut: a kernel that works in 256 of them
reads 768 where a sequence has 513.

Pages behind the new token were written by earlier steps. So their way to the second-level cache
begins before the kernel waits for the product (programmatic dependent launch, see kernels.py).
Dao et al. 2022 (FlashAttention), Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (pages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forge.models.hf.attention import LayerSpec, Rotary
from forge.models.hf.pool import KVPool

_LOG2_E = tl.constexpr(1.4426950408889634)
_GROUP = tl.constexpr(16)
"""Rows of a tensor core's smallest tile: the q heads of one key head are padded to it."""


class Cut(NamedTuple):
    """How a step of some rows is cut.

    splits      most parts of each sequence; one that is short has fewer
    positions   of one tile
    least       positions of a part, where the sequence has more; a multiple of `positions`
    """

    splits: int
    positions: int
    warps: int
    stages: int
    least: int


WIDE = Cut(2, 64, 2, 3, 512)

CUTS = (
    (2, Cut(32, 64, 4, 3, 64)),
    (3, Cut(16, 64, 4, 3, 64)),
    (5, Cut(8, 64, 4, 3, 64)),
    (9, Cut(8, 32, 2, 3, 32)),
    (24, Cut(4, 64, 2, 2, 256)),
    (144, WIDE),
)
"""Fewer rows than the first number are cut so; more as MANY. Measured on an H200, 8 key heads of
128, behind a product of 13 us, in us: 16 rows of 600 tokens 30, 64 of 400 45, 256 of 400 136, and
of 300 to 2000 tokens each 12 rows 39, 40 rows 78, 112 rows 154, 224 rows 277."""

MANY = Cut(1, 128, 4, 2, 128)
"""256 requests of 100 to 1024 tokens in and out, 0.6B shape, whole: 26,000 tokens/s, and 24,900 cut
as WIDE. Short rows lose: 200 in, 384 out 51,100 and 51,900. One warp with tiles of 32 positions has
it the other way round: 24,300 and 54,100."""


BESIDE = (
    (16, Cut(8, 32, 2, 3, 32)),
    (65, Cut(8, 64, 4, 3, 256)),
    (129, Cut(4, 64, 2, 2, 256)),
)
"""The same beside longer rows; more as WIDE. A recording has places for most rows that there can
be, which mostly read nothing, so few rows must do without many parts. 488 tokens beside 24 rows of
300 to 3700 tokens in 64 places, the 4B shape on an H200, in ms: cut as the second 8.5, as the third
8.7, as WIDE 9.8."""


def cut_of(rows: int, head_dim: int) -> Cut:
    """The cut of a step in which every row has one token."""
    # The tiles of MANY fit into shared memory for heads of 128, not for twice that.
    most = MANY if head_dim <= 128 else WIDE
    return next((cut for few, cut in CUTS if rows < few), most)


def mixed_cut_of(rows: int) -> Cut:
    """The cut of rows of one token beside longer ones, or of places for so many."""
    return next((cut for few, cut in BESIDE if rows < few), WIDE)


def _heads(
    start: tl.tensor,
    weight: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROT: tl.constexpr,
) -> tl.tensor:
    # [rows, D] of heads at start [rows, 1], normed and rotated as kernels.py does it.
    at = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(at < ROT // 2, at + ROT // 2, at - ROT // 2)
    turns = inside & (at < ROT)
    row = tl.load(start + at, mask=inside & (at < D), other=0.0)
    other = tl.load(start + partner, mask=turns, other=0.0)
    own = row.to(tl.float32)
    across = other.to(tl.float32)
    if weight is not None:
        by = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
        by_across = tl.load(weight + partner, mask=at < ROT, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        own = ((own * scale).to(row.dtype).to(tl.float32) * by).to(row.dtype).to(tl.float32)
        across = (across * scale).to(row.dtype).to(tl.float32) * by_across
        across = across.to(row.dtype).to(tl.float32)
    turned = own * c + tl.where(at < ROT // 2, -across, across) * s
    return turned.to(row.dtype)


heads = triton.jit(_heads)


def _capped(scores: tl.tensor, cap: tl.constexpr) -> tl.tensor:
    # cap * tanh(scores / cap), where a cap is asked for.
    if cap > 0.0:
        doubled = tl.exp(2.0 * scores / cap)
        scores = cap * (1.0 - 2.0 / (doubled + 1.0))
    return scores


capped = triton.jit(_capped)


def _decode_attention(
    q: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    NEW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    old = length - 1 if NEW else length
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.maximum(tl.cdiv(tl.cdiv(old - first, SPLITS), TILE) * TILE, LEAST)
    parts_here = tl.cdiv(old - first, share)
    if NEW:
        parts_here = tl.maximum(parts_here, 1)
    if split >= tl.maximum(parts_here, 1):
        return  # it has nothing to read and nothing to write, so nothing to wait for
    begin = first + split * share
    end = tl.minimum(begin + share, old)
    at = tl.arange(0, BLOCK)
    across_pages = head * head_stride + at
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # A row may read nothing, and all rows: somebody has to have waited for what came before.
    if not NEW:
        if parts_here == 0:
            return
    group = tl.arange(0, _GROUP)[:, None]
    mine = group < GROUP
    q_starts = q + row.to(tl.int64) * q_stride + (head * GROUP + tl.where(mine, group, 0)) * D
    if NEW:
        turn = (length - 1).to(tl.int64) * ROT + at[None, :]
        c = tl.load(cos + turn, mask=at[None, :] < ROT, other=1.0)
        s = tl.load(sin + turn, mask=at[None, :] < ROT, other=0.0)
        queries = heads(q_starts, q_weight, c, s, mine, eps, D, BLOCK, ROT)
    else:
        queries = tl.load(q_starts + at[None, :], mask=mine & (at[None, :] < D), other=0.0)
    top = tl.full([_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([_GROUP], tl.float32)
    acc = tl.zeros([_GROUP, BLOCK], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = start + tl.arange(0, TILE)
        there = tokens < end
        pages = tl.load(table + tokens // PAGE, mask=there, other=0).to(tl.int64)
        places = pages * page_stride + tokens % PAGE * token_stride
        cells = places[:, None] + across_pages[None, :]
        usable = there[:, None] & (at < D)[None, :]
        k = tl.load(keys + cells, mask=usable, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = capped(scores, CAP) * _LOG2_E
        scores = tl.where(there[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + cells, mask=usable, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    if NEW:
        if split == 0:
            k_start = q + row.to(tl.int64) * q_stride + (Q_HEADS + head) * D
            one = tl.zeros([1, 1], tl.int32)
            every = one == 0
            k_new = heads(k_start + one, k_weight, c, s, every, eps, D, BLOCK, ROT)
            v_new = tl.load(k_start + KV_HEADS * D + at, mask=at < D, other=0.0)
            page = tl.load(table + (length - 1) // PAGE).to(tl.int64)
            place = page * page_stride + (length - 1) % PAGE * token_stride + across_pages
            k_flat = tl.reshape(k_new, [BLOCK])
            tl.store(keys + place, k_flat, mask=at < D)
            tl.store(values + place, v_new, mask=at < D)
            score = tl.sum(queries.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            score = capped(score, CAP) * _LOG2_E
            higher = tl.maximum(top, score)
            weight = tl.exp2(score - higher)
            fade = tl.exp2(top - higher)
            total = total * fade + weight
            acc = acc * fade[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
            top = higher
    out_cells = out + (row.to(tl.int64) * Q_HEADS + head * GROUP + group) * D + at[None, :]
    written = mine & (at[None, :] < D)
    if parts_here == 1:
        tl.store(out_cells, (acc / total[:, None]).to(out.dtype.element_ty), mask=written)
    else:
        place = (row * KV_HEADS + head) * SPLITS
        cells = group * BLOCK + at[None, :]
        sixteen = tl.arange(0, _GROUP)
        tl.store(parts + (place + split).to(tl.int64) * (_GROUP * BLOCK) + cells, acc, mask=mine)
        tl.store(sums + (place + split) * (2 * _GROUP) + sixteen, top)
        tl.store(sums + (place + split) * (2 * _GROUP) + _GROUP + sixteen, total)
        # Every thread's part is written before one thread says that it is.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + row * KV_HEADS + head, 1, sem="acq_rel")
        if before == parts_here - 1:
            tl.store(arrivals + row * KV_HEADS + head, 0)
            top = tl.full([_GROUP], -float("inf"), tl.float32)
            total = tl.zeros([_GROUP], tl.float32)
            acc = tl.zeros([_GROUP, BLOCK], tl.float32)
            for i in tl.range(0, parts_here, 1, num_stages=1):
                theirs = sums + (place + i) * (2 * _GROUP) + sixteen
                part_top = tl.load(theirs, volatile=True)
                part_total = tl.load(theirs + _GROUP, volatile=True)
                part = parts + (place + i).to(tl.int64) * (_GROUP * BLOCK) + cells
                part_acc = tl.load(part, mask=mine, other=0.0, volatile=True)
                higher = tl.maximum(top, part_top)
                fade, weight = tl.exp2(top - higher), tl.exp2(part_top - higher)
                total = total * fade + part_total * weight
                acc = acc * fade[:, None] + part_acc * weight[:, None]
                top = higher
            tl.store(out_cells, (acc / total[:, None]).to(out.dtype.element_ty), mask=written)


decode_attention = triton.jit(
    _decode_attention,
    do_not_specialize=["table_stride"],
    # Their place in the inbox is another in each step; a kernel for each would be compiled then.
    do_not_specialize_on_alignment=["slots", "lengths"],
)


class DecodeAttention:
    """The kernel for one pool, and the memory its splits share.

    pdl   launch early, while the kernel before still runs (sm_90 or later)
    """

    def __init__(self, pool: KVPool, layers: Sequence[LayerSpec], *, pdl: bool) -> None:
        spec = layers[0]
        assert spec.num_heads <= 16 * spec.num_kv_heads, f"{spec} shares keys among too many heads"
        self._pool = pool
        self._layers = layers
        self._pdl = pdl
        self._launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        self._block = max(64, triton.next_power_of_2(spec.head_dim))
        device = pool.data.device
        places = spec.num_kv_heads * max(
            rows * max(cut_of(rows, spec.head_dim).splits, mixed_cut_of(rows).splits)
            for rows in range(1, pool.num_slots + 1)
        )
        self._parts = torch.empty(places * 16 * self._block, dtype=torch.float32, device=device)
        self._sums = torch.empty(places * 32, dtype=torch.float32, device=device)
        # The last to arrive leaves a zero: zeroed once.
        self._arrivals = torch.zeros(
            pool.num_slots * spec.num_kv_heads, dtype=torch.int32, device=device
        )

    def attend(self, layer: int, queries: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """[rows, heads, head_dim] of queries to outputs; every key is in its page.

        slots, lengths   [rows] int32; positions each row reads, its own included
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self.attend_into(out, layer, queries, slots, lengths)
        return out

    def attend_into(
        self, out: Tensor, layer: int, queries: Tensor, slots: Tensor, lengths: Tensor
    ) -> None:
        """The same into `out`, but for rows that read no position: there it stays what it is."""
        assert queries.stride()[1:] == (queries.shape[2], 1), f"{queries.stride()} apart"
        assert out.is_contiguous(), f"{out.stride()} apart"
        none = Rotary(queries, queries, None, None, 0.0)
        self._run(layer, queries, none, slots, lengths, out, new=False)

    def attend_product(
        self, layer: int, qkv: Tensor, rotary: Rotary, slots: Tensor, lengths: Tensor
    ) -> Tensor:
        """[rows, heads * head_dim] of outputs; the new keys and values are in their pages.

        qkv   [rows, (heads + 2 * kv_heads) * head_dim], as the product gives it
        """
        spec = self._layers[layer]
        out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
        self._run(layer, qkv, rotary, slots, lengths, out, new=True)
        return out

    def exercises(self, rotary: Rotary) -> Iterator[Callable[[], object]]:
        """Calls that between them use every cut, in the scratch page."""
        pool, spec = self._pool, self._layers[0]
        rows = [most - 1 for most, _ in (*CUTS, *BESIDE)] + [CUTS[-1][0]]
        for count in rows:
            slots = torch.full_like(self._arrivals[:1], pool.scratch_slot).expand(count)
            q = pool.data.new_zeros(count, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
            lengths = torch.ones_like(slots).contiguous()
            slots = slots.contiguous()
            yield partial(self.attend_product, 0, q.flatten(1), rotary, slots, lengths)
            yield partial(self.attend, 0, q[:, : spec.num_heads], slots, lengths)

    def _run(
        self,
        layer: int,
        q: Tensor,
        rotary: Rotary,
        slots: Tensor,
        lengths: Tensor,
        out: Tensor,
        *,
        new: bool,
    ) -> None:
        pool, spec, rows = self._pool, self._layers[layer], len(q)
        cut = cut_of(rows, spec.head_dim) if new else mixed_cut_of(rows)
        keys, values = pool.keys[layer], pool.values[layer]
        scratch = (self._parts, self._sums, self._arrivals)
        strides = (q.stride(0), pool.tables.stride(0), *keys.stride()[:3])
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        decode_attention[(spec.num_kv_heads, rows, cut.splits)](
            *(q, rotary.cos, rotary.sin, rotary.q_weight, rotary.k_weight),
            *(slots, lengths, pool.tables, keys, values, out, *scratch),
            *(rotary.eps, spec.scale, *strides, spec.softcap, spec.window, *shape),
            *(self._block, rotary.cos.shape[-1] if new else 0, pool.block_size, cut.positions),
            *(cut.splits, cut.least, cut.stages, new, self._pdl),
            num_warps=cut.warps,
            **self._launch,
        )
