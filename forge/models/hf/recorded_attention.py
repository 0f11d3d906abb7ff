"""Recorded attention: which kernels a recorded step of longer rows holds, and for which steps.

Owns the places that a graph reads and a plan fills. Knows no graph and no weights.

    a few longer rows alone             FA3     from their start; of more than 128 tokens anywhere
    a few, beside rows of one token     FA3     d d d d | p p p p p p | f f      the d are one row
      in more than 64 tokens            ours    d d d d | reads nothing          of the scratch page
    any rows                            FA2     d d d d | p p p p p p | f f

FA2 cuts rows into parts while there is room for more than they have tiles, some 33 of each key head
on an H200. A row of one token takes a tile: beside twenty of them no row is cut, and the step waits
for its longest. Our kernel cuts each row by its length (decode_attention.py). One H200, ms a step
of the 4B shape, FA2 for all and FA3 with ours: 488 tokens behind 1000 beside 24 rows of 1450 12.6
and 9.2, 104 tokens 7.5 and 5.9, 40 5.3 and 5.6. Alone, FA2 and FA3: 64 tokens from their start 3.4
and 3.2, 16 tokens behind 1000 3.2 and 3.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from forge.models.hf.attention import LayerSpec, Rotary, Rows, Span
from forge.models.hf.flashinfer_api import load_wrappers
from forge.models.hf.planned_attention import Kind, Planned, lengths_of, pages_of
from forge.models.hf.pool import KVPool

if TYPE_CHECKING:
    from forge.models.hf.decode_attention import DecodeAttention

FEW_ROWS = 4
"""Longer rows that `Alone` and `Apart` have, at most."""

ALONE, APART = 128, 64
"""Tokens of recordings up to which longer rows alone have to begin at their first position, and
above which rows of one token beside them are read apart."""


class Places:
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
        self._pool = pool
        self._kinds = [Kind.of(spec) for spec in layers]
        self.tokens = tokens
        self.rows = rows
        self.scratch_slot = pool.scratch_slot
        self._infos: dict[Kind, tuple[int, ...]] = {}
        device = pool.data.device
        # Rows may share pages, so it is the tables that say how many there can be.
        most = (rows + 1) * pool.tables.shape[1]

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._kernels = {}
        paged = load_wrappers().paged
        for kind in dict.fromkeys(self._kinds):
            plain = not kind.softcap and not kind.window
            wrapper = paged(
                workspace,
                "HND",
                use_cuda_graph=True,
                qo_indptr_buf=numbers(rows + 2),
                paged_kv_indptr_buf=numbers(rows + 2),
                paged_kv_indices_buf=numbers(most),
                paged_kv_last_page_len_buf=numbers(rows + 1),
                backend=backend if plain else "fa2",
            )
            self._kernels[kind] = Planned(pool, kind, layers[0].num_heads, wrapper)

    def matches(self, spans: Sequence[Span]) -> bool:
        """Plan the rows; True where the plan has the layout of the first, which was recorded."""
        known = sum(span.end - span.start for span in spans)
        spare = Span(self.scratch_slot, 0, self.tokens - known, known)
        spans = [*spans, spare] if known < self.tokens else spans
        lengths, ends = lengths_of(spans)
        pages = pages_of(self._pool, spans, ends)
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
        return self._kernels[self._kinds[layer]].attend(layer, queries, keys, values)


class RecordedAttention:
    """All rows of a recorded step through one planned kernel, those of one token too."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def begin(self, rows: Rows) -> None:
        """Plan the rows."""
        self._places.matches(rows.spans)

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        """Plan the rows; True where the recording is one for them and does what the plan says."""
        return self._fits(rows)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planned kernel."""
        return self._places.attend(layer, queries, keys, values)

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> None:
        """Never: rows may be longer."""
        return None

    def _fits(self, rows: Sequence[Span]) -> bool:
        return len(rows) <= self._places.rows and self._places.matches(rows)


class Alone(RecordedAttention):
    """A few longer rows and no others, in FA3. It cuts none, so chunks of up to `ALONE` tokens that
    stand far behind their start are faster in FA2."""

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        """Plan the rows, where these are such."""
        far = self._places.tokens <= ALONE and any(row.start for row in rows)
        return not num_decode and not far and self._fits(rows)


class Apart(RecordedAttention):
    """A few longer rows in FA3, and rows of one token, which stand in front, in our kernel.

    What FA3 does for the latter, one row in the scratch page, is overwritten. Behind them ours
    reads nothing, and leaves the outputs as they are.

    slots, kv_lens   [most] int32 on the device: of the first rows, what a replay finds there; 0
                     positions where a row is a longer one's
    """

    def __init__(
        self, places: Places, decode: DecodeAttention, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> None:
        super().__init__(places)
        self._decode = decode
        self._slots = slots
        self._kv_lens = kv_lens

    def matches(self, rows: Sequence[Span], num_decode: int) -> bool:
        """Plan the longer rows and one for all others, where there are few and some."""
        front = Span(self._places.scratch_slot, 0, num_decode, 0)
        there = 0 < num_decode <= len(self._slots)
        return there and self._fits([front, *rows[num_decode:]])

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planned kernel, and ours over what it has done for rows of one token."""
        out = super().attend(layer, queries, keys, values).contiguous()
        most = len(self._slots)
        self._decode.attend_into(out[:most], layer, queries[:most], self._slots, self._kv_lens)
        return out


def recordings(
    places: Callable[[int, str], Places],
    decode: DecodeAttention,
    tokens: int,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> tuple[RecordedAttention, ...]:
    """Attentions of the graphs of so many tokens; the first that matches a step is the one for it.

    places           for so many rows, by FA2 or FA3
    slots, kv_lens   as of Apart, of as many rows as a graph has at most
    """
    any_rows = RecordedAttention(places(len(slots), "fa2"))
    if tokens <= FEW_ROWS:
        return (any_rows,)
    alone = Alone(places(FEW_ROWS, "fa3"))
    if tokens <= APART:
        return alone, any_rows
    return alone, Apart(places(FEW_ROWS + 1, "fa3"), decode, slots, kv_lens), any_rows
