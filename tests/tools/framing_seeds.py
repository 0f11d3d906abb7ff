"""Sends random requests over connections in this process, and counts their kinds.

    python -m tests.tools.framing_seeds --requests 100000

A world is a connection with some requests (tests/server/framing_worlds.py). The exit status is 1
when a world failed: `failed` has its seed and the reason.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from typing import Any

from tests.server.framing_worlds import run_world

MAX_REASON = 300


def run_requests(first_seed: int, num_requests: int) -> dict[str, Any]:
    """Return what became of so many requests of worlds, from this seed on."""
    kinds, failed, seed = Counter[str](), [], first_seed
    while kinds.total() < num_requests:
        try:
            kinds += run_world(seed)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"[:MAX_REASON]
            failed.append({"seed": seed, "reason": reason})
            kinds["failed"] += 1
        seed += 1
    return {
        "worlds": seed - first_seed,
        "requests": kinds.total(),
        "failed": failed,
        "kinds": dict(sorted(kinds.items())),
    }


def main(words: list[str]) -> int:
    """Run the worlds and print one line of counts."""
    parser = argparse.ArgumentParser("framing_seeds", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args(words)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each bad request
    start_s = time.perf_counter()
    figures = run_requests(args.first, args.requests)
    print(json.dumps({**figures, "seconds": round(time.perf_counter() - start_s, 1)}))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
