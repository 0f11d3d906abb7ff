"""CudaAttention: the pages read by our decode kernel and by FlashInfer's on an NVIDIA GPU.

Owns the choice of kernel and the plans they need. Knows no weights and no sampling.

    rows of one token     ours     needs no plan: tables and lengths stay on the device, so a CUDA
                                   graph records it (decode_attention.py)
    longer rows           FA3      planned once a step on the host, before any layer runs
      all from their start         reads the step's own keys, which stand side by side: no pages
    short longer rows     FA2      and what FA3 cannot: soft caps and windows
    recorded steps                 plans stand where the graph reads them; a recording for a few
                                   longer rows alone, one for these beside ours, one for any rows

FlashInfer's own choice on Hopper is the slow one, so `LONG_ROWS` says who takes what; it was
measured on an H200. A plan's numbers travel through pinned memory that the next plan fills again:
it waits until the device has read them, which it has by then (Ye et al. 2025, FlashInfer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from forge.models.hf.attention import LayerSpec, Rotary, Rows, Span
from forge.models.hf.batch import Ints
from forge.models.hf.decode_attention import DecodeAttention
from forge.models.hf.pool import KVPool

WORKSPACE_BYTES = 256 * 2**20
"""What FlashInfer's documentation advises: enough for any step that is not recorded."""

FEW_ROWS, ALONE, APART = 4, 128, 128
"""Longer rows up to which a recorded step takes FA3. Tokens of recordings up to which these have to
begin at their first position, and from which rows of one token beside them are read apart. A step
of the 4B shape on an H200 in ms, FA2 for all rows and FA3 with ours: 488 tokens behind 1000 beside
24 rows of 1300 12.6 and 9.2, 104 7.5 and 5.9, 40 5.3 and 5.6; 16 tokens alone behind 1000 3.2 and
3.6."""

QUERY_TILE = 128
"""Most queries that FA2 takes at once, heads of a group counted as queries."""

LONG_ROWS = 256
"""Mean tokens of a row from which FA3 is the faster kernel: 512 tokens 30 us against 64 of FA2, 40
rows of 200 tokens 135 against 112, a layer with 32 and 8 heads of 128 on an H200."""

LONG_WHOLE_ROWS = 128
"""The same where every row begins at its first position, and FA3 reads no pages: 16 rows of 512
tokens 104 us against 135 of FA3 over pages, one of 8000 tokens 794 against 939."""

HEAD_DIMS = (64, 128, 256)
"""Sizes of a head that every kernel knows: pages are padded to the next."""


def padded_head_dim(head_dim: int) -> int | None:
    """The size that pages keep for a head of `head_dim`, or None for one too large."""
    return next((size for size in HEAD_DIMS if size >= head_dim), None)


class Kind(NamedTuple):
    """Layers with equal arguments share a plan."""

    scale: float
    window: int
    softcap: float

    @classmethod
    def of(cls, spec: LayerSpec) -> Kind:
        """The layer's."""
        return cls(spec.scale, spec.window, spec.softcap)


class _Planned:
    """A kernel of FlashInfer for rows of any length, and the plan of the step it runs in."""

    def __init__(self, pool: KVPool, kind: Kind, num_heads: int, wrapper: Any) -> None:
        self._pool = pool
        self._kind = kind
        self._num_heads = num_heads
        self._wrapper = wrapper
        self._read: torch.cuda.Event | None = None

    def plan(self, lengths: Ints, ends: Ints, pages: torch.Tensor) -> tuple[Any, ...]:
        """What FlashInfer decided, for comparison with what a graph has recorded.

        lengths, ends   [rows] queries of each row, and positions it reads
        pages           pages of all rows behind each other, int32 on the device
        """
        if self._read is not None:
            self._read.synchronize()
        pool, kind = self._pool, self._kind
        counts = -(-ends // pool.block_size)
        self._wrapper.plan(
            _pinned(_cumulated(lengths)),
            _pinned(_cumulated(counts)),
            pages,
            # A row that is only there to fill a graph has no page, and none of its positions.
            _pinned(np.where(ends > 0, (ends - 1) % pool.block_size + 1, 0)),
            self._num_heads,
            pool.shape.num_kv_heads,
            pool.shape.head_dim,
            pool.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=kind.window - 1 if kind.window else -1,
            logits_soft_cap=kind.softcap or None,
            q_data_type=pool.shape.dtype,
            kv_data_type=pool.shape.dtype,
            non_blocking=True,
        )
        self._read = torch.cuda.Event()
        self._read.record()
        return tuple(self._wrapper._plan_info)

    def run(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` with the layer's outputs; keys and values are read from their pages."""
        pages = (self._pool.keys[layer], self._pool.values[layer])
        self._wrapper.run(queries, tuple(each.transpose(1, 2) for each in pages), out=out)


class _Whole:
    """FA3 over rows that begin at their first position: all that they read is the step's own."""

    def __init__(self, pool: KVPool, kind: Kind, num_heads: int, wrapper: Any) -> None:
        self._pool = pool
        self._kind = kind
        self._num_heads = num_heads
        self._wrapper = wrapper
        self._read: torch.cuda.Event | None = None

    def plan(self, lengths: Ints) -> None:
        """The rows of the step are known: [rows] queries of each, and as many keys."""
        if self._read is not None:
            self._read.synchronize()
        shape, firsts = self._pool.shape, _pinned(_cumulated(lengths))
        self._wrapper.plan(
            firsts,
            firsts,
            self._num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            non_blocking=True,
        )
        self._read = torch.cuda.Event()
        self._read.record()

    def run(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` with the layer's outputs."""
        self._wrapper.run(queries, keys, values, out=out)


class CudaAttention:
    """Kernels for one pool and one kind of layer."""

    def __init__(self, pool: KVPool, layers: Sequence[LayerSpec]) -> None:
        import flashinfer

        self._flashinfer = flashinfer
        self._pool = pool
        self._layers = layers
        self._kinds = [Kind.of(spec) for spec in layers]
        device = pool.data.device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._recorded_workspace = self._workspace
        self._recorded = False
        self._kernels: dict[tuple[Kind, str], _Planned] = {}
        self._whole: dict[Kind, _Whole] = {}
        self._planned: dict[Kind, _Planned | _Whole] = {}
        self._decode = DecodeAttention(pool, layers, pdl=True)
        self._slots = self._kv_lens = pool.tables[0, :0]

    def begin(self, rows: Rows) -> None:
        """Plan the longer rows."""
        self._slots, self._kv_lens = rows.slots, rows.kv_lens
        longer = rows.spans[rows.num_decode :]
        if not longer:
            return
        lengths, ends = _lengths(longer)
        mean = int(lengths.sum()) / len(lengths)
        padded = self._pool.shape.head_dim != self._layers[0].head_dim
        whole = not padded and mean >= LONG_WHOLE_ROWS and bool((lengths == ends).all())
        pages = None
        for kind in dict.fromkeys(self._kinds):
            plain = not kind.softcap and not kind.window
            if plain and whole:
                self._planned[kind] = side_by_side = self._whole_kernel(kind)
                side_by_side.plan(lengths)
            else:
                pages = _pages(self._pool, longer, ends) if pages is None else pages
                long = plain and mean >= LONG_ROWS
                self._planned[kind] = paged = self._kernel(kind, "fa3" if long else "fa2")
                paged.plan(lengths, ends, pages)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Our kernel for the front of the batch, a planned one for the rest."""
        count = len(self._slots)
        if not count:
            return self._longer(layer, queries, keys, values)
        out = self._decode.attend(layer, queries[:count], self._slots, self._kv_lens)
        if count == len(queries):
            return out
        rest = (each[count:] for each in (queries, keys, values))
        return torch.cat((out, self._longer(layer, *rest)))

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        """Where every row has one token."""
        if len(self._slots) != len(qkv):
            return None
        return self._decode.attend_product(layer, qkv, rotary, self._slots, self._kv_lens)

    def _longer(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        queries = _padded(self._pool, queries)
        out = torch.empty_like(queries)
        self._planned[self._kinds[layer]].run(layer, queries, keys, values, out)
        return out[..., : self._layers[layer].head_dim]

    def exercises(self, rotary: Rotary) -> Iterator[Callable[[], object]]:
        """Calls that use every form of the decode kernel."""
        return self._decode.exercises(rotary)

    def recorders(self, tokens: int, rows: int) -> tuple[RecordedAttention, ...]:
        """Attentions that a graph of so many tokens and rows can record; the first that matches a
        step is the one for it.

        They share their workspace: ask for the largest first.
        """
        spec = self._layers[0]
        group = spec.num_heads // spec.num_kv_heads
        device = torch.cuda.get_device_properties(self._workspace.device)
        least = 2 * device.multi_processor_count // spec.num_kv_heads + 1
        tiles = max(least, -(-tokens * group // QUERY_TILE) + rows + 1)
        # Partial outputs and their sums, in fp32, of every tile a plan may ever have.
        needed = spec.num_heads * tiles * QUERY_TILE * (self._pool.shape.head_dim + 1) * 4
        if self._recorded_workspace.numel() < needed + 2**20:
            assert not self._recorded, "a larger workspace would be another place"
            self._recorded_workspace = torch.empty(
                needed + 2**20, dtype=torch.uint8, device=self._workspace.device
            )
        self._recorded = True
        places = (self._pool, self._layers, self._recorded_workspace, tokens)
        found = [RecordedAttention(_Places(*places, rows, "fa2"))]
        if tokens >= APART:
            few = _Places(*places, min(FEW_ROWS, rows) + 1, "fa3")
            found.insert(0, _Apart(few, self._decode, rows))
        alone = _Places(*places, min(FEW_ROWS, rows), "fa3")
        return _Alone(alone), *found

    def _kernel(self, kind: Kind, backend: str) -> _Planned:
        key = (kind, backend)
        if key not in self._kernels:
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend=backend
            )
            self._kernels[key] = _Planned(self._pool, kind, self._layers[0].num_heads, wrapper)
        return self._kernels[key]

    def _whole_kernel(self, kind: Kind) -> _Whole:
        if kind not in self._whole:
            wrapper = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self._workspace, "NHD", backend="fa3"
            )
            self._whole[kind] = _Whole(self._pool, kind, self._layers[0].num_heads, wrapper)
        return self._whole[kind]


class _Places:
    """Planned kernels of one recording, in whose places a graph reads what the host has planned.

    tokens    of the graph; those that fill it are one row more, in the scratch page
    rows      that it has places for; where there are fewer the others are empty
    backend   of layers without a window or a soft cap, which only FA2 has
    """

    def __init__(
        self,
        pool: KVPool,
        layers: Sequence[LayerSpec],
        workspace: torch.Tensor,
        tokens: int,
        rows: int,
        backend: str,
    ) -> None:
        import flashinfer

        self._pool = pool
        self._layers = layers
        self._kinds = [Kind.of(spec) for spec in layers]
        self.tokens = tokens
        self.rows = rows
        self.scratch_slot = pool.scratch_slot
        self._infos: dict[Kind, tuple[Any, ...]] = {}
        device = pool.data.device
        # Rows may share pages, so it is the tables that say how many there can be.
        most = (rows + 1) * pool.tables.shape[1]

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._kernels = {}
        for kind in dict.fromkeys(self._kinds):
            plain = not kind.softcap and not kind.window
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                qo_indptr_buf=numbers(rows + 2),
                paged_kv_indptr_buf=numbers(rows + 2),
                paged_kv_indices_buf=numbers(most),
                paged_kv_last_page_len_buf=numbers(rows + 1),
                backend=backend if plain else "fa2",
            )
            self._kernels[kind] = _Planned(pool, kind, layers[0].num_heads, wrapper)

    def matches(self, spans: Sequence[Span]) -> bool:
        """Plan the rows; True where the plan has the layout of the first, which was recorded."""
        known = sum(span.end - span.start for span in spans)
        spare = Span(self.scratch_slot, 0, self.tokens - known, known)
        spans = [*spans, spare] if known < self.tokens else spans
        lengths, ends = _lengths(spans)
        pages = _pages(self._pool, spans, ends)
        missing = self.rows + 1 - len(lengths)
        lengths, ends = (np.pad(array, (0, missing)) for array in (lengths, ends))
        same = True
        for kind, kernel in self._kernels.items():
            info = kernel.plan(lengths, ends, pages)
            same &= info == self._infos.setdefault(kind, info)
        return same

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The layer's planned kernel."""
        queries = _padded(self._pool, queries)
        out = torch.empty_like(queries)
        self._kernels[self._kinds[layer]].run(layer, queries, keys, values, out)
        return out[..., : self._layers[layer].head_dim]


class RecordedAttention:
    """All rows of a recorded step through one planned kernel, those of one token too.

    FA2 cuts rows into parts while there is room for more than the tiles, some 33 of each key head.
    A row of one token takes a tile: beside twenty of them no row is cut, and the step waits for its
    longest.
    """

    def __init__(self, places: _Places) -> None:
        self._places = places

    def begin(self, rows: Rows) -> None:
        """Plan the rows."""
        self._places.matches(rows.spans)

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        """Plan the rows; True where the recording is one for them and does what the plan says."""
        return len(rows) <= self._places.rows and self._places.matches(rows)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planned kernel."""
        return self._places.attend(layer, queries, keys, values)

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> None:
        """Never: rows may be longer."""
        return None


class _Alone(RecordedAttention):
    """A few longer rows and no others, in FA3. It cuts none, so chunks of up to `ALONE` tokens that
    stand far behind their start are faster in FA2."""

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        short = self._places.tokens <= ALONE and any(row.start for row in rows)
        return not num_decode and not short and super().matches(rows, num_decode)


class _Apart(RecordedAttention):
    """A few longer rows in FA3, and rows of one token, which stand in front, in our kernel.

        tokens     d d d d | p p p p p p p p | f f f f
        planned    one row | the longer rows | one row     the first and last in the scratch page
        ours       d d d d | nothing to read   ...         over what was planned for them

    rows   of one token, at most
    """

    def __init__(self, places: _Places, decode: DecodeAttention, rows: int) -> None:
        super().__init__(places)
        self._decode = decode
        self._rows = rows
        self._slots = self._kv_lens = torch.empty(0)

    def begin(self, rows: Rows) -> None:
        """Plan the rows. Slots and lengths of the tokens in front are read where they are now."""
        self._slots, self._kv_lens = rows.slots[: self._rows], rows.kv_lens[: self._rows]
        super().begin(rows)

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        front = Span(self._places.scratch_slot, 0, num_decode, 0)
        there = 0 < num_decode <= self._rows
        return there and super().matches([front, *rows[num_decode:]], 0)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        out = super().attend(layer, queries, keys, values).contiguous()
        most = len(self._slots)
        self._decode.attend_into(out[:most], layer, queries[:most], self._slots, self._kv_lens)
        return out


def _padded(pool: KVPool, queries: torch.Tensor) -> torch.Tensor:
    missing = pool.shape.head_dim - queries.shape[-1]
    return pad(queries, (0, missing)) if missing else queries


def _lengths(spans: Sequence[Span]) -> tuple[Ints, Ints]:
    ends = np.array([span.end for span in spans], np.int32)
    return ends - np.array([span.start for span in spans], np.int32), ends


def _pages(pool: KVPool, spans: Sequence[Span], ends: Ints) -> torch.Tensor:
    """Pages of all rows behind each other, from the tables on the device."""
    counts = -(-ends // pool.block_size)
    firsts = np.array([span.slot for span in spans], np.int64) * pool.tables.shape[1]
    firsts -= np.cumsum(counts) - counts
    cells = np.arange(counts.sum(), dtype=np.int64) + np.repeat(firsts, counts)
    return pool.tables.view(-1)[_pinned(cells).to(pool.data.device, non_blocking=True)]


def _cumulated(counts: Ints) -> Ints:
    """0 and the running sums."""
    result: Ints = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=result[1:])
    return result


def _pinned(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
