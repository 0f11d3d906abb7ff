"""Trials: what rejection sampling has to know of each draft, computed where the logits are.

Owns the arithmetic of forge.speculative's numbers on a device; the rule itself stays on the host.
Knows no plan and no batch.

    logits ─ filters ─ softmax ─► p ─┬─► p of the draft
    what the draft was drawn from ─► q ─┬─► q of the draft
                       max(0, p - q) ─ log ─ + noise ─ argmax ─► residual

Leviathan et al. 2023; Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forge.models.hf.draw import gumbel, offset_of
from forge.models.hf.proposals import Proposals
from forge.models.hf.sampler import Sampler
from forge.sampling import PLAIN, RESIDUAL
from forge.seam import Draft, Row

FIELDS = 5
"""Draw, status, p, q, residual: what is told of a position."""


def tell_trials(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[Row],
    tried: Mapping[int, Draft],
    following: Tensor,
    proposals: Proposals,
    told: Tensor,
) -> None:
    """Lines `tried` of `told` say what rejection asks of their drafts. No wait for the device.

    logits      [L, V]  of the position before each draft; `rows` end there
    following   int64 [L]  the draft
    told        float64 [L, FIELDS]
    Where the draft model has failed nothing is taken from p, and the residual is the plain draw.
    """
    for part in sampler.parts(logits, rows, list(tried)):
        drafts = [tried[pick] for pick in part.picks]
        tokens, fine = following.index_select(0, part.index), proposals.fine(drafts)
        p = sampler.filtered(part).softmax(1)
        q = proposals.q(drafts, tokens, p.shape[1])
        q.masked_fill_(fine.logical_not()[:, None], 0.0)
        weights = (p - q).clamp_(min=0.0)
        # Where p equals q nothing is rejected, but for rounding.
        weights = torch.where(weights.amax(1, keepdim=True) > 0.0, weights, p)
        keys = sampler.keys(part, torch.where(fine, offset_of(RESIDUAL), offset_of(PLAIN)))
        residual = weights.log_().add_(gumbel(keys, weights.shape[1])).argmax(1).double()
        shares = [each.gather(1, tokens[:, None])[:, 0] for each in (p, q)]
        line = torch.stack([residual, part.status.double(), *shares, residual], 1)
        told.index_copy_(0, part.index, line)
