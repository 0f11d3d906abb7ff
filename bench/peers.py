"""The same cells on vLLM, and the record that lays the results of one run side by side.

Owns how a peer is asked and how RESULT lines of several engines become one record. Two runs of one
engine on two machines of one kind differ by more than engines do, so a record holds one run on one
machine, and is written there.

    python -m bench.peers vllm qwen3-4b           prints RESULT with the keys of forge bench step
    python -m bench.peers vllm-prefix qwen3-4b    the first token behind a cached prefix
    python -m bench.peers join h200 LOG...        bench/results/h200.json of their RESULT lines
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import record, write
from bench.shapes import write as write_shape
from bench.workload import Batch, Cells, draw_batch, draw_prompts, id_range, say
from forge.errors import ForgeError, InvalidConfig

RESULTS = Path(__file__).with_name("results")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""What vLLM runs under where nobody set it. Its engine keeps a process of its own, its default."""


class VLLM:
    """vLLM on a shape with random weights, open until the process ends."""

    def __init__(self, shape: str, root: str, **extra: Any) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        folder = str(write_shape(shape, root))
        start = time.perf_counter()  # what is imported is part of a start, as it is of forge's
        try:
            from vllm import LLM, SamplingParams
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
        config = json.loads((Path(folder) / "config.json").read_text())
        self.ids = id_range(config["vocab_size"])

    def batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """All prompts with their output lengths, sent at once: seconds until the end, tokens."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [
            self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in work
        ]
        start = time.perf_counter()
        done = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(each.outputs[0].token_ids) for each in done)
        assert tokens == sum(output for _, output in work), f"{tokens} tokens came"
        return seconds, tokens

    def throughput(self, batch: Batch, rounds: int, seed: int) -> float:
        """Output tokens a second of the fastest round."""
        rng = random.Random(seed)
        seconds, tokens = min(self.batch(draw_batch(rng, batch, self.ids)) for _ in range(rounds))
        return round(tokens / seconds)

    def median_ms(self, prompts: Sequence[list[int]]) -> float:
        """Median first-token time of the prompts, one after the other."""
        times = [self.batch([(prompt, 1)])[0] for prompt in prompts]
        return round(statistics.median(times) * 1e3, 3)


def measure_vllm(shape: str, cells: Cells, root: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the cells, but for those of single steps, which vLLM does not show."""
    vllm = VLLM(shape, root, **extra)
    figures: dict[str, Any] = {"engine": "vllm", "shape": shape, "start_s": vllm.start_s}
    for batch in cells.warm_up:
        vllm.throughput(batch, 1, cells.seed)
    for length in cells.ttft:
        lengths = (length, length)
        prompts = draw_prompts(random.Random(cells.seed), cells.repeats, lengths, vllm.ids)
        figures[f"ttft_{length}_ms"] = vllm.median_ms(prompts)
    for batch in cells.throughput:
        figures[f"{batch.name}_tok_s"] = vllm.throughput(batch, cells.rounds, cells.seed)
    for batch in cells.mixed:
        figures[f"{batch.name}_tok_s"] = vllm.throughput(batch, 1, cells.seed)
    return figures


def measure_vllm_prefix(
    shape: str, cells: Cells, root: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The first token behind a prefix that an earlier request left in the cache."""
    (cell,), rng = cells.prefix, random.Random(cells.seed)
    longest = cell.prefix_tokens + cell.new_tokens + 64
    cached = {**extra, "enable_prefix_caching": True, "max_model_len": longest}
    vllm = VLLM(shape, root, **cached)
    (prefix,) = draw_prompts(rng, 1, (cell.prefix_tokens, cell.prefix_tokens), vllm.ids)
    tails = draw_prompts(rng, cell.repeats + 2, (cell.new_tokens, cell.new_tokens), vllm.ids)
    for tail in tails[:2]:
        vllm.batch([(prefix + tail, 1)])
    milliseconds = vllm.median_ms([prefix + tail for tail in tails[2:]])
    return {"engine": "vllm", "shape": shape, f"ttft_{cell.name}_ms": milliseconds}


def results_in(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The results among the lines of a log, in order."""
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT {")]


def joined(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of one run as figures: `cells` has one entry per engine and shape, `levels` all.

    Entries of one engine and shape become one. Raises InvalidConfig where two disagree about a
    cell: those are two runs. A second start is no disagreement; the first counts.
    """
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    levels: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for result in results:
        engine, shape = result["engine"], result["shape"]
        if "breakdown" in result:
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


def join(name: str, logs: Sequence[str], folder: Path = RESULTS) -> Path:
    """The record of the logs' results is in the folder, under the name, with this machine's."""
    results = [result for log in logs for result in results_in(Path(log).read_text().splitlines())]
    if not results:
        raise InvalidConfig("results", f"no RESULT line in {', '.join(logs)}", "Name other logs")
    told = {**record("peers", joined(results)), "command": f"python -m bench.peers join {name}"}
    path = folder / f"{name}.json"
    write(str(path), told)
    return path


def command(words: Sequence[str] | None = None) -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for peer in ("vllm", "vllm-prefix"):
        made = commands.add_parser(peer)
        made.add_argument("shape")
        made.add_argument("--options", type=json.loads, default={}, help="JSON for vLLM's LLM")
    commands.choices["vllm"].add_argument(
        "--cells", default="", help="such as c1,ttft_128; all where left out"
    )
    made = commands.add_parser("join")
    made.add_argument("name")
    made.add_argument("logs", nargs="+")
    args = parser.parse_args(words)
    try:
        if args.command == "join":
            print(join(args.name, args.logs))
            return 0
        cells = Cells.read()
        with tempfile.TemporaryDirectory() as root:
            if args.command == "vllm-prefix":
                say(measure_vllm_prefix(args.shape, cells, root, args.options))
                return 0
            chosen = cells.only(args.cells.split(",")) if args.cells else cells
            say(measure_vllm(args.shape, chosen, root, args.options))
    except (ForgeError, OSError) as refused:
        print(f"bench.peers: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command())
