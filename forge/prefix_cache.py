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


class PrefixCache:
    """Finds, claims and publishes the blocks of known prefixes."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.blocks_in_progress: dict[BlockHash, int] = {}
        self._config = config
        self._pool = pool

    @property
    def is_enabled(self) -> bool:
        """Whether blocks are shared between sequences."""
        return self._config.enable_prefix_caching

    def root_hash(self, request: Request) -> BlockHash:
        """The hash before the request's first block."""
        return root_hash(self._config.cache_namespace, request.cache_salt, self._config.block_size)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Published blocks that the sequence may begin on."""
        num_shareable = self._num_shareable_blocks(sequence)
        self.extend_hashes(sequence, num_shareable)
        return self._pool.lookup(sequence.hashes[1 : num_shareable + 1])

    def next_block_in_progress(self, sequence: Sequence) -> bool:
        """The block behind the cached ones is being computed by somebody else."""
        num_hits = len(self.cached_blocks(sequence))
        return (
            num_hits < self._num_shareable_blocks(sequence)
            and sequence.hashes[num_hits + 1] in self.blocks_in_progress
        )

    def add_in_progress(self, sequence: Sequence) -> None:
        """Others wait for the blocks that the sequence is about to compute."""
        for block_hash in self._uncommitted_hashes(sequence):
            self.blocks_in_progress.setdefault(block_hash, sequence.id)

    def remove_in_progress(self, sequence: Sequence) -> None:
        """Nobody waits for the sequence any more. Before its `num_committed` is forgotten."""
        for block_hash in self._uncommitted_hashes(sequence):
            if self.blocks_in_progress.get(block_hash) == sequence.id:
                del self.blocks_in_progress[block_hash]

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Blocks filled by the committed positions [start, end) can be shared from now on."""
        if not self._config.enable_prefix_caching:
            return
        first_index, end_index = start // self._config.block_size, end // self._config.block_size
        self.extend_hashes(sequence, end_index)
        hashes = sequence.hashes[1 + first_index : 1 + end_index]
        for block, block_hash in zip(
            sequence.table.blocks[first_index:end_index], hashes, strict=True
        ):
            self._pool.publish(block, block_hash)
            self.blocks_in_progress.pop(block_hash, None)

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """`hashes` covers the first `num_blocks` blocks (entry 0 is the root)."""
        size, hashes = self._config.block_size, sequence.hashes
        first = len(hashes) - 1
        if first < num_blocks:
            tokens = sequence.tokens[first * size : num_blocks * size]
            hashes += chain_hashes(hashes[-1], tokens, size)

    def _num_shareable_blocks(self, sequence: Sequence) -> int:
        """Full blocks that may be shared: at least one token is always computed."""
        if not self._config.enable_prefix_caching or sequence.params.prompt_logprobs is not None:
            return 0
        return (len(sequence.tokens) - 1) // self._config.block_size

    def _uncommitted_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes known so far of blocks that the sequence has not committed."""
        return sequence.hashes[1 + sequence.num_committed // self._config.block_size :]
