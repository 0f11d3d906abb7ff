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
"""The TokenSelection that has all tokens."""


class ForwardContext(NamedTuple):
    """Where a step's keys and values go and who reads them.

    slot_mapping   [tokens] int32, from KVPool.places
    """

    kv_cache: KVCache
    attention: Attention
    slot_mapping: torch.Tensor


class OpaqueContext(NamedTuple):
    """A step where a compiler looks on: `attend` is an operator that it does not look into.

    attend        of queries, keys and values, [tokens, heads, head_dim] each, and `context_key`
    context_key   whose step and which layer, for the operator to read
    """

    attend: Callable[..., torch.Tensor]
    context_key: torch.Tensor


class Decoder(Protocol):
    """Weights and arithmetic of one model; attention reads pages."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """[wanted, hidden] that `compute_logits` takes; the step's keys and values are in their
        pages.

        input_ids, positions   [tokens] int32
        logits_indices         tokens whose hidden state is asked for; behind the last layer's
                               attention no other needs computing
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] for some rows of `forward`."""
        ...
