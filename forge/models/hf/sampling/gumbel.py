"""Gumbel sampling of a decode step: one pass over the logits, no host, safe inside a CUDA graph.

Owns the noise of forge.sampling on a device. Knows no request: seed and temperature come from
tables that a graph reads, one entry per slot.

    logits row ── temperature 0 ──────────────── argmax ──► token
               └─ otherwise  x * (1 / T) + noise ─ argmax
                  best score  NaN, +inf or -inf ─────────► status, and token 0

Always true: the 32 bits of the noise equal those of forge.sampling, integer for integer. int64
wraps here as the unsigned 64 bits do there. The rest is float64, as Python's floats are. Ties go to
the lower id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.models.hf.sampling.status import STATUS_OK, logits_status

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_FACTOR_2 = 0x94D049BB133111EB - 2**64

MAX_CHUNK_LOGITS = 1 << 22
"""Logits that are worked on at once, so that float64 copies stay under 1 GB."""


def gumbel_sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    out_tokens: Tensor,
    out_status: Tensor,
) -> None:
    """Write each row's token and status.

    logits         [R, V]  any float dtype
    slots          [R]     int32 or int64; index into the two tables
    positions      [R]     int32 or int64; position of the token to sample
    seeds          [N]     int64; the 64 bits of Bind.seed
    temperatures   [N]     float64; 0 is greedy
    out_tokens     [R]     any integer dtype; 0 where the status is not STATUS_OK
    out_status     [R]     any integer dtype; a status of sampling/status.py
    On CUDA: two kernels and no host read. Noise is computed only for rows that are not greedy.
    """
    if logits.is_cuda:
        # Triton is installed only where torch has CUDA.
        from forge.models.hf.sampling.gumbel_triton import gumbel_sample_cuda

        gumbel_sample_cuda(logits, slots, positions, seeds, temperatures, out_tokens, out_status)
        return
    step = max(1, MAX_CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(logits), step):
        chunk = slice(start, start + step)
        slot_index = slots[chunk].long()
        tokens, status = _gumbel_sample_chunk(
            logits[chunk], seeds[slot_index], temperatures[slot_index], positions[chunk]
        )
        out_tokens[chunk] = tokens
        out_status[chunk] = status


def _gumbel_sample_chunk(
    logits: Tensor, seeds: Tensor, temperatures: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens, int64 [n], and status, int8 [n], of the rows of a chunk."""
    scores = logits.to(torch.float64, copy=True)
    random_rows = (temperatures > 0.0).nonzero().squeeze(1)
    if len(random_rows):
        noise = gumbel_noise(draw_keys(seeds[random_rows], positions[random_rows]), logits.shape[1])
        scale = 1.0 / temperatures[random_rows]
        scores[random_rows] = scores[random_rows] * scale[:, None] + noise
    best, tokens = scores.max(dim=1)
    status = logits_status(best)
    return tokens.masked_fill(status != STATUS_OK, 0), status


def purpose_offset(purpose: int) -> int:
    """Return what a purpose of forge.sampling adds to a key, as signed 64 bits. PLAIN: 0."""
    wrapped = purpose * _GOLDEN % 2**64
    return wrapped - 2**64 if wrapped >= 2**63 else wrapped


def draw_keys(seeds: Tensor, positions: Tensor, offsets: Tensor | int = 0) -> Tensor:
    """Return the keys of samples, int64 [R]: forge.sampling.draw_key of each seed and position.

    seeds, positions   [R] int64
    offsets            `purpose_offset` of each sample, or of all
    """
    return _mix_in_place(_mix_in_place(_mix_in_place(seeds + _GOLDEN) + positions) + offsets)


def noise_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the 32 bits of each token's noise, int64 [R, vocab_size]."""
    steps = torch.arange(1, vocab_size + 1, device=keys.device).mul_(_GOLDEN)
    return _shift_right(_mix_in_place(keys[:, None] + steps), 32)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise of every token, float64 [R, vocab_size]."""
    uniform = noise_bits(keys, vocab_size).to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Return `x >> count` of the unsigned 64 bits. torch would shift the sign in."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix_in_place(x: Tensor) -> Tensor:
    """Apply forge.sampling.mix to `x` in place and return it. Large tensors are not copied."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_FACTOR_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_FACTOR_2)
    return x.bitwise_xor_(_shift_right(x, 31))
