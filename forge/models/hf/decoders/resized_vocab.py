"""ResizedVocabDecoder: a draft model's decoder with the vocabulary size of its target.

Owns the difference in width and nothing else. Models with the same tokenizer pad their logits to
different widths; ids beyond the tokenizer's stand for no token.

    own logits, too narrow   [ a b c d ]            -inf is appended
    own logits, too wide     [ a b c d e f g h ]    cut: ids that the target lacks are no drafts
    inputs beyond its own    its last id            the drafts after them are poor, nothing else
"""

from __future__ import annotations

from math import inf

import torch
from torch.nn.functional import pad

from forge.models.hf.decoders.interface import ALL_TOKENS, Decoder, ForwardContext, TokenSelection


class ResizedVocabDecoder:
    """Decoder of `vocab_size` ids as one of `resized_vocab_size` ids."""

    def __init__(self, decoder: Decoder, vocab_size: int, resized_vocab_size: int) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._resized_vocab_size = resized_vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """Return the decoder's hidden states, [N, hidden_size].

        Ids from `vocab_size` on are clamped.
        """
        return self._decoder.forward(
            input_ids.clamp(max=self._vocab_size - 1), positions, context, logits_indices
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [rows, resized_vocab_size]; -inf for ids that the decoder lacks."""
        logits = self._decoder.compute_logits(hidden)
        if self._vocab_size >= self._resized_vocab_size:
            return logits[:, : self._resized_vocab_size]
        return pad(logits, (0, self._resized_vocab_size - self._vocab_size), value=-inf)
