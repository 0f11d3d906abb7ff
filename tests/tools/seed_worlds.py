"""Runs random worlds of given seeds, and counts how their outputs ended.

Owns what a failed world leaves: its seed and the reason. Knows no world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MAX_REASON = 1000
"""Characters of the reason of a failed world."""


class WorldCounts(NamedTuple):
    """How the outputs of worlds ended, by name, and the seed and reason of each that failed."""

    num_worlds: int
    failed: list[dict[str, Any]]
    endings: dict[str, int]


def run_worlds(run_world: Callable[[int], Counter[str]], seeds: Iterable[int]) -> WorldCounts:
    """Run the worlds of the seeds. One that raises has failed, and the others go on."""
    endings, failed, num_worlds = Counter[str](), [], 0
    for seed in seeds:
        num_worlds += 1
        try:
            endings += run_world(seed)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"[:MAX_REASON]
            failed.append({"seed": seed, "reason": reason})
    return WorldCounts(num_worlds, failed, dict(sorted(endings.items())))
