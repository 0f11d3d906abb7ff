"""ModelRunner: weights, KV cache and sampler of one device, and the order of a step's kernels.

Owns the order of operations of a step. Knows batches and their rows, not plans. A CUDA graph
captures `run_decode` whole, and `run_forward` for rows of any length. Inside a graph both read only
tensors whose address is fixed, and the host reads nothing from the device.

    input_buffer   arrays of this step          output_buffer   token and status of each row
       │                                                 ▲  │ of the step before, as next inputs
       └─► input ids ─► hidden ─► logits ─► sample ──────┘◄─┘
                          │
                          └─ keys and values in their blocks
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forge.models.hf.attention.interface import Attention, AttentionMetadata, RowSpan
from forge.models.hf.buffers import MAX_IN_FLIGHT, HostCopy, InputBuffer, Int32Array, OutputBuffer
from forge.models.hf.decoders.interface import ALL_TOKENS, Decoder, ForwardContext, TokenSelection
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.runner.input_batch import InputBatch
from forge.models.hf.runner.token_logprobs import (
    ScoredToken,
    compute_token_logprobs,
    max_packed_rows,
)
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.sampling.sampler import DraftDistribution, Sampler
from forge.models.hf.sampling.status import STATUS_NAN
from forge.seam import Bind, Row

PROMPT_LOGPROB_CHUNK = 256
"""Prompt positions whose logits are in memory at the same time."""


class PromptLogprobRow(NamedTuple):
    """Row of a batch that returns log probabilities of its prompt.

    batch_row       row of the batch
    positions       positions of the prompt's tokens that are scored
    token_indices   inputs of the batch whose hidden states give these scores
    bind            bind of the row's sequence
    """

    batch_row: int
    positions: range
    token_indices: Int32Array
    bind: Bind


class ForwardOutput(NamedTuple):
    """Hidden states of a batch, on the device. T tokens, R rows, N selected tokens.

    input_ids      [T] int32; with padding after them where a graph was replayed
    hidden         [N, hidden_size]; after the tokens of `logits_indices`
    slots          [R] int32
    ends           [R] int32; one past the last position of each row
    extra_arrays   int32 copies of the caller's `extra_arrays`
    slots, ends and extra_arrays are views of `input_buffer`, valid until the next upload. input_ids
    of a graph are valid until its next replay.
    """

    input_ids: torch.Tensor
    hidden: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    extra_arrays: Sequence[torch.Tensor]


class StepLogits(NamedTuple):
    """Logits of a batch, valid until the next batch is queued.

    logits       [n, V]
    batch_rows   [n] row of the batch that each of them belongs to
    """

    logits: torch.Tensor
    batch_rows: Sequence[int]


class ExecutedBatch(NamedTuple):
    """Results of a batch without drafts, on their way to the host, and its logits."""

    logprobs: list[PendingLogprobs]
    prompt_logprobs: list[PendingLogprobs]
    step_logits: StepLogits


class ForwardGraphs(Protocol):
    """Captured graphs of steps with rows of any length, up to the hidden states."""

    def padded_size(self, num_tokens: int) -> int | None:
        """Return the number of tokens of the smallest graph with room for the batch, or None."""
        ...

    def replay(
        self, spans: Sequence[RowSpan], num_decode_rows: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Plan the attention of these rows and replay a graph on the inputs in `input_buffer`.

        spans             rows of the batch
        num_decode_rows   rows at the front that have one token
        size              tokens of the graph, from `padded_size`; the inputs are padded to it
        Return input ids, int32 [size], and hidden states, [size, hidden_size], valid until the next
        replay. Return None, with nothing replayed, where no graph was captured for this layout.
        """
        ...


class ModelRunner:
    """Weights, KV cache and sampling state of one device, and the buffers to and from the host.

    decoder               model up to logits
    attention             attention kernels of `run_decode`, in a graph or without, and of batches
                          that no mixed graph runs
    input_buffer          inputs of a step, host to device; its addresses are fixed
    output_buffer         token and status of each row of the last batch
    draft_distributions   distributions that rows of the last batch sampled drafts from, for
                          rejection; `finish_sampling` appends to it, and HFModel empties it before
                          a batch
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        kv_cache: KVCache,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """Allocate the buffers of a runner.

        max_num_batched_tokens   most tokens of a step; it sizes `input_buffer`
        max_in_flight            batches that may be in flight; each has a host buffer for inputs
        """
        self.decoder = decoder
        self.attention = attention
        self.kv_cache = kv_cache
        self.sampler = sampler
        device = kv_cache.data.device
        # Rows that share a prefix list its blocks once each, so the tables' size is the limit.
        max_table_updates = 2 * kv_cache.block_tables.numel()
        # Numbers of a token: five fields, which padding may double, its logits index, three arrays
        # of verification, and two of a draft.
        max_token_numbers = 16 * max_num_batched_tokens
        self.input_buffer = InputBuffer(
            device, max_token_numbers + 8 * kv_cache.num_slots + max_table_updates, max_in_flight
        )
        self.output_buffer = OutputBuffer(device, kv_cache.num_slots)
        self.draft_distributions: list[DraftDistribution] = []

    def upload_inputs(
        self, batch: InputBatch, arrays: Sequence[NDArray[np.int32]]
    ) -> list[torch.Tensor]:
        """Copy arrays to the device and update the block tables, in one transfer.

        batch    its `table_indices` and `table_block_ids` are the updates of the block tables
        arrays   one-dimensional; they lie one after the other from the start of `input_buffer`
        Return a view of each array on the device, valid until the next call.
        """
        if not len(batch.table_indices):
            return self.input_buffer.copy_to_device(arrays)
        *views, table_indices, table_block_ids = self.input_buffer.copy_to_device(
            [*arrays, batch.table_indices, batch.table_block_ids]
        )
        self.kv_cache.block_tables.view(-1)[table_indices.long()] = table_block_ids
        return views

    def resolve_input_ids(self, tokens: torch.Tensor, source_rows: torch.Tensor) -> torch.Tensor:
        """Return the ids of all input tokens, int32 [T].

        tokens        [T] int32; ids that the host knows
        source_rows   [T] int32; row of the previous batch that sampled the token, or num_slots
                      where the host knows it
        Reads the previous tokens from `output_buffer`. Safe inside a CUDA graph.
        """
        num_slots = self.kv_cache.num_slots
        sampled = self.output_buffer.sampled[0][source_rows.clamp(max=num_slots - 1)]
        return torch.where(source_rows < num_slots, sampled, tokens)

    def run_decode(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        source_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows of one token each from input ids to samples. Plans `attention` itself.

        slots, positions, tokens, source_rows   [R] int32; R includes rows that pad the batch
        Return the input ids, int32 [R], and the logits, [R, V]. Token and status of row r are in
        `output_buffer.sampled[:, r]`, sampled from the slot table alone. Rows whose logits are
        adjusted go through `finish_sampling` afterwards.
        Safe inside a CUDA graph: no host read.
        """
        input_ids = self.resolve_input_ids(tokens, source_rows)
        slot_mapping = self.kv_cache.slot_mapping(slots, positions)
        ends = positions + 1
        self.attention.plan(AttentionMetadata((), len(input_ids), slots, ends))
        context = ForwardContext(self.kv_cache, self.attention, slot_mapping)
        logits = self.decoder.compute_logits(self.decoder.forward(input_ids, positions, context))
        self.sampler.sample_slots(
            logits,
            slots,
            ends,
            self.output_buffer.sampled[0, : len(input_ids)],
            self.output_buffer.sampled[1, : len(input_ids)],
        )
        return input_ids, logits

    def run_forward(
        self,
        attention: Attention,
        token_slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        source_rows: torch.Tensor,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens of rows of any length up to their hidden states.

        attention        attention whose `plan` was called for this step
        token_slots, positions, tokens, source_rows   [T] int32
        logits_indices   tokens whose hidden states are returned
        Return the input ids, int32 [T], and the hidden states, [N, hidden_size].
        Safe inside a CUDA graph where `attention` is.
        """
        input_ids = self.resolve_input_ids(tokens, source_rows)
        context = ForwardContext(
            self.kv_cache, attention, self.kv_cache.slot_mapping(token_slots, positions)
        )
        return input_ids, self.decoder.forward(input_ids, positions, context, logits_indices)

    def execute_model(
        self,
        batch: InputBatch,
        rows: Sequence[Row],
        graphs: ForwardGraphs | None,
        late_rows: Collection[int] = (),
    ) -> ExecutedBatch:
        """Run a batch of rows of any length without drafts, and sample.

        rows        rows of the plan, in the order of the batch
        graphs      captured graphs, or None to run without
        late_rows   rows of the batch that are sampled later: see late_rows.py
        Counts the inputs for penalties before it samples. Tokens and status of each row are in
        `output_buffer`.
        """
        prompt_logprob_rows = self.find_prompt_logprob_rows(batch, rows)
        last_tokens = batch.query_starts + batch.query_lens - 1
        logits_indices = np.concatenate(
            [last_tokens, *(each.token_indices for each in prompt_logprob_rows)], dtype=np.int32
        )
        ids, hidden, slots, ends, _ = self.forward_batch(batch, rows, graphs, logits_indices)
        self.update_penalties(rows, ids)
        prompt_logprobs = self.compute_prompt_logprobs(prompt_logprob_rows, hidden[len(rows) :])
        logprobs, step_logits = self._sample_last_tokens(
            rows, hidden[: len(rows)], slots, ends, late_rows
        )
        return ExecutedBatch(logprobs, prompt_logprobs, step_logits)

    def forward_batch(
        self,
        batch: InputBatch,
        rows: Sequence[Row],
        graphs: ForwardGraphs | None,
        logits_indices: Int32Array,
        extra_arrays: Sequence[Int32Array] = (),
        draft_tokens: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Upload a batch and run it up to the hidden states after the tokens `logits_indices`.

        rows             rows of the plan, one for each row of the batch
        graphs           captured graphs to replay where one fits, or None
        logits_indices   [N] indices among the batch's tokens
        extra_arrays     arrays that are copied to the device in the same transfer
        draft_tokens     [plans * slots] int32 on the device; tokens of the draft model, or None
                         where no input is one. `batch.draft_sources` indexes it
        Draft tokens are written into `input_buffer`, so a graph reads them too. Samples nothing.
        """
        ends = batch.starts + batch.query_lens
        columns = (batch.slots, batch.starts, ends, batch.query_starts)
        spans = [RowSpan(*span) for span in zip(*(each.tolist() for each in columns), strict=True)]
        size = len(batch.tokens)
        if graphs is not None:
            size = graphs.padded_size(size) or size
        num_decode_rows = batch.num_decode_rows
        arrays = (
            *padded_mixed_fields(batch, size, self.kv_cache),
            batch.slots,
            ends,
            logits_indices,
            *extra_arrays,
        )
        if draft_tokens is None:
            uploaded = self.upload_inputs(batch, arrays)
        else:
            *uploaded, draft_token_indices, draft_sources = self.upload_inputs(
                batch, (*arrays, batch.draft_token_indices, batch.draft_sources)
            )
            uploaded[2].index_copy_(
                0, draft_token_indices.long(), draft_tokens.index_select(0, draft_sources.long())
            )
        inputs, (slots, device_ends, device_logits_indices) = uploaded[:4], uploaded[5:8]
        replayed = graphs.replay(spans, num_decode_rows, size) if graphs is not None else None
        if replayed is not None:
            ids, hidden = replayed[0], replayed[1][device_logits_indices.long()]
        else:
            self.attention.plan(
                AttentionMetadata(
                    spans, num_decode_rows, slots[:num_decode_rows], device_ends[:num_decode_rows]
                )
            )
            token_slots, positions, tokens, source_rows = (
                each[: len(batch.tokens)] for each in inputs
            )
            ids, hidden = self.run_forward(
                self.attention,
                token_slots,
                positions,
                tokens,
                source_rows,
                device_logits_indices.long(),
            )
        return ForwardOutput(ids, hidden, slots, device_ends, uploaded[8:])

    def _sample_last_tokens(
        self,
        rows: Sequence[Row],
        hidden: torch.Tensor,
        slots: torch.Tensor,
        ends: torch.Tensor,
        late_rows: Collection[int],
    ) -> tuple[list[PendingLogprobs], StepLogits]:
        """Sample a token for each row that samples, and set every row's status.

        hidden        [R, hidden_size] after each row's last token. A NaN in a key or value that
                      attention reads for this token shows here. The row fails, sampled or not, and
                      its blocks are not cached
        slots, ends   [R] int32
        `Sampler.sample_slots` samples all of these rows, then `finish_sampling` does the rest.
        Return the log probabilities of the sampled tokens, where requests return them, and the
        logits of all rows that sample.
        """
        num_rows = len(rows)
        self.reset_outputs(hidden)
        sampling_rows = [index for index, row in enumerate(rows) if row.num_samples]
        if not sampling_rows:
            return [], StepLogits(hidden[:0], ())
        if len(sampling_rows) < num_rows:
            index = self.to_device(sampling_rows)
            hidden, slots, ends = hidden[index], slots[index], ends[index]
        logits = self.decoder.compute_logits(hidden)
        sampled = torch.zeros((2, len(sampling_rows)), dtype=torch.int32, device=logits.device)
        self.sampler.sample_slots(logits, slots, ends, sampled[0], sampled[1])
        if len(sampling_rows) < num_rows:
            self.output_buffer.sampled[:, index] = sampled
        else:
            self.output_buffer.sampled[:, :num_rows] = sampled
        logprobs = self.finish_sampling(logits, sampling_rows, rows, late_rows)
        return logprobs, StepLogits(logits, sampling_rows)

    def reset_outputs(self, hidden: torch.Tensor) -> None:
        """Clear `output_buffer` and set each row's status from its hidden state.

        hidden   [R, hidden_size] after each row's last token
        Status is STATUS_NAN where the hidden state has a NaN or inf, else STATUS_OK. Every token
        is 0.
        """
        self.output_buffer.sampled.zero_()
        self.output_buffer.sampled[1, : len(hidden)] = STATUS_NAN * (~torch.isfinite(hidden)).any(
            -1
        )

    def update_penalties(self, rows: Sequence[Row], input_ids: torch.Tensor) -> None:
        """Count the batch's inputs for rows with penalties. Does nothing where no row has any.

        rows        rows of the plan, in the order of the batch
        input_ids   [T] or longer, int32; ids of all rows' inputs
        """
        sampler = self.sampler
        if sampler.penalty_slots and any(row.slot in sampler.penalty_slots for row in rows):
            sampler.update_penalties(rows, input_ids)

    def finish_sampling(
        self,
        logits: torch.Tensor,
        logits_batch_rows: Sequence[int],
        rows: Sequence[Row],
        late_rows: Collection[int] = (),
    ) -> list[PendingLogprobs]:
        """Sample the rows whose logits are adjusted, and compute log probabilities.

        logits              [n, V]
        logits_batch_rows   [n] row of the batch for each row of the logits
        rows                rows of the plan, in the order of the batch
        late_rows           rows of the batch that are left out: `finish_rows` samples them later
        Call it after `Sampler.sample_slots`: tokens and status of adjusted rows in `output_buffer`
        are overwritten, and the distributions of drafts are appended to `draft_distributions`. Rows
        with num_samples 0 are skipped. Return the log probabilities of the sampled tokens, where
        requests return them, as one entry or none.
        """
        sampler = self.sampler
        if not sampler.adjusted_slots and not sampler.logprob_slots:
            return []
        # A captured graph samples for every row, also where the plan has no sample.
        sampling_rows = [
            (i, batch_row)
            for i, batch_row in enumerate(logits_batch_rows)
            if rows[batch_row].num_samples and batch_row not in late_rows
        ]
        return self.finish_rows(logits, sampling_rows, rows)

    def finish_rows(
        self,
        logits: torch.Tensor,
        sampling_rows: Sequence[tuple[int, int]],
        rows: Sequence[Row],
    ) -> list[PendingLogprobs]:
        """Do the work of `finish_sampling` for these rows, each with one sample.

        sampling_rows   row of the logits and row of the batch of each
        """
        sampler = self.sampler
        adjusted = [each for each in sampling_rows if sampler.is_adjusted(rows[each[1]])]
        if adjusted:
            self._sample_adjusted(logits, adjusted, rows)
        scored = [each for each in sampling_rows if rows[each[1]].slot in sampler.logprob_slots]
        if not scored:
            return []
        tokens = self.output_buffer.sampled[0, self.to_device([i for _, i in scored])].long()
        scored_tokens = [
            ScoredToken(logits_row, i, sampler.slot_bind(rows[i].slot).params)
            for logits_row, i in scored
        ]
        return compute_token_logprobs(sampler, self.to_device, logits, tokens, scored_tokens)

    def _sample_adjusted(
        self, logits: torch.Tensor, pairs: Sequence[tuple[int, int]], rows: Sequence[Row]
    ) -> None:
        """Sample the rows that need `Sampler.sample` into `output_buffer`.

        pairs   row of the logits and row of the batch of each
        """
        batch_rows = [batch_row for _, batch_row in pairs]
        output = self.sampler.sample(
            logits, [rows[each] for each in batch_rows], [i for i, _ in pairs]
        )
        self.output_buffer.sampled.index_copy_(1, self.to_device(batch_rows), output.sampled)
        for distribution_rows, probs in output.draft_distributions:
            self.draft_distributions.append(
                DraftDistribution([batch_rows[i] for i in distribution_rows], probs)
            )

    def find_prompt_logprob_rows(
        self, batch: InputBatch, rows: Sequence[Row]
    ) -> list[PromptLogprobRow]:
        """Return the rows whose inputs give log probabilities of their prompt.

        rows   rows of the plan, in the order of the batch
        """
        if not self.sampler.prompt_logprob_slots:
            return []
        found = []
        for batch_row, row in enumerate(rows):
            positions = self.sampler.prompt_logprob_positions(row)
            if positions:
                first_token = int(batch.query_starts[batch_row]) + positions[0] - 1 - row.start
                tokens: Int32Array = np.arange(
                    first_token, first_token + len(positions), dtype=np.int32
                )
                found.append(
                    PromptLogprobRow(batch_row, positions, tokens, self.sampler.slot_bind(row.slot))
                )
        return found

    def compute_prompt_logprobs(
        self, prompt_logprob_rows: Sequence[PromptLogprobRow], hidden: torch.Tensor
    ) -> list[PendingLogprobs]:
        """Compute the log probabilities of prompt tokens, PROMPT_LOGPROB_CHUNK positions at a time.

        hidden   [N, hidden_size] after `token_indices` of all rows, one row after the other
        Return one entry for each chunk, in order. A chunk has positions of one row.
        """
        pending: list[PendingLogprobs] = []
        first = 0
        for batch_row, positions, _, bind in prompt_logprob_rows:
            count = bind.params.prompt_logprobs or 0
            chunk = min(PROMPT_LOGPROB_CHUNK, max_packed_rows(count))
            for start in range(0, len(positions), chunk):
                part = positions[start : start + chunk]
                logits = self.decoder.compute_logits(hidden[first : first + len(part)])
                first += len(part)
                tokens = self.to_device([bind.history[p] for p in part])
                host_copy = HostCopy(self.sampler.compute_logprobs(logits, tokens, count))
                pending.append(
                    PendingLogprobs([batch_row] * len(part), [count] * len(part), host_copy)
                )
        return pending

    def to_device(self, values: Sequence[int]) -> torch.Tensor:
        """Return the integers as an int64 tensor on the runner's device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        device = self.kv_cache.data.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def invert_order(plan_rows: Sequence[int]) -> list[int]:
    """Return the row of the batch for each row of the plan: the inverse permutation.

    plan_rows   row of the plan for each row of the batch
    """
    batch_rows = [0] * len(plan_rows)
    for batch_row, plan_row in enumerate(plan_rows):
        batch_rows[plan_row] = batch_row
    return batch_rows


def padded_token_fields(
    batch: InputBatch, size: int, kv_cache: KVCache
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return slot, position, token and source row of each token, padded to `size`.

    Padding tokens are in the scratch slot at position 0, with id 0. Each array: [size] int32 on the
    host.
    """
    return (
        _pad(batch.token_slots, size, kv_cache.scratch_slot),
        _pad(batch.positions, size, 0),
        _pad(batch.tokens, size, 0),
        _pad(batch.source_rows, size, kv_cache.num_slots),
    )


def padded_mixed_fields(
    batch: InputBatch, size: int, kv_cache: KVCache
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return the arrays of `padded_token_fields`, and the KV lengths of the decode rows.

    The fifth array, [size] int32: number of positions that each decode row reads, its own included.
    Zeros after the decode rows.
    """
    kv_lens = batch.starts[: batch.num_decode_rows] + 1
    return (*padded_token_fields(batch, size, kv_cache), _pad(kv_lens, size, 0))


def _pad(array: Int32Array, size: int, fill_value: int) -> Int32Array:
    if len(array) == size:
        return array
    result: Int32Array = np.full(size, fill_value, np.int32)
    result[: len(array)] = array
    return result
