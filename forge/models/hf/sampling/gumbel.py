"""Gumbel noise of forge.sampling in plain torch.

Owns keys and noise. Knows no request and no logits.

    seed, position, purpose ──► key ──► 32 bits of each token ──► uniform ──► -log(-log(uniform))

Always true: the 32 bits equal those of forge.sampling, integer for integer. int64 wraps here as the
unsigned 64 bits do there. The rest is float64, as Python's floats are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_FACTOR_2 = 0x94D049BB133111EB - 2**64

MAX_CHUNK_LOGITS = 1 << 22
"""Logits that are worked on at once, so that float64 copies stay under 1 GB."""


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


def noise_bits(keys: Tensor, num_tokens: int, first_token: int = 0) -> Tensor:
    """Return the 32 bits of the noise of ids from `first_token` on, int64 [R, num_tokens]."""
    first = first_token + 1
    steps = torch.arange(first, first + num_tokens, device=keys.device).mul_(_GOLDEN)
    return _shift_right(_mix_in_place(keys[:, None] + steps), 32)


def gumbel_noise(keys: Tensor, num_tokens: int, first_token: int = 0) -> Tensor:
    """Return standard Gumbel noise of ids from `first_token` on, float64 [R, num_tokens]."""
    uniform = noise_bits(keys, num_tokens, first_token).to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Return `x >> count` of the unsigned 64 bits. torch would shift the sign in."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix_in_place(x: Tensor) -> Tensor:
    """Apply forge.sampling.mix to `x` in place and return it. Large tensors are not copied."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_FACTOR_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_FACTOR_2)
    return x.bitwise_xor_(_shift_right(x, 31))
