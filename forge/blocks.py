"""Block pool: which blocks of the KV cache are empty, cached or used. Ids and counts, no tensors.

Owns the block tables, the reference counts, the hashes of published blocks, and the order in which
unused blocks are reused. Knows no sequence, plan or model: a table is named by an integer.

Every block is in exactly one place:

    empty     in no table, no content     stack: the block freed last is allocated first
    cached    in no table, content kept   least recently used first; evicted when no block is empty,
                                          protected ones when no other is left
    used      in one table or more        reference count = tables that name it

Empty and cached blocks are free: `allocate` may return them. Blocks that are expected to be used
again are protected, by their hashes; those that are not are demoted, to be evicted first.
With a host pool, a dirty block is a published one that is to be stored there before it is evicted:
others are evicted first.
A cached block is published, a used one may be: its content is found again under the hash of its
tokens and of everything before them. Only full blocks whose step has been committed are published.

Blocks and tables: Kwon et al. 2023 (PagedAttention). Hash chain: vLLM's automatic prefix caching,
here with BLAKE2b and a salt, so that a hash cannot be forged and salts share nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

from forge.errors import BlocksInUse, DuplicateSequence, OutOfBlocks, UnknownSequence
from forge.kv_events import DEVICE, KVEventLog

BlockHash = bytes

NO_BLOCK = -1


def root_hash(namespace: str, salt: str, block_size: int) -> BlockHash:
    """Return the hash before the first block.

    Another namespace, salt or block size shares nothing.
    """
    return blake2b(repr((namespace, salt, block_size)).encode()).digest()


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    return pack(f"<{len(tokens)}i", *tokens)


def chain_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the hash of a full block: of its tokens and, through `parent`, of all before."""
    return blake2b(parent + _pack_tokens(tokens)).digest()


def chain_hashes(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the `chain_hash` of each block of `tokens`; the first one follows `parent`.

    tokens   of full blocks only: a rest would be hashed as a block
    """
    data, width = (
        _pack_tokens(tokens),
        4 * block_size,
    )  # packed once takes half the time
    hashes = []
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes


def blocks_of_prefix(
    block_by_hash: Mapping[BlockHash, int], hashes: Iterable[BlockHash]
) -> list[int]:
    """Return the blocks of the longest prefix of `hashes` that the mapping has."""
    blocks = []
    for block_hash in hashes:
        block = block_by_hash.get(block_hash)
        if block is None:
            break
        blocks.append(block)
    return blocks


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence in order, and how many of their positions are in use.

    Owned by the pool. Planning also sets `num_tokens`; only the pool changes the rest.
    `capacity` is len(blocks) * block_size, kept because it is read once per row and step.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    capacity: int = 0


class TableGrowth(NamedTuple):
    """Change of a table: blocks before `keep` stayed, `new_blocks` follow, `copy` came first.

    copy   (source, target): target replaces source in this table and needs its content
    """

    keep: int
    new_blocks: tuple[int, ...]
    copy: tuple[int, int] | None = None


class BlockPool:
    """Allocates blocks, counts the tables that hold them, and finds and evicts cached ones.

    kv_events   log of removals that someone reads, or None
    """

    def __init__(
        self, num_blocks: int, block_size: int, kv_events: KVEventLog | None = None
    ) -> None:
        assert num_blocks > 0 and block_size > 0, f"{num_blocks=} {block_size=}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[int, BlockTable] = {}
        self.num_evictions = 0
        self.num_copies = 0
        self.peak_used_blocks = 0
        self._empty_blocks = list(range(num_blocks))[::-1]
        self._ref_counts = [0] * num_blocks
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()
        self._protected_blocks: OrderedDict[int, None] = OrderedDict()  # cached ones too
        self._dirty: set[int] = set()  # blocks; never iterated over
        self._dirty_cached_blocks: OrderedDict[int, None] = OrderedDict()
        self._dirty_protected_blocks: OrderedDict[int, None] = OrderedDict()
        self._protected_hashes: set[BlockHash] = set()
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}
        self._kv_events = kv_events

    # Figures, derived from where the blocks are.

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return now: empty and cached ones."""
        return (  # without a second property, since each step reads it several times
            len(self._empty_blocks)
            + len(self._cached_blocks)
            + len(self._dirty_cached_blocks)
            + len(self._protected_blocks)
            + len(self._dirty_protected_blocks)
        )

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in no table whose content is kept."""
        return self.num_free_blocks - len(self._empty_blocks)

    @property
    def num_disposable_blocks(self) -> int:
        """Blocks that `allocate` returns before a protected one: empty and other cached blocks."""
        return len(self._empty_blocks) + len(self._cached_blocks) + len(self._dirty_cached_blocks)

    @property
    def num_dirty_cached_blocks(self) -> int:
        """Cached blocks whose eviction loses what is to be stored in the host pool."""
        return len(self._dirty_cached_blocks) + len(self._dirty_protected_blocks)

    def count_disposable(self, blocks: Iterable[int]) -> int:
        """Return how many of these published blocks are counted in `num_disposable_blocks`."""
        disposable, dirty = self._cached_blocks, self._dirty_cached_blocks
        return sum(block in disposable or block in dirty for block in blocks)

    @property
    def num_published_blocks(self) -> int:
        """Blocks that `lookup` can find, used or cached."""
        return len(self._hash_by_block)

    @property
    def published_blocks(self) -> KeysView[int]:
        """Blocks that `lookup` can find, used or cached, as they are at any later time too."""
        return self._hash_by_block.keys()

    @property
    def free_blocks(self) -> list[int]:
        """Free blocks in the order in which `allocate` returns them."""
        return [*reversed(self._empty_blocks), *(b for each in self._cached_lists for b in each)]

    @property
    def next_free_block(self) -> int | None:
        """Block that `allocate` returns next, empty or cached; None where none is free."""
        if self._empty_blocks:
            return self._empty_blocks[-1]
        for cached in self._cached_lists:
            if cached:
                return next(iter(cached))
        return None

    @property
    def num_used_blocks(self) -> int:
        """Used blocks: those in at least one table."""
        return self.num_blocks - self.num_free_blocks

    @property
    def usage_ratio(self) -> float:
        """Held blocks as a share of all, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def num_unused_positions(self) -> int:
        """Positions without a token in used blocks, summed over tables."""
        return sum(table.capacity - table.num_tokens for table in self.tables.values())

    def ref_count(self, block: int) -> int:
        """Return how many tables hold the block."""
        return self._ref_counts[block]

    def hash_of(self, block: int) -> BlockHash | None:
        """Return the hash under which the block is published, or None."""
        return self._hash_by_block.get(block)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` positions fill or begin."""
        return -(-num_tokens // self.block_size)

    def num_blocks_to_grow(self, seq_id: int, num_tokens: int) -> int:
        """Return how many blocks a table lacks for `num_tokens` more tokens, copies not counted.

        A table that does not exist yet lacks all.
        """
        table = self.tables.get(seq_id)
        if table is None:
            return self.num_blocks_for(num_tokens)
        return max(0, self.num_blocks_for(table.num_tokens + num_tokens) - len(table.blocks))

    def num_blocks_to_open(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """Return by how much `num_free_blocks` falls when a table is opened.

        The table has `num_tokens` positions and starts on the `shared` blocks.
        """
        num_revived = sum(1 for block in shared if not self._ref_counts[block])
        return max(0, self.num_blocks_for(num_tokens) - len(shared)) + num_revived

    # Blocks.

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks with one reference each, or return None and change nothing.

        Empty blocks are allocated first, then the least recently used cached block, which is
        evicted; a dirty one when no other is cached, and protected ones last. O(count).
        """
        free, ref_counts = self._empty_blocks, self._ref_counts
        num_free = self.num_free_blocks
        if count > num_free:
            return None
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        blocks += [self._evict() for _ in range(count - len(blocks))]
        for block in blocks:
            ref_counts[block] = 1
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_blocks - num_free + count)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, used or cached."""
        for block in blocks:
            if not self._ref_counts[block]:
                assert block in self._hash_by_block, f"block {block} is empty"
                del self._cached_list(block)[block]
            self._ref_counts[block] += 1
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block. A block without references becomes cached or empty.

        The last block is freed first: a chain is evicted from its end, so the rest stays reachable.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._hash_by_block:
                    self._cached_list(block)[block] = None
                else:
                    self._empty_blocks.append(block)

    # Tables.

    def open(self, seq_id: int, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """Create a table with room for `num_tokens` that starts on the `shared` blocks.

        `BlockTable.num_tokens` then counts the positions of `shared` only. Raises OutOfBlocks or
        DuplicateSequence and changes nothing.
        """
        if seq_id in self.tables:
            raise DuplicateSequence(seq_id)
        num_needed = self.num_blocks_to_open(num_tokens, shared)
        if num_needed > self.num_free_blocks:
            raise OutOfBlocks(num_needed, self.num_free_blocks)
        # Shared blocks are held before allocation, which could evict one of them.
        if shared:
            self.share(shared)
        new_blocks = self.allocate(max(0, self.num_blocks_for(num_tokens) - len(shared)))
        assert new_blocks is not None, f"{num_needed} blocks were there"
        table = self.tables[seq_id] = BlockTable(
            [*shared, *new_blocks], len(shared) * self.block_size
        )
        table.capacity = len(table.blocks) * self.block_size
        return table

    def grow(self, seq_id: int, num_tokens: int) -> TableGrowth:
        """Make room for `num_tokens` more tokens in blocks that the table of `seq_id` alone holds.

        A shared or published block that the next token would be written to is replaced by a private
        one (copy-on-write). Raises OutOfBlocks or UnknownSequence and changes nothing.
        """
        table = self.tables.get(seq_id)
        if table is None:
            raise UnknownSequence(seq_id)
        first_index = table.num_tokens // self.block_size
        num_private = int(
            first_index < len(table.blocks) and self._is_read_only(table.blocks[first_index])
        )
        num_blocks = -(-(table.num_tokens + num_tokens) // self.block_size)
        num_missing = max(0, num_blocks - len(table.blocks))
        if not (num_private or num_missing):  # the case of most rows of most steps
            return TableGrowth(len(table.blocks), (), None)
        new_blocks = self.allocate(num_private + num_missing)
        if new_blocks is None:
            raise OutOfBlocks(num_private + num_missing, self.num_free_blocks)
        copy = None
        keep = len(table.blocks)
        if num_private:
            copy = (table.blocks[first_index], new_blocks[0])
            keep = first_index
            self.free(table.blocks[first_index : first_index + 1])
            table.blocks[first_index] = new_blocks[0]
            self.num_copies += 1
        table.blocks += new_blocks[num_private:]
        table.capacity = len(table.blocks) * self.block_size
        return TableGrowth(keep, tuple(table.blocks[keep:]), copy)

    def grow_full_tables(self, seq_ids: Sequence[int]) -> list[int]:
        """Append one block to each of these full tables, and return the blocks.

        Enough must be free.

        It is `grow` by one token for all tables of a step that need it. A fast-forward counts its
        tokens first, so a table may be named again while it is more than full.
        """
        blocks = self.allocate(len(seq_ids))
        assert blocks is not None, f"{len(seq_ids)} blocks of {self.num_free_blocks}"
        for seq_id, block in zip(seq_ids, blocks, strict=True):
            table = self.tables[seq_id]
            assert table.num_tokens >= table.capacity, f"the table of {seq_id} is not full"
            table.blocks.append(block)
            table.capacity += self.block_size
        return blocks

    def append(self, seq_id: int, num_tokens: int) -> TableGrowth:
        """Add `num_tokens` tokens to the table. Raises as `grow` does."""
        growth = self.grow(seq_id, num_tokens)
        self.tables[seq_id].num_tokens += num_tokens
        return growth

    def shrink(self, seq_id: int, num_tokens: int, num_blocks: int) -> None:
        """Cut the table of `seq_id` to `num_tokens` tokens and at most `num_blocks` blocks.

        The freed blocks were allocated for drafts: they are not shared and not published.
        """
        table = self.tables[seq_id]
        assert self.num_blocks_for(num_tokens) <= num_blocks, f"{num_tokens=} {num_blocks=}"
        table.num_tokens = num_tokens
        spare_blocks = table.blocks[num_blocks:]
        if spare_blocks:
            assert not any(map(self._is_read_only, spare_blocks)), (
                f"{spare_blocks=} are not of {seq_id} alone"
            )
            self.free(spare_blocks)
            del table.blocks[num_blocks:]
            table.capacity = len(table.blocks) * self.block_size

    def fork(self, seq_id: int, child_id: int, num_tokens: int) -> BlockTable:
        """Create a table for `child_id` that shares the blocks of the first `num_tokens` tokens.

        No block is allocated: the first write to a shared block copies it. Raises UnknownSequence
        or DuplicateSequence and changes nothing.
        """
        table = self.tables.get(seq_id)
        if table is None:
            raise UnknownSequence(seq_id)
        child = self.open(child_id, 0, table.blocks[: self.num_blocks_for(num_tokens)])
        child.num_tokens = num_tokens
        return child

    def release(self, seq_id: int) -> None:
        """Remove the table of `seq_id` and free its blocks. A second call changes nothing."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.free(table.blocks)
            table.blocks, table.num_tokens, table.capacity = [], 0, 0

    # The prefix cache.

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the published blocks, used or cached, of the longest prefix of `hashes`."""
        return blocks_of_prefix(self._block_by_hash, hashes)

    def publish(self, block: int, block_hash: BlockHash) -> bool:
        """Let `lookup` find the block under `block_hash`, and return whether that is new.

        Call it when the step that filled it is committed.

        Nothing changes where the block, or another under the hash, is published already.
        """
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash
            return True
        return False

    def mark_dirty(self, block_hash: BlockHash) -> None:
        """Let the block that is published under the hash, if any, be stored before it is evicted.

        A cached block then counts as just used.
        """
        block = self._block_by_hash.get(block_hash)
        if block is not None and block not in self._dirty:
            self._set_dirty(block, is_dirty=True)

    def mark_clean(self, block: int) -> None:
        """Let a dirty block be evicted before those that are dirty still: it is being stored."""
        self._set_dirty(block, is_dirty=False)

    def next_dirty_block(self) -> int | None:
        """Return the cached dirty block that would be evicted first, or None."""
        for blocks in (self._dirty_cached_blocks, self._dirty_protected_blocks):
            if blocks:
                return next(iter(blocks))
        return None

    def protect(self, hashes: Sequence[BlockHash]) -> None:
        """Evict blocks of these hashes only when no other is cached, until `unprotect`.

        It holds for blocks that are published under them later too. Cached ones count as just used,
        and the last one is evicted first.
        """
        self._protected_hashes.update(hashes)
        for block_hash in reversed(hashes):
            block = self._block_by_hash.get(block_hash)
            if block is not None and not self._ref_counts[block]:
                is_dirty = block in self._dirty
                unprotected = self._dirty_cached_blocks if is_dirty else self._cached_blocks
                unprotected.pop(block, None)
                protected = self._cached_list(block)
                protected[block] = None
                protected.move_to_end(block)

    def unprotect(self, hashes: Sequence[BlockHash], *, demote: bool = False) -> None:
        """Evict blocks of these hashes as others again, the last one first.

        demote   the cached ones are evicted before all others, and are not stored; otherwise they
                 count as just used
        """
        self._protected_hashes.difference_update(hashes)
        blocks = [self._block_by_hash.get(block_hash, NO_BLOCK) for block_hash in hashes]
        for block in reversed(blocks):
            for protected in (self._protected_blocks, self._dirty_protected_blocks):
                if block in protected:
                    del protected[block]
                    self._cached_list(block)[block] = None
        for block in blocks if demote else ():
            if block in self._dirty_cached_blocks:
                self.mark_clean(block)
            if block in self._cached_blocks:
                self._cached_blocks.move_to_end(block, last=False)

    def reset_cache(self) -> None:
        """Unpublish every block. Used blocks stay in their tables, cached ones become empty."""
        for cached in reversed(self._cached_lists):
            self._empty_blocks += reversed(cached)
            cached.clear()
        self._dirty.clear()
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def resize(self, num_blocks: int) -> None:
        """Change the pool to ids 0 to num_blocks - 1. Cached blocks past the end are evicted.

        Raises BlocksInUse and changes nothing when a table names a block past the end.
        """
        assert num_blocks > 0, f"{num_blocks=}"
        num_held = sum(1 for count in self._ref_counts[num_blocks:] if count)
        if num_held:
            raise BlocksInUse(num_blocks, num_held)
        for cached in self._cached_lists:
            for block in [b for b in cached if b >= num_blocks]:
                del cached[block]
                self._unpublish(block)
        self._empty_blocks = [b for b in self._empty_blocks if b < num_blocks]
        self._empty_blocks[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        del self._ref_counts[num_blocks:]
        self._ref_counts += [0] * (num_blocks - len(self._ref_counts))
        self.num_blocks = num_blocks

    def _is_read_only(self, block: int) -> bool:
        return self._ref_counts[block] > 1 or block in self._hash_by_block

    def _cached_list(self, block: int) -> OrderedDict[int, None]:
        """Return the list in which a published block is, or is to be, while no table has it."""
        is_dirty = block in self._dirty
        if self._protected_hashes and self._hash_by_block[block] in self._protected_hashes:
            return self._dirty_protected_blocks if is_dirty else self._protected_blocks
        return self._dirty_cached_blocks if is_dirty else self._cached_blocks

    def _set_dirty(self, block: int, *, is_dirty: bool) -> None:
        """Change whether a published block is dirty, and its list while it is cached."""
        is_cached = not self._ref_counts[block]
        if is_cached:
            self._cached_list(block).pop(block)
        if is_dirty:
            self._dirty.add(block)
        else:
            self._dirty.remove(block)
        if is_cached:
            self._cached_list(block)[block] = None

    @property
    def _cached_lists(self) -> tuple[OrderedDict[int, None], ...]:
        """The lists of cached blocks in the order in which they are evicted."""
        return (
            self._cached_blocks,
            self._dirty_cached_blocks,
            self._protected_blocks,
            self._dirty_protected_blocks,
        )

    def _evict(self) -> int:
        # Leaving the cache and losing the hash are one operation: no lookup finds a reused block.
        cached = (
            self._cached_blocks
            or self._dirty_cached_blocks
            or self._protected_blocks
            or self._dirty_protected_blocks
        )
        block, _ = cached.popitem(last=False)
        self._unpublish(block)
        self.num_evictions += 1
        return block

    def _unpublish(self, block: int) -> None:
        self._dirty.discard(block)
        block_hash = self._hash_by_block.pop(block)
        del self._block_by_hash[block_hash]
        if self._kv_events is not None:
            self._kv_events.record_removed(block_hash, DEVICE)
