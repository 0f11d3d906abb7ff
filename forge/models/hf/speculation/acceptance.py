"""Verdict: which drafts stay, decided on the host from a few numbers of each position.

Owns the way from those numbers to a row's output. The rule is forge.acceptance's, the same code
that is proved by enumeration; nothing here waits for anything but the numbers.

    evidence of a row     draw status p q residual      one line for each position sampled
                          draw status p q residual
                          draw status . . .             the last has no draft behind it
    of the draft model    token status                  of each row of its plans

Next plans of such sequences are made when this is known, so no other step waits for it.
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
"""Drawn where nothing can be; no draft is equal to it."""


class LogitsRows(NamedTuple):
    """Positions of a batch behind which a token may be sampled; rows without drafts come first.

    batch_rows         row of the batch of each line
    slots              of that row
    ends               one past the position
    token_indices      token of the batch at the position
    num_undrafted      lines of rows without drafts
    first_logits_row   first line of each row with drafts, by row of the batch
    rejection_drafts   lines whose draft is judged by rejection, and their drafts
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
    """All that a step's drafts are judged by. Binds are those of the launch: a slot may have
    another sequence by the time they are read.

    binds       of rows with drafts, by row of the batch
    host_copy   float64 on its way: FIELDS for each line of those rows, then `draft_tokens.sent`
    """

    logits_rows: LogitsRows
    binds: dict[int, Bind]
    draft_tokens: DraftTokens
    host_copy: HostCopy


class DraftAcceptance:
    """What rows with drafts have gained. Waits for the evidence when it is made.

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
        self._fields: list[list[float]] = fields.tolist()  # FIELDS of each line
        self.undrafted = self._host_drafts.undrafted

    def row_output(
        self,
        batch_row: int,
        row: Row,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> RowOutput:
        """Of the row, which stands at `batch_row` in the batch.

        logprobs   where asked one for each of its lines, and before it the draft's where it is
                   tried
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
            # What stands before it may end the output. If not, the next row meets it by itself.
            tokens = tokens[:-1]
            verified = verified[: len(tokens) - 1]
        emitted_logprobs = self._emitted_logprobs(batch_row, tokens, logprobs) if logprobs else ()
        return RowOutput(tokens, emitted_logprobs, prompt_logprobs, None, verified)

    def _emitted_logprobs(
        self, batch_row: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[TokenLogprob, ...]:
        """The score of each token that is emitted."""
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
    """Each draft and what was told of its position; that of the first draft is `first_position`."""
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
    if status != STATUS_OK:  # nothing follows: the draft loses
        return RejectionInput(draft, 0.0, 1.0, 0.5, NO_TOKEN)
    u = uniform(draw_key(bind.seed, position, ACCEPT), 0)
    return RejectionInput(draft, p, q, u, int(residual))
