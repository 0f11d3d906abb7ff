"""Pairs and soak: variants run as named, differences have their gap, lost blocks are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge import LLM, EngineConfig
from forge.bench import pairs, soak
from forge.bench.pairs import (
    Divergence,
    GreedyOutput,
    RunVariant,
    VariantCounts,
    VariantRun,
    compare_runs,
    find_divergence,
    run_variant,
    unreached_variants,
)
from forge.bench.result_file import redacted_command
from forge.errors import RequestFailed
from forge.models.hash import HashModel
from forge.models.paged import FaultHooks
from forge.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob

CONFIG = EngineConfig(num_blocks=64, max_num_seqs=8, enable_prefix_caching=False)
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]


def parse_result(printed: str) -> dict[str, Any]:
    """Return the result in the output of a run."""
    (line,) = (line for line in printed.splitlines() if line.startswith("RESULT "))
    content: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return content


def model(seed: int) -> HashModel:
    return HashModel(num_blocks=64, seed=seed)


def create_logprob(token: int, *top: tuple[int, float]) -> TokenLogprob:
    """Return the log probability of a token with some top tokens."""
    return TokenLogprob(token, dict(top)[token], top)


# Pairs


def test_pairs_on_the_deterministic_model_are_identical(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "pairs.json"
    assert pairs.main("hash", str(path), requests=6, tokens=24) == 0
    result = parse_result(capsys.readouterr().out)["pairs"]
    assert list(result) == [
        "together / alone",
        "together / without logprobs",
        "together / in chunks",
        "together / preempted",
        "together / behind a prefix",
        "together / depth 2",
    ]
    for figures in result.values():
        assert (figures["requests"], figures["identical"], figures["tokens"]) == (6, 6, 144)
    ways = json.loads(path.read_text())["figures"]["ways"]
    assert ways["together"]["most_rows"] == 6
    assert ways["alone"]["most_rows"] == 1
    assert ways["in chunks"]["split"] > 6
    assert ways["preempted"]["preemptions"] > 0
    assert ways["behind a prefix"]["cached"] > 100


def test_two_models_diverge_and_every_first_difference_has_its_gap() -> None:
    a = run_variant(model(1), RunVariant(CONFIG, 3, logprobs=20), PROMPTS, 12)
    b = run_variant(model(2), RunVariant(CONFIG, 3), PROMPTS, 12)
    result = compare_runs(a, b)
    assert result["identical"] == 3 - len(result["divergences"]) < 3
    for each in result["divergences"]:
        tokens = a.outputs[each["request"]].tokens, b.outputs[each["request"]].tokens
        at = each["position"]
        assert tokens[0][:at] == tokens[1][:at]
        assert (each["first"], each["second"]) == (tokens[0][at], tokens[1][at])
        assert each["gap"] > 0
    assert result["max_gap"] == max(each["gap"] for each in result["divergences"])
    assert (
        result["tokens"]
        == sum(each["position"] + 1 for each in result["divergences"]) + 12 * (result["identical"])
    )


def test_a_gap_is_that_of_the_scored_side_at_the_first_difference() -> None:
    logprobs = (
        create_logprob(4, (4, -0.5), (7, -1.0), (9, -2.5)),
        create_logprob(4, (4, -0.5), (7, -1.0), (9, -2.5)),
        create_logprob(5, (5, -0.1), (6, -4.0), (9, -9.0)),
    )
    found = find_divergence(3, GreedyOutput((4, 4, 5), logprobs), GreedyOutput((4, 7, 6), ()))
    assert found == Divergence(3, 1, 4, 7, 0.5, 0.25, True)


def test_a_token_that_is_not_listed_has_the_last_listed_as_a_bound() -> None:
    logprobs = (create_logprob(4, (4, -0.5), (7, -1.0), (9, -2.5)),)
    found = find_divergence(0, GreedyOutput((4,), logprobs), GreedyOutput((8,), ()))
    assert found == Divergence(0, 0, 4, 8, 2.0, 1.0, False)


def test_equal_answers_do_not_diverge() -> None:
    assert find_divergence(0, GreedyOutput((4, 4), ()), GreedyOutput((4, 4), ())) is None


@pytest.mark.parametrize(
    ("way", "counts"),
    [
        ("together", VariantCounts(2, 0, 0, 0)),
        ("together", VariantCounts(3, 1, 0, 0)),
        ("alone", VariantCounts(2, 0, 0, 0)),
        ("in chunks", VariantCounts(3, 0, 0, 0)),
        ("preempted", VariantCounts(3, 1, 0, 0)),
        ("behind a prefix", VariantCounts(3, 0, 0, 0)),
    ],
)
def test_a_variant_that_did_not_run_as_named_is_reported(way: str, counts: VariantCounts) -> None:
    (complaint,) = unreached_variants({way: VariantRun([GreedyOutput((), ())] * 3, counts)})
    assert complaint.startswith(f"'{way}' did not happen: VariantCounts(most_rows=")


def test_the_status_is_1_where_a_variant_did_not_run_as_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two tokens fill no further block, so no sequence is preempted."""
    assert pairs.main("hash", None, requests=2, tokens=2) == 1
    assert "forge bench pairs: 'preempted' did not happen" in capsys.readouterr().err


def test_scarce_blocks_preempt_whatever_the_block_size() -> None:
    lengths = [40, 100, 7, 64]
    prompts = [[index] * length for index, length in enumerate(lengths)]
    for size in (4, 16, 64):
        config = replace(CONFIG, block_size=size)
        few = replace(config, num_blocks=pairs.tight_num_blocks(config, lengths, 64))
        device = HashModel(num_blocks=few.num_blocks, block_size=size)
        assert run_variant(device, RunVariant(few, 4), prompts, 64).counts.preemptions > 0, size


def test_a_request_that_fails_ends_the_comparison() -> None:
    def broken(plan: object) -> dict[int, str]:
        return {0: "not finite"}

    device = HashModel(num_blocks=64, faults=FaultHooks(result=broken))
    with pytest.raises(RequestFailed, match="not finite"):
        run_variant(device, RunVariant(CONFIG, 3), PROMPTS, 4)


@pytest.mark.torch
def test_pairs_run_on_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert pairs.main("tiny-qwen3", None, 4, 20, {"device": "cpu", "max_model_len": 150}) == 0
    finally:
        torch.set_num_threads(threads)
    result = parse_result(capsys.readouterr().out)
    assert result["shape"] == "tiny-qwen3"
    assert {each["requests"] for each in result["pairs"].values()} == {4}


# Soak


@pytest.mark.long
def test_a_soak_ends_every_request_and_loses_no_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "soak.json"
    assert soak.main("hash", str(path), requests=80) == 0
    result = parse_result(capsys.readouterr().out)
    assert json.loads(path.read_text())["figures"]["ended"] == 80
    assert (result["requests"], result["ended"], result["unended"]) == (80, 80, 0)
    assert result["lost_blocks"] == 0
    assert result["choices"].keys() == {"abort", "length", "stop"}
    assert 12 < result["aborts"] < 36
    assert result["preemptions"] > 0
    assert result["cached_tokens"] > 0
    assert len(result["host_mib"]) > 1


def test_a_lost_block_is_a_fault() -> None:
    """Two blocks are allocated and never freed."""
    with LLM("hash", num_blocks=64, max_num_seqs=8) as llm:
        llm.engine.scheduler.pool.allocate(2)
        figures = soak.run_soak(llm.engine, 5, seed=0)
    assert figures["lost_blocks"] == 2
    assert soak.find_faults(figures) == ["2 blocks are lost"]


def test_errors_and_requests_without_an_end_are_faults() -> None:
    figures = {"lost_blocks": 0, "unended": 3, "surplus_deltas": 1, "choices": {"error": 2}}
    assert soak.find_faults(figures) == [
        "3 requests did not end",
        "1 deltas came for choices that had ended",
        "2 choices ended in an error",
    ]


def test_completions_are_counted_once_for_each_choice() -> None:
    ledger = soak.CompletionCounts()
    ledger.add_request(Request(7, (1,), SamplingParams(n=2)))
    ledger.add_delta(Delta(7, 0, (5, 6), FinishReason.STOP))
    assert (ledger.num_ended, ledger.num_tokens, ledger.num_surplus) == (0, 2, 0)
    ledger.add_delta(Delta(7, 0, (5,)))
    ledger.add_delta(Delta(7, 1, (), FinishReason.ABORT))
    assert (ledger.num_ended, ledger.num_tokens, ledger.num_surplus) == (1, 2, 1)
    assert ledger.by_reason == {"stop": 1, "abort": 1}
    assert not ledger.open_choices


@pytest.mark.torch
def test_a_soak_runs_on_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert soak.main("tiny-qwen3", None, 60, {"device": "cpu", "max_num_seqs": 32}) == 0
    finally:
        torch.set_num_threads(threads)
    assert parse_result(capsys.readouterr().out)["ended"] == 60


# The command of a record


def test_a_record_has_the_command_without_a_key() -> None:
    words = ["serve", "http://a", "--api-key", "sesame", "--label", "x", "--api-key=sesame"]
    assert redacted_command(["/bin/forge", "bench", *words]) == (
        "forge bench serve http://a --api-key ... --label x --api-key=..."
    )


def test_a_benchmark_run_as_a_module_is_recorded_as_one() -> None:
    program = str(Path(pairs.__file__))
    assert redacted_command([program, "hash"]) == "python -m forge.bench.pairs hash"
