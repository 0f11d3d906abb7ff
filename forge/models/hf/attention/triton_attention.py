"""TritonAttention: paged attention on an NVIDIA GPU by two Triton kernels, without a plan.

Owns which rows each kernel takes, and the buffers of rows that a graph reads. Knows no weights.

    rows of one token     triton_decode.py    a long row is divided into splits
    longer rows           triton_prefill.py   any start, windows and soft caps
                          both write to one output, each its own rows

    captured graph        [ d d d d | p p p p p p | 0 0 ]   one for each size, for any rows
    slots, query_starts, kv_lens                            copied before each replay

Always true: the host sends rows and plans nothing, so a captured graph runs every step that its
buffers have room for. Nothing is compiled but what Triton compiles in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from forge.models.hf.attention.interface import AttentionMetadata, QKNormRope, RowSpan
from forge.models.hf.attention.triton_decode import DecodeAttention
from forge.models.hf.attention.triton_prefill import (
    PrefillAttention,
    PrefillRows,
    upload_prefill_rows,
)
from forge.models.hf.buffers import Int32Array, pin
from forge.models.hf.kv_cache import KVCache


class TritonAttention:
    """Attention of one model's layers by two kernels of the same KV cache."""

    def __init__(
        self, kv_cache: KVCache, prefill: PrefillAttention, decode: DecodeAttention
    ) -> None:
        self._kv_cache = kv_cache
        self._prefill = prefill
        self._decode = decode
        self._slots = self._kv_lens = kv_cache.block_tables[0, :0]
        self._prefill_rows: PrefillRows | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Copy the longer rows to the device."""
        self._slots, self._kv_lens = metadata.slots, metadata.kv_lens
        spans = metadata.spans[metadata.num_decode_rows :]
        device = self._kv_cache.data.device
        self._prefill_rows = upload_prefill_rows(spans, device) if spans else None

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run each kernel for its rows. Keys and values are read from their blocks."""
        queries = queries.contiguous()
        num_decode_rows = len(self._slots)
        out = torch.empty_like(queries)
        if self._prefill_rows is not None:
            self._prefill.attend_into(out, layer_index, queries, self._prefill_rows)
        if num_decode_rows:
            self._decode.attend_into(
                out[:num_decode_rows],
                layer_index,
                queries[:num_decode_rows],
                self._slots,
                self._kv_lens,
            )
        return out

    def attend_qkv(
        self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope
    ) -> torch.Tensor | None:
        """Run the fused decode kernel, where every row has one token; else return None."""
        if len(self._slots) != len(qkv):
            return None
        return self._decode.attend_qkv(layer_index, qkv, rope, self._slots, self._kv_lens)

    def warmup_calls(self, rope: QKNormRope) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every variant of both kernels."""
        # The largest kernels first: they compile the longest.
        yield from self._prefill.warmup_calls()
        yield from self._decode.warmup_calls(rope)

    def build_graph_attentions(
        self, num_tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> tuple[TritonGraphAttention]:
        """Return the one attention of graphs of `num_tokens` tokens: it takes any rows."""
        scratch_slot = self._kv_cache.scratch_slot
        return (TritonGraphAttention(self._prefill, self._decode, scratch_slot, slots, kv_lens),)


class TritonGraphAttention:
    """Attention of a captured graph, for as many rows as `slots` has room for.

    slots, kv_lens   [max rows] int32 on the device, at fixed addresses; slot and KV length of each
                     row of one token, 0 after them
    """

    def __init__(
        self,
        prefill: PrefillAttention,
        decode: DecodeAttention,
        scratch_slot: int,
        slots: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._scratch_slot = scratch_slot
        self._slots = slots
        self._kv_lens = kv_lens
        rows = torch.zeros(3, len(slots) + 1, dtype=torch.int32, device=slots.device)
        self._row_buffer = rows
        self._rows = PrefillRows(rows[0, :-1], rows[1], rows[2, :-1])

    def plan(self, metadata: AttentionMetadata) -> None:
        """Copy the rows to the graph's buffers, for capture."""
        self.plan_replay(metadata.spans, metadata.num_decode_rows)

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Copy the longer rows to the graph's buffers; return whether all rows have room."""
        if len(spans) > len(self._slots):
            return False
        numbers = prefill_row_numbers(
            spans[num_decode_rows:], num_decode_rows, len(self._slots), self._scratch_slot
        )
        host = pin(numbers) if self._slots.device.type == "cuda" else torch.from_numpy(numbers)
        self._row_buffer.copy_(host, non_blocking=True)
        return True

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run both kernels. Tokens that pad the graph have outputs of zero."""
        queries = queries.contiguous()
        out = torch.zeros_like(queries)
        max_rows = len(self._slots)
        self._prefill.attend_into(out, layer_index, queries, self._rows)
        self._decode.attend_into(
            out[:max_rows], layer_index, queries[:max_rows], self._slots, self._kv_lens
        )
        return out

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Return None: rows may have more than one token."""
        return None


def prefill_row_numbers(
    spans: Sequence[RowSpan], first_token: int, max_rows: int, scratch_slot: int
) -> Int32Array:
    """Return slots, query starts and KV lengths of the rows, [3, max_rows + 1].

    first_token   token of the first row; the others follow each other
    Rows after the last have no token, in the scratch slot.
    """
    numbers: Int32Array = np.zeros((3, max_rows + 1), np.int32)
    numbers[0] = scratch_slot
    for index, span in enumerate(spans):
        assert span.first_token == first_token, f"{span} does not begin at token {first_token}"
        numbers[:, index] = span.slot, first_token, span.end
        first_token += span.end - span.start
    numbers[1, len(spans) :] = first_token
    return numbers
