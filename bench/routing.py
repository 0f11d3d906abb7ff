"""Cost of a routing decision on a CPU: for each router, at several numbers of replicas.

Owns the figures of `python -m forge.bench.routing`, in CPU time of the thread that decides. A
decision is the lookup of the prefix, the choice, and the state that changes with it; the hashes of
the prompt are given. Prompts have 8,192 tokens in blocks of 16. They come from conversations of
which each replica holds some, so lookups are as long as they can be.

    router   fed by   replicas   p10 us   median us   p99 us
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from forge.bench.result_file import create_result, write_json
from forge.blocks import BlockHash, chain_hashes, root_hash
from forge.kv_events import DEVICE, BlockStored
from forge.routing.replica_table import DecisionFeed, EventFeed, IndexFeed, ReplicaTable
from forge.routing.router import ROUTERS

BLOCK_SIZE = 16
PROMPT_TOKENS = 8192
MAX_BLOCKS = 50_000
"""Blocks that are known of a replica: a GPU of 141 GB with a model of 4 billion parameters."""
CONVERSATIONS = 64
MAX_DECISION_US = 200.0
FEEDS: dict[str, IndexFeed] = {"events": EventFeed(), "decisions": DecisionFeed()}


def create_prompts() -> list[list[BlockHash]]:
    """Return the hashes of the prompt of each conversation, which begin with a common eighth."""
    root, common = root_hash("", "", BLOCK_SIZE), range(PROMPT_TOKENS // 8)
    rest = PROMPT_TOKENS - len(common)
    return [
        chain_hashes(root, (*common, *range(first, first + rest)), BLOCK_SIZE)
        for first in range(10**6, 10**6 + CONVERSATIONS * rest, rest)
    ]


def create_table(
    router: str, feed: IndexFeed, num_replicas: int, prompts: Sequence[Sequence[BlockHash]]
) -> ReplicaTable:
    """Return a table whose replicas hold all prompts, from the first to the last replica less."""
    table = ReplicaTable(ROUTERS[router], feed)
    for replica_id in range(num_replicas):
        table.join(replica_id, MAX_BLOCKS)
        for hashes in prompts:
            held = hashes[: len(hashes) * (num_replicas - replica_id) // num_replicas]
            table.index.apply(replica_id, [BlockStored(tuple(held), None, (), BLOCK_SIZE, DEVICE)])
    return table


def measure_decisions(
    router: str, feed: str, num_replicas: int, num_decisions: int
) -> dict[str, Any]:
    """Return microseconds of CPU time of a decision: percentiles 10, 50 and 99."""
    prompts = create_prompts()
    table = create_table(router, FEEDS[feed], num_replicas, prompts)
    times_us = []
    for request_id in range(num_decisions):
        # New objects: a request's hashes have not been looked up before.
        hashes = [bytes(bytearray(each)) for each in prompts[request_id % CONVERSATIONS]]
        start_ns = time.thread_time_ns()
        table.route(request_id, hashes, PROMPT_TOKENS, "tenant", str(request_id % CONVERSATIONS))
        times_us.append((time.thread_time_ns() - start_ns) / 1e3)
        if request_id >= 8 * num_replicas:
            table.end(request_id - 8 * num_replicas)
    times_us.sort()
    return {
        "router": router,
        "feed": feed,
        "replicas": num_replicas,
        "p10_us": times_us[len(times_us) // 10],
        "median_us": statistics.median(times_us),
        "p99_us": times_us[int(0.99 * len(times_us))],
    }


def measure(replicas: Sequence[int], num_decisions: int) -> list[dict[str, Any]]:
    """Return the figures of every router, fed by events, and of a prefix index fed by decisions."""
    cases = [(router, "events") for router in ROUTERS] + [("prefix-aware", "decisions")]
    return [
        measure_decisions(router, feed, count, num_decisions)
        for count in replicas
        for router, feed in cases
    ]


def slow_decisions(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each router that is above the limit at 8 replicas."""
    return [
        f"{each['router']}, fed by {each['feed']}, takes {each['median_us']:.0f} us at 8 replicas, "
        f"at most {MAX_DECISION_US:.0f} are allowed"
        for each in figures
        if each["replicas"] == 8 and each["median_us"] > MAX_DECISION_US
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a median at 8 replicas is above the limit, with --check."""
    parser = argparse.ArgumentParser(prog="python -m forge.bench.routing", description=__doc__)
    parser.add_argument("--replicas", default="2,8,32", help="numbers of replicas")
    parser.add_argument("--decisions", type=int, default=1000, help="decisions of each case")
    parser.add_argument("--check", action="store_true", help="fail above 200 us at 8 replicas")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(words)
    figures = measure([int(each) for each in args.replicas.split(",")], args.decisions)
    print(f"prompts of {PROMPT_TOKENS} tokens, {PROMPT_TOKENS // BLOCK_SIZE} blocks")
    print(f"{'router':<19}{'fed by':<11}{'replicas':>9}{'p10 us':>9}{'median us':>11}{'p99 us':>9}")
    for each in figures:
        print(
            f"{each['router']:<19}{each['feed']:<11}{each['replicas']:>9}"
            f"{each['p10_us']:>9.1f}{each['median_us']:>11.1f}{each['p99_us']:>9.1f}"
        )
    if args.json is not None:
        write_json(args.json, create_result("routing", {"decisions": figures}))
    slow = slow_decisions(figures) if args.check else []
    for line in slow:
        print(line, file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
