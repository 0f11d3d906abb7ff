"""Sampler: forge.sampling for a batch of rows, on the device that holds the logits.

Owns the sampling state of each slot: its parameters on the host, those that a CUDA graph reads in a
table on the device, and its token counts for penalties. Knows no plan, no KV cache and no model.

    sample_slots   greedy, temperature, top-k, top-p, min-p: from the slot table alone, so a CUDA
                   graph holds it
    sample         all of this order: rows whose logits are adjusted, and drafts under rejection

    logits ─ masks, allowed ids ─ bias ─ min_tokens ─ penalties ─ / T ─ top-k, top-p, min-p ─┐
      │                                                                                      │
      │                                                         tokens ◄─ argmax ─ + noise ◄─┘
      └─ NaN, +inf, all -inf, nothing allowed ─► status

On CUDA both are the kernels of sample.cu. Where rejection needs whole distributions, and on a CPU,
rows are sampled in plain torch, in chunks that fit into memory. One upload holds a chunk's
parameters. In a chunk with random rows a greedy row has scale 1 and noise times 0.
Always true: nothing here waits for a CUDA device, unless logits are float64, which have no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge import sampling
from forge.models.hf.buffers import int64_array, upload, upload_groups
from forge.models.hf.sampling.adjusted_chunks import SamplingChunk, build_chunk, group_rows
from forge.models.hf.sampling.filters import FilterParams, compute_gaps, find_cuts, kept_mask
from forge.models.hf.sampling.gumbel import MAX_CHUNK_LOGITS, draw_keys, gumbel_noise
from forge.models.hf.sampling.logit_adjustments import (
    ArrayT,
    apply_min_tokens,
    collect_min_tokens,
    round_single,
)
from forge.models.hf.sampling.logprobs import compute_listed_logprobs, compute_logprobs
from forge.models.hf.sampling.penalties import PenaltyState
from forge.models.hf.sampling.row_adjustments import collect_row_adjustments
from forge.models.hf.sampling.slot_params import SamplingNumbers, SlotParams, build_slot_params
from forge.models.hf.sampling.slot_sampling import (
    NUM_SLOT_FIELDS,
    build_slot_entry,
    create_slot_table,
    sample_slots,
)
from forge.models.hf.sampling.status import STATUS_OK
from forge.request import MAX_FAST_LOGPROBS
from forge.seam import Bind, Row

if TYPE_CHECKING:
    from forge.models.hf.sampling.sample_cuda import SampleKernels

MAX_FUSED_LOGITS = 1 << 26
"""Logits that the kernels adjust at once: 256 MB in single precision. Two parts may be alive."""


class DraftDistribution(NamedTuple):
    """Distributions that rows of a draft model sampled their drafts from: one tensor, many rows.

    rows    the row that each row of `probs` belongs to: an index into `Sampler.sample`'s rows, or
            a row of the batch in `ModelRunner.draft_distributions`
    probs   [len(rows), V] float64 on the device; probability of each token, after the filters
    """

    rows: Sequence[int]
    probs: Tensor


class RowIndices(NamedTuple, Generic[ArrayT]):
    """Indices of m rows, on the host or on the device.

    logits_rows           [m] int64; row of the logits
    slots_and_positions   [m] int64, the bits of 2 * m int32: m slots, then the positions of the
                          tokens to sample
    """

    logits_rows: ArrayT
    slots_and_positions: ArrayT

    @staticmethod
    def collect(logits_rows: Sequence[int], rows: Sequence[Row]) -> RowIndices[NDArray[Any]]:
        """Collect the fields of these rows on the host."""
        numbers = [*(row.slot for row in rows), *(row.end for row in rows)]
        return RowIndices(
            int64_array(logits_rows),
            np.array(numbers, np.int32).view(np.int64),
        )


class SamplerOutput(NamedTuple):
    """Tokens of n rows, on the device.

    sampled               [2, n] int32; token and status of each row. The token is 0 where the row
                          failed; the status is STATUS_OK, or one that `error_text` explains
    draft_distributions   distributions of rows whose token is a draft that rejection will test; at
                          most one entry for each chunk
    """

    sampled: Tensor
    draft_distributions: Sequence[DraftDistribution]

    @property
    def tokens(self) -> Tensor:
        """Token of each row, int32 [n]."""
        return self.sampled[0]

    @property
    def status(self) -> Tensor:
        """Status of each row, int32 [n]."""
        return self.sampled[1]


class Sampler:
    """Sampler of one device, with the sampling state of its slots.

    slot_table         [num_slots + 1, 6] int64; seed and SamplingNumbers of each slot. The last
                       entry is the scratch slot's, for rows that pad a batch; it stays greedy
    unadjusted_table   the same for `sample_slots`: a slot whose rows are all adjusted is greedy
                       here, since `sample` overwrites what it gets. CUDA graphs read this table:
                       its address is fixed
    Memory for penalties is allocated when a sequence first uses them: see PenaltyState.

    adjusted_slots         slots that may have rows for `sample`; `is_adjusted` decides for a row
    penalty_slots          slots with penalties; a step with none of them needs no
                           `update_penalties`
    logprob_slots          slots that return log probabilities of their output
    prompt_logprob_slots   slots that return log probabilities of their prompt
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_params: dict[int, SlotParams] = {}
        self.adjusted_slots: set[int] = set()
        self.penalty_slots: set[int] = set()
        self.logprob_slots: set[int] = set()
        self.prompt_logprob_slots: set[int] = set()
        self._pending: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self.slot_table = create_slot_table(num_slots + 1, vocab_size, device)
        self.unadjusted_table = self.slot_table.clone()
        self._penalties = PenaltyState(num_slots, vocab_size, device)
        self._kernels = create_kernels(vocab_size, device)

    def bind(self, slot: int, bind: Bind) -> None:
        """Give the slot to a new sequence.

        Its entry in the slot table is copied to the device by the next `flush_slots`.
        A sequence with penalties has its history uploaded and counted here: as prompt before
        prompt_len, then as output.
        """
        slot_params = self._slot_params[slot] = self._build_slot_params(bind)
        params = bind.params
        for slots, needed in (
            (self.adjusted_slots, slot_params.adjusted_until > 0),
            (self.penalty_slots, params.has_penalties),
            (self.logprob_slots, params.logprobs is not None),
            (self.prompt_logprob_slots, params.prompt_logprobs is not None),
        ):
            slots.discard(slot)
            if needed:
                slots.add(slot)
        is_always_adjusted = slot_params.adjusted_until == inf
        numbers = slot_params.numbers
        self._pending[slot] = (
            build_slot_entry(bind.seed, numbers),
            build_slot_entry(
                bind.seed,
                SamplingNumbers.greedy(self._vocab_size) if is_always_adjusted else numbers,
            ),
        )
        self._penalties.bind(slot, bind)

    def _build_slot_params(self, bind: Bind) -> SlotParams:
        return build_slot_params(bind, self._vocab_size)

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

    def flush_slots(self) -> None:
        """Copy the table entries of slots bound since the last flush, in one upload.

        Call it after the step's binds and before `sample_slots` or a graph reads the table. Does
        nothing where no slot was bound.
        """
        if not self._pending:
            return
        slots, *tables = upload(
            self._device,
            int64_array([*self._pending]),
            *map(np.concatenate, zip(*self._pending.values(), strict=True)),
        )
        for table, entries in zip((self.slot_table, self.unadjusted_table), tables, strict=True):
            table.index_copy_(0, slots, entries.view(-1, NUM_SLOT_FIELDS))
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

    def is_adjusted(self, row: Row) -> bool:
        """Return whether the token after this row needs `sample`.

        If not, `sample_slots` is enough: temperature and filters determine the token.
        Compares the row's end with `SlotParams.adjusted_until`. min_tokens applies up to a
        position; every other reason applies to the whole sequence. Masks are covered: a sequence
        with structured output is always adjusted.
        """
        return row.end < self._slot_params[row.slot].adjusted_until

    def sample_slots(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out_tokens: Tensor,
        out_status: Tensor,
    ) -> None:
        """Sample a token for each row from its slot's entry in the slot table.

        logits       [n, V] any float dtype; not changed
        slots        [n] int32
        positions    [n] int32; position of the token to sample, one past the row's last input
        out_tokens   [n] int32, overwritten; 0 where the row fails
        out_status   [n] int32, overwritten; a status of sampling/status.py
        Call `flush_slots` first. On CUDA it is one kernel, safe inside a CUDA graph; for float64 it
        is plain torch.
        """
        kernels = select_kernels(self._kernels, logits)
        sample = sample_slots if kernels is None else kernels.sample
        sample(logits, slots, positions, self.unadjusted_table, out_tokens, out_status)

    def sample(
        self, logits: Tensor, rows: Sequence[Row], logits_rows: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample the token after each row, as forge.sampling does.

        logits        [R, V] any float dtype; not changed
        rows          [n] only the first of a row's masks is read
        logits_rows   [n] row of the logits after the last position of each row; None: the first n
        Flushes slots first. Penalties use the counts of `update_penalties`, which goes first.
        A row that cannot be sampled fails alone, by its status. Temporary memory: under 1 GB for
        any n, without the draft distributions that are returned.
        """
        if logits_rows is None:
            logits_rows = range(len(rows))
        kernels = select_kernels(self._kernels, logits)
        purposes = [self._slot_params[row.slot].purpose for row in rows]
        # Rejection needs the whole distribution of a draft, which the kernels do not keep.
        is_fused = [kernels is not None and purpose == sampling.PLAIN for purpose in purposes]
        if kernels is not None and all(is_fused):
            return SamplerOutput(self._sample_fused(kernels, logits, rows, logits_rows), [])
        sampled = torch.empty(2, len(rows), dtype=torch.int32, device=self._device)
        if kernels is not None and any(is_fused):
            fused = [index for index, each in enumerate(is_fused) if each]
            (index,) = upload(self._device, int64_array(fused))
            parts = self._sample_fused(
                kernels, logits, [rows[i] for i in fused], [logits_rows[i] for i in fused]
            )
            sampled.index_copy_(1, index, parts)
        draft_distributions: list[DraftDistribution] = []
        remaining = [index for index, each in enumerate(is_fused) if not each]
        for chunk in self._whole_chunks(logits, rows, remaining, logits_rows):
            scores = chunk.logits
            if chunk.is_random:
                scores = self.apply_filters(chunk)
                draft_distributions += self._draft_distributions(chunk, scores)
                keys = self.draw_keys(chunk, chunk.inputs.rows.purpose_offsets)
                scores.add_(gumbel_noise(keys, scores.shape[1]).mul_(chunk.numbers[:, 1:2]))
            tokens = scores.argmax(1).masked_fill_(chunk.status != STATUS_OK, 0)
            sampled.index_copy_(1, chunk.indices, torch.stack((tokens.int(), chunk.status.int())))
        return SamplerOutput(sampled, draft_distributions)

    def _sample_fused(
        self,
        kernels: SampleKernels,
        logits: Tensor,
        rows: Sequence[Row],
        logits_rows: Sequence[int],
    ) -> Tensor:
        """Return token and status of m rows, int32 [2, m]. Samples parts that fit into memory.

        logits_rows   [m] row of the logits of each row
        """
        self.flush_slots()
        sampled = torch.empty(2, len(rows), dtype=torch.int32, device=self._device)
        max_rows = max(1, MAX_FUSED_LOGITS // self._vocab_size)
        for start in range(0, len(rows), max_rows):
            part = slice(start, start + max_rows)
            part_rows = rows[part]
            params = [self._slot_params[row.slot] for row in part_rows]
            penalties = self._penalties.collect(part_rows, params)
            adjustments, min_tokens, where = upload_groups(
                self._device,
                collect_row_adjustments(part_rows, params, penalties, self._vocab_size),
                collect_min_tokens(part_rows, params, self._vocab_size),
                RowIndices.collect(logits_rows[part], part_rows),
            )
            adjusted, raw_flags = kernels.adjust(
                logits,
                where.logits_rows,
                adjustments,
                self._penalties.draft_tokens,
                self._penalties.count_tables,
            )
            apply_min_tokens(adjusted, min_tokens)
            slots, positions = where.slots_and_positions.view(torch.int32).view(2, -1)
            out = sampled[:, part]
            kernels.sample(
                adjusted, slots, positions, self.slot_table, out[0], out[1], raw_flags=raw_flags
            )
        return sampled

    def compute_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, logits_rows: Tensor | None = None
    ) -> Tensor:
        """Return `logprobs.compute_logprobs` of rows of the logits.

        logits        [R, V] any float dtype
        tokens        [n] int64
        logits_rows   [n] int64; None: the first n
        """
        num_top = min(num_top, self._vocab_size)
        kernels = select_kernels(self._kernels, logits)
        if kernels is not None and num_top <= MAX_FAST_LOGPROBS:
            return kernels.logprobs(logits, tokens, num_top, logits_rows)
        if logits_rows is not None:
            logits = logits.index_select(0, logits_rows)
        return compute_logprobs(logits, tokens, num_top)

    def compute_listed_logprobs(
        self, logits: Tensor, tokens: Tensor, listed: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Return `logprobs.compute_listed_logprobs` of rows of the logits.

        logits        [R, V] any float dtype
        tokens        [n] int64
        listed        [n, m] int64
        logits_rows   [n] int64
        """
        return compute_listed_logprobs(logits.index_select(0, logits_rows), tokens, listed)

    def adjusted_chunks(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        row_indices: Sequence[int],
        logits_rows: Sequence[int] | None = None,
    ) -> Iterator[SamplingChunk]:
        """Return the rows of `row_indices` in chunks, after forge.sampling.process_logits.

        logits        [R, V] any float dtype; not changed
        rows          [n] only the first of a row's masks is read
        row_indices   indices of the rows, each in one chunk. Rows and chunks are in
                      ascending order of `SlotParams.max_top_k`
        logits_rows   [n] row of the logits for each row; None: the first n
        Flushes slots first. Temperature and filters are left to `apply_filters`.
        """
        return self._whole_chunks(logits, rows, row_indices, logits_rows)

    def _whole_chunks(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        row_indices: Sequence[int],
        logits_rows: Sequence[int] | None,
    ) -> Iterator[SamplingChunk]:
        """Yield the chunks of `adjusted_chunks`."""
        self.flush_slots()
        params = {index: self._slot_params[rows[index].slot] for index in row_indices}
        for chunk_rows in group_rows(params, max(1, MAX_CHUNK_LOGITS // self._vocab_size)):
            yield build_chunk(
                logits,
                chunk_rows if logits_rows is None else [logits_rows[i] for i in chunk_rows],
                chunk_rows,
                [rows[index] for index in chunk_rows],
                [params[index] for index in chunk_rows],
                self._penalties,
            )

    def draw_keys(self, chunk: SamplingChunk, offsets: Tensor | int) -> Tensor:
        """Return the key of the noise for each row's next token, int64 [n] on the device.

        offsets   [n] int64, or one number for all rows; gumbel.purpose_offset of what the noise is
                  for: `chunk.inputs.rows.purpose_offsets` to sample, RESIDUAL after a rejection
        """
        seeds = self.slot_table[:, 0].index_select(0, chunk.inputs.rows.slots)
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
            if self._kernels is None:
                cuts = find_cuts(gaps, FilterParams(top_k, top_p, max_gap), chunk.max_top_k)
            else:
                slots = chunk.inputs.rows.slots.int()
                cuts = self._kernels.find_cuts(round_single(x).float(), slots, self.slot_table)
            x.masked_fill_(kept_mask(gaps, cuts).logical_not_(), -inf)
        return x.mul_(inverse_temperature[:, None])


def create_kernels(vocab_size: int, device: torch.device) -> SampleKernels | None:
    """Return the kernels of a CUDA device; None for any other."""
    if device.type != "cuda":
        return None
    # The bindings of CUDA are installed only where torch has CUDA.
    from forge.models.hf.sampling.sample_cuda import SampleKernels

    return SampleKernels(vocab_size, device)


def select_kernels(kernels: SampleKernels | None, logits: Tensor) -> SampleKernels | None:
    """Return the kernels where they read these logits; None: plain torch does."""
    return None if logits.dtype == torch.float64 else kernels


def kernel_compilations(
    vocab_size: int, device: torch.device, dtype: torch.dtype
) -> list[Callable[[], object]]:
    """Return calls that compile the kernels a sampler of this device needs; none on a CPU.

    dtype   type of the model's logits
    """
    if device.type != "cuda":
        return []
    from forge.models.hf.sampling.sample_cuda import compile_sample_kernels

    return [
        partial(compile_sample_kernels, each, vocab_size, device)
        for each in dict.fromkeys((dtype, torch.float32))
    ]
