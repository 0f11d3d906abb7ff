"""A tenant that opens thousands of sessions and never continues them, alongside one with agents."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import fmean

import pytest

from forge.config import EngineConfig
from forge.request import Delta, Request, SamplingParams
from forge.sim.clock import VirtualClockStep
from forge.sim.scenario import Scenario
from forge.sim.workloads.workload import RequestArrival, Workload
from forge.sim.world import World

FIRST_HOSTILE_ID = 10**9

SCENARIO = Scenario(
    workload="agent",
    clients=12,
    sessions=24,
    turns=10,
    system=500,
    prompt="exp:300",
    output="exp:60",
    pause=1.0,
    cost="roofline:h200,qwen3-4b",
    oversubscription=2.0,
    seed=3,
    engine=EngineConfig(
        max_num_seqs=32, max_model_len=20_000, depth=2, max_num_batched_tokens=8192
    ),
)


class WithHostileTenant:
    """The workload, and `count` sessions of another tenant in the first `seconds`.

    Each has one short turn, a foreign name every other time, and expects a pause of a day.
    """

    def __init__(self, workload: Workload, count: int, seconds: float) -> None:
        self._workload = workload
        self._count = count
        self._gap_ns = round(1e9 * seconds / max(1, count))

    def arrivals(self) -> Iterator[RequestArrival]:
        hostile = (self._hostile(n) for n in range(self._count))
        return heapq.merge(self._workload.arrivals(), hostile, key=lambda arrival: arrival.at_ns)

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        if request_id >= FIRST_HOSTILE_ID:
            return ()
        return self._workload.follow_up_arrivals(request_id, now_ns)

    def _hostile(self, n: int) -> RequestArrival:
        request = Request(
            FIRST_HOSTILE_ID + n,
            range(2 + 40 * n, 2 + 40 * n + 20),
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            tenant="hostile",
            session_id=str(n // 2) if n % 2 else f"own {n}",
            expected_pause_s=86_400.0,
        )
        return RequestArrival(n * self._gap_ns, request)


class Latencies:
    """Observer of the seconds that requests of the agents take, by id."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._arrivals_ns: dict[int, int] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        assert refusal is None
        if arrival.request.id < FIRST_HOSTILE_ID:
            self._arrivals_ns[arrival.request.id] = arrival.at_ns

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            arrived_ns = self._arrivals_ns.get(delta.request_id)
            if delta.finish is not None and arrived_ns is not None:
                self.seconds[delta.request_id] = (now_ns - arrived_ns) / 1e9


def mean_latency_s(policy: str, num_hostile: int, seconds: float) -> tuple[float, int]:
    """Return the agents' mean latency, and the most sessions that the other tenant had open."""
    scenario = replace(SCENARIO, policy=policy)
    engine, model = scenario.create_engine()
    workload, _ = scenario.create_workload()
    latencies = Latencies()
    world = World(engine, model, WithHostileTenant(workload, num_hostile, seconds), latencies)
    most = 0
    while world.step():
        if world.num_steps % 64 == 0:
            most = max(most, sum(tenant == "hostile" for tenant, _ in engine.scheduler.sessions))
    assert len(latencies.seconds) == 240
    return fmean(latencies.seconds.values()), most


@pytest.mark.long
@pytest.mark.parametrize("policy", ["fcfs", "working-set"])
@pytest.mark.parametrize(
    ("num_hostile", "seconds"), [(300, 4.0), pytest.param(10_000, 100.0, marks=pytest.mark.soak)]
)
def test_sessions_of_another_tenant_cost_agents_little(
    policy: str, num_hostile: int, seconds: float
) -> None:
    """Within 5 %, all costs of the other tenant's requests included."""
    alone, _ = mean_latency_s(policy, 0, seconds)
    together, most = mean_latency_s(policy, num_hostile, seconds)
    print(f"{policy}: {alone:.3f} s alone, {together:.3f} s with up to {most} other sessions")
    assert most >= min(num_hostile, 1024) // 2
    assert together <= 1.05 * alone
