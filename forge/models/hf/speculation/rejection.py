"""Trials: what rejection sampling has to know of each draft, computed where the logits are.

Owns the arithmetic of forge.acceptance's numbers on a device; the rule itself stays on the host.
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

from forge.models.hf.sampling.gumbel import gumbel_noise, purpose_offset
from forge.models.hf.sampling.sampler import Sampler
from forge.models.hf.speculation.drafts import DraftTokens
from forge.sampling import PLAIN, RESIDUAL
from forge.seam import Draft, Row

NUM_FIELDS = 5
"""Draw, status, p, q, residual: what is told of a position."""


def compute_rejection_inputs(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[Row],
    rejection_drafts: Mapping[int, Draft],
    next_tokens: Tensor,
    draft_tokens: DraftTokens,
    evidence: Tensor,
) -> None:
    """Lines `rejection_drafts` of `evidence` say what rejection asks of their drafts. No wait for
    the device.

    logits        [L, V] of the position before each draft; `rows` end there
    next_tokens   int64 [L] the draft
    evidence      float64 [L, FIELDS]
    Where the draft model has failed nothing is taken from p, and the residual is the plain draw.
    """
    for chunk in sampler.adjusted_chunks(logits, rows, list(rejection_drafts)):
        drafts = [rejection_drafts[pick] for pick in chunk.rows]
        tokens, valid = next_tokens.index_select(0, chunk.row_index), draft_tokens.is_valid(drafts)
        p = sampler.apply_filters(chunk).softmax(1)
        q = draft_tokens.gather_q(drafts, tokens, p.shape[1])
        q.masked_fill_(valid.logical_not()[:, None], 0.0)
        weights = (p - q).clamp_(min=0.0)
        # Where p equals q nothing is rejected, but for rounding.
        weights = torch.where(weights.amax(1, keepdim=True) > 0.0, weights, p)
        keys = sampler.draw_keys(
            chunk, torch.where(valid, purpose_offset(RESIDUAL), purpose_offset(PLAIN))
        )
        residual = weights.log_().add_(gumbel_noise(keys, weights.shape[1])).argmax(1).double()
        token_probs = [each.gather(1, tokens[:, None])[:, 0] for each in (p, q)]
        fields = torch.stack([residual, chunk.status.double(), *token_probs, residual], 1)
        evidence.index_copy_(0, chunk.row_index, fields)
