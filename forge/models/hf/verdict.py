"""Verdict: which drafts stay, decided on the host from a few numbers of each position.

Owns the way from those numbers to a row's output. The rule is forge.speculative's, the same code
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

from forge.models.hf.batch import Ints
from forge.models.hf.draw import FINE
from forge.models.hf.proposals import Proposals, Told
from forge.models.hf.sampler import error_text
from forge.models.hf.staging import Arrival
from forge.models.hf.trials import FIELDS
from forge.request import TokenLogprob
from forge.sampling import ACCEPT, draw_key, uniform
from forge.seam import Bind, Draft, Row, RowOutput, Verified
from forge.speculative import Trial, coupled, rejection

NO_TOKEN = -1
"""Drawn where nothing can be; no draft is equal to it."""


class Lines(NamedTuple):
    """Positions of a batch behind which a token may be sampled; rows without drafts come first.

    rows     row of the batch of each line
    slots    of that row
    ends     one past the position
    tokens   token of the batch at the position
    plain    lines of rows without drafts
    firsts   first line of each row with drafts, by row of the batch
    tried    lines whose draft is judged by rejection, and their drafts
    """

    rows: list[int]
    slots: Ints
    ends: Ints
    tokens: Ints
    plain: int
    firsts: dict[int, int]
    tried: dict[int, Draft]


_NOTHING: Ints = np.zeros(0, np.int32)
NO_LINES = Lines([], _NOTHING, _NOTHING, _NOTHING, 0, {}, {})


class Evidence(NamedTuple):
    """All that a step's drafts are judged by. Binds are those of the launch: a slot may have
    another sequence by the time they are read.

    binds   of rows with drafts, by row of the batch
    told    float64 on its way: FIELDS for each line of those rows, then `proposals.sent`
    """

    lines: Lines
    binds: dict[int, Bind]
    proposals: Proposals
    told: Arrival


class Verdict:
    """What rows with drafts have gained. Waits for the evidence when it is made.

    undrafted   sequences for which the draft model failed
    """

    def __init__(self, evidence: Evidence) -> None:
        lines, proposals, numbers = evidence.lines, evidence.proposals, evidence.told.wait().numpy()
        size = FIELDS * (len(lines.rows) - lines.plain)
        sent = numbers[size:].reshape(proposals.sent.shape)
        self._told = Told(proposals, sent.astype(np.int64).tolist())
        self._lines, self._binds = lines, evidence.binds
        told = numbers[:size].reshape(-1, FIELDS)
        draws = np.where(told[:, 1] == FINE, told[:, 0], NO_TOKEN)
        self._draws: list[int] = draws.astype(np.int64).tolist()
        self._positions: list[list[float]] = told.tolist()  # FIELDS of each line
        self.undrafted = self._told.undrafted

    def output(
        self,
        at: int,
        row: Row,
        scores: Sequence[TokenLogprob],
        prompt_scores: tuple[TokenLogprob, ...],
    ) -> RowOutput:
        """Of the row, which stands at `at` in the batch.

        scores   where asked one for each of its lines, and before it the draft's where it is tried
        """
        bind, drafts = self._binds[at], self._told.tokens(row.drafts)
        first = self._lines.firsts[at] - self._lines.plain
        mine = slice(first, first + len(drafts) + 1)
        draws, positions = self._draws[mine], self._positions[mine]
        if drafts and bind.rejects:
            trials = _trials(bind, row.end - len(row.drafts), drafts, positions)
            tokens = rejection(trials, draws[-1])
            judged = trials[: len(tokens)]
            verified = tuple(Verified(t.draft, float(t.p), float(t.q), t.residual) for t in judged)
        else:
            tokens = coupled(drafts, draws)
            verified = tuple(map(Verified, drafts[: len(tokens)]))
        status = positions[len(tokens) - 1][1]
        if status != FINE:
            if len(tokens) == 1:
                return RowOutput(error=error_text(int(status)))
            # What stands before it may end the output. If not, the next row meets it by itself.
            tokens = tokens[:-1]
            verified = verified[: len(tokens) - 1]
        logprobs = self._emitted(at, tokens, scores) if scores else ()
        return RowOutput(tokens, logprobs, prompt_scores, None, verified)

    def _emitted(
        self, at: int, tokens: Sequence[int], scores: Sequence[TokenLogprob]
    ) -> tuple[TokenLogprob, ...]:
        """The score of each token that is emitted."""
        rest, found = iter(scores), []
        for line, token in enumerate(tokens, self._lines.firsts[at]):
            either = [next(rest) for _ in range(1 + (line in self._lines.tried))]
            found.append(next(score for score in either if score.token == token))
        return tuple(found)


def _trials(
    bind: Bind, first: int, drafts: Sequence[int], positions: Sequence[Sequence[float]]
) -> list[Trial]:
    """Each draft and what was told of its position; that of the first draft is `first`."""
    return [
        _trial(bind, first + index, draft, *position)
        for index, (draft, position) in enumerate(zip(drafts, positions, strict=False))
    ]


def _trial(
    bind: Bind, at: int, draft: int, _: float, status: float, p: float, q: float, residual: float
) -> Trial:
    if status != FINE:  # nothing follows: the draft loses
        return Trial(draft, 0.0, 1.0, 0.5, NO_TOKEN)
    u = uniform(draw_key(bind.seed, at, ACCEPT), 0)
    return Trial(draft, p, q, u, int(residual))
