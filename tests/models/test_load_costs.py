"""Measured costs of loads: the steps that are timed, the numbers made of them, and their text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from forge import LLM
from forge.config import DiskTier, EngineConfig, HostTier, LoadCosts
from forge.models.embedded import embedded_folder
from forge.models.load_costs import describe_load_costs, measure_load_costs
from forge.seam import StepOutput, StepPlan
from forge.tier_status import TierStatus

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""

CONFIG = EngineConfig(
    num_blocks=1024,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    max_model_len=20_000,
    host_tier=HostTier(num_blocks=500),
)


@dataclass
class TimedStep:
    """A step whose result is read after its time."""

    device: TimedDevice
    plan: StepPlan

    def result(self) -> StepOutput:
        self.device.now_ns += self.device.step_ns(self.plan)
        return StepOutput(self.plan.step, ())


@dataclass
class TimedDevice:
    """A device that takes 90 ns for a load and 40 for each block of it, and 1,000 for a step.

    A token takes `token_ns` and each pair of tokens `pair_ns` more.
    """

    token_ns: float = 8000.0
    pair_ns: float = 0.5
    block_ns: float = 40_000.0
    now_ns: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def vocab_size(self) -> int:
        return 8

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> float:
        ns = 90_000 + self.block_ns * len(plan.loads) if plan.loads else 0.0
        for row in plan.rows:
            pairs = sum(position + 1 for position in range(row.start, row.end))
            ns += self.token_ns * len(row.tokens) + self.pair_ns * pairs
        return ns

    def forward(self, plan: StepPlan) -> TimedStep:
        self.plans.append(plan)
        return TimedStep(self, plan)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedDevice]:
    timed = TimedDevice()
    monkeypatch.setattr("forge.models.load_costs.time.perf_counter", lambda: timed.now_ns / 1e9)
    yield timed


def test_the_costs_are_the_times_of_the_device(device: TimedDevice) -> None:
    costs = measure_load_costs(device, CONFIG)
    assert costs is not None and all(type(number) is int for number in costs)
    assert costs.load_ns == pytest.approx(90_000, abs=50)
    assert costs[1:] == (40_000, 8000, 500)
    for start, end in ((0, 1024), (0, 8192), (4096, 32_768)):
        pairs = sum(position + 1 for position in range(start, end))
        assert costs.prefill_ns(start, end) == 8000 * (end - start) + pairs // 2


def test_a_device_that_reads_no_more_for_later_tokens_has_no_cost_of_pairs(
    device: TimedDevice,
) -> None:
    device.pair_ns = 0.0
    assert measure_load_costs(device, CONFIG) == LoadCosts(90_000, 40_000, 8000, 0)


def test_a_time_that_falls_gives_no_negative_cost(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger steps and loads take less time than small ones here, as after a disturbance."""
    monkeypatch.setattr(
        device, "step_ns", lambda plan: 1e6 / (1 + len(plan.loads) + plan.num_tokens) + 1
    )
    costs = measure_load_costs(device, CONFIG)
    assert costs is not None and min(costs) >= 0
    assert costs.prefill_ns(0, 2048) <= costs.prefill_ns(0, 4096)


def test_a_slow_device_is_measured_with_short_steps_and_few_blocks(device: TimedDevice) -> None:
    """A token takes 1 ms, and 32 are the fewest. A load of one block takes 20.09 ms."""
    device.token_ns, device.block_ns = 1e6, 2e7
    costs = measure_load_costs(device, CONFIG)
    assert costs == LoadCosts(0, 20_090_000, 1_000_000, 500)
    assert max(plan.num_tokens for plan in device.plans) == 32
    assert max(len(plan.loads) for plan in device.plans) == 1
    assert device.now_ns < 1e9


def test_what_is_measured_stays_within_cache_host_pool_and_steps(device: TimedDevice) -> None:
    config = replace(
        CONFIG,
        num_blocks=20,
        max_num_batched_tokens=100,
        max_model_len=300,
        host_tier=HostTier(num_blocks=7),
    )
    assert measure_load_costs(device, config) is not None
    for plan in device.plans:
        assert plan.num_host_blocks == 7 and plan.num_tokens <= 100
        assert all(row.end <= 300 for row in plan.rows)
        assert all(move.block < 20 and move.host_block < 7 for move in (*plan.stores, *plan.loads))
        assert all(block < 20 for row in plan.rows for block in row.new_blocks)
    assert max(row.end for plan in device.plans for row in plan.rows) > 200
    assert max(len(plan.loads) for plan in device.plans) == 4


def test_what_is_loaded_was_stored_and_is_in_no_block_of_a_row(device: TimedDevice) -> None:
    measure_load_costs(device, CONFIG)
    stored: set[int] = set()
    held: set[int] = set()
    for plan in device.plans:
        held = {block for row in plan.rows for block in row.new_blocks} or held
        stored |= {store.host_block for store in plan.stores}
        for load in plan.loads:
            assert load.host_block in stored and load.block not in held
    assert stored


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, num_blocks=1),
        replace(CONFIG, host_tier=HostTier(num_blocks=0)),
        replace(CONFIG, max_model_len=2),
    ],
)
def test_where_nothing_can_be_loaded_there_are_no_costs(
    device: TimedDevice, config: EngineConfig
) -> None:
    assert measure_load_costs(device, config) is None
    assert not device.plans


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_the_smallest_pools_have_costs(device: TimedDevice, num_blocks: int) -> None:
    """Of one block or two there is one size of load: its time is that of the block."""
    config = replace(CONFIG, num_blocks=num_blocks, block_size=1, max_model_len=3)
    costs = measure_load_costs(device, config)
    assert costs is not None and costs.load_block_ns in (40_000, 130_000)


def test_the_costs_are_said_with_the_times_of_a_long_prefix() -> None:
    """2 ms and 512 blocks of 0.1; 8192 tokens of 5 us and 33.6 million pairs of 1 ns; files."""
    disk = DiskTier(max_files=1, fetch_block_ns=400_000)
    tier = HostTier(num_blocks=1, costs=LoadCosts(2_000_000, 100_000, 5000, 1000), disk=disk)
    text = describe_load_costs(replace(CONFIG, host_tier=tier))
    assert text == (
        "KV tiers: 2000.0 us a load, 100.0 us a block from host memory, 400.0 us more from a "
        "file; computing takes 5.0 us a token and 1.00 ns more for each token before it. A prefix "
        "of 8192 tokens takes 74.5 ms to compute, 53.2 ms from host memory, 258.0 ms from files: "
        "an idle engine takes the quickest"
    )
    without_files = describe_load_costs(replace(CONFIG, host_tier=replace(tier, disk=None)))
    assert "file" not in without_files


def check_unused(llm: LLM, folder: Path) -> None:
    """Check that an engine is as it was before its start was timed."""
    scheduler = llm.engine.scheduler
    tier = llm.engine.config.host_tier
    assert tier is not None
    assert TierStatus.from_scheduler(scheduler) == TierStatus(num_host_blocks=tier.num_blocks)
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks
    assert scheduler.next_step == 0 and not scheduler.ledger
    assert [each.name for each in folder.iterdir()] == [".lock"]


@pytest.mark.torch
def test_a_checkpoint_measures_its_tiers_at_the_start(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    options = {"device": "cpu", "num_blocks": 32, "block_size": 8, "max_model_len": 128}
    files = {"kv_disk_path": f"{tmp_path}/kv", "kv_disk_gib": 0.01}
    with caplog.at_level(logging.INFO), LLM(TINY, **options, kv_host_gib=0.01, **files) as llm:  # type: ignore[arg-type]
        tier = llm.engine.config.host_tier
        check_unused(llm, tmp_path / "kv")
    assert tier is not None and tier.costs is not None and tier.disk is not None
    assert tier.costs.token_ns > 0 and tier.disk.fetch_block_ns > 0
    assert [m for m in caplog.messages if m.startswith("KV tiers: ")]
    with LLM(TINY, **options, kv_host_gib=0.01, **files, kv_load_rule="always") as llm:  # type: ignore[arg-type]
        tier = llm.engine.config.host_tier
    assert tier is not None and tier.costs is None and tier.disk is not None
    assert tier.disk.fetch_block_ns == 0


@pytest.mark.parametrize("model", ["hash", "tiny"])
def test_an_embedded_model_always_loads(model: str) -> None:
    """Steps of hash take no time, and those of tiny far more than loads of their blocks."""
    with LLM(model, kv_host_gib=0.001) as llm:
        tier = llm.engine.config.host_tier
    assert tier is not None and tier.costs is None
