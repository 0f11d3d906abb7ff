"""Seen: the tokens that each slot's sequence has, for penalties.

Owns two tables on the device and how far each slot has been told. Knows no model and no sampler. A
position is counted once, however often a row feeds it.

    slot 3   prompt_len 4      history [0, 6)      row feeds [2, 8)
    inputs   p p p p o o o o
             └──history─┘                          told 6
                 └──── row ────┘                   counts positions 6 and 7, told 8

Drafts are kept beside the counts until a row says how many of them were confirmed: its `start`.
Until then they count for what stands behind them, and for nothing else.

    slot 3   told 8        drafts  [ a b c ]       behind a: counts and a; behind b: and b; ...
    row      start 10                              a and b are counted, c is forgotten
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.config import MOST_DRAFTS
from forge.models.hf.upload import ids, joined, upload
from forge.seam import Bind, Row


@dataclass(slots=True)
class _Told:
    """Positions [0, end) of a slot are counted; those before `split` as prompt. Owned by Seen.

    drafts     so many more are kept beside
    proposes   what an earlier row has sampled is a draft
    """

    end: int
    split: int
    proposes: bool
    drafts: int = 0


class _News(NamedTuple):
    """What a batch tells: spans of its inputs, or of the kept drafts' cells.

    prompt, output   (first input, one past the last, slot)
    confirmed        (first cell, one past the last, slot)
    drafted          (first input, one past the last, cell of the first)
    """

    prompt: list[tuple[int, int, int]]
    output: list[tuple[int, int, int]]
    confirmed: list[tuple[int, int, int]]
    drafted: list[tuple[int, int, int]]


def _tell(told: _Told, row: Row, at: int, news: _News) -> None:
    """The row's slot is told of its inputs, of which the first stands at `at` in the batch."""
    cell = row.slot * MOST_DRAFTS
    drafts = len(row.drafts) + (len(row.refs) if told.proposes else 0)
    sure, shift = row.end - drafts, at - row.start
    if sure > row.start:  # what it knows says how much of what stood before was confirmed
        if told.drafts:
            count = min(told.drafts, max(0, row.start - told.end))
            news.confirmed.append((cell, cell + count, row.slot))
            told.end, told.drafts = told.end + count, 0
        first, split = told.end, told.split
        assert first >= row.start, f"slot {row.slot}: inputs at {row.start}, told {first}"
        told.end = max(first, sure)
        if first < min(sure, split):
            news.prompt.append((first + shift, min(sure, split) + shift, row.slot))
        if max(first, split) < sure:
            news.output.append((max(first, split) + shift, sure + shift, row.slot))
    if drafts:
        known = told.end + told.drafts
        assert known == sure, f"slot {row.slot}: drafts at {sure}, told {known}"
        news.drafted.append((sure + shift, row.end + shift, cell + told.drafts))
        told.drafts += drafts


class Seen:
    """Which tokens a slot's prompt has, and how often its output has each.

    Tables take 5 bytes for each slot and token of the vocabulary, when a sequence first penalises.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._told: dict[int, _Told] = {}
        self._made: tuple[Tensor, Tensor] | None = None
        self._drafts = torch.zeros(num_slots, MOST_DRAFTS, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory that the tables hold."""
        return sum(table.nbytes for table in self._made or ())

    def bind(self, slot: int, bind: Bind) -> None:
        """The slot has seen the bind's history and nothing else."""
        self._told.pop(slot, None)
        if not bind.params.penalises:
            return
        self._told[slot] = _Told(len(bind.history), bind.prompt_len, bind.proposes)
        prompted, counts = self._tables()
        prompted[slot].zero_()
        counts[slot].zero_()
        if bind.history:
            (history,) = upload(self._device, ids(bind.history))
            prompted[slot].index_fill_(0, history[: bind.prompt_len], True)
            _count(counts[slot], history[bind.prompt_len :])

    def observe(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """The slots have seen the rows' inputs, row behind row in `inputs`."""
        news, at = _News([], [], [], []), 0
        for row in rows:
            told = self._told.get(row.slot)
            if told is not None:
                _tell(told, row, at, news)
            at += row.end - row.start
        if news.confirmed:
            cells, slots = upload(self._device, *self._spans(news.confirmed))
            drafts = self._drafts.view(-1).index_select(0, cells)
            _count(self._tables()[1].view(-1), slots + drafts)
        if news.prompt or news.output:
            prompted, counts = self._tables()
            from_prompt, prompt_slots, from_output, output_slots = upload(
                self._device, *self._spans(news.prompt), *self._spans(news.output)
            )
            seen = prompt_slots + inputs.index_select(0, from_prompt)
            prompted.view(-1).index_fill_(0, seen, True)
            _count(counts.view(-1), output_slots + inputs.index_select(0, from_output))
        if news.drafted:
            sources, cells = upload(
                self._device,
                joined(np.arange(first, end) for first, end, _ in news.drafted),
                joined(np.arange(cell, cell + end - first) for first, end, cell in news.drafted),
            )
            drafts = inputs.index_select(0, sources).long()
            self._drafts.view(-1).index_copy_(0, cells, drafts)

    def drafted(self, row: Row) -> range:
        """Cells of the drafts before the position behind the row."""
        told = self._told[row.slot]
        first = row.slot * MOST_DRAFTS
        return range(first, first + max(0, min(told.drafts, row.end - told.end)))

    def penalised(
        self, x: Tensor, slots: Tensor, penalties: Tensor, drafted: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Logits after penalties, as sampling.adjusted applies them.

        x           [m, V] float64
        slots       [m] int64
        penalties   [m, 3] float64: repetition, presence, frequency
        drafted     [d] int64 each: the row that a draft counts for, and its cell
        """
        prompted, counts = self._tables()
        repetition, presence, frequency = penalties.unsqueeze(2).unbind(1)
        count = counts.index_select(0, slots)
        if drafted[0].numel():
            at, cells = drafted
            drafts = self._drafts.view(-1).index_select(0, cells)
            _count(count.view(-1), at * self._shape[1] + drafts)
        seen = prompted.index_select(0, slots).logical_or_(count > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        # Not one fused operation: sampling.py rounds the product before the sum.
        less = (frequency * count).add_(presence)
        return torch.where(count > 0, x - less, x)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Token is in the slot's prompt, bool; how often in its output, int32."""
        if self._made is None:
            self._made = (
                torch.zeros(self._shape, dtype=torch.bool, device=self._device),
                torch.zeros(self._shape, dtype=torch.int32, device=self._device),
            )
        return self._made

    def _spans(self, spans: Sequence[tuple[int, int, int]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Which inputs to take, and where each one's slot begins in the flat tables."""
        sizes = ids([end - first for first, end, _ in spans])
        begins = ids([slot * self._shape[1] for _, _, slot in spans])
        places = joined(np.arange(first, end) for first, end, _ in spans)
        return places, np.repeat(begins, sizes)


def _count(counts: Tensor, tokens: Tensor) -> None:
    counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
