"""Peers run the same work: vLLM's step loop, on an engine with right and wrong lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge import LLM
from forge.bench import peers
from forge.bench.engine_driver import EngineDriver
from forge.bench.transformers_peer import measure_transformers
from forge.bench.vllm_peer import VLLMStepLoop
from forge.bench.workload import (
    BatchCell,
    Cells,
    PrefixCell,
    SteadyCell,
    SweepCell,
    draw_prompts,
    run_closed_levels,
    run_engine_closed_loop,
)
from forge.errors import InvalidConfig, RequestFailed

TINY = Cells(
    seed=0,
    warm_up=(),
    ttft=(),
    repeats=1,
    throughput=(BatchCell("c1", 1, (10, 10), (6, 6)), BatchCell("c3", 3, (300, 300), (12, 12))),
    rounds=2,
    mixed=(),
    steady=SteadyCell((), 0, 0),
    prefix=(),
    sweep=SweepCell((1, 3), 10, 6, 2),
)


class FakeVLLMEngine:
    """The interface of a vLLM engine that its step loop uses: one token a request in each step.

    tokens_per_step   tokens that come at once
    output_length     parameters of a request -> tokens after which it ends
    """

    def __init__(self, pieces: int = 1, ends: Callable[[int], int] = lambda output: output) -> None:
        self.tokens_per_step = pieces
        self.output_length = ends
        self.prompts: list[list[int]] = []
        self.in_flight: list[int] = []
        self._remaining: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, Any], params: int) -> None:
        """Start the request with the next step."""
        assert isinstance(name, str)
        assert prompt["type"] == "token"
        assert name not in self._remaining
        self.prompts.append(prompt["prompt_token_ids"])
        self._remaining[name] = self.output_length(params)

    def step(self) -> list[Any]:
        """Return the new tokens of each request in the types of vLLM."""
        assert self._remaining, "a step without a request would wait indefinitely"
        self.in_flight.append(len(self._remaining))
        outputs_of_step = []
        for name, left in list(self._remaining.items()):
            tokens = min(self.tokens_per_step, left)
            self._remaining[name] -= tokens
            if finished := self._remaining[name] == 0:
                del self._remaining[name]
            outputs = [SimpleNamespace(token_ids=[7] * tokens)]
            outputs_of_step.append(
                SimpleNamespace(request_id=name, outputs=outputs, finished=finished)
            )
        return outputs_of_step


def run_loop(
    engine: FakeVLLMEngine, prompts: Sequence[Sequence[int]], output: int, streams: int
) -> Any:
    """Run the closed loop on this engine."""
    steps = VLLMStepLoop(engine, lambda tokens: tokens)
    return run_engine_closed_loop(steps.submit, steps.step, prompts, output, streams)


# vLLM's step loop


def test_a_closed_loop_keeps_its_concurrency_in_vllm() -> None:
    """Nine requests, three at a time, four tokens each: three times four steps of three."""
    engine = FakeVLLMEngine()
    prompts = draw_prompts(random.Random(0), 9, (5, 5), (10, 90))
    streams, wall_s = run_loop(engine, prompts, 4, 3)
    assert engine.in_flight == [3] * 12
    assert engine.prompts == prompts
    assert [(stream.num_tokens, len(stream.chunk_times_s)) for stream in streams] == [(4, 4)] * 9
    assert wall_s > 0


def test_tokens_that_come_together_have_one_stamp() -> None:
    (stream,), _ = run_loop(FakeVLLMEngine(pieces=2), [[5, 6]], 5, 1)
    assert (stream.num_tokens, len(stream.chunk_times_s)) == (5, 3)
    assert [stream.start_s, *stream.chunk_times_s] == sorted(
        [stream.start_s, *stream.chunk_times_s]
    )


@pytest.mark.parametrize(("wrong", "due"), [(-1, 1), (1, -1)])
def test_a_request_of_vllm_with_another_length_ends_the_measurement(wrong: int, due: int) -> None:
    engine = FakeVLLMEngine(pieces=8, ends=lambda output: output + wrong)
    with pytest.raises(RequestFailed, match=f"ended with {due} tokens due"):
        run_loop(engine, [[5, 6]], 4, 1)


def test_the_sweep_has_a_level_for_each_concurrency_after_a_warm_up() -> None:
    engine = FakeVLLMEngine()
    steps = VLLMStepLoop(engine, lambda tokens: tokens)
    levels = run_closed_levels(steps.submit, steps.step, TINY, (10, 90), (1, 3))
    assert [each["c"] for each in levels] == [1, 3]
    assert engine.in_flight == [4] * 6 + [1] * 12 + [3] * 12


def test_both_engines_get_the_same_prompts_in_the_same_order() -> None:
    """The prompts of forge bench sweep and those sent to vLLM, the warm-up included."""
    given: list[list[int]] = []
    engine = FakeVLLMEngine()
    steps = VLLMStepLoop(engine, lambda tokens: tokens)
    with LLM("hash", enable_prefix_caching=False) as llm:
        drive = EngineDriver(llm.engine)

        def submit(prompt: Sequence[int], output: int) -> int:
            given.append(list(prompt))
            return drive.submit(prompt, output)

        run_closed_levels(submit, drive.step, TINY, (10, 90), (1, 3))
    run_closed_levels(steps.submit, steps.step, TINY, (10, 90), (1, 3))
    assert given == engine.prompts


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_sweep_where_vllm_is_missing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    assert peers.run_cli(["vllm-sweep", "tiny-qwen3", "--concurrency", "1,2"]) == 1
    assert "vllm: vllm is not installed" in capsys.readouterr().err


# transformers


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # transformers' own, which change with its version
def test_transformers_runs_the_throughput_cells_and_counts_their_tokens(tmp_path: Path) -> None:
    """Three prompts of 300 tokens cross a block of 256; run_batch asserts each length."""
    for needed in ("torch", "transformers", "psutil"):
        pytest.importorskip(needed)
    figures = measure_transformers("tiny-qwen3", TINY, str(tmp_path), "paged|sdpa", {})
    assert list(figures) == ["engine", "shape", "attention", "c1_tok_s", "c3_tok_s"]
    assert figures["c1_tok_s"] > 0
    assert figures["c3_tok_s"] > 0


def test_transformers_refuses_cells_that_it_cannot_run() -> None:
    cells = TINY._replace(prefix=(PrefixCell("prefix_64_8", 64, 8, 3),), ttft=(8,))
    with pytest.raises(InvalidConfig, match="ttft_8, ttft_prefix_64_8 cannot be run on transf"):
        measure_transformers("tiny-qwen3", cells, "", "paged|sdpa", {})


def test_transformers_takes_three_cells_where_none_is_named() -> None:
    """The largest is left out: it would take minutes."""
    chosen = peers.create_parser().parse_args(["transformers", "qwen3-4b"]).cells
    assert Cells.read().select(chosen.split(",")).names == ("c1", "c8", "c64")


def test_options_of_a_peer_are_json() -> None:
    words = ["transformers", "qwen3-4b", "--options", json.dumps({"use_cuda_graph": True})]
    assert peers.create_parser().parse_args(words).options == {"use_cuda_graph": True}
