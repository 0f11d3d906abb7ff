"""Prefix index: the longest known prefix on each replica, in bounded memory."""

from __future__ import annotations

from random import Random

from forge.kv_events import (
    DEVICE,
    DISK,
    HOST,
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from forge.routing.prefix_index import PrefixIndex

A, B, C, D = b"a", b"b", b"c", b"d"


def stored(*hashes: bytes, medium: str = DEVICE) -> BlockStored:
    return BlockStored(hashes, None, (), 16, medium)


def create_index(*holdings: tuple[bytes, ...], max_blocks: int = 100) -> PrefixIndex:
    """Return an index of replicas 0, 1, ... that have stored these hashes on the device."""
    index = PrefixIndex()
    for replica_id, hashes in enumerate(holdings):
        index.add_replica(replica_id, max_blocks)
        index.apply(replica_id, [stored(*hashes)])
    return index


def test_a_prefix_ends_at_the_first_block_that_is_not_held() -> None:
    index = create_index((A, B), (A,), (C,), ())
    assert index.prefix_lengths((A, B, C), (0, 1, 2, 3)) == [2, 1, 0, 0]
    assert index.prefix_lengths((A, B), (0, 1)) == [2, 1]
    assert index.prefix_lengths((), (0, 1)) == [0, 0]


def test_lengths_are_in_the_order_of_the_replicas_that_are_named() -> None:
    index = create_index((A, B), (A,), (A, B, C))
    assert index.prefix_lengths((A, B, C), (2, 0)) == [3, 2]


def test_a_block_counts_while_any_medium_holds_it() -> None:
    index = create_index((A,))
    index.apply(0, [stored(A, medium=HOST), BlockRemoved((A,), DEVICE)])
    assert index.prefix_lengths((A,), (0,)) == [1]
    assert (index.hashes(0, DEVICE), index.hashes(0, HOST)) == ([], [A])
    index.apply(0, [stored(A, medium=DISK), BlockRemoved((A,), HOST), BlockRemoved((A,), DISK)])
    assert index.prefix_lengths((A,), (0,)) == [0]
    assert index.num_blocks(0) == 0


def test_cleared_is_of_one_replica() -> None:
    index = create_index((A, B), (A,))
    index.apply(0, [stored(A, medium=HOST), AllBlocksCleared(), stored(B)])
    assert index.prefix_lengths((A, B), (0, 1)) == [0, 1]
    assert index.prefix_lengths((B,), (0, 1)) == [1, 0]


def test_removals_of_blocks_that_are_not_known_change_nothing() -> None:
    index = create_index((A,), (B,))
    index.apply(0, [BlockRemoved((B, C), DEVICE), BlockRemoved((A,), HOST)])
    assert index.prefix_lengths((A,), (0, 1)) == [1, 0]
    assert index.prefix_lengths((B,), (0, 1)) == [0, 1]


def test_a_replica_that_comes_in_place_of_another_holds_nothing_of_it() -> None:
    index = create_index((A, B), (A,))
    index.remove_replica(0)
    index.add_replica(7, 100)
    assert index.prefix_lengths((A, B), (1, 7)) == [1, 0]
    index.apply(7, [stored(A, B)])
    assert index.prefix_lengths((A, B), (1, 7)) == [1, 2]


def test_the_blocks_used_longest_ago_are_forgotten_first_and_of_a_prompt_its_last() -> None:
    index = create_index((), (A,), max_blocks=3)
    index.expect(0, (A, B), 0)
    index.expect(0, (C, D), 0)
    assert (index.num_blocks(0), index.num_forgotten) == (3, 1)
    assert index.prefix_lengths((A, B), (0, 1)) == [1, 1]
    assert index.prefix_lengths((C, D), (0, 1)) == [2, 0]
    index.expect(0, (A,), 1)  # used again, so D goes before it
    index.expect(0, (B,), 0)
    assert index.prefix_lengths((C, D), (0,)) == [1]
    assert index.prefix_lengths((A,), (0,)) == [1]
    index.expect(0, (D, C), 0)  # C is held after a block that is not: it is used again too
    assert index.hashes(0, DEVICE) == [B, C, D]


def test_many_replicas_come_and_go_and_every_length_is_that_of_a_plain_search() -> None:
    """The index is compared with sets after each of 3,000 random changes."""
    rng = Random(7)
    names = [bytes([n]) for n in range(12)]
    index, held = PrefixIndex(), dict[int, dict[str, set[bytes]]]()
    longest = 0
    for step in range(3000):
        if len(held) < 5 and rng.random() < 0.05:
            index.add_replica(step, 1000)
            held[step] = {medium: set() for medium in MEDIA}
        if held and rng.random() < 0.02:
            gone = rng.choice(list(held))
            index.remove_replica(gone)
            del held[gone]
        if not held:
            continue
        replica, medium = rng.choice(list(held)), rng.choice(MEDIA)
        chosen = rng.sample(names, rng.randint(1, 4))
        if rng.random() < 0.01:
            index.apply(replica, [AllBlocksCleared()])
            held[replica] = {each: set() for each in MEDIA}
        elif rng.random() < 0.7:
            index.apply(replica, [stored(*chosen, medium=medium)])
            held[replica][medium] |= set(chosen)
        else:
            index.apply(replica, [BlockRemoved(tuple(chosen), medium)])
            held[replica][medium] -= set(chosen)
        prompt = rng.sample(names, 6)
        expected = []
        for media in held.values():
            everything = set().union(*media.values())
            missing = (n for n, each in enumerate(prompt) if each not in everything)
            expected.append(next(missing, len(prompt)))
        assert index.prefix_lengths(prompt, tuple(held)) == expected
        longest = max(longest, *expected)
    assert longest == 6
    for replica in list(held):
        index.remove_replica(replica)
    assert not index._masks, "hashes that no replica holds are kept"
