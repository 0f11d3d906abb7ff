"""Runs random worlds with KV tiers and faults, and counts what they reached: one line of JSON.

    python -m tests.tools.tier_seeds --seeds 10000 --json bench/results/tier-seeds.json

Every world has a host pool and files in a real folder. Steps and rows fail, requests are aborted,
pools are resized and reset, and files are damaged, refused and late (tests/core/file_worlds.py).
Every
output is compared with the sequential reference, and one world in four is audited at each step. The
exit status is 1 when a world failed: `failed` has its seed and the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge.bench.result_file import create_result, write_json
from tests.core.file_worlds import run_file_world
from tests.core.worlds import check_outcome

AUDITED_EVERY = 4
MAX_REASON = 300


def run_seeds(seeds: Iterable[int], root: Path) -> dict[str, Any]:
    """Return what the worlds of the seeds reached, and which of them failed.

    root   an empty folder, for one folder of files at a time
    """
    counts, reached, failed = Counter[str](), Counter[str](), []
    for seed in seeds:
        is_audited = seed % AUDITED_EVERY == 0
        counts["worlds"] += 1
        counts["audited worlds"] += is_audited
        with tempfile.TemporaryDirectory(dir=root) as folder:
            try:
                outcome = run_file_world(seed, Path(folder) / "kv", audited=is_audited)
                endings = check_outcome(outcome)
            except Exception as failure:
                reason = f"{type(failure).__name__}: {failure}"[:MAX_REASON]
                failed.append({"seed": seed, "reason": reason})
                continue
        reached += outcome.event_counts
        counts["steps"] += outcome.num_steps
        counts["choices compared"] += endings.total()
    return {**counts, "failed": failed, "reached": dict(sorted(reached.items()))}


def main(words: list[str]) -> int:
    """Run the seeds, print the line, and write the record."""
    parser = argparse.ArgumentParser("tier_seeds", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=100_000, help="the first of them")
    parser.add_argument("--json", help="write the record there")
    args = parser.parse_args(words)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        figures = run_seeds(range(args.first, args.first + args.seeds), Path(root))
    seconds = round(time.perf_counter() - start_s, 1)
    figures = {"first_seed": args.first, **figures, "seconds": seconds}
    print(json.dumps(figures))
    if args.json is not None:
        record = create_result("tier-seeds", figures)
        record["command"] = " ".join(["python -m tests.tools.tier_seeds", *words])
        write_json(args.json, record)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
