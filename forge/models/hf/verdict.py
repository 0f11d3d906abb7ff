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

    rows      row of the batch of each line
    singles   each as a row that ends there
    tokens    token of the batch before the position
    plain     lines of rows without drafts
    tried     lines whose draft is judged by rejection, and their drafts
    """

    rows: Sequence[int]
    singles: Sequence[Row]
    tokens: Sequence[int]
    plain: int
    tried: dict[int, Draft]


NO_LINES = Lines((), (), (), 0, {})


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


class _Position(NamedTuple):
    """What the host was told of one line.

    tried   its draft is judged by rejection, so that either of two tokens may be emitted
    """

    draw: int
    status: int
    p: float
    q: float
    residual: int
    tried: bool


class Verdict:
    """What rows with drafts have gained. Waits for the evidence when it is made.

    undrafted   sequences for which the draft model failed
    """

    def __init__(self, evidence: Evidence) -> None:
        lines, proposals, numbers = evidence.lines, evidence.proposals, evidence.told.wait()
        size = FIELDS * (len(lines.rows) - lines.plain)
        sent = numbers[size:].view(proposals.sent.shape)
        self._told = Told(proposals, sent.tolist())
        self._binds = evidence.binds
        self._positions: dict[int, list[_Position]] = {}
        told = numbers[:size].view(-1, FIELDS).tolist()
        for line, (draw, status, p, q, residual) in enumerate(told, lines.plain):
            position = _Position(int(draw), int(status), p, q, int(residual), line in lines.tried)
            self._positions.setdefault(lines.rows[line], []).append(position)
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
        drafts = self._told.tokens(row.drafts)
        positions = self._positions[at][: len(drafts) + 1]
        tokens, verified = _decided(row, self._binds[at], drafts, positions)
        verified, last = verified[: len(tokens)], positions[len(tokens) - 1]
        if last.status != FINE:
            if len(tokens) == 1:
                return RowOutput(error=error_text(last.status))
            # What stands before it may end the output. If not, the next row meets it by itself.
            tokens = tokens[:-1]
            verified = verified[: len(tokens) - 1]
        logprobs = _emitted(positions, tokens, scores) if scores else ()
        return RowOutput(tokens, logprobs, prompt_scores, verified=verified)


def _decided(
    row: Row, bind: Bind, drafts: Sequence[int], positions: Sequence[_Position]
) -> tuple[tuple[int, ...], tuple[Verified, ...]]:
    """What is emitted, and every draft with what it was judged by."""
    draws = [each.draw if each.status == FINE else NO_TOKEN for each in positions]
    if not drafts or not bind.rejects:
        return coupled(drafts, draws), tuple(Verified(draft) for draft in drafts)
    first = row.end - len(row.drafts)
    trials = [
        _trial(bind, first + index, draft, position)
        for index, (draft, position) in enumerate(zip(drafts, positions, strict=False))
    ]
    judged = (Verified(t.draft, float(t.p), float(t.q), t.residual) for t in trials)
    return rejection(trials, draws[-1]), tuple(judged)


def _trial(bind: Bind, at: int, draft: int, position: _Position) -> Trial:
    if position.status != FINE:  # nothing follows: the draft loses
        return Trial(draft, 0.0, 1.0, 0.5, NO_TOKEN)
    u = uniform(draw_key(bind.seed, at, ACCEPT), 0)
    return Trial(draft, position.p, position.q, u, position.residual)


def _emitted(
    positions: Sequence[_Position], tokens: Sequence[int], scores: Sequence[TokenLogprob]
) -> tuple[TokenLogprob, ...]:
    """The score of each token that is emitted."""
    rest, found = iter(scores), []
    for position, token in zip(positions, tokens, strict=False):
        either = [next(rest) for _ in range(1 + position.tried)]
        found.append(next(score for score in either if score.token == token))
    return tuple(found)
