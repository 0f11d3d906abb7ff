"""TorchOps: the operations between two attention calls, in plain torch.

Owns the meaning of every operation of ops/triton_ops.py. It runs on any device and in any float
dtype, and the Triton kernels are compared with it. Knows no model and no plan.

    norm ─► qkv ─► rope_and_cache ─► (attention) ─► o + residual ─► norm ─► gate, up ─► down + x
                       └──► blocks

Always true: rounding follows the modules of transformers. A norm is computed in fp32 and rounded
before its weight multiplies; silu is rounded before the product. float64 stays float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def _to_float32(x: Tensor) -> Tensor:
    """Return x in fp32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with its first rotated dimensions turned by cos and sin, rounded once.

    x          [T, heads, head_dim]
    cos, sin   [T, rotated dimensions]
    Dimension i turns with dimension i + rotated / 2 (RoFormer's pairs, in GPT-NeoX's order).
    """
    rotary_dim = cos.shape[-1]
    rotary_part = x[..., :rotary_dim].to(torch.promote_types(x.dtype, cos.dtype))
    rotated_half = torch.cat(
        (-rotary_part[..., rotary_dim // 2 :], rotary_part[..., : rotary_dim // 2]), -1
    )
    rotated = rotary_part * cos[:, None] + rotated_half * sin[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


class TorchOps:
    """Operations in plain torch.

    max_small_rows is 0: the *_small operations work for any number of rows but are never faster
    here.
    """

    max_small_rows = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight (Zhang and Sennrich 2019).

        x        [..., H]; H is the hidden size, or head_dim for a per-head norm
        weight   [H]
        """
        x32 = _to_float32(x)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, rounded, and return the norm of the sum.

        x, residual   [T, H]
        weight        [H]
        """
        residual += x
        return self.rms_norm(residual, weight, eps)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ w.T + bias, [T, N].

        x      [T, K]
        w      [N, K]
        bias   [N]
        """
        return linear(x, w, bias)

    def gate_up(self, x: Tensor, w: Tensor) -> Tensor:
        """Return silu(gate) * up of x, [T, I] (SwiGLU, Shazeer 2020).

        x   [T, K]
        w   [2 * I, K]; rows of gate, then those of up
        """
        gate, up = linear(x, w).chunk(2, -1)
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
        """Norm and rotate queries and keys, and write keys and values to their blocks.

        qkv                            [T, (num_heads + 2 * num_kv_heads) * D]
        cos, sin                       [max position, R]; R <= D, later dimensions do not turn
        positions                      [T] int32
        slot_mapping                   [T] int32; block * block_size + offset
        keys, values                   [blocks, block_size, num_kv_heads, Dp]; only the first D of
                                       Dp are written
        q_norm_weight, k_norm_weight   [D] of a norm of every head; None: no norm
        Return queries, [T, num_heads, D], and keys, [T, num_kv_heads, D].
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
        """Return norm(x) @ w.T + bias + residual, written to `out` if given.

        x               [M, K]
        w               [N, K]
        bias            [N]
        norm_weight     [K]; None: no norm
        residual, out   [M, N]; they may be the same tensor
        """
        if norm_weight is not None:
            x = self.rms_norm(x, norm_weight, eps)
        y = linear(x, w, bias)
        if residual is not None:
            y = y + residual
        return y if out is None else out.copy_(y)

    def gate_up_small(self, x: Tensor, w: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Return silu(gate) * up of norm(x), [M, I].

        x   [M, K]
        w   [2 * I, K]; rows of gate, then those of up
        """
        return self.gate_up(self.rms_norm(x, norm_weight, eps), w)
