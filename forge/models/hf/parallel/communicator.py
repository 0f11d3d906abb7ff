"""Communicator: sums and copies of tensors between the ranks of one model.

Owns the protocol, and its form over torch.distributed's gloo on CPUs. Knows no model and no plan.

    rank 0   [ a ]          all_reduce   [ a + b ]   on both, equal bits
    rank 1   [ b ]          all_gather   [ a, b ]    on both
                            broadcast    [ a ]       on both

Always true: a sum adds in the order of ranks, so every rank has the same bits. All ranks make the
same calls in the same order, with tensors of the same shape and dtype.
Tensor parallelism: Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator(Protocol):
    """The ranks of one model, and this process's place among them.

    rank         number of this process, from 0
    world_size   number of processes
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual, which is equal on all ranks.

        The result is `x`, overwritten, or another tensor, valid until the next call. Added in the
        order of ranks, so that every rank returns equal bits. The residual is not changed.
        """
        ...

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return the result of `all_reduce` and its RMS norm, from one kernel.

        x, residual   [tokens, H]
        weight        [H]
        Return None, with nothing launched, where no such kernel takes these tensors. Equal on all
        ranks.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, [world_size, *x.shape], in the order of ranks."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x` with that of rank `source`."""
        ...


def add_parts(parts: Tensor, residual: Tensor | None) -> Tensor:
    """Return the sum of all ranks' parts in their order, in float32 or wider, and the residual.

    parts   [world_size, ...]
    """
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    if residual is not None:
        total = total + residual
    return total.to(parts.dtype)


class GlooCommunicator:
    """Ranks on CPUs, over a process group of torch.distributed. Used by tests.

    group   process group; None: the default one, which is initialised
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual."""
        return add_parts(self.all_gather(x), residual)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return None: there is no such kernel."""
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, [world_size, *x.shape]."""
        gathered = x.new_empty((self.world_size, *x.shape))
        dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=self._group)
        return gathered

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x` with that of rank `source`."""
        sent = x.contiguous()
        dist.broadcast(sent, group=self._group, group_src=source)
        if sent is not x:
            x.copy_(sent)
