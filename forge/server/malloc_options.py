"""Options of glibc's malloc for a process that serves: freed memory returns to the system.

Owns the numbers. Knows no request.

    body of megabytes ──► parsed on a thread ──► objects ──► freed ──┬─ default: kept for the thread
                                                                     └─ options: returned

By default glibc raises both thresholds whenever a larger block is freed, to 32 and 64 MiB at most.
Each thread takes blocks from a separate arena, and each arena keeps free memory up to a threshold.
So after a few large bodies the process keeps tens of MiB, of which later requests use a part. A
threshold that is set stays as it is.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Numbers of the options, from malloc.h."""
MALLOC_OPTIONS = {M_TRIM_THRESHOLD: 128 * 2**10, M_MMAP_THRESHOLD: 128 * 2**10, M_ARENA_MAX: 2}
"""Both thresholds are those of glibc at a start. Two arenas suffice: one thread at a time runs
Python."""


def set_malloc_options() -> None:
    """Set MALLOC_OPTIONS, unless the environment has options of malloc.

    Another C library has no such options, and nothing is set. Arenas that exist stay, so it is
    called before threads start.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for number, value in MALLOC_OPTIONS.items():
            mallopt(number, value)
