"""Staging: a step's numbers go to the device in one transfer, and come back in one.

Owns pinned buffers, two of each, since the host fills one while the device may still read the
other. Knows no meaning of what it carries.

    host      [ slots | positions | tokens | ... ]  pinned, this step's        one copy
    device    [ slots | positions | tokens | ... ]  the same places every step, so that a CUDA
                                                    graph finds them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

LANES = 2
"""Steps in flight."""


class Inbox:
    """int32 arrays from the host to the device.

    One transfer a step. A buffer is filled again only when the device has read it.
    lanes   steps that may be in flight before a transfer waits for one
    """

    def __init__(self, device: torch.device, capacity: int, lanes: int = LANES) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._lane = 0
        self._lanes = lanes
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self._hosts = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(self._lanes)
        ]
        self._views = [host.numpy() for host in self._hosts]
        self._read = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []

    def send(self, arrays: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        """The arrays on the device, one view each, valid until the next call.

        They stand behind each other from the start of `buffer`.
        """
        sizes = [len(array) for array in arrays]
        size = sum(sizes)
        assert size <= len(self.buffer), f"{size} numbers for a buffer of {len(self.buffer)}"
        self._lane = lane = (self._lane + 1) % self._lanes
        if self._cuda:
            self._read[lane].synchronize()  # long past: the device read it `lanes` steps ago
        np.concatenate(arrays, out=self._views[lane][:size])
        there = self.buffer[:size]
        there.copy_(self._hosts[lane][:size], non_blocking=True)
        if self._cuda:
            self._read[lane].record()
        return list(there.split(sizes))


class Outbox:
    """Tokens and status of each row, on the device for the next step and on their way to the host.

    rows   [2, slots] int32 on the device: what the last step left, in the order of its batch
    """

    def __init__(self, device: torch.device, slots: int) -> None:
        self.rows = torch.zeros((2, slots), dtype=torch.int32, device=device)
        self._cuda = device.type == "cuda"
        self._lane = 0
        # One more than there are steps in flight: the oldest may still be read.
        self._hosts = [
            torch.zeros((2, slots), dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(LANES + 1)
        ]
        self._events = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []

    def leave(self, count: int) -> Callable[[], torch.Tensor]:
        """Send the first `count` rows; the call that waits for them gives [2, count].

        It is good until LANES + 1 more steps have left.
        """
        self._lane = lane = (self._lane + 1) % (LANES + 1)
        host = self._hosts[lane]
        host.copy_(self.rows, non_blocking=True)  # whole: one copy, no matter how many rows
        if not self._cuda:
            return lambda: host[:, :count]
        event = self._events[lane]
        event.record()

        def arrived() -> torch.Tensor:
            event.synchronize()
            return host[:, :count]

        return arrived


class Arrival:
    """A tensor on its way to the host. `wait` gives it once it is there."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type != "cuda":
            self._host = source.clone()  # the device writes there again in the next step
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host. Waits for the work before it on its stream, no more."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
