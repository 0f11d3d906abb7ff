"""Asked: what a sequence asks of the draws of its slot, in the numbers a device takes.

Owns the translation of a Bind. Knows no batch and no tensor.

    Bind ──► Numbers   a row of five floats: scale, noise, top-k, top-p, min-p
         ├─► ids       allowed, biased, and masked while the output is shorter than min_tokens
         └─► how       what order of tokens a filter needs, and from where on a plain draw is enough
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge.models.hf.buffers import int64_array
from forge.sampling import DRAFT, PLAIN
from forge.seam import Bind


class SamplingNumbers(NamedTuple):
    """One row's parameters as a device takes them.

    inverse_temperature   1 / T; 1 where greedy
    noise_scale           1, or 0 where greedy
    top_k                 most tokens kept, the whole vocabulary where top_k does not ask
    top_p                 as asked; 1 keeps all
    log_min_p             -inf keeps all
    """

    inverse_temperature: float
    noise_scale: float
    top_k: float
    top_p: float
    log_min_p: float


@dataclass(slots=True)
class SlotParams:
    """What the host knows of the sequence in a slot. Owned by Sampler, which changes nothing in it.

    stop_token_ids          ids that min_tokens makes impossible
    purpose                 of its draws where no draft is judged
    max_top_k               leading tokens whose order a filter needs: 0 where none does
    temperature_only_from   position from which the row needs a plain draw and nothing else
    """

    bind: Bind
    numbers: SamplingNumbers
    allowed_token_ids: NDArray[Any]
    bias_token_ids: NDArray[Any]
    bias_values: NDArray[Any]
    stop_token_ids: NDArray[Any]
    purpose: int
    max_top_k: int
    temperature_only_from: float

    def min_tokens_applies(self, position: int) -> bool:
        """`position` is one that min_tokens keeps from ending."""
        min_length = self.bind.prompt_len + self.bind.params.min_tokens
        return position < min_length and len(self.stop_token_ids) > 0


def build_slot_params(bind: Bind, vocab_size: int) -> SlotParams:
    """What the bind asks, over a vocabulary of this size."""
    params = bind.params
    top_k = min(params.top_k or vocab_size, vocab_size)
    numbers = SamplingNumbers(1.0, 0.0, vocab_size, 1.0, -inf)
    max_top_k = 0
    if not params.greedy:
        log_min_p = log(params.min_p) if params.min_p > 0.0 else -inf
        numbers = SamplingNumbers(1.0 / params.temperature, 1.0, top_k, params.top_p, log_min_p)
        max_top_k = top_k if top_k < vocab_size or params.top_p < 1.0 else 0
    stop_token_ids = (
        int64_array((*bind.end_ids, *params.stop_token_ids))
        if params.min_tokens
        else int64_array(())
    )
    keeps_distribution = bind.proposes and bind.uses_rejection
    needs_full_sampling = (
        params.allowed_token_ids is not None
        or params.structure is not None
        or params.logit_bias
        or params.has_penalties
        or params.logprobs is not None
        or keeps_distribution
        or max_top_k
        or numbers.log_min_p > -inf
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
        inf if needs_full_sampling else min_length,
    )
