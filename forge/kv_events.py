"""KV events: how the content of a prefix cache changed, tier by tier, as values.

Owns the changes since the last read. Knows no pool, plan or socket: the pools record what they
publish and forget, and the engine hands the values to a sink.

    a step is committed       BlockStored(hashes, parent, tokens, 16, "device")
    a block is evicted        BlockRemoved(hashes, "device")
    a store is committed      BlockStored(hashes, None, (), 16, "host")
    the cache is reset        AllBlocksCleared()

Always true: the events in order, folded over empty sets, give for each medium the hashes that a
lookup there would find.

An engine without a sink has no log, and builds no event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

DEVICE, HOST, DISK = "device", "host", "disk"
MEDIA = (DEVICE, HOST, DISK)
"""Places of a block: the memory of the device, a pool of host memory, a file."""


class BlockStored(NamedTuple):
    """Blocks that a lookup in the medium finds from now on, in the order of their positions.

    parent_hash   hash of the block before the first one; None for the first block of a prompt, and
                  in media other than the device
    token_ids     tokens of all blocks, `block_size` each; none in media other than the device
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str


class BlockRemoved(NamedTuple):
    """Blocks that a lookup in the medium no longer finds."""

    block_hashes: tuple[bytes, ...]
    medium: str


class AllBlocksCleared(NamedTuple):
    """Nothing is found in any medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

KVEventSink: TypeAlias = Callable[[Sequence[KVEvent]], None]
"""Receives the events of a step, in order. Called by the thread of the engine; must not block."""


class KVEventLog:
    """The events since the last `take`. One engine writes and reads it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._events: list[KVEvent] = []

    def record_prefix(
        self, block_hashes: Sequence[bytes], parent_hash: bytes | None, token_ids: Sequence[int]
    ) -> None:
        """Record blocks of the device that were published, with what they hold."""
        size = self.block_size
        assert len(token_ids) == size * len(block_hashes), f"{len(token_ids)} tokens of {size}"
        stored = BlockStored(tuple(block_hashes), parent_hash, tuple(token_ids), size, DEVICE)
        self._events.append(stored)

    def record_stored(self, block_hash: bytes, medium: str) -> None:
        """Record a block that is held in a medium other than the device."""
        self._events.append(BlockStored((block_hash,), None, (), self.block_size, medium))

    def record_removed(self, block_hash: bytes, medium: str) -> None:
        """Record a block that is no longer found."""
        self._events.append(BlockRemoved((block_hash,), medium))

    def record_cleared(self) -> None:
        """Record that every medium is empty."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call. Removals that follow each other are one event."""
        merged: list[KVEvent] = []
        removed: list[bytes] = []
        medium = DEVICE
        for event in self._events:
            if removed and not (isinstance(event, BlockRemoved) and event.medium == medium):
                merged.append(BlockRemoved(tuple(removed), medium))
                removed = []
            if isinstance(event, BlockRemoved):
                removed += event.block_hashes
                medium = event.medium
            else:
                merged.append(event)
        if removed:
            merged.append(BlockRemoved(tuple(removed), medium))
        self._events = []
        return merged
