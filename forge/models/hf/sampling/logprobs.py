"""Log probabilities of sampled and most likely tokens, computed on the device, read on the host.

Owns the packed format of a row: token, its log probability, ids of the top tokens, theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.buffers import HostCopy
from forge.models.hf.sampling.gumbel import MAX_CHUNK_LOGITS
from forge.request import TokenLogprob


class PendingLogprobs(NamedTuple):
    """Log probabilities on their way to the host, n of them.

    batch_rows   [n] row of the batch that each belongs to
    num_top      [n] most likely tokens that its request returns
    host_copy    copy of `compute_logprobs`' result
    """

    batch_rows: Sequence[int]
    num_top: Sequence[int]
    host_copy: HostCopy


def compute_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Compute log probabilities from raw logits, packed so that one copy takes them to the host.

    logits   [n, V]  any float dtype
    tokens   [n]     the token of each row
    Return float64 [n, 2 + 2 * min(num_top, V)]: token, its log probability, ids of the most likely
    tokens, their log probabilities. NaN where a row's logits are not finite. `read_logprobs`
    unpacks.
    """
    size = logits.shape[1]
    num_top = min(num_top, size)
    result = torch.empty(len(logits), 2 + 2 * num_top, dtype=torch.float64, device=logits.device)
    step = max(1, MAX_CHUNK_LOGITS // size)
    for start in range(0, len(logits), step):
        packed = result[start : start + step]
        x = logits[start : start + step].double()
        token_index = tokens[start : start + step].long()[:, None]
        top = x.amax(1, keepdim=True)
        total = (x - top).exp_().sum(1, keepdim=True).log_().add_(top)
        packed[:, :1] = token_index
        packed[:, 1:2] = x.gather(1, token_index) - total
        if num_top:
            likely, values = stable_topk(x, num_top)
            packed[:, 2 : 2 + num_top] = likely
            packed[:, 2 + num_top :] = values - total
    return result


def read_logprobs(packed: Tensor) -> tuple[TokenLogprob, ...]:
    """Unpack the result of `compute_logprobs`, from its copy on the host."""
    count = (packed.shape[1] - 2) // 2
    return tuple(
        TokenLogprob(
            int(token),
            logprob,
            tuple(zip(map(int, top[:count]), top[count:], strict=True)),
        )
        for token, logprob, *top in packed.tolist()
    )


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the `k` largest of each row, [n, k]; ties in order of their ids."""
    size = x.shape[1]
    values = x.topk(k, dim=1).values
    is_top = _prefix_mask(x, values, torch.full_like(values[:, :1], k, dtype=torch.int64))
    # topk orders ties arbitrarily, so it ranks distinct numbers: V for id 0, V - 1, ...
    tie_breaker = torch.arange(size, 0, -1, dtype=torch.int32, device=x.device)
    ids = size - (tie_breaker * is_top).topk(k, dim=1).values.long()
    ids.clamp_(max=size - 1)  # A row with a NaN selects fewer than k.
    values_by_id = x.gather(1, ids)
    order = values_by_id.argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values_by_id.gather(1, order)


def _prefix_mask(x: Tensor, values: Tensor, count: Tensor) -> Tensor:
    """Return whether each token is among the first `count` of its row, bool [n, V].

    values   [n, m] values in descending order, m at least the largest count
    count    [n, 1] int64
    """
    threshold = values.gather(1, (count - 1).clamp_(max=values.shape[1] - 1))
    num_ties = count - (values > threshold).sum(1, keepdim=True)
    is_tied = x == threshold
    return is_tied.logical_and_(is_tied.cumsum(1, dtype=torch.int32) <= num_ties).logical_or_(
        x > threshold
    )
