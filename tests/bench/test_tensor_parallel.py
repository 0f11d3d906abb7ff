"""Comparisons between numbers of ranks, and a run of each on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.bench import tensor_parallel
from forge.bench.tensor_parallel import _wait_for_all, compare, compare_tokens, run_cli
from forge.bench.workload import BatchCell, Cells, SteadyCell
from forge.errors import InvalidConfig

TINY = Path(__file__).parents[2] / "forge" / "models" / "tiny"


def test_tokens_are_compared_up_to_the_first_that_differs_with_the_gap_there() -> None:
    base = [[[1, 0.5], [2, 0.25]], [[3, 0.125], [4, 2.0]]]
    other = [[[1, 0.5], [2, 0.2]], [[9, 0.1], [5, 1.0]]]
    assert compare_tokens(base, other) == {
        "sequences": 2,
        "equal_sequences": 1,
        "gaps_where_different": [0.125],
    }


def test_steps_are_shares_and_throughputs_multiples_of_the_first_number_of_ranks() -> None:
    base = {"step_ms_b1": 4.0, "step_ms_b1_p10": 3.0, "c64_tok_s": 100, "tokens": []}
    other = {"step_ms_b1": 3.0, "step_ms_b1_p10": 2.0, "c64_tok_s": 180, "tokens": []}
    ratios = {name: each for name, each in compare(base, other).items() if "ratio" in name}
    assert ratios == {"step_ms_b1_ratio": 0.75, "c64_tok_s_ratio": 1.8}


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        (("import time; time.sleep(600)", "raise SystemExit(3)"), "rank 1 of 2 ended with 3"),
        (("import time; time.sleep(600)",), r"1 ranks took longer than 0\.1 s"),
    ],
)
def test_a_rank_that_fails_or_does_not_end_is_an_error(
    programs: tuple[str, ...], problem: str
) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", each], text=True) for each in programs]
    try:
        limit_s = 60.0 if len(programs) > 1 else 0.1
        with pytest.raises(InvalidConfig, match=problem):
            _wait_for_all(processes, limit_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(500)
def test_two_ranks_on_a_cpu_give_the_tokens_of_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from tests.hf.forked_processes import ForkedModule

    monkeypatch.setattr(tensor_parallel, "subprocess", SimpleNamespace(Popen=ForkedModule))
    cells = Cells.read()._replace(
        warm_up=(),
        throughput=(BatchCell("c2", 2, (9, 9), (4, 4)),),
        rounds=1,
        steady=SteadyCell((1,), 24, 3),
    )
    words = [str(TINY), "--ranks", "1,2", "--device", "cpu", "--max-model-len", "128"]
    assert run_cli(words, cells) == 0
    (line,) = (each for each in capfd.readouterr().out.splitlines() if each.startswith("RESULT "))
    figures: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    assert figures["ranks2"]["equal_sequences"] == figures["ranks2"]["sequences"] == 8
    assert figures["ranks2"]["c2_tok_s"] > 0 and figures["ranks2"]["step_ms_b1"] > 0
