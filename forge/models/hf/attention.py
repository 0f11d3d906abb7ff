"""Attention over pages: what a step asks of a kernel, and the plain torch kernel.

Owns the batch's shape as attention sees it (`AttentionMetadata`) and the reference kernel. Knows no
plan, no weights, no sampling.

    tokens    [ d d d d | p p p p p p | p p p ] decode rows first, then longer rows
    queries   0 1 2 3 4 ....... 9 10 . 12 one per token, [tokens, heads, head_dim]
    keys      read from each row's pages, positions [0, end), causal

A backend is told the rows once a step (`plan`), outside of any CUDA graph, and is then asked once
a layer (`attend`), when the step's own keys and values are already in their pages.
Paged attention: Kwon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from forge.models.hf.pool import KVCache


class LayerSpec(NamedTuple):
    """What one attention layer computes: softmax(cap(scale * q k)) v over a causal window.

    window    positions a token sees, itself included; 0: all
    softcap   c * tanh(x / c) on the scores; 0: none (Gemma 2)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class QKNormRope(NamedTuple):
    """What makes queries and keys of a product of q, k and v.

    cos, sin                       [positions, rotated dimensions]
    q_norm_weight, k_norm_weight   [head_dim] of a norm of every head, or None
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm_weight: torch.Tensor | None
    k_norm_weight: torch.Tensor | None
    eps: float


class RowSpan(NamedTuple):
    """One sequence's share of a step: positions [start, end), at tokens [first, first + n)."""

    slot: int
    start: int
    end: int
    first_token: int


class AttentionMetadata(NamedTuple):
    """A step as attention sees it.

    spans     one per row, in the order of the tokens; the first `num_decode_rows` have one token
              each
    slots     [num_decode] int32 on the device
    kv_lens   [num_decode] int32 on the device: positions each of them reads
    """

    spans: Sequence[RowSpan]
    num_decode_rows: int
    slots: torch.Tensor
    kv_lens: torch.Tensor


class Attention(Protocol):
    """A kernel that reads pages."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """The step's rows are known; whatever a kernel must plan is planned."""
        ...

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of queries to the same shape of outputs, for one layer.

        keys, values   [tokens, kv_heads, head_dim] of the step's own tokens; they are in their
                       pages too
        """
        ...

    def attend_qkv(
        self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope
    ) -> torch.Tensor | None:
        """[tokens, heads * head_dim] of outputs straight from the product of q, k and v.

        The new keys and values are in their pages. None, and nothing done, where the kernel does
        not take this step so: then whoever asks makes queries, keys and values first.
        """
        ...


class TorchAttention:
    """Plain torch, one row after the other: the reference, and what a CPU runs."""

    def __init__(self, kv_cache: KVCache, layers: Sequence[LayerSpec]) -> None:
        self._kv_cache = kv_cache
        self._layers = layers
        self._spans: Sequence[RowSpan] = ()

    def plan(self, metadata: AttentionMetadata) -> None:
        """Remember the rows."""
        self._spans = metadata.spans

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Each row's queries against the pages of its table."""
        spec = self._layers[layer_index]
        out = torch.empty_like(queries)
        for slot, start, end, first_token in self._spans:
            row_tokens = slice(first_token, first_token + end - start)
            # [heads, tokens, head_dim], as torch's kernels want it.
            row_tensors = (queries[row_tokens], *self._kv_cache.gather(layer_index, slot, end))
            q, k, v = (x.transpose(0, 1) for x in row_tensors)
            distance = None
            if end - start > 1 or 0 < spec.window < end:
                query_positions = torch.arange(start, end, device=q.device)[:, None]
                distance = query_positions - torch.arange(end, device=q.device)
            out[row_tokens] = attend_sequence(q, k, v, distance, spec).transpose(0, 1)
        return out

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Never: the arithmetic before is plain torch's too."""
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
