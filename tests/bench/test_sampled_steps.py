"""The benchmark of sampled steps on the deterministic model: its settings, ratios and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge import LLM
from forge.bench import sampled_steps
from forge.bench.engine_driver import EngineDriver
from forge.bench.workload import Cells, SteadyCell
from forge.request import SamplingParams

CELLS = Cells.read()._replace(steady=SteadyCell((2,), 32, 8))


@pytest.mark.long
def test_every_setting_is_timed_next_to_greedy_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record has each setting at each batch size, and the ratio is of the steps around it."""
    path = tmp_path / "steps.json"
    words = ["hash", "--batches", "2,3", "--settings", "top_k,penalties", "--rounds", "2"]
    assert sampled_steps.run_cli([*words, "--json", str(path)], CELLS) == 0
    figures = json.loads(path.read_text())["figures"]
    for batch in ("b2", "b3"):
        assert list(figures[batch]) == ["greedy_ms", "top_k", "penalties"]
        for each in figures[batch].values():
            assert 0 < each["min"] <= each["median"] <= each["max"]
    assert "RESULT" in capsys.readouterr().out


def test_the_rows_of_a_timed_run_have_its_parameters() -> None:
    """A setting reaches every request; only lengths are the run's own."""
    params = SamplingParams(temperature=0.8, top_k=5, max_tokens=1)
    with LLM("hash", num_blocks=64, block_size=16) as llm:
        driver = EngineDriver(llm.engine)
        with driver.steady_decode([[1, 2, 3], [4, 5, 6]], params):
            found = [each.request.params for each in llm.engine.scheduler.running.values()]
    assert [(each.top_k, each.ignore_eos) for each in found] == [(5, True)] * 2
    assert all(each.max_tokens > 100 for each in found)


def test_an_unknown_setting_is_refused_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sampled_steps.run_cli(["hash", "--settings", "top_q"], CELLS) == 1
    printed = capsys.readouterr().err
    assert "'top_q' is not known" in printed and "top_k_top_p" in printed
