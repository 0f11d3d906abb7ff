"""BlockFolder: the files of blocks in a folder, and whether the page cache has them.

Owns the count of files, the eviction from the page cache and the bytes that this process has read
from storage. Knows no engine and reads no content.

    a file is written ──► page cache ──fsync, DONTNEED──► storage alone
    a request reads it                                    read_bytes of /proc/self/io grows
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

BLOCK_NAME = re.compile(r"[0-9a-f]{128}")
"""Name of a complete file of a block."""

IO_FILE = Path("/proc/self/io")


class BlockFolder(NamedTuple):
    """Folder of --kv-disk-path."""

    path: str

    def names(self) -> list[str]:
        """Return the names of all complete files."""
        return [name for name in os.listdir(self.path) if BLOCK_NAME.fullmatch(name)]

    def drop_page_cache(self) -> None:
        """Let the page cache forget all files. Those that are not on storage yet are written."""
        for name in self.names():
            fd = os.open(os.path.join(self.path, name), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def read_storage_bytes() -> int | None:
    """Return the bytes that this process has read from storage, or None where nothing counts them.

    Bytes from the page cache do not count.
    """
    try:
        lines = IO_FILE.read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]) if "read_bytes" in values else None
