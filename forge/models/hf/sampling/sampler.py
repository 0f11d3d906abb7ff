"""Sampler: forge.sampling for a batch of rows, on the device that holds the logits.

Owns what choosing needs to remember of each slot: its parameters on the host, its seed and
temperature in tables that a CUDA graph reads, the tokens it has seen. Knows no plan, pool or model.

    logits ─ mask, allowed ids ─ bias ─ min_tokens ─ penalties ─ / T ─┬─ top-k ─ top-p ─ min-p
      │       one upload says which cells of which rows               └─ + noise ─ argmax ─► tokens
      └─ NaN, +inf, nothing possible ──────────────────────────────────────────────────────► status

The order, the ties and the noise are those of sampling.py, in float64. Greedy is no branch: it is
scale 1 and noise times 0. Nothing here waits for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge import sampling
from forge.models.hf.buffers import concatenate, int64_array, upload
from forge.models.hf.sampling.gumbel import (
    MAX_CHUNK_LOGITS,
    draw_keys,
    gumbel_noise,
    purpose_offset,
)
from forge.models.hf.sampling.penalties import PenaltyState
from forge.models.hf.sampling.slot_params import SamplingNumbers, SlotParams, build_slot_params
from forge.models.hf.sampling.status import (
    STATUS_NOTHING_ALLOWED,
    STATUS_OK,
    logits_status,
)
from forge.models.hf.sampling.top_k_top_p import MAX_TOPK, top_k_top_p_mask
from forge.seam import Bind, Row


class DraftDistribution(NamedTuple):
    """What some rows drew their drafts from.

    rows    which they are
    probs   float64 [len(rows), V] probability of each token
    """

    rows: Sequence[int]
    probs: Tensor


class SamplerOutput(NamedTuple):
    """What a batch of rows sampled, on the device.

    tokens                int64 [R] 0 where the row failed
    status                int8 [R] draw.FINE, or what `error_text` explains
    draft_distributions   of rows whose drafts are judged by rejection
    """

    tokens: Tensor
    status: Tensor
    draft_distributions: Sequence[DraftDistribution]


class _ChunkInputs(NamedTuple):
    """What a chunk of rows asks for. Tensors are on the device; n rows, empty where nobody asks.

    params             [n, 5] float64, the columns of Numbers
    slots              [n], positions [n] and offsets [n]: the key of each row's draw
    mask_rows          rows with a mask; `mask_words` theirs, 64 ids a word
    allowed_rows       rows with allowed ids; `allowed_cells` the cells of the chunk's flat logits
                       they allow
    bias_cells         cells, and what is added to each
    min_tokens_cells   cells that min_tokens masks, and the row each is in
    penalty_rows       rows, their slots, and repetition, presence and frequency [m, 3]
    draft_rows         rows of those, once for each draft before their position; Seen's cell of each
                       draft
    """

    params: Tensor
    slots: Tensor
    positions: Tensor
    purpose_offsets: Tensor
    mask_rows: Tensor
    mask_words: Tensor
    allowed_rows: Tensor
    allowed_cells: Tensor
    bias_cells: Tensor
    bias_values: Tensor
    min_tokens_cells: Tensor
    min_tokens_rows: Tensor
    penalty_rows: Tensor
    penalty_slots: Tensor
    draft_rows: Tensor
    draft_cells: Tensor
    penalties: Tensor


class SamplingChunk(NamedTuple):
    """Rows that are worked on at once. n rows.

    rows        which they are, and on the device as `row_index`
    logits      [n, V] float64, what sampling.adjusted gives
    status      int8 [n]
    max_top_k   leading tokens whose order some row's filter needs; 0 sorts nothing
    is_random   some row is not greedy
    """

    rows: Sequence[int]
    row_index: Tensor
    slot_params: Sequence[SlotParams]
    inputs: _ChunkInputs
    logits: Tensor
    status: Tensor
    max_top_k: int
    is_random: bool


class Sampler:
    """Chooses tokens on one device, and remembers what that takes.

    seeds          int64 [num_slots + 1] the 64 bits of each slot's seed
    temperatures   float64 [num_slots + 1] 0 is greedy
    The last cell of each is scratch, for rows that only fill a batch. Memory for penalties is taken
    when a sequence first asks for them: see Seen.

    full_sampling_slots    slots whose draw may need more than the two tables: ask
                           `is_temperature_only`
    penalty_slots          slots whose penalties count inputs: call `update_row_penalties`
    prompt_logprob_slots   slots that ask for the log probabilities of their prompt
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
        """Slot `slot` belongs to a new sequence; its tables follow with the next `flush_seeds`.

        History is counted where penalties ask: before prompt_len it is prompt, then output.
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
        """What the sequence in the slot asked for."""
        return self._slot_params[slot].bind

    def prompt_logprob_positions(self, row: Row) -> range:
        """Positions of the prompt whose log probabilities this row's inputs give."""
        if row.slot not in self.prompt_logprob_slots:
            return range(0)
        return range(row.start + 1, min(row.end, self.slot_bind(row.slot).prompt_len - 1) + 1)

    def flush_seeds(self) -> None:
        """The seeds and temperatures of slots bound since the last flush are on the device."""
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

    def update_row_penalties(self, row: Row, inputs: Tensor) -> None:
        """Penalties know the row's inputs, [n] ids at positions [row.start, row.end)."""
        self.update_penalties((row,), inputs)

    def update_penalties(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """Penalties know the rows' inputs, row behind row in `inputs`.

        Positions that a slot was told with its history are not counted twice. One upload and three
        kernels for any number of rows; nothing where no row penalises.
        """
        self._penalties.update(rows, inputs)

    def is_temperature_only(self, row: Row) -> bool:
        """The token behind this row needs its slot's cells of the two tables and nothing else."""
        return row.end >= self._slot_params[row.slot].temperature_only_from

    def sample(
        self, logits: Tensor, rows: Sequence[Row], row_indices: Sequence[int] | None = None
    ) -> SamplerOutput:
        """The token behind each row, as sampling.adjusted and sampling.choose have it.

        logits        [R, vocab_size] any float dtype, of the last position of each of `rows`
        row_indices   rows to choose for, where not all; what others get means nothing
        A row that cannot be sampled fails alone. Extra memory: under 1 GB at any R.
        """
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        status = torch.empty(len(rows), dtype=torch.int8, device=self._device)
        draft_distributions: list[DraftDistribution] = []
        for chunk in self.adjusted_chunks(
            logits, rows, range(len(rows)) if row_indices is None else row_indices
        ):
            scores = chunk.logits
            if chunk.is_random:
                scores = self.apply_filters(chunk)
                draft_distributions += self._draft_distributions(chunk, scores)
                keys = self.draw_keys(chunk, chunk.inputs.purpose_offsets)
                scores.add_(gumbel_noise(keys, scores.shape[1]).mul_(chunk.inputs.params[:, 1:2]))
            sampled = scores.argmax(1).masked_fill_(chunk.status != STATUS_OK, 0)
            tokens.index_copy_(0, chunk.row_index, sampled)
            status.index_copy_(0, chunk.row_index, chunk.status)
        return SamplerOutput(tokens, status, draft_distributions)

    def adjusted_chunks(
        self, logits: Tensor, rows: Sequence[Row], row_indices: Sequence[int]
    ) -> Iterator[SamplingChunk]:
        """Rows `row_indices` all, in parts that fit into memory, as sampling.adjusted has them."""
        self.flush_seeds()
        for chunk_rows in self._group_rows(rows, row_indices):
            slot_params = [self._slot_params[rows[pick].slot] for pick in chunk_rows]
            index, inputs = self._upload_inputs(
                chunk_rows, [rows[pick] for pick in chunk_rows], slot_params
            )
            adjusted = logits.index_select(0, index).double()
            status = logits_status(adjusted.amax(1))
            self._adjust_logits(adjusted, inputs)
            if inputs.allowed_rows.numel() or inputs.mask_rows.numel():
                nothing_allowed = (status == STATUS_OK) & (adjusted.amax(1) == -inf)
                status.masked_fill_(nothing_allowed, STATUS_NOTHING_ALLOWED)
            max_top_k = max(state.max_top_k for state in slot_params)
            is_random = any(state.numbers.noise_scale for state in slot_params)
            yield SamplingChunk(
                chunk_rows, index, slot_params, inputs, adjusted, status, max_top_k, is_random
            )

    def draw_keys(self, chunk: SamplingChunk, offsets: Tensor | int) -> Tensor:
        """Keys of draws behind the part's rows, for purposes with these offsets."""
        seeds = self.seeds.index_select(0, chunk.inputs.slots)
        return draw_keys(seeds, chunk.inputs.positions, offsets)

    def _draft_distributions(self, chunk: SamplingChunk, logits: Tensor) -> list[DraftDistribution]:
        """What rows that propose draw from, where it is asked for later."""
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
        """Rows by what their filters cost, at most as many at once as memory allows."""

        def order(at: int) -> int:
            return self._slot_params[rows[at].slot].max_top_k

        max_rows = max(1, MAX_CHUNK_LOGITS // self._vocab_size)
        by_order = sorted(row_indices, key=order)
        for _, group in groupby(by_order, key=lambda at: (order(at) > 0) + (order(at) > MAX_TOPK)):
            picks = list(group)
            for start in range(0, len(picks), max_rows):
                yield picks[start : start + max_rows]

    def _upload_inputs(
        self, picks: Sequence[int], rows: Sequence[Row], states: Sequence[SlotParams]
    ) -> tuple[Tensor, _ChunkInputs]:
        size = self._vocab_size
        listed = list(enumerate(states))
        masks = [(at, row.masks[0]) for at, row in enumerate(rows) if row.masks]
        allowing = [at for at, s in listed if s.bind.params.allowed_token_ids is not None]
        biasing = [at for at, s in listed if len(s.bias_token_ids)]
        masking = [at for at, s in listed if s.min_tokens_applies(rows[at].end)]
        penalised = [at for at, s in listed if s.bind.params.has_penalties]
        drafted = [self._penalties.draft_cells(rows[at]) for at in penalised]
        asked = [states[at].bind.params for at in penalised]
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in asked]
        index, numbers, *tensors, flat_penalties = upload(
            self._device,
            int64_array(picks),
            np.array([s.numbers for s in states], np.float64).reshape(-1),
            int64_array([row.slot for row in rows]),
            int64_array([row.end for row in rows]),
            int64_array([purpose_offset(s.purpose) for s in states]),
            int64_array([at for at, _ in masks]),
            np.frombuffer(b"".join(_pad_mask(mask, size) for _, mask in masks), np.int64),
            int64_array(allowing),
            concatenate(states[at].allowed_token_ids + at * size for at in allowing),
            concatenate(states[at].bias_token_ids + at * size for at in biasing),
            concatenate((states[at].bias_values for at in biasing), np.float64),
            concatenate(states[at].stop_token_ids + at * size for at in masking),
            np.repeat(
                int64_array(masking),
                int64_array([len(states[at].stop_token_ids) for at in masking]),
            ),
            int64_array(penalised),
            int64_array([rows[at].slot for at in penalised]),
            np.repeat(
                int64_array(range(len(drafted))), int64_array([len(cells) for cells in drafted])
            ),
            concatenate(np.arange(cells.start, cells.stop) for cells in drafted),
            np.array(penalties, np.float64).reshape(-1),
        )
        shaped = (
            numbers.view(-1, len(SamplingNumbers._fields)),
            *tensors,
            flat_penalties.view(-1, 3),
        )
        return index, _ChunkInputs._make(shaped)

    def _adjust_logits(self, x: Tensor, inputs: _ChunkInputs) -> None:
        """sampling.adjusted, in place."""
        flat = x.view(-1)
        if inputs.mask_rows.numel():
            bits = torch.arange(64, device=x.device)
            words = inputs.mask_words.view(len(inputs.mask_rows), -1, 1)
            allowed_bits = (words >> bits & 1).view(len(inputs.mask_rows), -1)[:, : x.shape[1]]
            rows = x.index_select(0, inputs.mask_rows).masked_fill_(allowed_bits == 0, -inf)
            x.index_copy_(0, inputs.mask_rows, rows)
        if inputs.allowed_rows.numel():
            saved = flat.index_select(0, inputs.allowed_cells)
            x.index_fill_(0, inputs.allowed_rows, -inf)
            flat.index_copy_(0, inputs.allowed_cells, saved)
        if inputs.bias_cells.numel():
            flat.index_add_(0, inputs.bias_cells, inputs.bias_values)
        if inputs.min_tokens_cells.numel():
            saved = flat.index_select(0, inputs.min_tokens_cells)
            flat.index_fill_(0, inputs.min_tokens_cells, -inf)
            has_other = (x.amax(1) > -inf).index_select(0, inputs.min_tokens_rows)
            flat.index_copy_(0, inputs.min_tokens_cells, saved.masked_fill_(has_other, -inf))
        if inputs.penalty_rows.numel():
            penalty_logits = x.index_select(0, inputs.penalty_rows)
            drafted = (inputs.draft_rows, inputs.draft_cells)
            penalty_logits = self._penalties.apply_penalties(
                penalty_logits, inputs.penalty_slots, inputs.penalties, drafted
            )
            x.index_copy_(0, inputs.penalty_rows, penalty_logits)

    def apply_filters(self, chunk: SamplingChunk) -> Tensor:
        """The part's `x`, changed to what sampling.candidates has; -inf where it has nothing."""
        x = chunk.logits
        scale, _, top_k, top_p, log_min_p = chunk.inputs.params.unsqueeze(2).unbind(1)
        x.mul_(scale)
        is_removed = x < x.amax(1, keepdim=True) + log_min_p
        if chunk.max_top_k:
            is_removed.logical_or_(
                top_k_top_p_mask(x, top_k.long(), top_p, chunk.max_top_k).logical_not_()
            )
        return x.masked_fill_(is_removed, -inf)


def _pad_mask(mask: bytes, vocab_size: int) -> bytes:
    """The mask in whole words of 64 ids, as many as the vocabulary needs; new bits are 0."""
    size = -(-vocab_size // 64) * 8
    return mask[:size].ljust(size, b"\0")
