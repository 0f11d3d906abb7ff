"""ResizedVocabDecoder: a decoder over as many ids as another model has.

Owns the difference in width and nothing else. Models with the same tokenizer pad their logits to
different widths; ids beyond the tokenizer's are nobody's tokens.

    own logits, too narrow   [ a b c d ]            with -inf behind them
    own logits, too wide     [ a b c d e f g h ]    cut: what the other cannot say is not proposed
    inputs beyond its own    its last id            a draft behind them is poor, and nothing else
"""

from __future__ import annotations

from math import inf

import torch
from torch.nn.functional import pad

from forge.models.hf.decoders.interface import ALL_TOKENS, Decoder, ForwardContext, TokenSelection


class ResizedVocabDecoder:
    """`decoder`, whose logits have `vocab_size` ids, with `resized_vocab_size` logits."""

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
        """[wanted, hidden] of the decoder; ids are below `resized_vocab_size`."""
        return self._decoder.forward(
            input_ids.clamp(max=self._vocab_size - 1), positions, context, logits_indices
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, width]; -inf where the decoder has none."""
        logits = self._decoder.compute_logits(hidden)
        if self._vocab_size >= self._resized_vocab_size:
            return logits[:, : self._resized_vocab_size]
        return pad(logits, (0, self._resized_vocab_size - self._vocab_size), value=-inf)
