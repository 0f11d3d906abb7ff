"""Sampling of rows from their slots' parameters, in plain torch. On CUDA sample.cu does the same.

Owns the slot table's fields. Knows no request: temperature and filters come from the table.

    slot_table   seed, and the bits of five doubles: 1 / T, noise scale, top_k, top_p, max_gap
    logits row ──── filters ─ / T ─ + noise ─ argmax ──► token
                    NaN, +inf, all -inf ───────────────► status, and token 0

Always true: what comes out is forge.sampling's, and ties go to the lower id.
"""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.models.hf.sampling.filters import (
    MAX_TOPK,
    FilterParams,
    compute_gaps,
    find_cuts,
    kept_mask,
)
from forge.models.hf.sampling.gumbel import MAX_CHUNK_LOGITS, draw_keys, gumbel_noise
from forge.models.hf.sampling.slot_params import SamplingNumbers
from forge.models.hf.sampling.status import STATUS_OK, logits_status
from forge.sampling import MAX_GAP

NUM_SLOT_FIELDS = 1 + len(SamplingNumbers._fields)


def build_slot_entry(seed: int, numbers: SamplingNumbers) -> NDArray[np.int64]:
    """Return a slot's entry in the slot table, int64 [NUM_SLOT_FIELDS].

    seed   unsigned 64 bits
    """
    bits = np.array(numbers, np.float64).view(np.int64)
    return np.concatenate((np.array([seed], np.uint64).view(np.int64), bits))


def create_slot_table(num_slots: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return a table whose slots are greedy, int64 [num_slots, NUM_SLOT_FIELDS]."""
    greedy = build_slot_entry(0, SamplingNumbers.greedy(vocab_size))
    return torch.from_numpy(greedy).repeat(num_slots, 1).to(device)


def sample_slots(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    slot_table: Tensor,
    out_tokens: Tensor,
    out_status: Tensor,
    *,
    first_token: int = 0,
    out_scores: Tensor | None = None,
) -> None:
    """Write each row's token and status. Waits for the device, if there is one.

    logits        [R, V] any float dtype
    slots         [R] int32 or int64
    positions     [R] int32 or int64; positions of the tokens to sample
    slot_table    [slots, NUM_SLOT_FIELDS] int64
    out_tokens    [R] any integer dtype; 0 where the status is not STATUS_OK
    out_status    [R] any integer dtype; a status of sampling/status.py
    first_token   id of the first logit of a row
    out_scores    [R] float64; score of each row's token, where the caller compares parts of a row
    """
    step = max(1, MAX_CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(logits), step):
        chunk = slice(start, start + step)
        entries = slot_table[slots[chunk].long()]
        scores = logits[chunk].to(torch.float64, copy=True)
        status = logits_status(scores.amax(1))
        _score_rows(scores, entries, positions[chunk], first_token)
        best = scores.argmax(1)
        if out_scores is not None:
            out_scores[chunk] = scores.gather(1, best[:, None])[:, 0]
        out_tokens[chunk] = best.add_(first_token).masked_fill_(status != STATUS_OK, 0)
        out_status[chunk] = status


def _score_rows(scores: Tensor, entries: Tensor, positions: Tensor, first_token: int) -> None:
    """Replace logits by scores, in place: filters, temperature and noise.

    scores        [n, V] float64
    entries       [n, NUM_SLOT_FIELDS] rows of the slot table
    first_token   id of the first score of a row
    """
    vocab_size = scores.shape[1]
    numbers = entries[:, 1:].view(torch.float64)
    _, noise_scale, top_k, top_p, max_gap = numbers.unbind(1)
    has_order = (top_k < vocab_size) | (top_p < 1.0)
    # Leading tokens whose order a row needs. One row must not make all others sort.
    num_ordered = torch.where(has_order, top_k, 0.0)
    for is_kind in (
        (num_ordered == 0) & (max_gap < MAX_GAP),
        (num_ordered > 0) & (num_ordered <= MAX_TOPK),
        num_ordered > MAX_TOPK,
    ):
        rows = is_kind.nonzero()[:, 0]
        if len(rows):
            params = FilterParams(top_k[rows], top_p[rows], max_gap[rows])
            gaps = compute_gaps(scores[rows], numbers[rows, 0])
            cuts = find_cuts(gaps, params, int(num_ordered[rows].max()))
            scores[rows] = scores[rows].masked_fill_(kept_mask(gaps, cuts).logical_not_(), -inf)
    rows = (noise_scale > 0.0).nonzero()[:, 0]
    if len(rows):
        keys = draw_keys(entries[rows, 0], positions[rows])
        noise = gumbel_noise(keys, vocab_size, first_token)
        scores[rows] = scores[rows].mul_(numbers[rows, :1]).add_(noise)
