"""ModelRunner: everything one GPU (or CPU) holds, and how a batch runs through it.

Owns the order of operations of a step. Knows arrays, not plans. `run_decode` is the part that a
CUDA graph records: it reads only tensors that keep their place and never asks the host.

    inbox    what the host says of this step          outbox   tokens and status of each row
       │                                                 ▲  │ the step before, where a row names it
       └─► inputs ─► hidden ─► logits of the last ─► draw┘◄─┘
                       │
                       └─ keys and values in their pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forge.models.hf.attention.interface import Attention, AttentionMetadata, RowSpan
from forge.models.hf.buffers import MAX_IN_FLIGHT, HostCopy, InputBuffer, Int32Array, OutputBuffer
from forge.models.hf.decoders.interface import ALL_TOKENS, Decoder, ForwardContext, TokenSelection
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.runner.input_batch import InputBatch
from forge.models.hf.sampling.gumbel import gumbel_sample
from forge.models.hf.sampling.logprobs import PendingLogprobs, compute_logprobs
from forge.models.hf.sampling.sampler import DraftDistribution, Sampler
from forge.models.hf.sampling.status import STATUS_NAN
from forge.seam import Bind, Row

PROMPT_LOGPROB_CHUNK = 256
"""Prompt positions whose logits exist at the same time."""


class PromptLogprobRow(NamedTuple):
    """A row of the batch that gives log probabilities of its prompt.

    positions       of the prompt's tokens that are scored
    token_indices   of the batch, whose hidden states score them
    """

    batch_row: int
    positions: range
    token_indices: Int32Array
    bind: Bind


class ForwardOutput(NamedTuple):
    """Rows that have run up to their hidden states, on the device.

    input_ids      [tokens] of the batch
    hidden         [wanted, hidden]
    slots          [rows], and `ends`: one past the last position of each
    extra_arrays   arrays that were sent along
    """

    input_ids: torch.Tensor
    hidden: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    extra_arrays: Sequence[torch.Tensor]


class ForwardGraphs(Protocol):
    """Steps up to the hidden state that can be replayed."""

    def padded_size(self, num_rows: int, num_tokens: int) -> int | None:
        """Tokens of the smallest recording that has room, or None."""
        ...

    def replay(
        self, spans: Sequence[RowSpan], num_decode_rows: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and hidden states of rows whose fields stand in the inbox; None: not this time.

        num_decode_rows   rows at the front that have one token
        """
        ...


class ModelRunner:
    """Weights, pages, sampling state and the places through which numbers come and go.

    output_buffer         token and status of each row of the last batch, whether it asked for a
                          token or not
    draft_distributions   what rows of the last batch drew their drafts from, where that is judged
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
        """lanes   steps that may be in flight."""
        self.decoder = decoder
        self.attention = attention
        self.kv_cache = kv_cache
        self.sampler = sampler
        device = kv_cache.data.device
        # Rows that share a prefix name its blocks each, so the tables say how many there can be.
        max_table_updates = 2 * kv_cache.block_tables.numel()
        max_token_numbers = 16 * max_num_batched_tokens
        self.input_buffer = InputBuffer(
            device, max_token_numbers + 8 * kv_cache.num_slots + max_table_updates, max_in_flight
        )
        self.output_buffer = OutputBuffer(device, kv_cache.num_slots)
        self.draft_distributions: list[DraftDistribution] = []

    def upload_inputs(
        self, batch: InputBatch, arrays: Sequence[NDArray[np.int32]]
    ) -> list[torch.Tensor]:
        """The arrays are on the device and the batch's table changes are made. One transfer."""
        if not len(batch.table_indices):
            return self.input_buffer.copy_to_device(arrays)
        *views, table_indices, table_block_ids = self.input_buffer.copy_to_device(
            [*arrays, batch.table_indices, batch.table_block_ids]
        )
        self.kv_cache.block_tables.view(-1)[table_indices.long()] = table_block_ids
        return views

    def resolve_input_ids(self, tokens: torch.Tensor, source_rows: torch.Tensor) -> torch.Tensor:
        """[tokens] ids: known ones, and those that a row of the step before has sampled."""
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
        """Ids [rows] and logits [rows, vocabulary] of rows of one token; draws are in the outbox.

        Each argument: [rows] int32.
        """
        input_ids = self.resolve_input_ids(tokens, source_rows)
        slot_mapping = self.kv_cache.slot_mapping(slots, positions)
        ends = positions + 1
        self.attention.plan(AttentionMetadata((), len(input_ids), slots, ends))
        context = ForwardContext(self.kv_cache, self.attention, slot_mapping)
        logits = self.decoder.compute_logits(self.decoder.forward(input_ids, positions, context))
        self.gumbel_sample(
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
        """Ids [tokens] of rows of any length, whose `attention` has begun, and hidden [wanted]."""
        input_ids = self.resolve_input_ids(tokens, source_rows)
        context = ForwardContext(
            self.kv_cache, attention, self.kv_cache.slot_mapping(token_slots, positions)
        )
        return input_ids, self.decoder.forward(input_ids, positions, context, logits_indices)

    def execute_model(
        self, batch: InputBatch, rows: Sequence[Row], graphs: ForwardGraphs | None
    ) -> tuple[list[PendingLogprobs], list[PendingLogprobs]]:
        """Run rows of any length; scores of sampled tokens and of prompts where asked.

        rows     the plan's, in the batch's order
        graphs   steps that can be replayed, where one may fit
        """
        prompt_logprob_rows = self.find_prompt_logprob_rows(batch, rows)
        last_tokens = batch.query_starts + batch.query_lens - 1
        logits_indices = np.concatenate(
            [last_tokens, *(each.token_indices for each in prompt_logprob_rows)], dtype=np.int32
        )
        ids, hidden, slots, ends, _ = self.forward_batch(batch, rows, graphs, logits_indices)
        self.update_penalties(batch, rows, ids)
        prompt_logprobs = self.compute_prompt_logprobs(prompt_logprob_rows, hidden[len(rows) :])
        return self._sample_last_tokens(rows, hidden[: len(rows)], slots, ends), prompt_logprobs

    def forward_batch(
        self,
        batch: InputBatch,
        rows: Sequence[Row],
        graphs: ForwardGraphs | None,
        logits_indices: Int32Array,
        extra_arrays: Sequence[Int32Array] = (),
        draft_tokens: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Run rows of any length up to the hidden states behind the tokens `logits_indices`.

        extra_arrays   arrays that go to the device in the same transfer
        draft_tokens   what the draft model has drawn, flat, as batch.drawn counts it
        """
        ends = batch.starts + batch.query_lens
        columns = (batch.slots, batch.starts, ends, batch.query_starts)
        spans = [RowSpan(*span) for span in zip(*(each.tolist() for each in columns), strict=True)]
        size = len(batch.tokens)
        if graphs is not None:
            size = graphs.padded_size(len(rows), size) or size
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
        self, rows: Sequence[Row], hidden: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> list[PendingLogprobs]:
        """Draw for rows that ask for a token; every row leaves a status.

        hidden        [rows, hidden] of each row's last token. It has seen all that the row has, so
                      a number in it that is not finite tells of one anywhere: such a row must not
                      pass on its pages, sampled from or not
        slots, ends   [rows] int32
        """
        num_rows = len(rows)
        self.reset_outputs(hidden)
        sampling_rows = [index for index, row in enumerate(rows) if row.num_samples]
        if not sampling_rows:
            return []
        if len(sampling_rows) < num_rows:
            index = self.to_device(sampling_rows)
            hidden, slots, ends = hidden[index], slots[index], ends[index]
        logits = self.decoder.compute_logits(hidden)
        drawn = torch.zeros((2, len(sampling_rows)), dtype=torch.int32, device=logits.device)
        self.gumbel_sample(logits, slots, ends, drawn[0], drawn[1])
        if len(sampling_rows) < num_rows:
            self.output_buffer.sampled[:, index] = drawn
        else:
            self.output_buffer.sampled[:, :num_rows] = drawn
        return self.resample(logits, sampling_rows, rows)

    def reset_outputs(self, hidden: torch.Tensor) -> None:
        """Each row's status says whether the hidden state of its last token is finite. No token."""
        self.output_buffer.sampled.zero_()
        self.output_buffer.sampled[1, : len(hidden)] = STATUS_NAN * (~torch.isfinite(hidden)).any(
            -1
        )

    def update_penalties(
        self, batch: InputBatch, rows: Sequence[Row], input_ids: torch.Tensor
    ) -> None:
        """The inputs are counted for rows with penalties."""
        sampler = self.sampler
        if sampler.penalty_slots and any(row.slot in sampler.penalty_slots for row in rows):
            sampler.update_penalties(rows, input_ids)

    def resample(
        self, logits: torch.Tensor, logits_batch_rows: Sequence[int], rows: Sequence[Row]
    ) -> list[PendingLogprobs]:
        """Rows that ask for more than a plain draw are drawn again; scores where asked.

        logits              [len(sampled), vocabulary]
        logits_batch_rows   row of the batch for each row of the logits
        """
        sampler = self.sampler
        if not sampler.full_sampling_slots:
            return []
        # A recorded step draws for every row, also where the plan asks for no token.
        sampling_rows = [
            (i, rows[logprob_index])
            for i, logprob_index in enumerate(logits_batch_rows)
            if rows[logprob_index].num_samples
        ]
        full_rows = [i for i, row in sampling_rows if not sampler.is_temperature_only(row)]
        if not full_rows:
            return []
        output_index = self.to_device([logits_batch_rows[i] for i in full_rows])
        full_logits = logits[self.to_device(full_rows)]
        full_plan_rows = [rows[logits_batch_rows[i]] for i in full_rows]
        output = sampler.sample(full_logits, full_plan_rows)
        self.output_buffer.sampled[0, output_index] = output.tokens.to(torch.int32)
        self.output_buffer.sampled[1, output_index] = output.status.to(torch.int32)
        for distribution_rows, probs in output.draft_distributions:
            self.draft_distributions.append(
                DraftDistribution(
                    [logits_batch_rows[full_rows[i]] for i in distribution_rows], probs
                )
            )
        num_logprobs = [sampler.slot_bind(row.slot).params.logprobs for row in full_plan_rows]
        logprob_rows = [i for i, count in enumerate(num_logprobs) if count is not None]
        if not logprob_rows:
            return []
        logprob_index = self.to_device(logprob_rows)
        counts = [num_logprobs[i] or 0 for i in logprob_rows]
        packed = compute_logprobs(
            full_logits[logprob_index], output.tokens[logprob_index], max(counts)
        )
        return [
            PendingLogprobs(
                [logits_batch_rows[full_rows[i]] for i in logprob_rows], counts, HostCopy(packed)
            )
        ]

    def gumbel_sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        ends: torch.Tensor,
        tokens: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Write the plain draw of each line of logits, and its status. All but logits: [lines]."""
        seeds, temperatures = self.sampler.seeds, self.sampler.temperatures
        gumbel_sample(logits, slots, ends, seeds, temperatures, tokens, status)

    def find_prompt_logprob_rows(
        self, batch: InputBatch, rows: Sequence[Row]
    ) -> list[PromptLogprobRow]:
        """Rows that give log probabilities of their prompt."""
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
        """Scores of the prompt's own tokens, some hundred positions of logits at a time."""
        pending: list[PendingLogprobs] = []
        first = 0
        for batch_row, positions, _, bind in prompt_logprob_rows:
            count = bind.params.prompt_logprobs or 0
            for start in range(0, len(positions), PROMPT_LOGPROB_CHUNK):
                part = positions[start : start + PROMPT_LOGPROB_CHUNK]
                logits = self.decoder.compute_logits(hidden[first : first + len(part)])
                first += len(part)
                tokens = self.to_device([bind.history[p] for p in part])
                host_copy = HostCopy(compute_logprobs(logits, tokens, count))
                pending.append(
                    PendingLogprobs([batch_row] * len(part), [count] * len(part), host_copy)
                )
        return pending

    def to_device(self, values: Sequence[int]) -> torch.Tensor:
        """The numbers as int64 on the device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        device = self.kv_cache.data.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def invert_order(plan_rows: Sequence[int]) -> list[int]:
    """Where each row of the plan stands in the batch."""
    batch_rows = [0] * len(plan_rows)
    for batch_row, plan_row in enumerate(plan_rows):
        batch_rows[plan_row] = batch_row
    return batch_rows


def padded_token_fields(
    batch: InputBatch, size: int, kv_cache: KVCache
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Slot, position, token and source of each token, filled up to `size` with scratch tokens."""
    return (
        _pad(batch.token_slots, size, kv_cache.scratch_slot),
        _pad(batch.positions, size, 0),
        _pad(batch.tokens, size, 0),
        _pad(batch.source_rows, size, kv_cache.num_slots),
    )


def padded_mixed_fields(
    batch: InputBatch, size: int, kv_cache: KVCache
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:
    """The same, and positions that each row of one token reads: these stand first, 0 behind."""
    kv_lens = batch.starts[: batch.num_decode_rows] + 1
    return (*padded_token_fields(batch, size, kv_cache), _pad(kv_lens, size, 0))


def _pad(array: Int32Array, size: int, fill_value: int) -> Int32Array:
    if len(array) == size:
        return array
    result: Int32Array = np.full(size, fill_value, np.int32)
    result[: len(array)] = array
    return result
