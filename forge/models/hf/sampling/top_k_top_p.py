"""The first tokens by (higher logit, lower id): top-k, top-p and the most likely few.

Owns no state. A prefix of that order is given by its last value and by the number of tokens with
that value that belong to it. So values are ordered without their ids, and ties in any order.

    logits   2 5 3 5 3 3     first 4     last value 3, two tokens are above it, two 3s belong
    first      x x x x                   the two with the lowest ids
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOPK = 1024
"""Leading values up to which torch.topk selects them; for more the vocabulary is sorted."""


def top_k_top_p_mask(x: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int) -> Tensor:
    """Return whether top-k and then top-p keep each token, bool [n, V].

    x           [n, V] float64; logits after temperature
    top_k       [n, 1] int64; tokens that top-k keeps
    top_p       [n, 1] float64; mass of the tokens that top-k left; 1 keeps all
    max_top_k   at least the largest `top_k`, or more than MAX_TOPK
    """
    if max_top_k <= MAX_TOPK:
        values = x.topk(max_top_k, dim=1).values
    else:
        values = x.sort(dim=1, descending=True).values
    ranks = torch.arange(values.shape[1], device=x.device)
    weights = (values - values[:, :1]).exp_().masked_fill_(ranks >= top_k, 0.0)
    mass = weights.cumsum(1)
    # A token is kept while the mass before it is under top_p. The first always is.
    num_kept = 1 + (mass[:, :-1] < top_p * mass[:, -1:]).sum(1, keepdim=True)
    num_kept = torch.where(top_p < 1.0, torch.minimum(num_kept, top_k), top_k)
    return _prefix_mask(x, values, num_kept)


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
