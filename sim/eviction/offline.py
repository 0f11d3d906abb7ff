"""Bounds: what rules that know all accesses would find.

Owns the next use of each block. Knows no engine. A bound needs the whole list of accesses, so it is
not a rule that an engine could have.

    access      0     1     2     3     4
    block a     x─────────────────x             kept from 0 to 3: one hit
    block b           x─────x                   kept from 1 to 2: one hit
    room at 1..2: two blocks besides those of the request; the interval that ends last is dropped

Belady is the most block hits of any rule, on or off line, under three conditions. Requests are
served one at a time and in this order; each holds all its blocks at once; only its blocks are
loaded. Keeping a block between two uses is an interval, and the room at each time is fixed. So the
hits are the most intervals that fit, and dropping the latest end is optimal.

Always true: a parent is used whenever its child is, so no child outlives it here: prefix hits and
block hits are equal. Belady 1966.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from forge.sim.eviction.rules import Block

Accesses = Sequence[Sequence[Block]]
"""Chains of blocks, one a request, in the order of service."""


class Belady:
    """Evicts the block whose next use is last, and of those the one deepest in its chain."""

    def __init__(self, accesses: Accesses) -> None:
        self._next_uses: list[list[int]] = []
        self._index = 0
        self._heap: list[tuple[int, int, int, Block]] = []
        next_use_of: dict[Block, int] = {}
        for index in range(len(accesses) - 1, -1, -1):
            chain = accesses[index]
            self._next_uses.append([next_use_of.get(block, len(accesses)) for block in chain])
            next_use_of.update(dict.fromkeys(chain, index))
        self._next_uses.reverse()

    def remove(self, block: Block) -> None:
        """Leave the entry: its next use is now, and those of cached blocks are later."""

    def evict(self) -> Block:
        return heapq.heappop(self._heap)[-1]

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        next_uses = self._next_uses[self._index]
        for depth, (block, next_use) in enumerate(zip(chain, next_uses, strict=True)):
            # Depth and access decide ties, so names are never compared.
            heapq.heappush(self._heap, (-next_use, -depth, self._index, block))
        self._index += 1


class EndedFirst:
    """LRU, but blocks that are never used again go first: the ends of all sessions are known."""

    def __init__(self, accesses: Accesses) -> None:
        self._last_access: dict[Block, int] = {
            block: index for index, chain in enumerate(accesses) for block in chain
        }
        self._index = 0
        self._ended: OrderedDict[Block, None] = OrderedDict()
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def remove(self, block: Block) -> None:
        del self._blocks[block]

    def evict(self) -> Block:
        return (self._ended or self._blocks).popitem(last=False)[0]

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        for block in reversed(chain):
            has_ended = self._last_access[block] == self._index
            (self._ended if has_ended else self._blocks)[block] = None
        self._index += 1
