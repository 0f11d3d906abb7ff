"""What is timed before a model drafts: the plans, and what is made of their times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from forge.config import EngineConfig, Speculation
from forge.lookahead import seconds
from forge.models.costs import TEXT, measured, parts
from forge.seam import StepOutput, StepPlan

CONFIG = EngineConfig(
    num_blocks=512,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=1024,
    max_model_len=2048,
    speculation=Speculation(num_tokens=4),
)


@dataclass
class Launched:
    """A step that the device has done at a time; who asks for it waits until then."""

    model: Timed
    end: float

    def result(self) -> StepOutput:
        self.model.now = max(self.model.now, self.end)
        return StepOutput(0, ())


@dataclass
class Timed:
    """A device that takes 10 for a step and 1 for a token of it; drafts a tenth of that."""

    now: float = 0.0
    free: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def vocab_size(self) -> int:
        return 8

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def forward(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        spent = 10.0 + plan.num_tokens
        spent += sum((10.0 + draft.num_tokens) / 10 for draft in plan.drafts)
        self.free = max(self.free, self.now) + spent
        return Launched(self, self.free)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Timed:
    model = Timed()
    monkeypatch.setattr("time.perf_counter", lambda: model.now)
    monkeypatch.setattr("forge.models.costs.MOST_SECONDS", 1e9)
    return model


def test_steps_take_what_the_device_takes_for_them(model: Timed) -> None:
    costs = measured(model, CONFIG)
    assert costs is not None
    assert [rows for rows, _ in costs.target] == [1, 4, 8]
    for rows, spent in costs.target:
        assert spent == pytest.approx(10 + rows)
    for tokens, spent in costs.verify:
        assert spent == pytest.approx(10 + tokens)
    assert {2, 3, 4, 5, 40} <= {tokens for tokens, _ in costs.verify}
    for rows, spent in costs.draft:
        assert spent == pytest.approx((10 + rows) / 10)


def test_a_text_that_a_draft_model_is_told_is_timed_as_one(model: Timed) -> None:
    costs = measured(model, CONFIG)
    assert costs is not None
    assert costs.told == ((0, 0.0), (TEXT, pytest.approx((10 + TEXT) / 10)))
    assert seconds(costs.told, 2 * TEXT) == pytest.approx((10 + TEXT) / 5)
    told = [row for plan in model.plans for draft in plan.drafts for row in draft.rows]
    assert max(len(row.tokens) for row in told) == TEXT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_model_len": 100}, 98),
        ({"num_blocks": 12}, 12 * 16 - 2),
    ],
)
def test_a_text_is_no_longer_than_there_is_room_for(
    model: Timed, change: dict[str, int], text: int
) -> None:
    costs = measured(model, replace(CONFIG, **change))
    assert costs is not None and costs.told[1][0] == text
    for plan in model.plans:
        for part in (plan, *plan.drafts):
            assert part.num_tokens <= max(64, change.get("max_num_batched_tokens", 1024))
            for row in part.rows:
                assert row.end <= min(change.get("max_model_len", 2048), part.num_blocks * 16)


def test_no_text_is_timed_where_there_is_no_room_for_one(model: Timed) -> None:
    small = Speculation(num_tokens=1, num_blocks=2)
    costs = measured(model, replace(CONFIG, block_size=1, speculation=small))
    assert costs is not None and costs.told == ()


def test_nobody_is_told_anything_where_a_proposer_guesses(model: Timed) -> None:
    costs = measured(model, replace(CONFIG, speculation=Speculation(num_tokens=4, method="ngram")))
    assert costs is not None and costs.told == costs.draft == ()
    assert not any(plan.drafts for plan in model.plans)


@pytest.mark.parametrize(("method", "draft"), [("draft", (10 + 3) / 10), ("ngram", 0.0)])
def test_the_parts_of_a_round_are_a_step_its_verification_and_each_draft(
    model: Timed, method: str, draft: float
) -> None:
    """Three rows with two drafts each."""
    speculation = Speculation(num_tokens=2, method=method)
    found = parts(model, replace(CONFIG, speculation=speculation), 3, 2)
    assert found.step == pytest.approx(10 + 3)
    assert found.verify == pytest.approx(10 + 3 * 3)
    assert found.draft == pytest.approx(draft)


def test_rows_of_a_plan_that_is_timed_are_of_sequences_that_have_a_slot_each(model: Timed) -> None:
    measured(model, CONFIG)
    for plan in model.plans:
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert {row.epoch for row in plan.rows} == {0}
