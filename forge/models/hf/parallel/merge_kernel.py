"""BestMerger: the best token of each row over all ranks, as one kernel. Imported only with Triton.

Owns the kernel. Meaning and shapes are those of `merge_best` in best_tokens.py, bit for bit.

    rank 0   score, token, status ─┐
    rank 1   score, token, status ─┴─► the highest score; of equal ones the first rank's

Always true: the kernel is compiled when a merger is made, so a CUDA graph may capture a call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.models.hf.sampling.status import STATUS_OK

BLOCK_ROWS = 128
"""Rows of a program: most steps need one or two."""


def _merge_rows(
    scores: tl.tensor,
    numbers: tl.tensor,
    ranking: tl.tensor,
    out_tokens: tl.tensor,
    out_status: tl.tensor,
    num_rows: tl.tensor,
    WORLD: tl.constexpr,
    OK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A rank has num_rows scores of 8 bytes, then as many tokens and statuses of 4.
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_mask = rows < num_rows
    best = tl.full((BLOCK,), float("-inf"), tl.float64)
    token = tl.zeros((BLOCK,), tl.int32)
    status = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(WORLD):
        of_rank = numbers + rank * 4 * num_rows + 2 * num_rows + rows
        rank_token = tl.load(of_rank, mask=row_mask, other=0)
        rank_status = tl.load(of_rank + num_rows, mask=row_mask, other=0)
        score = tl.load(scores + rank * 2 * num_rows + rows, mask=row_mask, other=0.0)
        stand_in = tl.load(ranking + rank_status, mask=row_mask, other=0.0)
        score = tl.where(rank_status == OK, score, stand_in)
        # Strictly: ids of a later rank are higher. All scores may be -inf.
        is_better = (score > best) | (rank == 0)
        best = tl.where(is_better, score, best)
        token = tl.where(is_better, rank_token, token)
        status = tl.where(is_better, rank_status, status)
    tl.store(out_tokens + rows, token, mask=row_mask)
    tl.store(out_status + rows, status, mask=row_mask)


# One variant for any number of rows and any place of a row in a wider tensor.
merge_rows = triton.jit(
    _merge_rows, do_not_specialize=["scores", "numbers", "out_tokens", "out_status", "num_rows"]
)


class BestMerger:
    """`merge_best` of the results of so many ranks on one device.

    ranking   of `create_ranking`
    """

    def __init__(self, ranking: Tensor, world_size: int) -> None:
        self._ranking, self._world_size = ranking, world_size
        gathered = torch.zeros((world_size, 4), dtype=torch.int32, device=ranking.device)
        out = torch.zeros((2, 1), dtype=torch.int32, device=ranking.device)
        self.merge(gathered, out[0], out[1])

    def merge(self, gathered: Tensor, out_tokens: Tensor, out_status: Tensor) -> None:
        """Write token and status of each row, as `merge_best`. All three are contiguous."""
        arrays = (gathered, out_tokens, out_status)
        assert all(each.is_contiguous() for each in arrays), [each.stride() for each in arrays]
        num_rows = len(out_tokens)
        merge_rows[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            gathered.view(torch.float64),
            gathered,
            self._ranking,
            out_tokens,
            out_status,
            num_rows,
            WORLD=self._world_size,
            OK=STATUS_OK,
            BLOCK=BLOCK_ROWS,
        )
