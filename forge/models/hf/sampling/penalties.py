"""Token counts of each slot's sequence, and penalties from them.

Owns two tables on the device and the position up to which each slot is counted. Knows no model. A
position is counted once, however often a row feeds it.

    slot 3   prompt_len 4      history [0, 6)      row feeds [2, 8)
    inputs   p p p p o o o o
             └──history─┘                          num_counted 6
                 └──── row ────┘                   counts positions 6 and 7, num_counted 8

Drafts are kept in a table of their own until the start of a later row shows how many of them were
accepted. Until then a draft counts only for the positions after it.

    slot 3   num_counted 8     drafts  [ a b c ]   after a: counts and a; after b: and b; ...
    row      start 10                              a and b are counted, c is dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.config import MAX_DRAFTS
from forge.models.hf.buffers import concatenate, int64_array, upload
from forge.models.hf.sampling.logit_adjustments import ArrayT, round_single
from forge.models.hf.sampling.slot_params import SlotParams
from forge.seam import Bind, Row


class Penalties(NamedTuple, Generic[ArrayT]):
    """Penalties of the rows of a chunk: numpy arrays on the host, tensors on the device.

    rows          [m]       int64; rows of the chunk that have penalties
    slots         [m]       int64; slot of each
    strengths     [m * 3]   float64; repetition, presence and frequency penalty of each
    draft_rows    [d]       int64; index into `rows` that a draft counts for
    draft_cells   [d]       int64; index of the draft in the flat table of drafts
    """

    rows: ArrayT
    slots: ArrayT
    strengths: ArrayT
    draft_rows: ArrayT
    draft_cells: ArrayT


@dataclass(slots=True)
class _SlotProgress:
    """Progress of counting a slot's tokens. Owned by PenaltyState.

    num_counted       positions that are counted; those before `prompt_len` as prompt
    proposes_drafts   tokens that earlier rows of the slot sampled are drafts
    num_drafts        drafts after the counted positions, in the table of drafts
    """

    num_counted: int
    prompt_len: int
    proposes_drafts: bool
    num_drafts: int = 0


class _TokenSpans(NamedTuple):
    """Spans of a batch's inputs, or of the table of drafts, that change the counts.

    prompt_spans, output_spans   (first input, one past the last, slot)
    confirmed_spans              (first draft, one past the last, slot)
    draft_spans                  (first input, one past the last, index of the first draft)
    """

    prompt_spans: list[tuple[int, int, int]]
    output_spans: list[tuple[int, int, int]]
    confirmed_spans: list[tuple[int, int, int]]
    draft_spans: list[tuple[int, int, int]]


def _collect_row_spans(
    progress: _SlotProgress, row: Row, first_input: int, spans: _TokenSpans
) -> None:
    """Add the row's spans and advance its slot.

    first_input   index of the row's first input in the batch
    """
    draft_cell = row.slot * MAX_DRAFTS
    num_drafts = len(row.drafts) + (len(row.refs) if progress.proposes_drafts else 0)
    confirmed_end, input_offset = row.end - num_drafts, first_input - row.start
    # A row with an input that is no draft starts after the last accepted draft.
    if confirmed_end > row.start:
        if progress.num_drafts:
            count = min(progress.num_drafts, max(0, row.start - progress.num_counted))
            spans.confirmed_spans.append((draft_cell, draft_cell + count, row.slot))
            progress.num_counted, progress.num_drafts = progress.num_counted + count, 0
        first, prompt_len = progress.num_counted, progress.prompt_len
        assert first >= row.start, f"slot {row.slot}: inputs at {row.start}, counted {first}"
        progress.num_counted = max(first, confirmed_end)
        if first < min(confirmed_end, prompt_len):
            spans.prompt_spans.append(
                (first + input_offset, min(confirmed_end, prompt_len) + input_offset, row.slot)
            )
        if max(first, prompt_len) < confirmed_end:
            spans.output_spans.append(
                (max(first, prompt_len) + input_offset, confirmed_end + input_offset, row.slot)
            )
    if num_drafts:
        next_draft = progress.num_counted + progress.num_drafts
        assert next_draft == confirmed_end, (
            f"slot {row.slot}: drafts at {confirmed_end}, counted {next_draft}"
        )
        spans.draft_spans.append(
            (confirmed_end + input_offset, row.end + input_offset, draft_cell + progress.num_drafts)
        )
        progress.num_drafts += num_drafts


class PenaltyState:
    """Token counts of all slots: tokens of the prompt, and counts of the output.

    The tables take 5 bytes for each slot and token of the vocabulary. They are allocated when a
    sequence first has penalties.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._progress: dict[int, _SlotProgress] = {}
        self._count_tables: tuple[Tensor, Tensor] | None = None
        self._draft_tokens = torch.zeros(num_slots, MAX_DRAFTS, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of the tables, in bytes."""
        return sum(table.nbytes for table in self._count_tables or ())

    def bind(self, slot: int, bind: Bind) -> None:
        """Clear the slot's counts and count the bind's history, if the sequence has penalties."""
        self._progress.pop(slot, None)
        if not bind.params.has_penalties:
            return
        self._progress[slot] = _SlotProgress(len(bind.history), bind.prompt_len, bind.proposes)
        prompt_mask, output_counts = self._ensure_tables()
        prompt_mask[slot].zero_()
        output_counts[slot].zero_()
        if bind.history:
            (history,) = upload(self._device, int64_array(bind.history))
            prompt_mask[slot].index_fill_(0, history[: bind.prompt_len], True)
            _add_counts(output_counts[slot], history[bind.prompt_len :])

    def update(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """Count the rows' inputs.

        inputs   [tokens]; ids of the rows' inputs, one row after the other
        """
        spans, first_input = _TokenSpans([], [], [], []), 0
        for row in rows:
            progress = self._progress.get(row.slot)
            if progress is not None:
                _collect_row_spans(progress, row, first_input, spans)
            first_input += row.end - row.start
        if spans.confirmed_spans:
            cells, slots = upload(self._device, *self._flatten_spans(spans.confirmed_spans))
            drafts = self._draft_tokens.view(-1).index_select(0, cells)
            _add_counts(self._ensure_tables()[1].view(-1), slots + drafts)
        if spans.prompt_spans or spans.output_spans:
            prompt_mask, output_counts = self._ensure_tables()
            from_prompt, prompt_slots, from_output, output_slots = upload(
                self._device,
                *self._flatten_spans(spans.prompt_spans),
                *self._flatten_spans(spans.output_spans),
            )
            if spans.prompt_spans:
                prompt_cells = prompt_slots + inputs.index_select(0, from_prompt)
                prompt_mask.view(-1).index_fill_(0, prompt_cells, True)
            if spans.output_spans:
                output_cells = output_slots + inputs.index_select(0, from_output)
                _add_counts(output_counts.view(-1), output_cells)
        if spans.draft_spans:
            sources, cells = upload(
                self._device,
                concatenate(np.arange(first, end) for first, end, _ in spans.draft_spans),
                concatenate(
                    np.arange(cell, cell + end - first) for first, end, cell in spans.draft_spans
                ),
            )
            drafts = inputs.index_select(0, sources).long()
            self._draft_tokens.view(-1).index_copy_(0, cells, drafts)

    def collect(self, rows: Sequence[Row], params: Sequence[SlotParams]) -> Penalties[NDArray[Any]]:
        """Collect the penalties of a chunk's rows, and the drafts before each row's next position.

        rows     rows of the chunk
        params   parameters of each row's slot
        """
        penalized = [index for index, each in enumerate(params) if each.bind.params.has_penalties]
        draft_cells = [self._draft_cells(rows[index]) for index in penalized]
        counts = int64_array([len(cells) for cells in draft_cells])
        strengths = [
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
            for each in (params[index].bind.params for index in penalized)
        ]
        return Penalties(
            int64_array(penalized),
            int64_array([rows[index].slot for index in penalized]),
            np.array(strengths, np.float64).reshape(-1),
            np.repeat(int64_array(range(len(penalized))), counts),
            concatenate(np.arange(cells.start, cells.stop) for cells in draft_cells),
        )

    def _draft_cells(self, row: Row) -> range:
        """Return the indices of the drafts before the position after the row, in the flat table."""
        progress = self._progress[row.slot]
        first = row.slot * MAX_DRAFTS
        return range(
            first, first + max(0, min(progress.num_drafts, row.end - progress.num_counted))
        )

    def apply(self, logits: Tensor, penalties: Penalties[Tensor]) -> None:
        """Apply repetition, then frequency and presence penalties, in place.

        logits   [n, V]   float64
        Arithmetic: forge.sampling.process_logits.
        """
        if not penalties.rows.numel():
            return
        prompt_mask, output_counts = self._ensure_tables()
        strengths = penalties.strengths.view(-1, 3, 1)
        repetition, presence, frequency = strengths.unbind(1)
        x = logits.index_select(0, penalties.rows)
        count = output_counts.index_select(0, penalties.slots)
        if penalties.draft_rows.numel():
            drafts = self._draft_tokens.view(-1).index_select(0, penalties.draft_cells)
            _add_counts(count.view(-1), penalties.draft_rows * self._shape[1] + drafts)
        is_repeated = prompt_mask.index_select(0, penalties.slots).logical_or_(count > 0)
        changed = torch.where(x > 0, x / repetition, x * repetition)
        # Not one fused operation: forge.sampling rounds the product before the sum.
        reduction = (frequency * count).add_(presence)
        changed = round_single(torch.where(count > 0, changed - reduction, changed))
        logits.index_copy_(0, penalties.rows, torch.where(is_repeated, changed, x))

    @property
    def count_tables(self) -> tuple[Tensor, Tensor] | None:
        """Tokens of the prompts, bool [slots, V], and counts in the outputs, int32 [slots, V].

        None before a sequence has had penalties.
        """
        return self._count_tables

    @property
    def draft_tokens(self) -> Tensor:
        """Drafts of each slot, int64 [slots, MAX_DRAFTS]."""
        return self._draft_tokens

    def _ensure_tables(self) -> tuple[Tensor, Tensor]:
        """Return the tables [slots, V]: in the prompt, bool; count in the output, int32."""
        if self._count_tables is None:
            self._count_tables = (
                torch.zeros(self._shape, dtype=torch.bool, device=self._device),
                torch.zeros(self._shape, dtype=torch.int32, device=self._device),
            )
        return self._count_tables

    def _flatten_spans(
        self, spans: Sequence[tuple[int, int, int]]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the spans' indices and, for each, where its slot starts in the flat tables."""
        sizes = int64_array([end - first for first, end, _ in spans])
        slot_offsets = int64_array([slot * self._shape[1] for _, _, slot in spans])
        indices = concatenate(np.arange(first, end) for first, end, _ in spans)
        return indices, np.repeat(slot_offsets, sizes)


def _add_counts(counts: Tensor, tokens: Tensor) -> None:
    """Add 1 for each token, in place. A token that occurs twice adds 2."""
    counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
