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
from forge.models.hf.sampling.top_k_top_p import stable_topk
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
