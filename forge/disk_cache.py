"""Disk cache: which prefixes are in files, and which host blocks are being written or read.

Owns the keys of the files and the file moves in flight. Knows no queue, model or file: it names the
spills and fetches of the next plan. Only their answers come late, with the output of a later step.

    host    [ held ] ──spill──► file              pinned until it is answered; loads may read it
    file    ──fetch──► host   [ reserved ]        held once it is answered, free if it was a miss

A waiting sequence whose next block is in a file fetches the run of blocks there, and waits until
they are answered. It fetches a block once, so it computes what does not come.

Always true: each file move in flight has one host block, which nothing else writes. After a failed
step, a reset, a resize or too long a wait all of them are dropped: the epoch grows. A model that
sees another epoch has ended those of earlier ones before it runs the plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forge.blocks import BlockHash
from forge.config import DiskTier
from forge.host_cache import HostCache
from forge.kv_events import DISK, KVEventLog
from forge.seam import FileAnswer, HostFile

NO_DISK_TIER = DiskTier(max_files=0)


class _FileMove(NamedTuple):
    """A spill or fetch that a plan contains and no output has answered."""

    step: int
    block_hash: BlockHash
    is_fetch: bool


class _FetchRequest(NamedTuple):
    """A fetch that the next plan is to contain, for a waiting sequence."""

    seq_id: int
    block_hash: BlockHash


class DiskCache:
    """Finds prefixes in files, and names the spills and fetches of the next plan.

    epoch                 grows when all file moves in flight are dropped
    num_spilled_blocks    spills that were answered, and done
    num_fetched_blocks    fetches that were answered, and found
    num_missed_blocks     fetches that were answered, and not found
    num_failed_spills     spills that were answered, and not done
    num_dropped_moves     spills and fetches that were dropped
    """

    def __init__(
        self, tier: DiskTier, host_cache: HostCache, kv_events: KVEventLog | None = None
    ) -> None:
        self.epoch = 0
        self.num_spilled_blocks = 0
        self.num_fetched_blocks = 0
        self.num_missed_blocks = 0
        self.num_failed_spills = 0
        self.num_dropped_moves = 0
        self._tier = tier
        self._host_cache = host_cache
        self._kv_events = kv_events
        self._keys: OrderedDict[BlockHash, None] = OrderedDict()  # the one unused longest first
        self._moves: dict[int, _FileMove] = {}  # by host block, oldest first
        # By host block. There are some only while a plan is made.
        self._requests: dict[int, _FetchRequest] = {}
        self._fetching: set[BlockHash] = set()  # requested or in flight
        self._fetched_by: dict[int, set[BlockHash]] = {}

    def add_keys(self, keys: Iterable[BlockHash]) -> None:
        """Let sequences fetch blocks of these hashes, the one used longest ago first."""
        for key in keys:
            if key not in self._keys and self._kv_events is not None:
                self._kv_events.record_stored(key, DISK)
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._tier.max_files:
                self._remove_key(next(iter(self._keys)))

    @property
    def num_files(self) -> int:
        """Files that sequences can fetch, as far as is known."""
        return len(self._keys)

    @property
    def is_empty(self) -> bool:
        """True while no file is known, and no fetch is requested or in flight."""
        return not (self._keys or self._fetching)

    @property
    def has_moves(self) -> bool:
        """True while a spill or fetch is in flight, or a held block is in no file."""
        return bool(self._moves or self._host_cache.unspilled_blocks)

    @property
    def needs_plan(self) -> bool:
        """True while a fetch is requested: a plan must contain it."""
        return bool(self._requests)

    @property
    def is_fetching(self) -> bool:
        """True while a fetch is requested or in flight."""
        return bool(self._fetching)

    def request_fetches(
        self, seq_id: int, first: int, hashes: Sequence[BlockHash], *, is_idle: bool
    ) -> bool:
        """Request the fetches that a waiting sequence lacks, and return whether it waits for files.

        first     index in the sequence of the first of these blocks
        hashes    of the blocks that follow those it finds on the device and in the host pool
        is_idle   no other sequence runs. Otherwise a fetch takes no time from the device
        """
        if not hashes:
            return False
        is_waiting = hashes[0] in self._fetching
        num_free = self._tier.max_moves - len(self._moves) - len(self._requests)
        if num_free <= 0:
            return is_waiting
        fetched = self._fetched_by.get(seq_id, ())
        run, num_blocks, num_in_flight = [], 0, 0
        for block_hash in hashes:
            if block_hash in self._fetching:
                num_in_flight += 1
            elif not self._host_cache.lookup((block_hash,)):
                if block_hash not in self._keys or block_hash in fetched:
                    break
                if not self._host_cache.is_missing(block_hash):
                    break
                run.append(block_hash)
            num_blocks += 1
        # What is in flight or was fetched counts: the rest is the end of a run of all of them.
        fetch_ns = (num_in_flight + len(run)) * self._tier.fetch_block_ns
        if not run or not self._host_cache.is_load_worthwhile(
            first, num_blocks, is_idle=is_idle, fetch_ns=fetch_ns
        ):
            return is_waiting
        for block_hash in run[:num_free]:
            host_block = self._host_cache.reserve(block_hash)
            if host_block is None:
                break
            self._requests[host_block] = _FetchRequest(seq_id, block_hash)
            self._fetching.add(block_hash)
        return hashes[0] in self._fetching

    def cancel_requests(self) -> None:
        """Cancel the fetches that were requested for a plan that is not made."""
        for host_block, (_, block_hash) in self._requests.items():
            self._fetching.remove(block_hash)
            self._host_cache.end_reservation(host_block, block_hash, is_good=False)
        self._requests.clear()

    def drop_overdue(self, step: int) -> None:
        """Drop all moves where one of them was planned `max_wait_plans` before plan `step`."""
        oldest = next(iter(self._moves.values()), None)
        if oldest is not None and oldest.step + self._tier.max_wait_plans <= step:
            self.drop()

    def num_fetched_for(self, seq_id: int, hashes: Iterable[BlockHash]) -> int:
        """Return how many of these blocks were fetched for the sequence since it waits."""
        fetched = self._fetched_by.get(seq_id)
        return sum(map(fetched.__contains__, hashes)) if fetched else 0

    def forget_sequence(self, seq_id: int) -> None:
        """Forget what a sequence has fetched: it runs, or has ended."""
        self._fetched_by.pop(seq_id, None)

    def plan_moves(self, step: int) -> tuple[tuple[HostFile, ...], tuple[HostFile, ...]]:
        """Return the spills and the fetches of plan `step`.

        At most half of `max_moves`, rounded up, are spills, so slow writes leave room for fetches.
        """
        fetches = []
        for host_block, (seq_id, block_hash) in self._requests.items():
            self._moves[host_block] = _FileMove(step, block_hash, is_fetch=True)
            self._fetched_by.setdefault(seq_id, set()).add(block_hash)
            fetches.append(HostFile(host_block, block_hash))
        self._requests.clear()
        spills: list[HostFile] = []
        unspilled_blocks = self._host_cache.unspilled_blocks
        max_moves = self._tier.max_moves
        max_spills = min(max_moves - len(self._moves), -(-max_moves // 2) - self._num_spills)
        while self._tier.max_files and unspilled_blocks and len(spills) < max_spills:
            host_block, block_hash = unspilled_blocks.popitem(last=False)
            if block_hash not in self._keys and host_block not in self._moves:
                self._host_cache.pin(host_block)
                self._moves[host_block] = _FileMove(step, block_hash, is_fetch=False)
                spills.append(HostFile(host_block, block_hash))
        return tuple(spills), tuple(fetches)

    def commit_answers(self, answers: Iterable[FileAnswer]) -> None:
        """End the file moves that a committed output has answered. Dropped ones change nothing."""
        for answer in answers:
            move = self._moves.get(answer.host_block)
            if move is None or move.step != answer.step:
                continue
            del self._moves[answer.host_block]
            if move.is_fetch:
                self._fetching.remove(move.block_hash)
                self._host_cache.end_reservation(
                    answer.host_block, move.block_hash, is_good=answer.is_good
                )
                if answer.is_good:
                    self.add_keys((move.block_hash,))  # just used
                    self.num_fetched_blocks += 1
                else:
                    self._remove_key(move.block_hash)
                    self.num_missed_blocks += 1
            else:
                self._host_cache.unpin(answer.host_block)
                if answer.is_good:
                    self.add_keys((move.block_hash,))
                    self.num_spilled_blocks += 1
                else:
                    self.num_failed_spills += 1

    def drop(self) -> None:
        """Drop every file move in flight: a new epoch begins."""
        for host_block, move in self._moves.items():
            if move.is_fetch:
                self._host_cache.end_reservation(host_block, move.block_hash, is_good=False)
            else:
                self._host_cache.unpin(host_block)
                self._host_cache.unspilled_blocks[host_block] = move.block_hash
        self.epoch += bool(self._moves)
        self.num_dropped_moves += len(self._moves)
        self._moves.clear()
        self._fetching.clear()

    def reset(self) -> None:
        """Forget all keys, and drop all file moves. The files stay, unknown to this engine."""
        self.drop()
        self._keys.clear()

    def _remove_key(self, key: BlockHash) -> None:
        if key in self._keys:
            del self._keys[key]
            if self._kv_events is not None:
                self._kv_events.record_removed(key, DISK)

    @property
    def _num_spills(self) -> int:
        """Spills in flight."""
        return len(self._moves) - len(self._fetching)
