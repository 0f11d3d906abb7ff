"""Attention over the paged KV cache: the values and protocols between a step and its kernels.

Owns a batch's shape as attention sees it (`AttentionMetadata`). Knows no plan, no weights and no
sampling.

    tokens    [ d d d d | p p p p p p | p p p ] decode rows first, then longer rows
    queries   0 1 2 3 4 ....... 9 10 . 12 one per token, [tokens, heads, head_dim]
    keys      read from each row's blocks, positions [0, end), causal

`plan` is called once a step, outside of any CUDA graph. `attend` is called once a layer.
Always true: when a layer attends, the step's own keys and values are already in their blocks.
Paged attention: Kwon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


class LayerSpec(NamedTuple):
    """Arguments of one attention layer: softmax(cap(scale * q k)) v over a causal window.

    window    positions that a token reads, itself included; 0: all
    softcap   c of c * tanh(x / c), applied to the scores; 0: none (Gemma 2)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class QKNormRope(NamedTuple):
    """Per-head norm and rotary embedding, which turn the QKV projection into queries and keys.

    cos, sin                       [positions, rotated dimensions]
    q_norm_weight, k_norm_weight   [head_dim] of a norm of every head, or None
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm_weight: torch.Tensor | None
    k_norm_weight: torch.Tensor | None
    eps: float


class RowSpan(NamedTuple):
    """A row's part of a step: positions [start, end), at tokens from `first_token` on."""

    slot: int
    start: int
    end: int
    first_token: int


class AttentionMetadata(NamedTuple):
    """Rows of a step as attention sees them.

    spans             one per row, in the order of the tokens
    num_decode_rows   rows at the front that have one token
    slots             [num_decode_rows] int32 on the device
    kv_lens           [num_decode_rows] int32 on the device; positions that each of them reads
    """

    spans: Sequence[RowSpan]
    num_decode_rows: int
    slots: torch.Tensor
    kv_lens: torch.Tensor


class Attention(Protocol):
    """Attention kernels that read the paged KV cache."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Set the rows of the step, and plan the kernels that need it. Runs on the host."""
        ...

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of one layer, [tokens, heads, head_dim].

        queries        [tokens, heads, head_dim]
        keys, values   [tokens, kv_heads, head_dim] of the step's own tokens, which are in their
                       blocks too
        """
        ...

    def attend_qkv(
        self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope
    ) -> torch.Tensor | None:
        """Return one layer's outputs from its QKV projection, [tokens, heads * head_dim], or None.

        qkv   [tokens, (heads + 2 * kv_heads) * head_dim]
        Norm, rotation and the write of keys and values to their blocks are part of the kernel.
        Return None, with nothing launched, where no such kernel takes the step: the caller then
        makes queries, keys and values itself and calls `attend`.
        """
        ...


class GraphAttention(Attention, Protocol):
    """Attention over rows of any length inside a captured graph."""

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows; return whether the captured graph can run this plan.

        num_decode_rows   rows at the front that have one token
        """
        ...


class CapturableAttention(Protocol):
    """Attention kernels that a captured graph of rows of any length can hold."""

    def build_graph_attentions(
        self, num_tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> Sequence[GraphAttention]:
        """Return the attentions of graphs of `num_tokens` tokens.

        Call it for the largest size first.
        Each has a graph of its own. A step replays the first whose `plan_replay` returns True.

        slots, kv_lens   [max rows] int32, at fixed addresses; where a replay finds slot and KV
                         length of each row of one token, and KV length 0 after them
        """
        ...

    def warmup_calls(self, rope: QKNormRope) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every variant of the kernels."""
        ...
