"""Lookahead: how many drafts pay for a sequence, by how its drafts fared and what steps cost.

Owns that estimate and that choice. Knows no plan, model or clock: costs are numbers it is given, so
the same run makes the same choices.

    gain(k) = tokens of a round / time of a round, as a multiple of plain decoding
            = (1 + a + a^2 + ... + a^k)  *  T(B) / (V(B + B k) + k D(B) + host)

    a   share of judged drafts that were accepted: the sequence's own, and everybody's before it has
        many of its own;  B sequences run;  T, V, D: steps without and with drafts, and of drafting

Where no k gains a sequence rests: it decodes as if there were no drafts, for longer each time, and
then tries one draft. So what trying costs is bounded, and a text that turns predictable is seen.

A choice by expected gain per cost: Leviathan et al. 2023, section 3.5; per batch: Liu et al. 2024
(SmartSpec).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Points

from forge.config import Speculation, StepCosts
from forge.sequence import Sequence
from forge.speculative import expected_tokens

LEAST_GAIN = 1.03
"""Below this a round is not worth the trouble: estimates are no better."""

FIRST_REST, LONGEST_REST = 32, 1024
"""Tokens decoded plainly before another attempt; doubled each time that an attempt fails."""

MEMORY = 0.95
"""Weight that a round keeps when the next one is judged."""

PRIOR = 4.0
"""Judged drafts that everybody's acceptance counts as in a sequence's own."""

FINE = 64
"""Acceptance is rounded to multiples of 1 / FINE, so that a choice is computed once."""


class Lookahead:
    """Chooses `num_drafts` of sequences."""

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.num_tokens
        self._costs = speculation.costs
        # Half of the drafts are thought to be good until some were judged.
        self._judged, self._accepted = PRIOR, PRIOR / 2
        self._choices: dict[tuple[int, int], int] = {}

    def choose(self, sequence: Sequence, running: int) -> int:
        """Drafts of the sequence's next row, where `running` sequences run; 0: it rests."""
        if self._costs is None:
            return self._most
        share = self._accepted / self._judged
        pace = sequence.pace
        estimate = (share * PRIOR + pace.accepted) / (PRIOR + pace.judged)
        key = (round(estimate * FINE), running)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._best(key[0] / FINE, running, self._costs)
        return choice

    def learn(self, sequence: Sequence, judged: int, accepted: int) -> None:
        """`judged` drafts of the sequence were looked at, `accepted` of them stayed."""
        pace = sequence.pace
        pace.judged = pace.judged * MEMORY + judged
        pace.accepted = pace.accepted * MEMORY + accepted
        # Everybody's: as many judged drafts as some dozen rounds have.
        keep = 1.0 - 1.0 / 64
        self._judged = self._judged * keep + judged
        self._accepted = self._accepted * keep + accepted
        if accepted:
            pace.rest = 0

    def rest(self, sequence: Sequence) -> None:
        """The sequence decodes plainly for a while; what is known of its drafts counts less."""
        pace = sequence.pace
        pace.rest = min(LONGEST_REST, 2 * pace.rest) or FIRST_REST
        pace.judged /= 2
        pace.accepted /= 2
        sequence.num_drafts = 0
        sequence.heed = min(sequence.limit, len(sequence.tokens) + pace.rest)

    def begin(self, sequence: Sequence, running: int) -> None:
        """The sequence's first row may have as many drafts as pay, or it rests."""
        sequence.num_drafts, sequence.heed = self.choose(sequence, running), sequence.limit
        if not sequence.num_drafts:
            self.rest(sequence)

    def settle(self, sequence: Sequence, running: int) -> None:
        """The next row may have as many drafts as pay, and one where the sequence has rested."""
        rested = sequence.num_drafts == 0
        if rested and len(sequence.tokens) < sequence.heed:
            return
        choice = self.choose(sequence, running) or int(rested and sequence.pace.rest > 0)
        sequence.num_drafts, sequence.heed = choice, sequence.limit
        if not choice:
            self.rest(sequence)

    def _best(self, acceptance: float, running: int, costs: StepCosts) -> int:
        plain = seconds(costs.target, running)
        best, choice = LEAST_GAIN, 0
        for k in range(1, self._most + 1):
            drafts = k * seconds(costs.draft, running) if costs.draft else 0.0
            verify = seconds(costs.verify or costs.target, running * (k + 1))
            spent = verify + drafts + costs.round_s
            gain = expected_tokens(acceptance, k) * plain / spent
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
