"""The roofline: predictions of measured steps, of uniform steps, and of other GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.bench.shapes import SHAPES as MEASURED_SHAPES
from forge.errors import InvalidConfig
from forge.seam import Row, StepPlan
from forge.sim.cost.roofline import (
    GPUS,
    MODEL_SHAPES,
    RooflineCost,
    create_roofline,
    parse_roofline,
)
from forge.sim.decision_log import DecisionLog
from forge.sim.scenario import Scenario

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def measured_figures(shape: str) -> list[dict[str, Any]]:
    """Return figures of forge on an H200, run by run."""
    found = []
    for name in (f"step-{shape}", "second", "third"):
        figures = json.loads((RESULTS / f"h200-{name}.json").read_text())["figures"]
        found += [
            cell
            for cell in figures.get("cells", [figures])
            if cell["engine"] == "forge" and cell["shape"] == shape and "step_ms_b1" in cell
        ]
    return found


def plan(*rows: Row) -> StepPlan:
    return StepPlan(0, rows, 1000, 16)


def decode(seq_id: int, past: int) -> Row:
    return Row(seq_id, 0, seq_id, past, (1,), num_samples=1)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b"])
def test_a_decode_step_on_an_h200_is_predicted_within_40_per_cent(shape: str):
    """1 and 256 rows, from which the shares of the peak were taken, are within a tenth."""
    cost = parse_roofline(f"h200,{shape}")
    runs = measured_figures(shape)
    assert len(runs) >= 2
    for figures in runs:
        for rows, tolerance in ((1, 0.1), (8, 0.4), (64, 0.2), (256, 0.1)):
            told_ms = cost.decode_ns(rows, rows * 512, 512) / 1e6
            assert told_ms == pytest.approx(figures[f"step_ms_b{rows}"], rel=tolerance)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b"])
def test_a_long_prompt_on_an_h200_is_predicted_within_25_per_cent(shape: str):
    """8000 tokens; shorter prompts are bound by the host that launches them, not by the GPU."""
    cost = parse_roofline(f"h200,{shape}")
    told_ms = cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * 8000, num_samples=1))) / 1e6
    for figures in measured_figures(shape):
        assert told_ms == pytest.approx(figures["ttft_8000_ms"], rel=0.25)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "llama-3.1-8b"])
def test_a_shape_is_that_of_the_benchmarks(name: str):
    config, shape = MEASURED_SHAPES[name], MODEL_SHAPES[name]
    assert shape == (
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["tie_word_embeddings"],
    )


def test_a_shape_weighs_what_its_name_says():
    """Weights of norms are not counted."""
    billions = {name: shape.weight_bytes / 2e9 for name, shape in MODEL_SHAPES.items()}
    assert billions["qwen3-0.6b"] == pytest.approx(0.596, rel=0.01)
    assert billions["qwen3-4b"] == pytest.approx(4.02, rel=0.01)
    assert billions["llama-3.1-8b"] == pytest.approx(8.03, rel=0.01)
    assert billions["llama-3.1-70b"] == pytest.approx(70.6, rel=0.01)
    assert MODEL_SHAPES["qwen3-4b"].kv_bytes_per_token == 147_456


@pytest.mark.parametrize("name", ["h200,qwen3-4b", "l4,llama-3.2-1b", "rtx-4090,mistral-7b"])
def test_a_uniform_step_takes_the_time_of_its_plan(name: str):
    cost = parse_roofline(name)
    for pasts in ((0,), (1, 1, 1), (5000, 3, 17), tuple(range(40, 4000, 31))):
        rows = [decode(i, past) for i, past in enumerate(pasts)]
        assert cost.step_ns(plan(*rows)) == cost.decode_ns(len(pasts), sum(pasts), max(pasts))


def test_more_of_anything_never_takes_less():
    cost = parse_roofline("h100,qwen3-8b")
    first = cost.decode_ns(8, 800, 100)
    assert first <= cost.decode_ns(9, 800, 100)
    assert first < cost.decode_ns(8, 8000, 1000)
    chunk = cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * 600)))
    assert chunk < cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * 601)))
    assert chunk < cost.step_ns(plan(Row(0, 0, 0, 900, (1,) * 600)))
    assert chunk < cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * 600), decode(1, 900)))
    assert chunk < cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * 600, num_samples=1)))


def test_a_few_rows_wait_for_the_weights_and_a_long_prompt_for_the_arithmetic():
    """16 rows take hardly longer than one; twice the tokens of a prompt take twice as long."""
    cost = parse_roofline("a100-80,llama-3.1-8b")
    assert cost.decode_ns(16, 16, 1) < 1.01 * cost.decode_ns(1, 1, 1)
    one, two = (cost.step_ns(plan(Row(0, 0, 0, 0, (1,) * n))) for n in (4096, 8192))
    assert 1.9 < two / one < 2.3


def test_drafts_are_computed_and_sampled_like_other_tokens():
    cost = parse_roofline("h200,qwen3-4b")
    row = Row(0, 0, 0, 100, (1,), num_samples=4, drafts=(1, 2, 3))
    rows = [row._replace(seq_id=i, slot=i) for i in range(200)]
    without = [decode(i, 100) for i in range(200)]
    assert cost.step_ns(plan(*rows)) > 2 * cost.step_ns(plan(*without))


def test_a_gpu_with_more_bandwidth_is_sooner_done():
    """The speedup is at most the ratio of the bandwidths."""
    shape = MODEL_SHAPES["qwen3-4b"]
    steps = {name: create_roofline(gpu, shape).decode_ns(4, 400, 100) for name, gpu in GPUS.items()}
    ordered = sorted(steps, key=lambda name: steps[name])
    assert ordered == sorted(GPUS, key=lambda name: -GPUS[name].bytes_per_s)
    assert steps["h100"] / steps["h200"] < GPUS["h200"].bytes_per_s / GPUS["h100"].bytes_per_s


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("h2000,qwen3-4b", "h2000"),
        ("h200,qwen3-5b", "qwen3-5b"),
        ("h200", "names '', which"),
        ("rtx-4090,llama-3.1-70b", "takes 141 GB, rtx-4090 has 24"),
    ],
)
def test_a_name_that_is_not_known_or_does_not_fit_is_refused(name: str, named: str):
    with pytest.raises(InvalidConfig, match=named):
        parse_roofline(name)


def test_a_scenario_runs_on_a_gpu_by_its_name():
    """Fast-forward and single steps write one log, and gaps of tokens are the times of steps."""
    scenario = Scenario(cost="roofline:h200,qwen3-4b", requests=20, rate=100.0)
    texts: list[list[str]] = []
    for watched in ((), (NullObserver(),)):
        lines: list[str] = []
        log = DecisionLog(lines.append, scenario.header())
        world = scenario.run(log, lambda engine, watched=watched: watched)
        log.close()
        texts.append(lines)
    assert texts[0] == texts[1]
    assert 2.3 < world.metrics.summary()["itl_ms"]["p50"] < 4.0
    slower = replace(scenario, cost="roofline:l4,qwen3-4b").run()
    assert slower.metrics.summary()["itl_ms"]["p50"] > 20


class NullObserver:
    """An observer that does nothing, so that no step is fast-forwarded."""

    def on_arrival(self, arrival: object, now_ns: int, refusal: str | None) -> None:
        pass

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        pass

    def on_step(self, step: object, deltas: object, now_ns: int) -> None:
        pass


def test_every_model_has_a_gpu_that_holds_it():
    for name in MODEL_SHAPES:
        assert isinstance(parse_roofline(f"b200,{name}"), RooflineCost)
