"""TierFiles: the folder of a disk tier while a model is open, and the threads that use it.

Owns when the two are opened and closed. Knows no format and no model: a loader gives the layout,
and the model moves contents to and from the files.

    open_tier_files ──► BlockFiles, keys of its files, threads ──► model ──► threads end ──► closed

Always true: the folder is closed after the last thread has used it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.models.block_files import BlockFiles
from forge.tier_options import TierOptions

NUM_FILE_THREADS = 16
"""Files that are read and written at a time. Each is checked without Python's lock."""


class TierFiles(NamedTuple):
    """Folder of a disk tier that is open.

    keys       of its files, the least recently used first: for `Engine.add_disk_keys`
    executor   runs reads and writes
    """

    files: BlockFiles
    keys: tuple[bytes, ...]
    executor: ThreadPoolExecutor


@contextmanager
def open_tier_files(options: TierOptions, layout: bytes) -> Iterator[TierFiles | None]:
    """Open the folder of `kv_disk_path`, or yield None without one. Raises InvalidConfig.

    layout   64 bytes: digest of all that decides what a content means, besides the key

    The writes that plans have started are completed before it is closed.
    """
    if options.kv_disk_path is None:
        yield None
        return
    folder = os.path.expanduser(options.kv_disk_path)
    files = BlockFiles(folder, layout, options.max_disk_bytes)
    executor = ThreadPoolExecutor(NUM_FILE_THREADS, "forge-files")
    try:
        try:
            keys = tuple(files.keys())
        except TimeoutError as error:
            raise InvalidConfig(
                "kv_disk_path", str(error), "End that process, or name another folder"
            ) from error
        yield TierFiles(files, keys, executor)
    finally:
        executor.shutdown()
        files.close()
