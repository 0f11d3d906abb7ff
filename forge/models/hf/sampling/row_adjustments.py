"""RowAdjustments: what changes the logits of each row, as the CUDA kernels read it.

Owns the layout. Knows no kernel and no device: numpy out.

    row                      0      1      2
    logit_bias               {}   {7, 9}  {3}
    bias_offsets             0      0      2      3      row i has [offsets[i], offsets[i + 1])
    bias_tokens              7  9  3

min_tokens is not among them: it needs the whole row, so `apply_min_tokens` comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from forge.models.hf.buffers import concatenate
from forge.models.hf.sampling.logit_adjustments import ArrayT, HostArray, collect_token_masks
from forge.models.hf.sampling.penalties import Penalties
from forge.models.hf.sampling.slot_params import SlotParams
from forge.seam import Row


class RowAdjustments(NamedTuple, Generic[ArrayT]):
    """Adjustments of n rows: numpy arrays on the host, tensors on the device.

    mask_index        [n]       int64; row of `mask_words`, or -1
    mask_words        [m * W]   int64; bit i of word w allows token 64 * w + i
    allowed_offsets   [n + 1]   int64
    allowed_tokens    [.]       int64; where a row has any, every other token is impossible
    bias_offsets      [n + 1]   int64
    bias_tokens       [.]       int64
    bias_values       [.]       float64; what is added to each
    penalty_index     [n]       int64; index into the next two, or -1
    penalty_slots     [p]       int64; slot of the counts
    strengths         [p * 3]   float64; repetition, presence and frequency penalty
    draft_offsets     [p + 1]   int64
    draft_cells       [.]       int64; drafts before the position, in the flat table of drafts
    """

    mask_index: ArrayT
    mask_words: ArrayT
    allowed_offsets: ArrayT
    allowed_tokens: ArrayT
    bias_offsets: ArrayT
    bias_tokens: ArrayT
    bias_values: ArrayT
    penalty_index: ArrayT
    penalty_slots: ArrayT
    strengths: ArrayT
    draft_offsets: ArrayT
    draft_cells: ArrayT


def collect_row_adjustments(
    rows: Sequence[Row],
    params: Sequence[SlotParams],
    penalties: Penalties[HostArray],
    vocab_size: int,
) -> RowAdjustments[HostArray]:
    """Collect what sample.cu applies to each row.

    penalties   `PenaltyState.collect` of these rows
    """
    masks = collect_token_masks(rows, vocab_size)
    num_rows, num_penalties = len(rows), len(penalties.rows)
    return RowAdjustments(
        _index_of_rows(masks.rows, num_rows),
        masks.words,
        _offsets([len(each.allowed_token_ids) for each in params]),
        concatenate(each.allowed_token_ids for each in params),
        _offsets([len(each.bias_token_ids) for each in params]),
        concatenate(each.bias_token_ids for each in params),
        concatenate((each.bias_values for each in params), np.float64),
        _index_of_rows(penalties.rows, num_rows),
        penalties.slots,
        penalties.strengths,
        _offsets(np.bincount(penalties.draft_rows, minlength=num_penalties).tolist()),
        penalties.draft_cells,
    )


def _index_of_rows(rows: HostArray, num_rows: int) -> HostArray:
    """Return where each row is in `rows`, or -1. int64 [num_rows]."""
    index: HostArray = np.full(num_rows, -1, np.int64)
    index[rows] = np.arange(len(rows))
    return index


def _offsets(lengths: Sequence[int]) -> HostArray:
    """Return where each list starts, and where the last one ends. int64."""
    return np.cumsum([0, *lengths], dtype=np.int64)
