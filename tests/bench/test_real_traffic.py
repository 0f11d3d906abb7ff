"""Traffic cells on forge, on a stand-in for vLLM and over HTTP, and the record of both engines."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forge import LLM
from forge.bench import performance_tables, real_traffic, served_traffic, traffic_tables
from forge.bench.load_generator import LoadRun
from forge.bench.real_traffic import ForgeEngine, measure_offline, run_conversations, spreads
from forge.bench.served_traffic import check_lengths
from forge.bench.traffic_cells import (
    Batch,
    Cell,
    Conversations,
    Load,
    OpenLoop,
    TraceBatch,
    Traffic,
)
from forge.bench.traffic_record import create_record, join_cells, write_record
from forge.bench.traffic_requests import RequestDraw, read_trace
from forge.bench.traffic_tables import SummaryRow
from forge.bench.vllm_peer import VLLMPeer
from forge.bench.workload import RequestTimes
from forge.errors import InvalidConfig, RequestFailed
from forge.sim.workloads.traces import SAMPLE_TRACE
from tests.bench.test_serve import open_forge_server

IDS = (64, 257)
SCHEMA = {"type": "array", "minItems": 64, "items": {"type": "integer"}}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def create_cell(name: str, load: Load, *params: dict[str, Any]) -> Cell:
    return Cell(name, f"the cell {name}", load, params or (SAMPLED,))


CELLS = (
    create_cell(
        "batch", Batch(5, (3, 9), (2, 7)), {"temperature": 0.0}, {**SAMPLED, "logprobs": 3}
    ),
    create_cell("chat", TraceBatch(4)),
    create_cell("talk", Conversations(3, 2, 40, (4, 6), (2, 3))),
    create_cell("json", Batch(2, (3, 9), (5, 7)), {"structured_outputs": {"json": SCHEMA}}),
    create_cell("served", OpenLoop(200.0, 0.025)),
)
TRAFFIC = Traffic("s", 2, {"max_model_len": 128, "gpu_memory_utilization": 0.85}, CELLS)


def draw(traffic: Traffic = TRAFFIC) -> RequestDraw:
    return RequestDraw(traffic, read_trace(SAMPLE_TRACE), IDS)


def parse(printed: str) -> list[dict[str, Any]]:
    """Return the results of the lines for programs."""
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


# forge


@pytest.mark.long
def test_every_offline_cell_of_forge_prints_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["forge", "hash", str(tmp_path), "--vocab-size", "257"]
    assert real_traffic.run_cli(words, TRAFFIC) == 0
    results = parse(capsys.readouterr().out)
    assert [each["cell"] for each in results] == ["batch", "chat", "talk", "json"]
    for each in results:
        assert (each["engine"], each["shape"], each["rounds"]) == ("forge", "hash", 2)
        assert each["trace"] == "azure_sample.csv"
        assert {"machine", "versions", "commit", "start_s", "label"} <= each.keys()
        spread = each["figures"]["tok_s"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert len({each["workload"] for each in results}) == 4


@pytest.mark.torch
@pytest.mark.long
def test_a_shape_runs_with_its_stand_in_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grammar constrains the tokens of a byte-level vocabulary."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    words = ["forge", "tiny-qwen3", str(tmp_path), "--cells", "batch,json", "--rounds", "1"]
    options = {"num_blocks": 64, "max_num_batched_tokens": 512, "device": "cpu"}
    assert real_traffic.run_cli([*words, "--options", json.dumps(options)], TRAFFIC) == 0
    found = parse(capsys.readouterr().out)
    assert [(each["shape"], each["cell"]) for each in found] == [
        *(("tiny-qwen3", "batch"), ("tiny-qwen3", "json"))
    ]


class RecordingEngine:
    """An OfflineEngine that returns as many tokens as requested, plus `extra`."""

    start_s = 0.0

    def __init__(self, extra: int = 0) -> None:
        self.calls: list[list[list[int]]] = []
        self._extra = extra

    def create_params(self, fields: Any, output: int) -> int:
        return output

    def generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        self.calls.append([list(prompt) for prompt in prompts])
        return [[1000 + output] * (output + self._extra) for output in params]


def test_a_cell_has_a_warm_up_round_that_does_not_count() -> None:
    engine = RecordingEngine()
    _, figures = measure_offline(engine, CELLS[0], draw(), rounds=3)
    assert len(engine.calls) == 4
    assert len(figures) == 3
    assert len({json.dumps(call) for call in engine.calls}) == 4, "each has its own prompts"


def test_a_turn_has_the_context_with_the_engine_s_own_answers() -> None:
    engine = RecordingEngine()
    conversations = draw().conversations(CELLS[2], 1)
    _, tokens = run_conversations(engine, conversations)
    assert tokens == sum(turn.output for each in conversations for turn in each.turns)
    first, second = engine.calls
    for each, prompt, later in zip(conversations, first, second, strict=True):
        one, two = each.turns
        assert prompt == each.prefix + one.prompt
        assert later == prompt + [1000 + one.output] * one.output + two.prompt


@pytest.mark.parametrize("extra", [-1, 1])
def test_an_output_of_another_length_ends_the_run(extra: int) -> None:
    for cell in (CELLS[0], CELLS[2]):
        with pytest.raises(RequestFailed, match=r"an output has . tokens instead of"):
            measure_offline(RecordingEngine(extra), cell, draw(), rounds=1)


def test_a_figure_has_its_median_and_its_extremes() -> None:
    rounds = [
        {"tok_s": 30.0, "gap": None},
        {"tok_s": 10.0, "gap": 1.0},
        {"tok_s": 20.0, "gap": 2.0},
    ]
    assert spreads(rounds) == {"tok_s": {"median": 20.0, "min": 10.0, "max": 30.0}}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--cells", "batch,served"], "served need a server, and the others an engine without"),
        (["--cells", "other"], "there is no cell 'other'"),
        (["--rounds", "0"], "rounds: 0 is not a positive integer"),
        (["--cells", "served", "--seconds", "0"], "seconds: 0 is not a positive integer"),
        (["--cells", "batch", "--seconds", "9"], "seconds: batch has no duration"),
        (["--trace", "missing.csv"], "missing.csv cannot be read"),
    ],
)
def test_a_command_that_cannot_run_says_why(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_traffic.run_cli(["forge", "hash", str(tmp_path), *words], TRAFFIC) == 1
    captured = capsys.readouterr()
    assert problem in captured.err
    assert parse(captured.out) == []


def test_a_served_cell_of_other_seconds_has_a_name_of_its_own() -> None:
    """A record must not mix rounds of different durations under one name."""
    [cell] = real_traffic.select_cells(TRAFFIC, "served", None, seconds=9).cells
    assert (cell.name, cell.label) == ("served_9s", "the cell served, 9 s")
    assert cell.load == OpenLoop(200.0, 9.0)


# vLLM


class FakeVLLM:
    """The interface of vLLM's LLM that the cells use. Each instance is in `opened`."""

    opened: list[FakeVLLM]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[tuple[list[Any], list[Any]]] = []
        self.opened.append(self)

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        """Return outputs in the types of vLLM."""
        assert not use_tqdm
        self.calls.append((prompts, params))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7,) * each["max_tokens"])])
            for each in params
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeVLLM]:
    """Return the LLM of a stand-in for the package vllm, and install that package."""
    package: Any = ModuleType("vllm")
    params: Any = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    params.StructuredOutputsParams = lambda json: ("json", json)
    package.SamplingParams = dict
    package.LLM = type("LLM", (FakeVLLM,), {"opened": []})
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    return package.LLM


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return the folder of a model without weights."""
    (tmp_path / "config.json").write_text('{"vocab_size": 257}')
    return str(tmp_path)


def test_vllm_gets_the_requests_of_forge_through_its_own_api(
    vllm: type[FakeVLLM], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The digests are equal, and the options are those of the cells, with prefix caching on."""
    chosen = ["--cells", "batch,chat,talk", "--rounds", "1"]
    traffic = TRAFFIC._replace(options={**TRAFFIC.options, "enable_prefix_caching": True})
    assert real_traffic.run_cli(["vllm", folder, folder, *chosen], traffic) == 0
    ours = ["forge", "hash", folder, "--vocab-size", "257", *chosen]
    assert real_traffic.run_cli(ours, traffic) == 0
    results = parse(capsys.readouterr().out)
    assert [each["engine"] for each in results] == ["vllm"] * 3 + ["forge"] * 3
    digests = [each["workload"] for each in results]
    assert digests[:3] == digests[3:]
    (llm,) = vllm.opened
    assert llm.options["enable_prefix_caching"] is True
    assert llm.options["skip_tokenizer_init"] is False
    assert (llm.options["model"], llm.options["max_model_len"]) == (folder, 128)
    prompts, params = llm.calls[1]
    requests = draw(traffic).batch(CELLS[0], 1)
    assert prompts == [{"prompt_token_ids": each.prompt} for each in requests]
    expected = [{"max_tokens": each.output, "ignore_eos": True, **each.params} for each in requests]
    assert params == expected


def test_a_schema_becomes_vllm_s_structured_outputs(vllm: type[FakeVLLM], folder: str) -> None:
    peer = VLLMPeer(folder, folder)
    params = peer.create_params(CELLS[3].params[0], 5)
    assert params == {
        "max_tokens": 5,
        "ignore_eos": True,
        "structured_outputs": ("json", SCHEMA),
    }


@pytest.mark.parametrize("is_installed", [True, False])
def test_vllm_needs_xgrammar_for_a_schema(
    is_installed: bool,
    vllm: type[FakeVLLM],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module without a distribution, such as a stand-in, is not enough. No engine is opened."""
    plain = importlib.metadata.version

    def version(name: str) -> str:
        if name != "xgrammar":
            return plain(name)
        if not is_installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.2.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "xgrammar", ModuleType("xgrammar"))
    words = ["vllm", folder, folder, "--cells", "batch,json"]
    assert real_traffic.run_cli(words, TRAFFIC) == (0 if is_installed else 1)
    assert len(vllm.opened) == is_installed
    if not is_installed:
        assert "json need xgrammar, vLLM's backend of structured outputs" in capsys.readouterr().err


# Over HTTP


@pytest.mark.long
def test_a_served_cell_has_latencies_of_each_round_after_a_warm_up() -> None:
    cell, source = CELLS[4], draw()
    with open_forge_server() as url:
        first = source.arrivals(cell, 1)
        figures = served_traffic.measure_served(url, cell, source, 2, first)
    assert len(figures) == 2
    for each in figures:
        assert (each["completed"], each["rejected"], each["rate"]) == (5, 0, 200.0)
        assert each["offered"] == pytest.approx(200, abs=0.1)
        assert {"ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tok_s"} <= each.keys()


def test_an_output_over_http_of_another_length_ends_the_run() -> None:
    """A rejected request has no output, so 5 alone may be missing."""
    completed = [RequestTimes(0.0, (1.0,), tokens) for tokens in (3, 4, 4)]
    run = LoadRun(completed, 1, 1.0, [])
    assert check_lengths(run, [4, 3, 5, 4]) is run
    with pytest.raises(RequestFailed, match="outputs of 4 tokens came"):
        check_lengths(run, [4, 3, 5, 5])


def test_the_server_s_command_has_the_options_as_flags(folder: str) -> None:
    options = {"max_model_len": 128, "enable_prefix_caching": True, "enforce_eager": False}
    flags = ["--host", "127.0.0.1", "--port", "8123", "--max-model-len", "128"]
    flags += ["--enable-prefix-caching", "--no-enforce-eager"]
    dummy = ["--load-format", "dummy"]
    commands = {
        engine: list(served_traffic.server_command(engine, folder, 8123, options))
        for engine in ("forge", "vllm")
    }
    python = sys.executable
    assert commands == {
        "forge": [python, "-m", "forge", "serve", folder, *flags, *dummy],
        "vllm": [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
            *(*flags, *dummy),
        ],
    }
    assert "--load-format" not in served_traffic.server_command("forge", "hash", 8123, {})


@pytest.mark.long
def test_a_server_is_started_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    words = ["forge", "hash", str(tmp_path), "--cells", "served", "--vocab-size", "257"]
    assert real_traffic.run_cli([*words, "--log", str(log)], TRAFFIC) == 0
    (result,) = parse(capsys.readouterr().out)
    assert result["figures"]["completed"] == {"median": 5, "min": 5, "max": 5}
    assert result["start_s"] > 0
    port = int(log.read_text().partition("http://127.0.0.1:")[2].split()[0])
    assert not served_traffic.answers_health(port)


@pytest.mark.long
def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["forge", "hash", str(tmp_path), "--cells", "served", "--log", str(tmp_path / "log")]
    options = ["--options", '{"max_num_seqs": 0}']
    assert real_traffic.run_cli([*words, *options], TRAFFIC) == 1
    problem = capsys.readouterr().err
    assert "server: it ended with status 2 at its start" in problem
    assert "--max-num-seqs: 0 is not a positive integer" in problem


# The record


def result_of(engine: str, cell: str, **medians: float) -> dict[str, Any]:
    """Return a result whose figures vary by a tenth around these medians."""
    figures = {
        key: {"median": value, "min": value * 0.9, "max": value * 1.1}
        for key, value in medians.items()
    }
    return {
        "engine": engine,
        "shape": "qwen3-4b",
        "cell": cell,
        "label": f"the cell {cell}",
        "workload": f"work of {cell}",
        "trace": "azure_sample.csv",
        "options": {"max_model_len": 8192},
        "rounds": 3,
        "start_s": 20.0,
        "figures": figures,
        "machine": {"processor": "a CPU", "gpus": [{"name": "a GPU"}]},
        "versions": {"torch": "2.11.0", "vllm" if engine == "vllm" else "triton": "1.2"},
        "commit": "abc1234",
    }


RESULTS = [
    result_of("vllm", "top_p64", tok_s=1000, seconds=9),
    result_of("vllm", "served25", ttft_p50=40, itl_p50=8, tok_s=500, rejected=0),
    result_of("forge", "top_p64", tok_s=1250, seconds=7),
    result_of("forge", "served25", ttft_p50=20, itl_p50=10, tok_s=500, rejected=0),
    result_of("forge", "json64", tok_s=100),
]
PROVENANCE = (
    "a GPU; torch 2.11.0, vllm 1.2, triton 1.2; commit abc1234; `bench/results/made.json`. "
    "One run on one machine."
)


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    """Return the record that `join` writes for the logs of both engines."""
    logs = []
    for engine in ("forge", "vllm"):
        path = tmp_path / f"{engine}.log"
        lines = [f"RESULT {json.dumps(each)}" for each in RESULTS if each["engine"] == engine]
        path.write_text("\n".join(["noise", *lines]))
        logs.append(str(path))
    path = write_record("made", logs, tmp_path / "results")
    assert path == tmp_path / "results" / "made.json"
    return dict(json.loads(path.read_text()))


def test_the_record_has_a_ratio_of_each_figure_that_both_engines_have(
    record: dict[str, Any],
) -> None:
    """Rates are forge's over vLLM's, times the other way round."""
    assert record["benchmark"] == "traffic"
    assert record["figures"]["ratios"] == {
        "qwen3-4b": {
            "top_p64": {"tok_s": 1.25},
            "served25": {"tok_s": 1.0, "ttft_p50": 2.0, "itl_p50": 0.8},
        }
    }
    assert len(record["figures"]["cells"]) == 5
    assert "machine" not in record["figures"]["cells"][0]


def test_a_record_has_the_cells_of_one_run(tmp_path: Path) -> None:
    for problem, results in {
        "top_p64 of vllm on qwen3-4b is there twice": [RESULTS[0], RESULTS[0]],
        "ran different requests for top_p64": [RESULTS[0], {**RESULTS[2], "workload": "other"}],
        "two lines have another machine": [RESULTS[0], {**RESULTS[2], "machine": {}}],
        "two lines have another commit": [RESULTS[0], {**RESULTS[2], "commit": "other"}],
    }.items():
        with pytest.raises(InvalidConfig, match=problem):
            create_record("made", results)
    with pytest.raises(InvalidConfig, match="no traffic cell in"):
        (tmp_path / "log").write_text('RESULT {"engine": "forge", "shape": "a", "c1_tok_s": 1}')
        write_record("made", [str(tmp_path / "log")], tmp_path)
    assert join_cells([]) == {"cells": [], "ratios": {}}


def test_a_tree_without_git_gets_its_commit_when_lines_are_joined(tmp_path: Path) -> None:
    """A line with a commit keeps it, so that two commits cannot become one."""
    log = tmp_path / "log"
    lines = [{**each, "commit": "unknown"} for each in RESULTS]
    log.write_text("\n".join(f"RESULT {json.dumps(each)}" for each in lines))
    path = write_record("made", [str(log)], tmp_path, commit="fed4321")
    assert json.loads(path.read_text())["commit"] == "fed4321"
    log.write_text("\n".join(f"RESULT {json.dumps(each)}" for each in [*lines[1:], RESULTS[0]]))
    with pytest.raises(InvalidConfig, match="two lines have another commit"):
        write_record("made", [str(log)], tmp_path, commit="fed4321")


def test_the_table_has_both_engines_with_their_spreads_and_the_ratio(
    record: dict[str, Any],
) -> None:
    assert performance_tables.section("made", record) == [
        *("### made", "", PROVENANCE, "", "**qwen3-4b**", ""),
        "|  | vLLM | forge | as fast as vLLM |",
        "| --- | ---: | ---: | ---: |",
        "| the cell top_p64, tok/s | 1,000 (900 to 1,100) | 1,250 (1,125 to 1,375) | 1.25x |",
        "| the cell served25, tok/s | 500 (450 to 550) | 500 (450 to 550) | 1.00x |",
        "| the cell served25, TTFT p50, ms | 40 (36 to 44) | 20 (18 to 22) | 2.00x |",
        "| the cell served25, TPOT p50, ms | 8 (7.2 to 8.8) | 10 (9 to 11) | 0.80x |",
        "| the cell json64, tok/s | - | 100 (90 to 110) | - |",
    ]


def test_one_round_has_no_spread(record: dict[str, Any]) -> None:
    for each in record["figures"]["cells"]:
        each["rounds"] = 1 if each["engine"] == "vllm" else 2
    row = performance_tables.section("made", record)[8]
    assert row == "| the cell top_p64, tok/s | 1,000 | 1,250 (1,125 to 1,375) | 1.25x |"


ROWS = (
    SummaryRow("made", "qwen3-4b", "served25", "ttft_p50"),
    SummaryRow("absent", "qwen3-4b", "top_p64", "tok_s"),
    SummaryRow("made", "qwen3-4b", "top_p64", "tok_s"),
)


def test_the_summary_has_the_chosen_rows_and_names_their_records(record: dict[str, Any]) -> None:
    assert traffic_tables.summary_table({"made": record}, ROWS) == [
        "|  | vLLM | forge | as fast as vLLM |",
        "| --- | ---: | ---: | ---: |",
        "| qwen3-4b: the cell served25, TTFT p50, ms | 40 (36 to 44) | 20 (18 to 22) | 2.00x |",
        "| qwen3-4b: the cell top_p64, tok/s | 1,000 (900 to 1,100) | 1,250 (1,125 to 1,375) "
        "| 1.25x |",
        "",
        "From `bench/results/made.json` (commit abc1234, vLLM 1.2).",
    ]
    assert traffic_tables.summary_table({}, ROWS) == []


def test_a_page_gets_the_tables_of_traffic_and_other_results(
    record: dict[str, Any], tmp_path: Path
) -> None:
    results = performance_tables.read_results(tmp_path / "results")
    assert performance_tables.tables(results).startswith("### made\n\na GPU; torch")
    assert performance_tables.loops(record) == []


def test_forge_s_api_is_the_public_one() -> None:
    with LLM("hash", num_blocks=64) as llm:
        engine = ForgeEngine(llm, 1.5)
        params = engine.create_params({"temperature": 0.0, "logprobs": 2}, 3)
        (tokens,) = engine.generate([[65, 66]], [params])
    assert (len(tokens), engine.start_s, params.ignore_eos) == (3, 1.5, True)
