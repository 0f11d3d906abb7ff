"""Which tokens come first by (higher logit, lower id): top-k, top-p and the most likely few.

Owns no state. A prefix of that order is known by its last value and by how many of the tokens with
that value belong to it. So values are ordered without their ids, and ties may come in any order.

    logits   2 5 3 5 3 3     first 4     last value 3, two tokens are above it, two 3s belong
    first      x x x x                   the two with the lowest ids
"""

from __future__ import annotations

import torch
from torch import Tensor

SELECTED = 1024
"""Up to this many leading values are selected; for more the vocabulary is sorted."""


def leading(x: Tensor, reach: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Whether top-k and then top-p keep each token, bool [n, V].

    x       [n, V] float64, logits after temperature
    reach   [n, 1] int64, tokens that top-k keeps
    top_p   [n, 1] float64, over what top-k left; 1 keeps all
    width   at least the largest reach, or more than SELECTED
    """
    if width <= SELECTED:
        values = x.topk(width, dim=1).values
    else:
        values = x.sort(dim=1, descending=True).values
    ranks = torch.arange(values.shape[1], device=x.device)
    weights = (values - values[:, :1]).exp_().masked_fill_(ranks >= reach, 0.0)
    mass = weights.cumsum(1)
    # A token is kept where what stands before it is under the budget. The first always is.
    kept = 1 + (mass[:, :-1] < top_p * mass[:, -1:]).sum(1, keepdim=True)
    kept = torch.where(top_p < 1.0, torch.minimum(kept, reach), reach)
    return _first(x, values, kept)


def most_likely(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the `count` largest of each row, [n, count]; ties in order of their ids."""
    size = x.shape[1]
    values = x.topk(count, dim=1).values
    chosen = _first(x, values, torch.full_like(values[:, :1], count, dtype=torch.int64))
    # topk leaves the order of ties open, so it ranks numbers that differ: V for id 0, V - 1, ...
    rank = torch.arange(size, 0, -1, dtype=torch.int32, device=x.device)
    ids = size - (rank * chosen).topk(count, dim=1).values.long()
    ids.clamp_(max=size - 1)  # a row with a NaN has chosen too few
    found = x.gather(1, ids)
    place = found.argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, place), found.gather(1, place)


def _first(x: Tensor, values: Tensor, count: Tensor) -> Tensor:
    """Whether each token is among the first `count` [n, 1]; `values` are that many or more."""
    last = values.gather(1, (count - 1).clamp_(max=values.shape[1] - 1))
    spare = count - (values > last).sum(1, keepdim=True)
    tied = x == last
    return tied.logical_and_(tied.cumsum(1, dtype=torch.int32) <= spare).logical_or_(x > last)
