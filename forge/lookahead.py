"""Lookahead: how many drafts pay, by how drafts fared and what steps cost.

Owns that estimate and that choice. Knows no plan, model or clock: costs are numbers it is given, so
the same run makes the same choices.

    gain(k) = tokens of a round / time of a round, as a multiple of plain decoding
            = E(k) T(B)  /  (V(B + B k) + k D(B) + host + E(k) told)

    B         sequences run; a round is one step of all of them
    E(k)      1 + a1 + a1 a2 + ... + a1 .. ak, of ai: the share of drafts in place i that were
              accepted, of those that were judged there
    T, V, D   steps without and with drafts, and of drafting; host: planning and committing
    told      what a draft model has to be told of the sequences' texts, by token of their outputs

A round has as many steps of the draft model as its row with the most drafts, and a row without
drafts runs ahead in steps of its own, for which the others wait. So k is one for all, and all have
drafts or none. From one step in LOOK all begin where that gains; they end at any commit where it
ceases to. In between a few try for all. What that loses is at most SPEND of the time: the next
attempt waits until then. Where not even perfect drafts would pay none is made.

A choice by expected gain per cost: Leviathan et al. 2023, section 3.5; per batch: Liu et al. 2024
(SmartSpec).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Points
from math import inf, sqrt
from typing import NamedTuple

from forge.config import Speculation, StepCosts
from forge.sequence import Sequence

LEAST_GAIN = 1.03
"""Below this no round begins to pay: estimates are no better. It does until there is no gain."""

LOOK = 32
"""Steps from one look at those without drafts to the next: all begin, or some try, together."""

SPEND = 0.01
"""Share of the time that attempts lose: the dearer they are, the more seldom."""

CROWD = 8
"""Sequences that try for all, where a draft model must be told first what they are."""

WINDOW = 64
"""Judged rows that acceptance is taken over."""

PRIOR = 4.0
"""Judged rows that count for a place beside its own: half of the first drafts are right, and as
many of each other place as of the one before it."""

UNKNOWN = StepCosts(((1, 1.0),))
"""Costs where none were measured: whatever a step computes. All drafts are made, always."""

MOST_WEIGHT = 1e12
"""Of a row. Newer ones weigh more, by which older ones count less; from here all weigh less."""


class Moment(NamedTuple):
    """When something is decided: how many sequences run, and which step is planned next."""

    running: int
    step: int


class _Best(NamedTuple):
    """The number of drafts with the most gain, what such a round takes, and the tokens that each
    sequence has of it without them."""

    gain: float
    k: int
    round_s: float
    steps: float


class Lookahead:
    """Chooses `num_drafts` of sequences."""

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.num_tokens
        self._costs = speculation.costs or UNKNOWN
        self._tells = speculation.method == "draft"
        self._weight = 1.0  # of the next judged row
        self._judged = [0.0] * self._most  # by place: the weight of the rows
        self._accepted = [0.0] * self._most
        self._told: dict[int, float] = {}  # by sequence: seconds for a token of its output
        self._told_sum = 0.0
        self._pays = False
        self._best = _Best(0.0, 1, 0.0, 1.0)  # of the moment
        self._moment: Moment | None = None
        self._look_step = 0  # the next look
        self._attempt_step = 0.0  # the next attempt
        self._may_try: float = 0  # sequences, until the next look
        self._fresh = 0  # rows judged since the last attempt began
        self._paid_step = -1  # its last round

    def begin(self, sequence: Sequence, missed: int, now: Moment) -> None:
        """The sequence runs. A draft model has `missed` tokens of it to be told of."""
        output = max(1, sequence.limit - len(sequence.tokens))
        told = self._told[sequence.id] = seconds(self._costs.told, missed) / output
        self._told_sum += told
        self._look(sequence, missed, now)

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """`judged` drafts of the sequence were looked at, the first `accepted` of them stayed."""
        self._fresh += 1
        if not self._pays:
            self._pay_row(accepted, now)
        for place in range(judged):
            self._judged[place] += self._weight
        for place in range(accepted):
            self._accepted[place] += self._weight
        self._weight /= 1.0 - 1.0 / WINDOW
        if self._weight > MOST_WEIGHT:
            self._judged = [judged / self._weight for judged in self._judged]
            self._accepted = [accepted / self._weight for accepted in self._accepted]
            self._weight = 1.0

    def settle(self, sequence: Sequence, missed: int, now: Moment) -> None:
        """The next row may have as many drafts as pay, or as an attempt takes."""
        if not sequence.num_drafts:
            if len(sequence.tokens) >= sequence.heed:
                self._look(sequence, missed, now)
            return
        best = self._reckoned(now)
        if self._pays:
            sequence.num_drafts = best.k
        elif self._goes_on(now):
            sequence.num_drafts = self._tried(now).k
        else:
            self._may_try = 0
            self.rest(sequence, now)

    def rest(self, sequence: Sequence, now: Moment, looks: int = 1) -> None:
        """The sequence decodes plainly until the next look, or the one after so many."""
        sequence.num_drafts = 0
        steps = looks * LOOK - now.step % LOOK
        sequence.heed = min(sequence.limit, len(sequence.tokens) + steps)

    def forget(self, sequence: Sequence) -> None:
        """It does not run any more."""
        self._told_sum -= self._told.pop(sequence.id, 0.0)
        if not self._told:
            self._told_sum = 0.0  # and not what rounding has left

    def _look(self, sequence: Sequence, missed: int, now: Moment) -> None:
        best = self._reckoned(now)
        if self._pays:
            sequence.num_drafts, sequence.heed = best.k, sequence.limit
        elif self._is_to_try(missed, now):
            sequence.num_drafts, sequence.heed = self._tried(now).k, sequence.limit
        else:
            self.rest(sequence, now)

    def _reckoned(self, now: Moment) -> _Best:
        """What pays most now. Drafts begin to pay for all at a look, and cease to at once."""
        if now == self._moment:
            return self._best
        self._moment = now
        self._best = best = self._computed(self._shares(), now.running, now)
        if now.step >= self._look_step:
            self._look_step = now.step - now.step % LOOK + LOOK
            self._may_try = 0
            self._pays = self._pays or best.gain >= LEAST_GAIN
        self._pays = self._pays and best.gain >= 1.0
        return best

    def _shares(self, doubt: float = 0.0) -> list[float]:
        """By place: how many of the drafts that were judged there were accepted, and `doubt`."""
        shares, share = [], 0.5
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            prior = PRIOR * self._weight
            share = (accepted + prior * share) / (judged + prior)
            shares.append(min(1.0, share + doubt))
        return shares

    def _is_to_try(self, missed: int, now: Moment) -> bool:
        """An attempt is made, and the sequence is one of those that make it."""
        if now.step >= self._attempt_step:
            if self._computed([1.0] * self._most, now.running, now).gain < LEAST_GAIN:
                return False  # not even perfect drafts would pay
            self._attempt_step = float(now.step + 2 * LOOK)
            self._may_try = CROWD if self._tells else inf
            self._fresh = 0
            self._weight *= 2.0  # it may be another text by now
        if not self._may_try:
            return False
        self._may_try -= 1
        self._pay(seconds(self._costs.told, missed), now)
        return True

    def _goes_on(self, now: Moment) -> bool:
        """Too few rows were judged for an attempt to end: drafts pay if that was bad luck."""
        if self._fresh >= WINDOW:
            return False
        first, rows = self._shares()[0], PRIOR + self._judged[0] / self._weight
        shares = self._shares(doubt=2.0 * sqrt(first * (1.0 - first) / rows))
        return self._computed(shares, now.running, now).gain >= LEAST_GAIN

    def _tried(self, now: Moment) -> _Best:
        """What rows of an attempt have."""
        few = min(CROWD, now.running) if self._tells else now.running
        return self._computed(self._shares(), few, now)

    def _pay_row(self, accepted: int, now: Moment) -> None:
        """What a round of the attempt takes beyond steps without drafts, less what the row has."""
        plain = seconds(self._costs.target, now.running)
        if now.step > self._paid_step:
            self._paid_step = now.step
            best = self._tried(now)
            self._pay(best.round_s - best.steps * plain, now)
        self._pay(-accepted * plain / now.running, now)

    def _pay(self, spent: float, now: Moment) -> None:
        """The next attempt is when this is SPEND of the time since."""
        self._attempt_step += spent / (SPEND * seconds(self._costs.target, now.running))

    def _computed(self, shares: list[float], drafting: int, now: Moment) -> _Best:
        """Where `drafting` of the sequences have drafts, of which `shares` are right by place."""
        costs, running, others = self._costs, now.running, now.running - drafting
        plain, around = seconds(costs.target, running), seconds(costs.host, running)
        if others:  # they have a step of their own
            around += seconds(costs.target, others)
        told, steps = self._told_sum * drafting / running, 1.0 + others / running
        best, expected, all_right = _Best(0.0, 1, 0.0, 1.0), 1.0, 1.0
        for k, share in enumerate(shares, 1):
            all_right *= share
            expected += all_right
            verify = seconds(costs.verify or costs.target, running + drafting * k)
            drafts = k * seconds(costs.draft, drafting)
            round_s = verify + drafts + around + expected * told
            tokens = steps + (expected - 1.0) * drafting / running
            best = max(best, _Best(tokens * plain / round_s, k, round_s, steps))
        return best


def seconds(points: Points[tuple[int, float]], tokens: int) -> float:
    """Time of a step of so many tokens: between the points a straight line, and beyond the last.

    Where there are no points it takes none.
    """
    if not points:
        return 0.0
    if len(points) == 1 or tokens <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (tokens, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
