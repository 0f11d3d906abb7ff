"""The search for the highest rate, and the number of blocks that fit on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from forge.cli.main import main
from forge.config import EngineConfig
from forge.sim.capacity import (
    MAX_RATE,
    MIN_RATE,
    MIN_TRAFFIC_S,
    RESOLUTION,
    find_capacity,
    search_rate,
)
from forge.sim.cost.roofline import GPUS, MODEL_SHAPES, num_blocks_that_fit
from forge.sim.reports.text_report import ROOFLINE_ORIGIN
from forge.sim.scenario import Scenario, summary

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"

ONE_AT_A_TIME = Scenario(
    requests=40,
    prompt="1",
    output="4",
    cost="unit",
    slo_ttft_ms=20.0,
    engine=EngineConfig(max_num_seqs=1),
)
"""Each request takes four steps of a millisecond, so 250 a second are too many in the long run."""


@pytest.mark.parametrize("limit", [0.02, 3.0, 9.99, 10.0, 10.01, 700.0])
def test_the_search_ends_with_two_rates_around_the_limit(limit: float):
    tried: list[float] = []

    def is_met(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    met, missed = search_rate(is_met, first=10.0)
    assert met is not None and missed is not None
    assert met <= limit < missed <= RESOLUTION * met
    assert tried[0] == 10.0 and {met, missed} <= set(tried)
    assert len(tried) < 20 and len(set(tried)) == len(tried)


@pytest.mark.parametrize("first", [MIN_RATE, 10.0, MAX_RATE])
def test_a_search_without_a_limit_ends_at_its_bounds(first: float):
    met, missed = search_rate(lambda rate: True, first)
    assert missed is None and met is not None and MAX_RATE / 2 < met <= MAX_RATE
    met, missed = search_rate(lambda rate: False, first)
    assert met is None and missed is not None and MIN_RATE <= missed < 2 * MIN_RATE


def test_enough_requests_are_good_at_the_capacity_and_too_few_above_it():
    with redirect_stdout(StringIO()) as output:
        record = find_capacity(ONE_AT_A_TIME, good_share=0.9)
    met, missed = record["capacity"]["met"], record["capacity"]["missed"]
    assert 200 < met < missed < 600
    for rate, is_enough in ((met, True), (missed, False)):
        figures = summary(replace(ONE_AT_A_TIME, rate=rate).run())
        assert (figures["good"] >= 36) is is_enough
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("poisson, rate 10, requests 40") and lines[0].endswith("1024 blocks")
    offered = record["capacity"]["offered"]
    assert offered == summary(replace(ONE_AT_A_TIME, rate=met).run())["offered_per_s"]
    assert lines[-1] == (
        f"capacity    {met:g} requests a second, {offered:.2f} offered: "
        "at least 90 % of requests are good"
    )
    assert lines[-2] == (
        f"too short   40 requests came within {40 / offered:.1f} s, and a queue takes about a "
        "minute to grow. Give more --requests"
    )
    assert len(lines) == 4 + len(record["outcomes"])


def test_enough_traffic_for_a_queue_to_grow_is_not_called_too_short():
    """Requests of 16 steps of 0.1 s each: 40 of them, one at a time, take a minute."""
    limits = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 1000.0}
    slow = replace(ONE_AT_A_TIME, cost="affine:100000,0,0", rate=1.0, output="16", **limits)
    with redirect_stdout(StringIO()) as output:
        record = find_capacity(slow, good_share=0.9)
    assert 40 / record["capacity"]["offered"] > MIN_TRAFFIC_S
    assert "too short" not in output.getvalue()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"slo_ttft_ms": 0.5}, "capacity    none: at no rate, down to 0.0012207 requests a second"),
        ({"slo_ttft_ms": 1e6}, "capacity    81920 requests a second or more, "),
    ],
)
def test_objectives_that_no_rate_or_every_rate_meets_are_named(limits: Any, text: str):
    with redirect_stdout(StringIO()) as output:
        find_capacity(replace(ONE_AT_A_TIME, requests=2, **limits), good_share=0.9)
    assert output.getvalue().splitlines()[-1].startswith(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("capacity --workload closed", "capacity: --workload: closed has no rate of requests"),
        ("capacity --rate 2e5", "capacity: --rate: 200000 is not from 0.001 to 100000"),
        ("capacity --good-share 0", "capacity: --good-share: 0 is not a share"),
        ("capacity --good-share 1.5", "capacity: --good-share: 1.5 is not a share"),
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization: the cost 'affine:6000,20,25' "),
        ("{fit} 0", "--gpu-memory-utilization: 0 is not a share of the memory"),
        ("{fit} 1.1", "--gpu-memory-utilization: 1.1 is not a share of the memory"),
        ("{fit} 0.4", "--gpu-memory-utilization: 9.6 GB have no room for a block next to 8.0 GB"),
        ("{fit} 0.9 --num-blocks 9", "--gpu-memory-utilization: it sets the number of blocks, and"),
        ("sweep {fit} 0.9 --blocks 9", "sweep: --gpu-memory-utilization: it sets the number of b"),
        ("{fit} 0.9 --workload agent --oversubscription 2", "--oversubscription: it sets the nu"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, text: str
):
    words = words.format(fit="--cost roofline:rtx-4090,qwen3-4b --gpu-memory-utilization")
    assert main(["sim", *words.split()]) == 2
    assert capsys.readouterr().err.replace("sim: --", "sim --").startswith(f"forge sim {text}")


@pytest.mark.parametrize("command", ["sim", "sim sweep --budgets 512", "sim capacity"])
def test_costs_of_a_roofline_are_called_an_estimate(
    capsys: pytest.CaptureFixture[str], command: str
):
    words = "--requests 1 --prompt 8 --output 2 --slo-ttft-ms 1e9 --cost".split()
    assert main([*command.split(), *words, "roofline:l4,qwen3-0.6b"]) == 0
    assert f"costs       {ROOFLINE_ORIGIN}\n" in capsys.readouterr().out
    assert main([*command.split(), *words, "unit"]) == 0
    assert "costs" not in capsys.readouterr().out


@pytest.fixture
def run_sim(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs `forge sim` and returns what it writes with --json."""

    def run(*words: str) -> Any:
        file = tmp_path / "run.json"
        assert main(["sim", *words, "--json", str(file)]) == 0
        return json.loads(file.read_text(encoding="utf-8"))

    return run


def test_the_share_of_the_memory_sets_the_blocks(run_sim: Callable[..., Any]):
    words = "--requests 1 --cost roofline:rtx-4090,qwen3-4b --gpu-memory-utilization 0.9".split()
    expected = num_blocks_that_fit(GPUS["rtx-4090"], MODEL_SHAPES["qwen3-4b"], 0.9, 32)
    assert expected == (21_600_000_000 - 8_044_544_000 - 5 * 2**29) // (32 * 147_456)
    assert run_sim(*words, "--block-size", "32")["header"]["engine"]["num_blocks"] == expected
    agents = ["--workload", "agent", "--profile", "chat", "--no-baselines", "--sessions", "1"]
    header = run_sim(*words, *agents, "--block-size", "32")["header"]
    assert header["engine"]["num_blocks"] == expected
    assert header["options"]["oversubscription"] is None


@pytest.mark.parametrize(
    ("file", "shape"),
    [("4b", "qwen3-4b"), ("8b", "llama-3.1-8b"), ("32b", "qwen3-32b")],
)
def test_blocks_that_fit_are_up_to_8_per_cent_fewer_than_a_server_had(file: str, shape: str):
    """The records have 0.85 of the memory and blocks of 64. Larger models are further off."""
    record = json.loads((RESULTS / f"h200-ranks-{file}.json").read_text(encoding="utf-8"))
    measured = record["figures"]["ranks1"]["num_blocks"]
    predicted = num_blocks_that_fit(GPUS["h200"], MODEL_SHAPES[shape], 0.85, 64)
    assert 0.915 < predicted / measured < 0.96
