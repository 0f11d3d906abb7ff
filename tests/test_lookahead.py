"""How many drafts pay: the choice by costs and acceptance, and rests that bound what is tried."""

from __future__ import annotations

from fractions import Fraction
from itertools import count, pairwise
from math import log2

import pytest

from forge.config import Speculation, StepCosts
from forge.lookahead import (
    ENOUGH,
    FIRST_REST,
    LONGEST_REST,
    Lookahead,
    Moment,
    seconds,
)
from forge.request import Request, SamplingParams
from forge.seam import Bind
from forge.sequence import Sequence
from forge.speculative import expected_tokens

FLAT = StepCosts(((1, 1.0), (64, 1.0)), ((1, 0.1), (64, 0.1)))
"""A device on which a step costs the same whatever it computes, and a draft a tenth."""
LINEAR = StepCosts(((1, 1.0), (64, 64.0)), ((1, 0.1), (64, 6.4)))
"""A device that is busy with one token already: no draft can pay."""


def lookahead(costs: StepCosts | None = FLAT, most: int = 4) -> Lookahead:
    return Lookahead(Speculation(num_tokens=most, costs=costs))


IDS = count()


def sequence(limit: int = 100_000) -> Sequence:
    params = SamplingParams(temperature=0.0)
    bind = Bind(params, 1, 1)
    return Sequence(
        next(IDS), Request(0, (1,), params), 0, params, bind, [1], limit, frozenset(), None, None
    )


def decode(s: Sequence, chooser: Lookahead, right: float, tokens: int) -> list[int]:
    """The sequence gets `tokens` tokens; of its drafts `right` in order are right. Drafts a row."""
    rows, owed = [], Fraction(0)
    first, end = len(s.tokens), len(s.tokens) + tokens
    if first == 1:
        chooser.begin(s, Moment(1, 0))
    while len(s.tokens) < end:
        accepted, judged = 0, 0
        for _ in range(s.num_drafts):
            owed += Fraction(right)
            judged += 1
            if owed < 1:
                break
            owed -= 1
            accepted += 1
        rows.append(s.num_drafts)
        s.tokens += [1] * (accepted + 1)
        now = Moment(1, len(s.tokens))
        if judged:
            chooser.learn(s, judged, accepted, now)
        if judged or len(s.tokens) >= s.heed:
            chooser.settle(s, now)
    return rows


def known(chooser: Lookahead, right: float, now: Moment) -> Sequence:
    """A sequence of whose drafts the share `right` was accepted, as everybody's were."""
    s = sequence()
    s.pace.judged, s.pace.accepted = 1e9, 1e9 * right
    chooser.begin(s, now)
    return s


@pytest.mark.parametrize(
    ("tokens", "time"), [(0, 2.0), (1, 2.0), (2, 2.5), (3, 3.0), (5, 6.0), (6, 7.0), (100, 101.0)]
)
def test_a_step_takes_what_a_line_between_measured_points_says(tokens: int, time: float) -> None:
    points = ((1, 2.0), (3, 3.0), (4, 5.0), (5, 6.0))
    assert seconds(points, tokens) == time
    assert seconds(((8, 3.0),), tokens) == 3.0


def test_without_costs_a_row_always_has_all_drafts() -> None:
    chooser, s, now = lookahead(costs=None, most=3), sequence(), Moment(64, 5)
    chooser.begin(s, now)
    for _ in range(50):
        chooser.settle(s, now)
        assert s.num_drafts == 3
        chooser.learn(s, 1, 0, now)


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("running", "drafting"), [(1, 1), (16, 16), (16, 9), (16, 1)])
@pytest.mark.parametrize("host", [(), ((1, 0.2), (16, 0.9))])
def test_the_choice_is_the_one_with_most_tokens_a_second(
    right: float, running: int, drafting: int, host: tuple[tuple[int, float], ...]
) -> None:
    """Against every k, tried by the formula; where nothing gains 3 % there are no drafts."""
    costs = StepCosts(((1, 1.0), (8, 1.1), (64, 4.0)), ((1, 0.15), (64, 0.5)), host=host)
    chooser, now = lookahead(costs, most=6), Moment(running, 0)
    some = [known(chooser, right, now) for _ in range(drafting)]
    share = round(right * 64) / 64

    def pace(k: int, drafting: int = drafting) -> float:
        if not k:
            return 1.03 * running / seconds(costs.target, running)
        spent = seconds(costs.target, running + drafting * k) + k * seconds(costs.draft, drafting)
        tokens = running + drafting * (expected_tokens(share, k) - 1)
        return tokens / (spent + (seconds(host, running) if host else 0.0))

    wanted = max(range(7), key=pace)
    if not max(range(7), key=lambda k: pace(k, running)):
        wanted = 0  # it would not pay where all were like these
    assert {chooser.choose(s, now) for s in some} == {wanted}


def test_one_k_is_for_all_that_are_worth_it_and_the_others_have_none() -> None:
    """A round has as many draft steps as its longest row, whoever has fewer."""
    chooser, now = lookahead(most=8), Moment(4, 0)
    good = [known(chooser, right, now) for right in (0.9, 0.7, 0.5)]
    bad = known(chooser, 0.0, now)
    assert len({chooser.choose(s, now) for s in good}) == 1 and chooser.choose(good[0], now) > 1
    assert chooser.choose(bad, now) == 0
    for s in good:
        chooser.forget(s)
    assert chooser.choose(good[0], now) == 0, "it does not run"


def test_better_drafts_and_cheaper_steps_have_longer_rows() -> None:
    chosen, now = [], Moment(1, 0)
    for right in (0.05, 0.4, 0.7, 0.95):
        chooser = lookahead(most=8)
        chosen.append(chooser.choose(known(chooser, right, now), now))
    assert chosen == sorted(chosen) and chosen[0] == 0 and len(set(chosen)) == 4


def test_a_full_batch_on_a_busy_device_has_no_drafts() -> None:
    busy = StepCosts(((1, 1.0), (16, 1.0), (256, 16.0)))
    for running, k in ((1, 4), (64, 0)):
        chooser, now = lookahead(busy), Moment(running, 0)
        assert chooser.choose(known(chooser, 0.8, now), now) == k


def test_drafts_that_are_never_right_are_given_up_and_tried_more_and_more_seldom() -> None:
    chooser, s = lookahead(), sequence()
    rows = decode(s, chooser, right=0.0, tokens=8_000)
    tried = [i for i, drafts in enumerate(rows) if drafts]
    first_rest = rows.index(0)
    assert first_rest < 20, "given up"
    probes = [i for i in tried if i > first_rest]
    rests = [b - a for a, b in pairwise(probes)]
    assert all(rows[i] == 1 for i in probes), "a probe is one draft"
    assert rests == sorted(rests) and rests[-1] >= LONGEST_REST
    assert len(probes) <= log2(LONGEST_REST / FIRST_REST) + 1 + 8_000 / LONGEST_REST
    assert len(probes) >= 5, "never given up for good"


def test_drafts_that_turn_good_come_back_and_those_that_turn_bad_go() -> None:
    chooser, s = lookahead(), sequence()
    assert decode(s, chooser, 0.9, 400)[-1] >= 3
    bad = decode(s, chooser, 0.0, 2_000)
    assert sum(map(bool, bad)) < 150 and bad[-1] == 0
    good = decode(s, chooser, 0.9, 4_000)
    assert good[-1] >= 3 and sum(good[-100:]) > 200
    assert decode(s, chooser, 0.0, 2_000)[-1] == 0


def test_where_perfect_drafts_would_not_pay_none_is_tried() -> None:
    chooser, s = lookahead(LINEAR), sequence()
    assert set(decode(s, chooser, right=1.0, tokens=8_000)) == {0}


def test_a_sequence_is_looked_at_where_its_rest_ends_and_not_before() -> None:
    chooser, s = lookahead(), sequence()
    s.pace.judged = 1e9
    chooser.begin(s, Moment(1, 0))
    assert (s.num_drafts, s.heed) == (0, 1 + FIRST_REST)
    s.tokens += [1] * (FIRST_REST - 1)
    chooser.settle(s, Moment(1, FIRST_REST - 1))
    assert s.num_drafts == 0
    s.tokens.append(1)
    chooser.settle(s, Moment(1, FIRST_REST))
    assert (s.num_drafts, s.heed) == (1, s.limit)


def test_all_try_again_at_the_same_step() -> None:
    """A round costs everybody: it is not for each sequence to have one of its own."""
    chooser, all_ = lookahead(), [sequence() for _ in range(5)]
    for at, s in enumerate(all_):
        s.pace.judged = 1e9
        s.tokens += [1] * at
        chooser.begin(s, Moment(5, 4 * at))
    assert {4 * at + s.heed - len(s.tokens) for at, s in enumerate(all_)} == {FIRST_REST}


@pytest.mark.parametrize(
    ("method", "running", "times"),
    [("draft", 8, 1), ("draft", 9, 2), ("draft", 64, 8), ("ngram", 64, 1)],
)
def test_many_rest_longer_where_a_model_must_be_told_what_they_are(
    method: str, running: int, times: int
) -> None:
    chooser, s = Lookahead(Speculation(num_tokens=4, method=method, costs=FLAT)), sequence()
    s.pace.judged = 1e9
    chooser.begin(s, Moment(running, 0))
    assert (s.num_drafts, s.heed) == (0, 1 + times * FIRST_REST)


def test_who_was_right_goes_on() -> None:
    chooser, s = lookahead(), sequence()
    s.pace.judged = 3000.0
    chooser.begin(s, Moment(1, 0))
    s.tokens += [1] * FIRST_REST
    rows = []
    for step in range(FIRST_REST, FIRST_REST + 20):
        chooser.settle(s, Moment(1, step))
        rows.append(s.num_drafts)
        chooser.learn(s, s.num_drafts, s.num_drafts, Moment(1, step))
    assert rows[0] == 1 and 0 not in rows and set(rows[:4]) == {1}
    chooser.learn(s, 1, 0, Moment(1, 99))
    s.pace.judged, s.pace.accepted = 1e9, 0.0
    chooser.learn(s, 1, 0, Moment(1, 99))
    chooser.settle(s, Moment(1, 99))
    assert s.num_drafts == 0


def test_where_enough_were_judged_who_was_right_rests_with_the_others() -> None:
    """Perfect drafts would pay, those of this batch do not: a round costs everybody."""
    dear = StepCosts(((1, 1.0), (64, 1.0)), ((1, 0.6), (64, 0.6)))
    chooser, step = lookahead(dear), FIRST_REST
    all_ = [sequence() for _ in range(64)]
    for s in all_:
        chooser.begin(s, Moment(64, 0))
        s.tokens += [1] * (s.heed - 1)
        step = s.heed - 1
    for s in all_:
        chooser.settle(s, Moment(64, step))
        assert s.num_drafts == 1
    going = []
    for at, s in enumerate(all_):
        chooser.learn(s, 1, at % 2, Moment(64, step + 1))
        chooser.settle(s, Moment(64, step + 1))
        going.append(s.num_drafts)
    assert going[: ENOUGH - 1] == [at % 2 for at in range(ENOUGH - 1)]
    assert set(going[ENOUGH - 1 :]) == {0}


def test_a_rest_ends_no_later_than_the_sequence() -> None:
    chooser, s = lookahead(LINEAR), sequence(limit=10)
    chooser.begin(s, Moment(1, 0))
    assert s.heed == 10


def test_a_new_sequence_goes_by_how_everybodys_drafts_fared() -> None:
    chooser, now, bad, fresh = lookahead(), Moment(1, 0), sequence(), sequence()
    chooser.begin(bad, now)
    for _ in range(300):
        chooser.learn(bad, 1, 0, now)
    chooser.begin(fresh, now)
    assert fresh.num_drafts == 0
    chooser, good, another = lookahead(), sequence(), sequence()
    chooser.begin(good, now)
    for _ in range(300):
        chooser.learn(good, 4, 4, now)
    chooser.begin(another, now)
    assert another.num_drafts == 4


def test_the_same_run_makes_the_same_choices() -> None:
    runs = [decode(sequence(), lookahead(), 0.55, 3_000) for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_was_computed_once_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.lookahead.MOST_CHOICES", 2)
    chooser = lookahead()
    chosen = [chooser._best(parts, 1, 1) for parts in (0, 30, 64, 30, 0)]
    assert chosen == [0, *chosen[1:4], 0] and chosen[1] == chosen[3] < chosen[2] == 4
    assert len(chooser._choices) <= 2
