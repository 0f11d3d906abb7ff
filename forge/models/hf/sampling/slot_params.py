"""SlotParams: sampling parameters of a slot's sequence, in the form that the device takes.

Owns the translation of a Bind. Knows no batch and no tensor.

    Bind ──► SamplingNumbers   a row of five floats: scale, noise, top-k, top-p, min-p
         ├─► token ids         allowed, biased, and stop tokens of min_tokens
         └─► limits            tokens that a filter has to order, and the position from which
                               temperature and filters are enough
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forge.models.hf.buffers import int64_array
from forge.sampling import DRAFT, MAX_GAP, PLAIN, min_p_gap
from forge.seam import Bind


class SamplingNumbers(NamedTuple):
    """A row's parameters as the device takes them.

    inverse_temperature   1 / T; 1 where greedy
    noise_scale           1, or 0 where greedy
    top_k                 most tokens kept; the size of the vocabulary keeps all
    top_p                 as in the request; 1 keeps all
    max_gap               largest gap that min-p keeps, as in forge.sampling
    """

    inverse_temperature: float
    noise_scale: float
    top_k: float
    top_p: float
    max_gap: float

    @classmethod
    def greedy(cls, vocab_size: int) -> Self:
        """Return the parameters of a greedy row."""
        return cls(1.0, 0.0, vocab_size, 1.0, MAX_GAP)


@dataclass(slots=True)
class SlotParams:
    """Sampling parameters of the sequence in a slot. Owned by Sampler; never changed.

    stop_token_ids          ids that min_tokens rules out
    purpose                 purpose of its samples, unless a draft is tested there
    max_top_k               leading tokens whose order a filter needs; 0: none
    adjusted_until          position from which `Sampler.sample_slots` is enough, which knows
                            temperature and filters. inf where it never is: a mask, allowed ids,
                            bias or penalties change the logits, or rejection needs the distribution
    """

    bind: Bind
    numbers: SamplingNumbers
    allowed_token_ids: NDArray[Any]
    bias_token_ids: NDArray[Any]
    bias_values: NDArray[Any]
    stop_token_ids: NDArray[Any]
    purpose: int
    max_top_k: int
    adjusted_until: float

    @property
    def has_filters(self) -> bool:
        """True where top-k, top-p or min-p may remove a token."""
        return self.max_top_k > 0 or self.numbers.max_gap < MAX_GAP

    def min_tokens_applies(self, position: int) -> bool:
        """Return whether min_tokens keeps the output from ending at `position`."""
        min_length = self.bind.prompt_len + self.bind.params.min_tokens
        return position < min_length and len(self.stop_token_ids) > 0


def build_slot_params(bind: Bind, vocab_size: int) -> SlotParams:
    """Return the parameters of the bind's sequence, over a vocabulary of this size."""
    params = bind.params
    top_k = min(params.top_k or vocab_size, vocab_size)
    numbers = SamplingNumbers.greedy(vocab_size)
    max_top_k = 0
    if not params.greedy:
        max_gap = min_p_gap(params.min_p)
        numbers = SamplingNumbers(1.0 / params.temperature, 1.0, top_k, params.top_p, max_gap)
        max_top_k = top_k if top_k < vocab_size or params.top_p < 1.0 else 0
    stop_token_ids = (
        int64_array((*bind.end_ids, *params.stop_token_ids))
        if params.min_tokens
        else int64_array(())
    )
    keeps_distribution = bind.proposes and bind.uses_rejection
    is_adjusted = bool(
        params.allowed_token_ids is not None
        or params.has_masks
        or params.logit_bias
        or params.has_penalties
    )
    min_length = bind.prompt_len + params.min_tokens if len(stop_token_ids) else 0
    return SlotParams(
        bind,
        numbers,
        int64_array(params.allowed_token_ids or ()),
        int64_array([token for token, _ in params.logit_bias]),
        np.array([bias for _, bias in params.logit_bias], np.float64),
        stop_token_ids,
        DRAFT if keeps_distribution else PLAIN,
        max_top_k,
        inf if is_adjusted or keeps_distribution else min_length,
    )
