"""TorchOps: the arithmetic between two attention calls, in plain torch.

Owns the meaning of every operation that kernels.py makes fast: it runs on any device and in any
float dtype, and the Triton kernels are compared with it. Knows no model and no plan.

    norm ─► qkv ─► rope_write ─► (attention) ─► o + residual ─► norm ─► gate, up ─► down + residual
                       └──► pages

Rounding follows the modules of transformers: a norm is computed in fp32 and rounded before its
weight multiplies, silu is rounded before the product. float64 stays float64 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def _to_float32(x: Tensor) -> Tensor:
    """In fp32, or float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] with its first `rotary_dim` dimensions turned by cos, sin [T, rot]; one
    rounding.

    Dimension i turns with dimension i + rot / 2 (RoFormer's pairs, in the order of GPT-NeoX).
    """
    rotary_dim = cos.shape[-1]
    rotary_part = x[..., :rotary_dim].to(torch.promote_types(x.dtype, cos.dtype))
    rotated_half = torch.cat(
        (-rotary_part[..., rotary_dim // 2 :], rotary_part[..., : rotary_dim // 2]), -1
    )
    rotated = rotary_part * cos[:, None] + rotated_half * sin[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


class TorchOps:
    """The operations in plain torch.

    small_rows is 0: the *_small operations are right at any number of rows, but never faster here.
    """

    max_small_rows = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x over its root mean square, times weight (Zhang and Sennrich 2019).

        x [..., H], weight [H]. Also the per-head norm, with H the head's dimension.
        """
        x32 = _to_float32(x)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` holds residual + x, rounded; the norm of that sum is returned.

        x, residual [T, H], weight [H].
        """
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [T, I] of gate_up [T, 2 * I]: gates first (SwiGLU, Shazeer 2020)."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        keys: Tensor,
        values: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values are in their pages; queries and keys, normed and rotated, are returned.

        qkv                            [T, (num_heads + 2 * num_kv_heads) * D]
        cos, sin                       [max position, rot], rot <= D: later dimensions do not turn
        positions                      [T] int32
        slot_mapping                   [T] int32; page * block_size + offset
        keys, values                   [pages, block_size, num_kv_heads, Dp], Dp >= D; only D are
                                       written
        q_norm_weight, k_norm_weight   [D], of a norm of every head; None: no norm
        Returns [T, num_heads, D] and [T, num_kv_heads, D].
        """
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, -1)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
        if q_norm_weight is not None:
            q = self.rms_norm(q, q_norm_weight, eps)
        if k_norm_weight is not None:
            k = self.rms_norm(k, k_norm_weight, eps)
        cos, sin = cos[positions], sin[positions]
        block_ids = torch.div(slot_mapping, keys.shape[1], rounding_mode="floor")
        offsets = slot_mapping % keys.shape[1]
        head_dim = heads.shape[-1]
        k = _apply_rope(k, cos, sin)
        keys[..., :head_dim][block_ids, offsets] = k
        values[..., :head_dim][block_ids, offsets] = v
        return _apply_rope(q, cos, sin), k

    def linear_small(
        self,
        x: Tensor,
        w: Tensor,
        *,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """norm(x) @ w.T + bias + residual, in `out` if given: a tensor apart, or `residual`.

        x [M, K], w [N, K], bias [N], norm [K] with its eps, residual and out [M, N].
        """
        if norm_weight is not None:
            x = self.rms_norm(x, norm_weight, eps)
        y = linear(x, w, bias)
        if residual is not None:
            y = y + residual
        return y if out is None else out.copy_(y)

    def gate_up_small(self, x: Tensor, w: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """silu(gate) * up [M, I], where w [2 * I, K] has the rows of gate, then those of up."""
        return self.silu_mul(linear(self.rms_norm(x, norm_weight, eps), w))
