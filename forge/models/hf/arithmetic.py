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


def _wide(x: Tensor) -> Tensor:
    """In fp32, or float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] with its first `rot` dimensions turned by cos, sin [T, rot]; one rounding.

    Dimension i turns with dimension i + rot / 2 (RoFormer's pairs, in the order of GPT-NeoX).
    """
    rot = cos.shape[-1]
    turning = x[..., :rot].to(torch.promote_types(x.dtype, cos.dtype))
    half = torch.cat((-turning[..., rot // 2 :], turning[..., : rot // 2]), -1)
    turned = turning * cos[:, None] + half * sin[:, None]
    return torch.cat((turned.to(x.dtype), x[..., rot:]), -1)


class TorchOps:
    """The operations in plain torch.

    small_rows is 0: the *_small operations are right at any number of rows, but never faster here.
    """

    small_rows = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x over its root mean square, times weight (Zhang and Sennrich 2019).

        x [..., H], weight [H]. Also the per-head norm, with H the head's dimension.
        """
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

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

    def rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        where: Tensor,
        keys: Tensor,
        values: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values are in their pages; queries and keys, normed and rotated, are returned.

        qkv                  [T, (num_heads + 2 * num_kv_heads) * D]
        cos, sin             [max position, rot], rot <= D: later dimensions do not turn
        positions            [T] int32
        where                [T] int32; page * block_size + offset
        keys, values         [pages, block_size, num_kv_heads, Dp], Dp >= D; only D are written
        q_weight, k_weight   [D], of a norm of every head; None: no norm
        Returns [T, num_heads, D] and [T, num_kv_heads, D].
        """
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, -1)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
        if q_weight is not None:
            q = self.rms_norm(q, q_weight, eps)
        if k_weight is not None:
            k = self.rms_norm(k, k_weight, eps)
        cos, sin = cos[positions], sin[positions]
        pages = torch.div(where, keys.shape[1], rounding_mode="floor")
        offsets = where % keys.shape[1]
        head_dim = heads.shape[-1]
        k = _rotated(k, cos, sin)
        keys[..., :head_dim][pages, offsets] = k
        values[..., :head_dim][pages, offsets] = v
        return _rotated(q, cos, sin), k

    def linear_small(
        self,
        x: Tensor,
        w: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """norm(x) @ w.T + bias + residual, in `out` if given: a tensor apart, or `residual`.

        x [M, K], w [N, K], bias [N], norm [K] with its eps, residual and out [M, N].
        """
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        y = linear(x, w, bias)
        if residual is not None:
            y = y + residual
        return y if out is None else out.copy_(y)

    def gate_up_small(self, x: Tensor, w: Tensor, norm: Tensor, eps: float) -> Tensor:
        """silu(gate) * up [M, I], where w [2 * I, K] has the rows of gate, then those of up."""
        return self.silu_mul(linear(self.rms_norm(x, norm, eps), w))
