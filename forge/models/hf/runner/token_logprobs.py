"""The log probabilities that come with the tokens of a step, of requests that list ids and others.

Owns which rows go together. Knows no batch and no request.

    rows with top logprobs         one call of the kernel, as many as the most that a row has
    rows with many of them         in plain torch, a few rows at a time
    rows with logprob_token_ids    a gather from their logits, in plain torch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from forge.models.hf.buffers import HostCopy
from forge.models.hf.sampling.gumbel import MAX_CHUNK_LOGITS
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.sampling.sampler import Sampler
from forge.request import MAX_FAST_LOGPROBS, SamplingParams


class ScoredToken(NamedTuple):
    """A token whose log probability its request returns.

    logits_row   row of the logits that it was sampled from
    batch_row    row of the batch that it belongs to
    params       parameters of its request
    """

    logits_row: int
    batch_row: int
    params: SamplingParams


def compute_token_logprobs(
    sampler: Sampler,
    to_device: Callable[[Sequence[int]], Tensor],
    logits: Tensor,
    tokens: Tensor,
    scored: Sequence[ScoredToken],
) -> list[PendingLogprobs]:
    """Compute the log probabilities of n tokens, and start the copies to the host.

    to_device   returns integers as an int64 tensor on the sampler's device
    logits      [R, V] any float dtype
    tokens      [n] int64
    scored      n of them

    The tokens of one row of the batch keep their order. None are returned for n = 0.
    """
    few, many, listing = list[int](), list[int](), list[int]()
    for index, (_, _, params) in enumerate(scored):
        is_few = (params.logprobs or 0) <= MAX_FAST_LOGPROBS
        (listing if params.logprob_token_ids else few if is_few else many).append(index)
    if len(few) == len(scored):
        return [_score(sampler, to_device, logits, tokens, scored)] if scored else []
    num_rows = max_packed_rows(max((scored[i].params.logprobs or 0 for i in many), default=0))
    parts = [few, listing, *(many[i : i + num_rows] for i in range(0, len(many), num_rows))]
    return [
        _score(sampler, to_device, logits, tokens[to_device(part)], [scored[i] for i in part])
        for part in parts
        if part
    ]


def max_packed_rows(count: int) -> int:
    """Return how many rows with so many log probabilities each are packed at once."""
    return max(1, MAX_CHUNK_LOGITS // max(1, count))


def _score(
    sampler: Sampler,
    to_device: Callable[[Sequence[int]], Tensor],
    logits: Tensor,
    tokens: Tensor,
    scored: Sequence[ScoredToken],
) -> PendingLogprobs:
    """Compute the log probabilities of tokens whose requests all list ids, or all list none."""
    logits_rows = to_device([each.logits_row for each in scored])
    lists = [each.params.logprob_token_ids for each in scored]
    if lists[0]:
        counts = [len(ids) for ids in lists]
        width = max(counts)
        # A shorter list is padded with an id; `counts` cuts it off again.
        padded = [token for ids in lists for token in (*ids, *ids[:1] * (width - len(ids)))]
        listed = to_device(padded).view(-1, width)
        packed = sampler.compute_listed_logprobs(logits, tokens, listed, logits_rows)
    else:
        counts = [each.params.logprobs or 0 for each in scored]
        packed = sampler.compute_logprobs(logits, tokens, max(counts), logits_rows)
    return PendingLogprobs([each.batch_row for each in scored], counts, HostCopy(packed))
