"""Overhead of tiers that are never used: equal work on both engines, and the ratio of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge import LLM
from forge.bench import kv_overhead
from forge.bench.kv_overhead import create_row, run_cell, side_options
from forge.bench.peers import parse_results
from forge.bench.workload import BatchCell
from forge.errors import InvalidConfig, RequestFailed

CELLS = (BatchCell("c4", 4, (40, 40), (6, 6)), BatchCell("mixed6", 6, (20, 60), (4, 30)))
OPTIONS = {"kv_host_gib": 0.0001, "max_num_seqs": 8}


@pytest.mark.long
def test_both_engines_run_each_cell_in_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.json"
    assert kv_overhead.main("hash", str(path), 2, OPTIONS, CELLS) == 0
    record = json.loads(path.read_text())
    rows = {each["cell"]: each for each in record["figures"]["cells"]}
    assert rows.keys() == {"c4", "mixed6"}
    for row in rows.values():
        assert [side for side, _ in row["runs"]] == [*kv_overhead.ORDER, *kv_overhead.ORDER]
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    printed = parse_results(capsys.readouterr().out.splitlines())
    assert [each["cell"] for each in printed] == ["c4", "mixed6"]


def test_a_ratio_is_of_two_runs_next_to_each_other() -> None:
    runs = [("off", 100.0), ("on", 99.0), ("on", 50.0), ("off", 50.0)]
    row = create_row("c4", runs)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (0.995, 0.99, 1.0)
    assert (row["tok_s_off"], row["tok_s_on"]) == (75, 74)


def test_the_engines_differ_by_their_host_memory_alone() -> None:
    sides = side_options("hash", CELLS, OPTIONS)
    assert sides["on"] == {**sides["off"], "kv_host_gib": 0.0001}
    assert sides["off"]["enable_prefix_caching"] is True
    with pytest.raises(InvalidConfig, match="files are not a part of this comparison"):
        side_options("hash", CELLS, {"kv_disk_path": "a", "kv_disk_gib": 1.0})


def test_a_prompt_that_was_in_a_cache_ends_the_measurement() -> None:
    with LLM("hash", **side_options("hash", CELLS, OPTIONS)["on"]) as llm:
        run_cell(llm, CELLS[0], "seed")
        with pytest.raises(RequestFailed, match="128 tokens of prompts were in a cache"):
            run_cell(llm, CELLS[0], "seed")
