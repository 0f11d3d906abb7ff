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

MIN_GAIN = 1.03
"""Below this no round begins to pay: estimates are no better. It does until there is no gain."""

CHECK_INTERVAL_STEPS = 32
"""Steps from one look at those without drafts to the next: all begin, or some try, together."""

TRIAL_TIME_FRACTION = 0.01
"""Share of the time that attempts lose: the dearer they are, the more seldom."""

MAX_TRIAL_SEQS = 8
"""Sequences that try for all, where a draft model must be told first what they are."""

MAX_TRIAL_WAIT_STEPS = 1000
"""Steps until the next attempt from which on nobody more joins one: then few tell for all."""

SMOOTHING_SAMPLES = 8
"""Rounds, or sequences that ended, over which what is usual is taken."""

ACCEPTANCE_WINDOW_ROWS = 64
"""Judged rows that acceptance is taken over."""

PRIOR_ROWS = 4.0
"""Judged rows that count for a place beside its own: half of the first drafts are right, and as
many of each other place as of the one before it."""

UNIT_COSTS = StepCosts(((1, 1.0),))
"""Costs where none were measured: then all drafts are made, always."""

MAX_ROW_WEIGHT = 1e12
"""Of a row. Newer ones weigh more, by which older ones count less; from here all weigh less."""


class StepInfo(NamedTuple):
    """When something is decided: how many sequences run, and which step is planned next."""

    num_running: int
    step: int


class _Estimate(NamedTuple):
    """The number of drafts with the most gain, what such a round takes, and the tokens that each
    sequence has of it without them."""

    gain: float
    num_drafts: int
    round_s: float
    num_decode_steps: float


class _Draftable(NamedTuple):
    """A sequence that may have drafts.

    catch_up_s           seconds that telling a draft model of its text takes, for a token of its
                         output
    num_initial_tokens   tokens that it began with
    """

    catch_up_s: float
    num_initial_tokens: int


class DraftLengthController:
    """Chooses `num_drafts` of sequences.

    max_batched_tokens   most tokens of a step
    """

    def __init__(self, speculation: Speculation, max_batched_tokens: int) -> None:
        self._max_drafts = speculation.num_tokens
        self._costs = speculation.costs or UNIT_COSTS
        self._is_fixed = speculation.costs is None
        self._max_batched_tokens = max_batched_tokens
        self._has_draft_model = speculation.method == "draft"
        self._row_weight = 1.0  # of the next judged row
        self._verified = [0.0] * self._max_drafts  # by place: the weight of the rows
        self._accepted_drafts = [0.0] * self._max_drafts
        self._draftable: dict[int, _Draftable] = {}  # by sequence
        self._review_lens: dict[int, int] = {}  # by sequence; none: not before it ends
        self._catch_up_sum_s = 0.0
        self._mean_output_len = inf  # tokens of a sequence that ran, as they were lately
        self._drafting_fraction = 1.0  # of those that may draft, the share that does
        self._is_profitable = self._is_fixed
        self._estimate = _Estimate(1.0, self._max_drafts, 0.0, 1.0)
        self._estimate_info: StepInfo | None = None  # of `_estimate`
        self._trial_estimate = (self._estimate, False)
        self._trial_info: StepInfo | None = None
        self._next_check_step = 0  # the next look
        self._next_trial_step = 0.0  # the next attempt
        self._num_trial_seqs_left: float = 0  # sequences, until the next look
        self._num_trial_rows = 0  # rows judged since the last attempt began
        self._round_step = self._num_round_rows = 0  # of the last round; rows that were judged

    def add_sequence(
        self, sequence: Sequence, num_catch_up_tokens: int, step_info: StepInfo
    ) -> None:
        """The sequence runs. A draft model has `num_catch_up_tokens` tokens of it to be told of."""
        num_known, num_left = len(sequence.tokens), sequence.max_len - len(sequence.tokens)
        if num_left <= 2:  # it ends with the row that could have the first draft, or before
            sequence.num_drafts = 0
            self._review_lens.pop(sequence.id, None)
            return
        catch_up_s = interpolate_s(self._costs.catch_up, num_catch_up_tokens) / max(
            1.0, min(num_left, self._mean_output_len)
        )
        self._draftable[sequence.id] = _Draftable(catch_up_s, num_known)
        self._catch_up_sum_s += catch_up_s
        self._estimate_info = None
        self._check_sequence(sequence, num_catch_up_tokens, step_info)

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which `set_num_drafts` decides again for the sequence."""
        return self._review_lens.get(sequence.id, sequence.max_len)

    def review_at(self, sequence: Sequence, length: int) -> None:
        """Decide again when the sequence has `length` tokens."""
        self._review_lens[sequence.id] = length

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """`num_verified` drafts of the sequence were looked at, the first `num_accepted` of them
        stayed.
        """
        self._num_trial_rows += 1
        if step_info.step > self._round_step:
            self._start_round(step_info)
        self._num_round_rows += 1
        if not self._is_profitable:
            decode_step_s = interpolate_s(self._costs.target, step_info.num_running)
            self._delay_next_trial(-num_accepted * decode_step_s / step_info.num_running, step_info)
        for index in range(min(num_verified, self._max_drafts)):
            self._verified[index] += self._row_weight
        for index in range(min(num_accepted, self._max_drafts)):
            self._accepted_drafts[index] += self._row_weight
        self._row_weight /= 1.0 - 1.0 / ACCEPTANCE_WINDOW_ROWS
        if self._row_weight > MAX_ROW_WEIGHT:
            self._verified = [num_verified / self._row_weight for num_verified in self._verified]
            self._accepted_drafts = [
                num_accepted / self._row_weight for num_accepted in self._accepted_drafts
            ]
            self._row_weight = 1.0

    def set_num_drafts(
        self, sequence: Sequence, num_catch_up_tokens: int, step_info: StepInfo
    ) -> None:
        """The next row may have as many drafts as pay, or as an attempt takes."""
        if not sequence.num_drafts:
            if len(sequence.tokens) >= self.review_len(sequence):
                self._check_sequence(sequence, num_catch_up_tokens, step_info)
            return
        estimate, continues = self._update_estimate(step_info), True
        if not self._is_profitable:
            estimate, continues = self._update_trial(step_info)
        if continues:
            sequence.num_drafts = estimate.num_drafts
        else:
            self._num_trial_seqs_left = 0
            self.pause(sequence, step_info)

    def pause(self, sequence: Sequence, step_info: StepInfo, num_checks: int = 1) -> None:
        """The sequence decodes plainly until the next look, or the one after so many."""
        sequence.num_drafts = 0
        steps = num_checks * CHECK_INTERVAL_STEPS - step_info.step % CHECK_INTERVAL_STEPS
        self.review_at(sequence, min(sequence.max_len, len(sequence.tokens) + steps))

    def remove_sequence(self, sequence: Sequence) -> None:
        """It does not run any more."""
        self._review_lens.pop(sequence.id, None)
        draftable = self._draftable.pop(sequence.id, None)
        if draftable is None:
            return
        self._catch_up_sum_s = (
            self._catch_up_sum_s - draftable.catch_up_s if self._draftable else 0.0
        )
        self._estimate_info = None
        output_len = len(sequence.tokens) - draftable.num_initial_tokens
        if self._mean_output_len == inf:
            self._mean_output_len = float(output_len)
        self._mean_output_len += (output_len - self._mean_output_len) / SMOOTHING_SAMPLES

    def _check_sequence(
        self, sequence: Sequence, num_catch_up_tokens: int, step_info: StepInfo
    ) -> None:
        estimate = self._update_estimate(step_info)
        if self._is_profitable:
            sequence.num_drafts = estimate.num_drafts
            self._review_lens.pop(sequence.id, None)
        elif self._join_trial(num_catch_up_tokens, step_info):
            sequence.num_drafts = self._update_trial(step_info)[0].num_drafts
            self._review_lens.pop(sequence.id, None)
        else:
            self.pause(sequence, step_info)

    def _update_estimate(self, step_info: StepInfo) -> _Estimate:
        """What pays most now. Drafts begin to pay for all at a look, and cease to at once."""
        if self._is_fixed or step_info == self._estimate_info:
            return self._estimate
        self._estimate_info = step_info
        self._estimate = estimate = self._best_estimate(
            self._acceptance_rates(), self._num_drafting(step_info), step_info
        )
        if step_info.step >= self._next_check_step:
            self._next_check_step = (
                step_info.step - step_info.step % CHECK_INTERVAL_STEPS + CHECK_INTERVAL_STEPS
            )
            self._num_trial_seqs_left = 0
            self._is_profitable = self._is_profitable or estimate.gain >= MIN_GAIN
        self._is_profitable = self._is_profitable and estimate.gain >= 1.0
        return estimate

    def _acceptance_rates(self, margin: float = 0.0) -> list[float]:
        """By place: how many of the drafts that were judged there were accepted, and `margin`."""
        rates, rate = [], 0.5
        for verified, accepted in zip(self._verified, self._accepted_drafts, strict=True):
            prior = PRIOR_ROWS * self._row_weight
            rate = (accepted + prior * rate) / (verified + prior)
            rates.append(min(1.0, rate + margin))
        return rates

    def _join_trial(self, num_catch_up_tokens: int, step_info: StepInfo) -> bool:
        """An attempt is made, and the sequence is one of those that make it."""
        if step_info.step >= self._next_trial_step:
            if (
                self._best_estimate(
                    [1.0] * self._max_drafts, self._num_draftable(step_info), step_info
                ).gain
                < MIN_GAIN
            ):
                return False  # not even perfect drafts would pay
            self._next_trial_step = float(step_info.step + 2 * CHECK_INTERVAL_STEPS)
            self._num_trial_seqs_left = MAX_TRIAL_SEQS if self._has_draft_model else inf
            self._num_trial_rows = 0
            # It may be another text by now.
            self._verified = [verified / 2 for verified in self._verified]
            self._accepted_drafts = [accepted / 2 for accepted in self._accepted_drafts]
        if (
            not self._num_trial_seqs_left
            or self._next_trial_step > step_info.step + MAX_TRIAL_WAIT_STEPS
        ):
            return False
        self._num_trial_seqs_left -= 1
        self._delay_next_trial(interpolate_s(self._costs.catch_up, num_catch_up_tokens), step_info)
        return True

    def _num_draftable(self, step_info: StepInfo) -> int:
        """Sequences that may have drafts."""
        return max(1, min(len(self._draftable), step_info.num_running))

    def _num_drafting(self, step_info: StepInfo) -> int:
        """Sequences that have drafts where they pay."""
        return max(1, round(self._drafting_fraction * self._num_draftable(step_info)))

    def _update_trial(self, step_info: StepInfo) -> tuple[_Estimate, bool]:
        """What rows of an attempt have, and whether it goes on: while drafts pay if what was seen
        is bad luck, and not for ever."""
        if step_info != self._trial_info:
            self._trial_info = step_info
            num_drafting = self._num_drafting(step_info)
            rates = self._acceptance_rates()
            num_rows = PRIOR_ROWS + self._verified[0] / self._row_weight
            estimate = self._best_estimate(
                rates,
                min(MAX_TRIAL_SEQS, num_drafting) if self._has_draft_model else num_drafting,
                step_info,
            )
            upper_rates = self._acceptance_rates(
                margin=2.0 * sqrt(rates[0] * (1.0 - rates[0]) / num_rows)
            )
            gain = self._best_estimate(upper_rates, num_drafting, step_info).gain
            self._trial_estimate = (
                estimate,
                self._num_trial_rows < ACCEPTANCE_WINDOW_ROWS and gain >= MIN_GAIN,
            )
        return self._trial_estimate

    def _start_round(self, step_info: StepInfo) -> None:
        """The first row of a round is judged: how many were of the last, and what this one takes
        of the time beyond steps without drafts, where it is an attempt's."""
        if not self._has_draft_model and self._num_round_rows:
            drafting_fraction = self._num_round_rows / self._num_draftable(step_info)
            self._drafting_fraction += (
                min(1.0, drafting_fraction) - self._drafting_fraction
            ) / SMOOTHING_SAMPLES
        self._round_step, self._num_round_rows = step_info.step, 0
        if not self._is_profitable:
            estimate, _ = self._update_trial(step_info)
            self._delay_next_trial(
                estimate.round_s
                - estimate.num_decode_steps
                * interpolate_s(self._costs.target, step_info.num_running),
                step_info,
            )

    def _delay_next_trial(self, lost_s: float, step_info: StepInfo) -> None:
        """The next attempt is when this is SPEND of the time since."""
        self._next_trial_step += lost_s / (
            TRIAL_TIME_FRACTION * interpolate_s(self._costs.target, step_info.num_running)
        )

    def _best_estimate(
        self, rates: list[float], num_drafting: int, step_info: StepInfo
    ) -> _Estimate:
        """Where `num_drafting` of the sequences have drafts, of which `rates` are right by
        place.
        """
        costs = self._costs
        num_running = step_info.num_running
        num_others = step_info.num_running - num_drafting
        decode_step_s = interpolate_s(costs.target, num_running)
        overhead_s = interpolate_s(costs.scheduler, num_running)
        if num_others:  # they have a step of their own
            overhead_s += interpolate_s(costs.target, num_others)
        catch_up_s = self._catch_up_sum_s * num_drafting / num_running
        num_decode_steps = 1.0 + num_others / num_running
        best, expected_tokens, prob_all_accepted = _Estimate(0.0, 1, 0.0, 1.0), 1.0, 1.0
        for k, rate in enumerate(rates, 1):
            if num_running + num_drafting * k > self._max_batched_tokens:
                break
            prob_all_accepted *= rate
            expected_tokens += prob_all_accepted
            verify_s = interpolate_s(costs.verify or costs.target, num_running + num_drafting * k)
            draft_s = k * interpolate_s(costs.draft, num_drafting)
            round_s = verify_s + draft_s + overhead_s + expected_tokens * catch_up_s
            num_tokens = num_decode_steps + (expected_tokens - 1.0) * num_drafting / num_running
            best = max(
                best, _Estimate(num_tokens * decode_step_s / round_s, k, round_s, num_decode_steps)
            )
        return best


def interpolate_s(points: Points[tuple[int, float]], num_tokens: int) -> float:
    """Time of a step of so many tokens: between the points a straight line, and beyond the last.

    Where there are no points it takes none.
    """
    if not points:
        return 0.0
    if len(points) == 1 or num_tokens <= points[0][0]:
        return points[0][1]
    right = min(bisect_left(points, (num_tokens, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)
