"""Random worlds of agents: the working set is no worse than first come, first served, and fair."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.invariants import audit
from forge.request import Delta
from forge.sim.clock import VirtualClockStep
from forge.sim.scenario import Scenario, summary
from forge.sim.workloads.workload import RequestArrival
from forge.sim.world import WorldObserver

MAX_OVERTAKEN = 256
"""Not the policy's constant, so that a change there is found."""


class Watch:
    """Observer of the most overtakings of a waiting sequence and of the longest request."""

    def __init__(self, *, audits: bool = False) -> None:
        self.most_overtaken = self.longest = 0
        self._audits = audits
        self._engine: Engine | None = None

    def observe(self, engine: Engine) -> list[WorldObserver]:
        """Return the observers of a run with this engine."""
        self._engine = engine
        return [self]

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        request = arrival.request
        self.longest = max(self.longest, len(request.prompt) + (request.params.max_tokens or 0))

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        assert self._engine is not None
        waiting = self._engine.scheduler.waiting
        self.most_overtaken = max([self.most_overtaken, *(s.num_overtaken for s in waiting)])
        if self._audits:
            audit(self._engine)


def random_scenario(seed: int) -> Scenario:
    """Return a world of 2 to 12 agents whose contexts need 0.5 to 6 times the cache."""
    rng = Random(seed)
    return Scenario(
        workload="agent",
        clients=rng.randint(2, 12),
        sessions=rng.randint(4, 24),
        turns=rng.randint(2, 8),
        system=rng.choice((1, 16, 100)),
        prompt=rng.choice(("8", "4-60", "exp:30")),
        output=rng.choice(("4", "2-30", "exp:12")),
        pause=rng.choice((0.0, 0.05, 0.5, 3.0)),
        abandon=rng.choice((0.0, 0.0, 0.1)),
        subagents=rng.choice((0.0, 0.0, 0.2)),
        hints=rng.choice(("id,end", "id", "none", "id,end,pause")),
        oversubscription=rng.uniform(0.5, 6.0),
        cost=rng.choice(("affine:6000,20,25", "affine:2000,50,400")),
        seed=seed,
        engine=EngineConfig(
            block_size=rng.choice((1, 4, 16)),
            max_num_seqs=rng.choice((2, 8, 64)),
            max_num_batched_tokens=rng.choice((64, 512)),
            max_model_len=4096,
            depth=rng.choice((1, 2)),
        ),
    )


def fitting(scenario: Scenario) -> Scenario:
    """Return the scenario with a cache in which its longest request fits."""
    wide = replace(scenario.engine, num_blocks=100_000)
    watch = Watch()
    replace(scenario, oversubscription=None, engine=wide).run(create_observers=watch.observe)
    least = -(-watch.longest // scenario.engine.block_size) + 1
    if scenario.engine.num_blocks >= least:
        return scenario
    engine = replace(scenario.engine, num_blocks=least)
    return replace(scenario, oversubscription=None, engine=engine)


def compare(seeds: range, *, audits: bool) -> tuple[float, float, int]:
    """Return the sum over worlds of the mean session time of the two policies, and overtakings."""
    ours = theirs = 0.0
    most = 0
    for seed in seeds:
        scenario = fitting(random_scenario(seed))
        fcfs = summary(scenario.run())
        watch = Watch(audits=audits)
        run = replace(scenario, policy="working-set").run(create_observers=watch.observe)
        figures = summary(run)
        assert figures["endings"] == fcfs["endings"], f"seed {seed}"
        theirs += fcfs["sessions"]["completion_ms"]["mean"] / 1000
        ours += figures["sessions"]["completion_ms"]["mean"] / 1000
        most = max(most, watch.most_overtaken)
    return ours, theirs, most


@pytest.mark.long
def test_sessions_take_no_longer_than_first_come_first_served() -> None:
    """On the whole, over worlds that fit in the cache and worlds that do not."""
    ours, theirs, most = compare(range(11), audits=True)
    assert ours <= theirs
    assert most <= MAX_OVERTAKEN


@pytest.mark.soak
def test_sessions_take_no_longer_over_ten_thousand_worlds() -> None:
    ours, theirs, most = compare(range(10_000), audits=False)
    print(
        f"mean session: {ours / 1e4:.3f} s, first come first served {theirs / 1e4:.3f} s, {most=}"
    )
    assert ours <= theirs
    assert most <= MAX_OVERTAKEN
