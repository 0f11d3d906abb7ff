"""Questions of wiki/Film.md: each answer is what the engine decided, and the page shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge.film.state import FilmState, Line
from tests.docs.pages import ROOT
from tests.film.chromium import require_chromium, run_chromium, run_selftest
from tests.film.presets import FILMS, PRESETS, Preset, film_page, film_run

WIKI_PAGE = ROOT / "wiki" / "Film.md"


def frame_lines(lines: list[Line], frame: int) -> list[Line]:
    """Return the lines after the plan before a frame, up to its own plan."""
    plans = [index for index, line in enumerate(lines) if "plan" in line]
    first = plans[frame - 1] + 1 if frame else 0
    return lines[first : plans[frame] + 1]


def state_at(lines: list[Line], frame: int) -> FilmState:
    """Return the state after the plan of a frame."""
    state = FilmState(lines[0])
    for index in range(frame + 1):
        for line in frame_lines(lines, index):
            if "film" not in line:
                state.apply(line)
    return state


def check_preset(preset: Preset, lines: list[Line]) -> None:
    """Assert that the plans of the engine give the answer."""
    found = frame_lines(lines, preset.frame)
    if preset.waits:
        wait = state_at(lines, preset.at).wait
        assert wait is not None and wait[2][str(preset.seq)] == preset.waits
        return
    name = {line["seq"]: line["arrive"] for line in lines if "arrive" in line}
    texts = [f"{name[seq]} {what}: {why}" for line in found for what in ("admitted", "preempted")
             for seq, why in line.get(what, ())]  # fmt: skip
    texts += [f"{name[seq]} keeps {n} drafts" for line in found for seq, n in line.get("kept", ())]
    texts += [f"evicted: block {', '.join(map(str, line.get('evict', ())))}" for line in found]
    assert preset.says in texts, (preset, texts)


def test_the_page_of_the_wiki_has_each_command_link_and_answer() -> None:
    text = " ".join(WIKI_PAGE.read_text("utf-8").replace("\\\n", " ").split())
    for name, run in FILMS.items():
        assert run.command(f"build/{name}.html") in text, name
    for preset in PRESETS:
        assert preset.address in text, preset
        answer = preset.waits or preset.says.partition(": ")[2] or preset.says
        assert answer in text, preset


@pytest.mark.long
@pytest.mark.parametrize("name", ["two", "agents", "drafts"])
def test_each_answer_is_what_the_engine_decided(name: str) -> None:
    (lines,) = film_run(name)
    for preset in PRESETS:
        if preset.film == name:
            check_preset(preset, lines)


@pytest.mark.soak
@pytest.mark.parametrize("name", FILMS)
def test_each_answer_is_shown_by_the_page(name: str, tmp_path: Path) -> None:
    page = tmp_path / f"{name}.html"
    page.write_text(film_page(name), encoding="utf-8")
    for preset in PRESETS:
        if preset.film == name:
            check_preset(preset, film_run(name)[0])
    result = run_selftest(require_chromium(), page, tmp_path / "profile")
    assert all(answer["found"] for answer in result["answers"]), result["answers"]
    assert len(result["answers"]) == sum(each.film == name for each in PRESETS)
    assert not (result["errors"] or result["violations"] or result["seek"] or result["requests"])


@pytest.mark.long
@pytest.mark.parametrize(("at", "times"), [(8, "0 times"), (13, "1 time")])
def test_the_page_counts_preemptions_of_a_sequence(at: int, times: str, tmp_path: Path) -> None:
    page = tmp_path / "two.html"
    page.write_text(film_page("two"), encoding="utf-8")
    address = f"{page.as_uri()}#at={at}&seq=1"
    text = run_chromium(require_chromium(), tmp_path / "profile", "--dump-dom", address)
    assert re.search(rf"Preempted</\w+>\s*<\w+>{times}</", text)
