"""Logit adjustments of a chunk of rows: masks, allowed tokens, bias and min_tokens.

Owns one NamedTuple for each family of parameters, a `collect_*` that fills it on the host and an
`apply_*` that applies it on the device. Knows no slot table and no sampling. Penalties, which need
state on the device, are in penalties.py.

    host      collect_*(rows, params) ──► family of numpy arrays
                                            │ buffers.upload_groups: one copy for all families
    device    apply_*(logits, family)  ◄──  family of tensors

    logits [2, 4], allowed_token_ids {1, 3} in row 1:  cells 5 and 7 of the flat logits stay

              0  1  2  3          a cell is row * vocab_size + token
              4 [5] 6 [7]         a row is an index into the chunk, not into the batch

Always true: an empty family launches no kernel, and no function waits for the device. Arithmetic
and order are those of forge.sampling.process_logits: the functions are applied as they stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.models.hf.buffers import concatenate, int64_array
from forge.models.hf.sampling.filters import MAX_SINGLE
from forge.models.hf.sampling.slot_params import SlotParams
from forge.seam import Row

ArrayT = TypeVar("ArrayT")
"""A numpy array while the family is on the host, a tensor once it is on the device."""

HostArray: TypeAlias = "NDArray[Any]"

MASK_WORD_BITS = 64


class TokenMasks(NamedTuple, Generic[ArrayT]):
    """Grammar masks of structured output.

    rows    [m]                  int64; rows of the chunk that have a mask
    words   [m * words a row]    int64; bit i of word w allows token 64 * w + i
    """

    rows: ArrayT
    words: ArrayT


class AllowedTokens(NamedTuple, Generic[ArrayT]):
    """Tokens of rows with `allowed_token_ids`.

    rows    [m]   int64; rows of the chunk that have such a list
    cells   [c]   int64; cells of the flat logits that these rows may sample
    """

    rows: ArrayT
    cells: ArrayT


class LogitBias(NamedTuple, Generic[ArrayT]):
    """Terms of `logit_bias`.

    cells    [c]   int64; cells of the flat logits
    values   [c]   float64; what is added to each
    """

    cells: ArrayT
    values: ArrayT


class MinTokens(NamedTuple, Generic[ArrayT]):
    """Stop tokens of rows whose output is shorter than `min_tokens`.

    cells   [c]   int64; cells of the flat logits
    rows    [c]   int64; row of the chunk that each cell is in
    """

    cells: ArrayT
    rows: ArrayT


def collect_token_masks(rows: Sequence[Row], vocab_size: int) -> TokenMasks[HostArray]:
    """Collect the grammar mask of each row that has one, in whole words of 64 tokens."""
    masked_rows = [index for index, row in enumerate(rows) if row.masks]
    masks = b"".join(_pad_mask(rows[index].masks[0], vocab_size) for index in masked_rows)
    return TokenMasks(int64_array(masked_rows), np.frombuffer(masks, np.int64))


def apply_token_masks(logits: Tensor, masks: TokenMasks[Tensor]) -> None:
    """Set the tokens that a row's mask leaves out to -inf, in place.

    logits   [n, V]   float64
    """
    num_masks = len(masks.rows)
    if not num_masks:
        return
    bits = torch.arange(MASK_WORD_BITS, device=logits.device)
    words = masks.words.view(num_masks, -1, 1)
    allowed_bits = (words >> bits & 1).view(num_masks, -1)[:, : logits.shape[1]]
    masked = logits.index_select(0, masks.rows).masked_fill_(allowed_bits == 0, -inf)
    logits.index_copy_(0, masks.rows, masked)


def collect_allowed_tokens(
    params: Sequence[SlotParams], vocab_size: int
) -> AllowedTokens[HostArray]:
    """Collect the cells that rows with `allowed_token_ids` may sample."""
    rows = [
        index for index, each in enumerate(params) if each.bind.params.allowed_token_ids is not None
    ]
    cells = concatenate(params[index].allowed_token_ids + index * vocab_size for index in rows)
    return AllowedTokens(int64_array(rows), cells)


def apply_allowed_tokens(logits: Tensor, allowed: AllowedTokens[Tensor]) -> None:
    """Set every other token of the rows with `allowed_token_ids` to -inf, in place.

    logits   [n, V]   float64, contiguous
    """
    if not allowed.rows.numel():
        return
    flat = logits.view(-1)
    saved = flat.index_select(0, allowed.cells)
    logits.index_fill_(0, allowed.rows, -inf)
    flat.index_copy_(0, allowed.cells, saved)


def collect_logit_bias(params: Sequence[SlotParams], vocab_size: int) -> LogitBias[HostArray]:
    """Collect the cells and values of `logit_bias`."""
    rows = [index for index, each in enumerate(params) if len(each.bias_token_ids)]
    return LogitBias(
        concatenate(params[index].bias_token_ids + index * vocab_size for index in rows),
        concatenate((params[index].bias_values for index in rows), np.float64),
    )


def apply_logit_bias(logits: Tensor, bias: LogitBias[Tensor]) -> None:
    """Add each value of `logit_bias` to its cell and round to single precision, in place.

    logits   [n, V]   float64, contiguous
    """
    if bias.cells.numel():
        flat = logits.view(-1)
        biased = flat.index_select(0, bias.cells).add_(bias.values)
        flat.index_copy_(0, bias.cells, round_single(biased))


def round_single(x: Tensor) -> Tensor:
    """Return forge.sampling.round_single of each number, float64."""
    return torch.where(x == -inf, x, x.clamp(-MAX_SINGLE, MAX_SINGLE).float().double())


def collect_min_tokens(
    rows: Sequence[Row], params: Sequence[SlotParams], vocab_size: int
) -> MinTokens[HostArray]:
    """Collect the stop tokens of rows whose output `min_tokens` keeps from ending here."""
    short_rows = [
        index for index, each in enumerate(params) if each.min_tokens_applies(rows[index].end)
    ]
    counts = int64_array([len(params[index].stop_token_ids) for index in short_rows])
    return MinTokens(
        concatenate(params[index].stop_token_ids + index * vocab_size for index in short_rows),
        np.repeat(int64_array(short_rows), counts),
    )


def apply_min_tokens(logits: Tensor, min_tokens: MinTokens[Tensor]) -> None:
    """Set the stop tokens to -inf, in place, in rows that can sample another token.

    logits   [n, V]   any float dtype, contiguous
    """
    if not min_tokens.cells.numel():
        return
    flat = logits.view(-1)
    saved = flat.index_select(0, min_tokens.cells)
    flat.index_fill_(0, min_tokens.cells, -inf)
    has_other = (logits.amax(1) > -inf).index_select(0, min_tokens.rows)
    flat.index_copy_(0, min_tokens.cells, saved.masked_fill_(has_other, -inf))


def _pad_mask(mask: bytes, vocab_size: int) -> bytes:
    """Return the mask in as many whole words as the vocabulary needs; added bits are 0."""
    size = -(-vocab_size // MASK_WORD_BITS) * (MASK_WORD_BITS // 8)
    return mask[:size].ljust(size, b"\0")
