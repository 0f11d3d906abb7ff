"""Prefix index: which replicas hold which blocks, as far as is known.

Owns the hashes of each replica, in bounded memory. Knows no request and no router. It is fed by the
KV events of the replicas, and is then exact, or by decisions: then it expects that a replica holds
what was routed to it, and forgets what was used longest ago first, as the replica does.

    hash of a block    replicas 0 1 2
    a                           x x .      prefix_lengths([a, b, c]) = [2, 1, 0]
    b                           x . .
    c                           . . x      not found: its beginning is missing

Always true: at most `max_blocks` hashes of a replica are known. A medium is a part of the replica:
a block counts while any medium holds it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from forge.blocks import BlockHash
from forge.kv_events import DEVICE, MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_MEDIUM_BITS = {medium: 1 << index for index, medium in enumerate(MEDIA)}


class _ReplicaBlocks:
    """Blocks of a replica, least recently used first, with the media that hold each.

    bit   of the replica in the masks of the index
    """

    __slots__ = ("bit", "max_blocks", "media")

    def __init__(self, bit: int, max_blocks: int) -> None:
        self.bit = bit
        self.max_blocks = max_blocks
        self.media: OrderedDict[BlockHash, int] = OrderedDict()


class PrefixIndex:
    """Finds the longest known prefix of a prompt on each replica.

    num_forgotten   hashes that were forgotten because a replica had `max_blocks`
    """

    def __init__(self) -> None:
        self.num_forgotten = 0
        self._replicas: dict[int, _ReplicaBlocks] = {}
        self._masks: dict[BlockHash, int] = {}  # replicas that hold the hash, one bit each

    def add_replica(self, replica_id: int, max_blocks: int) -> None:
        """Add a replica that holds nothing, of which at most so many hashes are kept."""
        assert replica_id not in self._replicas, f"replica {replica_id} is there already"
        assert max_blocks > 0, f"{max_blocks=}"
        used = sum(each.bit for each in self._replicas.values())
        bit = ~used & (used + 1)  # the lowest one that is free
        self._replicas[replica_id] = _ReplicaBlocks(bit, max_blocks)

    def remove_replica(self, replica_id: int) -> None:
        """Forget a replica and all that it holds."""
        self._clear(self._replicas[replica_id])
        del self._replicas[replica_id]

    def num_blocks(self, replica_id: int) -> int:
        """Return how many hashes are known of a replica."""
        return len(self._replicas[replica_id].media)

    def hashes(self, replica_id: int, medium: str) -> list[BlockHash]:
        """Return the hashes that a medium of the replica holds. O(blocks of the replica)."""
        bit = _MEDIUM_BITS[medium]
        return [each for each, bits in self._replicas[replica_id].media.items() if bits & bit]

    def prefix_lengths(self, hashes: Sequence[BlockHash], replica_ids: Sequence[int]) -> list[int]:
        """Return how many of the first `hashes` each of the replicas holds."""
        bits = [self._replicas[each].bit for each in replica_ids]
        lengths = dict.fromkeys(bits, 0)
        holders = sum(lengths)
        for length, found in enumerate(map(self._masks.get, hashes)):
            mask = (found or 0) & holders
            if mask != holders:
                for bit in bits:
                    if bit & holders & ~mask:
                        lengths[bit] = length
                holders = mask
                if not holders:
                    break
        for bit in bits:
            if bit & holders:
                lengths[bit] = len(hashes)
        return [lengths[bit] for bit in bits]

    def apply(self, replica_id: int, events: Iterable[KVEvent]) -> None:
        """Follow the events of a replica, in their order."""
        replica = self._replicas[replica_id]
        for event in events:
            if isinstance(event, BlockStored):
                self._hold(replica, event.block_hashes, _MEDIUM_BITS[event.medium])
            elif isinstance(event, BlockRemoved):
                self._drop(replica, event.block_hashes, _MEDIUM_BITS[event.medium])
            else:
                assert isinstance(event, AllBlocksCleared), f"{event} is no event of a cache"
                self._clear(replica)

    def expect(self, replica_id: int, hashes: Sequence[BlockHash], num_held: int) -> None:
        """Expect that the replica holds these blocks of a prompt soon.

        num_held   the first blocks that `prefix_lengths` has found there

        The last block is forgotten first: a chain is evicted from its end.
        """
        replica = self._replicas[replica_id]
        media, masks, bit, device = replica.media, self._masks, replica.bit, _MEDIUM_BITS[DEVICE]
        for block_hash in reversed(hashes[num_held:]):
            if block_hash in media:
                media.move_to_end(block_hash)
            else:
                media[block_hash] = device
                masks[block_hash] = masks.get(block_hash, 0) | bit
        # Most blocks of a later turn. Without a loop of statements it takes a third of the time.
        deque(map(media.move_to_end, reversed(hashes[:num_held])), maxlen=0)
        self._forget_oldest(replica)

    def _hold(self, replica: _ReplicaBlocks, hashes: Iterable[BlockHash], medium: int) -> None:
        media, masks, bit = replica.media, self._masks, replica.bit
        for block_hash in hashes:
            media[block_hash] = media.pop(block_hash, 0) | medium  # now the last one used
            masks[block_hash] = masks.get(block_hash, 0) | bit
        self._forget_oldest(replica)

    def _forget_oldest(self, replica: _ReplicaBlocks) -> None:
        """Forget what was used longest ago until the replica has at most `max_blocks` hashes."""
        while len(replica.media) > replica.max_blocks:
            block_hash, _ = replica.media.popitem(last=False)
            self._unmask(block_hash, replica.bit)
            self.num_forgotten += 1

    def _drop(self, replica: _ReplicaBlocks, hashes: Iterable[BlockHash], medium: int) -> None:
        for block_hash in hashes:
            remaining = replica.media.get(block_hash, 0) & ~medium
            if remaining:
                replica.media[block_hash] = remaining
            elif block_hash in replica.media:  # it may have been forgotten before
                del replica.media[block_hash]
                self._unmask(block_hash, replica.bit)

    def _clear(self, replica: _ReplicaBlocks) -> None:
        for block_hash in replica.media:
            self._unmask(block_hash, replica.bit)
        replica.media.clear()

    def _unmask(self, block_hash: BlockHash, bit: int) -> None:
        mask = self._masks[block_hash] & ~bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]
