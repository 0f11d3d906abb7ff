"""Tables and pictures of speed on pages have the figures of bench/results, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge.bench import peers, performance_plots, performance_tables, shapes
from forge.bench.peers import join_results, parse_results
from forge.bench.performance_tables import ROOT
from forge.bench.shapes import SHAPES, write_shape
from forge.bench.traffic_tables import SUMMARY_ROWS, SummaryRow, summary_table
from forge.errors import InvalidConfig

PAGE = "# forge\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\nThe end.\n"
README = "# forge\n\n<!-- summary:begin -->\n<!-- summary:end -->\n"

LOG = """\
a line of noise
RESULT {"engine": "vllm", "shape": "qwen3-4b", "start_s": 55.0, "ttft_128_ms": 8.4, "c1_tok_s": 284}
RESULT {"engine": "vllm", "shape": "qwen3-4b", "ttft_prefix_8k_64_ms": 20.0}
RESULT {"engine": "forge", "shape": "qwen3-4b", "start_s": 20.0, "ttft_128_ms": 4.2, \
"c1_tok_s": 355, "step_ms_b1": 2.8}
RESULT {"engine": "vllm", "shape": "qwen3-4b", "path": "http", "c": 1, "ttft_p50": 10.9, \
"itl_p50": 3.58, "itl_p99": 3.6, "gap_p99": 3.9, "tok_s": 278}
RESULT {"engine": "forge", "shape": "qwen3-4b", "path": "http", "c": 1, "ttft_p50": 5.45, \
"itl_p50": 2.9, "itl_p99": 3.0, "gap_p99": 3.3, "tok_s": 1390}
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with the result of LOG, and one of another benchmark."""
    (tmp_path / "policy.json").write_text('{"benchmark": "policy"}')
    figures = join_results(parse_results(LOG.splitlines()))
    made = {
        "benchmark": "peers",
        "machine": {"processor": "a CPU", "gpus": [{"name": "a GPU"}]},
        "versions": {"python": "3.12.0", "torch": "2.11.0"},
        "commit": "abc1234",
        "figures": figures,
    }
    (tmp_path / "made.json").write_text(json.dumps(made))
    return tmp_path


def test_tables_have_both_engines_and_how_many_times_as_fast_forge_is(results: Path) -> None:
    assert performance_tables.tables(performance_tables.read_results(results)).splitlines() == [
        "### made",
        "",
        "a GPU; python 3.12.0, torch 2.11.0; commit abc1234; `bench/results/made.json`. "
        "One run on one machine.",
        "",
        "**qwen3-4b**",
        "",
        "|  | vLLM | forge | as fast as vLLM |",
        "| --- | ---: | ---: | ---: |",
        "| TTFT, 128 tokens, ms | 8.4 | 4.2 | 2.00x |",
        "| 1 stream, tok/s | 284 | 355 | 1.25x |",
        "| TTFT, 64 tokens after a cached 8k, ms | 20 | - | - |",
        "",
        "**qwen3-4b, closed loop over HTTP**",
        "",
        "| streams, vLLM / forge | TTFT p50, ms | TPOT p50, ms | TPOT p99, ms | tok/s "
        "| as fast as vLLM |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 10.9 / 5.45 | 3.58 / 2.9 | 3.6 / 3 | 278 / 1,390 | 5.00x |",
    ]


LEVEL: dict[str, Any] = {"shape": "a", "path": "offline", "c": 4, "ttft_p50": 9.0, "itl_p50": 3.0}


def test_a_further_engine_has_a_column_with_the_figures_that_it_has() -> None:
    """The ratio stays that of forge and vLLM."""
    entries = [
        {"engine": "forge", "shape": "a", "start_s": 20.0, "c1_tok_s": 300},
        {"engine": "vllm", "shape": "a", "start_s": 50.0, "c1_tok_s": 200},
        {"engine": "transformers", "shape": "a", "attention": "paged|sdpa", "c1_tok_s": 18},
    ]
    assert performance_tables.cell_table(entries) == [
        "|  | transformers | vLLM | forge | as fast as vLLM |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 1 stream, tok/s | 18 | 200 | 300 | 1.50x |",
    ]


def test_cells_of_one_engine_have_no_ratio() -> None:
    assert performance_tables.cell_table([{"engine": "forge", "shape": "a", "c1_tok_s": 300}]) == [
        "|  | forge |",
        "| --- | ---: |",
        "| 1 stream, tok/s | 300 |",
    ]


def test_levels_of_one_engine_have_no_ratio() -> None:
    level = {**LEVEL, "engine": "forge", "itl_p99": 3.5, "tok_s": 1200}
    assert performance_tables.level_table([level]) == [
        "| streams, forge | TTFT p50, ms | TPOT p50, ms | TPOT p99, ms | tok/s |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 4 | 9 | 3 | 3.5 | 1,200 |",
    ]


def test_a_level_that_one_engine_lacks_has_a_dash() -> None:
    levels = [
        {**LEVEL, "engine": "vllm", "itl_p99": 3.5, "tok_s": 900},
        {**LEVEL, "engine": "forge", "itl_p99": 3.5, "tok_s": 1200},
        {**LEVEL, "engine": "forge", "c": 8, "itl_p99": 4.5, "tok_s": 2000},
    ]
    assert performance_tables.level_table(levels)[2:] == [
        "| 4 | 9 / 9 | 3 / 3 | 3.5 / 3.5 | 900 / 1,200 | 1.33x |",
        "| 8 | - / 9 | - / 3 | - / 4.5 | - / 2,000 | - |",
    ]


def test_without_a_result_the_page_says_that_nothing_is_measured(tmp_path: Path) -> None:
    assert (
        performance_tables.tables(performance_tables.read_results(tmp_path))
        == "No run of forge and another engine is recorded yet."
    )


def test_the_check_passes_on_what_was_written_and_fails_on_anything_else(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = {"min": 1, "median": 1, "max": 1}
    cells = [
        {"engine": engine, "shape": "a", "cell": "b", "label": "c", "rounds": 2}
        | {"figures": {"tok_s": {key: scale * value for key, value in spread.items()}}}
        for engine, scale in (("forge", 4), ("vllm", 2))
    ]
    made = json.loads((results / "made.json").read_text())
    traffic = made | {
        "benchmark": "traffic",
        "versions": {"vllm": "1"},
        "figures": {"cells": cells},
    }
    (results / "traffic.json").write_text(json.dumps(traffic))
    rows = (SummaryRow("traffic", "a", "b", "tok_s"),)
    monkeypatch.setattr(performance_tables, "SUMMARY_ROWS", rows)
    readme, page = results / "README.md", results / "docs" / "Performance.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    readme.write_text(README)
    options = ["--results", str(results), "--root", str(results)]
    assert performance_tables.run_cli(["--check", *options]) == 1
    assert "Run python -m forge.bench.performance_tables --write" in capsys.readouterr().err
    assert performance_tables.run_cli(["--write", *options]) == 0
    assert performance_tables.run_cli(["--check", *options]) == 0
    for changed in (readme, page):
        text = changed.read_text()
        assert "2.00x" in text
        changed.write_text(text.replace("2.00x", "3.00x"))
        assert performance_tables.run_cli(["--check", *options]) == 1
        changed.write_text(text)


def test_text_outside_the_markers_stays() -> None:
    replaced = performance_tables.replace_between(
        PAGE, performance_tables.BEGIN, performance_tables.END, "new"
    )
    assert replaced == PAGE.replace("old", "new")


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="it has no markers for the tables"):
        performance_tables.replace_between("# forge\n", "<begin>", "<end>", "new")


# The pages of this repository.


def test_the_pages_have_the_tables_of_the_results() -> None:
    assert performance_tables.run_cli(["--check"]) == 0


def test_the_readme_has_six_ratios_of_repeated_rounds_and_their_range() -> None:
    """A reader sees each figure's spread, a case in which vLLM is faster, and the range first."""
    results = performance_tables.read_results()
    rows = summary_table(results, SUMMARY_ROWS)[2:-2]
    assert len(rows) == 6
    assert [row for row in rows if row.count(" to ") < 2 or " - " in row] == []
    ratios = [
        float(match[1]) for row in rows for match in [re.search(r"([\d.]+)x \|$", row)] if match
    ]
    assert len(ratios) == 6 and min(ratios) < 1
    words = f"{min(ratios):g} to {max(ratios):g} times as fast as vLLM"
    assert words in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_at_most_130_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def imported_modules(name: str) -> set[str]:
    """Return the modules of forge that a module of forge imports."""
    text = (ROOT / "forge" / f"{name}.py").read_text(encoding="utf-8")
    return set(re.findall(r"^ *from forge\.(\w+) import", text, re.MULTILINE))


def core_modules() -> set[str]:
    """Return the engine, the scheduler and every module that the scheduler needs."""
    found: set[str] = set()
    pending = {"scheduler"}
    while pending:
        found |= pending
        pending = set().union(*map(imported_modules, pending)) - found
    return found | {"engine"}


def test_the_readme_says_how_long_the_core_is() -> None:
    """The figure is rounded: it may be wrong by 10 %."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"imports are ([\d,]+) lines", text)
    assert match
    paths = [ROOT / "forge" / f"{name}.py" for name in core_modules()]
    assert {"blocks.py", "drafting.py", "policy.py", "seam.py"} <= {path.name for path in paths}
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert int(match[1].replace(",", "")) == pytest.approx(num_lines, rel=0.1)


# Pictures


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")  # matplotlib's own, which change with its version
def test_plots_are_written_as_pictures(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(performance_plots, "MIN_CURVE_POINTS", 1)
    monkeypatch.setattr(performance_plots, "PICTURE", "made")
    options = ["--results", str(results), "--root", str(results)]
    assert performance_tables.run_cli(["--plot", *options]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["sweep.png", "speed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_plot_of_the_summary_has_both_engines_in_each_panel() -> None:
    cells = [
        {"engine": engine, "shape": "a", "c8_tok_s": 8 * x, "c1_tok_s": x, "ttft_128_ms": 8 / x}
        for engine, x in (("forge", 4), ("vllm", 2))
    ]
    result = {"machine": {"processor": "a CPU"}, "commit": "abc", "figures": {"cells": cells}}
    streams, prompts = performance_plots.draw_summary(result).axes
    assert [list(map(tuple, line.get_xydata())) for line in streams.lines] == [
        [(1, 2), (8, 16)],
        [(1, 4), (8, 32)],
    ]
    assert [list(map(tuple, line.get_xydata())) for line in prompts.lines] == [
        [(128, 4)],
        [(128, 2)],
    ]
    for axes in (streams, prompts):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["vLLM", "forge"]
        assert {text.get_text() for text in axes.texts} == {"2.00x"}


AT: tuple[Callable[[int], float], ...] = (lambda c: 9, lambda c: 3, lambda c: 100 * c)
"""Each panel's figure at so many streams."""


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_plot_draws_three_figures_of_the_engines_that_are_there() -> None:
    """The path that vLLM has no levels of is a row of its own, where its name does not stand.

    Three numbers of streams are no curve.
    """
    few = [
        {**LEVEL, "shape": "small", "engine": "forge", "path": "http", "c": c} for c in (1, 2, 3)
    ]
    levels = [
        {**LEVEL, "engine": engine, "path": path, "c": c, "tok_s": 100 * c}
        for engine, path in (("forge", "offline"), ("forge", "http"), ("vllm", "http"))
        for c in (8, 4, 1, 2)
    ]
    record = {"machine": {"processor": "a CPU"}, "figures": {"levels": [*levels, *few]}}
    panels = performance_plots.draw_loops({"made": record}).axes
    legends = [[text.get_text() for text in each.get_legend().get_texts()] for each in panels]
    assert legends == [["forge"]] * 3 + [["vLLM", "forge"]] * 3
    shown = [list(panels[place].lines[0].get_xydata().flatten()) for place in range(3)]
    streams = (1, 2, 4, 8)
    assert shown == [[n for c in streams for n in (c, at(c))] for at in AT]


def test_without_a_closed_loop_there_is_nothing_to_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert performance_tables.run_cli(["--plot", "--results", str(tmp_path)]) == 1
    assert "no result has a closed loop" in capsys.readouterr().err


def test_results_of_one_engine_and_shape_become_one() -> None:
    figures = join_results(parse_results(LOG.splitlines()))
    assert [(each["engine"], len(each)) for each in figures["cells"]] == [("vllm", 6), ("forge", 6)]
    assert [each["engine"] for each in figures["levels"]] == ["vllm", "forge"]


def test_two_figures_for_one_cell_are_not_joined() -> None:
    """They come from two runs, of which the better must not be chosen."""
    results = [{"engine": "forge", "shape": "a", "c1_tok_s": speed} for speed in (100, 101)]
    with pytest.raises(InvalidConfig, match="forge on a has two figures for c1_tok_s"):
        join_results(results)


def test_one_level_measured_twice_is_not_joined() -> None:
    results = [{"engine": "forge", "shape": "a", "path": "http", "c": 1, "tok_s": 3}] * 2
    with pytest.raises(InvalidConfig, match="is there twice"):
        join_results(results)


def test_join_writes_the_record_that_the_tables_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    path = peers.write_joined("mine", [str(log)], tmp_path / "results")
    (results,) = performance_tables.read_results(path.parent).values()
    assert results["figures"] == join_results(parse_results(LOG.splitlines()))
    assert results["machine"]["processor"]


def test_a_log_without_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("noise\n")
    with pytest.raises(InvalidConfig, match="no RESULT line"):
        peers.write_joined("mine", [str(tmp_path / "log")], tmp_path)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_peer_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    assert peers.run_cli(["vllm", "tiny-qwen3"]) == 1
    assert "vllm: vllm is not installed" in capsys.readouterr().err


# Shapes


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.190),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.761),
        ("llama-3.1-8b", 8.030),
    ],
)
def test_a_shape_has_as_many_weights_as_its_model(shape: str, billions: float) -> None:
    """Embedding, then per layer attention and MLP, then the head where it is not the embedding."""
    c: dict[str, Any] = dict(SHAPES[shape])
    hidden, heads = c["hidden_size"], c["num_attention_heads"] + c["num_key_value_heads"]
    attention = 2 * hidden * c["head_dim"] * heads
    mlp = 3 * hidden * c["intermediate_size"]
    embeddings = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)
    weights = embeddings + c["num_hidden_layers"] * (attention + mlp)
    assert weights / 1e9 == pytest.approx(billions, abs=0.001)


def test_a_written_shape_has_a_tokenizer_that_reads_and_writes_any_text(tmp_path: Path) -> None:
    """Each id has bytes, each byte has an id, and the special ids are those of the config."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_shape("tiny-qwen3", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert sorted(tokenizer.get_vocab().values()) == [*range(config["vocab_size"])]
    text = '{"name": "Ünïcode 😀", "id": 17}\n'
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(shapes.draw_words(1)[0]).ids) == 1, "words are merged"
    assert tokenizer.encode("<|begin|><|end|>").ids == [1, 2]
    assert tokenizer.decode([1, 2]) == ""


def test_words_of_the_stand_in_tokenizer_are_new_and_each_extends_another() -> None:
    words = shapes.draw_words(2000)
    assert len({*words}) == 2000
    starts = {*words, *" abcdefghijklmnopqrstuvwxyz"} | {chr(i) for i in range(33, 127)}
    assert [word for word in words if word[:-1] not in starts] == []
    assert max(map(len, words)) <= 12
    assert shapes.draw_words(10) == words[:10]


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="there is no shape 'huge'"):
        write_shape("huge", tmp_path)


def test_shapes_are_written_for_servers_to_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    assert shapes.run_cli([str(tmp_path), "tiny-qwen3"]) == 0
    assert Path(capsys.readouterr().out.strip(), "config.json").is_file()
    assert shapes.run_cli([str(tmp_path)]) == 2
