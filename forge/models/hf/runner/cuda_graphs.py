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
from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge.models.capture_sizes import MAX_MIXED_ROWS
from forge.models.hf.attention.interface import (
    AttentionMetadata,
    CapturableAttention,
    GraphAttention,
    RowSpan,
)
from forge.models.hf.progress import show_progress
from forge.models.hf.runner.input_batch import EMPTY_BATCH, InputBatch
from forge.models.hf.runner.model_runner import (
    ModelRunner,
    padded_mixed_fields,
    padded_token_fields,
)
from forge.seam import Row


def _graph_inputs(runner: ModelRunner, size: int, num_fields: int = 4) -> list[torch.Tensor]:
    """Where a graph of `size` tokens reads slots, positions, tokens and sources; a fifth says how
    many positions each row of one token reads, and 0 behind them."""
    return [runner.input_buffer.buffer[i * size : (i + 1) * size] for i in range(num_fields)]


class DecodeGraphs:
    """A graph for each number of rows of one token, all recorded when this is made."""

    def __init__(self, runner: ModelRunner, sizes: Sequence[int]) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        memory_pool = None
        # The largest first: the others then fit into its memory.
        with show_progress("recording decode steps", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                inputs = _graph_inputs(runner, size)
                runner.upload_inputs(
                    EMPTY_BATCH, padded_token_fields(EMPTY_BATCH, size, runner.kv_cache)
                )
                runner.run_decode(*inputs)  # what compiles or allocates on first use does so now
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory_pool):
                    input_ids, logits = runner.run_decode(*inputs)
                memory_pool = graph.pool()
                self._graphs[size] = (graph, input_ids, logits)
                advance(1)

    def can_replay(self, batch: InputBatch, rows: Sequence[Row]) -> bool:
        """Every row is one token, a graph is large enough, and no row is a scored prompt's."""
        sampler = self._runner.sampler
        return len(batch.tokens) == len(rows) <= self._sizes[-1] and not (
            sampler.prompt_logprob_slots
            and any(sampler.prompt_logprob_positions(row) for row in rows)
        )

    def replay(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of the rows, valid until the next run; the draws are in the outbox."""
        num_rows = len(batch.tokens)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._runner.upload_inputs(batch, padded_token_fields(batch, size, self._runner.kv_cache))
        graph, input_ids, logits = self._graphs[size]
        graph.replay()
        return input_ids[:num_rows], logits[:num_rows]


class _CapturedForward(NamedTuple):
    """A recorded step."""

    attention: GraphAttention
    graph: torch.cuda.CUDAGraph
    input_ids: torch.Tensor
    hidden: torch.Tensor


class MixedGraphs:
    """Steps of some hundred tokens in rows of any length, recorded up to the hidden state.

    sizes   tokens of the recordings
    """

    def __init__(
        self, runner: ModelRunner, capturable: CapturableAttention, sizes: Sequence[int]
    ) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._captured: dict[int, list[_CapturedForward]] = {}
        self._memory_pool: tuple[int, int] | None = None
        with show_progress("recording chunks", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                *inputs, kv_lens = _graph_inputs(runner, size, 5)
                max_rows = self._max_rows(size)
                attentions = capturable.build_graph_attentions(
                    size, inputs[0][:max_rows], kv_lens[:max_rows]
                )
                self._captured[size] = [self._capture(size, each, inputs) for each in attentions]
                advance(1)

    def _max_rows(self, size: int) -> int:
        return min(size, self._runner.kv_cache.num_slots, MAX_MIXED_ROWS)

    def _capture(
        self, size: int, attention: GraphAttention, inputs: Sequence[torch.Tensor]
    ) -> _CapturedForward:
        runner, no_rows = self._runner, inputs[0][:0]
        attention.plan(AttentionMetadata((), 0, no_rows, no_rows))
        runner.upload_inputs(EMPTY_BATCH, padded_mixed_fields(EMPTY_BATCH, size, runner.kv_cache))
        runner.run_forward(attention, *inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            input_ids, hidden = runner.run_forward(attention, *inputs)
        self._memory_pool = graph.pool()
        return _CapturedForward(attention, graph, input_ids, hidden)

    def padded_size(self, num_rows: int, num_tokens: int) -> int | None:
        """Tokens of the smallest recording that has room, or None."""
        for size in self._sizes[bisect_left(self._sizes, num_tokens) :]:
            if num_rows <= self._max_rows(size):
                return size
        return None

    def replay(
        self, spans: Sequence[RowSpan], num_decode_rows: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and hidden states of the rows, valid until the next run, or None: no graph fits."""
        captured = self._captured.get(size, ()) if len(spans) <= self._max_rows(size) else ()
        for candidate in captured:
            if candidate.attention.plan_replay(spans, num_decode_rows):
                candidate.graph.replay()
                return candidate.input_ids, candidate.hidden
        return None
