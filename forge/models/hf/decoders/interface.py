"""The protocol of decoders: tokens in, hidden states and logits out, keys and values in the cache.

Owns the types that a step gives a decoder. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch

from forge.models.hf.attention.interface import Attention
from forge.models.hf.kv_cache import KVCache

TokenSelection: TypeAlias = torch.Tensor | slice

ALL_TOKENS = slice(None)
"""TokenSelection of all tokens."""


class ForwardContext(NamedTuple):
    """KV cache of a step, the addresses of its tokens in it, and the attention that reads it.

    slot_mapping   [tokens] int32, from KVCache.slot_mapping
    """

    kv_cache: KVCache
    attention: Attention
    slot_mapping: torch.Tensor


class OpaqueContext(NamedTuple):
    """Stand-in for a ForwardContext while torch.compile traces a layer.

    attend        operator that the compiler does not trace; it takes queries, keys and values,
                  [tokens, heads, head_dim] each, and `context_key`
    context_key   [2] int64 on the host; identifies the step's context and the layer
    """

    attend: Callable[..., torch.Tensor]
    context_key: torch.Tensor


class Decoder(Protocol):
    """Weights and arithmetic of one model; its attention reads the paged KV cache."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """Return hidden states, [N, hidden_size], and write the step's keys and values.

        input_ids, positions   [tokens] int32
        logits_indices         tokens whose hidden states are returned; after the last layer's
                               attention only these are computed
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of `forward`, [rows, vocab_size]."""
        ...
