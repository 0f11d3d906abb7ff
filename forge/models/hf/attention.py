"""Attention over pages: what a step asks of a kernel, and the plain torch kernel.

Owns the batch's shape as attention sees it (`Rows`) and the reference kernel. Knows no plan, no
weights, no sampling.

    tokens     [ d d d d | p p p p p p | p p p ]        decode rows first, then longer rows
    queries     0 1 2 3    4 ....... 9   10 . 12        one per token, [tokens, heads, head_dim]
    keys       read from each row's pages, positions [0, end), causal

A backend is told the rows once a step (`begin`), outside of any CUDA graph, and is then asked once
a layer (`attend`), when the step's own keys and values are already in their pages.
Paged attention: Kwon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from forge.models.hf.pool import KVPool


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


class Rotary(NamedTuple):
    """What makes queries and keys of a product of q, k and v.

    cos, sin             [positions, rotated dimensions]
    q_weight, k_weight   [head_dim] of a norm of every head, or None
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float


class Span(NamedTuple):
    """One sequence's share of a step: positions [start, end), at tokens [first, first + n)."""

    slot: int
    start: int
    end: int
    first: int


class Rows(NamedTuple):
    """A step as attention sees it.

    spans       one per row, in the order of the tokens; the first `num_decode` have one token each
    slots       [num_decode] int32 on the device
    kv_lens     [num_decode] int32 on the device: positions each of them reads
    """

    spans: Sequence[Span]
    num_decode: int
    slots: torch.Tensor
    kv_lens: torch.Tensor


class Attention(Protocol):
    """A kernel that reads pages."""

    def begin(self, rows: Rows) -> None:
        """The step's rows are known; whatever a kernel must plan is planned."""
        ...

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of queries to the same shape of outputs, for one layer.

        keys, values   [tokens, kv_heads, head_dim] of the step's own tokens; they are in their
                       pages too
        """
        ...

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        """[tokens, heads * head_dim] of outputs straight from the product of q, k and v.

        The new keys and values are in their pages. None, and nothing done, where the kernel does
        not take this step so: then whoever asks makes queries, keys and values first.
        """
        ...


class TorchAttention:
    """Plain torch, one row after the other: the reference, and what a CPU runs."""

    def __init__(self, pool: KVPool, layers: Sequence[LayerSpec]) -> None:
        self._pool = pool
        self._layers = layers
        self._rows: Sequence[Span] = ()

    def begin(self, rows: Rows) -> None:
        """Remember the rows."""
        self._rows = rows.spans

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Each row's queries against the pages of its table."""
        spec = self._layers[layer]
        out = torch.empty_like(queries)
        for slot, start, end, first in self._rows:
            mine = slice(first, first + end - start)
            # [heads, tokens, head_dim], as torch's kernels want it.
            rows = (queries[mine], *self._pool.gathered(layer, slot, end))
            q, k, v = (x.transpose(0, 1) for x in rows)
            behind = None
            if end - start > 1 or 0 < spec.window < end:
                at = torch.arange(start, end, device=q.device)[:, None]
                behind = at - torch.arange(end, device=q.device)
            out[mine] = row_attention(q, k, v, behind, spec).transpose(0, 1)
        return out

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> None:
        """Never: the arithmetic before is plain torch's too."""
        return None


def row_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, behind: torch.Tensor | None, spec: LayerSpec
) -> torch.Tensor:
    """Return the outputs of one sequence, [heads, queries, head_dim].

    q        [heads, queries, head_dim]
    k, v     [kv_heads, keys, head_dim]
    behind   [queries, keys] positions by which a key precedes a query; None: all keys are read
    """
    mask = None
    if behind is not None:
        mask = behind >= 0
        if spec.window:
            mask &= behind < spec.window
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if not spec.softcap:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=spec.scale
        )[0]
    scores = spec.softcap * torch.tanh(q @ k.transpose(1, 2) * (spec.scale / spec.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q) @ v
