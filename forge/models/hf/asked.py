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

from forge.models.hf.upload import ids
from forge.sampling import DRAFT, PLAIN
from forge.seam import Bind


class Numbers(NamedTuple):
    """One row's parameters as a device takes them.

    scale       1 / T; 1 where greedy
    noise       1, or 0 where greedy
    reach       most tokens kept, the whole vocabulary where top_k does not ask
    top_p       as asked; 1 keeps all
    log_min_p   -inf keeps all
    """

    scale: float
    noise: float
    reach: float
    top_p: float
    log_min_p: float


@dataclass(slots=True)
class Asked:
    """What the host knows of the sequence in a slot. Owned by Sampler, which changes nothing in it.

    masked       ids that min_tokens makes impossible
    purpose      of its draws where no draft is judged
    order        leading tokens whose order a filter needs: 0 where none does
    plain_from   position from which the row needs a plain draw and nothing else
    """

    bind: Bind
    numbers: Numbers
    allowed: NDArray[Any]
    biased: NDArray[Any]
    biases: NDArray[Any]
    masked: NDArray[Any]
    purpose: int
    order: int
    plain_from: float

    def masks(self, position: int) -> bool:
        """`position` is one that min_tokens keeps from ending."""
        shortest = self.bind.prompt_len + self.bind.params.min_tokens
        return position < shortest and len(self.masked) > 0


def asked_of(bind: Bind, vocab_size: int) -> Asked:
    """What the bind asks, over a vocabulary of this size."""
    params = bind.params
    reach = min(params.top_k or vocab_size, vocab_size)
    numbers = Numbers(1.0, 0.0, vocab_size, 1.0, -inf)
    order = 0
    if not params.greedy:
        log_min_p = log(params.min_p) if params.min_p > 0.0 else -inf
        numbers = Numbers(1.0 / params.temperature, 1.0, reach, params.top_p, log_min_p)
        order = reach if reach < vocab_size or params.top_p < 1.0 else 0
    masked = ids((*bind.end_ids, *params.stop_token_ids)) if params.min_tokens else ids(())
    drafts = bind.proposes and bind.rejects
    never = (
        params.allowed_token_ids is not None
        or params.structure is not None
        or params.logit_bias
        or params.penalises
        or params.logprobs is not None
        or drafts
        or order
        or numbers.log_min_p > -inf
    )
    shortest = bind.prompt_len + params.min_tokens if len(masked) else 0
    return Asked(
        bind,
        numbers,
        ids(params.allowed_token_ids or ()),
        ids([token for token, _ in params.logit_bias]),
        np.array([bias for _, bias in params.logit_bias], np.float64),
        masked,
        DRAFT if drafts else PLAIN,
        order,
        inf if never else shortest,
    )
