"""Steps recorded once and replayed: a CUDA graph for each size of a batch.

Owns the recordings and the sizes there are. Knows what Device computes, and nothing of how.

    decode     rows      1  2  3  4  5 ... 8  9 ........ 16 ... 256
               graph     1  2  4  4  8     8  16         16     256    the next size; then padding
    chunks     tokens    1 ... 16  17 ... 32 ... 257 ... 512           few long rows, or any
               graph     16        32            512

A step of some hundred small kernels is bound by launching them: 30 ms of host time where the device
needs 3. A graph is one launch. It reads what changes from fixed places (Device.inbox). A decode
graph holds the step from the fed-back token to the next draw; a chunk graph ends at the hidden
state, since its rows' lengths are nobody's constant. Padding lives in the scratch slot: it writes
to the scratch page, and nobody reads its draw.

Attention over chunks is planned by the host before each replay, outside of the graph: the plan
fills places that the graph reads. Where its layout differs from the recorded one the step runs
without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from forge.models.hf.attention import Attention, Rotary, Rows, Span
from forge.models.hf.batch import EMPTY, Batch
from forge.models.hf.device import Device, chunk_fields_of, fields_of
from forge.models.hf.progress import watched
from forge.seam import Row

CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
"""Tokens of the recorded chunks."""

VERIFIED_SIZES = tuple(
    sorted({*CHUNK_SIZES, 2, 4, 24, 48, 96, 160, 192, 224, 320, 384, 448, 576, 640, 768, 1024})
)
"""The same where rows have drafts: 64 rows of 5 tokens filled up to 512 would take half as long
again, and such a step comes with every round. Up to 4 tokens take the products of few rows."""

MANY_ROWS = 128
"""Most rows of a recorded chunk."""


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 128 and of 16 above, `most` included."""
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, most, 16), most}
    return sorted(size for size in sizes if size <= most)


def _fields(device: Device, size: int, count: int = 4) -> list[torch.Tensor]:
    """Where a graph of `size` tokens reads slots, positions, tokens and sources; a fifth says how
    many positions each row of one token reads, and 0 behind them."""
    return [device.inbox.buffer[i * size : (i + 1) * size] for i in range(count)]


class DecodeGraphs:
    """A graph for each number of rows of one token, all recorded when this is made."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._device = device
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        pool = None
        # The largest first: the others then fit into its memory.
        with watched("recording decode steps", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                fields = _fields(device, size)
                device.receive(EMPTY, fields_of(EMPTY, size, device.pool))
                device.decode(*fields)  # what compiles or allocates on first use does so now
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    ids, logits = device.decode(*fields)
                pool = graph.pool()
                self._graphs[size] = (graph, ids, logits)
                advance(1)

    def fits(self, batch: Batch, rows: Sequence[Row]) -> bool:
        """Every row is one token, a graph is large enough, and no row is a scored prompt's."""
        sampler = self._device.sampler
        return len(batch.tokens) == len(rows) <= self._sizes[-1] and not (
            sampler.scoring and any(sampler.scored(row) for row in rows)
        )

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of the rows, valid until the next run; the draws are in the outbox."""
        rows = len(batch.tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._device.receive(batch, fields_of(batch, size, self._device.pool))
        graph, ids, logits = self._graphs[size]
        graph.replay()
        return ids[:rows], logits[:rows]


class RecordedAttention(Attention, Protocol):
    """Attention over rows of any length that a graph has recorded."""

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        """Plan the rows; True where the recording does what the plan says.

        num_decode   rows at the front that have one token
        """
        ...


class Recorder(Protocol):
    """Kernels that rows of any length can be recorded with."""

    def recorders(
        self, tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> Sequence[RecordedAttention]:
        """Attentions for graphs of so many tokens; the largest are asked for first.

        Each has a graph of its own; the first that matches a step is the one for it.

        slots, kv_lens   [rows] int32, of as many rows as there may be: where a replay finds those
                         of rows of one token, and 0 positions behind them
        """
        ...

    def exercises(self, rotary: Rotary) -> Iterator[Callable[[], object]]:
        """Calls that use every form of its kernels, so that these are compiled."""
        ...


class _Chunk(NamedTuple):
    """A recorded step."""

    attention: RecordedAttention
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    hidden: torch.Tensor


class ChunkGraphs:
    """Steps of some hundred tokens in rows of any length, recorded up to the hidden state.

    sizes   tokens of the recordings
    """

    def __init__(self, device: Device, attention: Recorder, sizes: Sequence[int]) -> None:
        self._device = device
        self._sizes = sorted(sizes)
        self._chunks: dict[int, list[_Chunk]] = {}
        self._memory: tuple[int, int] | None = None
        with watched("recording chunks", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                *fields, kv_lens = _fields(device, size, 5)
                most = self._most(size)
                recorders = attention.recorders(size, fields[0][:most], kv_lens[:most])
                self._chunks[size] = [self._record(size, each, fields) for each in recorders]
                advance(1)

    def _most(self, size: int) -> int:
        return min(size, self._device.pool.num_slots, MANY_ROWS)

    def _record(
        self, size: int, attention: RecordedAttention, fields: Sequence[torch.Tensor]
    ) -> _Chunk:
        device, none = self._device, fields[0][:0]
        attention.begin(Rows((), 0, none, none))
        device.receive(EMPTY, chunk_fields_of(EMPTY, size, device.pool))
        device.hidden(attention, *fields)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            ids, hidden = device.hidden(attention, *fields)
        self._memory = graph.pool()
        return _Chunk(attention, graph, ids, hidden)

    def size(self, rows: int, tokens: int) -> int | None:
        """Tokens of the smallest recording that has room, or None."""
        for size in self._sizes[bisect_left(self._sizes, tokens) :]:
            if rows <= self._most(size):
                return size
        return None

    def run(
        self, spans: Sequence[Span], num_decode: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and hidden states of the rows, valid until the next run, or None: no graph fits."""
        chunks = self._chunks.get(size, ()) if len(spans) <= self._most(size) else ()
        for chunk in chunks:
            if chunk.attention.matches(spans, num_decode):
                chunk.graph.replay()
                return chunk.ids, chunk.hidden
        return None
