"""Seen: the tokens that each slot's sequence has, for penalties.

Owns two tables on the device and how far each slot has been told. Knows no model and no sampler. A
position is counted once, however often a row feeds it.

    slot 3   prompt_len 4      history [0, 6)      row feeds [2, 8)
    inputs   p p p p o o o o
             └──history─┘                          told 6
                 └──── row ────┘                   counts positions 6 and 7, told 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.models.hf.upload import ids, joined, upload
from forge.seam import Bind, Row


@dataclass(slots=True)
class _Told:
    """Positions [0, end) of a slot are counted; those before `split` as prompt. Owned by Seen."""

    end: int
    split: int


class Seen:
    """Which tokens a slot's prompt has, and how often its output has each.

    Tables take 5 bytes for each slot and token of the vocabulary, when a sequence first penalises.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._told: dict[int, _Told] = {}
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Device memory that the tables hold."""
        return sum(table.nbytes for table in self._made or ())

    def bind(self, slot: int, bind: Bind) -> None:
        """The slot has seen the bind's history and nothing else."""
        self._told.pop(slot, None)
        if not bind.params.penalises:
            return
        self._told[slot] = _Told(len(bind.history), bind.prompt_len)
        prompted, counts = self._tables()
        prompted[slot].zero_()
        counts[slot].zero_()
        if bind.history:
            (history,) = upload(self._device, ids(bind.history))
            prompted[slot].index_fill_(0, history[: bind.prompt_len], True)
            _count(counts[slot], history[bind.prompt_len :])

    def observe(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """The slots have seen the rows' inputs, row behind row in `inputs`."""
        prompt: list[tuple[int, int, int]] = []  # (first input, one past the last, slot)
        output: list[tuple[int, int, int]] = []
        at = 0
        for row in rows:
            shift, end = at - row.start, row.end
            at += end - row.start
            told = self._told.get(row.slot)
            if told is None:
                continue
            first, split = told.end, told.split
            assert first >= row.start, f"slot {row.slot}: inputs at {row.start}, told {first}"
            told.end = max(first, end)
            if first < min(end, split):
                prompt.append((first + shift, min(end, split) + shift, row.slot))
            if max(first, split) < end:
                output.append((max(first, split) + shift, end + shift, row.slot))
        if not prompt and not output:
            return
        prompted, counts = self._tables()
        from_prompt, prompt_slots, from_output, output_slots = upload(
            self._device, *self._spans(prompt), *self._spans(output)
        )
        seen = prompt_slots + inputs.index_select(0, from_prompt)
        prompted.view(-1).index_fill_(0, seen, True)
        _count(counts.view(-1), output_slots + inputs.index_select(0, from_output))

    def penalised(self, x: Tensor, slots: Tensor, penalties: Tensor) -> Tensor:
        """Logits after penalties, as sampling.adjusted applies them.

        x           [m, V] float64
        slots       [m] int64
        penalties   [m, 3] float64: repetition, presence, frequency
        """
        prompted, counts = self._tables()
        repetition, presence, frequency = penalties.unsqueeze(2).unbind(1)
        count = counts.index_select(0, slots)
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
