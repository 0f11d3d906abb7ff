"""Chunks of rows in plain torch: logits after forge.sampling.process_logits, in float64.

Owns their grouping, and the one upload that holds a chunk's parameters. Knows no slot table.

    rows ─ group_rows ─► chunks that fit into memory and need the same kind of filter
    chunk ─ build_chunk ─► parameters on the device, adjusted logits, status of each row
             masks ─ allowed ids ─ bias ─ min_tokens ─ penalties

Always true: nothing here waits for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forge.models.hf.buffers import int64_array, upload_groups
from forge.models.hf.sampling.filters import MAX_TOPK
from forge.models.hf.sampling.gumbel import purpose_offset
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
from forge.models.hf.sampling.slot_params import SamplingNumbers, SlotParams
from forge.models.hf.sampling.status import STATUS_NOTHING_ALLOWED, STATUS_OK, logits_status
from forge.seam import Row


class ChunkRows(NamedTuple, Generic[ArrayT]):
    """Fields that each of a chunk's n rows has: numpy arrays on the host, tensors on the device.

    indices           [n]       int64; index of the row in the rows given to the sampler
    logits_rows       [n]       int64; row of the logits
    numbers           [n * 5]   float64; the fields of SamplingNumbers, row after row
    slots             [n]       int64
    positions         [n]       int64; position of the token to sample, one past the row's inputs
    purpose_offsets   [n]       int64; gumbel.purpose_offset of `SlotParams.purpose`
    The slot's seed, the position and the purpose determine the key of a row's noise.
    """

    indices: ArrayT
    logits_rows: ArrayT
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

    rows          index of each row in the rows given to `adjusted_chunks`
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


def group_rows(params: Mapping[int, SlotParams], max_rows: int) -> Iterator[list[int]]:
    """Yield row indices in groups that fit into memory and need the same kind of filter.

    params     row index -> parameters of its slot
    max_rows   most rows of a group
    Kinds: no order of tokens, torch.topk up to MAX_TOPK, and a sort of the vocabulary. Rows are in
    ascending order of `SlotParams.max_top_k`.
    """

    def order(index: int) -> int:
        return params[index].max_top_k

    for _, group in groupby(
        sorted(params, key=order), key=lambda index: (order(index) > 0) + (order(index) > MAX_TOPK)
    ):
        picks = list(group)
        for start in range(0, len(picks), max_rows):
            yield picks[start : start + max_rows]


def build_chunk(
    logits: Tensor,
    logits_rows: Sequence[int],
    chunk_rows: Sequence[int],
    rows: Sequence[Row],
    params: Sequence[SlotParams],
    penalties: PenaltyState,
) -> SamplingChunk:
    """Return the chunk of these rows. Its parameters are copied to the device in one transfer.

    logits        [R, V] any float dtype; not changed
    logits_rows   [n] row of the logits for each row
    chunk_rows    [n] index of each row for the caller
    rows          [n] only the first of a row's masks is read
    params        [n] parameters of each row's slot
    """
    vocab_size = logits.shape[1]
    inputs = ChunkInputs(
        *upload_groups(
            logits.device,
            collect_chunk_rows(chunk_rows, logits_rows, rows, params),
            collect_token_masks(rows, vocab_size),
            collect_allowed_tokens(params, vocab_size),
            collect_logit_bias(params, vocab_size),
            collect_min_tokens(rows, params, vocab_size),
            penalties.collect(rows, params),
        )
    )
    adjusted = logits.index_select(0, inputs.rows.logits_rows).double()
    status = logits_status(adjusted.amax(1))
    apply_token_masks(adjusted, inputs.masks)
    apply_allowed_tokens(adjusted, inputs.allowed)
    apply_logit_bias(adjusted, inputs.bias)
    apply_min_tokens(adjusted, inputs.min_tokens)
    penalties.apply(adjusted, inputs.penalties)
    if inputs.allowed.rows.numel() or inputs.masks.rows.numel():
        nothing_allowed = (status == STATUS_OK) & (adjusted.amax(1) == -inf)
        status.masked_fill_(nothing_allowed, STATUS_NOTHING_ALLOWED)
    max_top_k = max(each.max_top_k for each in params)
    is_random = any(each.numbers.noise_scale for each in params)
    return SamplingChunk(chunk_rows, params, inputs, adjusted, status, max_top_k, is_random)


def collect_chunk_rows(
    chunk_rows: Sequence[int],
    logits_rows: Sequence[int],
    rows: Sequence[Row],
    params: Sequence[SlotParams],
) -> ChunkRows[NDArray[Any]]:
    """Collect the fields that every row of a chunk has, on the host.

    chunk_rows    index of each row in the rows given to `Sampler.adjusted_chunks`
    logits_rows   row of the logits of each
    rows          rows of the chunk
    params        parameters of each row's slot
    """
    return ChunkRows(
        int64_array(chunk_rows),
        int64_array(logits_rows),
        np.array([each.numbers for each in params], np.float64).reshape(-1),
        int64_array([row.slot for row in rows]),
        int64_array([row.end for row in rows]),
        int64_array([purpose_offset(each.purpose) for each in params]),
    )
