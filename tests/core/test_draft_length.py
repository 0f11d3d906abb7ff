"""Draft length: the choice by costs and acceptance rate, and the limit on the cost of trials."""

from __future__ import annotations

from itertools import count, pairwise
from math import prod

import pytest

from forge.config import Speculation, StepCosts
from forge.draft_length import (
    ACCEPTANCE_WINDOW_ROWS,
    CHECK_INTERVAL_STEPS,
    MAX_TRIAL_SEQS,
    PRIOR_ROWS,
    TRIAL_TIME_FRACTION,
    DraftLengthController,
    StepInfo,
    interpolate_s,
)
from forge.request import Request, SamplingParams
from forge.seam import Bind
from forge.sequence import Sequence

FLAT = StepCosts(((1, 1.0), (64, 1.0)), ((1, 0.1), (64, 0.1)))
"""A device on which each step takes the same time, and a draft a tenth of it."""
LINEAR = StepCosts(((1, 1.0), (64, 64.0)), ((1, 0.1), (64, 6.4)))
"""A device that is busy with one token already: no draft can pay."""
COSTLY_DRAFTS = FLAT._replace(draft=((1, 0.6), (64, 0.6)))
"""A device on which only very good drafts pay."""


def create_controller(
    costs: StepCosts | None = FLAT, max_drafts: int = 4, method: str = "draft", budget: int = 8192
) -> DraftLengthController:
    return DraftLengthController(
        Speculation(num_tokens=max_drafts, costs=costs, method=method), budget
    )


IDS = count()


def create_sequence(limit: int = 100_000) -> Sequence:
    params = SamplingParams(temperature=0.0)
    bind = Bind(params, 1, 1)
    return Sequence(
        next(IDS), Request(0, (1,), params), 0, params, bind, [1], limit, frozenset(), None, None
    )


def decode_tokens(
    s: Sequence, controller: DraftLengthController, right: float, tokens: int
) -> list[int]:
    """Append `tokens` tokens with a share `right` of accepted drafts; return drafts per row."""
    rows, owed, step = [], 0, len(s.tokens)
    gain, whole = right.as_integer_ratio()  # exact fractions, so that no rounding adds up
    if step == 1:
        controller.add_sequence(s, 0, StepInfo(1, 0))
    end = len(s.tokens) + tokens
    while len(s.tokens) < end:
        accepted, num_verified = 0, 0
        for _ in range(s.num_drafts):
            owed += gain
            num_verified += 1
            if owed < whole:
                break
            owed -= whole
            accepted += 1
        rows.append(s.num_drafts)
        s.tokens += [1] * (accepted + 1)
        step += accepted + 1  # rounds counted by their tokens: the number only has to ascend
        now = StepInfo(1, step)
        if num_verified:
            controller.update_acceptance(s, num_verified, accepted, now)
        if num_verified or len(s.tokens) >= controller.review_len(s):
            controller.set_num_drafts(s, 0, now)
    return rows


def observe_rows(
    controller: DraftLengthController,
    right: float,
    max_drafts: int,
    now: StepInfo,
    rows: int = 4_000,
) -> None:
    """Report rows of `max_drafts` drafts, with these counts of accepted drafts per position."""
    s, owed = create_sequence(), 0
    gain, whole = right.as_integer_ratio()  # exact fractions, so that no rounding adds up
    for _ in range(rows):
        accepted = 0
        while accepted < max_drafts:
            owed += gain
            if owed < whole:
                break
            owed -= whole
            accepted += 1
        controller.update_acceptance(s, min(accepted + 1, max_drafts), accepted, now)


def start_sequence(
    controller: DraftLengthController, now: StepInfo, missed: int = 0, limit: int = 100_000
) -> Sequence:
    s = create_sequence(limit)
    controller.add_sequence(s, missed, now)
    return s


def start_sequences(
    controller: DraftLengthController, count: int, step: int, missed: int = 0, limit: int = 100_000
) -> list[Sequence]:
    """Start the sequences one after another, as a scheduler does."""
    return [start_sequence(controller, StepInfo(i + 1, step), missed, limit) for i in range(count)]


@pytest.mark.parametrize(
    ("tokens", "time"), [(0, 2.0), (1, 2.0), (2, 2.5), (3, 3.0), (5, 6.0), (6, 7.0), (100, 101.0)]
)
def test_step_times_are_interpolated_between_measured_points(tokens: int, time: float) -> None:
    points = ((1, 2.0), (3, 3.0), (4, 5.0), (5, 6.0))
    assert interpolate_s(points, tokens) == time
    assert interpolate_s(((8, 3.0),), tokens) == 3.0
    assert interpolate_s((), tokens) == 0.0


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_without_costs_a_row_always_has_all_drafts(right: float) -> None:
    controller = create_controller(costs=None, max_drafts=3)
    rows = decode_tokens(create_sequence(), controller, right, 3_000)
    assert set(rows) == {3}
    assert start_sequence(controller, StepInfo(64, 5_000)).num_drafts == 3


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("running", [1, 5, 16])
@pytest.mark.parametrize("host", [(), ((1, 0.2), (16, 0.9))])
@pytest.mark.parametrize("catch_up", [(), ((0, 0.0), (1, 0.002))])
def test_the_choice_is_the_one_with_most_tokens_a_second(
    right: float,
    running: int,
    host: tuple[tuple[int, float], ...],
    catch_up: tuple[tuple[int, float], ...],
) -> None:
    """Compared with every k by the formula; without a gain of 3 % there are no drafts."""
    costs = StepCosts(
        ((1, 1.0), (8, 1.1), (64, 4.0)), ((1, 0.15), (64, 0.5)), scheduler=host, catch_up=catch_up
    )
    controller, now = create_controller(costs, max_drafts=6), StepInfo(running, 0)
    observe_rows(controller, right, 6, now)
    controller._next_trial_step = 1e9  # no sequence starts a trial
    all_ = start_sequences(controller, running, 0, missed=300, limit=101)
    catch_up_s = running * interpolate_s(catch_up, 300) / 100
    expected = [1.0]
    for place in range(6):
        expected.append(expected[-1] + prod(controller._acceptance_rates()[: place + 1]))

    def pace(k: int) -> float:
        if not k:
            return 1.03 * running / interpolate_s(costs.target, running)
        spent = interpolate_s(costs.target, running * (1 + k)) + k * interpolate_s(
            costs.draft, running
        )
        return (
            running
            * expected[k]
            / (spent + interpolate_s(host, running) + expected[k] * catch_up_s)
        )

    wanted = max(range(7), key=pace)
    for s in all_:
        controller.set_num_drafts(s, 300, StepInfo(running, CHECK_INTERVAL_STEPS))
    assert {s.num_drafts for s in all_} == {wanted}


def test_the_gain_of_a_round_is_right_for_unlike_sequences() -> None:
    """Each position has its own share: sequences accepted at the first are accepted later too."""
    controller, now, s = create_controller(max_drafts=4), StepInfo(2, 0), create_sequence()
    for _ in range(2_000):
        controller.update_acceptance(s, 4, 4, now)
        controller.update_acceptance(s, 1, 0, now)
    shares = controller._acceptance_rates()
    assert shares[0] == pytest.approx(0.5, abs=0.02)
    assert min(shares[1:]) > 0.9
    tokens, all_right = 1.0, 1.0
    for share in shares:
        all_right *= share
        tokens += all_right
    assert tokens == pytest.approx((5 + 1) / 2, abs=0.15)


def test_a_position_without_verified_drafts_has_the_share_of_the_one_before_it() -> None:
    controller, now, s = create_controller(max_drafts=4), StepInfo(1, 0), create_sequence()
    assert controller._acceptance_rates() == [0.5] * 4
    for _ in range(2_000):
        controller.update_acceptance(s, 1, 1, now)
    assert controller._acceptance_rates() == pytest.approx(
        [1 - 0.5 * PRIOR_ROWS / (PRIOR_ROWS + ACCEPTANCE_WINDOW_ROWS)] * 4, rel=1e-3
    )


def test_shares_stay_the_same_when_weights_are_made_small_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, s, known = StepInfo(1, 0), create_sequence(), []
    for most_weight in (1e300, 50.0):
        monkeypatch.setattr("forge.draft_length.MAX_ROW_WEIGHT", most_weight)
        controller = create_controller()
        for row in range(2_000):
            controller.update_acceptance(s, 1 + row % 4, row % 3 and row % 4, now)
        known.append(controller._acceptance_rates())
    assert known[0] == pytest.approx(known[1])
    assert controller._row_weight <= 50.0


def test_better_drafts_and_cheaper_steps_have_longer_rows() -> None:
    chosen, now = [], StepInfo(1, 0)
    for right in (0.05, 0.4, 0.7, 0.95):
        controller = create_controller(max_drafts=8)
        controller._next_trial_step = 1e9
        observe_rows(controller, right, 8, now)
        chosen.append(start_sequence(controller, now).num_drafts)
    assert chosen == sorted(chosen) and chosen[0] == 0 and len(set(chosen)) == 4


def test_a_full_batch_on_a_busy_device_has_no_drafts() -> None:
    busy = StepCosts(((1, 1.0), (16, 1.0), (256, 16.0)))
    for running, k in ((1, 4), (64, 0)):
        controller, now = create_controller(busy), StepInfo(running, 0)
        controller._next_trial_step = 1e9
        observe_rows(controller, 0.8, 4, now)
        assert start_sequence(controller, now).num_drafts == k


def test_drafts_start_at_a_gain_of_three_percent_and_stop_at_none() -> None:
    """One draft costs a tenth of a step: it gains from 0.1 accepted on, and 3 % from 0.133."""
    controller, s, step = create_controller(max_drafts=1), create_sequence(), 0
    controller._next_trial_step = 1e9
    lengths = []
    for right in (
        0.0,
        0.095,
        0.2,
        0.095,
        0.0,
        0.095,
    ):  # and two hundredths by the first estimate
        observe_rows(controller, right, 1, StepInfo(1, step))
        step += CHECK_INTERVAL_STEPS
        if step == CHECK_INTERVAL_STEPS:
            controller.add_sequence(s, 0, StepInfo(1, step))
        else:
            s.tokens += [1] * CHECK_INTERVAL_STEPS
            controller.set_num_drafts(s, 0, StepInfo(1, step))
        lengths.append(s.num_drafts)
    assert lengths == [0, 0, 1, 1, 0, 0]


def test_drafts_that_cease_to_pay_end_at_the_next_commit_and_not_at_a_review() -> None:
    controller, now = create_controller(), StepInfo(1, 0)
    observe_rows(controller, 0.9, 4, now)
    s = start_sequence(controller, now)
    assert s.num_drafts == 4
    observe_rows(controller, 0.0, 4, StepInfo(1, 1))
    controller.set_num_drafts(s, 0, StepInfo(1, 2))
    assert s.num_drafts == 0


def test_all_sequences_start_drafting_at_the_same_step() -> None:
    """A round delays every sequence, and one sequence with few drafts gains little."""
    controller = create_controller()
    controller._next_trial_step = 1e9
    observe_rows(controller, 0.0, 4, StepInfo(3, 0))
    resting = [
        start_sequence(controller, StepInfo(3, step)) for step in (0, 5, CHECK_INTERVAL_STEPS - 1)
    ]
    assert [controller.review_len(s) - len(s.tokens) for s in resting] == [
        CHECK_INTERVAL_STEPS,
        CHECK_INTERVAL_STEPS - 5,
        1,
    ]
    observe_rows(controller, 0.9, 4, StepInfo(3, 3))
    for s in resting[:2]:
        s.tokens += [1] * (controller.review_len(s) - 2)
        controller.set_num_drafts(s, 0, StepInfo(3, CHECK_INTERVAL_STEPS - 1))
        assert s.num_drafts == 0, "before its time"
    for s in resting:
        s.tokens.append(1)
        controller.set_num_drafts(s, 0, StepInfo(3, CHECK_INTERVAL_STEPS))
    assert [s.num_drafts for s in resting] == [4, 4, 4]


def test_a_new_sequence_starts_from_the_acceptance_of_all() -> None:
    for right, k in ((0.0, 0), (1.0, 4)):
        controller, now = create_controller(), StepInfo(1, 0)
        controller._next_trial_step = 1e9
        observe_rows(controller, right, 4, now)
        assert start_sequence(controller, now).num_drafts == k


@pytest.mark.parametrize(
    ("method", "tried"), [("draft", MAX_TRIAL_SEQS), ("ngram", 3 * MAX_TRIAL_SEQS)]
)
def test_few_sequences_try_for_all_when_a_draft_model_must_catch_up(
    method: str, tried: int
) -> None:
    controller = create_controller(COSTLY_DRAFTS, method=method)
    all_ = start_sequences(controller, 3 * MAX_TRIAL_SEQS, 0)
    assert [s.num_drafts > 0 for s in all_] == [True] * tried + [False] * (
        3 * MAX_TRIAL_SEQS - tried
    )
    later = start_sequence(controller, StepInfo(3 * MAX_TRIAL_SEQS, 1))
    assert (later.num_drafts > 0) == (method == "ngram")
    late = start_sequence(controller, StepInfo(3 * MAX_TRIAL_SEQS, CHECK_INTERVAL_STEPS))
    assert late.num_drafts == 0, "that review is over, and the next trial is not due"


def test_a_trial_continues_through_bad_luck_and_ends_when_its_result_is_certain() -> None:
    controller, s = create_controller(COSTLY_DRAFTS), create_sequence()
    controller.add_sequence(s, 0, StepInfo(1, 0))
    drafted = []
    for step in range(1, ACCEPTANCE_WINDOW_ROWS):
        if s.num_drafts:
            controller.update_acceptance(s, 1, 0, StepInfo(1, step))
            s.tokens.append(1)
            controller.set_num_drafts(s, 0, StepInfo(1, step))
            drafted.append(s.num_drafts)
    assert drafted[0] > 0, "one row says little"
    assert 2 < len(drafted) < 12 and drafted[-1] == 0


def test_a_trial_ends_when_nothing_more_is_learnt() -> None:
    """Drafts are exactly as good as none: the trial is never certain, and must still end."""
    costs = FLAT._replace(draft=((1, 0.49), (64, 0.49)))
    controller, step = create_controller(costs, max_drafts=1), 0
    all_ = start_sequences(controller, MAX_TRIAL_SEQS, 0)
    rows = 0
    while any(s.num_drafts for s in all_) and rows <= 2 * ACCEPTANCE_WINDOW_ROWS:
        step += 1
        for at, s in enumerate(all_):
            if s.num_drafts:
                controller.update_acceptance(s, 1, (step + at) % 2, StepInfo(MAX_TRIAL_SEQS, step))
                rows += 1
        for s in all_:
            s.tokens.append(1)
            if s.num_drafts:
                controller.set_num_drafts(s, 0, StepInfo(MAX_TRIAL_SEQS, step))
    assert ACCEPTANCE_WINDOW_ROWS <= rows <= ACCEPTANCE_WINDOW_ROWS + MAX_TRIAL_SEQS


@pytest.mark.long
@pytest.mark.parametrize("draft", [0.1, 0.6, 0.9])
def test_trials_lose_a_small_share_of_the_time(draft: float) -> None:
    """True for any cost of a draft, once the first trial is over."""
    costs = FLAT._replace(draft=((1, draft), (64, draft)))
    controller, s = create_controller(costs), create_sequence()
    rows = decode_tokens(s, controller, right=0.0, tokens=60_000)
    tried = [i for i, drafts in enumerate(rows) if drafts]
    assert rows[0] and tried[-1] > 30_000, "it is never given up for good"
    first_end = next(i for i, drafts in enumerate(rows) if not drafts)
    lost = draft * sum(rows[first_end:])
    assert 0.3 * TRIAL_TIME_FRACTION < lost / (len(rows) - first_end) < 1.3 * TRIAL_TIME_FRACTION
    starts = [b for a, b in pairwise(tried) if b > a + 1]
    assert min(b - a for a, b in pairwise(starts)) >= 2 * CHECK_INTERVAL_STEPS - 1


def test_a_round_of_a_trial_costs_its_time_beyond_plain_steps() -> None:
    """Sequences in a trial have a step of drafts; the others wait for it and for their own step."""
    costs = StepCosts(((1, 1.0), (64, 2.0)), ((1, 0.4), (64, 0.5)), ((1, 1.2), (64, 2.1)))
    costs = costs._replace(scheduler=((1, 0.02), (64, 0.04)))
    controller, running, accepted = create_controller(costs, max_drafts=1), 3 * MAX_TRIAL_SEQS, 3
    all_ = start_sequences(controller, running, 0)
    now = StepInfo(running, 5)
    for at, s in enumerate(s for s in all_ if s.num_drafts):
        controller.update_acceptance(s, 1, int(at < accepted), now)
    round_s = interpolate_s(costs.verify, running + MAX_TRIAL_SEQS) + interpolate_s(
        costs.draft, MAX_TRIAL_SEQS
    )
    round_s += interpolate_s(costs.scheduler, running) + interpolate_s(
        costs.target, running - MAX_TRIAL_SEQS
    )
    plain = interpolate_s(costs.target, running)
    tokens = running + (running - MAX_TRIAL_SEQS) + accepted
    wanted = (round_s - tokens / running * plain) / (TRIAL_TIME_FRACTION * plain)
    assert controller._next_trial_step - 2 * CHECK_INTERVAL_STEPS == pytest.approx(wanted)


def test_catching_up_on_long_texts_is_paid_by_longer_rests() -> None:
    """Each more token of text delays the next trial by its catch-up time."""
    waits = []
    for missed in (0, 1_000):
        controller, now = (
            create_controller(COSTLY_DRAFTS._replace(catch_up=((0, 0.0), (1, 0.01)))),
            StepInfo(1, 0),
        )
        start_sequence(controller, now, missed=missed)
        waits.append(controller._next_trial_step)
    assert waits[1] - waits[0] == pytest.approx(10.0 / TRIAL_TIME_FRACTION)


def test_the_more_a_catch_up_costs_the_fewer_sequences_try() -> None:
    for missed, tried in ((1, MAX_TRIAL_SEQS), (300, 4), (20_000, 1)):
        controller = create_controller(COSTLY_DRAFTS._replace(catch_up=((0, 0.0), (1, 0.01))))
        controller._mean_output_len = 1e9  # and nothing else prevents a trial
        all_ = start_sequences(controller, 3 * MAX_TRIAL_SEQS, 0, missed=missed)
        assert sum(s.num_drafts > 0 for s in all_) == tried


def test_a_removed_sequence_does_not_count_in_the_catch_up() -> None:
    costs = FLAT._replace(catch_up=((0, 0.0), (1, 0.01)))
    controller, now = create_controller(costs), StepInfo(2, 0)
    controller._next_trial_step = 1e9
    observe_rows(controller, 0.9, 4, now)
    long = start_sequence(controller, now, missed=10_000, limit=101)
    assert long.num_drafts == 0, "the catch-up costs more than drafts gain"
    short = start_sequence(controller, StepInfo(2, CHECK_INTERVAL_STEPS), missed=10)
    assert short.num_drafts == 0, "the long one catches up too, if all begin"
    controller.remove_sequence(long)
    controller.remove_sequence(long)
    assert (
        start_sequence(controller, StepInfo(2, 2 * CHECK_INTERVAL_STEPS), missed=10).num_drafts == 4
    )


def test_expected_output_length_is_that_of_recent_outputs() -> None:
    """The limit of a request does not matter: catching up for a few tokens does not pay."""
    controller = create_controller(FLAT._replace(catch_up=((0, 0.0), (1, 0.01))))
    controller._next_trial_step = 1e9
    observe_rows(controller, 0.9, 4, StepInfo(1, 0))
    drafted = []
    for step, output in enumerate([5_000] * 3 + [20] * 60):
        s = start_sequence(controller, StepInfo(1, CHECK_INTERVAL_STEPS * step), missed=4_000)
        drafted.append(s.num_drafts > 0)
        s.tokens += [1] * output
        controller.remove_sequence(s)
    assert all(drafted[:4]) and not any(drafted[-20:])


def test_a_sequence_that_is_about_to_end_catches_up_on_nothing_and_tries_nothing() -> None:
    controller = create_controller(FLAT._replace(catch_up=((0, 0.0), (1, 0.01))))
    observe_rows(controller, 0.9, 4, StepInfo(1, 0))
    long, *short = (
        start_sequence(controller, StepInfo(1, 0), 10, limit) for limit in (1_000, 2, 3)
    )
    assert [s.num_drafts for s in (long, *short)] == [4, 0, 0]
    assert [controller.review_len(s) for s in short] == [2, 3]
    controller.set_num_drafts(long, 0, StepInfo(3, 1))
    assert long.num_drafts == 4, "the catch-up of others does not count"


def test_sequences_that_can_never_draft_do_not_count_as_drafting() -> None:
    """Seven of eight running sequences are unknown to the controller: each has its own steps."""
    for others, k in ((0, 4), (7, 0)):
        controller = create_controller()
        controller._next_trial_step = 1e9
        observe_rows(controller, 0.9, 4, StepInfo(1, 0))
        assert start_sequence(controller, StepInfo(1 + others, 0)).num_drafts == k


def test_sequences_without_proposals_do_not_count_as_drafting() -> None:
    controller = create_controller(COSTLY_DRAFTS, method="ngram")
    controller._next_trial_step = 1e9
    observe_rows(controller, 1.0, 4, StepInfo(1, 0))
    all_ = start_sequences(controller, 8, 0)
    assert {s.num_drafts for s in all_} == {4}
    for step in range(1, 40):
        now = StepInfo(8, step)
        if all_[0].num_drafts:
            controller.update_acceptance(all_[0], 4, 4, now)
            controller.set_num_drafts(all_[0], 0, now)
    assert all_[0].num_drafts == 0, "one of eight"


def test_proposals_that_return_are_found_again() -> None:
    """One of eight had drafts for long; then all have drafts, and those are right."""
    controller, all_ = create_controller(COSTLY_DRAFTS, method="ngram"), []
    observe_rows(controller, 1.0, 4, StepInfo(1, 0))
    all_ = start_sequences(controller, 8, 0)
    for step in range(1, 3_000):
        now = StepInfo(8, step)
        with_ideas = all_ if step > 1_000 else all_[:1]
        for s in [s for s in with_ideas if s.num_drafts]:
            controller.update_acceptance(s, 4, 4, now)
            s.tokens += [1] * 4
        for s in all_:
            s.tokens.append(1)
            controller.set_num_drafts(s, 0, now)
        if step == 1_000:
            assert controller._drafting_fraction < 0.9 and not controller._is_profitable
    assert {s.num_drafts for s in all_} == {4}


def test_no_more_drafts_are_chosen_than_a_step_has_tokens_for() -> None:
    for budget, k in ((40, 4), (39, 3), (16, 1), (15, 0)):
        controller = create_controller(budget=budget)
        controller._next_trial_step = 1e9
        observe_rows(controller, 0.9, 4, StepInfo(8, 0))
        all_ = start_sequences(controller, 8, 0)
        controller.set_num_drafts(all_[0], 0, StepInfo(8, 1))
        assert all_[0].num_drafts == k, budget


def test_a_decision_includes_the_sequences_that_started_before() -> None:
    """In the same step the text is long, and drafts would pay except for the catch-up."""
    controller, now = (
        create_controller(FLAT._replace(catch_up=((0, 0.0), (1, 0.01)))),
        StepInfo(2, 0),
    )
    controller._next_trial_step = 1e9
    observe_rows(controller, 0.9, 4, now)
    assert start_sequence(controller, now, missed=10).num_drafts == 4
    assert start_sequence(controller, now, missed=10_000, limit=30).num_drafts == 0


def test_without_proposals_nothing_is_learnt_however_long() -> None:
    controller = create_controller(method="ngram")
    s = start_sequence(controller, StepInfo(1, 0))
    known = controller._acceptance_rates()
    for step in range(0, 3_000 * CHECK_INTERVAL_STEPS, CHECK_INTERVAL_STEPS):
        s.num_drafts = 0
        controller.review_at(s, 0)
        controller.set_num_drafts(s, 0, StepInfo(1, step))
    assert controller._acceptance_rates() == known


def test_a_model_that_verifies_more_than_was_drafted_breaks_nothing() -> None:
    controller = create_controller(max_drafts=2)
    controller.update_acceptance(create_sequence(), 5, 4, StepInfo(1, 1))
    assert controller._acceptance_rates()[1] > 0.5


@pytest.mark.parametrize(("costs", "gone"), [(FLAT, 250), (COSTLY_DRAFTS, 50)])
def test_drafts_that_become_good_return_and_those_that_become_bad_stop(
    costs: StepCosts, gone: int
) -> None:
    """The more a draft costs, the sooner bad ones are dropped."""
    controller, s = create_controller(costs), create_sequence()
    assert decode_tokens(s, controller, 0.95, 600)[-1] >= 3
    bad = decode_tokens(s, controller, 0.0, 4_000)
    assert bad[0] >= 3 and not any(bad[gone : gone + 50])
    good = decode_tokens(s, controller, 0.95, 12_000)
    assert min(good[-100:]) >= 3
    assert not any(decode_tokens(s, controller, 0.0, 3_000)[gone : gone + 50])


def test_old_acceptance_counts_half_at_each_trial() -> None:
    controller, now, s = create_controller(max_drafts=1), StepInfo(1, 0), create_sequence()
    observe_rows(controller, 0.0, 1, now)
    old = controller._verified[0] / controller._row_weight
    controller.add_sequence(s, 0, StepInfo(1, 1_000))
    assert s.num_drafts == 1
    assert controller._verified[0] / controller._row_weight == pytest.approx(old / 2)


def test_no_draft_is_tried_when_perfect_drafts_would_not_pay() -> None:
    controller, s = create_controller(LINEAR), create_sequence()
    assert set(decode_tokens(s, controller, right=1.0, tokens=8_000)) == {0}


def test_a_rest_ends_no_later_than_the_sequence() -> None:
    controller = create_controller(LINEAR)
    assert controller.review_len(start_sequence(controller, StepInfo(1, 0), limit=10)) == 10


def test_the_same_run_makes_the_same_choices() -> None:
    runs = [decode_tokens(create_sequence(), create_controller(), 0.55, 3_000) for _ in range(2)]
    assert runs[0] == runs[1]
