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
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.peer import measure_peer_throughput
from forge.bench.result_file import create_result, write_json
from forge.bench.serve import parse_ints
from forge.bench.sweep import HEADING, format_row
from forge.bench.transformers_peer import TRANSFORMERS_CELLS, measure_transformers
from forge.bench.vllm_peer import VLLMPeer
from forge.bench.workload import Cells, draw_prompts, print_result, run_closed_levels
from forge.errors import ForgeError, InvalidConfig

RESULTS = Path(__file__).with_name("results")


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
        if not {"breakdown", "rate", "benchmark"}.isdisjoint(result):
            continue  # has a record of its own
        engine, shape = result["engine"], result["shape"]
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
