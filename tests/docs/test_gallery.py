"""The gallery's commands give the figures of its page, and the demo draws its picture."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forge.cli.main import main
from tests.docs.pages import parse_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "wiki" / "Gallery.md"

Figures = dict[str, Any]

# The default run compares what commands print with the page, and not the sentences about it.
pytestmark = pytest.mark.soak


class Section(NamedTuple):
    """The text under a heading, in one line, and the arguments of its `forge sim`."""

    text: str
    arguments: list[str]


def read_section(heading: str) -> Section:
    """Return the section under the heading. It has one command."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")
    body = rest.partition("\n## ")[0]
    (command,) = [block.text for block in parse_blocks(body) if block.language == "sh"]
    forge, sim, *words = shlex.split(command)
    assert (forge, sim) == ("forge", "sim")
    return Section(" ".join(body.split()), words)


@pytest.fixture
def run_sim(tmp_path: Path) -> Any:
    """Return a function that runs `forge sim` and returns its figures; a later flag counts."""

    def run(*words: str) -> Figures:
        file = tmp_path / "figures.json"
        assert main(["sim", *words, "--json", str(file)]) == 0
        found: Figures = json.loads(file.read_text())["figures"]
        return found

    return run


def test_thrash_is_preemptions_that_more_blocks_end(run_sim: Any) -> None:
    text, words = read_section("Thrash")
    tight, roomy = run_sim(*words), run_sim(*words, "--num-blocks", "1024")
    assert tight["preemptions"] > 300 and roomy["preemptions"] == 0
    assert f"{tight['preemptions']} preemptions for 120 requests" in text
    assert f"and {tight['good']} requests are good. With `--num-blocks 1024` there is no" in text
    assert roomy["good"] == roomy["requests"] == 120
    few = run_sim(*words, "--max-num-seqs", "10")
    assert few["good"] < tight["good"]
    assert f"there are {few['preemptions']} preemptions, and {few['good']} requests are" in text


def test_starvation_is_a_long_wait_of_few_while_most_are_served_at_once(run_sim: Any) -> None:
    text, words = read_section("Starvation")
    ttft = run_sim(*words)["ttft_ms"]
    assert ttft["p50"] < 200 and ttft["p90"] > 8000
    assert f"first token within {ttft['p50'] / 1000:.2f} seconds, a fifth after eight" in text
    aged = run_sim(*words, "--policy", "shortest-aged")
    longest = aged["ttft_ms"]["max"]
    assert f"is {longest / 1000:.1f} seconds instead of {ttft['max'] / 1000:.1f}" in text
    assert f"{aged['good']} requests are good instead of {run_sim(*words)['good']}" in text
    slots = run_sim(*words, "--max-num-seqs", "32")
    assert slots["good"] > 250


def test_the_head_of_the_line_blocks_requests_that_would_fit(run_sim: Any) -> None:
    text, words = read_section("Head-of-line blocking")
    first_come, shortest = run_sim(*words), run_sim(*words, "--policy", "shortest-prompt")
    slow, fast = first_come["ttft_ms"]["p50"], shortest["ttft_ms"]["p50"]
    assert slow > 100 * fast
    assert f"median TTFT is {slow / 1000:.1f} seconds" in text
    assert f"it is {fast:.0f} milliseconds" in text
    assert f"{shortest['good']} of 200 requests are good instead of {first_come['good']}" in text


def test_a_convoy_waits_for_its_last_prompt_and_mixing_ends_it(run_sim: Any) -> None:
    text, words = read_section("Convoy")
    convoy, mixed = run_sim(*words), run_sim(*words, "--policy", "fcfs")
    mean, other = convoy["ttft_ms"]["mean"], mixed["ttft_ms"]["mean"]
    assert mean > 3 * other
    assert f"TTFT is {other / 1000:.1f} seconds instead of {mean / 1000:.1f}" in text
    assert f"one {convoy['itl_ms']['max'] / 1000:.1f} seconds later" in text
    assert f"{mixed['good']} of 240 requests are good instead of {convoy['good']}" in text
    gap, before = mixed["itl_ms"], convoy["itl_ms"]
    assert f"{gap['mean']:.1f} ms on average instead of {before['mean']:.1f}" in text
    assert f"and {gap['p90']:.0f} instead of {before['p90']:.0f} for the 90th percentile" in text


def test_the_demo_of_the_makefile_ends_and_draws_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    made, command = recipe[1].replace("\\\n", "").strip().split("\n")
    assert made == "@mkdir -p build"
    forge, *words = shlex.split(command)
    assert (forge, words[:2], words.pop()) == ("$(BIN)/forge", ["sim", "sweep"], "$(ARGS)")
    picture, figures_file = tmp_path / "policies.png", tmp_path / "figures.json"
    words[words.index("build/policies.png")] = str(picture)
    assert main([*words, "--json", str(figures_file)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    outcomes = json.loads(figures_file.read_text())["outcomes"]
    assert len(outcomes) == 18
    assert {sum(each["figures"]["endings"].values()) for each in outcomes} == {300}
