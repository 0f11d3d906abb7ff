"""Work of a start that needs no Python, done while the packages are imported.

Owns two threads, and the question whether there is a GPU. Reads no checkpoint and imports no torch:
both threads do what the start does later by itself, and the start is right without them.

    main thread     import torch, transformers: seconds of Python
    driver          libcuda.so.1: context of the first GPU         ─► torch finds it
    disk            model*.safetensors, by name                    ─► the page cache has them

Always true: an error ends a thread and nothing else. Files are read only if all of them fit into
half of the free memory, or reading the last would evict the first. A torch without CUDA uses no
GPU, so a context would hold memory of one for nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

CHUNK_BYTES = 8 * 2**20


def begin_early(folder: Path, *, uses_gpu: bool, reads_weights: bool) -> list[threading.Thread]:
    """Start threads that create the GPU's context and read the folder's weights. Return them."""
    threads = []
    if uses_gpu and torch_has_cuda():
        threads.append(threading.Thread(target=create_context, name="forge-driver", daemon=True))
    if reads_weights:
        # Some folders have the weights twice, as consolidated.safetensors too.
        paths = sorted(folder.glob("model*.safetensors"))
        threads.append(
            threading.Thread(target=read_files, args=(paths,), name="forge-disk", daemon=True)
        )
    for thread in threads:
        thread.start()
    return threads


def torch_has_cuda() -> bool:
    """Return whether the installed torch is a build with CUDA. It is not imported."""
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders)


def has_gpu() -> bool:
    """Return whether torch will find a GPU. It is not imported."""
    if not torch_has_cuda() or (driver := _open_driver()) is None:
        return False
    count = ctypes.c_int()
    return not driver.cuDeviceGetCount(ctypes.byref(count)) and count.value > 0


def _open_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver, initialized, or None where there is none or it has no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if not driver.cuInit(0) else None


def create_context() -> None:
    """Create the primary context of the first GPU, which torch uses too. Ignore errors."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver = _open_driver()
    if driver is not None and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def read_files(paths: Sequence[Path]) -> int:
    """Read the files once, so that the page cache has them. Return the number of bytes read.

    Nothing is read where the files are too large for the free memory.
    """
    num_bytes = 0
    with suppress(OSError, ValueError):
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(path.stat().st_size for path in paths) > free_bytes // 2:
            return 0
        buffer = bytearray(CHUNK_BYTES)
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    num_bytes += count
    return num_bytes
