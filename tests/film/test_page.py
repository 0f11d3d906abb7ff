"""The page in a browser: its fold is the engine, its figures are those of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge.config import EngineConfig, Speculation
from forge.film.page import build_page
from forge.film.state import Line
from forge.sim.scenario import Scenario
from tests.core.worlds import draw_world
from tests.film.chromium import require_chromium, run_selftest
from tests.film.engine_checks import CheckedFilm, film_with_checks
from tests.film.test_state import film_world

THRASH = Scenario(
    prompt="16-64",
    output="100-200",
    rate=20.0,
    requests=40,
    classes=2,
    engine=EngineConfig(num_blocks=100),
)
DRAFTS = Scenario(
    workload="agent",
    clients=6,
    requests=24,
    turns=4,
    system=64,
    prompt="16-64",
    output="8-32",
    model="hash",
    engine=EngineConfig(num_blocks=48, depth=2, speculation=Speculation(num_tokens=3)),
)
LARGE = Scenario(
    prompt="400-700",
    output="40-200",
    rate=400.0,
    requests=600,
    engine=EngineConfig(num_blocks=10_000, max_num_seqs=256, max_num_batched_tokens=4096),
)


def selftest(film: CheckedFilm, tmp_path: Path) -> dict[str, Any]:
    """Return the self-test of the film's page, after what holds for every page."""
    page = tmp_path / "film.html"
    page.write_text(build_page([film.lines], "a film", film.checks), encoding="utf-8")
    result = run_selftest(require_chromium(), page, tmp_path / "profile")
    print({name: value for name, value in result.items() if name != "answers"})
    assert result["states"] == len(film.checks["states"]) and not result["wrong"]
    assert (result["seek"], result["errors"], result["violations"]) == (0, [], [])
    assert result["requests"] == 0
    for answer in result["answers"]:
        if isinstance(answer["value"], float):
            assert answer["found"] == pytest.approx(answer["value"], rel=2e-3, abs=2), answer
        else:
            assert answer["found"] == answer["value"], answer
    return result


@pytest.mark.long
@pytest.mark.parametrize("scenario", [THRASH, DRAFTS], ids=["thrash", "drafts"])
def test_the_page_folds_to_the_engine_and_has_the_figures_of_the_run(
    scenario: Scenario, tmp_path: Path
) -> None:
    film = film_with_checks(scenario, every=7)
    scheduler = film.world.engine.scheduler
    assert scheduler.pool.num_evictions and scheduler.num_preemptions
    result = selftest(film, tmp_path)
    assert len(result["answers"]) == 9


@pytest.mark.long
def test_the_page_folds_random_worlds_to_their_engines(tmp_path: Path) -> None:
    """Forks, drafts, tiers, resizes, resets and failed steps, folded by the code of the page."""
    worlds = [film_world(draw_world(seed)) for seed in range(12)]
    states = [
        {"film": index, "at": at, "state": state}
        for index, world in enumerate(worlds)
        for at, state in enumerate(world.states)
    ]
    names = {name for world in worlds for line in world.lines for name in line}
    assert names >= {"copies", "preempted", "resize", "reset", "kept", "evict", "loads", "left"}
    page = tmp_path / "worlds.html"
    films = [world.lines for world in worlds]
    page.write_text(build_page(films, "worlds", {"states": states}), encoding="utf-8")
    result = run_selftest(require_chromium(), page, tmp_path / "profile")
    assert result["states"] == len(states) > 250
    assert (result["wrong"], result["seek"], result["errors"]) == ([], 0, [])


@pytest.mark.soak
def test_ten_thousand_blocks_and_256_slots_are_drawn(tmp_path: Path) -> None:
    """The time of a frame is printed: it depends on the machine."""
    result = selftest(film_with_checks(LARGE, every=50), tmp_path)
    play, jump = result["ms"]["play"], result["ms"]["jump"]
    print(f"{play:.1f} ms a frame of play, {jump:.1f} ms a jump")


def test_the_page_names_its_own_code_alone_and_text_of_a_line_ends_no_element() -> None:
    lines: list[Line] = [
        {"film": 1, "blocks": 1, "next": 0},
        {"void": "</script><script>alert({{js}})"},
    ]
    page = build_page([lines], "a <title> & {{js}}")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "a &lt;title&gt; &amp; {{js}}</title>" in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "http" not in re.sub(r"<!doctype html>", "", page).replace("http-equiv", "")
