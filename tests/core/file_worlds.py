"""Worlds of tests/core/host_worlds.py whose files are in a real folder.

Owns the folder's faults: writes and reads that fail, and files that are cut, changed, removed or
replaced by a link before they are read.

    spill   host block ─► BlockFiles ─► a file of the folder, which may be damaged afterwards
    fetch   the file ─► pieces ─► host block, or a miss that is computed
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from forge.models.block_files import BlockFiles
from tests.core.host_worlds import draw_host_world
from tests.core.worlds import DISK, FaultyStore, RandomWorld, WorldOutcome, build_engine, run_world

LAYOUT = b"a layout" * 8
MAX_BYTES = 12_000
"""Bytes of the folder's files: fewer than some worlds write, so old ones are removed."""

DAMAGES = ("changed", "cut", "longer", "removed", "link")


class FaultyFolder(FaultyStore):
    """Files of a folder. Some writes and reads fail, some files are damaged before they are read.

    counts     reads and writes by how they ended, and damages by their kind
    misreads   damaged files that were read
    """

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.counts: Counter[str] = Counter()
        self.misreads: list[str] = []
        self._folder = folder
        self._files = BlockFiles(folder, LAYOUT, MAX_BYTES)

    def close(self) -> None:
        """Close the folder."""
        self._files.close()

    def write(self, key: bytes, content: bytes) -> bool:
        """Write a file, fail, or raise."""
        draw = self._draw(key, "write")
        if draw < 0.05:
            raise OSError("no space left")
        is_written = draw >= 0.1 and self._files.write(key, content)
        self.counts["files written" if is_written else "files not written"] += 1
        return is_written

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        """Read a file, which may be damaged before: then it must be a miss. Or raise."""
        draw = self._draw(key, "read")
        if draw < 0.03:
            raise OSError("input/output error")
        path = self._folder / key.hex()
        is_damaged = draw < 0.25 and path.exists()
        if is_damaged:
            self.counts[f"files {self._damage(path, key)}"] += 1
        is_read = self._files.read(key, write)
        if is_damaged and is_read:
            self.misreads.append(path.name)  # what a store raises is a move that failed
        self.counts["files read" if is_read else "files not read"] += 1
        return is_read

    def _damage(self, path: Path, key: bytes) -> str:
        """Damage a file, and return how."""
        rng = Random(f"{self._seed} {key.hex()} damage")
        damage, data = rng.choice(DAMAGES), bytearray(path.read_bytes())
        if damage == "removed":
            path.unlink()
        elif damage == "link":
            os.replace(path, path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
        elif damage == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        elif damage == "longer":
            path.write_bytes(data + rng.randbytes(rng.randint(1, 9)))
        else:
            # The content is a small part of a file, so half of the changes are in its last bytes.
            index = rng.choice((rng.randrange(len(data)), len(data) - 1 - rng.randrange(4)))
            data[index] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        return damage


def draw_file_world(seed: int) -> RandomWorld:
    """Draw a world with a host pool and files."""
    world = draw_host_world(seed)
    host_tier = world.config.host_tier
    assert host_tier is not None
    if host_tier.disk is None:
        host_tier = replace(host_tier, disk=DISK)
    return world._replace(config=replace(world.config, host_tier=host_tier))


def run_file_world(seed: int, folder: Path, *, audited: bool) -> WorldOutcome:
    """Run the world of a seed with files in a folder, which must be empty or missing.

    Counts of the outcome have what happened to files.
    """
    store = FaultyFolder(seed, folder)

    def build(world: RandomWorld) -> Any:
        return build_engine(world, store)

    try:
        outcome = run_world(draw_file_world(seed), audited=audited, create=build)
    finally:
        store.close()
    assert not store.misreads, f"damaged files are read: {store.misreads}"
    outcome.event_counts.update(store.counts)
    return outcome
