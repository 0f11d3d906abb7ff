"""The same cells on other engines, and a record that compares the results of one run.

Owns the calls to peers and the merge of RESULT lines of several engines into one record. A record
holds one run on one machine, and is written there: runs of one engine on two machines of one kind
differ by more than engines do.

    python -m forge.bench.peers
        vllm qwen3-4b           prints RESULT with the keys of forge bench step
        vllm-prefix qwen3-4b    the first token after a cached prefix
        vllm-sweep qwen3-4b     RESULT lines with the keys of forge bench sweep
        transformers qwen3-4b   generate_batch of transformers: c1, c8 and c64
        join h200 LOG...        bench/results/h200.json of their RESULT lines
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from forge.bench.result_file import create_result, write_json
from forge.bench.serve import parse_ints
from forge.bench.shapes import write_shape as write_shape
from forge.bench.sweep import HEADING, format_row
from forge.bench.workload import (
    BatchCell,
    Cells,
    draw_batch,
    draw_prompts,
    print_result,
    prompt_id_range,
    run_closed_levels,
)
from forge.errors import ForgeError, InvalidConfig, RequestFailed

RESULTS = Path(__file__).with_name("results")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Defaults of the environment of peers. The engine of vLLM has its own process, its default."""

TRANSFORMERS_CELLS = ("c1", "c8", "c64")
"""Default cells of transformers: each takes up to half a minute on a GPU."""

WARM_UP_TOKENS = 8
"""Output tokens of the warm-up round before each cell of transformers."""


class Peer(Protocol):
    """An engine that runs a batch.

    ids   range of the token ids of prompts, half-open
    """

    ids: tuple[int, int]

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once.

        Returns seconds until the end, and tokens.
        """
        ...


def measure_peer_throughput(peer: Peer, batch: BatchCell, rounds: int, seed: int) -> float:
    """Return output tokens a second of the fastest round."""
    rng = random.Random(seed)
    seconds, tokens = min(peer.run_batch(draw_batch(rng, batch, peer.ids)) for _ in range(rounds))
    return round(tokens / seconds)


def read_vocab_size(folder: str | Path) -> int:
    """Return the vocabulary size of the model in the folder."""
    return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])


# vLLM


class VLLMPeer:
    """vLLM on a shape with random weights, open until the process ends."""

    def __init__(self, shape: str, root: str, **extra: Any) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        folder = str(write_shape(shape, root))
        start = time.perf_counter()  # imports are part of the start, as they are for forge
        try:
            from vllm import LLM, SamplingParams
            from vllm.sampling_params import RequestOutputKind
        except ModuleNotFoundError as missing:
            raise InvalidConfig(
                "vllm", f"{missing.name} is not installed", "Run this where vLLM is"
            ) from None
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "max_num_seqs": 256,
        }
        self._llm = LLM(model=folder, **{**options, **extra})
        self.start_s = round(time.perf_counter() - start, 1)
        self._params = SamplingParams
        self._each_step = RequestOutputKind.DELTA
        self.ids = prompt_id_range(read_vocab_size(folder))

    def greedy_params(self, output: int, **extra: Any) -> Any:
        """Return parameters for exactly `output` greedy tokens, as ids."""
        return self._params(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, **extra
        )

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once.

        Returns seconds until the end, and tokens.
        """
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [self.greedy_params(output) for _, output in work]
        start = time.perf_counter()
        done = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(each.outputs[0].token_ids) for each in done)
        assert tokens == sum(output for _, output in work), f"{tokens} tokens came"
        return seconds, tokens

    def step_loop(self) -> VLLMStepLoop:
        """Return the engine's step loop."""
        return VLLMStepLoop(
            self._llm.llm_engine,
            lambda output: self.greedy_params(output, output_kind=self._each_step),
        )

    def measure_median_ttft_ms(self, prompts: Sequence[list[int]]) -> float:
        """Return the median time to the first token of the prompts, run one after the other."""
        times = [self.run_batch([(prompt, 1)])[0] for prompt in prompts]
        return round(statistics.median(times) * 1e3, 3)


class VLLMStepLoop:
    """The step loop of a vLLM engine.

    params   output tokens -> parameters with which each step reports only its new tokens
    """

    def __init__(self, engine: Any, params: Callable[[int], Any]) -> None:
        self._engine = engine
        self._params = params
        self._request_counter = count()
        self._num_remaining: dict[str, int] = {}

    def submit(self, prompt: Sequence[int], output: int) -> str:
        """Submit a request. Returns its name."""
        name = f"closed-{next(self._request_counter)}"
        self._num_remaining[name] = output
        # With a type, a prompt takes the same path as those of LLM.generate.
        ids = {"type": "token", "prompt_token_ids": list(prompt)}
        self._engine.add_request(name, ids, self._params(output))
        return name

    def step(self) -> dict[str, int]:
        """Run one step. Returns the new tokens of each request.

        Raises RequestFailed where a request ends with the wrong number of tokens.
        """
        num_tokens_by_request: dict[str, int] = {}
        for output in self._engine.step():
            name, tokens = output.request_id, len(output.outputs[0].token_ids)
            remaining = self._num_remaining[name] = self._num_remaining[name] - tokens
            if remaining < 0 or (remaining and output.finished):
                raise RequestFailed(f"vLLM's request {name} ended with {remaining} tokens due")
            if tokens:
                num_tokens_by_request[name] = num_tokens_by_request.get(name, 0) + tokens
        return num_tokens_by_request


def measure_vllm(shape: str, cells: Cells, root: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the cells, except single steps, which vLLM does not expose."""
    vllm = VLLMPeer(shape, root, **extra)
    figures: dict[str, Any] = {"engine": "vllm", "shape": shape, "start_s": vllm.start_s}
    for batch in cells.warm_up:
        measure_peer_throughput(vllm, batch, 1, cells.seed)
    for length in cells.ttft:
        lengths = (length, length)
        prompts = draw_prompts(random.Random(cells.seed), cells.repeats, lengths, vllm.ids)
        figures[f"ttft_{length}_ms"] = vllm.measure_median_ttft_ms(prompts)
    for batch in cells.throughput:
        figures[f"{batch.name}_tok_s"] = measure_peer_throughput(
            vllm, batch, cells.rounds, cells.seed
        )
    for batch in cells.mixed:
        figures[f"{batch.name}_tok_s"] = measure_peer_throughput(vllm, batch, 1, cells.seed)
    return figures


def measure_vllm_prefix(
    shape: str, cells: Cells, root: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the time to the first token after a prefix that an earlier request has cached."""
    (cell,), rng = cells.prefix, random.Random(cells.seed)
    longest = cell.prefix_tokens + cell.new_tokens + 64
    cached = {**extra, "enable_prefix_caching": True, "max_model_len": longest}
    vllm = VLLMPeer(shape, root, **cached)
    (prefix,) = draw_prompts(rng, 1, (cell.prefix_tokens, cell.prefix_tokens), vllm.ids)
    tails = draw_prompts(rng, cell.repeats + 2, (cell.new_tokens, cell.new_tokens), vllm.ids)
    for tail in tails[:2]:
        vllm.run_batch([(prefix + tail, 1)])
    milliseconds = vllm.measure_median_ttft_ms([prefix + tail for tail in tails[2:]])
    return {"engine": "vllm", "shape": shape, f"ttft_{cell.name}_ms": milliseconds}


def measure_vllm_sweep(
    shape: str, cells: Cells, root: str, extra: Mapping[str, Any], concurrency: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the levels of a closed loop on vLLM's engine, without a server."""
    vllm = VLLMPeer(shape, root, **extra)
    steps = vllm.step_loop()
    levels = run_closed_levels(steps.submit, steps.step, cells, vllm.ids, concurrency)
    return [{"engine": "vllm", "shape": shape, "path": "offline", **each} for each in levels]


# transformers


class TransformersPeer:
    """transformers' continuous batching, on a shape with random weights, until the process ends.

    bfloat16 on a CUDA device, float32 on a CPU. One cache is kept for all batches. It has room for
    twice the largest of `batches`, because the scheduler delays prompts when blocks are scarce. The
    defaults of transformers decide the rest, such as the capture of steps in CUDA graphs.

    attention   a paged implementation, such as paged|sdpa or paged|flash_attention_2
    extra       fields of its ContinuousBatchingConfig
    """

    def __init__(
        self, shape: str, root: str, batches: Sequence[BatchCell], attention: str, **extra: Any
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        folder = str(write_shape(shape, root))
        try:
            import torch
            import transformers

            batching = transformers.ContinuousBatchingConfig
            device = "cuda" if torch.cuda.is_available() else "cpu"
            if device == "cpu" and find_spec("psutil") is None:
                raise ImportError("psutil is not installed")  # it reads the free memory
        except (ImportError, AttributeError) as missing:
            raise InvalidConfig(
                "transformers", f"{missing}", "pip install 'transformers>=5.17,<5.24' torch psutil"
            ) from None
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder),
                dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                attn_implementation=attention,
            ).eval()
        # No token has this id, so no token ends a request.
        self._generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        size = extra.get("block_size", 256)
        blocks = [b.requests * ((b.input[1] + b.output[1]) // size + 1) for b in batches]
        options: dict[str, Any] = {
            "block_size": size,
            "num_blocks": 2 * max(blocks),
            "max_batch_tokens": 8192,
            "max_requests_per_batch": max(batch.requests for batch in batches),
            "allow_block_sharing": False,
        }
        self._batching_config = batching(**{**options, **extra})
        self.ids = prompt_id_range(read_vocab_size(folder))

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run all prompts, sent at once. Returns seconds until the last has ended, and tokens.

        All prompts have one output length, as generate_batch requires. The seconds are those of its
        own timestamps, from the arrival of the first request: its thread start and stop do not
        count. Raises RequestFailed.
        """
        (output,) = {output for _, output in work}
        outputs = self._model.generate_batch(
            [prompt for prompt, _ in work],
            generation_config=self._generation_config,
            continuous_batching_config=self._batching_config,
            persistent_manager=True,
            max_new_tokens=output,
        )
        if failed := [each.error for each in outputs.values() if each.error is not None]:
            raise RequestFailed(failed[0])
        lengths = [len(each.generated_tokens) for each in outputs.values()]
        assert lengths == [output] * len(work), f"{lengths} tokens came"
        spans = [(each.created_time, each.lifespan[1]) for each in outputs.values()]
        return max(end for _, end in spans) - min(start for start, _ in spans), sum(lengths)


def measure_transformers(
    shape: str, cells: Cells, root: str, attention: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the throughput cells, one round each after a warm-up. Raises InvalidConfig for others.

    There is no start time: the cache is created with the first batch, and nothing is compiled.
    """
    batches = cells.throughput
    if unsupported := set(cells.names) - {batch.name for batch in batches}:
        raise InvalidConfig(
            "cells",
            f"{', '.join(sorted(unsupported))} cannot be run on transformers",
            "Name throughput cells, such as c1,c8,c64",
        )
    peer = TransformersPeer(shape, root, batches, attention, **extra)
    figures: dict[str, Any] = {"engine": "transformers", "shape": shape, "attention": attention}
    for batch in batches:
        few = (min(WARM_UP_TOKENS, batch.output[0]),) * 2
        measure_peer_throughput(peer, batch._replace(output=few), 1, cells.seed + 1)
        figures[f"{batch.name}_tok_s"] = measure_peer_throughput(peer, batch, 1, cells.seed)
    return figures


# The record


def parse_results(log_lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the results in the lines of a log, in order."""
    return [json.loads(line[7:]) for line in log_lines if line.startswith("RESULT {")]


def join_results(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of one run as figures: `cells` by engine and shape, and all `levels`.

    Entries of one engine and shape are merged. Raises InvalidConfig where two disagree about a
    cell: those are two runs. Start times may differ; the first counts.
    """
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    levels: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for result in results:
        engine, shape = result["engine"], result["shape"]
        if "breakdown" in result or "rate" in result:
            continue  # has a record of its own
        if "path" in result:
            at = (engine, shape, result["path"], result["c"])
            if at in levels:
                raise InvalidConfig("results", f"{at} is there twice", "Join one run")
            levels[at] = dict(result)
            continue
        entry = cells.setdefault((engine, shape), {})
        for key, value in result.items():
            if entry.setdefault(key, value) != value and key != "start_s":
                raise InvalidConfig(
                    "results", f"{engine} on {shape} has two figures for {key}", "Join one run"
                )
    return {"cells": list(cells.values()), "levels": list(levels.values())}


def write_joined(name: str, logs: Sequence[str], folder: Path = RESULTS) -> Path:
    """Write the record of the results in the logs, with this machine. Returns its path."""
    results = [
        result for log in logs for result in parse_results(Path(log).read_text().splitlines())
    ]
    if not results:
        raise InvalidConfig("results", f"no RESULT line in {', '.join(logs)}", "Name other logs")
    content = {
        **create_result("peers", join_results(results)),
        "command": f"python -m forge.bench.peers join {name}",
    }
    path = folder / f"{name}.json"
    write_json(str(path), content)
    return path


def add_vllm_parsers(commands: Any) -> None:
    """Add the commands that run vLLM."""
    for peer in ("vllm", "vllm-prefix", "vllm-sweep"):
        subparser = commands.add_parser(peer)
        subparser.add_argument("shape")
        subparser.add_argument("--options", type=json.loads, default={}, help="JSON for vLLM's LLM")
    commands.choices["vllm"].add_argument(
        "--cells", default="", help="such as c1,ttft_128; default: all"
    )
    commands.choices["vllm-sweep"].add_argument(
        "--concurrency", type=parse_ints, default=(), help="such as 1,8,64; default: all"
    )


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of this module's command line."""
    root = argparse.ArgumentParser(
        prog="python -m forge.bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True)
    add_vllm_parsers(commands)
    transformers_parser = commands.add_parser("transformers")
    transformers_parser.add_argument("shape")
    transformers_parser.add_argument(
        "--cells", default=",".join(TRANSFORMERS_CELLS), help="such as c1,c8"
    )
    transformers_parser.add_argument(
        "--attention", default="paged|sdpa", help="a paged implementation"
    )
    transformers_parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON for its ContinuousBatchingConfig"
    )
    join_parser = commands.add_parser("join")
    join_parser.add_argument("name")
    join_parser.add_argument("logs", nargs="+")
    return root


def run_peer(args: argparse.Namespace, root: str) -> list[dict[str, Any]]:
    """Return the results of the peer that the arguments name. Its model is written under `root`."""
    cells, shape, options = Cells.read(), args.shape, args.options
    match args.command:
        case "vllm-prefix":
            return [measure_vllm_prefix(shape, cells, root, options)]
        case "vllm-sweep":
            streams = args.concurrency or cells.sweep.concurrency
            return measure_vllm_sweep(shape, cells, root, options, streams)
    chosen = cells.select(args.cells.split(",")) if args.cells else cells
    if args.command == "transformers":
        return [measure_transformers(shape, chosen, root, args.attention, options)]
    return [measure_vllm(shape, chosen, root, options)]


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    args = create_parser().parse_args(words)
    try:
        if args.command == "join":
            print(write_joined(args.name, args.logs))
            return 0
        with tempfile.TemporaryDirectory() as root:
            results = run_peer(args, root)
        if args.command == "vllm-sweep":
            print("\n".join([HEADING, *map(format_row, results)]))
        for result in results:
            print_result(result)
    except (ForgeError, OSError) as error:
        print(f"forge.bench.peers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
