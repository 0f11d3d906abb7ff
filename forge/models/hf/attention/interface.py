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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


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


class GraphAttention(Attention, Protocol):
    """Attention over rows of any length that a graph has recorded."""

    def plan_replay(self, spans: Sequence[RowSpan], num_decode_rows: int) -> bool:
        """Plan the rows; True where the recording does what the plan says.

        num_decode_rows   rows at the front that have one token
        """
        ...


class CapturableAttention(Protocol):
    """Kernels that rows of any length can be recorded with."""

    def build_graph_attentions(
        self, num_tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> Sequence[GraphAttention]:
        """Attentions for graphs of so many tokens; the largest are asked for first.

        Each has a graph of its own; the first that matches a step is the one for it.

        slots, kv_lens   [rows] int32, of as many rows as there may be: where a replay finds those
                         of rows of one token, and 0 positions behind them
        """
        ...

    def warmup_calls(self, rope: QKNormRope) -> Iterator[Callable[[], object]]:
        """Calls that use every form of its kernels, so that these are compiled."""
        ...
