"""FittedDecoder: a decoder over as many ids as another model has.

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

from forge.models.hf.decoder import EVERY, Decoder, PagedStep, Wanted


class FittedDecoder:
    """`decoder`, whose logits have `own` ids, with logits of `width` ids."""

    def __init__(self, decoder: Decoder, own: int, width: int) -> None:
        self._decoder = decoder
        self._own = own
        self._width = width

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep, wanted: Wanted = EVERY
    ) -> torch.Tensor:
        """[wanted, hidden] of the decoder; ids are below `width`."""
        return self._decoder.hidden(ids.clamp(max=self._own - 1), positions, step, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, width]; -inf where the decoder has none."""
        logits = self._decoder.logits(hidden)
        if self._own >= self._width:
            return logits[:, : self._width]
        return pad(logits, (0, self._width - self._own), value=-inf)
