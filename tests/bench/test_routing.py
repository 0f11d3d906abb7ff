"""Cost of routing decisions: what is measured, printed and recorded, and not how long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.bench import routing
from forge.routing.router import ROUTERS


@pytest.mark.long
def test_every_router_has_a_line_for_each_number_of_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "routing.json"
    words = ["--replicas", "1,3", "--decisions", "30", "--json", str(path)]
    assert routing.main(words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    names = [(router, "events") for router in ROUTERS] + [("prefix-aware", "decisions")]
    assert [tuple(row[:3]) for row in rows] == [(*name, n) for n in "13" for name in names]
    figures = json.loads(path.read_text())["figures"]["decisions"]
    assert all(0 < each["p10_us"] <= each["median_us"] <= each["p99_us"] for each in figures)


def test_replicas_hold_beginnings_of_every_prompt() -> None:
    prompts = routing.create_prompts()
    table = routing.create_table("prefix-aware", routing.FEEDS["events"], 4, prompts)
    for hashes in (prompts[0], prompts[-1]):
        assert len(hashes) == 512
        assert table.index.prefix_lengths(hashes, (0, 1, 2, 3)) == [512, 384, 256, 128]


def test_a_median_above_the_limit_at_eight_replicas_is_reported() -> None:
    figures = [
        {"router": name, "feed": "events", "replicas": replicas, "median_us": median_us}
        for name, replicas, median_us in (("a", 8, 200.0), ("b", 8, 201.0), ("c", 32, 900.0))
    ]
    (line,) = routing.slow_decisions(figures)
    assert line == "b, fed by events, takes 201 us at 8 replicas, at most 200 are allowed"
