"""Fast-forward: a leap equals its steps in the log, the metrics and every number of the state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from forge.config import EngineConfig, HostTier
from forge.engine import Engine
from forge.policies import policy_names
from forge.policy_loader import load_policy
from forge.request import Delta
from forge.seam import StepPlan
from forge.sim.clock import FREE_LINK, Clock, LinkCost, VirtualClockModel
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.fast_forward import run_fast_forward
from forge.sim.length_model import LengthModel
from forge.sim.scenario import Scenario
from forge.sim.workloads.workload import (
    BurstyWorkload,
    ClosedLoopWorkload,
    FixedArrivals,
    PoissonWorkload,
    RequestArrival,
    Workload,
    create_request,
)
from forge.sim.world import World
from tests.core.worlds import audit, audit_drained, snapshot


class FinishCost(AffineCost):
    """A cost model with more host time for plans that contain an end, and for their results."""

    def plan_ns(self, plan: StepPlan) -> int:
        return super().plan_ns(plan) + 50_000 * len(plan.finished)

    def commit_ns(self, plan: StepPlan) -> int:
        return super().commit_ns(plan) + 30_000 * len(plan.finished)

    def step_ns(self, plan: StepPlan) -> int:
        return super().step_ns(plan) + 700_000 * len(plan.finished)


class RunState(NamedTuple):
    """State that two runs must have in common."""

    log: list[str]
    summary: object
    state: str
    now_ns: int
    num_steps: int
    planned_tokens: int


def draw_world(seed: int) -> tuple[EngineConfig, Workload, AffineCost | ConstantCost, str]:
    """Draw a small world under pressure, with idle times, bursts or closed loops, and a policy."""
    rng = Random(seed)
    longest = rng.choice((20, 60, 200))

    def lengths(request_id: int) -> tuple[int, int]:
        of = Random(f"{seed} {request_id}")
        return of.randint(1, longest), of.randint(1, longest)

    block_size = rng.choice((1, 4, 16))
    rows = rng.choice((1, 2, 8, 16))
    config = EngineConfig(
        num_blocks=-(-2 * longest // block_size) + rng.choice((0, 3, 30, 300)),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice((0, 16, 500)),
        max_model_len=2 * longest,
        depth=rng.choice((1, 2)),
        enable_prefix_caching=rng.random() < 0.5,
    )
    host_rng = Random(f"{seed} host")
    if config.enable_prefix_caching and host_rng.random() < 0.6:
        host_tier = HostTier(
            num_blocks=host_rng.choice((1, 20, 300)),
            max_moved_blocks=host_rng.choice((1, 8, None)),
            min_clean_percent=host_rng.choice((12, 100)),
            min_touches=host_rng.choice((1, 2)),
        )
        config = replace(config, host_tier=host_tier)
    rate = rng.choice((2.0, 20.0, 200.0))
    workload: Workload = rng.choice(
        (
            PoissonWorkload(rate, 30, lengths, seed),
            BurstyWorkload((rate / 4, rate * 4), (1.0, 0.3), 30, lengths, seed),
            ClosedLoopWorkload(rng.randint(1, 6), 30, lengths, rng.choice((0.0, 0.1)), seed),
        )
    )
    cost = rng.choice(
        (
            ConstantCost(),
            AffineCost(1_000_000, 7_000, 900),
            AffineCost(900_000, 11, 3, 200_000, 999),
            FinishCost(900_000, 11, 3, 200_000, 999),
        )
    )
    return config, workload, cost, rng.choice(policy_names())


def run_world(seed: int, fast_forward: bool, reached: Counter[str]) -> RunState:
    config, workload, cost, policy = draw_world(seed)
    link = Random(f"{seed} link").choice((FREE_LINK, LinkCost(9_000, 700_000), LinkCost(1, 40_000)))
    model = VirtualClockModel(LengthModel(), Clock(), cost, link)
    engine, lines = Engine(model, config, policy=load_policy(policy)), list[str]()
    log = DecisionLog(lines.append, {"seed": seed})
    world = World(engine, model, workload, log)
    calls = 0
    step = engine.step

    def counted() -> object:
        nonlocal calls
        calls += 1
        if calls % 50 == 0:
            audit(engine)
        return step()

    engine.step = counted  # type: ignore[assignment]
    measures = run_fast_forward(world, log) if fast_forward else world.run()
    log.close()
    audit_drained(engine)
    reached["leapt" if fast_forward else "stepped"] += world.num_steps - calls
    reached["preemptions"] += engine.scheduler.num_preemptions
    reached["evictions"] += engine.scheduler.pool.num_evictions
    reached["stores"] += engine.scheduler.host_cache.num_stored_blocks
    return RunState(
        lines,
        measures.summary(),
        snapshot(engine.scheduler.pool) + snapshot(engine.scheduler.host_cache),
        world.clock.now_ns,
        world.num_steps,
        engine.scheduler.num_planned_tokens,
    )


def compare(seeds: range) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in seeds:
        leapt, stepped = run_world(seed, True, reached), run_world(seed, False, reached)
        assert leapt == stepped, f"seed {seed}"
    return reached


def test_a_short_run_in_leaps_is_the_run_step_by_step() -> None:
    assert compare(range(3))["leapt"]


@pytest.mark.long
def test_a_run_in_leaps_is_the_run_step_by_step() -> None:
    reached = compare(range(14))
    assert reached["leapt"] > 500 and reached["stepped"] == 0
    assert reached["preemptions"] and reached["evictions"] and reached["stores"]


def test_a_leap_goes_from_the_step_after_a_prompt_to_an_end() -> None:
    """Two that start together: the prompts, a leap to the first end, a leap to the second."""
    model = VirtualClockModel(LengthModel(), Clock(), ConstantCost())
    engine, lines = Engine(model, EngineConfig(num_blocks=64)), list[str]()
    log = DecisionLog(lines.append, {})
    workload = FixedArrivals(
        (RequestArrival(0, create_request(0, 9, 20)), RequestArrival(0, create_request(1, 9, 50)))
    )
    world = World(engine, model, workload, log)
    called, step = [], engine.step

    def counted() -> list[Delta]:
        called.append(world.num_steps)
        return step()

    engine.step = counted  # type: ignore[method-assign]
    run_fast_forward(world, log)
    log.close()
    assert (called, world.num_steps) == ([0], 50)
    line = next(json.loads(line) for line in lines if '"step":20' in line)
    line.pop("plan")
    assert line == {
        "at": 21_000_000,
        "step": 20,
        "rows": 1,
        "tokens": 1,
        "finished": [[0, "length"]],
    }


def log_of(create_world: Callable[[DecisionLog], World], fast_forward: bool) -> list[str]:
    """Return the log of a run of this world."""
    lines: list[str] = []
    log = DecisionLog(lines.append, {})
    world = create_world(log)
    run_fast_forward(world, log) if fast_forward else world.run()
    log.close()
    return lines


def test_a_block_that_no_row_has_sent_is_sent_before_a_leap() -> None:
    """Prompts go first here, so a sequence may have its block and no row in that step."""
    base = Scenario(policy="prefill-first", rate=20, requests=40, prompt="8-300", output="8-64")

    def create_world(log: DecisionLog) -> World:
        return base.create_world(*base.create_engine(), log)

    assert log_of(create_world, fast_forward=False) == log_of(create_world, fast_forward=True)


@pytest.mark.parametrize(("jump_at", "jump_ns"), [(10_000_000, 5_000_000), (58_500_000, 7_000_000)])
def test_a_clock_that_an_event_advances_leaves_arrivals_meanwhile_to_the_next_step(
    jump_at: int, jump_ns: int
) -> None:
    """Leaps equal single steps: the engine steps between the jump and the arrivals it passed."""
    later = RequestArrival(jump_at + jump_ns // 2, create_request(1, 9, 9))

    def create_world(log: DecisionLog) -> World:
        model = VirtualClockModel(LengthModel(), Clock(), ConstantCost())
        engine = Engine(model, EngineConfig(num_blocks=64))
        world = World(
            engine, model, FixedArrivals((RequestArrival(0, create_request(0, 9, 60)), later)), log
        )
        world.schedule(jump_at, lambda: model.clock.advance(jump_ns))
        return world

    assert log_of(create_world, fast_forward=False) == log_of(create_world, fast_forward=True)


@pytest.mark.soak
def test_many_runs_in_leaps_are_the_runs_step_by_step() -> None:
    reached = compare(range(1000, 6000))
    assert reached["leapt"] > 100_000 and reached["preemptions"] > 100
