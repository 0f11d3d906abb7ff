"""Simulator speed: the figures are those of the run, and both modes write the same log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.bench import simulator_speed
from forge.bench.simulator_speed import SpeedCase, build_world, measure_run
from forge.sim.decision_log import DecisionLog


class InlineContext:
    """A multiprocessing context that runs everything in this process."""

    def __init__(self, *args: object, **options: object) -> None:
        self.Pool = InlineContext

    def __enter__(self) -> InlineContext:
        return self

    def __exit__(self, *args: object) -> None: ...

    def apply(self, call: Any, args: tuple[SpeedCase, str]) -> Any:
        return call(*args)


CASE = SpeedCase("sample", rate=4.0, requests=12, caching=True)


def test_both_modes_have_the_log_of_the_run_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator_speed.multiprocessing, "get_context", InlineContext)
    path = tmp_path / "speed.json"
    words = ["--rates", "4", "--requests", "12", "--repeats", "2", "--json", str(path)]
    assert simulator_speed.main(words) == 0
    record: dict[str, Any] = json.loads(path.read_text())
    cached, plain = record["figures"]["runs"]
    log = DecisionLog(lambda text: None, {})
    world = build_world(CASE, log)
    world.run()
    assert record["benchmark"] == "simulation" and record["figures"]["requests"] == 12
    assert cached["prefix_caching"] and not plain["prefix_caching"]
    assert cached["log"] == log.close()
    for run in (cached, plain):
        assert run["rate"] == 4.0
        assert run["steps_per_request"] == world.num_steps / 12
        assert run["concurrency"] == world.metrics.in_system_ns / world.metrics.end_ns
        speeds = [run[way]["requests_per_cpu_minute"] for way in simulator_speed.MODES]
        assert run["speedup"] == speeds[1] / speeds[0] > 0
        for way in simulator_speed.MODES:
            assert run[way]["growth_mib"] >= 0
            assert all(name.startswith(("forge/", "sim/")) for name in run[way]["shares"])
            assert sum(run[way]["shares"].values()) <= 1 + 1e-9
        assert run["leaps"]["growth_mib_4_times_the_requests"] >= 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["rate", "cache", "concurrency", "steps", "stepwise", "leaps"]
    assert [row.split()[:2] for row in rows] == [["4", "on"], ["4", "off"]]


def test_modes_with_different_results_give_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(case: SpeedCase, mode: str) -> dict[str, Any]:
        return measure_run(case._replace(requests=case.requests - (mode == "leaps")), mode)

    monkeypatch.setattr(simulator_speed, "measure_run", less)
    monkeypatch.setattr(simulator_speed.multiprocessing, "get_context", InlineContext)
    with pytest.raises(AssertionError, match="modes differ"):
        simulator_speed.measure_case(CASE, repeats=1)


def test_an_unknown_workload_is_refused_by_the_worker_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulator_speed.main(["--workload", "none.csv", "--repeats", "1"]) == 1
    assert "'none.csv' is no workload" in capsys.readouterr().err
