"""Buffers between host and device: a step's numbers go over in one copy and come back in one.

Owns pinned buffers. Inputs have one for each step in flight, so that the host can fill the next
while a step runs. Outputs have one more, since the host may still read the oldest. Knows nothing of
what the numbers mean.

    host      [ slots | positions | tokens | ... ]  pinned, this step's        one copy
    device    [ slots | positions | tokens | ... ]  the same addresses every step, so that a CUDA
                                                    graph can read them

`upload` is for arrays of any length, which no CUDA graph reads:

    ids [3]   factors [2]                     int64 and float64 both have 8 bytes
    └──────┬──────┘
        [ 5 numbers ] ─── one copy ───► views of 3 and 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array: TypeAlias = "NDArray[np.int32]"

MAX_IN_FLIGHT = 2
"""Steps that may be in flight."""


class InputBuffer:
    """Device buffer that a step's int32 arrays are copied to, at the same address every step.

    buffer          [capacity] int32 on the device
    max_in_flight   pinned host buffers, used in turn. One is filled again only when the device has
                    read it
    """

    def __init__(
        self, device: torch.device, capacity: int, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._host_index = 0
        self._num_hosts = max_in_flight
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self._host_buffers = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(self._num_hosts)
        ]
        self._host_arrays = [host.numpy() for host in self._host_buffers]
        self._copy_events = [torch.cuda.Event() for _ in self._host_buffers] if self._cuda else []

    def copy_to_device(self, arrays: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        """Copy the arrays to the start of `buffer`, one after the other, in one transfer.

        Return a view of each on the device, valid until the next call.
        """
        sizes = [len(array) for array in arrays]
        size = sum(sizes)
        assert size <= len(self.buffer), f"{size} numbers for a buffer of {len(self.buffer)}"
        self._host_index = index = (self._host_index + 1) % self._num_hosts
        if self._cuda:
            # The device read this buffer `max_in_flight` steps ago, so this does not wait.
            self._copy_events[index].synchronize()
        np.concatenate(arrays, out=self._host_arrays[index][:size])
        device_view = self.buffer[:size]
        device_view.copy_(self._host_buffers[index][:size], non_blocking=True)
        if self._cuda:
            self._copy_events[index].record()
        return list(device_view.split(sizes))


class OutputBuffer:
    """Token and status of each row, on the device for the next step and copied to the host.

    sampled   [2, slots] int32 on the device; tokens and status, in the order of the last batch
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self.sampled = torch.zeros((2, num_slots), dtype=torch.int32, device=device)
        self._cuda = device.type == "cuda"
        self._host_index = 0
        # One more than the steps in flight: the host may still read the oldest.
        self._host_buffers = [
            torch.zeros((2, num_slots), dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(MAX_IN_FLIGHT + 1)
        ]
        self._events = [torch.cuda.Event() for _ in self._host_buffers] if self._cuda else []

    def copy_to_host(self, num_rows: int) -> Callable[[], torch.Tensor]:
        """Queue a copy of the first `num_rows` rows to the host.

        Return a call that waits for it and returns [2, num_rows]. That tensor is valid for
        MAX_IN_FLIGHT further calls of `copy_to_host`. The call after those overwrites it.
        """
        self._host_index = index = (self._host_index + 1) % (MAX_IN_FLIGHT + 1)
        host = self._host_buffers[index]
        host.copy_(self.sampled, non_blocking=True)  # All rows: one contiguous copy.
        if not self._cuda:
            return lambda: host[:, :num_rows]
        event = self._events[index]
        event.record()

        def arrived() -> torch.Tensor:
            event.synchronize()
            return host[:, :num_rows]

        return arrived


class HostCopy:
    """Copy of a device tensor on its way to the host."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type != "cuda":
            self._host = source.clone()  # The next step overwrites the source.
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host. Waits for the copy and earlier work of its stream."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def pin(array: Any) -> torch.Tensor:
    """Return the array as a tensor in pinned memory."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copy one-dimensional arrays of int64 or float64 to the device, in one transfer.

    Return one tensor each. Nothing waits for the device. For a CUDA device the arrays are written
    to pinned memory once. PyTorch's allocator uses that memory again after the device has read it.
    """
    size = sum(len(array) for array in arrays)
    host = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.int64) for array in arrays], out=host.numpy())
    views = host.to(device, non_blocking=True).split_with_sizes([len(array) for array in arrays])
    return [
        part.view(torch.float64) if array.dtype == np.float64 else part
        for part, array in zip(views, arrays, strict=True)
    ]


def upload_groups(device: torch.device, *groups: tuple[NDArray[Any], ...]) -> list[Any]:
    """Copy NamedTuples of arrays to the device in one transfer.

    groups   NamedTuples whose fields are one-dimensional arrays of int64 or float64
    Return each group as the same NamedTuple of device tensors, in order.
    """
    tensors = iter(upload(device, *chain.from_iterable(groups)))
    return [type(group)(*islice(tensors, len(group))) for group in groups]


def int64_array(values: Sequence[int]) -> NDArray[Any]:
    """Return the integers as an array that `upload` takes."""
    return np.array(values, np.int64)


def concatenate(arrays: Iterable[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    """Return the arrays one after the other; empty where there are none."""
    return np.concatenate([np.zeros(0, dtype), *arrays])
