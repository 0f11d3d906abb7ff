"""Ops: the protocol of the operations between two attention calls of a decoder layer.

Owns the signatures. ops/reference.py computes them in torch, ops/triton_ops.py in Triton.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ops(Protocol):
    """Operations between two attention calls, on [tokens, ...] tensors. Meaning: ops/reference.py.

    max_small_rows   tokens up to which the *_small operations are faster; 0: never
    """

    max_small_rows: int

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def linear(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def gate_up(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        q_norm_weight: torch.Tensor | None,
        k_norm_weight: torch.Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def linear_small(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gate_up_small(
        self, x: torch.Tensor, w: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...
