"""Measured costs of mixed steps: the steps that are timed, and the table made of their times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from forge import LLM
from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.models.mixed_costs import measure_mixed_costs
from forge.seam import StepOutput, StepPlan

CONFIG = EngineConfig(
    num_blocks=1024,
    block_size=64,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=4096,
    depth=2,
)


@dataclass
class TimedStep:
    """A step whose result is read after its time."""

    device: TimedDevice
    plan: StepPlan

    def result(self) -> StepOutput:
        self.device.now_us += self.device.step_us(self.plan)
        return StepOutput(self.plan.step, ())


@dataclass
class TimedDevice:
    """A device with graphs of 16, 32, ... tokens that take 1000 us and 10 us for each token.

    A decode row takes 0.04 us for a position before it, a pair of a chunk 0.0007 us.
    """

    now_us: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def vocab_size(self) -> int:
        return 8

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def step_us(self, plan: StepPlan) -> float:
        graph = next((size for size in (16, 32, 64, 128, 256, 512) if size >= plan.num_tokens), 0)
        us = 1000 + 10.0 * (graph or plan.num_tokens)
        for row in plan.rows:
            us += 0.04 * row.start if len(row.tokens) == 1 else 0.0007 * len(row.tokens) * row.start
        return us

    def forward(self, plan: StepPlan) -> TimedStep:
        self.plans.append(plan)
        return TimedStep(self, plan)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TimedDevice:
    timed = TimedDevice()
    monkeypatch.setattr("forge.models.mixed_costs.time.perf_counter", lambda: timed.now_us / 1e6)
    return timed


def test_the_table_has_the_times_of_the_device(device: TimedDevice) -> None:
    costs = measure_mixed_costs(device, CONFIG)
    expected = {16: 1160, 17: 1320, 32: 1320, 33: 1640, 512: 6120, 513: 6130, 2049: 21_490}
    assert {size: us for size, us in costs.tokens if size in expected} == expected
    assert costs.tokens[-1][0] == 2049
    assert (costs.position_ns, costs.pair_ps) == (40, 700)
    assert costs.is_valid


def test_a_larger_step_never_takes_less_time_in_the_table(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device, "step_us", lambda plan: 9000.0 if plan.num_tokens == 32 else 100.0 + plan.num_tokens
    )
    costs = measure_mixed_costs(device, CONFIG)
    assert costs.is_valid
    assert dict(costs.tokens)[64] == dict(costs.tokens)[32] == 9000


def test_timed_rows_stay_within_blocks_batch_and_length(device: TimedDevice) -> None:
    config = replace(CONFIG, num_blocks=20, max_num_batched_tokens=700, max_model_len=600)
    costs = measure_mixed_costs(device, config)
    assert max(size for size, _ in costs.tokens) == 599
    assert (costs.position_ns, costs.pair_ps) == (0, 0)
    for plan in device.plans:
        assert plan.num_tokens <= 700
        assert all(row.start + len(row.tokens) <= 600 for row in plan.rows)
        assert all(block < 20 for row in plan.rows for block in row.new_blocks)


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_the_shortest_sequences_have_a_table(device: TimedDevice, max_model_len: int) -> None:
    config = replace(CONFIG, num_blocks=1, max_model_len=max_model_len)
    assert measure_mixed_costs(device, config).tokens == ((1, 1160),)
    assert {plan.num_tokens for plan in device.plans} == {1}


def test_rows_that_time_attention_have_blocks_of_their_own(device: TimedDevice) -> None:
    measure_mixed_costs(device, CONFIG)
    bound = next(plan for plan in device.plans if len(plan.rows) > 1)
    blocks = [block for row in bound.rows for block in row.new_blocks]
    assert len(set(blocks)) == len(blocks)
    longest = max(row.start + len(row.tokens) for plan in device.plans for row in plan.rows[1:])
    assert longest <= len(bound.rows[0].new_blocks) * CONFIG.block_size


def test_the_model_hash_has_no_times_to_bound() -> None:
    with pytest.raises(InvalidConfig, match="max_step_ms: steps of the model hash do not depend"):
        LLM("hash", max_step_ms=15.0)
