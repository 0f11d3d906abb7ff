"""Pairs and soak: each way really happens, differences are told with their gap, losses are seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import pairs, soak
from bench.pairs import Answer, Divergence, Run, Seen, Way, compared, divergence, missed, run
from bench.record import command_of
from forge import LLM, EngineConfig
from forge.errors import RequestFailed
from forge.models.hash import HashModel
from forge.models.logits import Faults
from forge.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob

CONFIG = EngineConfig(num_blocks=64, max_num_seqs=8, enable_prefix_caching=False)
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]


def result(printed: str) -> dict[str, Any]:
    """The one result of a run's output."""
    (line,) = (line for line in printed.splitlines() if line.startswith("RESULT "))
    told: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return told


def model(seed: int) -> HashModel:
    return HashModel(num_blocks=64, seed=seed)


def scored(token: int, *top: tuple[int, float]) -> TokenLogprob:
    """The log probability of a token that is among the most likely ones."""
    return TokenLogprob(token, dict(top)[token], top)


# Pairs


def test_pairs_on_the_deterministic_model_are_identical(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "pairs.json"
    assert pairs.main("hash", str(path), requests=6, tokens=24) == 0
    told = result(capsys.readouterr().out)["pairs"]
    assert list(told) == [
        "together / alone",
        "together / without logprobs",
        "together / in chunks",
        "together / preempted",
        "together / behind a prefix",
        "together / depth 2",
    ]
    for figures in told.values():
        assert (figures["requests"], figures["identical"], figures["tokens"]) == (6, 6, 144)
    ways = json.loads(path.read_text())["figures"]["ways"]
    assert ways["together"]["most_rows"] == 6
    assert ways["alone"]["most_rows"] == 1
    assert ways["in chunks"]["split"] > 6
    assert ways["preempted"]["preemptions"] > 0
    assert ways["behind a prefix"]["cached"] > 100


def test_two_models_diverge_and_every_first_difference_has_its_gap() -> None:
    a = run(model(1), Way(CONFIG, 3, logprobs=20), PROMPTS, 12)
    b = run(model(2), Way(CONFIG, 3), PROMPTS, 12)
    told = compared(a, b)
    assert told["identical"] == 3 - len(told["divergences"]) < 3
    for each in told["divergences"]:
        tokens = a.answers[each["request"]].tokens, b.answers[each["request"]].tokens
        at = each["position"]
        assert tokens[0][:at] == tokens[1][:at]
        assert (each["first"], each["second"]) == (tokens[0][at], tokens[1][at])
        assert each["gap"] > 0
    assert told["max_gap"] == max(each["gap"] for each in told["divergences"])
    assert (
        told["tokens"]
        == sum(each["position"] + 1 for each in told["divergences"]) + 12 * (told["identical"])
    )


def test_a_gap_is_that_of_the_scored_side_at_the_first_difference() -> None:
    logprobs = (
        scored(4, (4, -0.5), (7, -1.0), (9, -2.5)),
        scored(4, (4, -0.5), (7, -1.0), (9, -2.5)),
        scored(5, (5, -0.1), (6, -4.0), (9, -9.0)),
    )
    found = divergence(3, Answer((4, 4, 5), logprobs), Answer((4, 7, 6), ()))
    assert found == Divergence(3, 1, 4, 7, 0.5, 0.25, True)


def test_a_token_that_is_not_listed_has_the_last_listed_as_a_bound() -> None:
    logprobs = (scored(4, (4, -0.5), (7, -1.0), (9, -2.5)),)
    found = divergence(0, Answer((4,), logprobs), Answer((8,), ()))
    assert found == Divergence(0, 0, 4, 8, 2.0, 1.0, False)


def test_equal_answers_do_not_diverge() -> None:
    assert divergence(0, Answer((4, 4), ()), Answer((4, 4), ())) is None


@pytest.mark.parametrize(
    ("way", "seen"),
    [
        ("together", Seen(2, 0, 0, 0)),
        ("together", Seen(3, 1, 0, 0)),
        ("alone", Seen(2, 0, 0, 0)),
        ("in chunks", Seen(3, 0, 0, 0)),
        ("preempted", Seen(3, 1, 0, 0)),
        ("behind a prefix", Seen(3, 0, 0, 0)),
    ],
)
def test_a_way_that_did_not_happen_is_told(way: str, seen: Seen) -> None:
    (complaint,) = missed({way: Run([Answer((), ())] * 3, seen)})
    assert complaint.startswith(f"'{way}' did not happen: Seen(most_rows=")


def test_the_status_is_1_where_a_way_did_not_happen(capsys: pytest.CaptureFixture[str]) -> None:
    """Two tokens fill no further block, so nobody is preempted."""
    assert pairs.main("hash", None, requests=2, tokens=2) == 1
    assert "forge bench pairs: 'preempted' did not happen" in capsys.readouterr().err


def test_scarce_blocks_preempt_whatever_the_block_size() -> None:
    lengths = [40, 100, 7, 64]
    prompts = [[index] * length for index, length in enumerate(lengths)]
    for size in (4, 16, 64):
        config = replace(CONFIG, block_size=size)
        few = replace(config, num_blocks=pairs.scarce(config, lengths, 64))
        device = HashModel(num_blocks=few.num_blocks, block_size=size)
        assert run(device, Way(few, 4), prompts, 64).seen.preemptions > 0, size


def test_a_request_that_fails_ends_the_comparison() -> None:
    def broken(plan: object) -> dict[int, str]:
        return {0: "not finite"}

    device = HashModel(num_blocks=64, faults=Faults(result=broken))
    with pytest.raises(RequestFailed, match="not finite"):
        run(device, Way(CONFIG, 3), PROMPTS, 4)


@pytest.mark.torch
def test_pairs_run_on_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert pairs.main("tiny-qwen3", None, 4, 20, {"device": "cpu", "max_model_len": 150}) == 0
    finally:
        torch.set_num_threads(threads)
    told = result(capsys.readouterr().out)
    assert told["shape"] == "tiny-qwen3"
    assert {each["requests"] for each in told["pairs"].values()} == {4}


# Soak


@pytest.mark.long
def test_a_soak_ends_every_request_and_loses_no_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "soak.json"
    assert soak.main("hash", str(path), requests=80) == 0
    told = result(capsys.readouterr().out)
    assert json.loads(path.read_text())["figures"]["ended"] == 80
    assert (told["requests"], told["ended"], told["unended"]) == (80, 80, 0)
    assert told["lost_blocks"] == 0
    assert told["choices"].keys() == {"abort", "length", "stop"}
    assert 12 < told["aborts"] < 36
    assert told["preemptions"] > 0
    assert told["cached_tokens"] > 0
    assert len(told["host_mib"]) > 1


def test_a_lost_block_is_a_fault() -> None:
    """Somebody takes two blocks and never gives them back."""
    with LLM("hash", num_blocks=64, max_num_seqs=8) as llm:
        llm.engine.scheduler.pool.take(2)
        figures = soak.soak(llm.engine, 5, seed=0)
    assert figures["lost_blocks"] == 2
    assert soak.faults(figures) == ["2 blocks are lost"]


def test_errors_and_requests_without_an_end_are_faults() -> None:
    figures = {"lost_blocks": 0, "unended": 3, "surplus_deltas": 1, "choices": {"error": 2}}
    assert soak.faults(figures) == [
        "3 requests did not end",
        "1 deltas came for choices that had ended",
        "2 choices ended in an error",
    ]


def test_a_ledger_counts_each_choice_once() -> None:
    ledger = soak.Ledger()
    ledger.begin(Request(7, (1,), SamplingParams(n=2)))
    ledger.read(Delta(7, 0, (5, 6), FinishReason.STOP))
    assert (ledger.ended, ledger.tokens, ledger.surplus) == (0, 2, 0)
    ledger.read(Delta(7, 0, (5,)))
    ledger.read(Delta(7, 1, (), FinishReason.ABORT))
    assert (ledger.ended, ledger.tokens, ledger.surplus) == (1, 2, 1)
    assert ledger.finishes == {"stop": 1, "abort": 1}
    assert not ledger.open


@pytest.mark.torch
def test_a_soak_runs_on_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert soak.main("tiny-qwen3", None, 60, {"device": "cpu", "max_num_seqs": 32}) == 0
    finally:
        torch.set_num_threads(threads)
    assert result(capsys.readouterr().out)["ended"] == 60


# The command of a record


def test_a_record_has_the_command_without_a_key() -> None:
    words = ["serve", "http://a", "--api-key", "sesame", "--label", "x", "--api-key=sesame"]
    assert command_of(["/bin/forge", "bench", *words]) == (
        "forge bench serve http://a --api-key ... --label x --api-key=..."
    )


def test_a_benchmark_run_as_a_module_is_recorded_as_one() -> None:
    program = str(Path(pairs.__file__))
    assert command_of([program, "hash"]) == "python -m bench.pairs hash"
