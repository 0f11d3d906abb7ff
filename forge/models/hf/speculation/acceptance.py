"""Acceptance on the host: which drafts of a row are kept, from a few numbers for each position.

Owns the way from those numbers to a row's output. The rule is forge.acceptance's, the code that is
proved by enumeration. Knows no logits and no tensor but the one it reads.

    evidence of a row     sample status p q residual    one line for each logits row
                          sample status p q residual
                          sample status . . .           no draft after the last
    of the draft model    token status                  for each row of its plans

Always true: it waits for this step's evidence only. Sequences with drafts in flight are planned
again after it, so no other step waits for it.
Leviathan et al. 2023; Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forge.acceptance import RejectionInput, accept_coupled, rejection_sample
from forge.models.hf.buffers import HostCopy, Int32Array
from forge.models.hf.sampling.status import STATUS_OK, error_text
from forge.models.hf.speculation.drafts import DraftTokens, HostDrafts
from forge.models.hf.speculation.rejection import NUM_FIELDS
from forge.request import TokenLogprob
from forge.sampling import ACCEPT, draw_key, uniform
from forge.seam import Bind, Draft, Row, RowOutput, Verified

NO_TOKEN = -1
"""Sample of a position that has none; equal to no draft."""


class LogitsRows(NamedTuple):
    """Positions of a batch after which a token may be sampled; rows without drafts come first.

    batch_rows         [L] row of the batch that each logits row belongs to
    slots              [L] slot of that row
    ends               [L] one past the position
    token_indices      [L] index of the position's input among the batch's tokens
    num_undrafted      logits rows of rows without drafts
    first_logits_row   row of the batch with drafts -> its first logits row
    rejection_drafts   logits row -> its draft, where the draft is accepted by rejection sampling
    """

    batch_rows: list[int]
    slots: Int32Array
    ends: Int32Array
    token_indices: Int32Array
    num_undrafted: int
    first_logits_row: dict[int, int]
    rejection_drafts: dict[int, Draft]


_EMPTY_ARRAY: Int32Array = np.zeros(0, np.int32)
NO_LOGITS_ROWS = LogitsRows([], _EMPTY_ARRAY, _EMPTY_ARRAY, _EMPTY_ARRAY, 0, {}, {})


class AcceptanceEvidence(NamedTuple):
    """Everything that determines which drafts of a step are accepted.

    binds       bind of each row with drafts, by row of the batch, as of the launch: another
                sequence may have the slot when the host reads the evidence
    host_copy   float64 on its way to the host: NUM_FIELDS for each logits row of rows with drafts,
                then `draft_tokens.host_part`
    """

    logits_rows: LogitsRows
    binds: dict[int, Bind]
    draft_tokens: DraftTokens
    host_copy: HostCopy


class DraftAcceptance:
    """Outputs of a step's rows with drafts. Making it waits for the evidence.

    undrafted   sequences for which the draft model failed
    """

    def __init__(self, evidence: AcceptanceEvidence) -> None:
        logits_rows = evidence.logits_rows
        draft_tokens = evidence.draft_tokens
        numbers = evidence.host_copy.wait().numpy()
        size = NUM_FIELDS * (len(logits_rows.batch_rows) - logits_rows.num_undrafted)
        draft_numbers = numbers[size:].reshape(draft_tokens.host_part.shape)
        self._host_drafts = HostDrafts(draft_tokens, draft_numbers.astype(np.int64).tolist())
        self._logits_rows, self._binds = logits_rows, evidence.binds
        fields = numbers[:size].reshape(-1, NUM_FIELDS)
        samples = np.where(fields[:, 1] == STATUS_OK, fields[:, 0], NO_TOKEN)
        self._samples: list[int] = samples.astype(np.int64).tolist()
        self._fields: list[list[float]] = fields.tolist()  # [L, NUM_FIELDS]
        self.undrafted = self._host_drafts.undrafted

    def row_output(
        self,
        batch_row: int,
        row: Row,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> RowOutput:
        """Return the output of the row at index `batch_row` of the batch.

        logprobs          empty, or one for each logits row of the row; the draft's comes before the
                          sample's where the draft is under rejection
        prompt_logprobs   passed on as they are
        """
        bind, drafts = self._binds[batch_row], self._host_drafts.valid_tokens(row.drafts)
        first = self._logits_rows.first_logits_row[batch_row] - self._logits_rows.num_undrafted
        logits_slice = slice(first, first + len(drafts) + 1)
        samples, fields = self._samples[logits_slice], self._fields[logits_slice]
        if drafts and bind.uses_rejection:
            trials = _build_trials(bind, row.end - len(row.drafts), drafts, fields)
            tokens = rejection_sample(trials, samples[-1])
            examined = trials[: len(tokens)]
            verified = tuple(
                Verified(t.draft, float(t.p), float(t.q), t.residual) for t in examined
            )
        else:
            tokens = accept_coupled(drafts, samples)
            verified = tuple(map(Verified, drafts[: len(tokens)]))
        status = fields[len(tokens) - 1][1]
        if status != STATUS_OK:
            if len(tokens) == 1:
                return RowOutput(error=error_text(int(status)))
            # The tokens before it may end the output. If not, the next step fails on it alone.
            tokens = tokens[:-1]
            verified = verified[: len(tokens) - 1]
        emitted_logprobs = self._emitted_logprobs(batch_row, tokens, logprobs) if logprobs else ()
        return RowOutput(tokens, emitted_logprobs, prompt_logprobs, None, verified)

    def _emitted_logprobs(
        self, batch_row: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[TokenLogprob, ...]:
        """Return the log probability of each emitted token."""
        remaining, found = iter(logprobs), []
        for logits_row, token in enumerate(tokens, self._logits_rows.first_logits_row[batch_row]):
            candidates = [
                next(remaining)
                for _ in range(1 + (logits_row in self._logits_rows.rejection_drafts))
            ]
            found.append(next(score for score in candidates if score.token == token))
        return tuple(found)


def _build_trials(
    bind: Bind, first_position: int, drafts: Sequence[int], fields: Sequence[Sequence[float]]
) -> list[RejectionInput]:
    """Return the inputs of rejection sampling for each draft of a row.

    first_position   position of the first draft
    fields           NUM_FIELDS of each logits row, one more row than there are drafts
    """
    return [
        _build_trial(bind, first_position + index, draft, *position)
        for index, (draft, position) in enumerate(zip(drafts, fields, strict=False))
    ]


def _build_trial(
    bind: Bind,
    position: int,
    draft: int,
    _: float,
    status: float,
    p: float,
    q: float,
    residual: float,
) -> RejectionInput:
    if status != STATUS_OK:  # The position has no distribution: p = 0 rejects the draft.
        return RejectionInput(draft, 0.0, 1.0, 0.5, NO_TOKEN)
    u = uniform(draw_key(bind.seed, position, ACCEPT), 0)
    return RejectionInput(draft, p, q, u, int(residual))
