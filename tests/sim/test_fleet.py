"""Fleet: replicas of the real engine and a router, on one time line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.main import main
from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.request import Delta, Request
from forge.routing.replica_table import Decision, DecisionFeed, ReplicaTable
from forge.routing.router import LeastLoaded, RoundRobin, Router
from forge.sim.clock import VirtualClockStep
from forge.sim.fleet import NO_EVENTS, Fleet, ReplicaEvent, ReplicaEvents
from forge.sim.fleet_log import FleetLog
from forge.sim.fleet_scenario import FleetScenario, fleet_summary, parse_replica_events
from forge.sim.scenario import Scenario
from forge.sim.workloads.workload import FixedArrivals, RequestArrival, create_request

MS, S = 1_000_000, 1_000_000_000
LEAST_LOADED = LeastLoaded()

SMALL = EngineConfig(num_blocks=160, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)
AGENTS = Scenario(
    workload="agent", clients=6, requests=40, turns=5, prompt="40-90", output="10-30",
    system=64, pause=0.2, engine=SMALL,
)  # fmt: skip
POISSON = Scenario(rate=30, requests=40, prompt="16-300", output="4-40", engine=SMALL)


class Record:
    """A FleetObserver that keeps what happens. It also watches a World of one engine.

    routes   (request, time, replica) of each decision; None: it waits
    steps    (time, plan) of each step, by replica
    ends     (request, why, time) of each choice
    started    requests of which something was delivered
    """

    def __init__(self) -> None:
        self.routes: list[tuple[int, int, int | None]] = []
        self.steps: dict[int, list[tuple[int, str]]] = {}
        self.ends: list[tuple[int, str, int]] = []
        self.started: set[int] = set()
        self.started_at_death: set[int] = set()
        self.refusals: list[str] = []

    def on_route(
        self, request: Request, now_ns: int, decision: Decision | None, why: str | None
    ) -> None:
        replica = None if decision is None else decision.replica_id
        self.routes.append((request.id, now_ns, replica))
        self.refusals += [] if why is None else [why]

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Do nothing: a World has one replica."""

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Do nothing: the engine ends the request."""

    def on_step(self, *args: object) -> None:
        """Keep a step of a replica, or of the one engine of a World."""
        *replicas, step, deltas, now_ns = args
        assert isinstance(now_ns, int) and isinstance(deltas, list)
        if isinstance(step, VirtualClockStep):
            (replica,) = replicas or (0,)
            assert isinstance(replica, int)
            self.steps.setdefault(replica, []).append((now_ns, repr(step.plan)))
        for delta in deltas:
            assert isinstance(delta, Delta)
            self.started.add(delta.request_id)
            if delta.finish is not None:
                self.ends.append((delta.request_id, delta.finish.value, now_ns))

    def on_start(self, replica_id: int, now_ns: int) -> None:
        """Do nothing."""

    def on_death(self, replica_id: int, now_ns: int) -> None:
        self.started_at_death = set(self.started)

    def on_failure(self, request_id: int, now_ns: int, why: str) -> None:
        self.ends.append((request_id, why, now_ns))


def run_fixed(
    arrivals: Iterable[tuple[int, int, int]],
    num_replicas: int,
    events: ReplicaEvents = NO_EVENTS,
    router: Router = LEAST_LOADED,
    disconnects: dict[int, int] | None = None,
) -> tuple[Fleet, Record]:
    """Run requests (time, prompt tokens, output tokens) on replicas with steps of 1 ms."""
    scenario = Scenario(cost="unit", engine=SMALL)
    leaving = disconnects or {}
    workload = FixedArrivals(
        tuple(
            RequestArrival(at_ns, create_request(index, prompt, output), leaving.get(index))
            for index, (at_ns, prompt, output) in enumerate(arrivals)
        )
    )
    table, record = ReplicaTable(router, DecisionFeed()), Record()
    fleet = Fleet(
        lambda sink: scenario.create_engine(),
        num_replicas, table, workload, record, replica_events=events,
    )  # fmt: skip
    fleet.run()
    return fleet, record


@pytest.mark.parametrize("scenario", [AGENTS, POISSON], ids=["agents", "poisson"])
@pytest.mark.parametrize("router", ["round-robin", "prefix-aware", "session-sticky"])
def test_a_fleet_of_one_replica_makes_the_plans_of_a_world_at_the_same_times(
    scenario: Scenario, router: str
) -> None:
    """The plans are equal in every field, and so are all figures of the clients."""
    alone, together = Record(), Record()
    world = scenario.create_world(*scenario.create_engine(), alone)
    world.run()
    fleet = FleetScenario(base=scenario, num_replicas=1, router=router).run(together)
    assert together.steps == alone.steps
    assert together.ends == alone.ends
    assert fleet.metrics.summary() == world.metrics.summary()


def write_log(scenario: FleetScenario) -> str:
    text: list[str] = []
    log = FleetLog(text.append, scenario.header())
    scenario.run(log)
    log.close()
    return "".join(text)


def test_equal_scenarios_write_equal_logs_and_another_seed_another() -> None:
    events = ReplicaEvents((ReplicaEvent(S, 1),), (ReplicaEvent(2 * S, 1),))
    fleet = FleetScenario(base=AGENTS, num_replicas=3, router="least-work", replica_events=events)
    log = write_log(fleet)
    assert write_log(fleet) == log
    assert write_log(replace(fleet, base=replace(AGENTS, seed=1))) != log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line for line in lines if "death" in line] == [{"at": S, "death": 1}]
    starts = [line["start"] for line in lines if "start" in line]
    assert starts == [0, 1, 2, 1]
    assert Counter(line["replica"] for line in lines if "route" in line).keys() == {0, 1, 2}


@pytest.mark.long
def test_a_log_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    options = "--replicas 3 --routers prefix-aware --requests 20 --num-blocks 160 --deaths 0@0.5"
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.jsonl"
        subprocess.run(
            [sys.executable, "-m", "forge", "sim", "fleet", *options.split(), "--log", path],
            env={**os.environ, "PYTHONHASHSEED": seed}, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_the_router_sees_the_end_of_a_request_when_its_step_has_ended() -> None:
    """Steps take 1 ms. Request 1 ends on replica 1 at 3.2 ms, after three steps.

    So at 3.1 ms each replica has a request, and the fifth decision takes the first one in turn.
    """
    times_us = (0, 200, 300, 2500, 3100)
    outputs = (1, 3, 1, 9, 1)
    arrivals = [(1000 * at, 20, output) for at, output in zip(times_us, outputs, strict=True)]
    _, record = run_fixed(arrivals, 2)
    assert [replica for _, _, replica in record.routes] == [0, 1, 0, 0, 0]
    assert (1, "length", 3_200_000) in record.ends


def test_replicas_work_at_the_same_time() -> None:
    """Two requests of five steps of 1 ms each end at 5 ms on two replicas."""
    _, record = run_fixed([(0, 20, 5), (0, 20, 5)], 2)
    assert record.ends == [(0, "length", 5 * MS), (1, "length", 5 * MS)]


def test_requests_of_a_replica_that_dies_move_or_fail_and_none_is_lost() -> None:
    """At 20.5 ms requests of replica 0 run, and others wait there: eight run at a time."""
    arrivals = [(n * MS, 100, 30) for n in range(40)]
    events = ReplicaEvents((ReplicaEvent(20 * MS + MS // 2, 0),))
    fleet, record = run_fixed(arrivals, 2, events, RoundRobin())
    ends = {request_id: why for request_id, why, _ in record.ends}
    assert len(record.ends) == len(ends) == 40
    failed = {i for i, why in ends.items() if why == "replica_died"}
    first = {i: replica for i, _, replica in reversed(record.routes)}
    at_death = {i for i in range(21) if first[i] == 0}
    assert failed == at_death & record.started_at_death
    moved = at_death - failed
    assert moved and failed
    assert fleet.num_moved == len(moved) == len(record.routes) - 40
    assert all(ends[i] == "length" for i in range(40) if i not in failed)
    assert all(replica == 1 for _, now_ns, replica in record.routes if now_ns > 21 * MS)
    assert not fleet.metrics.num_in_system


def test_a_moved_request_counts_its_latency_from_its_arrival() -> None:
    """A step takes 1 ms. The replica dies within the first, and the other one begins then."""
    events = ReplicaEvents((ReplicaEvent(MS // 2, 0),))
    fleet, record = run_fixed([(0, 20, 1)], 2, events)
    assert record.routes == [(0, 0, 0), (0, MS // 2, 1)]
    assert fleet.metrics.summary()["ttft_ms"]["max"] == 1.5


def test_without_a_replica_requests_wait_for_one_to_start() -> None:
    """The only replica starts at 5 ms; the request of a client that left does not run."""
    events = ReplicaEvents(starts=(ReplicaEvent(5 * MS, 0),))
    fleet, record = run_fixed([(0, 20, 1), (MS, 20, 1)], 1, events, disconnects={1: 2 * MS})
    assert record.routes == [(0, 0, None), (1, MS, None), (0, 5 * MS, 0)]
    assert record.ends == [(0, "length", 6 * MS)]
    assert fleet.metrics.summary()["endings"] == {"abort": 1, "length": 1}


def test_requests_that_no_replica_takes_until_the_end_fail() -> None:
    events = ReplicaEvents(deaths=(ReplicaEvent(MS // 2, 0),))
    fleet, record = run_fixed([(0, 20, 1), (MS, 20, 1)], 1, events)
    assert [(i, why) for i, why, _ in record.ends] == [(0, "no_replica"), (1, "no_replica")]
    assert fleet_summary(fleet)["failed"] == 2


def test_a_slow_start_gets_requests_from_its_start_on() -> None:
    events = ReplicaEvents(starts=(ReplicaEvent(10 * MS, 1),))
    _, record = run_fixed([(n * MS, 20, 4) for n in range(20)], 2, events)
    by_replica = {r: [i for i, _, replica in record.routes if replica == r] for r in (0, 1)}
    assert min(by_replica[1]) == 10
    assert len(by_replica[1]) >= 5


def test_a_replica_that_starts_again_has_an_empty_cache() -> None:
    """The same prompt four times: found the second time, and not after the restart."""
    arrivals = [(0, 64, 1), (5 * MS, 64, 1), (15 * MS, 64, 1)]
    events = ReplicaEvents((ReplicaEvent(10 * MS, 0),), (ReplicaEvent(12 * MS, 0),))
    scenario = Scenario(cost="unit", engine=SMALL)
    shared = create_request(0, 64, 1)
    workload = FixedArrivals(
        tuple(RequestArrival(at, replace(shared, id=i)) for i, (at, _, _) in enumerate(arrivals))
    )
    fleet = Fleet(
        lambda sink: scenario.create_engine(),
        1, ReplicaTable(RoundRobin(), DecisionFeed()), workload, replica_events=events,
    )  # fmt: skip
    fleet.run()
    assert [each["shared_tokens"] for each in fleet_summary(fleet)["replicas"]] == [48, 0]


def test_a_client_that_leaves_ends_its_request_also_where_its_replica_dies_then() -> None:
    """Request 0 is aborted within a step; request 1 leaves, and its replica dies in that step."""
    died = ReplicaEvents((ReplicaEvent(3 * MS + MS // 2, 1),))
    leaving = {0: MS // 4, 1: 3 * MS + MS // 4, 2: 90 * MS}
    arrivals = [(0, 20, 30), (0, 20, 30), (0, 20, 2)]
    fleet, record = run_fixed(arrivals, 3, died, RoundRobin(), leaving)
    assert sorted((i, why) for i, why, _ in record.ends) == [
        (0, "abort"), (1, "replica_died"), (2, "length"),
    ]  # fmt: skip
    assert fleet.num_moved == 0


def test_a_request_that_never_fits_is_refused_and_holds_no_place() -> None:
    fleet, record = run_fixed([(0, 20, 4), (0, 9000, 4), (0, 20, 4)], 2)
    figures = fleet_summary(fleet)
    assert figures["endings"] == {"length": 2, "refused": 1}
    assert figures["last_refusal"] == record.refusals[0]
    assert [fleet.table.load(replica).num_requests for replica in (0, 1)] == [0, 0]


@pytest.mark.parametrize("feed", ["events", "decisions"])
def test_prefix_aware_routing_finds_more_than_round_robin(feed: str) -> None:
    """Sessions of agents on four replicas, whose caches have all blocks."""
    base = replace(AGENTS, engine=replace(SMALL, num_blocks=600))
    shares = {}
    for router in ("round-robin", "prefix-aware"):
        fleet = FleetScenario(base=base, num_replicas=4, router=router, feed=feed).run()
        figures = fleet_summary(fleet)
        assert figures["endings"] == {"length": 40}
        shares[router] = figures["shared_tokens"] / figures["prompt_tokens"]
    assert shares["prefix-aware"] > 1.2 * shares["round-robin"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("1", "'1' is not REPLICA@SECONDS"), ("1@", "REPLICA@SECONDS"), ("a@1", "REPLICA@SECONDS")],
)
def test_a_malformed_event_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        parse_replica_events("deaths", text)


def test_events_are_parsed_to_nanoseconds() -> None:
    assert parse_replica_events("deaths", "1@30,2@0.5") == (
        ReplicaEvent(30 * S, 1), ReplicaEvent(S // 2, 2),
    )  # fmt: skip
    assert parse_replica_events("deaths", None) == ()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--routers nearest", "'nearest' is not known"),
        ("--replicas 0", "0 is not from 1 to 256"),
        ("--feed rumours", "'rumours' is not known"),
        ("--deaths 4@1", "replica 4 is not one of 0 to 3"),
        ("--deaths 1@1,1@2", "replica 1 dies and is not there at 2 s"),
        ("--starts 1@1 --deaths 1@2,1@3 --replicas 2", "replica 1 dies and is not there at 3 s"),
        ("--deaths 1@1 --starts 1@2,1@3", "replica 1 starts and is there already at 3 s"),
        ("--replicas 2,4 --log fleet.jsonl", "a log has one run"),
        ("--seeds 0", "0 is not a positive integer"),
        ("--workload agent --model hash", "answers of lengths only"),
    ],
)
def test_options_that_make_no_fleet_are_refused(
    options: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "fleet", *options.split()]) == 2
    assert problem in capsys.readouterr().err


def test_one_run_prints_a_report_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.json"
    options = "--replicas 3 --requests 30 --num-blocks 160 --deaths 1@0.5 --starts 1@1 --seed 3"
    assert main(["sim", "fleet", *options.split(), "--json", str(path)]) == 0
    text = capsys.readouterr().out
    figures = json.loads(path.read_text())["outcomes"][0]["figures"]
    assert "fleet       3 replicas of 160 blocks, router prefix-aware, fed by events" in text
    assert f"moved       {figures['moved']} requests, {figures['failed']} failed" in text
    assert [each["id"] for each in figures["replicas"]] == [0, 1, 2, 1]
    assert sum(figures["endings"].values()) == 30


@pytest.mark.long
def test_several_runs_print_a_table_with_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.json"
    options = "--replicas 2,3 --routers round-robin,least-work --blocks 160,200 --requests 12"
    command = ["sim", "fleet", *options.split(), "--seeds", "2", "--json", str(path)]
    assert main(command) == 0
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["replicas", "router", "blocks", "shared"]
    assert [row.split()[:3] for row in rows] == [
        [n, router, blocks]
        for n in ("2", "3")
        for router in ("round-robin", "least-work")
        for blocks in ("160", "200")
    ]
    assert all(row.count("±") == 10 for row in rows)
    assert len(json.loads(path.read_text())["outcomes"]) == 16
