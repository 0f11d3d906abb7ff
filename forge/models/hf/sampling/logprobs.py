"""Log probabilities of sampled, most likely and listed tokens, from the device to the host.

Owns the packed format of a row: token, its log probability, ids of other tokens, theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.buffers import HostCopy
from forge.models.hf.sampling.gumbel import MAX_CHUNK_LOGITS
from forge.request import TokenLogprob


class PendingLogprobs(NamedTuple):
    """Log probabilities on their way to the host, n of them.

    batch_rows   [n] row of the batch that each belongs to
    num_top      [n] most likely or listed tokens that its request returns
    host_copy    copy of the result of `compute_logprobs` or `compute_listed_logprobs`
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
    num_top = min(num_top, logits.shape[1])
    return _pack_logprobs(logits, tokens, num_top, lambda x, _: stable_topk(x, num_top))


def compute_listed_logprobs(logits: Tensor, tokens: Tensor, listed: Tensor) -> Tensor:
    """Compute log probabilities of listed ids from raw logits, packed as by `compute_logprobs`.

    logits   [n, V]  any float dtype
    tokens   [n]     the token of each row
    listed   [n, m]  int64; the ids of each row
    """

    def choose(x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return listed[part], x.gather(1, listed[part])

    return _pack_logprobs(logits, tokens, listed.shape[1], choose)


def _pack_logprobs(
    logits: Tensor,
    tokens: Tensor,
    num_others: int,
    choose: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the packed log probabilities of each row's token and of the others of the row.

    choose   returns ids and logits of the others, each [rows, num_others], for a part of the rows
    """
    size = logits.shape[1]
    result = torch.empty(len(logits), 2 + 2 * num_others, dtype=torch.float64, device=logits.device)
    step = max(1, MAX_CHUNK_LOGITS // size)
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        packed, x = result[part], logits[part].double()
        token_index = tokens[part].long()[:, None]
        top = x.amax(1, keepdim=True)
        total = (x - top).exp_().sum(1, keepdim=True).log_().add_(top)
        packed[:, :1] = token_index
        packed[:, 1:2] = x.gather(1, token_index) - total
        if num_others:
            ids, values = choose(x, part)
            packed[:, 2 : 2 + num_others] = ids
            packed[:, 2 + num_others :] = values - total
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
