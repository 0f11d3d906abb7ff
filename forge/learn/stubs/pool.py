"""Write a block pool: look up a prefix, evict a block, fork a table.

The pool below has tables (the blocks of each sequence), reference counts (how many tables hold a
block) and a prefix cache (blocks by the hash of their tokens and of all before). A block is empty,
cached (in no table, content kept) or used. Three methods are yours:

    lookup   finds the longest prefix of a chain of hashes; after a gap nothing can be shared
    evict    takes the least recently used cached block, which no lookup may find afterwards
    fork     gives a child the blocks of a sequence, without allocating any

The check runs random operations on your pool and on forge's BlockPool, and compares tables,
reference counts, the order of free blocks and what `lookup` finds after each of them.
"""

from collections import OrderedDict


class Pool:
    """Blocks 0 to num_blocks - 1, their tables and the prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.tables: dict[int, list[int]] = {}
        self.ref_counts = [0] * num_blocks
        self.empty = list(range(num_blocks))[::-1]  # the last one is allocated first
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.block_by_hash: dict[bytes, int] = {}
        self.hash_by_block: dict[int, bytes] = {}

    def lookup(self, hashes: list[bytes]) -> list[int]:
        """Return the published blocks of the longest prefix of `hashes`."""
        raise NotImplementedError

    def evict(self) -> int:
        """Remove the least recently used block from the prefix cache, and return it."""
        raise NotImplementedError

    def fork(self, seq_id: int, child_id: int) -> None:
        """Create a table for `child_id` with the blocks of `seq_id`: both hold them."""
        raise NotImplementedError

    # The rest is complete.

    def allocate(self) -> int:
        """Return a block with one reference: an empty one, otherwise an evicted one."""
        block = self.empty.pop() if self.empty else self.evict()
        self.ref_counts[block] = 1
        return block

    def open(self, seq_id: int, shared: list[int], num_new: int) -> None:
        """Create a table of `shared` blocks and `num_new` others."""
        for block in shared:
            self.cached.pop(block, None)
            self.ref_counts[block] += 1
        self.tables[seq_id] = [*shared, *(self.allocate() for _ in range(num_new))]

    def append(self, seq_id: int) -> None:
        """Add a block to a table."""
        self.tables[seq_id].append(self.allocate())

    def release(self, seq_id: int) -> None:
        """Remove a table. The last block is freed first, so a chain is evicted from its end."""
        for block in reversed(self.tables.pop(seq_id)):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.hash_by_block:
                    self.cached[block] = None
                else:
                    self.empty.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let `lookup` find the block under this hash."""
        if block_hash not in self.block_by_hash and block not in self.hash_by_block:
            self.block_by_hash[block_hash] = block
            self.hash_by_block[block] = block_hash
