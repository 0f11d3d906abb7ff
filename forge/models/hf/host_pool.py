"""HostPool: blocks in host memory, pinned where the device is a GPU.

Owns the slabs and where each host block is in them. Knows no plan, stream or cache: block_moves.py
copies blocks of the device to and from it, and file_moves.py those of files.

    slab 0, at most SLAB_BYTES                        slab 1
    | host block 0 | host block 1 | ... | unused |    | host block 112 | ...
    └ all layers of one block, one after the other, each as the device has it

Always true: a host block is one contiguous piece, so one copy moves it and one file holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from forge.errors import InvalidConfig

GIB = 2**30
SLAB_BYTES = GIB
"""Bytes of a slab: torch rounds pinned memory up to powers of two, and this is one."""

NUM_PINNING_THREADS = 4
"""Slabs that are pinned at a time."""


def allocate_slabs(num_bytes: int, *, is_pinned: bool, block_bytes: int = 1) -> list[torch.Tensor]:
    """Return host memory of so many bytes, in slabs of uint8. Raise InvalidConfig.

    block_bytes   each slab is a multiple of it, if `num_bytes` is

    Pinning takes about half a second a GiB in one thread.
    """
    slab_bytes = max(block_bytes, SLAB_BYTES - SLAB_BYTES % block_bytes)
    sizes = [min(slab_bytes, num_bytes - start) for start in range(0, num_bytes, slab_bytes)]

    def allocate(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)

    try:
        with ThreadPoolExecutor(NUM_PINNING_THREADS) as executor:
            return list(executor.map(allocate, sizes))
    except RuntimeError:
        raise InvalidConfig(
            "kv_host_gib",
            f"{num_bytes / GIB:.1f} GiB of host memory cannot be allocated",
            "Give less",
        ) from None


class HostPool:
    """Host blocks of `block_bytes` bytes each, as many as fit into the slabs.

    slabs   from `allocate_slabs`
    """

    def __init__(self, slabs: Sequence[torch.Tensor], block_bytes: int) -> None:
        self.block_bytes = block_bytes
        # One at least, so that a block larger than a slab gives no division by zero.
        self._blocks_per_slab = max(1, max(map(len, slabs), default=0) // block_bytes)
        self._slabs = [
            slab[: len(slab) // block_bytes * block_bytes].view(-1, block_bytes) for slab in slabs
        ]

    @property
    def num_blocks(self) -> int:
        """Host blocks that there is memory for."""
        return sum(map(len, self._slabs))

    def block(self, host_block: int) -> torch.Tensor:
        """Return the bytes of a host block, uint8 [block_bytes]."""
        slab, index = divmod(host_block, self._blocks_per_slab)
        return self._slabs[slab][index]


@dataclass(slots=True)
class PinnedWriter:
    """ContentWriter of a host block, which has the pieces so far.

    target   bytes of the host block
    """

    target: NDArray[np.uint8]
    _end: int = 0

    def write(self, piece: memoryview) -> bool:
        """Write the next piece, and return whether it fits."""
        start, self._end = self._end, self._end + len(piece)
        if self._end > len(self.target):
            return False
        np.copyto(self.target[start : self._end], np.frombuffer(piece, np.uint8))
        return True

    def complete(self) -> bool:
        """Return whether the content has the length of a block."""
        return self._end == len(self.target)


class PinnedContents(NamedTuple):
    """Host blocks as one plan finds them: the HostContents of file moves.

    wait   waits until all work of earlier plans is complete. Any thread may call it
    """

    pool: HostPool
    wait: Callable[[], None]

    def reader(self, host_block: int) -> Callable[[], memoryview]:
        """Return a call that returns a copy of the content. Other Python threads run meanwhile."""
        source: NDArray[np.uint8] = self.pool.block(host_block).numpy()
        return lambda: source.copy().data

    def writer(self, host_block: int) -> PinnedWriter:
        """Return what writes a content in place. Other Python threads run meanwhile."""
        return PinnedWriter(self.pool.block(host_block).numpy())
