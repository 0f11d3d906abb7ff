"""Films of simulations and replays: their folds, their figures, and a golden film."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from forge import LLM, SamplingParams, __version__
from forge.cli.main import main
from forge.config import EngineConfig
from forge.engine import Engine
from forge.film.state import KEYFRAME_PLANS, FilmState, Line
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.recording import RecordingWriter, build_header
from forge.sim.replay import replay
from forge.sim.reports.film import ReplayFilm, WorldFilm
from forge.sim.scenario import Scenario
from tests.core.worlds import RandomWorld, RecordingModel, build_engine, draw_world, run_world
from tests.docs.pages import ROOT
from tests.film.test_state import FoldCheck

GOLDEN_WORDS = (
    *("--workload", "closed", "--clients", "2", "--requests", "2", "--prompt", "6", "--output"),
    *("6", "--num-blocks", "6", "--block-size", "2", "--max-num-seqs", "2"),
    *("--max-num-batched-tokens", "8", "--cost", "unit"),
)
GOLDEN_FILM = ROOT / "tests" / "film" / "golden.jsonl"


class TwoRecorders:
    """A Recorder that passes each call to a film and to a recording."""

    def __init__(self, *recorders: object) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> None:
            for each in self._recorders:
                getattr(each, name)(*args)

        return call


def film_and_recording(world: RandomWorld) -> tuple[list[Line], list[str]]:
    """Return the film of a world, and its recording."""
    lines: list[str] = []
    checks: list[FoldCheck] = []
    recordings: list[RecordingWriter] = []

    def create(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, engine = build_engine(world)
        config = world.config
        header = build_header(config, world.vocab_size, world.eos_token, world.policy, __version__)
        clock = count(0, 1000)
        recordings.append(RecordingWriter(lines.append, lambda: next(clock), header))
        checks.append(FoldCheck(engine))
        engine.recorder = TwoRecorders(checks[0].recorder, recordings[0])  # type: ignore[assignment]
        return model, recorder, engine

    run_world(world, create=create)
    recordings[0].close()
    return checks[0].lines, lines


def without_times(lines: list[Line]) -> list[Line]:
    """Return the lines without their times, and without title and policy."""
    left_out = {"at", "title", "policy"}
    return [{k: v for k, v in line.items() if k not in left_out} for line in lines]


@pytest.mark.parametrize(
    "seeds",
    [range(100, 115), pytest.param(range(115, 200), marks=pytest.mark.long)],
    ids=["first", "further"],
)
def test_the_film_of_a_replay_is_the_film_of_the_run(seeds: range) -> None:
    num_lines = 0
    for seed in seeds:
        world = draw_world(seed)
        if world.policy not in POLICIES:
            continue
        lines, recording = film_and_recording(world)
        film = ReplayFilm("a world")
        result = replay(recording, on_entry=film.on_entry, on_start=film.on_start)
        assert result.difference is None and result.is_complete
        assert without_times(film.close()) == without_times(lines), f"world {seed}"
        times = [line["at"] for line in film.lines if "at" in line]
        assert times == sorted(times)
        num_lines += len(lines)
    assert num_lines > 100


def read_films(page: Path) -> list[list[str]]:
    """Return the lines of each film of a page."""
    text = page.read_text("utf-8")
    parts = text.split('<script type="application/x-ndjson" class="film-lines">\n')[1:]
    return [part.partition("\n</script>")[0].split("\n") for part in parts]


def test_a_small_run_has_this_film(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    assert main(["sim", *GOLDEN_WORDS, "--html", str(page)]) == 0
    (lines,) = read_films(page)
    header = json.loads(lines[0])
    assert (header["film"], header["blocks"], header["policy"]) == (1, 6, "fcfs")
    assert "\n".join(lines[1:]) + "\n" == GOLDEN_FILM.read_text("utf-8")


def test_a_second_run_of_the_same_arrivals_stands_next_to_the_first(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    words = ["sim", "--requests", "6", "--rate", "90", "--html", str(page)]
    assert main([*words, "--versus", "policy=shortest-prompt max-num-seqs=2"]) == 0
    one, two = [[json.loads(line) for line in film] for film in read_films(page)]
    arrivals = [[line for line in film if "arrive" in line] for film in (one, two)]
    assert len(arrivals[0]) == 6 and arrivals[0] == arrivals[1]
    assert (one[0]["policy"], two[0]["policy"]) == ("fcfs", "shortest-prompt")
    assert (one[0]["slots"], two[0]["slots"]) == (64, 2)


@pytest.mark.parametrize(
    ("versus", "problem"),
    [
        ("rate=3", "'rate=3' is not NAME=VALUE of an option that leaves the arrivals alone"),
        ("polcy=fcfs", "Use policy"),
        ("depth=two", "--versus depth: 'two' is not an integer"),
        ("depth=3", "depth"),
        (" ", "' ' has no option"),
        ("'", "has no option"),
    ],
)
def test_a_second_run_with_other_arrivals_or_bad_options_is_refused(
    versus: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert main(["sim", "--html", str(page), "--versus", versus]) == 2
    assert problem in capsys.readouterr().err
    assert not page.exists()


def test_a_second_run_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--versus", "depth=2"]) == 2
    assert "Give --html FILE too" in capsys.readouterr().err


def test_a_recording_is_replayed_to_a_page(tmp_path: Path) -> None:
    recording, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    with LLM("hash", record=str(recording)) as llm:
        llm.generate(["a secret prompt", "b"], SamplingParams(max_tokens=3))
    assert main(["sim", "replay", str(recording), "--html", str(page)]) == 0
    (lines,) = read_films(page)
    film = [json.loads(line) for line in lines]
    assert film[0]["clock"] == "host" and "run.jsonl" in film[0]["title"]
    assert next(line["at"] for line in film if "plan" in line) == 0
    assert sum("arrive" in line for line in film) == 2
    assert [why for line in film for _, why in line.get("ended", ())] == ["length"] * 2
    assert "secret" not in page.read_text("utf-8")


def test_a_reader_may_start_at_a_keyframe() -> None:
    scenario = Scenario(prompt="8", output="300", requests=3, engine=EngineConfig(num_blocks=64))
    films: list[WorldFilm] = []

    def create_observers(engine: Engine) -> list[WorldFilm]:
        films.append(WorldFilm(engine, "long", "fcfs"))
        return films

    scenario.run(create_observers=create_observers)
    lines = films[0].lines
    keys = [index for index, line in enumerate(lines) if "key" in line]
    num_plans = sum("plan" in line for line in lines[: keys[0]])
    assert num_plans == KEYFRAME_PLANS
    late, full = FilmState(lines[0]), FilmState(lines[0])
    for line in lines[1 : keys[0]]:
        full.apply(line)
    for line in lines[keys[0] :]:
        late.apply(line)
        if "key" not in line:
            full.apply(line)
        assert late.keyframe() == full.keyframe()
    assert late.keyframe() == films[0].state.keyframe()


def test_a_refusal_and_a_departure_are_filmed() -> None:
    scenario = Scenario(
        prompt="8,900", output="8", requests=8, engine=EngineConfig(num_blocks=8, max_num_seqs=2)
    )
    films: list[WorldFilm] = []

    def create_observers(engine: Engine) -> list[WorldFilm]:
        films.append(WorldFilm(engine, "refusals", "fcfs"))
        return films

    world = scenario.run(create_observers=create_observers)
    refused = [line for line in films[0].lines if "refused" in line]
    assert len(refused) == world.metrics.num_refused > 0
    assert all("the cache has 8" in line["why"] for line in refused)
