"""Find the bug: one of four methods of the block pool has a planted one.

`Pool` is forge's block pool with four methods written out. Three are right. The check runs the
engine on this pool in small random worlds with faults (aborts, failing steps, a pool that is
resized) and tests every invariant after every step. It prints the first world that breaks, with the
fewest operations that break it. Read what was violated, find the method, fix it.

Three methods that you do not see here are right:

    allocate   returns empty blocks, then evicts cached ones, the least recently used first
    share      adds a reference to each block: a cached one is used from then on
    free       drops a reference from each block, the last one of the list first: one without
               references is cached or empty

The check also compares tables, free blocks and hashes of your pool with those of forge's.
"""

from collections.abc import Sequence

from forge.blocks import BlockPool, BlockTable, TableGrowth
from forge.errors import DuplicateSequence, OutOfBlocks, UnknownSequence


class Pool(BlockPool):
    """forge's block pool; a table is the list of the blocks of one sequence."""

    def open(self, seq_id: int, num_tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """Create a table with room for `num_tokens` that starts on the `shared` blocks.

        `shared` is what `lookup` has returned: blocks that other tables hold, or cached ones.
        """
        if seq_id in self.tables:
            raise DuplicateSequence(seq_id)
        num_needed = self.num_blocks_to_open(num_tokens, shared)
        if num_needed > self.num_free_blocks:
            raise OutOfBlocks(num_needed, self.num_free_blocks)
        new_blocks = self.allocate(max(0, self.num_blocks_for(num_tokens) - len(shared)))
        assert new_blocks is not None, f"{num_needed} blocks were there"
        self.share(shared)
        table = BlockTable([*shared, *new_blocks], len(shared) * self.block_size)
        table.capacity = len(table.blocks) * self.block_size
        self.tables[seq_id] = table
        return table

    def grow(self, seq_id: int, num_tokens: int) -> TableGrowth:
        """Make room for `num_tokens` more tokens in blocks that this table alone holds.

        A shared or published block that the next token is written to is replaced by a copy.
        """
        table = self.tables.get(seq_id)
        if table is None:
            raise UnknownSequence(seq_id)
        keep, first_index = len(table.blocks), table.num_tokens // self.block_size
        is_read_only = first_index < keep and (
            self.ref_count(table.blocks[first_index]) > 1
            or self.hash_of(table.blocks[first_index]) is not None
        )
        num_missing = max(0, self.num_blocks_for(table.num_tokens + num_tokens) - keep)
        new_blocks = self.allocate(is_read_only + num_missing)
        if new_blocks is None:
            raise OutOfBlocks(is_read_only + num_missing, self.num_free_blocks)
        copy = None
        if is_read_only:
            keep, source = first_index, table.blocks[first_index]
            copy = (source, new_blocks[0])
            table.blocks[first_index] = new_blocks.pop(0)
            self.free([source])
            self.num_copies += 1
        table.blocks += new_blocks
        table.capacity = len(table.blocks) * self.block_size
        return TableGrowth(keep, tuple(table.blocks[keep:]), copy)

    def fork(self, seq_id: int, child_id: int, num_tokens: int) -> BlockTable:
        """Create a table for `child_id` that shares the blocks of the first `num_tokens` tokens."""
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
