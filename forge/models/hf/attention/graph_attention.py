"""Attention inside captured graphs of mixed steps: which kernels a graph holds, and for which rows.

Owns the buffers that a graph reads and a plan fills. Knows no graph and no weights.

    PrefillGraphAttention   a few longer rows only, in up to 512 tokens
        FA3                 all rows; any start if the graph has more than 128 tokens, else start 0
    SplitGraphAttention     a few longer rows, and rows of one token, in more than 64 tokens
        FA3                 d d d d | p p p p p p | f f      d is one row of the scratch block
        decode kernel       d d d d | reads nothing
    MixedGraphAttention     any rows, in up to 1,024 tokens
        FA2                 d d d d | p p p p p p | f f      f are padding tokens

FA2 splits long rows only while it has free tiles, and each row of one token takes a tile. So it is
slow for a long row among many of one token. The decode kernel splits each row by its own length.
Measurements: wiki/Attention.md, "Longer rows"; bench/results/h200-recorded-qwen3-4b.json.

Always true: a graph is replayed only if the plan's layout equals the captured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forge.models.capture_sizes import (
    MAX_GRAPH_PREFILL_ROWS,
    MAX_MIXED_ROWS,
    MAX_MIXED_TOKENS,
    MIXED_CAPTURE_SIZES,
    NO_CONTEXT_MAX_TOKENS,
    SPLIT_DECODE_ABOVE_TOKENS,
    max_graph_prefill_rows,
)
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
    """Planned FlashInfer kernels of one graph.

    The graph reads the plan from buffers at fixed addresses.
    paged_wrapper   FlashInfer's class for attention over a paged KV cache
    num_tokens      tokens of the graph; padding tokens are one more row, in the scratch block
    max_rows        rows that the buffers have room for; unused rows are empty
    backend         "fa2" or "fa3", for layers without a window or a soft cap; others use FA2
    """

    def __init__(
        self,
        paged_wrapper: Any,
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
        # Rows may share blocks, so the tables' width bounds the indices, not the cache's size.
        max_kv_indices = (max_rows + 1) * kv_cache.block_tables.shape[1]

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._kernels = {}
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
        """Plan the rows; return whether the layout equals the first plan's, which was captured."""
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
        """Run the layer's planned kernel."""
        return self._kernels[self._plan_keys[layer_index]].attend(
            layer_index, queries, keys, values
        )


class MixedGraphAttention:
    """Attention of a graph that takes any rows, all of them in one planned kernel."""

    def __init__(self, kernels: GraphPrefillKernels) -> None:
        self._kernels = kernels

    def plan(self, metadata: AttentionMetadata) -> None:
        """Plan the rows, for capture."""
        self._kernels.plan_replay(metadata.spans)

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows; return whether this graph takes such rows and can run the plan."""
        return self._plan_rows(spans)

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer's planned kernel."""
        return self._kernels.attend(layer_index, queries, keys, values)

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Return None: rows may have more than one token."""
        return None

    def _plan_rows(self, spans: Sequence[RowSpan]) -> bool:
        return len(spans) <= self._kernels.max_rows and self._kernels.plan_replay(spans)


class PrefillGraphAttention(MixedGraphAttention):
    """Attention of a graph with a few longer rows and no others, in FA3.

    FA3 does not split rows. Graphs of up to `NO_CONTEXT_MAX_TOKENS` tokens take only rows that
    start at position 0: a chunk after a long context is faster in FA2.
    """

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows, where none has one token; return whether this graph can run the plan."""
        needs_context = self._kernels.num_tokens <= NO_CONTEXT_MAX_TOKENS and any(
            row.start for row in spans
        )
        return not num_decode_rows and not needs_context and self._plan_rows(spans)


class SplitGraphAttention(MixedGraphAttention):
    """Attention of a graph with a few longer rows in FA3, rows of one token in the decode kernel.

    FA3 sees the rows of one token as one row of the scratch block. The decode kernel overwrites its
    outputs. For the longer rows the decode kernel has KV length 0: it reads and writes nothing.

    slots, kv_lens    [max rows] int32 on the device, at fixed addresses; slot and KV length of each
                      row of one token, 0 after them
    min_decode_rows   fewest rows of one token that the graph takes
    """

    def __init__(
        self,
        kernels: GraphPrefillKernels,
        decode_attention: DecodeAttention,
        slots: torch.Tensor,
        kv_lens: torch.Tensor,
        min_decode_rows: int,
    ) -> None:
        super().__init__(kernels)
        self._decode_attention = decode_attention
        self._slots = slots
        self._kv_lens = kv_lens
        self._min_decode_rows = min_decode_rows

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the longer rows; return whether the graph has room and can run the plan."""
        decode_span = RowSpan(self._kernels.scratch_slot, 0, num_decode_rows, 0)
        has_room = self._min_decode_rows <= num_decode_rows <= len(self._slots)
        return has_room and self._plan_rows([decode_span, *spans[num_decode_rows:]])

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run FA3 for all tokens, then the decode kernel over the outputs of rows of one token."""
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
    """Return the attentions of graphs of `num_tokens` tokens, the first match first.

    build_kernels    builds the planned kernels of one graph from its rows and backend
    slots, kv_lens   [max rows] int32, as in SplitGraphAttention
    """
    is_small = num_tokens <= MIXED_CAPTURE_SIZES[-1]
    attentions: list[MixedGraphAttention] = []
    if MAX_GRAPH_PREFILL_ROWS < num_tokens and is_small:
        attentions.append(PrefillGraphAttention(build_kernels(MAX_GRAPH_PREFILL_ROWS, "fa3")))
    if num_tokens > SPLIT_DECODE_ABOVE_TOKENS:
        # One more row: to FA3, the rows of one token are a row.
        kernels = build_kernels(max_graph_prefill_rows(num_tokens) + 1, "fa3")
        min_decode_rows = 1 if is_small else 0
        attentions.append(
            SplitGraphAttention(kernels, decode_attention, slots, kv_lens, min_decode_rows)
        )
    if num_tokens <= MAX_MIXED_TOKENS:
        max_rows = min(len(slots), MAX_MIXED_ROWS)
        attentions.append(MixedGraphAttention(build_kernels(max_rows, "fa2")))
    return tuple(attentions)
