"""Eviction rules: which cached block is reused for new content when no block is empty.

Owns the order of cached blocks and what a rule remembers of evicted ones. Knows no engine and no
future. A block is named by its hash. A pool calls three methods, in the places of BlockPool:

    remove(block)        share: a request starts on a cached block
    evict()              allocate: no block is empty
    add(chain, hits)     release: the request has ended, all its blocks are cached

            new ──► [ probation ] ──► evicted ──► remembered, without content
                       │     ▲                        │
              reused   ▼     │ demoted                │ computed again
                    [ protected ] ◄───────────────────┘

Always true: blocks of one chain are added last block first, so a chain is evicted from its end.
LIRS: Jiang and Zhang 2002. ARC: Megiddo and Modha 2003. Second touch: 2Q, Johnson and Shasha 1994.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

from forge.sim.draws import ADMISSION_DRAW, draw_uniform

Block = Hashable
"""Hash of a block, or any other name of its content and all before it."""


class EvictionRule(Protocol):
    """Orders the cached blocks of a pool."""

    def remove(self, block: Block) -> None:
        """Remove a cached block, which a request now uses."""
        ...

    def evict(self) -> Block:
        """Remove and return the cached block that is evicted next."""
        ...

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        """Add the blocks of a request that has ended. The first `num_hits` were found."""
        ...


class Lru:
    """Least recently used first: the rule of BlockPool."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def remove(self, block: Block) -> None:
        del self._blocks[block]

    def evict(self) -> Block:
        return self._blocks.popitem(last=False)[0]

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        self._blocks.update(dict.fromkeys(reversed(chain)))


class Segments:
    """Two LRU lists: blocks on probation are evicted before protected ones.

    A protected block stays marked while a request uses it. `max_protected` counts marked blocks,
    used or cached.
    """

    def __init__(self, max_protected: int) -> None:
        self.max_protected = max_protected
        self._probation: OrderedDict[Block, None] = OrderedDict()
        self._protected: OrderedDict[Block, None] = OrderedDict()
        self._marked: set[Block] = set()

    def remove(self, block: Block) -> None:
        del (self._protected if block in self._protected else self._probation)[block]

    def evict(self) -> Block:
        block, _ = (self._probation or self._protected).popitem(last=False)
        self._marked.discard(block)
        return block

    def _protect(self, block: Block) -> None:
        """Cache the block among the protected ones; the oldest of them may be demoted."""
        self._protected[block] = None
        self._marked.add(block)
        while len(self._marked) > self.max_protected and self._protected:
            oldest, _ = self._protected.popitem(last=False)
            self._marked.remove(oldest)
            self._probation[oldest] = None


class SecondTouch(Segments):
    """Protects a block that was found again while it was cached (segmented LRU)."""

    def __init__(self, num_blocks: int, protected_share: float) -> None:
        super().__init__(int(protected_share * num_blocks))

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        for index, block in reversed(list(enumerate(chain))):
            if index < num_hits:
                self._protect(block)
            else:
                self._probation[block] = None


class GhostSecondTouch(Segments):
    """Protects a block at its second use, cached or not: the last evicted ones are remembered."""

    def __init__(self, num_blocks: int, protected_share: float, ghost_share: float = 4.0) -> None:
        super().__init__(int(protected_share * num_blocks))
        self._ghosts: OrderedDict[Block, None] = OrderedDict()
        self._max_ghosts = int(ghost_share * num_blocks)

    def evict(self) -> Block:
        block = super().evict()
        self._ghosts[block] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return block

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        for index, block in reversed(list(enumerate(chain))):
            if index < num_hits or block in self._ghosts:
                self._ghosts.pop(block, None)
                self._protect(block)
            else:
                self._probation[block] = None


class RandomAdmission(Segments):
    """Keeps the new blocks of a share of the requests; those of the others are evicted first."""

    def __init__(self, num_blocks: int, share: float, seed: int = 0) -> None:
        super().__init__(num_blocks)
        self._share, self._seed, self._num_requests = share, seed, 0

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        self._num_requests += 1
        draw = draw_uniform(self._seed, ADMISSION_DRAW, self._num_requests)
        num_kept = len(chain) if draw < self._share else num_hits
        for index, block in reversed(list(enumerate(chain))):
            if index < num_kept:
                self._protect(block)
            else:
                self._probation[block] = None


class Arc:
    """Adaptive replacement: blocks used once and blocks used again share the pool as hits show."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks, self._target = num_blocks, 0.0
        self._once: OrderedDict[Block, None] = OrderedDict()
        self._again: OrderedDict[Block, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Block, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Block, None] = OrderedDict()

    def remove(self, block: Block) -> None:
        del (self._once if block in self._once else self._again)[block]

    def evict(self) -> Block:
        takes_once = self._once and (len(self._once) > self._target or not self._again)
        cached, ghosts = (
            (self._once, self._once_ghosts) if takes_once else (self._again, self._again_ghosts)
        )
        block, _ = cached.popitem(last=False)
        ghosts[block] = None
        if len(ghosts) > self._num_blocks:
            ghosts.popitem(last=False)
        return block

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        for index, block in reversed(list(enumerate(chain))):
            if block in once:
                step = max(1.0, len(again) / len(once))
                self._target = min(self._num_blocks, self._target + step)
            elif block in again:
                self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
            if index < num_hits or block in once or block in again:
                once.pop(block, None)
                again.pop(block, None)
                self._again[block] = None
            else:
                self._once[block] = None


class Lirs(Segments):
    """Protects a block whose last use is more recent than that of the oldest protected block.

    While there is room among the protected blocks, a second use suffices. The comparison is that of
    LIRS, by numbers of requests instead of a stack. Uses are remembered after eviction, at most
    `MEMORY` for each block of the pool. All operations are O(1).
    """

    MEMORY = 4

    def __init__(self, num_blocks: int, protected_share: float) -> None:
        super().__init__(int(protected_share * num_blocks))
        self._num_requests = 0
        self._num_blocks = num_blocks
        self._recent_uses: OrderedDict[Block, int] = OrderedDict()
        self._older_uses: OrderedDict[Block, int] = OrderedDict()

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        self._num_requests += 1
        oldest_use = self._oldest_protected_use()  # of another request: this one is now the newest
        for block in reversed(chain):
            last_use = self._use(block)
            first_use = oldest_use if len(self._marked) >= self.max_protected else 0
            if block in self._marked or last_use >= first_use:
                self._protect(block)
            else:
                self._probation[block] = None

    def _oldest_protected_use(self) -> int:
        """Return the last use of the protected block that is demoted next, or 0 without one."""
        if not self._protected:
            return 0
        oldest = next(iter(self._protected))
        return self._recent_uses.get(oldest) or self._older_uses.get(oldest, 0)

    def _use(self, block: Block) -> int:
        """Record a use and return the last one before it, or -1 where none is remembered.

        `_recent_uses` are those of the `num_blocks` blocks that LRU would hold.
        """
        recent, older = self._recent_uses, self._older_uses
        last_use = recent.pop(block) if block in recent else older.pop(block, -1)
        recent[block] = self._num_requests
        if len(recent) > self._num_blocks:
            oldest, use = recent.popitem(last=False)
            older[oldest] = use
            if len(older) > (self.MEMORY - 1) * self._num_blocks:
                older.popitem(last=False)
        return last_use


class AdaptiveLirs(Lirs):
    """LIRS that follows LRU: the protected share shrinks with each hit that only LRU would have.

    `_recent_uses` holds exactly the blocks that LRU would hold. A hit outside it is a gain and a
    miss inside it is a loss. Each moves `max_protected` by one block, between the shares below.
    With no protected block the rule is LRU; the lower bound lets it find gains again.
    """

    MIN_SHARE, FIRST_SHARE, MAX_SHARE = 0.05, 0.25, 0.9

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, self.FIRST_SHARE)
        self._bounds = int(self.MIN_SHARE * num_blocks), int(self.MAX_SHARE * num_blocks)

    def add(self, chain: Sequence[Block], num_hits: int) -> None:
        recent = self._recent_uses
        num_gains = sum(1 for block in chain[:num_hits] if block not in recent)
        num_losses = sum(1 for block in chain[num_hits:] if block in recent)
        low, high = self._bounds
        self.max_protected = min(high, max(low, self.max_protected + num_gains - num_losses))
        super().add(chain, num_hits)
