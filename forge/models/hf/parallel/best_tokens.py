"""BestTokens: the best token of each row over the ids of one rank, and the best of all ranks.

Owns the layout of the buffer that ranks exchange, 16 bytes a row, and the merge in plain torch. On
CUDA merge_kernel.py does the same in one kernel.

    buffer    n scores, float64 | n tokens, int32 | n statuses, int32

Always true: a row that has NaN or +inf on one rank fails on all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.sampling.status import (
    NUM_STATUSES,
    STATUS_NAN,
    STATUS_OK,
    STATUS_POSITIVE_INF,
)


class BestTokens(NamedTuple):
    """Best token of each of n rows over a part of the vocabulary, in one buffer.

    buffer   [4 * n] int32
    scores   [n] float64; view of the buffer
    tokens   [n] int32; view; ids of the whole vocabulary
    status   [n] int32; view
    """

    buffer: Tensor
    scores: Tensor
    tokens: Tensor
    status: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> BestTokens:
        """Return the fields of a buffer, [..., 4 * n] int32."""
        count = buffer.shape[-1] // 4
        return cls(
            buffer,
            buffer[..., : 2 * count].view(torch.float64),
            buffer[..., 2 * count : 3 * count],
            buffer[..., 3 * count :],
        )


def create_ranking(device: torch.device) -> Tensor:
    """Return what stands for the score of a part by its status, float64 [5] on the device.

    A part with NaN or +inf is an error of its row. One of -inf alone is none where another part has
    a finite logit, whose score is far from either.
    """
    ranking = torch.full((NUM_STATUSES,), -inf, dtype=torch.float64)
    ranking[STATUS_POSITIVE_INF] = 1e300
    ranking[STATUS_NAN] = inf
    return ranking.to(device)


def merge_best(ranking: Tensor, gathered: Tensor, out_tokens: Tensor, out_status: Tensor) -> None:
    """Write token and status of each row, [n] int32, from the results of all ranks.

    ranking    of `create_ranking`
    gathered   [ranks, 4 * n] int32; a buffer of BestTokens from each rank, in the order of ids
    """
    parts = BestTokens.of(gathered)
    is_ok = parts.status == STATUS_OK
    scores = torch.where(is_ok, parts.scores, ranking[parts.status.long()])
    # The first of equal scores is the lower id: parts are in the order of ids.
    best = scores.argmax(0, keepdim=True)
    torch.gather(parts.tokens, 0, best, out=out_tokens[None])
    torch.gather(parts.status, 0, best, out=out_status[None])


MergeBest = Callable[[Tensor, Tensor, Tensor], None]
"""`merge_best` with the ranking of a device: takes `gathered`, `out_tokens` and `out_status`."""


def create_merge(world_size: int, device: torch.device) -> MergeBest:
    """Return the merge of so many ranks' results: one kernel on CUDA, plain torch on a CPU."""
    ranking = create_ranking(device)
    if device.type != "cuda":
        return partial(merge_best, ranking)
    # Triton is installed only where torch has CUDA.
    from forge.models.hf.parallel.merge_kernel import BestMerger

    return BestMerger(ranking, world_size).merge
