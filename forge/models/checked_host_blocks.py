"""CheckedHostBlocks: HostBlocks that compare a checksum of each block that is loaded.

Owns a checksum for each host block: of the page that was stored, or of a file's content. Knows no
scheduler.

    store, fetch   checksum of the page or content ─► by host block
    load           checksum of the page afterwards = that, or `forward` raises DamagedBlocks
    spill          checksum of the copy = that, or no file is written

Always true: a step that has loaded a damaged block raises, so it is void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from zlib import crc32

from forge.errors import DamagedBlocks
from forge.models.host_blocks import HostBlocks, Pages
from forge.seam import StepPlan

log = logging.getLogger(__name__)


class CheckedHostBlocks(HostBlocks):
    """Contents of the host pool, and the checksum that each should have.

    block_bytes   bytes of a block
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self._sums: dict[int, int] = {}

    def reader(self, host_block: int) -> Callable[[], bytes]:
        """Return a call that returns the content, copied now. It raises ValueError if damaged."""
        read, expected = super().reader(host_block), self._sums.get(host_block)

        def read_checked() -> bytes:
            data = read()
            if crc32(data) != expected:
                raise ValueError(f"host block {host_block} is damaged, and its file not written")
            return data

        return read_checked

    def _write(self, host_block: int, data: bytes) -> bool:
        """Write a content and keep its checksum."""
        if not super()._write(host_block, data):
            return False
        self._sums[host_block] = crc32(data)
        return True

    def run_moves(self, plan: StepPlan, pages: Pages) -> None:
        """Do the plan's stores and loads. Raises DamagedBlocks for loads that differ from stores.

        pages   content of the device's blocks
        """
        for store in plan.stores:
            self._sums[store.host_block] = crc32(pages[store.block])
        super().run_moves(plan, pages)
        damaged = [
            (load.block, load.host_block)
            for load in plan.loads
            if crc32(pages[load.block]) != self._sums[load.host_block]
        ]
        if damaged:
            error = DamagedBlocks(plan.step, damaged)
            log.error("%s", error)
            raise error
