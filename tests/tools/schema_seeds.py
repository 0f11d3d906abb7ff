"""Runs random JSON schemas with texts that try to leave them, and counts how the outputs ended.

    python -m tests.tools.schema_seeds --seeds 20000 --json bench/results/schema-seeds.json
    python -m tests.tools.schema_seeds --worlds tool --json bench/results/tool-seeds.json

A world has a schema and two outputs (tests/core/schema_worlds.py), or tools in one format of calls
and two answers (tests/server/tool_worlds.py). jsonschema, which must be installed, and a parser
that refuses repeated names check each complete output. The exit status is 1 when a world failed:
`failed` has its seed and the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from forge.bench.result_file import create_result, write_json
from tests.core import schema_worlds
from tests.server import tool_worlds
from tests.tools.seed_worlds import run_worlds

WORLDS: dict[str, Callable[[int], Counter[str]]] = {
    "schema": schema_worlds.run_world,
    "tool": tool_worlds.run_world,
}


def run_seeds(run_world: Callable[[int], Counter[str]], seeds: Iterable[int]) -> dict[str, Any]:
    """Return how the outputs of the seeds' worlds ended, and which worlds failed."""
    counts = run_worlds(run_world, seeds)
    return {"schemas": counts.num_worlds, "failed": counts.failed, "endings": counts.endings}


def main(words: list[str]) -> int:
    """Run the seeds, print the line, and write the record."""
    parser = argparse.ArgumentParser("schema_seeds", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=100_000, help="the first of them")
    parser.add_argument("--worlds", choices=WORLDS, default="schema", help="what a world has")
    parser.add_argument("--json", help="write the record there")
    args = parser.parse_args(words)
    start_s = time.perf_counter()
    figures = run_seeds(WORLDS[args.worlds], range(args.first, args.first + args.seeds))
    seconds = round(time.perf_counter() - start_s, 1)
    figures = {"first_seed": args.first, **figures, "seconds": seconds}
    print(json.dumps(figures))
    if args.json is not None:
        record = create_result(f"{args.worlds}-seeds", figures)
        record["command"] = " ".join(["python -m tests.tools.schema_seeds", *words])
        write_json(args.json, record)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
