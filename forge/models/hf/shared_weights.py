"""Tensors in memory of another process, opened for an update of the weights.

Owns the way from a SharedWeights to tensors. Knows no model and no socket. Nothing is unpickled:
each field of a storage is a number or bytes, and torch opens the memory.

    SharedMemory  ── mmap, private ───────────────────────────► CPU tensors
    CudaStorage   ── UntypedStorage._new_shared_cuda ──► set_ ─► tensors on the same GPU, no copy
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch

from forge.errors import InvalidWeights, one_line
from forge.weights import CudaStorage, SharedMemory, SharedTensor, SharedWeights

OpenTensor: TypeAlias = Callable[[SharedTensor, torch.dtype], torch.Tensor]


def open_shared_weights(weights: SharedWeights) -> dict[str, torch.Tensor]:
    """Return the tensors by their names. Raises InvalidWeights for memory that cannot be opened.

    The memory is released with the last tensor.
    """
    try:
        storages = [_open_storage(storage) for storage in weights.storages]
        return {
            tensor.name: storages[tensor.storage](tensor, _find_dtype(tensor))
            for tensor in weights.tensors
        }
    except InvalidWeights:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidWeights(
            "storages",
            f"the memory of the trainer cannot be opened: {one_line(error)}",
            "Send it again, from a process of this machine that is still alive",
        ) from None


def _find_dtype(tensor: SharedTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidWeights(tensor.name, f"there is no dtype {tensor.dtype[:32]}", "Give bfloat16")
    return dtype


def _open_storage(storage: SharedMemory | CudaStorage) -> OpenTensor:
    return _open_memory(storage) if isinstance(storage, SharedMemory) else _open_cuda(storage)


def _open_memory(memory: SharedMemory) -> OpenTensor:
    descriptor = os.open(memory.path, os.O_RDONLY)
    try:
        # Private, so that it may be mapped as writable, which torch needs.
        buffer = mmap.mmap(descriptor, memory.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)

    def open_tensor(tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
        count = prod(tensor.shape)
        if not count:
            return torch.empty(tensor.shape, dtype=dtype)
        offset_bytes = tensor.offset * dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset_bytes)
        return flat.reshape(tensor.shape)

    return open_tensor


def _open_cuda(storage: CudaStorage) -> OpenTensor:
    index = _find_device(storage.device_uuid)
    storage_type: Any = torch.UntypedStorage
    cuda_storage = storage_type._new_shared_cuda(
        index,
        storage.handle,
        storage.num_bytes,
        storage.offset_bytes,
        storage.ref_counter_handle,
        storage.ref_counter_offset,
        storage.event_handle,
        storage.event_sync_required,
    )

    def open_tensor(tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
        empty = torch.empty(0, dtype=dtype, device=torch.device("cuda", index))
        return empty.set_(cuda_storage, tensor.offset, tensor.shape)

    return open_tensor


def _find_device(uuid: str) -> int:
    """Return the index that the GPU has in this process. Raises ValueError."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"this process has no GPU {uuid[:64]}")
