"""Host cache: which blocks of the host pool hold which prefix, and what moves to and from them.

Owns the host pool's blocks and the loads of running sequences. Knows no queue, plan or model, and
moves nothing: it names the moves of the next plan. The BlockPool owns the device's blocks.

    free ──store planned──► storing ──plan committed──► held ──evicted for another store──► storing
      ▲                        │                         │
      └───── plan voided ──────┘                         └─ pinned while a sequence is to load it

    device  [ cached, dirty ] ──store──►  host  [ held ] ──load──►  device  [ used, unpublished ]

Stores clean blocks ahead of eviction: while few blocks are free without a loss, the dirty cached
block that would go first is stored. A hash is stored from its second touch on (computed, started
on, computed again), or when it is expected to be used again. After a load the device has the block,
so its host block is reused first, and the block is dirty again then.

Always true: a host block is free, reserved (for a store, or for a fetch from a file) or held.
`lookup` finds held ones only: their stores are committed. A pinned one keeps its content until its
load is committed or its sequence stops running, and while it is written to a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forge.blocks import BlockHash, BlockPool, blocks_of_prefix
from forge.config import HostTier, LoadCosts
from forge.kv_events import HOST, KVEventLog
from forge.seam import HostLoad, HostStore, StepPlan
from forge.sequence import Sequence as TokenSequence

NO_HOST_TIER = HostTier(num_blocks=0)

MAX_TOUCHED_RATIO = 4
"""Most hashes whose touches are remembered, as a multiple of the blocks of both pools."""


class _PendingStore(NamedTuple):
    """Store that a plan in flight contains."""

    step: int
    block_hash: BlockHash


class HostCache:
    """Finds prefixes in the host pool, and names the stores and loads of the next plan.

    num_blocks          blocks of the host pool
    unspilled_blocks    held blocks that are in no file as far as is known, with their hashes
    num_stored_blocks   stores that were committed
    num_loaded_blocks   loads that were committed
    num_evictions       held blocks whose content gave way to a store
    """

    def __init__(
        self, tier: HostTier, pool: BlockPool, kv_events: KVEventLog | None = None
    ) -> None:
        self.num_blocks = tier.num_blocks
        self.unspilled_blocks: OrderedDict[int, BlockHash] = OrderedDict()
        self.num_stored_blocks = 0
        self.num_loaded_blocks = 0
        self.num_evictions = 0
        self._tier = tier
        self._pool = pool
        self._kv_events = kv_events
        self._free_blocks = list(range(tier.num_blocks))[::-1]
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}
        # Held and not pinned: least recently used first, and those that the device may have too.
        self._unpinned_blocks: OrderedDict[int, None] = OrderedDict()
        self._redundant_blocks: OrderedDict[int, None] = OrderedDict()
        self._pins: Counter[int] = Counter()
        self._storing: dict[int, _PendingStore] = {}
        self._reserved_hashes: set[BlockHash] = set()  # of reserved host blocks
        # By sequence: host blocks to load, in the order of its table, and how many are planned.
        self._to_load: dict[int, deque[int]] = {}
        self._num_planned: dict[int, int] = {}
        self._touched_once: OrderedDict[BlockHash, None] = OrderedDict()
        self._reused_hashes: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def num_held_blocks(self) -> int:
        """Host blocks that `lookup` can find."""
        return len(self._hash_by_block)

    @property
    def loading_seq_ids(self) -> Sequence[int]:
        """Running sequences with a load that is to be planned or in flight."""
        return tuple(self._to_load)

    # Loads.

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the host blocks of the longest prefix of `hashes`."""
        return blocks_of_prefix(self._block_by_hash, hashes)

    def is_load_worthwhile(
        self, first: int, num_blocks: int, *, is_idle: bool, fetch_ns: int = 0
    ) -> bool:
        """Return whether so many blocks are loaded instead of computed.

        first      index of the first one in its sequence: later ones have more to read
        is_idle    no other sequence runs. Otherwise a load takes no time from the device
        fetch_ns   nanoseconds of reading some of them into the host pool first
        """
        tier = self._tier
        if num_blocks < tier.min_loaded_blocks:
            return False
        costs: LoadCosts | None = tier.costs
        if costs is None or not is_idle:
            return True
        size = self._pool.block_size
        prefill_ns = costs.prefill_ns(first * size, (first + num_blocks) * size)
        return costs.transfer_ns(num_blocks) + fetch_ns < prefill_ns

    def begin_load(self, seq_id: int, host_blocks: Iterable[int]) -> None:
        """Pin these host blocks, to be loaded in this order after the sequence's first blocks."""
        assert seq_id not in self._to_load, f"sequence {seq_id} loads already"
        self._to_load[seq_id] = deque(host_blocks)
        self._num_planned[seq_id] = 0
        for host_block in self._to_load[seq_id]:
            self.pin(host_block)

    def num_blocks_to_plan(self, seq_id: int) -> int:
        """Return how many blocks of the sequence no plan loads yet."""
        return len(self._to_load.get(seq_id, ())) - self._num_planned.get(seq_id, 0)

    def plan_loads(self, sequences: Iterable[TokenSequence], *, is_bounded: bool) -> list[HostLoad]:
        """Return the loads of the next plan, and count their positions in the tables.

        sequences    running sequences; the first ones load first
        is_bounded   at most `max_moved_blocks` are loaded
        """
        size, max_blocks = self._pool.block_size, self._tier.max_moved_blocks
        loads: list[HostLoad] = []
        for sequence in sequences:
            num_planned = self._num_planned.get(sequence.id, 0)
            num_blocks = self.num_blocks_to_plan(sequence.id)
            if is_bounded and max_blocks is not None:
                num_blocks = min(num_blocks, max_blocks - len(loads))
            table = sequence.table
            for _ in range(num_blocks):
                block = table.blocks[table.num_tokens // size]
                host_block = self._to_load[sequence.id][num_planned]
                loads.append(HostLoad(sequence.id, sequence.epoch, block, host_block))
                table.num_tokens += size
                sequence.num_shared_tokens += size
                num_planned += 1
            self._num_planned[sequence.id] = num_planned
        return loads

    def commit_load(self, load: HostLoad) -> None:
        """Unpin the host block of a load that is done. Its sequence runs in the same epoch.

        The device has the block now, so the host block is reused first.
        """
        host_blocks = self._to_load[load.seq_id]
        host_block = host_blocks.popleft()
        assert host_block == load.host_block, f"{load} is committed out of order"
        self._num_planned[load.seq_id] -= 1
        if not host_blocks:
            del self._to_load[load.seq_id], self._num_planned[load.seq_id]
        self.num_loaded_blocks += 1
        self._unpin(host_block, self._redundant_blocks)

    def cancel_load(self, seq_id: int) -> None:
        """Unpin what a sequence that stops running has yet to load. A second call changes nothing.

        A load in flight may go on: it is done before a later plan writes the host block.
        """
        self._num_planned.pop(seq_id, None)
        for host_block in reversed(self._to_load.pop(seq_id, ())):
            self._unpin(host_block, self._unpinned_blocks)

    # Stores.

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Count a use of published blocks: they are computed, or a sequence starts on them.

        From `min_touches` on a block is stored before it is evicted.
        """
        if not self.num_blocks:
            return
        for block_hash in hashes:
            if block_hash in self._reused_hashes or self._tier.min_touches == 1:
                self._allow_store(block_hash)
            elif block_hash in self._touched_once:
                del self._touched_once[block_hash]
                self._allow_store(block_hash)
            else:
                self._touched_once[block_hash] = None
                self._forget_oldest(self._touched_once)

    def expect_reuse(self, hashes: Iterable[BlockHash]) -> None:
        """Let blocks of these hashes be stored before they are evicted, at their first touch too.

        A preempted sequence or the next turn of a session will need them.
        """
        if self.num_blocks:
            for block_hash in hashes:
                self._touched_once.pop(block_hash, None)
                self._allow_store(block_hash)

    def plan_stores(self, step: int) -> list[HostStore]:
        """Return the stores of plan `step`. Nothing may be allocated in that plan after it.

        Blocks are stored while fewer than `min_clean_percent` are free without a loss.
        """
        pool, tier = self._pool, self._tier
        stores: list[HostStore] = []
        min_clean = -(-pool.num_blocks * tier.min_clean_percent // 100)
        while (
            pool.num_free_blocks - pool.num_dirty_cached_blocks < min_clean
            and len(stores) != tier.max_moved_blocks
        ):
            block = pool.next_dirty_block()
            if block is None:
                break
            block_hash = pool.hash_of(block)
            assert block_hash is not None, f"block {block} is dirty and not published"
            host_block = self.reserve(block_hash)
            if host_block is None:
                break
            pool.mark_clean(block)
            self._storing[host_block] = _PendingStore(step, block_hash)
            stores.append(HostStore(block, host_block))
        return stores

    def commit_stores(self, plan: StepPlan) -> None:
        """Let `lookup` find what the committed plan has stored, unless it was dropped since."""
        for _, host_block in plan.stores:
            pending = self._storing.get(host_block)
            if pending is None or pending.step != plan.step:
                continue  # dropped by a reset or a resize, and perhaps stored to again since
            del self._storing[host_block]
            self.end_reservation(host_block, pending.block_hash, is_good=True)
            self.num_stored_blocks += 1

    def void_loads(self, host_blocks: Iterable[int]) -> None:
        """Free the host blocks that void plans were to load: one may be why a step has failed.

        Call it after `void_stores`. Nothing may be pinned.
        """
        for host_block in dict.fromkeys(host_blocks):
            block_hash = self._hash_by_block.get(host_block)
            if block_hash is None:
                continue  # its sequence has ended, and a store that is void has taken it since
            assert host_block not in self._pins, f"host block {host_block} is pinned"
            self._remove(host_block)
            self._unpinned_blocks.pop(host_block, None)
            self._redundant_blocks.pop(host_block, None)
            self._free(host_block, block_hash)

    def void_stores(self) -> None:
        """Drop the stores in flight: their plans are void. Their blocks are dirty again."""
        for host_block, pending in self._storing.items():
            self.end_reservation(host_block, pending.block_hash, is_good=False)
        self._storing.clear()

    # Host blocks.

    def reserve(self, block_hash: BlockHash) -> int | None:
        """Return a host block that is to hold content of this hash, or None where all are pinned.

        Its earlier content is forgotten. Until the end of the reservation the hash is not stored.
        """
        host_block = self._take_block()
        if host_block is not None:
            assert block_hash not in self._reserved_hashes, "a hash comes into two host blocks"
            self._reserved_hashes.add(block_hash)
        return host_block

    def is_missing(self, block_hash: BlockHash) -> bool:
        """Return whether neither pool has the hash, and no reserved host block is to hold it."""
        known = (self._reserved_hashes, self._block_by_hash)
        return not (any(block_hash in each for each in known) or self._pool.lookup((block_hash,)))

    def end_reservation(self, host_block: int, block_hash: BlockHash, *, is_good: bool) -> None:
        """Hold the content, or free the host block where it has none: is_good is False.

        Then a block of the device with this hash is dirty again.
        """
        self._reserved_hashes.remove(block_hash)
        if is_good:
            self._block_by_hash[block_hash] = host_block
            self._hash_by_block[host_block] = block_hash
            self._unpinned_blocks[host_block] = None
            if self._kv_events is not None:
                self._kv_events.record_stored(block_hash, HOST)
            if self._tier.disk is not None:
                self.unspilled_blocks[host_block] = block_hash
        else:
            self._free(host_block, block_hash)

    def pin(self, host_block: int) -> None:
        """Keep the content of a held block until as many calls of `unpin`."""
        self._unpinned_blocks.pop(host_block, None)
        self._redundant_blocks.pop(host_block, None)
        self._pins[host_block] += 1

    def unpin(self, host_block: int) -> None:
        """Drop one pin. Without pins the block counts as just used."""
        self._unpin(host_block, self._unpinned_blocks)

    # Reset and resize.

    def reset(self) -> None:
        """Forget all content. Nothing may be pinned; stores in flight are dropped."""
        assert not self._pins, f"host blocks {list(self._pins)} are pinned"
        self.unspilled_blocks.clear()
        self._free_blocks = list(range(self.num_blocks))[::-1]
        self._block_by_hash.clear()
        self._hash_by_block.clear()
        self._unpinned_blocks.clear()
        self._redundant_blocks.clear()
        self._storing.clear()
        self._reserved_hashes.clear()
        self._touched_once.clear()
        self._reused_hashes.clear()

    def seq_ids_beyond(self, num_blocks: int) -> list[int]:
        """Return the sequences that have yet to load a host block past the end of so many."""
        return [i for i, blocks in self._to_load.items() if max(blocks) >= num_blocks]

    def resize(self, num_blocks: int) -> None:
        """Change the host pool to ids 0 to num_blocks - 1. Content past the end is forgotten.

        It must not be pinned, and no file move may be in flight.
        """
        assert num_blocks >= 0 and not self.seq_ids_beyond(num_blocks), f"{num_blocks=}"
        for host_block in [b for b in self._hash_by_block if b >= num_blocks]:
            self._remove(host_block)
            self._unpinned_blocks.pop(host_block, None)
            self._redundant_blocks.pop(host_block, None)
        for host_block in [b for b in self._storing if b >= num_blocks]:
            self._reserved_hashes.remove(self._storing.pop(host_block).block_hash)
        self._free_blocks = [b for b in self._free_blocks if b < num_blocks]
        self._free_blocks[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self.num_blocks = num_blocks

    def _take_block(self) -> int | None:
        """Return a free host block, or one whose content is forgotten, or None: all are pinned.

        First go those that the device has too: its blocks are dirty again. A block that the device
        has lost since it was loaded counts as just used.
        """
        if self._free_blocks:
            return self._free_blocks.pop()
        while self._redundant_blocks:
            host_block, _ = self._redundant_blocks.popitem()
            block_hash = self._hash_by_block[host_block]
            if self._pool.lookup([block_hash]):
                self._forget(host_block)
                self._pool.mark_dirty(block_hash)
                return host_block
            self._unpinned_blocks[host_block] = None
        if not self._unpinned_blocks:
            return None
        host_block, _ = self._unpinned_blocks.popitem(last=False)
        self._forget(host_block)
        return host_block

    def _forget(self, host_block: int) -> None:
        """Let a held host block go to a store."""
        self._remove(host_block)
        self.num_evictions += 1

    def _remove(self, host_block: int) -> None:
        """Forget the content of a held host block, so that `lookup` no longer finds it."""
        block_hash = self._hash_by_block.pop(host_block)
        del self._block_by_hash[block_hash]
        self.unspilled_blocks.pop(host_block, None)
        if self._kv_events is not None:
            self._kv_events.record_removed(block_hash, HOST)

    def _free(self, host_block: int, block_hash: BlockHash) -> None:
        """Free a host block without content of this hash: the device's block is dirty again."""
        self._free_blocks.append(host_block)
        if block_hash in self._reused_hashes:
            self._pool.mark_dirty(block_hash)

    def _unpin(self, host_block: int, unpinned_blocks: OrderedDict[int, None]) -> None:
        """Drop one pin. Without pins the host block is in the list `unpinned_blocks`."""
        self._pins[host_block] -= 1
        if not self._pins[host_block]:
            del self._pins[host_block]
            unpinned_blocks[host_block] = None

    def _allow_store(self, block_hash: BlockHash) -> None:
        self._reused_hashes[block_hash] = None
        self._reused_hashes.move_to_end(block_hash)
        self._forget_oldest(self._reused_hashes)
        if block_hash not in self._block_by_hash and block_hash not in self._reserved_hashes:
            self._pool.mark_dirty(block_hash)

    def _forget_oldest(self, touched: OrderedDict[BlockHash, None]) -> None:
        while len(touched) > MAX_TOUCHED_RATIO * (self._pool.num_blocks + self.num_blocks):
            touched.popitem(last=False)
