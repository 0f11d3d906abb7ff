"""CheckedMoves: BlockMoves that compare a checksum of each block that is loaded.

Owns a sum for each host block: that of the block as it was on the device when it was stored, or of
the content of a verified file. Knows no formula of sums.

    store   device ─► host block          sum of the block on the device ─► stored[host block]
    spill   host block ─► file            sum of the copy = stored, or no file is written
    fetch   file ─► host block            sum of the content ─► fetched[host block]
    load    host block ─► device          sum of the block on the device = stored or fetched, or
                                          the result of the step raises DamagedBlocks

Sums are computed on the streams of the moves, from the cache itself and not from a staging buffer.
So a wrong order of moves is found, too, and not only damaged memory.

Always true: no result of a plan is read before its loads are compared, and a step that raises is
void. So a damaged block is published nowhere, and no token was computed from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from forge.errors import DamagedBlocks
from forge.models.file_moves import FileMoves, HostContents, WholeContent
from forge.models.hf.block_moves import BlockMoves
from forge.models.hf.block_sums import BlockSums
from forge.models.hf.buffers import MAX_IN_FLIGHT, int64_array, upload
from forge.models.hf.host_pool import HostPool, PinnedContents
from forge.models.hf.kv_cache import KVCache
from forge.seam import FileAnswer, HostLoad, StepPlan

log = logging.getLogger(__name__)


class _Comparison(NamedTuple):
    """Loads of a plan that are being compared.

    is_damaged   bool [loads], on the host once `event` has happened
    event        None: it has
    """

    loads: tuple[HostLoad, ...]
    is_damaged: torch.Tensor
    event: torch.cuda.Event | None


class CheckedMoves:
    """Moves whose loads are compared with what was stored, or read from a file.

    Takes what BlockMoves takes.
    """

    def __init__(
        self, kv_cache: KVCache, host_pool: HostPool, files: FileMoves | None = None
    ) -> None:
        self._sums = BlockSums(kv_cache)
        self._device = device = kv_cache.data.device
        self._uses_streams = device.type == "cuda"
        self._stored = torch.zeros(host_pool.num_blocks, dtype=torch.int64, device=device)
        self._stored_on_host = torch.zeros(
            host_pool.num_blocks, dtype=torch.int64, pin_memory=self._uses_streams
        )
        # By host block: of those whose content came from a file since the last store to it.
        self._fetched: dict[int, int] = {}
        self._comparisons: dict[int, _Comparison] = {}
        self._moves = BlockMoves(kv_cache, host_pool, files, create_contents=self._contents)

    def begin(self, plan: StepPlan) -> None:
        """Begin the plan's moves as BlockMoves does."""
        self._moves.begin(plan)

    def queue(self, plan: StepPlan) -> None:
        """Queue the plan's stores and loads, and their sums."""
        self._moves.queue(plan)
        if plan.stores:
            with self._moves.after_stores():
                self._record([s.block for s in plan.stores], [s.host_block for s in plan.stores])
        if plan.loads:
            with self._moves.after_loads():
                # Results of void plans are never read.
                oldest = plan.step - MAX_IN_FLIGHT
                self._comparisons = {s: c for s, c in self._comparisons.items() if s > oldest}
                self._comparisons[plan.step] = self._compare(plan.loads)

    def end(self, plan: StepPlan) -> tuple[FileAnswer, ...]:
        """Return answers as BlockMoves does. Waits for the plan's loads; raises DamagedBlocks."""
        comparison = self._comparisons.pop(plan.step, None)
        if comparison is not None:
            if comparison.event is not None:
                comparison.event.synchronize()
            damaged = [
                load
                for load, is_damaged in zip(
                    comparison.loads, comparison.is_damaged.tolist(), strict=True
                )
                if is_damaged
            ]
            if damaged:
                error = DamagedBlocks(plan.step, [(x.block, x.host_block) for x in damaged])
                log.error("%s", error)
                raise error
        return self._moves.end(plan)

    def _record(self, blocks: list[int], host_blocks: list[int]) -> None:
        for host_block in host_blocks:
            self._fetched.pop(host_block, None)
        [indices] = upload(self._device, int64_array(host_blocks))
        self._stored.index_copy_(0, indices, self._sums.sum_blocks(blocks))
        # A spill of a later plan reads it, after it has waited for this plan.
        self._stored_on_host.copy_(self._stored, non_blocking=True)

    def _compare(self, loads: tuple[HostLoad, ...]) -> _Comparison:
        fetched = [
            (index, self._fetched[load.host_block])
            for index, load in enumerate(loads)
            if load.host_block in self._fetched
        ]
        host_blocks = int64_array([load.host_block for load in loads])
        columns = [int64_array(column) for column in zip(*fetched, strict=True)]
        indices, *fetched_sums = upload(self._device, host_blocks, *columns)
        expected = self._stored.index_select(0, indices)
        if fetched_sums:
            expected.index_copy_(0, *fetched_sums)
        found = self._sums.sum_blocks([load.block for load in loads])
        is_damaged = torch.empty(len(loads), dtype=torch.bool, pin_memory=self._uses_streams)
        is_damaged.copy_(found != expected, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if self._uses_streams else None
        return _Comparison(loads, is_damaged, event)

    def _contents(self, host_pool: HostPool, wait: Callable[[], None]) -> HostContents:
        return _CheckedContents(PinnedContents(host_pool, wait), self)

    def stored_sum(self, host_block: int) -> int:
        """Return the sum that the content of a host block should have. Any thread may call it."""
        fetched = self._fetched.get(host_block)
        return int(self._stored_on_host[host_block]) if fetched is None else fetched

    def sum_content(self, content: bytes | memoryview) -> int:
        """Return the sum of a content. Any thread may call it."""
        return self._sums.sum_content(content)

    def note_fetch(self, host_block: int, content_sum: int) -> None:
        """Let loads of the host block expect the sum of a file's content."""
        self._fetched[host_block] = content_sum


class _CheckedContents(NamedTuple):
    """Host blocks as one plan finds them, whose sums are compared and kept."""

    inner: PinnedContents
    moves: CheckedMoves

    def wait(self) -> None:
        """Wait until all work of earlier plans is complete."""
        self.inner.wait()

    def reader(self, host_block: int) -> Callable[[], memoryview]:
        """Return a call that returns a copy of the content. It raises ValueError."""
        read = self.inner.reader(host_block)

        def read_checked() -> memoryview:
            content = read()
            if self.moves.sum_content(content) != self.moves.stored_sum(host_block):
                raise ValueError(f"host block {host_block} is damaged, and its file not written")
            return content

        return read_checked

    def writer(self, host_block: int) -> WholeContent:
        """Return what writes a content and keeps its sum, which is that of the file's pieces."""
        writer = self.inner.writer(host_block)

        def write_checked(content: bytes) -> bool:
            if not (writer.write(memoryview(content)) and writer.complete()):
                return False
            self.moves.note_fetch(host_block, self.moves.sum_content(content))
            return True

        return WholeContent(write_checked)
