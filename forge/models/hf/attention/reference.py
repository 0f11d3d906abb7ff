"""Attention over the paged KV cache in plain torch: the kernels' reference, and a CPU's kernel.

Owns the arithmetic. Rows run one after the other, each with its own mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope, RowSpan
from forge.models.hf.kv_cache import KVCache


class TorchAttention:
    """Attention in plain torch, one row after the other."""

    def __init__(self, kv_cache: KVCache, layers: Sequence[LayerSpec]) -> None:
        self._kv_cache = kv_cache
        self._layers = layers
        self._spans: Sequence[RowSpan] = ()

    def plan(self, metadata: AttentionMetadata) -> None:
        """Keep the rows of the step."""
        self._spans = metadata.spans

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return each row's outputs over the keys in its blocks, [tokens, heads, head_dim]."""
        spec = self._layers[layer_index]
        out = torch.empty_like(queries)
        for slot, start, end, first_token in self._spans:
            row_tokens = slice(first_token, first_token + end - start)
            # [heads, tokens, head_dim], the layout of torch's kernels.
            row_tensors = (queries[row_tokens], *self._kv_cache.gather(layer_index, slot, end))
            q, k, v = (x.transpose(0, 1) for x in row_tensors)
            distance = None
            if end - start > 1 or 0 < spec.window < end:
                query_positions = torch.arange(start, end, device=q.device)[:, None]
                distance = query_positions - torch.arange(end, device=q.device)
            out[row_tokens] = attend_sequence(q, k, v, distance, spec).transpose(0, 1)
        return out

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Return None: there is no fused kernel in plain torch."""
        return None


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    distance: torch.Tensor | None,
    spec: LayerSpec,
) -> torch.Tensor:
    """Return the outputs of one sequence, [heads, queries, head_dim].

    q          [heads, queries, head_dim]
    k, v       [kv_heads, keys, head_dim]
    distance   [queries, keys] positions by which a key precedes a query; None: all keys are read
    """
    mask = None
    if distance is not None:
        mask = distance >= 0
        if spec.window:
            mask &= distance < spec.window
    group_size = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)
    if not spec.softcap:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=spec.scale
        )[0]
    scores = spec.softcap * torch.tanh(q @ k.transpose(1, 2) * (spec.scale / spec.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q) @ v
