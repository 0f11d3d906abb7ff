"""Block accesses: which blocks each request of a run reads and writes, in the order of admission.

Owns the numbers of blocks, one for each content with everything before it. Knows no cache and no
time. Another cache can be tried on the same accesses, such as one that evicts optimally.

    admitted   request 3   [ 0 1 2 7 8 ]         blocks of prompt and answer, from the first on
               request 4   [ 0 1 2 9 ]           3 blocks are known: an infinite cache has them

Memory grows with the blocks of all requests. Only requests of sessions are recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.blocks import BlockHash


class BlockAccesses:
    """Chains of block numbers, and how many blocks of prompts an infinite cache would have.

    chains             blocks of each admitted request; those of its answer follow when it ends
    num_known_blocks   first blocks of prompts that earlier requests had computed
    """

    def __init__(self) -> None:
        self.chains: list[list[int]] = []
        self.num_known_blocks = 0
        self._numbers: dict[BlockHash, int] = {}
        self._waiting: dict[int, list[BlockHash]] = {}
        self._running: dict[int, tuple[list[int], list[BlockHash]]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of different contents so far."""
        return len(self._numbers)

    def record_arrival(self, request_id: int, hashes: list[BlockHash]) -> None:
        """Record a request. The engine extends `hashes`: the root, then its full blocks."""
        self._waiting[request_id] = hashes

    def record_admissions(self, request_ids: Iterable[int]) -> None:
        """Record the first admission of requests, in order. Others than of sessions are ignored."""
        for request_id in request_ids:
            hashes = self._waiting.pop(request_id, None)
            if hashes is None:
                continue
            known = next(
                (i for i, each in enumerate(hashes[1:]) if each not in self._numbers),
                len(hashes) - 1,
            )
            self.num_known_blocks += known
            self.chains.append(self._number_blocks(hashes))
            self._running[request_id] = self.chains[-1], hashes

    def record_finish(self, request_id: int) -> None:
        """Complete the chain of a request with the blocks of its answer."""
        self._waiting.pop(request_id, None)
        chain, hashes = self._running.pop(request_id, ([], []))
        chain += self._number_blocks(hashes[len(chain) :])

    def _number_blocks(self, hashes: list[BlockHash]) -> list[int]:
        """Return the numbers of all blocks but the first, which is the root or known."""
        numbers = self._numbers
        return [numbers.setdefault(each, len(numbers)) for each in hashes[1:]]
