"""HostBlocks: the host pool of a PagedModel, and the check that a plan's moves are allowed.

Owns the content of host blocks. Knows no scheduler: it finds what a device would do wrong silently.

    plan ──► check_moves     a row or copy touches a moved block, or an id is in two moves: refused
         ──► copies, rows
         ──► run_moves       page ──► host block, host block ──► page

Always true: the order of moves, copies and rows within a plan changes nothing, since they share no
block. A device may do them in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from forge.models.file_moves import WholeContent
from forge.seam import HostLoad, HostStore, StepPlan

Pages: TypeAlias = Sequence[Any]
"""Contents of blocks: each is a writable, contiguous buffer, and all have the same size."""


def page_bytes(pages: Pages) -> int:
    """Return the bytes of a block. There is at least one."""
    return memoryview(pages[0]).nbytes


def check_moves(
    plan: StepPlan,
    tables: Mapping[int, Sequence[int]],
    spilling: Collection[int] = (),
    fetching: Collection[int] = (),
) -> None:
    """Raise ValueError where the result of the plan would depend on the order of its moves.

    tables     block table of each slot that has one before the plan
    spilling   host blocks that are written to files, those of the plan included
    fetching   host blocks that are read from files, those of the plan included
    """
    for host_block in fetching:
        if host_block in spilling or any(host_block == load.host_block for load in plan.loads):
            raise ValueError(f"plan {plan.step} reads host block {host_block}, which is fetched")
    for store in plan.stores:
        if store.host_block in spilling or store.host_block in fetching:
            raise ValueError(f"plan {plan.step}: {store} is to a host block of a file move")
    moves: list[HostStore | HostLoad] = [*plan.stores, *plan.loads]
    blocks = [move.block for move in moves]
    host_blocks = [move.host_block for move in moves]
    for name, ids, num_ids in (
        ("block", blocks, plan.num_blocks),
        ("host block", host_blocks, plan.num_host_blocks),
    ):
        for each in ids:
            if not 0 <= each < num_ids:
                raise ValueError(f"plan {plan.step} moves {name} {each} of {num_ids}")
        if len(set(ids)) < len(ids):
            raise ValueError(f"plan {plan.step} has a {name} in two moves: {sorted(ids)}")
    moved = set(blocks)
    for copy in plan.copies:
        _refuse_touched(plan, moved, copy, f"{copy}")
    for row in plan.rows:
        table = [] if row.bind is not None else list(tables[row.slot])
        table[row.keep :] = row.new_blocks
        num_blocks = -(-row.end // plan.block_size)
        _refuse_touched(plan, moved, table[:num_blocks], f"the row of sequence {row.seq_id}")


def _refuse_touched(plan: StepPlan, moved: set[int], blocks: Iterable[int], what: str) -> None:
    both = moved.intersection(blocks)
    if both:
        raise ValueError(f"plan {plan.step} moves blocks {sorted(both)}, and {what} touches them")


class HostBlocks:
    """Contents of the host pool: bytes, or None where nothing was stored.

    block_bytes   bytes of a block
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.contents: list[bytearray | None] = []

    def resize(self, num_blocks: int) -> None:
        """Change the pool to so many blocks. New ones have no content."""
        del self.contents[num_blocks:]
        self.contents += [None] * (num_blocks - len(self.contents))

    def wait(self) -> None:
        """Return at once: a plan is complete when its `forward` returns."""

    def reader(self, host_block: int) -> Callable[[], bytes]:
        """Return a call that returns the content, copied now. Raises ValueError without one."""
        content = self.contents[host_block]
        if content is None:
            raise ValueError(f"nothing was stored in host block {host_block}, which is spilled")
        data = bytes(content)
        return lambda: data

    def writer(self, host_block: int) -> WholeContent:
        """Return what writes a content of the right length. Until then there is none."""
        self.contents[host_block] = None
        return WholeContent(lambda data: self._write(host_block, data))

    def _write(self, host_block: int, data: bytes) -> bool:
        if len(data) != self._block_bytes:
            return False
        self.contents[host_block] = bytearray(data)
        return True

    def run_moves(self, plan: StepPlan, pages: Pages) -> None:
        """Do the plan's stores and loads. Raises ValueError for a load of what was never stored.

        pages   content of the device's blocks
        """
        for block, host_block in plan.stores:
            self.contents[host_block] = bytearray(pages[block])
        for load in plan.loads:
            content = self.contents[load.host_block]
            if content is None:
                raise ValueError(f"plan {plan.step}: nothing was stored for {load}")
            memoryview(pages[load.block]).cast("B")[:] = content
