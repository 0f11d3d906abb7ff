"""The block pool: which sequence holds each block, what is cached, what is allocated next."""

from __future__ import annotations

import pytest

from forge.blocks import (
    BlockHash,
    BlockPool,
    BlockTable,
    TableGrowth,
    chain_hash,
    chain_hashes,
    root_hash,
)
from forge.errors import (
    BlocksInUse,
    CacheError,
    DuplicateSequence,
    OutOfBlocks,
    UnknownSequence,
)
from tests.core.builders import check_block_pool, snapshot

ROOT = root_hash("model", "", 4)
A = chain_hash(ROOT, [1, 2, 3, 4])
AB = chain_hash(A, [5, 6, 7, 8])
ABC = chain_hash(AB, [9, 10, 11, 12])
X = chain_hash(ROOT, [21, 22, 23, 24])
XY = chain_hash(X, [25, 26, 27, 28])


def create_pool(seqs: dict[int, int], *, blocks: int = 8, block_size: int = 4) -> BlockPool:
    """Return a pool with one open table per {sequence: tokens}."""
    pool = BlockPool(blocks, block_size)
    for seq_id, num_tokens in seqs.items():
        pool.open(seq_id, 0)
        pool.append(seq_id, num_tokens)
    return pool


def publish(pool: BlockPool, seq_id: int, *hashes: BlockHash) -> None:
    for block, block_hash in zip(pool.tables[seq_id].blocks, hashes, strict=False):
        pool.publish(block, block_hash)


# Free blocks.


def test_the_block_given_back_last_is_taken_first() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    pool.free([0])
    assert pool.allocate(3) == [0, 1, 3]


def test_blocks_given_back_together_are_taken_again_in_their_order() -> None:
    pool = BlockPool(4, 4)
    taken = pool.allocate(4)
    assert taken is not None
    pool.free(taken)
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_take_gives_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    before = snapshot(pool)
    assert pool.allocate(2) is None
    assert snapshot(pool) == before
    assert pool.allocate(1) == [2]
    assert pool.allocate(0) == []


def test_a_block_is_free_again_when_its_last_owner_gives_it_back() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    pool.share([0])
    pool.free([0])
    assert pool.num_used_blocks == 1
    pool.free([0])
    assert pool.num_used_blocks == 0


@pytest.mark.parametrize("operation", ["share", "free"])
def test_a_free_block_can_be_neither_shared_nor_freed(operation: str) -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="block 1 is"):
        getattr(pool, operation)([1])


def test_a_free_block_cannot_be_published() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="block 1 is not held"):
        pool.publish(1, A)


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_has_blocks_and_a_block_has_positions(blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError, match="num_blocks="):
        BlockPool(blocks, block_size)


# Tables.


def test_ten_tokens_take_three_blocks_of_four_and_release_returns_them_all() -> None:
    pool = create_pool({1: 10})
    assert (pool.num_used_blocks, pool.num_free_blocks) == (3, 5)
    pool.release(1)
    assert (pool.num_used_blocks, pool.num_free_blocks) == (0, 8)
    assert 1 not in pool.tables


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_grows_only_when_a_block_fills(tokens: int, blocks: int) -> None:
    pool = BlockPool(8, 4)
    pool.open(1, 0)
    for _ in range(tokens):
        pool.append(1, 1)
    assert len(pool.tables[1].blocks) == blocks
    assert pool.tables[1].capacity == 4 * blocks


def test_an_opened_table_covers_its_tokens_and_has_none_yet() -> None:
    pool = BlockPool(8, 4)
    table = pool.open(1, 6)
    assert (table.blocks, table.num_tokens, table.capacity) == ([0, 1], 0, 8)


def test_grow_makes_room_and_append_uses_it() -> None:
    pool = create_pool({1: 3})
    assert pool.grow(1, 2) == TableGrowth(1, (1,), None)
    assert pool.tables[1].num_tokens == 3
    assert pool.append(1, 2) == TableGrowth(2, (), None)
    assert pool.tables[1].num_tokens == 5


def test_fragmentation_is_the_slack_of_each_last_block() -> None:
    """Three sequences of five tokens in blocks of four: 3 x (4 - 1) positions are empty."""
    assert create_pool({1: 5, 2: 5, 3: 5}).num_unused_positions == 9


def test_utilisation_is_the_held_share() -> None:
    pool = BlockPool(8, 4)
    assert pool.usage_ratio == 0.0
    pool.open(1, 16)
    assert pool.usage_ratio == 0.5
    pool.open(2, 16)
    assert pool.usage_ratio == 1.0


def test_a_freed_middle_block_and_a_distant_one_serve_one_newcomer() -> None:
    pool = create_pool({1: 4, 2: 4, 3: 4}, blocks=4)
    pool.release(2)
    assert pool.open(4, 8).blocks == [1, 3]


@pytest.mark.parametrize(("extra", "blocks"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2)])
def test_blocks_needed_counts_the_slack(extra: int, blocks: int) -> None:
    """Six tokens in blocks of four leave a slack of two."""
    assert create_pool({1: 6}).num_blocks_to_grow(1, extra) == blocks


@pytest.mark.parametrize(("extra", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_needed_by_an_unknown_sequence_starts_from_none(extra: int, blocks: int) -> None:
    assert BlockPool(8, 4).num_blocks_to_grow(1, extra) == blocks


def test_peak_is_the_high_water_mark_not_the_current_use() -> None:
    pool = create_pool({1: 12, 2: 8})
    assert pool.peak_used_blocks == 5
    pool.release(1)
    assert (pool.num_used_blocks, pool.peak_used_blocks) == (2, 5)
    pool.open(3, 8)
    assert (pool.num_used_blocks, pool.peak_used_blocks) == (4, 5)
    pool.open(4, 8)
    assert (pool.num_used_blocks, pool.peak_used_blocks) == (6, 6)


def test_peak_counts_a_cached_block_that_is_shared_again() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(1)
    pool.publish(0, A)
    pool.free([0])
    pool.peak_used_blocks = 0
    pool.share([0])
    assert pool.peak_used_blocks == 1


def test_release_twice_or_of_an_unknown_sequence_changes_nothing() -> None:
    pool = create_pool({1: 6, 2: 4})
    table = pool.tables[1]
    pool.release(1)
    before = snapshot(pool)
    pool.release(1)
    pool.release(9)
    assert snapshot(pool) == before
    assert (table.blocks, table.num_tokens, table.capacity) == ([], 0, 0)
    check_block_pool(pool)


# Refusals change nothing.


def test_append_without_blocks_is_refused_and_changes_nothing() -> None:
    pool = create_pool({1: 4, 2: 4}, blocks=2)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="1 block needed, 0 free") as refusal:
        pool.append(1, 1)
    assert (refusal.value.needed, refusal.value.free) == (1, 0)
    assert snapshot(pool) == before


def test_growth_by_several_blocks_is_all_or_nothing() -> None:
    pool = create_pool({1: 4}, blocks=3)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="3 blocks needed, 2 free"):
        pool.grow(1, 9)
    assert snapshot(pool) == before


def test_open_without_blocks_is_refused_and_changes_nothing() -> None:
    pool = create_pool({1: 4}, blocks=2)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free"):
        pool.open(2, 5)
    assert snapshot(pool) == before


def test_open_on_cached_blocks_without_room_for_the_rest_changes_nothing() -> None:
    """Nor does the order of eviction change, nor the high-water mark."""
    pool = create_pool({1: 4, 2: 4, 3: 4}, blocks=3)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(1)
    pool.release(2)
    pool.peak_used_blocks = 1
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks):
        pool.open(4, 12, pool.lookup([A]))
    assert snapshot(pool) == before


def test_append_to_an_unknown_sequence_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    before = snapshot(pool)
    with pytest.raises(UnknownSequence, match="sequence 7 has no block table") as refusal:
        pool.append(7, 1)
    assert refusal.value.seq_id == 7
    assert snapshot(pool) == before


def test_a_second_table_for_one_sequence_is_refused_and_changes_nothing() -> None:
    pool = create_pool({1: 4})
    publish(pool, 1, A)
    before = snapshot(pool)
    with pytest.raises(DuplicateSequence, match="sequence 1 already has") as refusal:
        pool.open(1, 4, [0])
    assert refusal.value.seq_id == 1
    assert snapshot(pool) == before


def test_a_fork_of_an_unknown_or_onto_a_live_sequence_is_refused_and_changes_nothing() -> None:
    pool = create_pool({1: 4, 2: 4})
    before = snapshot(pool)
    with pytest.raises(UnknownSequence):
        pool.fork(9, 3, 4)
    with pytest.raises(DuplicateSequence):
        pool.fork(1, 2, 4)
    assert snapshot(pool) == before


def test_every_refusal_is_a_cache_error() -> None:
    for refusal in (OutOfBlocks, UnknownSequence, DuplicateSequence, BlocksInUse):
        assert issubclass(refusal, CacheError)


# Claims.


@pytest.mark.parametrize(
    ("tokens", "hashes", "claim"),
    [
        pytest.param(10, [], 3, id="nothing shared"),
        pytest.param(10, [A], 2, id="a held block is shared for nothing"),
        pytest.param(10, [X], 3, id="a cached block leaves the cache"),
        pytest.param(10, [X, XY], 3, id="two cached blocks leave the cache"),
        pytest.param(0, [], 0, id="no token"),
        pytest.param(0, [A], 0, id="shared blocks alone"),
    ],
)
def test_a_claim_is_the_decrease_of_available_blocks(
    tokens: int, hashes: list[BlockHash], claim: int
) -> None:
    """Sequence 1 holds A; the chain X, XY is cached."""
    pool = create_pool({1: 4, 2: 8})
    publish(pool, 1, A)
    publish(pool, 2, X, XY)
    pool.release(2)
    shared, before = pool.lookup(hashes), pool.num_free_blocks
    assert len(shared) == len(hashes)
    assert pool.num_blocks_to_open(tokens, shared) == claim
    pool.open(3, tokens, shared)
    assert before - pool.num_free_blocks == claim


# Copy on write.


def test_a_fork_shares_blocks_until_the_first_write() -> None:
    pool = create_pool({1: 6})
    child = pool.fork(1, 2, 6)
    assert (child.blocks, child.num_tokens, child.capacity) == ([0, 1], 6, 8)
    assert pool.num_used_blocks == 2
    assert pool.append(2, 1) == TableGrowth(1, (2,), (1, 2))
    assert (pool.tables[1].blocks, pool.tables[2].blocks) == ([0, 1], [0, 2])
    assert pool.num_copies == 1
    check_block_pool(pool)


def test_the_last_owner_of_a_forked_block_writes_in_place() -> None:
    pool = create_pool({1: 6})
    pool.fork(1, 2, 6)
    pool.append(2, 1)
    assert pool.append(1, 1) == TableGrowth(2, (), None)


def test_a_parent_that_writes_first_copies_too() -> None:
    pool = create_pool({1: 6})
    pool.fork(1, 2, 6)
    assert pool.append(1, 1) == TableGrowth(1, (2,), (1, 2))
    assert (pool.tables[1].blocks, pool.tables[2].blocks) == ([0, 2], [0, 1])


def test_a_published_tail_is_copied_even_by_its_only_owner() -> None:
    """The block has the hash of tokens 1 2 3 4; a write at position 3 would make the hash wrong."""
    pool = create_pool({1: 4})
    publish(pool, 1, A)
    pool.fork(1, 2, 3)
    pool.release(1)
    assert pool.append(2, 1) == TableGrowth(0, (1,), (0, 1))
    assert pool.lookup([A]) == [0]
    check_block_pool(pool)


def test_a_copy_and_further_blocks_come_in_one_growth() -> None:
    pool = create_pool({1: 6})
    pool.fork(1, 2, 5)
    assert pool.append(2, 9) == TableGrowth(1, (2, 3, 4), (1, 2))
    assert pool.tables[2].blocks == [0, 2, 3, 4]


def test_a_fork_at_a_block_edge_needs_no_copy() -> None:
    pool = create_pool({1: 6})
    child = pool.fork(1, 2, 4)
    assert child.blocks == [0]
    assert pool.append(2, 1) == TableGrowth(1, (2,), None)


def test_a_copy_that_finds_no_block_is_refused_and_changes_nothing() -> None:
    pool = create_pool({1: 6}, blocks=2)
    pool.fork(1, 2, 6)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="1 block needed, 0 free"):
        pool.append(2, 1)
    assert snapshot(pool) == before


# The prefix cache.


def test_lookup_finds_the_longest_contiguous_prefix() -> None:
    pool = create_pool({1: 12})
    blocks = pool.tables[1].blocks
    pool.publish(blocks[0], A)
    pool.publish(blocks[2], ABC)
    assert pool.lookup([A, AB, ABC]) == [blocks[0]]
    pool.publish(blocks[1], AB)
    assert pool.lookup([A, AB, ABC]) == blocks
    assert pool.lookup([X, A]) == []
    assert pool.lookup([]) == []


def test_a_released_block_is_still_found_when_published_and_only_then() -> None:
    pool = create_pool({1: 8})
    publish(pool, 1, A)
    pool.release(1)
    assert (pool.num_used_blocks, pool.num_cached_blocks, pool.num_free_blocks) == (0, 1, 8)
    assert pool.lookup([A, AB]) == [0]


def test_the_first_block_published_under_a_hash_stays() -> None:
    pool = create_pool({1: 4, 2: 4})
    pool.publish(0, A)
    pool.publish(1, A)
    assert pool.lookup([A]) == [0]
    pool.release(2)
    assert pool.num_cached_blocks == 0


def test_a_block_keeps_the_hash_it_was_published_under() -> None:
    pool = create_pool({1: 4})
    pool.publish(0, A)
    pool.publish(0, X)
    assert (pool.lookup([A]), pool.lookup([X])) == ([0], [])
    check_block_pool(pool)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = create_pool({1: 4}, blocks=2)
    publish(pool, 1, A)
    pool.release(1)
    assert pool.allocate(1) == [1]
    assert pool.num_evictions == 0


def test_eviction_forgets_the_block_and_its_hash_at_once() -> None:
    pool = create_pool({1: 4}, blocks=1)
    publish(pool, 1, A)
    pool.release(1)
    assert pool.allocate(1) == [0]
    assert pool.lookup([A]) == []
    assert (pool.num_evictions, pool.num_cached_blocks) == (1, 0)
    pool.publish(0, X)
    assert pool.lookup([X]) == [0]


def test_the_chain_left_unused_the_longest_is_evicted_first_and_from_its_leaf() -> None:
    pool = create_pool({1: 8, 2: 8}, blocks=4)
    publish(pool, 1, A, AB)
    publish(pool, 2, X, XY)
    pool.release(2)
    pool.release(1)
    evicted = []
    for _ in range(4):
        pool.allocate(1)
        evicted += [key for key in (A, AB, X, XY) if not pool.lookup([key]) and key not in evicted]
    assert evicted == [XY, X, AB, A]


def test_sharing_a_cached_block_makes_it_the_last_to_be_evicted() -> None:
    pool = create_pool({1: 4, 2: 4}, blocks=2)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(1)
    pool.release(2)
    pool.share([0])
    pool.free([0])
    assert pool.allocate(1) == [1]
    assert pool.lookup([A]) == [0]


def test_looking_a_block_up_does_not_save_it_from_eviction() -> None:
    pool = create_pool({1: 4, 2: 4}, blocks=2)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(1)
    pool.release(2)
    pool.lookup([A])
    assert pool.allocate(1) == [0]


def test_a_table_never_evicts_the_cached_blocks_it_opens_on() -> None:
    """A is the next block to be evicted, and the new table needs both A and another block."""
    pool = create_pool({1: 4, 2: 4}, blocks=2)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(1)
    pool.release(2)
    assert pool.open(3, 8, pool.lookup([A])).blocks == [0, 1]
    assert (pool.lookup([A]), pool.lookup([X])) == ([0], [])


def test_an_open_table_on_shared_blocks_has_their_tokens() -> None:
    pool = create_pool({1: 8})
    publish(pool, 1, A, AB)
    table = pool.open(2, 9, pool.lookup([A, AB]))
    assert (table.blocks, table.num_tokens, table.capacity) == ([0, 1, 2], 8, 12)
    pool.release(1)
    assert pool.num_used_blocks == 3
    check_block_pool(pool)


def test_reset_forgets_every_hash_and_leaves_tables_alone() -> None:
    pool = create_pool({1: 4, 2: 4})
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(2)
    pool.reset_cache()
    assert (pool.lookup([A]), pool.lookup([X])) == ([], [])
    assert (pool.num_used_blocks, pool.num_cached_blocks, pool.num_free_blocks) == (1, 0, 7)
    pool.release(1)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 8)
    check_block_pool(pool)


# Hashes.


def test_equal_tokens_after_equal_tokens_have_equal_hashes() -> None:
    assert chain_hash(root_hash("model", "", 4), [1, 2, 3, 4]) == A
    assert chain_hash(A, (5, 6, 7, 8)) == AB


@pytest.mark.parametrize(
    "other", [("model", "s", 4), ("model", "", 8), ("other", "", 4), ("", "model", 4)]
)
def test_another_namespace_salt_or_block_size_shares_nothing(other: tuple[str, str, int]) -> None:
    assert root_hash(*other) != ROOT
    assert chain_hash(root_hash(*other), [1, 2, 3, 4]) != A


def test_text_cannot_move_between_namespace_and_salt() -> None:
    assert root_hash("ab", "c", 4) != root_hash("a", "bc", 4)
    assert root_hash("a', 'b", "c", 4) != root_hash("a", "b', 'c", 4)


@pytest.mark.parametrize("position", range(8))
def test_a_change_of_any_earlier_token_changes_every_later_hash(position: int) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens[position] += 1
    assert chain_hash(chain_hash(ROOT, tokens[:4]), tokens[4:]) != AB


def test_hashes_of_many_blocks_are_those_of_each_after_the_one_before() -> None:
    tokens = tuple(range(1, 13))
    assert chain_hashes(ROOT, tokens, 4) == [A, AB, ABC]
    assert chain_hashes(A, tokens[4:], 4) == [AB, ABC]


def test_the_order_of_tokens_and_their_number_matter() -> None:
    chains: list[list[int]] = [[], [0], [1], [2], [258], [1, 2], [2, 1], [1, 2, 0], [2, 256]]
    assert len({chain_hash(ROOT, tokens) for tokens in chains}) == 9


# Resizing.


def test_a_grown_pool_has_more_blocks_and_its_tables_stay() -> None:
    pool = create_pool({1: 8}, blocks=3)
    pool.resize(5)
    check_block_pool(pool)
    assert (pool.num_blocks, pool.num_used_blocks, pool.num_free_blocks) == (5, 2, 3)
    assert pool.tables[1].blocks == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]


def test_a_shrunken_pool_never_hands_out_the_ids_past_its_end() -> None:
    pool = create_pool({1: 4}, blocks=5)
    pool.resize(3)
    assert (pool.num_blocks, pool.num_free_blocks) == (3, 2)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) is None


def test_a_pool_cannot_shrink_past_a_held_block_and_then_changes_nothing() -> None:
    pool = create_pool({1: 4, 2: 8, 3: 4})
    pool.release(1)
    publish(pool, 2, X)
    before = snapshot(pool)
    with pytest.raises(BlocksInUse, match="cannot shrink to 2 blocks: 2 blocks past that") as no:
        pool.resize(2)
    assert no.value.in_use == 2
    assert snapshot(pool) == before


def test_a_pool_forgets_the_cached_blocks_past_its_end_and_keeps_the_others() -> None:
    pool = create_pool({1: 4, 2: 4}, blocks=3)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.release(1)
    pool.release(2)
    pool.resize(1)
    assert (pool.lookup([A]), pool.lookup([X])) == ([0], [])
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (1, 1)
    check_block_pool(pool)


def test_a_pool_that_shrinks_and_grows_has_every_block_once() -> None:
    pool = create_pool({1: 4}, blocks=4)
    pool.resize(2)
    pool.resize(4)
    check_block_pool(pool)
    assert pool.allocate(3) == [1, 2, 3]


def test_a_pool_cannot_shrink_to_nothing() -> None:
    with pytest.raises(AssertionError, match="num_blocks=0"):
        BlockPool(4, 4).resize(0)


def test_a_new_table_is_empty() -> None:
    assert (BlockTable().blocks, BlockTable().num_tokens, BlockTable().capacity) == ([], 0, 0)


def test_full_tables_are_lengthened_by_a_block_each_in_their_order() -> None:
    pool = BlockPool(8, 2)
    first, second = pool.open(5, 2), pool.open(3, 4)
    first.num_tokens, second.num_tokens = 2, 4
    pool.grow_full_tables((5, 3))
    assert (first.blocks, second.blocks) == ([0, 3], [1, 2, 4])
    assert (first.capacity, second.capacity, pool.num_free_blocks) == (4, 6, 3)


def test_a_table_that_is_more_than_full_is_lengthened_as_often_as_it_is_named() -> None:
    pool = BlockPool(8, 2)
    first, second = pool.open(5, 2), pool.open(3, 2)
    first.num_tokens, second.num_tokens = 6, 4
    assert pool.grow_full_tables((5, 3, 5)) == [2, 3, 4]
    assert (first.blocks, second.blocks) == ([0, 2, 4], [1, 3])


def test_a_table_with_room_is_not_lengthened() -> None:
    pool = BlockPool(8, 2)
    pool.open(5, 2).num_tokens = 1
    with pytest.raises(AssertionError, match="the table of 5 is not full"):
        pool.grow_full_tables((5,))


def test_a_block_has_a_hash_and_a_count_of_the_tables_that_hold_it() -> None:
    pool = BlockPool(4, 2)
    (first,) = pool.open(0, 2).blocks
    assert (pool.ref_count(first), pool.hash_of(first), pool.num_published_blocks) == (1, None, 0)
    pool.publish(first, b"h")
    pool.open(1, 2, [first])
    assert (pool.ref_count(first), pool.hash_of(first), pool.num_published_blocks) == (2, b"h", 1)


# Protected and demoted blocks.


def create_cached(*hashes: BlockHash) -> BlockPool:
    """Return a pool whose blocks 0, 1, ... are cached under these hashes, the last one oldest."""
    pool = create_pool({1: 4 * len(hashes)}, blocks=len(hashes))
    publish(pool, 1, *hashes)
    pool.release(1)
    return pool


def eviction_order(pool: BlockPool) -> list[int]:
    """Check the pool, allocate all free blocks, and return them in their order."""
    check_block_pool(pool)
    blocks = pool.allocate(pool.num_free_blocks)
    assert blocks is not None
    return blocks


def test_a_protected_block_is_evicted_after_all_others() -> None:
    pool = create_cached(A, X, XY)
    pool.protect([XY])
    assert eviction_order(pool) == [1, 0, 2]


def test_blocks_that_are_protected_again_count_as_just_used_the_last_one_oldest() -> None:
    pool = create_cached(A, AB, X)
    pool.protect([A, AB])
    pool.protect([X])
    pool.protect([A, AB])
    assert eviction_order(pool) == [2, 1, 0]


def test_a_protected_block_can_be_shared_and_is_protected_when_freed() -> None:
    pool = create_cached(A, X)
    pool.protect([A])
    pool.open(2, 4, shared=[0])
    check_block_pool(pool)
    pool.release(2)
    assert pool.num_disposable_blocks == 1
    assert eviction_order(pool) == [1, 0]


def test_a_block_that_is_unprotected_while_used_is_as_others_when_freed() -> None:
    pool = create_pool({1: 4, 2: 4}, blocks=2)
    publish(pool, 1, A)
    publish(pool, 2, X)
    pool.protect([A, X])
    pool.unprotect([A])
    pool.release(2)
    pool.release(1)
    assert eviction_order(pool) == [0, 1]


def test_an_unprotected_block_counts_as_just_used() -> None:
    pool = create_cached(A, X)
    pool.protect([X])
    pool.unprotect([X])
    assert pool.num_disposable_blocks == 2
    assert eviction_order(pool) == [0, 1]


def test_demoted_blocks_are_evicted_before_older_ones_the_last_hash_first() -> None:
    pool = create_cached(A, AB, X)
    pool.unprotect([A, AB], demote=True)
    assert eviction_order(pool) == [1, 0, 2]


def test_a_used_block_is_protected_and_unprotected_in_its_table() -> None:
    pool = create_pool({1: 8}, blocks=2)
    publish(pool, 1, A, AB)
    pool.protect([A, AB])
    pool.unprotect([AB], demote=True)
    check_block_pool(pool)
    assert pool.num_free_blocks == 0


def test_free_blocks_are_listed_in_the_order_of_allocation() -> None:
    """Empty ones, then cached ones, the least recently used first, then protected ones."""
    pool = BlockPool(6, 1)
    pool.open(0, 4)
    for block, key in enumerate((b"a", b"b", b"c")):
        pool.publish(block, key)
    pool.protect([b"c"])
    pool.release(0)
    assert pool.free_blocks == [3, 4, 5, 1, 0, 2]
    assert pool.allocate(6) == [3, 4, 5, 1, 0, 2]
