"""Optimal eviction: the most block hits that any cache of some size can have.

Owns Belady's rule for chains of blocks. Knows no tokens and no time: a request is a chain, and
hits are its first blocks that are cached. After each request the block whose next use is furthest
goes, so a block never outlasts those before it in its chain.

    cache of 3    request [0 1 2]   request [0 3]   request [0 1]
    hits                0               1               2            2 left instead of 1 for 3

Belady 1966.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush


def belady_hits(accesses: Sequence[Sequence[Hashable]], num_blocks: int) -> int:
    """Return the hits of all requests in `num_blocks` blocks, of which a request may use more."""
    next_use: list[list[int]] = []
    last_seen: dict[Hashable, int] = {}
    for index in range(len(accesses) - 1, -1, -1):
        chain = accesses[index]
        next_use.append([last_seen.get(block, len(accesses)) for block in chain])
        last_seen.update(dict.fromkeys(chain, index))
    next_use.reverse()
    cached: dict[Hashable, int] = {}  # block -> its next use
    heap: list[tuple[int, int, Hashable]] = []
    hits = 0
    for chain, uses in zip(accesses, next_use, strict=True):
        is_prefix = True
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            is_prefix = is_prefix and block in cached
            hits += is_prefix
            cached[block] = use
            heappush(heap, (-use, -depth, block))
        while len(cached) > num_blocks:
            use, _, block = heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return hits
