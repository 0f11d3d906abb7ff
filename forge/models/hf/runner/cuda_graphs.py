"""CUDA graphs of steps: one captured for each size of a batch, and replayed.

Owns the captured graphs and their sizes. Knows which method of ModelRunner it captures and nothing
of what that method computes.

    decode     rows      1  2  3  4  5 ... 8  9 ........ 16 ... 256
               graph     1  2  4  4  8     8  16         16     256    the next size; then padding
    mixed      tokens    1 ... 16  17 ... 32 ... 385 ... 512 ...       few long rows, or any
               graph     16        32            512

A step of some hundred small kernels is bound by launching them; a replay is one launch. Times:
wiki/Graphs.md. A graph reads everything that changes from fixed addresses (`input_buffer`). A
decode graph holds the step from the fed-back token to the next sample. A mixed graph ends at the
hidden states, since the rows that sample differ from step to step.

Always true: padding is in the scratch slot. It writes to the scratch block, and no step reads its
samples.

The host plans the attention of a mixed graph before each replay, outside of the graph. The plan
fills buffers that the graph reads. Where its layout differs from the captured one, the step runs
without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

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
    """Return the views of `input_buffer` that a graph of `size` tokens reads, [size] int32 each.

    In order: slots, positions, tokens and source rows. The fifth field of mixed graphs holds the
    positions that each row of one token reads, then zeros.
    """
    return [runner.input_buffer.buffer[i * size : (i + 1) * size] for i in range(num_fields)]


class DecodeGraphs:
    """CUDA graphs of steps whose rows have one token each, captured when this is made.

    sizes   rows of each graph
    """

    def __init__(self, runner: ModelRunner, sizes: Sequence[int]) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        memory_pool = None
        # The largest first: the others then fit into its memory.
        with show_progress("capturing decode graphs", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                inputs = _graph_inputs(runner, size)
                runner.upload_inputs(
                    EMPTY_BATCH, padded_token_fields(EMPTY_BATCH, size, runner.kv_cache)
                )
                runner.run_decode(*inputs)  # Kernels compile and allocate on their first run.
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory_pool):
                    input_ids, logits = runner.run_decode(*inputs)
                memory_pool = graph.pool()
                self._graphs[size] = (graph, input_ids, logits)
                advance(1)

    def can_replay(self, batch: InputBatch, rows: Sequence[Row]) -> bool:
        """Return whether a graph can run the batch.

        Every row has one token, a graph is large enough, and no row returns prompt log
        probabilities.
        """
        sampler = self._runner.sampler
        return len(batch.tokens) == len(rows) <= self._sizes[-1] and not (
            sampler.prompt_logprob_slots
            and any(sampler.prompt_logprob_positions(row) for row in rows)
        )

    def replay(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Upload the batch and replay the smallest graph with room for it.

        Return the input ids, int32 [R], and the logits, [R, V], valid until the next replay. Tokens
        and status are in `runner.output_buffer`.
        """
        num_rows = len(batch.tokens)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._runner.upload_inputs(batch, padded_token_fields(batch, size, self._runner.kv_cache))
        graph, input_ids, logits = self._graphs[size]
        graph.replay()
        return input_ids[:num_rows], logits[:num_rows]


class _CapturedForward(NamedTuple):
    """Captured graph of a mixed step, with its outputs.

    attention   attention whose buffers the graph reads
    input_ids   [size] int32
    hidden      [size, hidden_size]
    """

    attention: GraphAttention
    graph: torch.cuda.CUDAGraph
    input_ids: torch.Tensor
    hidden: torch.Tensor


class MixedGraphs:
    """CUDA graphs of steps with rows of any length, captured up to the hidden states.

    capturable   attention kernels that a graph can hold
    sizes        tokens of the graphs; each size has one graph for each kind of attention
    """

    def __init__(
        self, runner: ModelRunner, capturable: CapturableAttention, sizes: Sequence[int]
    ) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._captured: dict[int, list[_CapturedForward]] = {}
        self._memory_pool: tuple[int, int] | None = None
        with show_progress("capturing mixed graphs", len(self._sizes)) as advance:
            for size in reversed(self._sizes):
                *inputs, kv_lens = _graph_inputs(runner, size, 5)
                max_rows = min(size, runner.kv_cache.num_slots)
                attentions = capturable.build_graph_attentions(
                    size, inputs[0][:max_rows], kv_lens[:max_rows]
                )
                self._captured[size] = [self._capture(size, each, inputs) for each in attentions]
                advance(1)

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

    def padded_size(self, num_tokens: int) -> int | None:
        """Return the number of tokens of the smallest graph with room for the batch, or None."""
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(
        self, spans: Sequence[RowSpan], num_decode_rows: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Plan the rows and replay the first graph of `size` tokens that fits them.

        Return input ids, int32 [size], and hidden states, [size, hidden_size], valid until the next
        replay; or None, with nothing replayed, where no graph fits.
        """
        for candidate in self._captured.get(size, ()):
            if candidate.attention.plan_replay(spans, num_decode_rows):
                candidate.graph.replay()
                return candidate.input_ids, candidate.hidden
        return None


class CapturedGraphs(NamedTuple):
    """Graphs of a model; None where none were captured."""

    decode: DecodeGraphs | None = None
    mixed: MixedGraphs | None = None


NO_GRAPHS = CapturedGraphs()


def no_graphs() -> CapturedGraphs:
    """Return no graphs: each step runs as it is."""
    return NO_GRAPHS
