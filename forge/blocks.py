"""The paged cache's bookkeeping: BlockPool and its block tables. Counts and ids, no tensors.

Owns which block belongs to whom, what is cached under which hash, and in which order unused blocks
are reused. Knows no sequence, plan or model: a table is named by an integer.

Every block is in exactly one place:

    free      nobody's, no content        stack: the block given back last is taken first
    held      in one table or more        reference count = tables that name it
    cached    nobody's, content kept      least recently used first; evicted when free runs out

A held or cached block may be published: its content is found again under the hash of its tokens and
of everything before them. Only full blocks whose step has been committed are ever published.

Blocks and tables: Kwon et al. 2023 (PagedAttention). Hash chain: vLLM's automatic prefix caching,
here with BLAKE2b and a salt so that a hash cannot be forged and salts cannot see each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

from forge.errors import BlocksInUse, DuplicateSequence, OutOfBlocks, UnknownSequence

BlockHash = bytes


def root_hash(namespace: str, salt: str, block_size: int) -> BlockHash:
    """The hash before the first block. Different namespace, salt or block size: nothing shared."""
    return blake2b(repr((namespace, salt, block_size)).encode()).digest()


def _packed(tokens: Sequence[int]) -> bytes:
    return pack(f"<{len(tokens)}i", *tokens)


def chain_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The hash of a full block: of its tokens and, through `parent`, of all tokens before."""
    return blake2b(parent + _packed(tokens)).digest()


def chain_hashes(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """`chain_hash` of each full block of `tokens`, the first of them behind `parent`."""
    text, width = _packed(tokens), 4 * block_size  # packed once: half of what each alone costs
    hashes = []
    for begin in range(0, len(text), width):
        parent = blake2b(parent + text[begin : begin + width]).digest()
        hashes.append(parent)
    return hashes


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence in order, and how many of their positions are in use.

    Owned by the pool. The scheduler advances `num_tokens`; only the pool changes the rest.
    `capacity` is len(blocks) * block_size, kept because it is read once per row and step.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    capacity: int = 0


class Grown(NamedTuple):
    """How a table changed: blocks before `keep` stayed, `new_blocks` follow, `copied` came first.

    copied   (source, target): target replaces source in this table and needs its content
    """

    keep: int
    new_blocks: tuple[int, ...]
    copied: tuple[int, int] | None = None


class BlockPool:
    """Hands out blocks, counts their owners, finds and evicts cached ones."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"{num_blocks=} {block_size=}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[int, BlockTable] = {}
        self.evictions = 0
        self.copies = 0
        self.peak_used = 0
        self._free = list(range(num_blocks))[::-1]
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    # Figures, all derived from where the blocks are.

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - self.available

    @property
    def utilisation(self) -> float:
        """Held blocks as a share of all, 0 to 1."""
        return self.used / self.num_blocks

    @property
    def fragmentation(self) -> int:
        """Positions in held blocks that no token uses yet, summed over tables."""
        return sum(table.capacity - table.num_tokens for table in self.tables.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions fill or begin."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, seq_id: int, extra: int) -> int:
        """Blocks that `extra` more tokens would take: 0 while the last block's slack holds them."""
        table = self.tables.get(seq_id)
        if table is None:
            return self.blocks_for(extra)
        return max(0, self.blocks_for(table.num_tokens + extra) - len(table.blocks))

    def claim(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """By how much `available` falls when a table over `num_tokens` opens on `shared` blocks."""
        revived = sum(1 for block in shared if block in self._cached)
        return max(0, self.blocks_for(num_tokens) - len(shared)) + revived

    # Blocks.

    def take(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, or None and change nothing.

        Free blocks go first, then the cached block left unused the longest, which is forgotten.
        O(count).
        """
        free, cached, references = self._free, self._cached, self._references
        if count > len(free) + len(cached):
            return None
        taken = free[: -count - 1 : -1]
        del free[len(free) - len(taken) :]
        taken += [self._evict() for _ in range(count - len(taken))]
        for block in taken:
            references[block] = 1
        self.peak_used = max(self.peak_used, self.num_blocks - len(free) - len(cached))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, which is held or cached."""
        for block in blocks:
            assert self._references[block] > 0 or block in self._cached, f"block {block} is free"
            self._cached.pop(block, None)
            self._references[block] += 1
        self.peak_used = max(self.peak_used, self.used)

    def give(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block; one that nobody holds becomes cached or free.

        Last block first: a chain is evicted from its end, so what stays is reachable from its root.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # Tables.

    def open(self, seq_id: int, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """A table for `seq_id` that begins with the `shared` blocks and covers `num_tokens`.

        Raises OutOfBlocks or DuplicateSequence and changes nothing.
        """
        if seq_id in self.tables:
            raise DuplicateSequence(seq_id)
        claim = self.claim(num_tokens, shared)
        if claim > self.available:
            raise OutOfBlocks(claim, self.available)
        # Shared blocks are held before any block is taken: taking could evict one of them.
        self.share(shared)
        fresh = self.take(max(0, self.blocks_for(num_tokens) - len(shared)))
        assert fresh is not None, f"{claim} blocks were there"
        table = self.tables[seq_id] = BlockTable([*shared, *fresh], len(shared) * self.block_size)
        table.capacity = len(table.blocks) * self.block_size
        return table

    def grow(self, seq_id: int, num_tokens: int) -> Grown:
        """The table of `seq_id` can take `num_tokens` more tokens, in blocks nobody else sees.

        A shared or published block that the next token would be written into is replaced by a
        private one (copy-on-write). Raises OutOfBlocks or UnknownSequence and changes nothing.
        """
        table = self.tables.get(seq_id)
        if table is None:
            raise UnknownSequence(seq_id)
        first = table.num_tokens // self.block_size
        private = int(first < len(table.blocks) and self._read_only(table.blocks[first]))
        last = -(-(table.num_tokens + num_tokens) // self.block_size)
        missing = max(0, last - len(table.blocks))
        if not (private or missing):  # so it is for most rows of most steps
            return Grown(len(table.blocks), (), None)
        taken = self.take(private + missing)
        if taken is None:
            raise OutOfBlocks(private + missing, self.available)
        copied = None
        keep = len(table.blocks)
        if private:
            copied = (table.blocks[first], taken[0])
            keep = first
            self.give(table.blocks[first : first + 1])
            table.blocks[first] = taken[0]
            self.copies += 1
        table.blocks += taken[private:]
        table.capacity = len(table.blocks) * self.block_size
        return Grown(keep, tuple(table.blocks[keep:]), copied)

    def lengthen(self, seq_ids: Sequence[int]) -> list[int]:
        """Each of these full tables has one more block: these. There is one for each of them.

        As `grow` by a token, for all who need that in a step. A leap of the simulator counts its
        tokens first: a table that is more than full may be named again.
        """
        blocks = self.take(len(seq_ids))
        assert blocks is not None, f"{len(seq_ids)} blocks of {self.available}"
        for seq_id, block in zip(seq_ids, blocks, strict=True):
            table = self.tables[seq_id]
            assert table.num_tokens >= table.capacity, f"the table of {seq_id} is not full"
            table.blocks.append(block)
            table.capacity += self.block_size
        return blocks

    def append(self, seq_id: int, num_tokens: int) -> Grown:
        """`num_tokens` more tokens are in the table. Raises as `grow` does."""
        grown = self.grow(seq_id, num_tokens)
        self.tables[seq_id].num_tokens += num_tokens
        return grown

    def shrink(self, seq_id: int, num_tokens: int, num_blocks: int) -> None:
        """The table of `seq_id` has `num_tokens` tokens, and no more than `num_blocks` blocks.

        What goes back was taken for drafts: nobody shares it and nothing of it is published.
        """
        table = self.tables[seq_id]
        assert self.blocks_for(num_tokens) <= num_blocks, f"{num_tokens=} {num_blocks=}"
        table.num_tokens = num_tokens
        spare = table.blocks[num_blocks:]
        if spare:
            assert not any(map(self._read_only, spare)), f"{spare=} are not of {seq_id} alone"
            self.give(spare)
            del table.blocks[num_blocks:]
            table.capacity = len(table.blocks) * self.block_size

    def fork(self, seq_id: int, child_id: int, num_tokens: int) -> BlockTable:
        """A table for `child_id` that shares the blocks of the first `num_tokens` tokens.

        No block is taken: the first write into a shared block copies it.
        Raises UnknownSequence or DuplicateSequence and changes nothing.
        """
        table = self.tables.get(seq_id)
        if table is None:
            raise UnknownSequence(seq_id)
        child = self.open(child_id, 0, table.blocks[: self.blocks_for(num_tokens)])
        child.num_tokens = num_tokens
        return child

    def release(self, seq_id: int) -> None:
        """`seq_id` holds no block. The only way out of a table; releasing twice changes nothing."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.give(table.blocks)
            table.blocks, table.num_tokens, table.capacity = [], 0, 0

    # The prefix cache.

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Published blocks for the longest prefix of `hashes`, held or cached."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """`block` is found under `block_hash`. Call when the step that filled it is committed.

        Where another block is found under the hash already, that one stays.
        """
        assert self._references[block] > 0, f"block {block} is not held"
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def reset_cache(self) -> None:
        """No block is published. Held blocks stay with their tables."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()

    def resize(self, num_blocks: int) -> None:
        """The pool has ids 0 to num_blocks - 1. Cached blocks past the end are forgotten.

        Raises BlocksInUse and changes nothing when a table names a block past the end.
        """
        assert num_blocks > 0, f"{num_blocks=}"
        held = sum(1 for count in self._references[num_blocks:] if count)
        if held:
            raise BlocksInUse(num_blocks, held)
        for block in [b for b in self._cached if b >= num_blocks]:
            del self._cached[block]
            self._forget(block)
        self._free = [b for b in self._free if b < num_blocks]
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        del self._references[num_blocks:]
        self._references += [0] * (num_blocks - len(self._references))
        self.num_blocks = num_blocks

    def _read_only(self, block: int) -> bool:
        return self._references[block] > 1 or block in self._hash_of

    def _evict(self) -> int:
        # Leaving the cache and losing the hash are one operation: no lookup finds a reused block.
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self.evictions += 1
        return block

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
