"""Returning prefixes on the deterministic model: every figure is proved to be of its tier."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge import LLM
from forge.bench import kv_plot, kv_record, kv_returning, vllm_returning
from forge.bench.block_folder import BlockFolder, read_storage_bytes
from forge.bench.kv_returning import ForgeTiers, engine_options, parse_lengths
from forge.bench.peers import join_results, parse_results
from forge.bench.returning_prefix import (
    EXPECTED,
    NEW_TOKENS,
    ReturningRun,
    Sample,
    create_load,
    find_problem,
)
from forge.bench.shapes import kv_bytes_per_token
from forge.bench.workload import prompt_id_range
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.request import CachedTokens

LENGTHS = (32, 64, 128)
LOAD = create_load(LENGTHS, 2, 16)


def run_load(llm: LLM) -> ReturningRun:
    """Return a complete run of LOAD on the LLM."""
    run = ReturningRun(ForgeTiers(llm, prompt_id_range(llm.engine.model.vocab_size())), LOAD)
    run.fill()
    for _ in range(LOAD.repeats):
        run.cycle()
    return run


# The run.


def test_every_sample_of_a_run_is_of_its_tier() -> None:
    with LLM("hash", **engine_options("hash", LOAD, {})) as llm:
        run = run_load(llm)
    assert {tier for tier, _ in run.samples} == {"miss", "device", "host"}
    for (tier, length), samples in run.samples.items():
        assert [each.tokens for each in samples] == [EXPECTED[tier](length)] * LOAD.repeats
        figures = run.figures(tier, length)
        times_ms = [each.seconds * 1e3 for each in samples]
        assert figures["ttft_ms_min"] == pytest.approx(min(times_ms), abs=1e-3)
        assert figures["ttft_ms_max"] == pytest.approx(max(times_ms), abs=1e-3)


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 8192])
def test_prefixes_are_in_host_memory_after_one_fill(
    max_num_batched_tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that many sequences need at once would displace what is not stored yet."""
    load = create_load((64, 256, 1024), 1, 16)
    options = engine_options(
        "hash", load, {"depth": 2, "max_num_batched_tokens": max_num_batched_tokens}
    )
    with LLM("hash", **options) as llm:
        ReturningRun(ForgeTiers(llm, prompt_id_range(llm.engine.model.vocab_size())), load).fill()
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2].split("  ")[-1] for line in shown] == [
        "filled; not in host memory: none"
    ]


def test_tokens_from_elsewhere_are_an_error_and_no_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without host memory a displaced prefix is computed again."""
    options = engine_options("hash", LOAD, {})
    del options["kv_host_gib"]
    with LLM("hash", **options) as llm:
        run = run_load(llm)
    assert run.figures("host", 64) == {
        "tier": "host",
        "prefix_tokens": 64,
        "samples": 2,
        "error": "2 of 2 samples: 0 tokens came from the device, 0 from host memory, 0 from files",
    }
    assert "ttft_ms" in run.figures("device", 64)
    assert "not in host memory: [32, 64, 128]" in capsys.readouterr().out


def test_one_sample_from_elsewhere_is_enough_for_an_error() -> None:
    with LLM("hash", **engine_options("hash", LOAD, {})) as llm:
        run = ReturningRun(ForgeTiers(llm, (64, 250)), LOAD)
    run.add("host", 32, Sample(0.1, CachedTokens(host=32)))
    run.add("host", 32, Sample(0.1, CachedTokens(device=16, host=16)))
    assert run.figures("host", 32)["error"].startswith("1 of 2 samples: 16 tokens came from the ")


def test_a_sample_with_a_problem_of_its_own_is_none_of_its_tier() -> None:
    sample = Sample(0.1, CachedTokens(disk=32), "9 % of the bytes were read from storage")
    assert find_problem("file_cold", 32, sample) == sample.problem
    assert find_problem("file_cold", 32, sample._replace(problem=None)) is None


def test_prefixes_are_stored_in_groups_of_half_the_device() -> None:
    assert LOAD.num_blocks == 2 * 13
    assert LOAD.groups() == [[128, 64], [32]]
    assert create_load((1024, 2048, 4096, 8192, 16_384, 32_768), 5, 64).groups() == [
        [32_768],
        [16_384, 8192, 4096, 2048, 1024],
    ]


@pytest.mark.parametrize(
    ("lengths", "num_blocks", "message"),
    [
        ((32, 40), None, "lengths: 40 is not a multiple of the block size 16, .* Give 48, say"),
        ((32, 64), 17, "num_blocks: 17 blocks are less than twice the 9 .* Give 18 or more"),
    ],
)
def test_a_load_that_blocks_cannot_hold_is_refused(
    lengths: Sequence[int], num_blocks: int | None, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        create_load(lengths, 2, 16, num_blocks)


def test_lengths_that_do_not_fit_the_model_are_left_out() -> None:
    assert parse_lengths((1024, 2048), 2048, "lengths") == (1024,)
    with pytest.raises(InvalidConfig, match="none of 1024, 2048 and 64 new tokens fits in 1000"):
        parse_lengths((1024, 2048), 1000, "lengths")


# The command.


def run_command(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command on `hash`. Returns the exit status and the record."""
    record = folder / "record.json"
    status = main(["bench", "kv", "returning", "hash", *words, "--json", str(record)])
    content: dict[str, Any] = json.loads(record.read_text())
    return status, content


def test_the_record_has_an_entry_for_each_tier_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run_command(tmp_path, "--lengths", "32,64", "--repeats", "2")
    assert (status, record["benchmark"]) == (0, "kv_returning")
    entries = record["figures"]["entries"]
    assert [(each["tier"], each["prefix_tokens"]) for each in entries] == [
        (tier, length) for tier in ("miss", "device", "host") for length in (32, 64)
    ]
    assert all(each["prefix_bytes"] == 4 * each["prefix_tokens"] for each in entries)
    assert {each["tier"] for each in record["figures"]["break_even"]} == {"device", "host"}
    # The lines are complete: a joined record has the same entries.
    printed = parse_results(capsys.readouterr().out.splitlines())
    assert kv_record.create_record("mine", printed)["figures"]["entries"] == entries


def test_files_are_read_for_each_sample_of_their_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a file system can leave out its page cache depends on the machine."""
    status, record = run_command(
        tmp_path,
        *("--lengths", "32,64", "--file-lengths", "32", "--repeats", "2"),
        *("--kv-disk-path", str(tmp_path / "files")),
    )
    entries = {(each["tier"], each["prefix_tokens"]): each for each in record["figures"]["entries"]}
    assert {("file_cached", 32), ("file_cold", 32)} == {at for at in entries if "file" in at[0]}
    errors = [each["error"] for each in entries.values() if "error" in each]
    assert all("read from storage" in error for error in errors), errors
    assert status == (1 if errors else 0)
    assert "6 blocks are in files" in capsys.readouterr().out


@pytest.mark.torch
def test_a_checkpoint_has_a_bound_from_a_plain_copy_of_the_same_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    words = "tiny-qwen3 --device cpu --lengths 32 --block-size 16 --repeats 1"
    assert main(["bench", "kv", "returning", *words.split()]) == 0
    results = parse_results(capsys.readouterr().out.splitlines())
    assert [each["tier"] for each in results] == ["miss", "device", "host"]
    (bound,) = kv_record.bounds(results)
    assert bound["plain_copy_gb_s"] > 0 and bound["host_ms"] == results[2]["ttft_ms"]
    assert results[2]["prefix_bytes"] == 32 * 512


def test_no_block_of_a_prefix_stays_on_the_device_while_files_are_measured(tmp_path: Path) -> None:
    """A block that stays would end the run of blocks that are read from files."""
    path = str(tmp_path / "files")
    with LLM("hash", **engine_options("hash", LOAD, {"kv_disk_path": path})) as llm:
        tiers = ForgeTiers(llm, prompt_id_range(llm.engine.model.vocab_size()))
        run = ReturningRun(tiers, LOAD)
        run.fill()
        kv_returning.settle_files(run, BlockFolder(path))
        reporter = kv_returning.Reporter(run, {}, {}, lambda length: {}, [])
        for shift in range(6):
            run.decode(16 * shift + 1)  # another block of the pool is the first one
            for length in LENGTHS:
                run.measure("device", length)
            kv_returning.measure_files(run, reporter, tiers, BlockFolder(path), LENGTHS, 4)
    for (tier, length), samples in run.samples.items():
        if tier.startswith("file"):
            assert {each.tokens for each in samples} == {CachedTokens(disk=length)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kv-host-gib 0.0000001", "--kv-host-gib: host memory has 1 blocks, the prefixes have 6"),
        ("--file-lengths 48", "--file-lengths: 48 is none of the lengths"),
        ("--num-blocks 3", "--num-blocks: 3 blocks are less than twice the 9"),
        ("--max-model-len 64", "--lengths: none of 32, 64 and 64 new tokens fits in 64"),
        ("--repeats 0", "--repeats: 0 is not a positive integer"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["bench", "kv", "returning", "hash", "--lengths", "32,64", *words.split()])
    assert (status, message in capsys.readouterr().err) == (2, True)


def test_files_of_an_unknown_size_are_refused(tmp_path: Path) -> None:
    options = {"kv_disk_path": str(tmp_path / "files")}
    with pytest.raises(InvalidConfig, match="nothing says how many bytes a block has"):
        kv_returning.main("owner/name", None, (128,), (), 1, None, options)  # type: ignore[arg-type]


def test_a_folder_counts_complete_files_and_leaves_them(tmp_path: Path) -> None:
    for name in ("a" * 128, f".{'b' * 128}.1.tmp", ".lock"):
        (tmp_path / name).write_bytes(b"content")
    folder = BlockFolder(str(tmp_path))
    folder.drop_page_cache()
    assert folder.names() == ["a" * 128]
    assert (tmp_path / folder.names()[0]).read_bytes() == b"content"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
def test_bytes_read_from_storage_never_fall() -> None:
    before, after = read_storage_bytes(), read_storage_bytes()
    assert before is not None and after is not None and before <= after


def test_bytes_of_a_position_are_those_of_the_shape(tmp_path: Path) -> None:
    assert kv_bytes_per_token("qwen3-4b") == 2 * 36 * 8 * 128 * 2
    assert kv_bytes_per_token("tiny-qwen3") == 2 * 2 * 2 * 16 * 4
    config = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    assert kv_bytes_per_token(str(tmp_path)) == 2 * 3 * 4 * 8 * 2
    assert kv_bytes_per_token("hash") is None


# What follows from the entries.


def entry(tier: str, length: int, ms: float, engine: str = "forge", **more: Any) -> dict[str, Any]:
    """Return an entry, of 1 MB for each token."""
    figures = {"ttft_ms": ms, "prefix_bytes": 10**6 * length, **more}
    return {"engine": engine, "shape": "a", "tier": tier, "prefix_tokens": length, **figures}


ENTRIES = [
    *(entry("miss", 100, 20.0), entry("miss", 200, 40.0)),
    *(entry("device", 100, 10.0), entry("device", 200, 10.0)),
    entry("host", 100, 22.0, plain_copy_gb_s=10.0),
    entry("host", 200, 34.3, plain_copy_gb_s=10.0),
]


def test_the_bound_is_a_plain_copy_at_nine_tenths_and_two_milliseconds() -> None:
    """100 MB at 9 GB/s are 11.11 ms, so the bounds are 23.1 and 34.2 ms."""
    found = [
        (each["prefix_tokens"], each["bound_ms"], each["is_within"], each["load_gb_s"])
        for each in kv_record.bounds(ENTRIES)
    ]
    assert found == [(100, 23.111, True, 8.33), (200, 34.222, False, 8.23)]


def test_the_break_even_length_lies_between_two_lengths() -> None:
    """Host memory is 2 ms slower at 100 tokens, and 5.7 ms quicker at 200."""
    found = {each["tier"]: each for each in kv_record.break_even(ENTRIES)}
    assert found["host"]["tokens"] == 126
    assert found["host"]["ratio"] == {"100": 0.909, "200": 1.166}
    assert found["device"]["tokens"] == 100
    assert kv_record.last_crossing([(100, 1.0), (200, -1.0)]) is None


def test_entries_with_an_error_have_neither_bound_nor_ratio() -> None:
    broken = {**entry("host", 100, 1.0), "error": "2 of 2 samples"}
    assert kv_record.bounds([*ENTRIES[:4], broken]) == []
    assert [each["tier"] for each in kv_record.break_even([*ENTRIES[:4], broken])] == ["device"]


def test_two_engines_are_compared_at_lengths_that_both_have() -> None:
    theirs = [entry("host", 100, 33.0, "vllm"), entry("host", 300, 1.0, "vllm")]
    assert kv_record.ratios([*ENTRIES, *theirs]) == [
        {"shape": "a", "tier": "host", "prefix_tokens": 100, "ratio": 1.5}
    ]


def write_log(path: Path, *results: dict[str, Any]) -> str:
    shared = {"benchmark": "kv_returning", "machine": {"cores": 2}, "versions": {}, "commit": "a1"}
    path.write_text(
        "".join(f"RESULT {json.dumps({**shared, **each})}\n" for each in results) + "noise\n"
    )
    return str(path)


def test_lines_of_two_engines_are_one_record(tmp_path: Path) -> None:
    ours = write_log(tmp_path / "forge.log", *ENTRIES)
    theirs = write_log(tmp_path / "vllm.log", entry("host", 100, 33.0, "vllm"))
    path = kv_record.write_record("made", [ours, theirs], tmp_path)
    record = json.loads(path.read_text())
    assert len(record["figures"]["entries"]) == len(ENTRIES) + 1
    assert record["figures"]["ratios"][0]["ratio"] == 1.5
    assert (record["commit"], record["machine"]) == ("a1", {"cores": 2})
    # A record of the fixed workloads leaves them out.
    lines = Path(ours).read_text().splitlines()
    assert join_results(parse_results(lines)) == {"cells": [], "levels": []}


def test_lines_of_a_tree_without_git_get_their_commit(tmp_path: Path) -> None:
    log = write_log(tmp_path / "forge.log", *({**each, "commit": "unknown"} for each in ENTRIES))
    path = kv_record.write_record("made", [log], tmp_path, "b2")
    assert json.loads(path.read_text())["commit"] == "b2"


def test_lines_of_two_runs_are_refused(tmp_path: Path) -> None:
    log = write_log(tmp_path / "forge.log", *ENTRIES)
    with pytest.raises(InvalidConfig, match="is there twice"):
        kv_record.write_record("made", [log, log], tmp_path)
    other = write_log(tmp_path / "other.log", {**entry("host", 300, 1.0), "machine": {"cores": 4}})
    with pytest.raises(InvalidConfig, match="two lines have another machine"):
        kv_record.write_record("made", [log, other], tmp_path)
    with pytest.raises(InvalidConfig, match="no returning prefix in"):
        kv_record.write_record("made", [write_log(tmp_path / "none.log")], tmp_path)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plot_has_a_line_for_each_tier_of_each_engine(tmp_path: Path) -> None:
    theirs = [entry("miss", 100, 30.0, "vllm"), entry("host", 100, 33.0, "vllm")]
    figures = kv_record.create_figures([*ENTRIES, *theirs])
    picture = kv_plot.draw_returning(figures)
    times, gains = picture.axes
    assert len(times.get_lines()) == 5
    assert len(gains.get_lines()) == 2 + 1  # and the line at 1
    kv_plot.write_plot(str(tmp_path / "made.png"), figures)
    assert (tmp_path / "made.png").stat().st_size > 1000


# vLLM.

STAND_IN = '''
"""A package with the calls of vLLM 0.26 that the benchmark makes, on forge's model."""
from types import SimpleNamespace
from forge import LLM as Forge, SamplingParams as Params

KNOWN = {
    "model", "load_format", "skip_tokenizer_init", "max_model_len", "gpu_memory_utilization",
    "enable_prefix_caching", "disable_log_stats", "max_num_seqs", "block_size",
    "num_gpu_blocks_override", "kv_offloading_backend", "kv_offloading_size",
}

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, **options):
        assert options.keys() <= KNOWN, options.keys() - KNOWN
        assert options["kv_offloading_backend"] == "native" and options["kv_offloading_size"] > 0
        assert options["enable_prefix_caching"] and not options["disable_log_stats"]
        self.loaded = 0
        self.llm = Forge(
            "hash", block_size=options["block_size"], max_num_seqs=options["max_num_seqs"],
            num_blocks=options["num_gpu_blocks_override"], max_model_len=options["max_model_len"],
            kv_host_gib=0.001,
        )

    def generate(self, prompts, params, use_tqdm):
        wanted = [
            Params(temperature=0.0, max_tokens=each.max_tokens, ignore_eos=each.ignore_eos)
            for each in params
        ]
        done = self.llm.generate([each["prompt_token_ids"] for each in prompts], wanted)
        self.loaded += sum(each.cached_tokens.host for each in done)
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=each.token_ids)],
                num_cached_tokens=each.cached_tokens.total,
            )
            for each in done
        ]

    def get_metrics(self):
        name = "vllm:prompt_tokens_by_source"
        return [
            SimpleNamespace(name=name, labels={"source": "local_cache_hit"}, value=7),
            SimpleNamespace(
                name=name, labels={"source": "external_kv_transfer"}, value=self.loaded
            ),
        ]
'''


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a folder that describes a model, with a package in the place of vLLM."""
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 250}')
    yield str(folder)
    for name in ("vllm", "vllm.sampling_params"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM itself is installed")
def test_vllm_runs_the_same_requests_and_says_where_tokens_came_from(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm_returning.run_cli([model, "--lengths", "64,128", "--repeats", "2"]) == 0
    results = parse_results(capsys.readouterr().out.splitlines())
    assert [(each["tier"], each["prefix_tokens"]) for each in results] == [
        (tier, length) for tier in ("miss", "device", "host") for length in (64, 128)
    ]
    assert all("ttft_ms" in each and each["engine"] == "vllm" for each in results)


def test_without_vllm_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "config.json").write_text('{"vocab_size": 250}')
    assert vllm_returning.run_cli([str(tmp_path), "--lengths", "64"]) == 1
    assert "vllm is not installed" in capsys.readouterr().err


def test_a_vllm_that_counts_no_sources_gives_errors_and_no_figures() -> None:
    class Peer:
        ids = (10, 90)

        def greedy_params(self, output: int) -> int:
            return output

        def counter(self, name: str, labels: dict[str, str]) -> None:
            return None

        def run_outputs(self, prompts: Any, params: Any) -> list[Any]:
            class Output:
                num_cached_tokens = 32

            return [Output()]

    sample = vllm_returning.VLLMTiers(Peer()).measure([1] * (32 + NEW_TOKENS))  # type: ignore[arg-type]
    assert sample.tokens == CachedTokens(device=32)
    assert sample.problem == vllm_returning.UNKNOWN_SOURCE
    assert find_problem("device", 32, sample) == sample.problem
