"""Who may begin on whose blocks: the prefix cache as the scheduler uses it.

Owns the hashes of sequences and the claims on blocks that are being computed. Knows no queue or
plan; the blocks and what is found under which hash are the BlockPool's.

    a new sequence      [ cached | cached | claimed by 3 | ... ]
                          begins on these   waits for the commit of this one, then begins on it too

Always true: a claim belongs to a running sequence that will compute the block, and goes when that
step is committed or the sequence stops running. So whoever waits for it waits for a commit.
"""

from __future__ import annotations

from forge.blocks import BlockHash, BlockPool, chain_hashes, root_hash
from forge.config import EngineConfig
from forge.request import Request
from forge.sequence import Sequence


class PrefixSharing:
    """Finds, claims and publishes the blocks of known prefixes."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.computing: dict[BlockHash, int] = {}
        self._config = config
        self._pool = pool

    def root(self, request: Request) -> BlockHash:
        """The hash before the request's first block."""
        return root_hash(self._config.cache_namespace, request.cache_salt, self._config.block_size)

    def cached(self, sequence: Sequence) -> list[int]:
        """Published blocks that the sequence may begin on."""
        usable = self._usable(sequence)
        self.hash_blocks(sequence, usable)
        return self._pool.lookup(sequence.hashes[1 : usable + 1])

    def awaited(self, sequence: Sequence) -> bool:
        """The block behind the cached ones is being computed by somebody else."""
        hits = len(self.cached(sequence))
        return hits < self._usable(sequence) and sequence.hashes[hits + 1] in self.computing

    def claim(self, sequence: Sequence) -> None:
        """Others wait for the blocks that the sequence is about to compute."""
        for block_hash in self._uncommitted(sequence):
            self.computing.setdefault(block_hash, sequence.id)

    def disclaim(self, sequence: Sequence) -> None:
        """Nobody waits for the sequence any more. Before its `committed` is forgotten."""
        for block_hash in self._uncommitted(sequence):
            if self.computing.get(block_hash) == sequence.id:
                del self.computing[block_hash]

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Blocks filled by the committed positions [start, end) can be shared from now on."""
        if not self._config.enable_prefix_caching:
            return
        first, last = start // self._config.block_size, end // self._config.block_size
        self.hash_blocks(sequence, last)
        hashes = sequence.hashes[1 + first : 1 + last]
        for block, block_hash in zip(sequence.table.blocks[first:last], hashes, strict=True):
            self._pool.publish(block, block_hash)
            self.computing.pop(block_hash, None)

    def hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """`hashes` covers the first `num_blocks` blocks (entry 0 is the root)."""
        size, hashes = self._config.block_size, sequence.hashes
        first = len(hashes) - 1
        if first < num_blocks:
            tokens = sequence.tokens[first * size : num_blocks * size]
            hashes += chain_hashes(hashes[-1], tokens, size)

    def _usable(self, sequence: Sequence) -> int:
        """Full blocks that may be shared: at least one token is always computed."""
        if not self._config.enable_prefix_caching or sequence.params.prompt_logprobs is not None:
            return 0
        return (len(sequence.tokens) - 1) // self._config.block_size

    def _uncommitted(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes known so far of blocks that the sequence has not committed."""
        return sequence.hashes[1 + sequence.committed // self._config.block_size :]
