"""Draft length: how many drafts pay, estimated from acceptance rates and measured step times.

Owns that estimate and that choice. Knows no plan, model or clock: costs are numbers it is given, so
the same run makes the same choices.

    gain(k) = tokens of a round / time of a round, as a multiple of decoding without drafts
            = E(k) T(B)  /  (V(B + B k) + k D(B) + S(B) + E(k) C)

    B         sequences that run; a round is one step of all of them, and the draft model's steps
    E(k)      tokens of a round: 1 + a1 + a1 a2 + ... + a1 .. ak. ai is the share of verified drafts
              at index i that were accepted
    T, V, D   time of a step without drafts, of a step with drafts, of a step of the draft model
    S         time of planning and committing such a step
    C         time in which the draft model computes the texts, per token of their outputs. Outputs
              are expected to be as long as recent ones

A round has as many steps of the draft model as its row with the most drafts. Rows without drafts
have steps of their own meanwhile, for which the others wait. So one k holds for all sequences that
can have drafts. Sequences with a grammar and those that a proposer has no guess for are counted: a
round takes that much longer.

All sequences start to draft at a check, one step in CHECK_INTERVAL_STEPS, where drafts gain. They
stop at any commit at which drafts no longer gain. In between a trial measures acceptance on a few
sequences. Trials lose TRIAL_TIME_FRACTION of the time. Where perfect drafts would not pay there is
no trial.

Choice by expected gain per cost: Leviathan et al. 2023, section 3.5; per batch: Liu et al. 2024
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
"""Gain from which drafting starts, a little above the error of the estimate. It stops below 1."""

CHECK_INTERVAL_STEPS = 32
"""Steps between two checks at which sequences without drafts start together."""

TRIAL_TIME_FRACTION = 0.01
"""Share of the time that trials lose: the longer a trial takes, the rarer trials are."""

MAX_TRIAL_SEQS = 8
"""Sequences in one trial with a draft model, which must compute their texts first."""

MAX_TRIAL_WAIT_STEPS = 1000
"""Steps until the next trial above which no sequence joins the current one any more."""

SMOOTHING_SAMPLES = 8
"""Rounds, or ended sequences, over which a running mean is taken."""

ACCEPTANCE_WINDOW_ROWS = 64
"""Verified rows over which acceptance is averaged."""

PRIOR_ROWS = 4.0
"""Weight, in verified rows, of the prior of an acceptance rate.

The prior of the first index is one half, that of each other index the rate of the index before.
"""

UNIT_COSTS = StepCosts(((1, 1.0),))
"""Costs where none were measured: then each row has as many drafts as allowed."""

MAX_ROW_WEIGHT = 1e12
"""Weight of a row at which all weights are divided by it. Newer rows weigh more."""


class StepInfo(NamedTuple):
    """Number of running sequences, and the step that is planned next, at a decision."""

    num_running: int
    step: int


class _Estimate(NamedTuple):
    """The number of drafts with the most gain, and what a round with it takes.

    round_s            seconds of the round
    num_decode_steps   steps of plain decoding that give as many tokens as the round when no draft
                       is accepted: 1, and more where rows without drafts have steps of their own
    """

    gain: float
    num_drafts: int
    round_s: float
    num_decode_steps: float


class _Draftable(NamedTuple):
    """A sequence that may have drafts.

    catch_up_s           seconds in which the draft model catches up with its text, divided by the
                         expected tokens of its output
    num_initial_tokens   length at which it was added
    """

    catch_up_s: float
    num_initial_tokens: int


class DraftLengthController:
    """Chooses `num_drafts` of each sequence, and the length at which it is chosen again.

    Three subjects: acceptance rates (`update_acceptance`, `_acceptance_rates`), the estimate of
    gain (`_best_estimate`, `_update_estimate`) and trials (`_join_trial` to `_delay_next_trial`).

    max_batched_tokens   most tokens of a step
    """

    def __init__(self, speculation: Speculation, max_batched_tokens: int) -> None:
        self._max_drafts = speculation.num_tokens
        self._costs = speculation.costs or UNIT_COSTS
        self._is_fixed = speculation.costs is None
        self._max_batched_tokens = max_batched_tokens
        self._has_draft_model = speculation.method == "draft"
        self._row_weight = 1.0  # weight of the next verified row
        self._verified = [0.0] * self._max_drafts  # by draft index: summed weights of rows
        self._accepted_drafts = [0.0] * self._max_drafts
        self._draftable: dict[int, _Draftable] = {}  # by sequence id
        self._review_lens: dict[int, int] = {}  # by sequence id; missing: max_len
        self._catch_up_sum_s = 0.0
        self._mean_output_len = inf  # of recent sequences
        self._drafting_fraction = 1.0  # share of draftable sequences with drafts
        self._is_profitable = self._is_fixed
        self._estimate = _Estimate(1.0, self._max_drafts, 0.0, 1.0)
        self._estimate_info: StepInfo | None = None  # for which `_estimate` holds
        self._trial_estimate = (self._estimate, False)
        self._trial_info: StepInfo | None = None
        self._next_check_step = 0  # step of the next check
        self._next_trial_step = 0.0  # step of the next trial
        self._num_trial_seqs_left: float = 0  # that may join until the next check
        self._num_trial_rows = 0  # verified since the last trial started
        self._round_step = self._num_round_rows = 0  # of the last round, and its verified rows

    def add_sequence(
        self, sequence: Sequence, num_catch_up_tokens: int, step_info: StepInfo
    ) -> None:
        """Set `num_drafts` of a sequence that was admitted: 0 for good where its end is near.

        num_catch_up_tokens   tokens of it that a draft model must compute before its first draft
        """
        num_known, num_left = len(sequence.tokens), sequence.max_len - len(sequence.tokens)
        if num_left <= 2:  # it ends before or with its first row of drafts
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
        """Return the length from which `set_num_drafts` is due; `max_len` if it is not."""
        return self._review_lens.get(sequence.id, sequence.max_len)

    def review_at(self, sequence: Sequence, length: int) -> None:
        """Make `set_num_drafts` due when the sequence has `length` tokens."""
        self._review_lens[sequence.id] = length

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Count a row of which `num_verified` drafts were verified and `num_accepted` accepted.

        A step's first such row begins a round. Drafts accepted in a trial bring the next trial
        forward. `num_drafts` is left as it is.
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
        """Set `num_drafts` to the number that pays most, or that the trial takes.

        A sequence with drafts is paused where drafts pay no longer and the trial is over. One
        without drafts is checked if its review is due, and stays without them otherwise.
        """
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
        """Let the sequence decode without drafts until `num_checks` checks from now."""
        sequence.num_drafts = 0
        steps = num_checks * CHECK_INTERVAL_STEPS - step_info.step % CHECK_INTERVAL_STEPS
        self.review_at(sequence, min(sequence.max_len, len(sequence.tokens) + steps))

    def remove_sequence(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer runs, and learn from the length of its output."""
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
        """Let a sequence without drafts start to draft or join a trial, or pause it."""
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
        """Return the estimate for all sequences, and update whether drafts pay.

        Drafts start to pay at checks only, and stop at any step.
        """
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
        """Return the share of accepted drafts by index in a row, plus `margin`, at most 1."""
        rates, rate = [], 0.5
        for verified, accepted in zip(self._verified, self._accepted_drafts, strict=True):
            prior = PRIOR_ROWS * self._row_weight
            rate = (accepted + prior * rate) / (verified + prior)
            rates.append(min(1.0, rate + margin))
        return rates

    def _join_trial(self, num_catch_up_tokens: int, step_info: StepInfo) -> bool:
        """Count the sequence into the trial and return True, or return False where it cannot join.

        A trial that is due starts here if perfect drafts would pay. It halves the weight of earlier
        rows. The catching up of each sequence that joins delays the next trial.
        """
        if step_info.step >= self._next_trial_step:
            if (
                self._best_estimate(
                    [1.0] * self._max_drafts, self._num_draftable(step_info), step_info
                ).gain
                < MIN_GAIN
            ):
                return False  # perfect drafts would not pay
            self._next_trial_step = float(step_info.step + 2 * CHECK_INTERVAL_STEPS)
            self._num_trial_seqs_left = MAX_TRIAL_SEQS if self._has_draft_model else inf
            self._num_trial_rows = 0
            # The text may have changed.
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
        """Return how many running sequences may have drafts, at least 1."""
        return max(1, min(len(self._draftable), step_info.num_running))

    def _num_drafting(self, step_info: StepInfo) -> int:
        """Return how many running sequences are likely to have drafts in a round, at least 1.

        A proposer has no guess for some. Their share is measured in recent rounds.
        """
        return max(1, round(self._drafting_fraction * self._num_draftable(step_info)))

    def _update_trial(self, step_info: StepInfo) -> tuple[_Estimate, bool]:
        """Return the estimate for rows of a trial, and whether the trial continues.

        It continues for at most ACCEPTANCE_WINDOW_ROWS rows, while drafts would pay at rates two
        standard deviations above the measured ones.
        """
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
        """Begin a round at its first verified row.

        With a proposer, update the share of sequences that have drafts from the round before. In a
        trial, delay the next trial by the time that the round takes beyond plain decoding.
        """
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
        """Delay the next trial by so many steps that they take `lost_s` / TRIAL_TIME_FRACTION.

        A negative `lost_s` is time gained, and brings it forward.
        """
        self._next_trial_step += lost_s / (
            TRIAL_TIME_FRACTION * interpolate_s(self._costs.target, step_info.num_running)
        )

    def _best_estimate(
        self, rates: list[float], num_drafting: int, step_info: StepInfo
    ) -> _Estimate:
        """Return the estimate of the number of drafts with the most gain.

        Its gain is 0 where no row with drafts fits the token budget.

        rates          acceptance rate by index
        num_drafting   sequences that have drafts, of those that run
        """
        costs = self._costs
        num_running = step_info.num_running
        num_others = step_info.num_running - num_drafting
        decode_step_s = interpolate_s(costs.target, num_running)
        overhead_s = interpolate_s(costs.scheduler, num_running)
        if num_others:  # rows without drafts have steps of their own
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
    """Return the time of a step of `num_tokens` tokens, interpolated between measured points.

    Linear beyond the last point, constant before the first, and 0.0 where there are no points.
    """
    if not points:
        return 0.0
    if len(points) == 1 or num_tokens <= points[0][0]:
        return points[0][1]
    right = min(bisect_left(points, (num_tokens, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)
