"""Disk cost: the time of reading a block's file, measured when the folder is opened.

Owns which files are read. Knows no model: it times what threads do with a BlockFiles.

    files of an earlier start    read as they lie: from the page cache, or from the disk
    none, or few                 written, synced and dropped from the page cache, then read: cold

    wave   2 files | 4 files | 16 files     each file once: after that it is in the page cache

A fetch reads the files of an earlier start, so a sample of them takes what fetches will take: in
the page cache after a restart of the process, on the disk after one of the machine. A file that was
just written is always in the page cache, and says nothing of later. So without files of an earlier
start the cost is that of the disk, and an idle engine computes rather than wait for a slow one:
a wrong choice of the disk costs several times what a wrong choice of computing does.

Always true: the folder has the same files afterwards, but for files that others wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from secrets import token_bytes

from forge.models.block_files import BlockFiles
from forge.models.file_format import HASH_BYTES, header_bytes

WAVES = (2, 4, 16)
"""Files that are read at a time. The last wave counts: fetches are read by as many threads."""

MAX_MEASURE_S = 0.2
"""Time after which no further wave is read."""

MAX_FETCH_NS = 2**40
"""Time of a file that cannot be read: an idle engine computes."""


def measure_fetch_ns(
    files: BlockFiles,
    keys: Sequence[bytes],
    executor: Executor,
    content_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the nanoseconds of reading a file of a block while others are read.

    keys            of the files that were there at the start, of any layout
    executor        runs reads, as those of fetches
    content_bytes   of a block
    clock           seconds
    """
    file_bytes = header_bytes(content_bytes) + content_bytes
    begin_s, fetch_ns = clock(), MAX_FETCH_NS
    probes: list[bytes] = []
    try:
        waves = _existing_waves(keys) or _written_waves(files, content_bytes, probes)
        for wave in waves:
            start_s = clock()
            num_bytes = sum(executor.map(files.num_bytes_read, wave))
            if num_bytes:
                # Blocks of another model may have another size.
                fetch_ns = round(1e9 * (clock() - start_s) * file_bytes / num_bytes)
            if clock() - begin_s > MAX_MEASURE_S:
                break
    except TimeoutError:
        pass  # another process holds the folder
    finally:
        for key in probes:
            files.remove(key.hex())
    return min(fetch_ns, MAX_FETCH_NS)


def _existing_waves(keys: Sequence[bytes]) -> list[list[bytes]]:
    """Return keys for all waves, spread over recent and old ones; [] where there are too few."""
    num_read = sum(WAVES)
    if len(keys) < num_read:
        return []
    sample = iter([keys[index * len(keys) // num_read] for index in range(num_read)])
    return [[next(sample) for _ in range(size)] for size in WAVES]


def _written_waves(
    files: BlockFiles, content_bytes: int, probes: list[bytes]
) -> Iterator[list[bytes]]:
    """Yield keys of files that are on the disk only, and append them to `probes`.

    No other file gives way to them: the last wave is as large as there is room for.
    """
    content = token_bytes(content_bytes)  # which a file system cannot compress
    file_bytes = header_bytes(content_bytes) + content_bytes
    for size in WAVES:
        num_free = (files.max_bytes - files.num_bytes) // file_bytes
        wave = [token_bytes(HASH_BYTES) for _ in range(min(size, num_free))]
        probes += wave
        for key in wave:
            files.write(key, content)
            files.drop_from_page_cache(key)
        if not wave:
            return
        yield wave
