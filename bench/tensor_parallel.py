"""Measurement of a model on one and on several GPUs: steps, throughput, share of all-reduces.

Owns the processes and the comparison. What a rank measures is in forge.bench.tensor_parallel_rank.

    python -m forge.bench.tensor_parallel qwen3-4b --ranks 1,2 [--json FILE]

    step_ms_bN            one step of N sequences in steady decode, median, 10th and 90th percentile
    cN_tok_s              N requests at once, output tokens a second
    all_reduce_us_bN      all all-reduces of such a step, one after the other in a CUDA graph
    all_reduce_share_bN   the same as a share of the step
    tokens                greedy tokens of some prompts, compared with those of the first number of
                          ranks; where they differ, how much likelier its token was than the next

Every rank has an engine of its own, which gets the same requests. So no plan is sent. Each number
of ranks runs in new processes. If one of them ends early, the others are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.engine_driver import defaults
from forge.bench.result_file import create_result, write_json
from forge.bench.served_traffic import find_free_port
from forge.bench.shapes import SHAPES, write_shape
from forge.bench.workload import Cells, print_result
from forge.engine_options import Options
from forge.errors import ForgeError, InvalidConfig
from forge.models.rank_devices import rank_environment

RANK_MODULE = "forge.bench.tensor_parallel_rank"
LIMIT_S = 540.0
POLL_S = 0.2


def create_job(folder: str, cells: Cells, options: Options) -> dict[str, Any]:
    """Return what every rank measures, as JSON values.

    folder    folder of the checkpoint
    options   of the device, and fields of EngineConfig
    """
    fields: dict[str, Any] = dict(options)
    return {
        "folder": folder,
        "seed": cells.seed,
        "warm_up": [list(each) for each in cells.warm_up],
        "throughput": [list(each) for each in cells.throughput],
        "rounds": cells.rounds,
        "steady": list(cells.steady),
        "utilization": fields.pop("gpu_memory_utilization"),
        "load_format": fields.pop("load_format", "auto"),
        "overrides": fields,
    }


def run_ranks(world_size: int, job: Mapping[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run the job on this many ranks and return rank 0's figures.

    Raise InvalidConfig where a rank fails, or the ranks take longer than `limit_s`. No process is
    left.
    """
    port = find_free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(world_size):
                place = {
                    **{"rank": rank, "world_size": world_size, "out": str(out)},
                    "address": f"tcp://127.0.0.1:{port}",
                }
                variables = (
                    rank_environment(rank, world_size, os.environ)
                    if job["device"] == "cuda"
                    else {"OMP_NUM_THREADS": "1"}  # Ranks share the processor's cores.
                )
                words = [sys.executable, "-m", RANK_MODULE, json.dumps({**job, **place})]
                processes.append(
                    subprocess.Popen(words, env={**os.environ, **variables}, text=True)
                )
            _wait_for_all(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def _wait_for_all(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> None:
    """Wait until all have ended well. Raise InvalidConfig for the first that has not."""
    deadline_s = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise InvalidConfig(
                    "ranks", f"rank {rank} of {len(codes)} ended with {code}", "See its output"
                )
        if None not in codes:
            return
        if time.monotonic() > deadline_s:
            raise InvalidConfig(
                "ranks", f"{len(codes)} ranks took longer than {limit_s:g} s", "See their output"
            )
        time.sleep(POLL_S)


def compare(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return step times as shares of `base`, throughputs as multiples, and equal tokens."""
    ratios = {
        f"{name}_ratio": round(value / base[name], 3)
        for name, value in other.items()
        if name in base and isinstance(value, int | float)
        if name.endswith("_tok_s") or name.removeprefix("step_ms_b").isdigit()
    }
    return {**ratios, **compare_tokens(base["tokens"], other["tokens"])}


def compare_tokens(
    base: Sequence[Sequence[Sequence[float]]], other: Sequence[Sequence[Sequence[float]]]
) -> dict[str, Any]:
    """Return how many sequences are equal, and the gaps at the first tokens that are not.

    base, other   for each sequence, token and gap of each position; a gap is the log probability of
                  the most likely token less that of the next
    """
    gaps = []
    for one, two in zip(base, other, strict=True):
        for (token, gap), (other_token, _) in zip(one, two, strict=True):
            if token != other_token:
                gaps.append(round(gap, 4))
                break
    return {
        "sequences": len(base),
        "equal_sequences": len(base) - len(gaps),
        "gaps_where_different": sorted(gaps),
    }


def measure(
    model: str,
    world_sizes: Sequence[int],
    machine: Mapping[str, Any],
    cells: Cells,
    options: Options,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """Return the figures of each number of ranks, and the comparisons with the first.

    machine   device, and ways to sum
    options   in place of the cells' defaults
    """
    figures: dict[str, Any] = {"shape": os.path.basename(model.rstrip("/")), **machine}
    with tempfile.TemporaryDirectory() as root:
        folder = str(write_shape(model, root)) if model in SHAPES else model
        job = {**machine} | create_job(folder, cells, {**defaults(model, cells), **options})
        runs = {size: run_ranks(size, job, limit_s) for size in world_sizes}
    base = runs[world_sizes[0]]
    for size, run in runs.items():
        figures[f"ranks{size}"] = {k: v for k, v in run.items() if k != "tokens"}
        if size != world_sizes[0]:
            figures[f"ranks{size}"] |= compare(base, run)
    return figures


def run_cli(words: Sequence[str] | None = None, cells: Cells | None = None) -> int:
    """Run the command line of this module. Returns the exit status.

    cells   instead of those of cells.json
    """
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.tensor_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a shape such as qwen3-4b, or a folder")
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs; default 1,2")
    parser.add_argument("--cells", default="b1,b64,b256,c64,c256", help="cells of cells.json")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--sums", default="one_shot,symmetric,nccl", help="ways to sum over GPUs, in this order"
    )
    parser.add_argument("--max-model-len", type=int, default=8192, help="default 8192")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each number")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(words)
    try:
        world_sizes = [int(each) for each in args.ranks.split(",")]
        chosen = cells or Cells.read().select(args.cells.split(","))
        options: Options = {"max_model_len": args.max_model_len}
        job = {"device": args.device, "sums": args.sums.split(",")}
        figures = measure(args.model, world_sizes, job, chosen, options, args.limit)
    except (ForgeError, OSError, ValueError) as error:
        print(f"forge.bench.tensor_parallel: {error}", file=sys.stderr)
        return 1
    print_result(figures)
    if args.json is not None:
        write_json(args.json, create_result("tensor_parallel", figures))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
