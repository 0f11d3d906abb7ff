"""Lookahead: how many drafts pay, by how drafts fared and what steps cost.

Owns that estimate and that choice. Knows no plan, model or clock: costs are numbers it is given, so
the same run makes the same choices.

    gain(k) = tokens of a round / time of a round, as a multiple of plain decoding
            = E(k) T(B)  /  (V(B + B k) + k D(B) + host + E(k) told)

    B         sequences run; a round is one step of all of them
    E(k)      1 + a1 + a1 a2 + ... + a1 .. ak, of ai: the share of drafts in place i that were
              accepted, of those that were judged there
    T, V, D   steps without and with drafts, and of drafting; host: planning and committing
    told      what a draft model has to be told of the sequences' texts, by token of their outputs,
              which are thought to be as long as they were lately

A round has as many steps of the draft model as its row with the most drafts, and rows without have
steps of their own, for which the others wait. So k is one for all, and all have drafts that can:
not those whose tokens are not known when drafts are made, nor those that a proposer has no idea
for; these are counted, and a round is that much longer. From one step in LOOK all begin where that
gains; they end at any commit where it ceases to. In between a few try for all. What an attempt
loses is SPEND of the time until the next one. Where not even perfect drafts would pay none is made.

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

LONGEST_WAIT = 1000
"""Steps until the next attempt from which on nobody more joins one: then few tell for all."""

LATELY = 8
"""Rounds, or sequences that ended, over which what is usual is taken."""

WINDOW = 64
"""Judged rows that acceptance is taken over."""

PRIOR = 4.0
"""Judged rows that count for a place beside its own: half of the first drafts are right, and as
many of each other place as of the one before it."""

UNKNOWN = StepCosts(((1, 1.0),))
"""Costs where none were measured: then all drafts are made, always."""

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


class _Able(NamedTuple):
    """A sequence that may have drafts.

    told    seconds that telling a draft model of its text takes, for a token of its output
    known   tokens that it began with
    """

    told: float
    known: int


class Lookahead:
    """Chooses `num_drafts` of sequences.

    budget   most tokens of a step
    """

    def __init__(self, speculation: Speculation, budget: int) -> None:
        self._most = speculation.num_tokens
        self._costs = speculation.costs or UNKNOWN
        self._always = speculation.costs is None
        self._budget = budget
        self._tells = speculation.method == "draft"
        self._weight = 1.0  # of the next judged row
        self._judged = [0.0] * self._most  # by place: the weight of the rows
        self._accepted = [0.0] * self._most
        self._able: dict[int, _Able] = {}  # by sequence
        self._told_sum = 0.0
        self._output = inf  # tokens of a sequence that ran, as they were lately
        self._turnout = 1.0  # of those that may draft, the share that does
        self._pays = self._always
        self._best = _Best(1.0, self._most, 0.0, 1.0)
        self._moment: Moment | None = None  # of `_best`
        self._trial = (self._best, False)
        self._trial_moment: Moment | None = None
        self._look_step = 0  # the next look
        self._attempt_step = 0.0  # the next attempt
        self._may_try: float = 0  # sequences, until the next look
        self._fresh = 0  # rows judged since the last attempt began
        self._round_step = self._round_rows = 0  # of the last round; rows that were judged

    def begin(self, sequence: Sequence, missed: int, now: Moment) -> None:
        """The sequence runs. A draft model has `missed` tokens of it to be told of."""
        known, left = len(sequence.tokens), sequence.limit - len(sequence.tokens)
        if left <= 2:  # it ends with the row that could have the first draft, or before
            sequence.num_drafts, sequence.heed = 0, sequence.limit
            return
        told = seconds(self._costs.told, missed) / max(1.0, min(left, self._output))
        self._able[sequence.id] = _Able(told, known)
        self._told_sum += told
        self._moment = None
        self._look(sequence, missed, now)

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """`judged` drafts of the sequence were looked at, the first `accepted` of them stayed."""
        self._fresh += 1
        if now.step > self._round_step:
            self._next_round(now)
        self._round_rows += 1
        if not self._pays:
            plain = seconds(self._costs.target, now.running)
            self._pay(-accepted * plain / now.running, now)
        for place in range(min(judged, self._most)):
            self._judged[place] += self._weight
        for place in range(min(accepted, self._most)):
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
        best, goes_on = self._reckoned(now), True
        if not self._pays:
            best, goes_on = self._tried(now)
        if goes_on:
            sequence.num_drafts = best.k
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
        able = self._able.pop(sequence.id, None)
        if able is None:
            return
        self._told_sum = self._told_sum - able.told if self._able else 0.0
        self._moment = None
        output = len(sequence.tokens) - able.known
        if self._output == inf:
            self._output = float(output)
        self._output += (output - self._output) / LATELY

    def _look(self, sequence: Sequence, missed: int, now: Moment) -> None:
        best = self._reckoned(now)
        if self._pays:
            sequence.num_drafts, sequence.heed = best.k, sequence.limit
        elif self._is_to_try(missed, now):
            sequence.num_drafts, sequence.heed = self._tried(now)[0].k, sequence.limit
        else:
            self.rest(sequence, now)

    def _reckoned(self, now: Moment) -> _Best:
        """What pays most now. Drafts begin to pay for all at a look, and cease to at once."""
        if self._always or now == self._moment:
            return self._best
        self._moment = now
        self._best = best = self._computed(self._shares(), self._drafting(now), now)
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
            if self._computed([1.0] * self._most, self._all(now), now).gain < LEAST_GAIN:
                return False  # not even perfect drafts would pay
            self._attempt_step = float(now.step + 2 * LOOK)
            self._may_try = CROWD if self._tells else inf
            self._fresh = 0
            # It may be another text by now.
            self._judged = [judged / 2 for judged in self._judged]
            self._accepted = [accepted / 2 for accepted in self._accepted]
        if not self._may_try or self._attempt_step > now.step + LONGEST_WAIT:
            return False
        self._may_try -= 1
        self._pay(seconds(self._costs.told, missed), now)
        return True

    def _all(self, now: Moment) -> int:
        """Sequences that may have drafts."""
        return max(1, min(len(self._able), now.running))

    def _drafting(self, now: Moment) -> int:
        """Sequences that have drafts where they pay."""
        return max(1, round(self._turnout * self._all(now)))

    def _tried(self, now: Moment) -> tuple[_Best, bool]:
        """What rows of an attempt have, and whether it goes on: while drafts pay if what was seen
        is bad luck, and not for ever."""
        if now != self._trial_moment:
            self._trial_moment = now
            all_ = self._drafting(now)
            shares, rows = self._shares(), PRIOR + self._judged[0] / self._weight
            trial = self._computed(shares, min(CROWD, all_) if self._tells else all_, now)
            luck = self._shares(doubt=2.0 * sqrt(shares[0] * (1.0 - shares[0]) / rows))
            gain = self._computed(luck, all_, now).gain
            self._trial = (trial, self._fresh < WINDOW and gain >= LEAST_GAIN)
        return self._trial

    def _next_round(self, now: Moment) -> None:
        """The first row of a round is judged: how many were of the last, and what this one takes
        of the time beyond steps without drafts, where it is an attempt's."""
        if not self._tells and self._round_rows:
            turnout = self._round_rows / self._all(now)
            self._turnout += (min(1.0, turnout) - self._turnout) / LATELY
        self._round_step, self._round_rows = now.step, 0
        if not self._pays:
            trial, _ = self._tried(now)
            self._pay(trial.round_s - trial.steps * seconds(self._costs.target, now.running), now)

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
            if running + drafting * k > self._budget:
                break
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
