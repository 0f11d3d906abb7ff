"""The host pool in the simulator: times of moves, and what a pool is worth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forge.config import EngineConfig, HostTier
from forge.engine import Engine
from forge.seam import HostLoad, HostStore, Row, StepPlan
from forge.sim.clock import Clock, LinkCost, VirtualClockModel
from forge.sim.cost.simple import ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.fast_forward import run_fast_forward
from forge.sim.length_model import LengthModel
from forge.sim.scenario import Scenario, summary
from forge.sim.workloads.workload import FixedArrivals, RequestArrival, create_request
from forge.sim.world import World

STEP_NS = 1_000
ROW = Row(0, 0, 0, 0, (1,), new_blocks=(0,), num_samples=1)


def timed_model() -> VirtualClockModel:
    """Return a model whose steps take 1,000 ns and whose moves 100 ns and 10 ns a block."""
    return VirtualClockModel(LengthModel(), Clock(), ConstantCost(STEP_NS), LinkCost(100, 10))


def plan_of(
    step: int, rows: tuple[Row, ...] = (ROW,), num_stores: int = 0, num_loads: int = 0
) -> StepPlan:
    stores = tuple(HostStore(1 + i, i) for i in range(num_stores))
    loads = tuple(HostLoad(1, 0, 300 + i, 300 + i) for i in range(num_loads))
    return StepPlan(step, rows, 600, 4, num_host_blocks=600, stores=stores, loads=loads)


def test_moves_that_end_before_the_rows_cost_nothing() -> None:
    model = timed_model()
    step = model.forward(plan_of(0, num_stores=90, num_loads=90))
    assert (step.begin_ns, step.end_ns, model.device_free_ns) == (0, STEP_NS, STEP_NS)


def test_the_next_step_begins_after_the_longer_direction() -> None:
    """The result of the plan itself does not wait for its moves."""
    for num_stores, num_loads in ((200, 3), (3, 200)):
        model = timed_model()
        first = model.forward(plan_of(0, num_stores=num_stores, num_loads=num_loads))
        second = model.forward(plan_of(1))
        assert (first.end_ns, second.begin_ns, second.end_ns) == (STEP_NS, 2_100, 3_100)


def test_a_plan_of_loads_alone_launches_no_step() -> None:
    model = timed_model()
    loads = model.forward(plan_of(0, rows=(), num_loads=50))
    rest = model.forward(plan_of(1))
    assert (loads.end_ns, rest.begin_ns) == (0, 600)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_leap_begins_after_moves_that_go_on(depth: int) -> None:
    """The blocks of the first request are stored in the first plan of the second, for 30 ms."""
    logs = []
    for run in (World.run, run_fast_forward):
        tier = HostTier(num_blocks=9, max_moved_blocks=None, min_clean_percent=100, min_touches=1)
        config = EngineConfig(
            num_blocks=16, block_size=4, max_num_seqs=1, depth=depth, host_tier=tier
        )
        link = LinkCost(0, 10_000_000)
        model = VirtualClockModel(LengthModel(), Clock(), ConstantCost(), link)
        lines: list[str] = []
        log = DecisionLog(lines.append, {})
        arrivals = [RequestArrival(0, create_request(i, 13, 2 + 38 * i)) for i in range(2)]
        engine = Engine(model, config)
        world = World(engine, model, FixedArrivals(tuple(arrivals)), log)
        run(world) if run is World.run else run_fast_forward(world, log)
        log.close()
        assert engine.scheduler.host_cache.num_stored_blocks == 3
        assert world.clock.now_ns > 70_000_000
        logs.append(lines)
    assert logs[0] == logs[1]


AGENTS = Scenario(
    workload="agent",
    clients=8,
    requests=96,
    turns=12,
    pause=2.0,
    oversubscription=2.5,
    cost="affine:4000,20,60",
    seed=2,
)


def figures_and_log(scenario: Scenario) -> tuple[dict[str, object], list[str]]:
    """Return the figures of a run, and its log."""
    lines: list[str] = []
    log = DecisionLog(lines.append, scenario.header())
    figures = summary(scenario.run(log))
    log.close()
    return figures, lines


@pytest.mark.long
def test_a_host_pool_brings_prefixes_back_and_shortens_the_wait() -> None:
    without, _ = figures_and_log(AGENTS)
    scenario = replace(AGENTS, host_blocks=3 * AGENTS.engine.num_blocks, host_block_us=20.0)
    figures, lines = figures_and_log(scenario)
    assert figures == figures_and_log(scenario)[0]
    assert "loaded_tokens" not in without and figures["loaded_tokens"]
    sessions, sessions_without = figures["sessions"], without["sessions"]
    assert isinstance(sessions, dict) and isinstance(sessions_without, dict)
    assert sessions["resumed_tokens"]["host"] == figures["loaded_tokens"]
    assert (
        sessions["resumed_tokens"]["recomputed"]
        < sessions_without["resumed_tokens"]["recomputed"] / 2
    )
    assert sessions["completion_ms"]["mean"] < sessions_without["completion_ms"]["mean"]
    assert json.loads(lines[0])["options"]["host_blocks"] == scenario.host_blocks


@pytest.mark.long
def test_a_link_that_is_too_slow_is_seen() -> None:
    """Loads are chosen without costs here: a slow link makes the answers late."""
    quick = replace(AGENTS, host_blocks=3 * AGENTS.engine.num_blocks, host_block_us=20.0)
    slow = replace(quick, host_block_us=20_000.0)
    means = []
    for scenario in (quick, slow):
        sessions = figures_and_log(scenario)[0]["sessions"]
        assert isinstance(sessions, dict)
        means.append(sessions["completion_ms"]["mean"])
    assert means[0] < means[1]
