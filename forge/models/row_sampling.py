"""Sampling of a row: from logits to its RowOutput, drafts and their verification included.

Owns what a slot knows of its sequence. Knows no blocks: logits are a function of the position.

    logits of each position ──► process, filter ──► tokens ──► acceptance of drafts ──► RowOutput
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import NamedTuple

from forge.acceptance import RejectionInput, accept_coupled, rejection_sample, residual
from forge.models.paged_decoder import RowLogits
from forge.request import TokenLogprob
from forge.sampling import (
    ACCEPT,
    DRAFT,
    NO_ALLOWED_TOKEN,
    RESIDUAL,
    draw_from_weights,
    draw_key,
    draw_token,
    filter_logits,
    invalid_logits_reason,
    output_logprob,
    probabilities,
    process_logits,
    sample_token,
    token_logprob,
    uniform,
)
from forge.seam import Bind, Row, RowOutput, Verified

NO_TOKEN = -1
"""Result of a row that failed. It is no token id, so a row that reads it is detected."""


@dataclass(slots=True)
class Slot:
    """State of the sequence in a slot, as a device keeps it. Owned by PagedModel."""

    bind: Bind
    table: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)


class DrawnDraft(NamedTuple):
    """Draft and the distribution that it was sampled from.

    A token that the plan names has mass 1.
    """

    token: int
    q: Mapping[int, float]


class _TargetSample(NamedTuple):
    """Sample of the target after one position, and the inputs of rejection for the draft there.

    token         the target's own token, or NO_TOKEN, where `error` is the reason
    draft_probs   distribution of the token, where it is a draft that rejection verifies
    """

    token: int
    logits: Sequence[float] = ()
    error: str | None = None
    rejection_input: RejectionInput | None = None
    draft_probs: Mapping[int, float] | None = None


class SampledRow(NamedTuple):
    """Result of a row, and the distribution of its token where that is a draft to verify."""

    output: RowOutput
    draft_probs: Mapping[int, float] | None = None


def extend_history(slot: Slot, start: int, inputs: list[int]) -> None:
    """Add the inputs from position `start` on to the slot's history, where something reads it."""
    params = slot.bind.params
    if params.has_penalties or params.prompt_logprobs is not None:
        # Rejected drafts are at positions from `start` on. The bind's history is kept.
        del slot.history[max(start, len(slot.bind.history)) :]
        known = slot.history[start : start + len(inputs)]
        assert known == inputs[: len(known)], f"inputs at {start} differ from the slot's history"
        slot.history += inputs[len(known) :]


def sample_row(
    slot: Slot, row: Row, drafts: Sequence[DrawnDraft], logits: RowLogits, vocab_size: int
) -> SampledRow:
    """Return the result of a row whose inputs are in its blocks. Raises what `logits` raises."""
    prompt_logprobs = _prompt_logprobs(slot, row.start, row.end, logits)
    if any(isnan(score.logprob) for score in prompt_logprobs):
        return SampledRow(RowOutput(error="the model's logits are not finite at a prompt position"))
    if not row.num_samples:
        return SampledRow(RowOutput(prompt_logprobs=prompt_logprobs))
    samples = [
        _sample_position(slot, row, index, draft, logits, vocab_size)
        for index, draft in enumerate([*drafts, None])
    ]
    rejection_inputs = [
        sample.rejection_input for sample in samples if sample.rejection_input is not None
    ]
    draft_tokens = [draft.token for draft in drafts]
    if rejection_inputs:
        tokens = rejection_sample(rejection_inputs, samples[-1].token)
        verified = [Verified(t.draft, float(t.p), float(t.q), t.residual) for t in rejection_inputs]
    else:
        tokens = accept_coupled(draft_tokens, [sample.token for sample in samples])
        verified = [Verified(token) for token in draft_tokens]
    emitted = samples[: len(tokens)]
    if emitted[-1].error is not None:
        if len(tokens) == 1:
            return SampledRow(RowOutput(error=emitted[-1].error))
        # The tokens before it may end the output. If not, the next step fails on it alone.
        tokens = tokens[:-1]
        del emitted[-1], verified[len(tokens) - 1 :]
    logprobs: tuple[TokenLogprob, ...] = ()
    params = slot.bind.params
    if params.logprobs is not None:
        pairs = zip(emitted, tokens, strict=True)
        logprobs = tuple(output_logprob(sample.logits, token, params) for sample, token in pairs)
    verified = verified[: len(tokens)]
    output = RowOutput(tokens, logprobs, prompt_logprobs, verified=tuple(verified))
    return SampledRow(output, samples[-1].draft_probs)


def _sample_position(
    slot: Slot,
    row: Row,
    index: int,
    draft: DrawnDraft | None,
    row_logits: RowLogits,
    vocab_size: int,
) -> _TargetSample:
    """Return the sample after the row's inputs and its first `index` drafts."""
    bind, position = slot.bind, row.end - len(row.drafts) + index
    params, prompt_len = bind.params, bind.prompt_len
    try:
        logits = row_logits(position)
    except Exception as error:  # `logits` fails for this context; others go on.
        return _failed_sample(bind, f"logits: {error!r}", draft)
    problem = invalid_logits_reason(logits)
    if len(logits) != vocab_size:
        problem = f"logits: {len(logits)} numbers for a vocabulary of {vocab_size}"
    if problem is not None:
        return _failed_sample(bind, problem, draft)
    prompt: Sequence[int] = ()
    output: Sequence[int] = range(position - prompt_len)  # Only its length is read.
    if params.has_penalties:
        prompt, output = slot.history[:prompt_len], slot.history[prompt_len:position]
    mask = row.masks[index] if row.masks else None
    allowed = process_logits(logits, params, prompt, output, bind.end_ids, mask)
    if max(allowed) == -inf:
        return _failed_sample(bind, NO_ALLOWED_TOKEN, draft)
    if bind.uses_rejection:
        if bind.proposes:
            kept = filter_logits(allowed, params)
            token = draw_token(kept, draw_key(bind.seed, position, DRAFT))
            return _TargetSample(token, logits, draft_probs=probabilities(kept))
        if draft is not None:
            trial = _create_rejection_input(
                bind, position, probabilities(filter_logits(allowed, params)), draft
            )
            return _TargetSample(NO_TOKEN, logits, None, trial)
    return _TargetSample(sample_token(allowed, params, bind.seed, position), logits)


def _prompt_logprobs(
    slot: Slot, start: int, end: int, logits: RowLogits
) -> tuple[TokenLogprob, ...]:
    count = slot.bind.params.prompt_logprobs
    if count is None:
        return ()
    return tuple(
        token_logprob(logits(position), slot.history[position], count)
        for position in range(start + 1, min(end, slot.bind.prompt_len - 1) + 1)
    )


def _failed_sample(bind: Bind, error: str, draft: DrawnDraft | None) -> _TargetSample:
    """Return a sample without a token; p = 0 rejects the draft, if there is one."""
    rejection_input = None
    if draft is not None and bind.uses_rejection:
        rejection_input = RejectionInput(draft.token, 0.0, 1.0, 0.5, NO_TOKEN)
    return _TargetSample(NO_TOKEN, (), error, rejection_input)


def _create_rejection_input(
    bind: Bind, position: int, p: Mapping[int, float], draft: DrawnDraft
) -> RejectionInput:
    def key(purpose: int) -> int:
        return draw_key(bind.seed, position, purpose)

    replacement = draw_from_weights(residual(p, draft.q), key(RESIDUAL))
    p_and_q = p.get(draft.token, 0.0), draft.q.get(draft.token, 0.0)
    return RejectionInput(draft.token, *p_and_q, uniform(key(ACCEPT), 0), replacement)
