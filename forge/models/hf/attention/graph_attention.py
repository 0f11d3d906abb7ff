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

from forge.models.capture_sizes import (
    MAX_GRAPH_PREFILL_ROWS,
    NO_CONTEXT_MAX_TOKENS,
    SPLIT_DECODE_ABOVE_TOKENS,
)
from forge.models.hf.attention.flashinfer_api import load_wrappers
from forge.models.hf.attention.flashinfer_prefill import (
    PagedPrefill,
    PlanKey,
    paged_kv_indices,
    query_and_kv_lens,
)
from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope, RowSpan
from forge.models.hf.kv_cache import KVCache

if TYPE_CHECKING:
    from forge.models.hf.attention.triton_decode import DecodeAttention


class GraphPrefillKernels:
    """Planned kernels of one recording, in whose places a graph reads what the host has planned.

    num_tokens   of the graph; those that fill it are one row more, in the scratch page
    max_rows     that it has places for; where there are fewer the others are empty
    backend      of layers without a window or a soft cap, which only FA2 has
    """

    def __init__(
        self,
        kv_cache: KVCache,
        layers: Sequence[LayerSpec],
        workspace: torch.Tensor,
        num_tokens: int,
        max_rows: int,
        backend: str,
    ) -> None:
        self._kv_cache = kv_cache
        self._plan_keys = [PlanKey.from_layer(spec) for spec in layers]
        self.num_tokens = num_tokens
        self.max_rows = max_rows
        self.scratch_slot = kv_cache.scratch_slot
        self._captured_plans: dict[PlanKey, tuple[int, ...]] = {}
        device = kv_cache.data.device
        # Rows may share pages, so it is the tables that say how many there can be.
        max_kv_indices = (max_rows + 1) * kv_cache.block_tables.shape[1]

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._kernels = {}
        paged_wrapper = load_wrappers().paged
        for key in dict.fromkeys(self._plan_keys):
            full_attention = not key.softcap and not key.window
            wrapper = paged_wrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                qo_indptr_buf=numbers(max_rows + 2),
                paged_kv_indptr_buf=numbers(max_rows + 2),
                paged_kv_indices_buf=numbers(max_kv_indices),
                paged_kv_last_page_len_buf=numbers(max_rows + 1),
                backend=backend if full_attention else "fa2",
            )
            self._kernels[key] = PagedPrefill(kv_cache, key, layers[0].num_heads, wrapper)

    def plan_replay(self, spans: Sequence[RowSpan]) -> bool:
        """Plan the rows; True where the plan has the layout of the first, which was recorded."""
        num_row_tokens = sum(span.end - span.start for span in spans)
        padding_span = RowSpan(
            self.scratch_slot, 0, self.num_tokens - num_row_tokens, num_row_tokens
        )
        spans = [*spans, padding_span] if num_row_tokens < self.num_tokens else spans
        query_lens, kv_lens = query_and_kv_lens(spans)
        kv_indices = paged_kv_indices(self._kv_cache, spans, kv_lens)
        num_empty_rows = self.max_rows + 1 - len(query_lens)
        query_lens, kv_lens = (
            np.pad(array, (0, num_empty_rows)) for array in (query_lens, kv_lens)
        )
        is_same_layout = True
        for key, kernel in self._kernels.items():
            layout = kernel.plan(query_lens, kv_lens, kv_indices)
            is_same_layout &= layout == self._captured_plans.setdefault(key, layout)
        return is_same_layout

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The layer's planned kernel."""
        return self._kernels[self._plan_keys[layer_index]].attend(
            layer_index, queries, keys, values
        )


class MixedGraphAttention:
    """All rows of a recorded step through one planned kernel, those of one token too."""

    def __init__(self, kernels: GraphPrefillKernels) -> None:
        self._kernels = kernels

    def plan(self, metadata: AttentionMetadata) -> None:
        """Plan the rows."""
        self._kernels.plan_replay(metadata.spans)

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows; True where the recording is one for them and does what the plan says."""
        return self._plan_rows(spans)

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planned kernel."""
        return self._kernels.attend(layer_index, queries, keys, values)

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Never: rows may be longer."""
        return None

    def _plan_rows(self, spans: Sequence[RowSpan]) -> bool:
        return len(spans) <= self._kernels.max_rows and self._kernels.plan_replay(spans)


class PrefillGraphAttention(MixedGraphAttention):
    """A few longer rows and no others, in FA3. It cuts none, so chunks of up to
    `NO_CONTEXT_MAX_TOKENS` tokens that stand far behind their start are faster in FA2."""

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows, where these are such."""
        needs_context = self._kernels.num_tokens <= NO_CONTEXT_MAX_TOKENS and any(
            row.start for row in spans
        )
        return not num_decode_rows and not needs_context and self._plan_rows(spans)


class SplitGraphAttention(MixedGraphAttention):
    """A few longer rows in FA3, and rows of one token, which stand in front, in our kernel.

    What FA3 does for the latter, one row in the scratch page, is overwritten. Behind them ours
    reads nothing, and leaves the outputs as they are.

    slots, kv_lens   [most] int32 on the device: of the first rows, what a replay finds there; 0
                     positions where a row is a longer one's
    """

    def __init__(
        self,
        kernels: GraphPrefillKernels,
        decode_attention: DecodeAttention,
        slots: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> None:
        super().__init__(kernels)
        self._decode_attention = decode_attention
        self._slots = slots
        self._kv_lens = kv_lens

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the longer rows and one for all others, where there are few and some."""
        decode_span = RowSpan(self._kernels.scratch_slot, 0, num_decode_rows, 0)
        has_decode_rows = 0 < num_decode_rows <= len(self._slots)
        return has_decode_rows and self._plan_rows([decode_span, *spans[num_decode_rows:]])

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planned kernel, and ours over what it has done for rows of one token."""
        out = super().attend(layer_index, queries, keys, values).contiguous()
        max_decode_rows = len(self._slots)
        self._decode_attention.attend_into(
            out[:max_decode_rows],
            layer_index,
            queries[:max_decode_rows],
            self._slots,
            self._kv_lens,
        )
        return out


def build_graph_attentions(
    build_kernels: Callable[[int, str], GraphPrefillKernels],
    decode_attention: DecodeAttention,
    num_tokens: int,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> tuple[MixedGraphAttention, ...]:
    """Attentions of the graphs of so many tokens; the first that matches a step is the one for it.

    build_kernels    for so many rows, by FA2 or FA3
    slots, kv_lens   as of Apart, of as many rows as a graph has at most
    """
    mixed = MixedGraphAttention(build_kernels(len(slots), "fa2"))
    if num_tokens <= MAX_GRAPH_PREFILL_ROWS:
        return (mixed,)
    prefill_only = PrefillGraphAttention(build_kernels(MAX_GRAPH_PREFILL_ROWS, "fa3"))
    if num_tokens <= SPLIT_DECODE_ABOVE_TOKENS:
        return prefill_only, mixed
    return (
        prefill_only,
        SplitGraphAttention(
            build_kernels(MAX_GRAPH_PREFILL_ROWS + 1, "fa3"), decode_attention, slots, kv_lens
        ),
        mixed,
    )
