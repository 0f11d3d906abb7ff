"""The simulator's speed: what is counted is what the run was, and both ways have the same log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import simulation
from bench.simulation import Case, timed, world_of
from sim.log import Log


class Here:
    """Processes that are this one."""

    def __init__(self, *args: object, **options: object) -> None:
        self.Pool = Here

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *args: object) -> None: ...

    def apply(self, call: Any, args: tuple[Case, str]) -> Any:
        return call(*args)


CASE = Case("sample", rate=4.0, requests=12, caching=True)


def test_both_ways_have_the_log_of_the_run_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation.multiprocessing, "get_context", Here)
    path = tmp_path / "speed.json"
    words = ["--rates", "4", "--requests", "12", "--repeats", "2", "--json", str(path)]
    assert simulation.main(words) == 0
    told: dict[str, Any] = json.loads(path.read_text())
    cached, plain = told["figures"]["runs"]
    log = Log(lambda text: None, {})
    world = world_of(CASE, log)
    world.run()
    assert told["benchmark"] == "simulation" and told["figures"]["requests"] == 12
    assert cached["prefix_caching"] and not plain["prefix_caching"]
    assert cached["log"] == log.close()
    for run in (cached, plain):
        assert run["rate"] == 4.0
        assert run["steps_per_request"] == world.num_steps / 12
        assert run["concurrency"] == world.measures.holding_ns / world.measures.end_ns
        speeds = [run[way]["requests_per_cpu_minute"] for way in simulation.WAYS]
        assert run["speedup"] == speeds[1] / speeds[0] > 0
        for way in simulation.WAYS:
            assert run[way]["growth_mib"] >= 0
            assert all(name.startswith(("forge/", "sim/")) for name in run[way]["shares"])
            assert sum(run[way]["shares"].values()) <= 1 + 1e-9
        assert run["leaps"]["growth_mib_4_times_the_requests"] >= 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["rate", "cache", "concurrency", "steps", "stepwise", "leaps"]
    assert [row.split()[:2] for row in rows] == [["4", "on"], ["4", "off"]]


def test_leaps_that_come_to_something_else_give_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(case: Case, way: str) -> dict[str, Any]:
        return timed(case._replace(requests=case.requests - (way == "leaps")), way)

    monkeypatch.setattr(simulation, "timed", less)
    monkeypatch.setattr(simulation.multiprocessing, "get_context", Here)
    with pytest.raises(AssertionError, match="leaps differ"):
        simulation.figures_of(CASE, repeats=1)


def test_what_is_no_workload_is_refused_by_the_process_that_was_to_run_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulation.main(["--workload", "none.csv", "--repeats", "1"]) == 1
    assert "'none.csv' is no workload" in capsys.readouterr().err
