"""BlockMoves: the stores, loads, spills and fetches of plans, alongside the rows of their plan.

Owns two streams, two staging buffers and the order of moves. Knows no row: HFModel calls `begin`
before it queues the rows of a plan, and `queue` after that.

    host       |begin n|rows n|queue n|begin n+1|rows n+1|queue n+1|
    compute      b(n) [===== rows n =====]  wait s(n), l(n)  b(n+1) [==== rows n+1 ====]
    store             └►[4 ► host 5] s(n)                       └►[ ... ] s(n+1)
    load              └►[host 2 ► 7] l(n)                       └►[ ... ] l(n+1)
    threads           └►[spill, fetch]                                         b, s, l: events

`b(n)` follows all that earlier plans have queued, their moves included, since the compute stream
has waited for those. So both directions of plan n begin after both of plan n-1, and its rows do
too. The host waits for none of it, and a captured graph has none of it: the waits come before its
replay. With two plans in flight the host may be at `queue n+1` while the device runs plan n.

A copy for each layer of a block takes longer to launch than to run: 256 KiB a call reach 31 of 55
GB/s. Here a kernel gathers whole blocks of the device in a staging buffer, and one copy a block
moves them between there and the host, 9 MiB at a time for a 4B model. 4 MiB a call reach 96 % of a
plain copy, and gathering takes a twentieth of the time. A kernel that reads pinned memory needs no
staging, but takes multiprocessors from the rows for as long as the link is busy. Batched copies of
the driver would save the launches, which are no longer the limit. `forge bench kv moves`
measures all of this.

Always true: a staging buffer is used by one stream. What a thread does with a host block begins
after b(n) and ends before its answer, or before `begin` returns for a plan that drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch

from forge.errors import InvalidConfig
from forge.models.file_moves import FileMoves, HostContents, no_files
from forge.models.hf.buffers import upload
from forge.models.hf.host_pool import HostPool, PinnedContents
from forge.models.hf.kv_cache import KVCache
from forge.models.host_blocks import check_moves
from forge.seam import FileAnswer, StepPlan

STAGING_BYTES = 64 * 2**20
"""Bytes of a staging buffer, of which there is one for each direction; one block at least."""

_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Dtypes that a kernel may copy bits as, the widest first."""


def staging_bytes(block_bytes: int, max_bytes: int = STAGING_BYTES) -> int:
    """Return the bytes of a staging buffer: whole blocks, one at least."""
    return max(1, max_bytes // block_bytes) * block_bytes


class Moves(Protocol):
    """Moves of plans, which HFModel calls in this order."""

    def begin(self, plan: StepPlan) -> None:
        """Let what is queued next wait for the moves of earlier plans, and begin file moves."""
        ...

    def queue(self, plan: StepPlan) -> None:
        """Queue the plan's stores and loads, after its rows."""
        ...

    def end(self, plan: StepPlan) -> tuple[FileAnswer, ...]:
        """Return answers of file moves. Raises DamagedBlocks where loads are checked."""
        ...


class BlockMoves:
    """Moves between a KV cache and a host pool, and between the host pool and files.

    files               files of host blocks; None: there are none
    max_staging_bytes   most bytes of a staging buffer that holds more than one block
    create_contents     host blocks as a plan's file moves find them: of a pool, and of a call that
                        waits until all work of earlier plans is complete
    """

    def __init__(
        self,
        kv_cache: KVCache,
        host_pool: HostPool,
        files: FileMoves | None = None,
        max_staging_bytes: int = STAGING_BYTES,
        create_contents: Callable[[HostPool, Callable[[], None]], HostContents] = PinnedContents,
    ) -> None:
        data, block_bytes = kv_cache.data, kv_cache.block_bytes
        if host_pool.block_bytes != block_bytes:
            raise InvalidConfig(
                "host_tier",
                f"a block has {block_bytes} bytes, a host block {host_pool.block_bytes}",
                "Make a host pool for this model",
            )
        self._host_pool = host_pool
        self._files = files or no_files()
        self._create_contents = create_contents
        num_layers, blocks_per_layer = data.shape[:2]
        # A layer of a block is a row: block b has rows b, b + blocks_per_layer, and so on.
        rows = data.view(num_layers * blocks_per_layer, -1)
        self._rows = rows.view(_widest_dtype(rows.shape[1] * rows.itemsize))
        self._layer_starts = np.arange(num_layers, dtype=np.int64) * blocks_per_layer
        self._num_staged = staging_bytes(block_bytes, max_staging_bytes) // block_bytes
        self._uses_streams = data.device.type == "cuda"
        self._store_stream, self._store_staging = self._make_stream(data)
        self._load_stream, self._load_staging = self._make_stream(data)
        self._begun: torch.cuda.Event | None = None
        self._moved: list[torch.cuda.Event] = []

    def _make_stream(self, data: torch.Tensor) -> tuple[torch.cuda.Stream | None, torch.Tensor]:
        """Return a stream for one direction, None on a CPU, and its staging buffer."""
        shape = (self._num_staged * len(self._layer_starts), self._rows.shape[1])
        if not self._uses_streams:
            return None, torch.empty(shape, dtype=self._rows.dtype)
        stream = torch.cuda.Stream(data.device)
        data.record_stream(stream)  # Its memory is not reused before the last move has ended.
        with torch.cuda.stream(stream):
            return stream, torch.empty(shape, dtype=self._rows.dtype, device=data.device)

    def begin(self, plan: StepPlan) -> None:
        """Let what is queued next wait for the moves of earlier plans, and begin file moves.

        Call it before the first kernel of the plan. Raise InvalidConfig for a larger host pool than
        there is memory for, and ValueError for moves that depend on their order.
        """
        if plan.num_host_blocks > self._host_pool.num_blocks:
            raise InvalidConfig(
                "host_tier",
                f"{plan.num_host_blocks} host blocks, and there is memory for "
                f"{self._host_pool.num_blocks}",
                "Start with a larger host pool to leave room to grow",
            )
        for event in self._moved:
            event.wait()
        self._moved.clear()
        moves = (*plan.stores, *plan.loads, *plan.spills, *plan.fetches)
        if moves and self._uses_streams:
            # Threads wait for it too, without keeping a core busy.
            self._begun = torch.cuda.Event(blocking=True)
            self._begun.record()
        wait = _return_at_once if self._begun is None else self._begun.synchronize
        self._files.begin(plan, self._create_contents(self._host_pool, wait))
        if moves:
            # The rows' tables are on the device.
            check_moves(plan._replace(rows=()), {}, self._files.spilling, self._files.fetching)

    def queue(self, plan: StepPlan) -> None:
        """Queue the plan's stores and loads, alongside the rows queued since `begin`."""
        for stream, copy, moves in (
            (self._store_stream, self._store_blocks, plan.stores),
            (self._load_stream, self._load_blocks, plan.loads),
        ):
            if moves:
                with self._queue_on(stream):
                    copy([move.block for move in moves], [move.host_block for move in moves])

    def end(self, plan: StepPlan) -> tuple[FileAnswer, ...]:
        """Return the answers of file moves of this plan and earlier ones that are done.

        A plan without rows waits for one, unless a newer plan has rows to be read.
        """
        return self._files.end(plan)

    def after_stores(self) -> AbstractContextManager[None]:
        """Queue after the plan's stores, and before anything of the next plan."""
        return self._queue_on(self._store_stream)

    def after_loads(self) -> AbstractContextManager[None]:
        """Queue after the plan's loads, and before anything of the next plan."""
        return self._queue_on(self._load_stream)

    @contextmanager
    def _queue_on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue on a stream, after `begin`, what the next plan waits for. None: do it now."""
        if stream is None or self._begun is None:
            yield
            return
        stream.wait_event(self._begun)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                # What an error has left on the stream must be over, too.
                self._moved.append(stream.record_event())

    def _store_blocks(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for rows, staged, part in self._parts(self._store_staging, blocks, host_blocks):
            torch.index_select(self._rows, 0, rows, out=staged)
            for content, host_block in zip(_contents(staged, len(part)), part, strict=True):
                self._host_pool.block(host_block).copy_(content, non_blocking=True)

    def _load_blocks(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for rows, staged, part in self._parts(self._load_staging, blocks, host_blocks):
            for content, host_block in zip(_contents(staged, len(part)), part, strict=True):
                content.copy_(self._host_pool.block(host_block), non_blocking=True)
            self._rows.index_copy_(0, rows, staged)

    def _parts(
        self, staging: torch.Tensor, blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]:
        """Yield, for as many blocks as the staging holds: rows, their staging, host blocks.

        Rows are int64 on the device, in the order of a host block: all layers of one block, then
        those of the next.
        """
        starts = np.array(blocks, np.int64)[:, None] + self._layer_starts
        # Allocated on the current stream, which is the only one that reads it.
        [rows] = upload(staging.device, starts.reshape(-1))
        num_layers = len(self._layer_starts)
        for first in range(0, len(blocks), self._num_staged):
            part = host_blocks[first : first + self._num_staged]
            num_rows = num_layers * len(part)
            yield rows[num_layers * first :][:num_rows], staging[:num_rows], part


def _contents(staged: torch.Tensor, num_blocks: int) -> Sequence[torch.Tensor]:
    """Return the bytes of each block in a staging buffer."""
    return staged.view(torch.uint8).view(num_blocks, -1).unbind()


def _widest_dtype(num_bytes: int) -> torch.dtype:
    """Return the widest dtype that so many bytes are a multiple of."""
    return next(dtype for dtype in _DTYPES if num_bytes % dtype.itemsize == 0)


def _return_at_once() -> None:
    """Return: on a CPU a plan is complete when its `forward` returns."""
