"""Sampler: forge.sampling for a batch of rows, on the device that holds the logits.

Owns the sampling state of each slot: its parameters on the host, its seed and temperature in
tables that a CUDA graph reads, and its token counts for penalties. Knows no plan, no KV cache and
no model. Rows that need only seed and temperature are sampled by gumbel.py from the same tables.

    logits ─ masks, allowed ids ─ bias ─ min_tokens ─ penalties ─ / T ─ top-k, top-p, min-p ─┐
      │                                                                                      │
      │                                                         tokens ◄─ argmax ─ + noise ◄─┘
      └─ NaN, +inf, all -inf, nothing allowed ─► status

On CUDA, rows that have filters alone are sampled by filters_triton.py from the logits as they are.
The others are sampled in chunks that fit into memory. One upload holds a chunk's parameters. The
order of operations, the ties and the noise are those of forge.sampling, in float64. In a chunk with
random rows a greedy row has scale 1 and noise times 0. A chunk of greedy rows alone has no filters
and no noise.
Always true: nothing here waits for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge import sampling
from forge.models.hf.buffers import int64_array, upload, upload_groups
from forge.models.hf.sampling.filters import (
    MAX_TOPK,
    Cuts,
    FilterParams,
    compute_gaps,
    find_cuts,
    kept_mask,
)
from forge.models.hf.sampling.gumbel import (
    MAX_CHUNK_LOGITS,
    draw_keys,
    gumbel_noise,
    purpose_offset,
)
from forge.models.hf.sampling.logit_adjustments import (
    AllowedTokens,
    ArrayT,
    LogitBias,
    MinTokens,
    TokenMasks,
    apply_allowed_tokens,
    apply_logit_bias,
    apply_min_tokens,
    apply_token_masks,
    collect_allowed_tokens,
    collect_logit_bias,
    collect_min_tokens,
    collect_token_masks,
)
from forge.models.hf.sampling.penalties import Penalties, PenaltyState
from forge.models.hf.sampling.slot_params import SamplingNumbers, SlotParams, build_slot_params
from forge.models.hf.sampling.status import (
    STATUS_NOTHING_ALLOWED,
    STATUS_OK,
    logits_status,
)
from forge.seam import Bind, Row


class DraftDistribution(NamedTuple):
    """Distributions that rows of a draft model sampled their drafts from: one tensor, many rows.

    rows    the row that each row of `probs` belongs to: an index into `Sampler.sample`'s rows, or
            a row of the batch in `ModelRunner.draft_distributions`
    probs   [len(rows), V] float64 on the device; probability of each token, after the filters
    """

    rows: Sequence[int]
    probs: Tensor


class SamplerOutput(NamedTuple):
    """Tokens of a batch of rows, on the device. Rows that were not sampled are uninitialized.

    tokens                [R] int64; 0 where the row failed
    status                [R] int8; STATUS_OK, or a status that `error_text` explains
    draft_distributions   distributions of rows whose token is a draft that rejection will test; at
                          most one entry for each chunk
    """

    tokens: Tensor
    status: Tensor
    draft_distributions: Sequence[DraftDistribution]


class ChunkRows(NamedTuple, Generic[ArrayT]):
    """Fields that each of a chunk's n rows has: numpy arrays on the host, tensors on the device.

    indices           [n]       int64; index of the row in the logits and rows given to the sampler
    numbers           [n * 5]   float64; the fields of SamplingNumbers, row after row
    slots             [n]       int64
    positions         [n]       int64; position of the token to sample, one past the row's inputs
    purpose_offsets   [n]       int64; gumbel.purpose_offset of `SlotParams.purpose`
    The slot's seed, the position and the purpose determine the key of a row's noise.
    """

    indices: ArrayT
    numbers: ArrayT
    slots: ArrayT
    positions: ArrayT
    purpose_offsets: ArrayT


class ChunkInputs(NamedTuple):
    """Parameters of a chunk's rows on the device, one field for each family of parameters."""

    rows: ChunkRows[Tensor]
    masks: TokenMasks[Tensor]
    allowed: AllowedTokens[Tensor]
    bias: LogitBias[Tensor]
    min_tokens: MinTokens[Tensor]
    penalties: Penalties[Tensor]


class SamplingChunk(NamedTuple):
    """Rows that are sampled together, n of them.

    rows          index of each row in the logits and rows given to `adjusted_chunks`
    slot_params   parameters of each row's slot
    inputs        parameters of each row on the device, with its mask, slot and position
    logits        [n, V] float64; logits after forge.sampling.process_logits. A copy that
                  `apply_filters` changes in place
    status        [n] int8; STATUS_OK, or why the row cannot be sampled: the raw logits have a NaN
                  or +inf, all are -inf, or masks and allowed ids leave no token
    max_top_k     most leading tokens whose order a row's filter needs; the size of the vocabulary
                  for top-p without top-k; 0: no row needs an order, and nothing is sorted
    is_random     some row is not greedy
    """

    rows: Sequence[int]
    slot_params: Sequence[SlotParams]
    inputs: ChunkInputs
    logits: Tensor
    status: Tensor
    max_top_k: int
    is_random: bool

    @property
    def has_filters(self) -> bool:
        """True where a row has top-k, top-p or min-p."""
        return any(state.has_filters for state in self.slot_params)

    @property
    def indices(self) -> Tensor:
        """`rows` on the device, int64 [n]."""
        return self.inputs.rows.indices

    @property
    def numbers(self) -> Tensor:
        """SamplingNumbers of each row on the device, float64 [n, 5]."""
        return self.inputs.rows.numbers.view(-1, len(SamplingNumbers._fields))


class Sampler:
    """Sampler of one device, with the sampling state of its slots.

    seeds          [num_slots + 1] int64; the 64 bits of each slot's seed
    temperatures   [num_slots + 1] float64; 0 is greedy
    The last entry of each is the scratch slot's, for rows that pad a batch; it stays greedy. Both
    are read by CUDA graphs: their addresses are fixed. Memory for penalties is allocated when a
    sequence first uses them: see PenaltyState.

    full_sampling_slots    slots that may have rows for `sample`; `is_temperature_only`
                           decides for a row
    penalty_slots          slots with penalties; a step with none of them needs no
                           `update_penalties`
    prompt_logprob_slots   slots that return log probabilities of their prompt
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_params: dict[int, SlotParams] = {}
        self.full_sampling_slots: set[int] = set()
        self.penalty_slots: set[int] = set()
        self.prompt_logprob_slots: set[int] = set()
        self._pending: dict[int, tuple[int, float]] = {}
        self._seed_temperature = torch.zeros(2, num_slots + 1, dtype=torch.int64, device=device)
        self.seeds = self._seed_temperature[0]
        self.temperatures = self._seed_temperature[1].view(torch.float64)
        self._penalties = PenaltyState(num_slots, vocab_size, device)

    def bind(self, slot: int, bind: Bind) -> None:
        """Give the slot to a new sequence.

        Its seed and temperature are copied to the device by the next `flush_seeds`.
        A sequence with penalties has its history uploaded and counted here: as prompt before
        prompt_len, then as output.
        """
        slot_params = self._slot_params[slot] = build_slot_params(bind, self._vocab_size)
        params = bind.params
        for slots, needed in (
            (self.full_sampling_slots, slot_params.temperature_only_from > 0),
            (self.penalty_slots, params.has_penalties),
            (self.prompt_logprob_slots, params.prompt_logprobs is not None),
        ):
            slots.discard(slot)
            if needed:
                slots.add(slot)
        self._pending[slot] = (bind.seed, 0.0 if params.greedy else params.temperature)
        self._penalties.bind(slot, bind)

    def slot_bind(self, slot: int) -> Bind:
        """Return the bind of the sequence in the slot."""
        return self._slot_params[slot].bind

    def prompt_logprob_positions(self, row: Row) -> range:
        """Return the positions of the prompt tokens that the row's logits score.

        The input at position p gives the log probability of the prompt token at p + 1, so they are
        in (row.start, row.end] and before prompt_len. Empty where the request returns none.
        """
        if row.slot not in self.prompt_logprob_slots:
            return range(0)
        return range(row.start + 1, min(row.end, self.slot_bind(row.slot).prompt_len - 1) + 1)

    def flush_seeds(self) -> None:
        """Copy seeds and temperatures of slots bound since the last flush, in one upload.

        Call it after the step's binds and before `gumbel_sample` or a graph reads the tables. Does
        nothing where no slot was bound.
        """
        if not self._pending:
            return
        seeds = np.array([seed for seed, _ in self._pending.values()], np.uint64).view(np.int64)
        temperatures = np.array(
            [temperatures for _, temperatures in self._pending.values()], np.float64
        ).view(np.int64)
        slots, bits = upload(
            self._device, int64_array(list(self._pending)), np.concatenate((seeds, temperatures))
        )
        self._seed_temperature.index_copy_(1, slots, bits.view(2, -1))
        self._pending.clear()

    def update_penalties(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """Count the rows' inputs for the slots that have penalties. Call it before sampling.

        rows     rows of the step, with or without penalties
        inputs   [tokens] or longer, integers on the device; ids of all rows' inputs, one row after
                 the other
        A position that was counted before, as history or as input, is not counted twice. Drafts
        are counted once a later row shows that they were accepted: see penalties.py.
        Cost: one upload, and up to two more with drafts. The number of kernels does not grow with
        the rows. Nothing is launched where no row has penalties.
        """
        self._penalties.update(rows, inputs)

    def is_temperature_only(self, row: Row) -> bool:
        """Return whether `gumbel_sample` is enough for the token after this row.

        If so, seed and temperature determine the token, and nothing else is returned for it. False
        also where the request returns log probabilities of its output, and where rejection needs
        the distribution of a draft.
        Compares the row's end with `SlotParams.temperature_only_from`. min_tokens applies up to a
        position; every other reason applies to the whole sequence. Masks are covered: a sequence
        with structured output is never temperature-only.
        """
        return row.end >= self._slot_params[row.slot].temperature_only_from

    def sample(
        self, logits: Tensor, rows: Sequence[Row], row_indices: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample the token after each row, as forge.sampling does.

        logits        [R, V] any float dtype; after the last position of each row; not changed
        rows          [R] row of each logits row; only the first of its masks is read
        row_indices   rows to sample, or None for all; token and status of the others are
                      uninitialized
        Flushes seeds first. Penalties use the counts of `update_penalties`, which goes first.
        A row that cannot be sampled fails alone, by its status. Temporary memory: under 1 GB for
        any R, without the draft distributions that are returned.
        """
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        status = torch.empty(len(rows), dtype=torch.int8, device=self._device)
        draft_distributions: list[DraftDistribution] = []
        remaining: Sequence[int] = range(len(rows)) if row_indices is None else row_indices
        if logits.is_cuda:
            filtered = [i for i in remaining if self._is_filtered_only(rows[i])]
            if filtered:
                self._sample_filtered(logits, rows, filtered, tokens, status)
                remaining = [i for i in remaining if not self._is_filtered_only(rows[i])]
        for chunk in self.adjusted_chunks(logits, rows, remaining):
            scores = chunk.logits
            if chunk.is_random:
                scores = self.apply_filters(chunk)
                draft_distributions += self._draft_distributions(chunk, scores)
                keys = self.draw_keys(chunk, chunk.inputs.rows.purpose_offsets)
                scores.add_(gumbel_noise(keys, scores.shape[1]).mul_(chunk.numbers[:, 1:2]))
            sampled = scores.argmax(1).masked_fill_(chunk.status != STATUS_OK, 0)
            tokens.index_copy_(0, chunk.indices, sampled)
            status.index_copy_(0, chunk.indices, chunk.status)
        return SamplerOutput(tokens, status, draft_distributions)

    def _is_filtered_only(self, row: Row) -> bool:
        return self._slot_params[row.slot].is_filtered_only(row.end)

    def _sample_filtered(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        row_indices: Sequence[int],
        tokens: Tensor,
        status: Tensor,
    ) -> None:
        """Write token and status of rows that have filters, and no adjustment of their logits."""
        # Triton is installed only where torch has CUDA.
        from forge.models.hf.sampling.filters_triton import filtered_sample_cuda

        self.flush_seeds()
        params = [self._slot_params[rows[index].slot] for index in row_indices]
        (inputs,) = upload_groups(
            self._device,
            collect_chunk_rows(row_indices, [rows[index] for index in row_indices], params),
        )
        sampled, sampled_status = filtered_sample_cuda(
            logits,
            inputs.indices,
            inputs.numbers.view(-1, len(SamplingNumbers._fields)),
            inputs.slots,
            inputs.positions,
            self.seeds,
            has_order=any(each.max_top_k for each in params),
            has_top_p=any(each.numbers.top_p < 1.0 for each in params),
        )
        tokens.index_copy_(0, inputs.indices, sampled.long())
        status.index_copy_(0, inputs.indices, sampled_status.to(status.dtype))

    def adjusted_chunks(
        self, logits: Tensor, rows: Sequence[Row], row_indices: Sequence[int]
    ) -> Iterator[SamplingChunk]:
        """Yield the rows of `row_indices` in chunks, after forge.sampling.process_logits.

        logits        [R, V] any float dtype; not changed
        rows          [R] row of each logits row; only the first of its masks is read
        row_indices   rows to yield, each in one chunk. Rows and chunks are in ascending order of
                      `SlotParams.max_top_k`
        Flushes seeds first. Temperature and filters are left to `apply_filters`.
        """
        self.flush_seeds()
        for chunk_rows in self._group_rows(rows, row_indices):
            slot_params = [self._slot_params[rows[index].slot] for index in chunk_rows]
            inputs = self._upload_inputs(
                chunk_rows, [rows[index] for index in chunk_rows], slot_params
            )
            adjusted = logits.index_select(0, inputs.rows.indices).double()
            status = logits_status(adjusted.amax(1))
            self._adjust_logits(adjusted, inputs)
            if inputs.allowed.rows.numel() or inputs.masks.rows.numel():
                nothing_allowed = (status == STATUS_OK) & (adjusted.amax(1) == -inf)
                status.masked_fill_(nothing_allowed, STATUS_NOTHING_ALLOWED)
            max_top_k = max(state.max_top_k for state in slot_params)
            is_random = any(state.numbers.noise_scale for state in slot_params)
            yield SamplingChunk(
                chunk_rows, slot_params, inputs, adjusted, status, max_top_k, is_random
            )

    def draw_keys(self, chunk: SamplingChunk, offsets: Tensor | int) -> Tensor:
        """Return the key of the noise for each row's next token, int64 [n] on the device.

        offsets   [n] int64, or one number for all rows; gumbel.purpose_offset of what the noise is
                  for: `chunk.inputs.rows.purpose_offsets` to sample, RESIDUAL after a rejection
        """
        seeds = self.seeds.index_select(0, chunk.inputs.rows.slots)
        return draw_keys(seeds, chunk.inputs.rows.positions, offsets)

    def _draft_distributions(self, chunk: SamplingChunk, logits: Tensor) -> list[DraftDistribution]:
        """Return the distributions of the chunk's rows that sample drafts for rejection.

        logits   [n, V] float64; after the filters, before the noise
        Greedy rows have none: their drafts are compared, not tested by rejection. Return one entry
        for all rows that have one, or no entry.
        """
        draft_rows = [
            draft_index
            for draft_index, state in enumerate(chunk.slot_params)
            if state.purpose == sampling.DRAFT
        ]
        if not draft_rows:
            return []
        (draft_index,) = upload(self._device, int64_array(draft_rows))
        return [
            DraftDistribution(
                [chunk.rows[i] for i in draft_rows], logits.index_select(0, draft_index).softmax(1)
            )
        ]

    def _group_rows(self, rows: Sequence[Row], row_indices: Sequence[int]) -> Iterator[list[int]]:
        """Yield row indices in groups that fit into memory and need the same kind of filter.

        Kinds: no order of tokens, torch.topk up to MAX_TOPK, and a sort of the vocabulary. Rows are
        in ascending order of `SlotParams.max_top_k`.
        """

        def order(at: int) -> int:
            return self._slot_params[rows[at].slot].max_top_k

        max_rows = max(1, MAX_CHUNK_LOGITS // self._vocab_size)
        by_order = sorted(row_indices, key=order)
        for _, group in groupby(by_order, key=lambda at: (order(at) > 0) + (order(at) > MAX_TOPK)):
            picks = list(group)
            for start in range(0, len(picks), max_rows):
                yield picks[start : start + max_rows]

    def _upload_inputs(
        self, chunk_rows: Sequence[int], rows: Sequence[Row], params: Sequence[SlotParams]
    ) -> ChunkInputs:
        """Collect every family of a chunk's parameters and copy them to the device in one transfer.

        chunk_rows   index of each row in the logits and rows given to `adjusted_chunks`
        rows         rows of the chunk
        params       parameters of each row's slot
        """
        size = self._vocab_size
        return ChunkInputs(
            *upload_groups(
                self._device,
                collect_chunk_rows(chunk_rows, rows, params),
                collect_token_masks(rows, size),
                collect_allowed_tokens(params, size),
                collect_logit_bias(params, size),
                collect_min_tokens(rows, params, size),
                self._penalties.collect(rows, params),
            )
        )

    def _adjust_logits(self, logits: Tensor, inputs: ChunkInputs) -> None:
        """Apply masks, allowed ids, bias, min_tokens and penalties in place, in that order.

        logits   [n, V] float64, contiguous
        """
        apply_token_masks(logits, inputs.masks)
        apply_allowed_tokens(logits, inputs.allowed)
        apply_logit_bias(logits, inputs.bias)
        apply_min_tokens(logits, inputs.min_tokens)
        self._penalties.apply(logits, inputs.penalties)

    def apply_filters(self, chunk: SamplingChunk) -> Tensor:
        """Divide the chunk's logits by temperature and set filtered tokens to -inf, in place.

        Filters: top-k, top-p and min-p. Call it once for a chunk.
        Return `chunk.logits`: [n, V] float64 by token id, with the values of
        forge.sampling.filter_logits.
        """
        x, numbers = chunk.logits, chunk.numbers
        inverse_temperature, _, top_k, top_p, max_gap = numbers.unbind(1)
        if chunk.has_filters:
            gaps = compute_gaps(x, inverse_temperature)
            if x.is_cuda:
                cuts = self._find_cuts_cuda(chunk)
            else:
                params = FilterParams(top_k, top_p, max_gap)
                cuts = find_cuts(gaps, params, chunk.max_top_k)
            x.masked_fill_(kept_mask(gaps, cuts).logical_not_(), -inf)
        return x.mul_(inverse_temperature[:, None])

    def _find_cuts_cuda(self, chunk: SamplingChunk) -> Cuts:
        # Triton is installed only where torch has CUDA.
        from forge.models.hf.sampling.filters_triton import find_cuts_cuda

        _, gaps, tokens = find_cuts_cuda(
            chunk.logits,
            torch.arange(len(chunk.rows), device=self._device),
            chunk.numbers,
            has_order=chunk.max_top_k > 0,
            has_top_p=any(state.numbers.top_p < 1.0 for state in chunk.slot_params),
        )
        return Cuts(gaps, tokens)


def collect_chunk_rows(
    chunk_rows: Sequence[int], rows: Sequence[Row], params: Sequence[SlotParams]
) -> ChunkRows[NDArray[Any]]:
    """Collect the fields that every row of a chunk has, on the host.

    chunk_rows   index of each row in the logits and rows given to `Sampler.adjusted_chunks`
    rows         rows of the chunk
    params       parameters of each row's slot
    """
    return ChunkRows(
        int64_array(chunk_rows),
        np.array([each.numbers for each in params], np.float64).reshape(-1),
        int64_array([row.slot for row in rows]),
        int64_array([row.end for row in rows]),
        int64_array([purpose_offset(each.purpose) for each in params]),
    )
