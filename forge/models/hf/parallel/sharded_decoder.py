"""ShardedDecoder: the fused decoder of one rank, with an all-reduce after each partial sum.

Owns where the ranks meet. Everything else is FusedDecoder's, on the rank's heads and rows.

    many tokens                                up to `ops.max_small_rows` tokens
    a Wo ─► all-reduce ─► add and norm         small(a, Wo) ─► all-reduce ─► + x
    m Wd ─► all-reduce ─► add and norm         small(m, Wd) ─► all-reduce ─► + x

Always true: two all-reduces a layer. The residual is added once, after the sum over ranks, so
hidden states have equal bits on all ranks. Logits are those of the rank's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from forge.models.hf.decoders.fused_decoder import FusedDecoder
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.parallel.communicator import Communicator


class ShardedDecoder(FusedDecoder):
    """Fused decoder of a rank's heads, rows and ids.

    parts   arguments of FusedDecoder
    """

    def __init__(self, communicator: Communicator, *parts: Any) -> None:
        super().__init__(*parts)
        self._communicator = communicator

    def _add_output_small(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over ranks of y @ w.T + bias, and the residual added to it."""
        return self._communicator.all_reduce(self._ops.linear_small(y, w, bias=bias), residual)

    def _add_output(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over ranks of y @ w.T + bias, and the residual added to it."""
        return self._communicator.all_reduce(self._ops.linear(y, w, bias), residual)

    def _add_output_norm(
        self,
        y: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over ranks of y @ w.T + bias, plus the residual, and its norm."""
        partial_sum = self._ops.linear(y, w, bias)
        fused = self._communicator.all_reduce_norm(partial_sum, residual, norm_weight, self._eps)
        if fused is not None:
            return fused
        total = self._communicator.all_reduce(partial_sum)
        return residual, self._ops.add_rms_norm(total, residual, norm_weight, self._eps)

    def warmup_calls(self, kv_cache: KVCache) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every operation in every form that a step may need.

        None of them communicates: they run on several threads, in any order.
        """
        yield from super().warmup_calls(kv_cache)
        ops, layer = self._ops, self._layers[0]
        for rows in (1, 2, 3, 4)[: ops.max_small_rows]:
            for weight, bias in ((layer.o, layer.o_bias), (layer.down, None)):
                x = torch.zeros(rows, weight.shape[1], dtype=self.dtype, device=self.device)
                yield partial(ops.linear_small, x, weight, bias=bias)
