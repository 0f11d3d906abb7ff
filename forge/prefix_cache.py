"""Prefix cache: which blocks a sequence can start on, and which it should wait for.

Owns the hashes of sequences and the list of blocks in progress. Knows no queue or plan. The
BlockPool owns the blocks and finds them by hash, the HostCache those in host memory.

    a new sequence      [ cached | cached | in progress | ... ]
                          starts on these   waits for the commit of this one, then starts on it too

Always true: a block in progress belongs to a running sequence that will compute or load it. It
leaves the list when that step is committed or the sequence stops running. So waiting for it ends at
a commit.
"""

from __future__ import annotations

from itertools import groupby

from forge.blocks import BlockHash, BlockPool, chain_hashes, root_hash
from forge.config import EngineConfig
from forge.host_cache import HostCache
from forge.kv_events import KVEventLog
from forge.request import Request
from forge.sequence import Sequence


class PrefixCache:
    """Finds and publishes blocks of known prefixes.

    blocks_in_progress   hash of a block that is being computed or loaded -> id of its sequence
    namespace            part of every block's key; a scheduler replaces it with all blocks
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        host_cache: HostCache,
        kv_events: KVEventLog | None = None,
    ) -> None:
        self.blocks_in_progress: dict[BlockHash, int] = {}
        self.namespace = config.cache_namespace
        self._config = config
        self._pool = pool
        self._host_cache = host_cache
        self._kv_events = kv_events

    @property
    def is_enabled(self) -> bool:
        """True where blocks are shared between sequences."""
        return self._config.enable_prefix_caching

    def root_hash(self, request: Request) -> BlockHash:
        """Return the hash before the request's first block."""
        return root_hash(self.namespace, request.cache_salt, self._config.block_size)

    def rehash(self, sequence: Sequence) -> None:
        """Replace the hashes of a sequence without blocks, after a change of the namespace."""
        num_blocks = len(sequence.hashes) - 1
        sequence.hashes = [self.root_hash(sequence.request)]
        self.extend_hashes(sequence, num_blocks)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the published blocks that the sequence can start on."""
        num_shareable = self.num_shareable_blocks(sequence)
        self.extend_hashes(sequence, num_shareable)
        return self._pool.lookup(sequence.hashes[1 : num_shareable + 1])

    def host_blocks(self, sequence: Sequence, num_cached: int) -> list[int]:
        """Return the host blocks that follow the sequence's first `num_cached` blocks."""
        num_shareable = self.num_shareable_blocks(sequence)
        return self._host_cache.lookup(sequence.hashes[1 + num_cached : 1 + num_shareable])

    def missing_blocks(self, sequence: Sequence) -> tuple[int, list[BlockHash]]:
        """Return the shareable blocks after those on the device and in the host pool.

        They are the index of the first one, and the hashes of all.
        """
        num_found = len(self.cached_blocks(sequence))
        num_found += len(self.host_blocks(sequence, num_found))
        hashes = sequence.hashes[1 + num_found : 1 + self.num_shareable_blocks(sequence)]
        return num_found, hashes

    def next_block_in_progress(self, sequence: Sequence) -> bool:
        """Return whether another sequence computes or loads the block after the cached ones."""
        num_hits = len(self.cached_blocks(sequence))
        return (
            num_hits < self.num_shareable_blocks(sequence)
            and sequence.hashes[num_hits + 1] in self.blocks_in_progress
        )

    def add_in_progress(self, sequence: Sequence) -> None:
        """List the shareable blocks that the sequence will compute or load, if not listed yet."""
        for block_hash in self._uncommitted_hashes(sequence):
            self.blocks_in_progress.setdefault(block_hash, sequence.id)

    def remove_in_progress(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks from the list. Call it before `num_committed` is reset."""
        for block_hash in self._uncommitted_hashes(sequence):
            if self.blocks_in_progress.get(block_hash) == sequence.id:
                del self.blocks_in_progress[block_hash]

    def publish(self, sequence: Sequence, start: int, end: int) -> list[bool]:
        """Publish the blocks that the committed positions [start, end) filled, and unlist them.

        Return whether each is new to the cache. Does nothing without prefix caching.
        """
        if not self._config.enable_prefix_caching:
            return []
        first_index, end_index = start // self._config.block_size, end // self._config.block_size
        self.extend_hashes(sequence, end_index)
        hashes = sequence.hashes[1 + first_index : 1 + end_index]
        are_new = []
        for block, block_hash in zip(
            sequence.table.blocks[first_index:end_index], hashes, strict=True
        ):
            are_new.append(self._pool.publish(block, block_hash))
            self.blocks_in_progress.pop(block_hash, None)
        if self._kv_events is not None:
            self._record_events(self._kv_events, sequence, first_index, are_new)
        if self._config.host_tier is not None:
            self._host_cache.touch(hashes)
        return are_new

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend `hashes` to the first `num_blocks` blocks. Entry 0 is the root."""
        size, hashes = self._config.block_size, sequence.hashes
        first = len(hashes) - 1
        if first < num_blocks:
            tokens = sequence.tokens[first * size : num_blocks * size]
            hashes += chain_hashes(hashes[-1], tokens, size)

    def num_shareable_blocks(self, sequence: Sequence) -> int:
        """Return how many full blocks can be shared: at least one token is always computed.

        0 without prefix caching, and with prompt logprobs: they need every prompt position.
        """
        if not self._config.enable_prefix_caching or sequence.params.prompt_logprobs is not None:
            return 0
        return (len(sequence.tokens) - 1) // self._config.block_size

    def _record_events(
        self, kv_events: KVEventLog, sequence: Sequence, first_index: int, are_new: list[bool]
    ) -> None:
        """Record the blocks of the sequence that were published: one event for each run of them.

        are_new   whether each block was published, from index `first_index` of the table on
        """
        size = self._config.block_size
        index = first_index
        for is_new, run in groupby(are_new):
            start, index = index, index + len(list(run))
            if is_new:
                kv_events.record_prefix(
                    sequence.hashes[1 + start : 1 + index],
                    sequence.hashes[start] if start else None,  # the root is of no block
                    sequence.tokens[start * size : index * size],
                )

    def _uncommitted_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Return the known hashes of blocks that the sequence has not committed."""
        return sequence.hashes[1 + sequence.num_committed // self._config.block_size :]
