"""Rejection sampling's inputs for each draft, computed on the device that holds the logits.

Owns the arithmetic of p, q and the residual sample. The rule that uses them is forge.acceptance's
and runs on the host. Knows no plan and no batch.

    logits ─ filters ─ softmax ─► p ─┬─► p of the draft
    draft's distribution ───────► q ─┬─► q of the draft
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
"""Numbers of a logits row that go to the host: sample, status, p, q, residual."""


def compute_rejection_inputs(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[Row],
    rejection_drafts: Mapping[int, Draft],
    next_tokens: Tensor,
    draft_tokens: DraftTokens,
    evidence: Tensor,
) -> None:
    """Write the numbers that rejection sampling needs for each draft into its row of `evidence`.

    logits             [L, V] any float dtype; after the position before each draft
    rows               [L] rows of one token that end at that position
    rejection_drafts   index into `rows` -> the draft after it
    next_tokens        [L] int64; the draft's token
    draft_tokens       drafts of the step, with the distributions they were sampled from
    evidence           [L, NUM_FIELDS] float64, written in place

    Nothing waits for the device. Where the draft model has failed, q is 0 and the residual is the
    target's own sample.
    """
    for chunk in sampler.adjusted_chunks(logits, rows, list(rejection_drafts)):
        drafts = [rejection_drafts[pick] for pick in chunk.rows]
        tokens, valid = next_tokens.index_select(0, chunk.indices), draft_tokens.is_valid(drafts)
        p = sampler.apply_filters(chunk).softmax(1)
        q = draft_tokens.gather_q(drafts, tokens, p.shape[1])
        q.masked_fill_(valid.logical_not()[:, None], 0.0)
        weights = (p - q).clamp_(min=0.0)
        # p == q leaves no residual. Rounding may still reject, so p itself is the residual then.
        weights = torch.where(weights.amax(1, keepdim=True) > 0.0, weights, p)
        keys = sampler.draw_keys(
            chunk, torch.where(valid, purpose_offset(RESIDUAL), purpose_offset(PLAIN))
        )
        residual = weights.log_().add_(gumbel_noise(keys, weights.shape[1])).argmax(1).double()
        token_probs = [each.gather(1, tokens[:, None])[:, 0] for each in (p, q)]
        fields = torch.stack([residual, chunk.status.double(), *token_probs, residual], 1)
        evidence.index_copy_(0, chunk.indices, fields)
