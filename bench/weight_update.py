"""Updates of weights, sleep and wake: how long each part takes, and whether anything is lost.

Owns the order of the measurements and the checks. Knows no cell. Weights A are random ones of the
shape, weights B others of the same names, on the device, as a trainer of the same process has them.

    start with A ─ streams open ─ pause ─ update to B ─ resume ─ first token of B ─ streams end
                   sleep and wake at both levels, an update from a file
    fresh start with B ─ equal outputs?

    python -m forge.bench.weight_update qwen3-4b --json FILE

Always true: a figure is printed only if no request was lost and every output of B is that of the
fresh start.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from forge.bench.engine_driver import greedy
from forge.bench.result_file import create_result, write_json
from forge.bench.shapes import SHAPES, write_shape
from forge.bench.workload import draw_prompts, print_result, prompt_id_range
from forge.engine_options import Options
from forge.errors import ForgeError, RequestFailed
from forge.llm import LLM
from forge.models.hf import HFModel
from forge.pause import PauseMode
from forge.request import FinishReason, Request
from forge.weights import WeightFiles

SEED = 0
GIB = 2**30
PROMPT_TOKENS = 64
OPTIONS: Options = {
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.8,
    "depth": 2,
}


def draw_weights(model: HFModel, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights of the model's names and shapes, on its device.

    Each layer adds numbers as large as its input's: outputs then depend on the whole context.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.parameters().items():
        generator = torch.Generator(parameter.device).manual_seed(seed + len(weights))
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        noise = torch.empty_like(parameter).normal_(0.0, spread, generator=generator)
        weights[name] = noise if parameter.dim() > 1 else noise + 1.0
    return weights


def generate(llm: LLM, num_tokens: int) -> list[list[int]]:
    """Return outputs of prompts that run alone, then of a batch."""
    ids = prompt_id_range(llm.engine.model.vocab_size())
    prompts = draw_prompts(Random(SEED), 12, (PROMPT_TOKENS, PROMPT_TOKENS), ids)
    batches = [[prompt] for prompt in prompts[:4]] + [prompts[4:]]
    outputs = [llm.generate(batch, greedy(num_tokens), use_tqdm=False) for batch in batches]
    return [output.token_ids for batch in outputs for output in batch]


class Streams:
    """Open requests of an engine, and the tokens that each has."""

    def __init__(self, llm: LLM, num_streams: int, num_tokens: int) -> None:
        self._engine = llm.engine
        self._num_tokens = num_tokens
        self._num_stale: list[int] = []
        self.num_received = dict.fromkeys(range(2**40, 2**40 + num_streams), 0)
        ids = prompt_id_range(self._engine.model.vocab_size())
        lengths = (PROMPT_TOKENS, 4 * PROMPT_TOKENS)
        prompts = draw_prompts(Random(SEED + 1), num_streams, lengths, ids)
        for id, prompt in zip(self.num_received, prompts, strict=True):
            self._engine.submit(Request(id, tuple(prompt), greedy(num_tokens)))

    def step(self) -> int:
        """Run one step, and return its tokens. Raises RequestFailed."""
        num_tokens = 0
        for delta in self._engine.step():
            self.num_received[delta.request_id] += len(delta.tokens)
            num_tokens += len(delta.tokens)
            if delta.finish is FinishReason.LENGTH:
                self._num_stale.append(delta.weights.num_stale_tokens)
            elif delta.finish is not None:
                raise RequestFailed(f"{delta.request_id} ended with {delta.finish}: {delta.error}")
        return num_tokens

    def finish(self) -> None:
        """Run to the end. Raises RequestFailed where a request or a token was lost."""
        while self._engine.has_work:
            self.step()
        if {*self.num_received.values()} != {self._num_tokens} or not all(self._num_stale):
            raise RequestFailed(f"tokens of each stream: {self.num_received}, {self._num_stale}")


def measure_update(
    llm: LLM, weights: Mapping[str, torch.Tensor], num_streams: int, num_tokens: int
) -> dict[str, float]:
    """Return the seconds of an update with streams open, from the pause on."""
    streams = Streams(llm, num_streams, num_tokens)
    while min(streams.num_received.values()) < num_tokens // 4:
        streams.step()
    start_s = time.perf_counter()
    llm.engine.pause(PauseMode.KEEP)
    paused_s = time.perf_counter()
    streams.step()  # tokens of the steps that were in flight
    llm.update_weights(weights)
    updated_s = time.perf_counter()
    llm.resume()
    while not streams.step():
        pass
    first_s = time.perf_counter()
    streams.finish()
    return {
        "pause_s": paused_s - start_s,
        "update_s": updated_s - paused_s,
        "first_token_s": first_s - start_s,
    }


def measure_sleep(llm: LLM, level: int, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the seconds of each part of a sleep and of the wake after it, and what was freed."""
    llm.pause()
    free_before = _free_bytes()
    sleep = llm.sleep(level)
    freed_gib = (_free_bytes() - free_before) / GIB
    wake = llm.wake()
    if level == 2:
        start_s = time.perf_counter()
        llm.update_weights(weights)
        wake["update"] = time.perf_counter() - start_s
    llm.resume()
    return {
        "sleep_s": sum(sleep.values()),
        "sleep_parts_s": sleep,
        "wake_s": sum(wake.values()),
        "wake_parts_s": wake,
        "freed_gib": freed_gib,
    }


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


class UpdatedRun(NamedTuple):
    """Figures of an engine whose weights were updated, and its outputs.

    before   outputs of weights A
    after    outputs of weights B after each way to get them, by its name
    """

    figures: dict[str, Any]
    before: list[list[int]]
    after: dict[str, list[list[int]]]


def run_updates(
    folder: Path, new_file: Path, num_streams: int, num_tokens: int, options: Options
) -> UpdatedRun:
    """Measure updates and sleeps of an engine that starts with weights A; write B to the file."""
    with LLM(str(folder), **options) as llm:
        model = llm.engine.model
        assert isinstance(model, HFModel), f"{folder} is a checkpoint"
        weights = draw_weights(model, SEED + 1)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, new_file)
        before = generate(llm, num_tokens)
        figures: dict[str, Any] = {
            "weights_gib": sum(each.nbytes for each in weights.values()) / GIB,
            **measure_update(llm, weights, num_streams, num_tokens),
        }
        after = {"device": generate(llm, num_tokens)}
        start_s = time.perf_counter()
        llm.update_weights(WeightFiles((str(new_file),)))
        figures["file_update_s"] = time.perf_counter() - start_s
        after["file"] = generate(llm, num_tokens)
        for level in (1, 2, 1):  # the second sleep of level 1 has its host memory
            figures[f"level_{level}"] = measure_sleep(llm, level, weights)
            after[f"level {level}"] = generate(llm, num_tokens)
    return UpdatedRun(figures, before, after)


def run(shape: str, num_streams: int, num_tokens: int, options: Options) -> dict[str, Any]:
    """Return the figures of one shape. Raises RequestFailed where something differs or is lost."""
    options = {**OPTIONS, **options}
    dummy: Options = {**options, "load_format": "dummy"}
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(shape, Path(root, "a"))
        new_folder = write_shape(shape, Path(root, "b"))
        new_file = new_folder / "model.safetensors"
        figures, before, after = run_updates(folder, new_file, num_streams, num_tokens, dummy)
        gc.collect()  # The fresh start takes the memory of the engine before.
        start_s = time.perf_counter()
        with LLM(str(new_folder), **options) as llm:
            figures["fresh_start_s"] = time.perf_counter() - start_s
            expected = generate(llm, num_tokens)
    for name, tokens in after.items():
        if tokens != expected:
            raise RequestFailed(f"after the update ({name}) outputs are not those of a fresh start")
    if before == expected:
        raise RequestFailed("both weights give the same outputs, so nothing was compared")
    return {"shape": shape, "streams": num_streams, **figures}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> int:
    """Measure, print the result and write the record."""
    parser = argparse.ArgumentParser(prog="python -m forge.bench.weight_update")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each output")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    try:
        figures = _rounded(run(args.shape, args.streams, args.tokens, {"device": args.device}))
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_result(figures)
    if args.json is not None:
        write_json(args.json, create_result("weight_update", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
