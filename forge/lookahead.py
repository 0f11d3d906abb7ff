"""Lookahead: how many drafts pay, by how drafts fared and what steps cost.

Owns that estimate and that choice. Knows no plan, model or clock: costs are numbers it is given, so
the same run makes the same choices.

    gain(k) = tokens of a round / time of a round, as a multiple of plain decoding
            = (1 + w/B (a + a^2 + ... + a^k))  *  T(B) / (V(B + w k) + k D(w) + host)

    B   sequences run, of which w are worth drafting for
    a   share of their judged drafts that were accepted
    T, V, D   steps without and with drafts, and of drafting; host: planning and committing

A round has as many steps of the draft model as its row with the most drafts, whoever has fewer. So
k is one for all: a sequence has k drafts, or none where its own have fared too badly. Where no k
gains, everybody rests: a batch without drafts runs ahead. Attempts are made together, one draft
each, and ever more seldom while they fail and the more there are; so what trying costs is bounded,
though a draft model is told first all that it has missed. Who was right goes on,
so a text that turns predictable is soon seen. Where not even perfect drafts would pay none is made.

A choice by expected gain per cost: Leviathan et al. 2023, section 3.5; per batch: Liu et al. 2024
(SmartSpec).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Points
from typing import NamedTuple

from forge.config import Speculation, StepCosts
from forge.sequence import Sequence
from forge.speculative import expected_tokens

LEAST_GAIN = 1.03
"""Below this a round is not worth the trouble: estimates are no better."""

FIRST_REST, LONGEST_REST = 128, 1024
"""Steps before another attempt; doubled each time that nobody's drafts pay."""

CROWD = 8
"""Sequences for which these rests are. A draft model must be told what each of more has missed, so
with more of them rests are as many times as long."""

MEMORY = 0.9
"""Weight that a round keeps when the next one is judged."""

WINDOW = 64
"""Judged drafts that everybody's acceptance is taken over."""

ENOUGH = 16
"""Judged drafts of an attempt after which it is known what everybody's are worth."""

PRIOR = 4.0
"""Judged drafts that half an acceptance counts as, where none was judged yet."""

SHARED = 128.0
"""Judged drafts that everybody's acceptance counts as in a sequence's own: what a few rounds say of
one is chance, and a batch of which some draft pays for all."""

FINE = 64
"""Acceptance is counted in so many parts, so that a choice is computed once."""


MOST_CHOICES = 20_000
"""Kept in memory."""


class Moment(NamedTuple):
    """When something is decided: how many sequences run, and which step is planned next."""

    running: int
    step: int


class Lookahead:
    """Chooses `num_drafts` of sequences."""

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.num_tokens
        self._costs = speculation.costs
        self._tells = speculation.method == "draft"
        # Half of the drafts are thought to be good until some were judged.
        self._judged, self._accepted = PRIOR, PRIOR / 2
        self._choices: dict[tuple[int, int, int], int] = {}
        self._worth: dict[int, int] = {}  # by sequence, its acceptance in parts of FINE
        self._worth_sum = 0
        self._rest = FIRST_REST
        self._attempt_step = 0
        self._fresh = 0  # drafts judged since the last attempt began

    def begin(self, sequence: Sequence, now: Moment) -> None:
        """The sequence runs, and nothing is known of its drafts in this place."""
        self._weigh(sequence, now)
        self._decide(sequence, now, attempt=False)

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """`judged` drafts of the sequence were looked at, `accepted` of them stayed."""
        pace, keep = sequence.pace, (1.0 - 1.0 / WINDOW) ** judged
        pace.judged = pace.judged * MEMORY + judged
        pace.accepted = pace.accepted * MEMORY + accepted
        pace.right = 0 < judged == accepted
        self._fresh += judged
        self._judged = self._judged * keep + judged
        self._accepted = self._accepted * keep + accepted
        self._weigh(sequence, now)

    def settle(self, sequence: Sequence, now: Moment) -> None:
        """The next row may have as many drafts as pay, and one where an attempt is due."""
        if sequence.num_drafts:
            self._decide(sequence, now, attempt=False)
        elif len(sequence.tokens) >= sequence.heed:
            if now.step >= self._attempt_step:
                self._fresh = 0
            # It may be another text by now.
            sequence.pace.judged /= 2
            sequence.pace.accepted /= 2
            self._decide(sequence, now, attempt=True)

    def rest(self, sequence: Sequence, now: Moment) -> None:
        """The sequence decodes plainly until the next attempt of all."""
        if now.step >= self._attempt_step:
            crowds = -(-now.running // CROWD) if self._tells else 1
            self._attempt_step = now.step + crowds * self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        sequence.num_drafts = 0
        steps = self._attempt_step - now.step
        sequence.heed = min(sequence.limit, len(sequence.tokens) + steps)
        sequence.pace.right = False

    def forget(self, sequence: Sequence) -> None:
        """It does not run any more."""
        self._worth_sum -= self._worth.pop(sequence.id, 0)

    def _decide(self, sequence: Sequence, now: Moment, attempt: bool) -> None:
        choice = self.choose(sequence, now)
        if choice:
            self._rest = FIRST_REST
        elif not (attempt or self._goes_on(sequence)) or not self._may_pay(now):
            self.rest(sequence, now)
            return
        sequence.num_drafts, sequence.heed = choice or 1, sequence.limit

    def _goes_on(self, sequence: Sequence) -> bool:
        """It was right, and too few were judged in this attempt to know what all are worth."""
        return sequence.pace.right and self._fresh < ENOUGH

    def choose(self, sequence: Sequence, now: Moment) -> int:
        """Drafts of its next row that pay; 0: none do."""
        if self._costs is None:
            return self._most
        worth = self._worth
        if sequence.id not in worth:
            return 0
        return self._best(round(self._worth_sum / len(worth)), len(worth), now.running)

    def _may_pay(self, now: Moment) -> bool:
        """Drafts would pay if all were right."""
        return self._costs is None or self._best(FINE, now.running, now.running) > 0

    def _weigh(self, sequence: Sequence, now: Moment) -> None:
        """The sequence is worth drafting for if drafts would pay where all were like it."""
        if self._costs is None:
            return
        self.forget(sequence)
        pace, share = sequence.pace, self._accepted / self._judged
        parts = round(FINE * (share * SHARED + pace.accepted) / (SHARED + pace.judged))
        if self._best(parts, now.running, now.running):
            self._worth[sequence.id] = parts
            self._worth_sum += parts

    def _best(self, parts: int, drafting: int, running: int) -> int:
        """Drafts with the most gain where `drafting` of the `running` sequences have some, or 0."""
        key = (parts, drafting, running)
        choice = self._choices.get(key)
        if choice is None:
            assert self._costs is not None, "without costs there is nothing to choose by"
            if len(self._choices) >= MOST_CHOICES:
                self._choices.clear()
            choice = self._choices[key] = self._computed(*key, self._costs)
        return choice

    def _computed(self, parts: int, drafting: int, running: int, costs: StepCosts) -> int:
        plain, share = seconds(costs.target, running), drafting / running
        host = seconds(costs.host, running) if costs.host else 0.0
        best, choice = LEAST_GAIN, 0
        for k in range(1, self._most + 1):
            drafts = k * seconds(costs.draft, drafting) if costs.draft else 0.0
            verify = seconds(costs.verify or costs.target, running + drafting * k)
            tokens = 1 + share * (expected_tokens(parts / FINE, k) - 1)
            gain = tokens * plain / (verify + drafts + host)
            if gain > best:
                best, choice = gain, k
        return choice


def seconds(points: Points[tuple[int, float]], tokens: int) -> float:
    """Time of a step of so many tokens: between the points a straight line, and beyond the last."""
    if len(points) == 1 or tokens <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (tokens, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
