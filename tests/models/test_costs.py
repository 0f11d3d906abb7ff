"""Measured step costs: the plans that are timed, and the table made of their times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from forge.config import EngineConfig, Speculation
from forge.draft_length import interpolate_s
from forge.models.costs import CATCH_UP_LEN, measure_device_times, measure_step_costs
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
class DeviceStep:
    """A step that the device finishes at a given time; `result` waits until then."""

    model: TimedDevice
    end: float

    def result(self) -> StepOutput:
        self.model.now = max(self.model.now, self.end)
        return StepOutput(0, ())


@dataclass
class TimedDevice:
    """A device that takes 10 for a step and 1 for each token; drafts take a tenth of that."""

    now: float = 0.0
    free_at: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def vocab_size(self) -> int:
        return 8

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def forward(self, plan: StepPlan) -> DeviceStep:
        self.plans.append(plan)
        spent = 10.0 + plan.num_tokens
        spent += sum((10.0 + draft.num_tokens) / 10 for draft in plan.drafts)
        self.free_at = max(self.free_at, self.now) + spent
        return DeviceStep(self, self.free_at)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TimedDevice:
    model = TimedDevice()
    monkeypatch.setattr("time.perf_counter", lambda: model.now)
    monkeypatch.setattr("forge.models.costs.MAX_MEASURE_S", 1e9)
    return model


def test_steps_take_what_the_device_takes_for_them(model: TimedDevice) -> None:
    costs = measure_step_costs(model, CONFIG)
    assert costs is not None
    assert [rows for rows, _ in costs.target] == [1, 4, 8]
    for rows, spent in costs.target:
        assert spent == pytest.approx(10 + rows)
    for tokens, spent in costs.verify:
        assert spent == pytest.approx(10 + tokens)
    assert {2, 3, 4, 5, 40} <= {tokens for tokens, _ in costs.verify}
    for rows, spent in costs.draft:
        assert spent == pytest.approx((10 + rows) / 10)


def test_the_prefill_of_a_draft_model_is_timed_as_one_step(model: TimedDevice) -> None:
    costs = measure_step_costs(model, CONFIG)
    assert costs is not None
    assert costs.catch_up == ((0, 0.0), (CATCH_UP_LEN, pytest.approx((10 + CATCH_UP_LEN) / 10)))
    assert interpolate_s(costs.catch_up, 2 * CATCH_UP_LEN) == pytest.approx((10 + CATCH_UP_LEN) / 5)
    draft_rows = [row for plan in model.plans for draft in plan.drafts for row in draft.rows]
    assert max(len(row.tokens) for row in draft_rows) == CATCH_UP_LEN


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_model_len": 100}, 98),
        ({"num_blocks": 12}, 12 * 16 - 2),
    ],
)
def test_a_text_is_no_longer_than_there_is_room_for(
    model: TimedDevice, change: dict[str, int], text: int
) -> None:
    costs = measure_step_costs(model, replace(CONFIG, **change))
    assert costs is not None and costs.catch_up[1][0] == text
    for plan in model.plans:
        for part in (plan, *plan.drafts):
            assert part.num_tokens <= max(64, change.get("max_num_batched_tokens", 1024))
            for row in part.rows:
                assert row.end <= min(change.get("max_model_len", 2048), part.num_blocks * 16)


def test_no_text_is_timed_where_there_is_no_room_for_one(model: TimedDevice) -> None:
    small = Speculation(num_tokens=1, num_blocks=2)
    costs = measure_step_costs(model, replace(CONFIG, block_size=1, speculation=small))
    assert costs is not None and costs.catch_up == ()


def test_no_draft_model_step_is_timed_where_a_proposer_drafts(model: TimedDevice) -> None:
    costs = measure_step_costs(
        model, replace(CONFIG, speculation=Speculation(num_tokens=4, method="ngram"))
    )
    assert costs is not None and costs.catch_up == costs.draft == ()
    assert not any(plan.drafts for plan in model.plans)


@pytest.mark.parametrize(("method", "draft"), [("draft", (10 + 3) / 10), ("ngram", 0.0)])
def test_the_parts_of_a_round_are_a_step_its_verification_and_each_draft(
    model: TimedDevice, method: str, draft: float
) -> None:
    """Three rows with two drafts each."""
    speculation = Speculation(num_tokens=2, method=method)
    found = measure_device_times(model, replace(CONFIG, speculation=speculation), 3, 2)
    assert found.step == pytest.approx(10 + 3)
    assert found.verify == pytest.approx(10 + 3 * 3)
    assert found.draft == pytest.approx(draft)


def test_rows_of_a_plan_that_is_timed_are_of_sequences_that_have_a_slot_each(
    model: TimedDevice,
) -> None:
    measure_step_costs(model, CONFIG)
    for plan in model.plans:
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert {row.epoch for row in plan.rows} == {0}
