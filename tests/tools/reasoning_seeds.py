"""Runs random outputs with reasoning before a JSON schema, and counts how they ended.

    python -m tests.tools.reasoning_seeds --seeds 2500 --json bench/results/reasoning-seeds.json

A world has four schemas (tests/core/reasoning_worlds.py): 2500 worlds are 10,000 schemas. The exit
status is 1 when a world failed: `failed` has its seed and the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from forge.bench.result_file import create_result, write_json
from tests.core.reasoning_worlds import SCHEMAS_PER_WORLD, run_world
from tests.tools.seed_worlds import run_worlds


def run_seeds(seeds: Iterable[int]) -> dict[str, Any]:
    """Return how the outputs of the seeds' worlds ended, and which worlds failed."""
    counts = run_worlds(run_world, seeds)
    return {
        "worlds": counts.num_worlds,
        "schemas": counts.num_worlds * SCHEMAS_PER_WORLD,
        "failed": counts.failed,
        "endings": counts.endings,
    }


def main(words: list[str]) -> int:
    """Run the seeds, print the line, and write the record."""
    parser = argparse.ArgumentParser("reasoning_seeds", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2500, help="how many")
    parser.add_argument("--first", type=int, default=100_000, help="the first of them")
    parser.add_argument("--json", help="write the record there")
    args = parser.parse_args(words)
    start_s = time.perf_counter()
    figures = run_seeds(range(args.first, args.first + args.seeds))
    seconds = round(time.perf_counter() - start_s, 1)
    figures = {"first_seed": args.first, **figures, "seconds": seconds}
    print(json.dumps(figures))
    if args.json is not None:
        record = create_result("reasoning-seeds", figures)
        record["command"] = " ".join(["python -m tests.tools.reasoning_seeds", *words])
        write_json(args.json, record)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
