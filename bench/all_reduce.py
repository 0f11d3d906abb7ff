"""All-reduces on the GPUs of one host: exact sums, and microseconds by size, ours and others'.

Owns the parts and their figures. What a rank does is in forge.bench.all_reduce_rank.

    python -m forge.bench.all_reduce [--ranks 2] [--hidden 2560] [--json FILE]

    check    random calls and replays of several graphs against sums in torch, bit for bit
    time     a call in a graph of 50, alone, with the residual, with the residual and the norm
    gather   eight bytes a row of every rank, as ranks that agree on a token need them
    chain    the two row-parallel products of a layer of Qwen3-4B with their all-reduces

    method    kernel
    default   reduce_packets for short messages, reduce_flagged for long ones
    packets, flagged      one of them for all
    one-shot, two-shot    torch's, over symmetric memory; the sum and the norm are other kernels
    nccl      NCCL's; the sum and the norm are other kernels

A time is the greatest of all ranks. A part that takes longer than its limit ends all ranks; the
parts after it run on new ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from forge.bench.rank_processes import run_parts
from forge.bench.result_file import create_result, write_json
from forge.bench.served_traffic import find_free_port
from forge.bench.workload import print_result

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
CHAIN_ROWS = (1, 8, 64)
GATHER_ROWS = (2, 64, 256)
KINDS = ("check", "time", "gather", "chain")
CHECKS = ("packets", "flagged", "default", "graphs")
MODES = ("sum", "residual", "norm")
METHODS = ("default", "packets", "flagged", "one-shot", "two-shot", "nccl")
PART_LIMIT_S = 20.0
MIN_MAX_BYTES = 2**21 + 2**15
"""Longest message of a check, and a row more."""


def name_parts(kinds: Sequence[str], rows: Sequence[int]) -> list[str]:
    """Return the parts of a run, in order.

    kinds   some of KINDS
    """
    parts: list[str] = []
    if "check" in kinds:
        parts += [f"check {name}" for name in CHECKS]
    if "time" in kinds:
        parts += [f"time {each} {mode} {m}" for m in rows for mode in MODES for each in METHODS]
    if "gather" in kinds:
        parts += [f"gather {each} {m}" for m in GATHER_ROWS for each in ("default", "nccl")]
    if "chain" in kinds:
        methods = ("none", "default", "one-shot", "nccl")
        parts += [f"chain {each} {m}" for m in CHAIN_ROWS for each in methods]
    return parts


def summarize(results: Sequence[Any]) -> Any:
    """Return the figure of a part: the greatest time of all ranks, or the first rank's counts."""
    if all(isinstance(each, float) for each in results):
        return round(max(results), 3)
    return results[0]


def print_table(figures: dict[str, Any], rows: Sequence[int], hidden: int) -> None:
    """Print microseconds by size and method, a table for each mode."""
    for mode in MODES:
        print(f"{mode + ', us':<16}" + "".join(f"{each:>10}" for each in METHODS))
        for m in rows:
            cells = [figures.get(f"time {each} {mode} {m}") for each in METHODS]
            line = "".join(f"{'-' if cell is None else cell:>10}" for cell in cells)
            print(f"{m * hidden * 2 / 1024:>10.0f} KiB  {line}")


def measure(
    parts: Sequence[str], *, num_ranks: int, hidden: int, rows: Sequence[int], calls: int
) -> dict[str, Any]:
    """Run the parts on ranks. Return the figures by part, and failures as sentences."""
    # Imported by the ranks: this process uses no device.
    from forge.bench.all_reduce_rank import Setting, run_rank
    from forge.models.rank_devices import WITHOUT_MULTICAST

    port = min(find_free_port(), 65_000)  # each start of the ranks takes the port after it
    os.environ.update(WITHOUT_MULTICAST, MASTER_PORT=str(port))
    max_bytes = max(2 * hidden * max(rows), MIN_MAX_BYTES)
    setting = Setting(hidden, -(-max_bytes // 512) * 512, calls)
    figures: dict[str, Any] = {}

    def report(part: str, results: list[Any]) -> None:
        figures[part] = summarize(results)
        print_result({"part": part, "value": figures[part]})

    failures = run_parts(partial(run_rank, setting), num_ranks, parts, PART_LIMIT_S, report)
    return figures | {"ranks": num_ranks, "hidden": hidden, "failures": failures}


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; default 2")
    parser.add_argument("--hidden", type=int, default=2560, help="columns of a row; default 2560")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of a message")
    kinds = ",".join(KINDS)
    parser.add_argument("--kinds", default=kinds, help=f"default: {kinds}")
    parser.add_argument("--calls", type=int, default=3000, help="calls of a check; default 3000")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(words)
    rows = [int(each) for each in args.rows.split(",")]
    figures = measure(
        name_parts(args.kinds.split(","), rows),
        num_ranks=args.ranks,
        hidden=args.hidden,
        rows=rows,
        calls=args.calls,
    )
    print_table(figures, rows, args.hidden)
    for each in figures["failures"]:
        print(f"forge.bench.all_reduce: {each}", file=sys.stderr)
    print_result(figures)
    if args.json is not None:
        write_json(args.json, create_result("all_reduce", figures))
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(run_cli())
