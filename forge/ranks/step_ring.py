"""StepRing: messages of rank 0 to every other rank, through memory that all of them map.

Owns the slots and the order in which they are written and read. Knows nothing of what a message
means. The memory holds one copy of a message, however many ranks read it.

    slots     | 6 | 7 | 5 |         part 7 is in slot 7 % 3
    notices   pipe to each reader:  number of the part, its bytes, bytes of the message after it
    acks      pipe from each reader: one byte for each part that it has copied

A part is announced by a pipe and not by a number in the memory: both ends are then ordered by the
kernel on every processor, a waiting reader sleeps, and the end of a process closes its pipes. A
message larger than a slot is sent in parts, which readers put together.

Always true: a slot is written only after every reader has copied its earlier part. The writer and
the readers may be killed at any time: the memory has no name, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

from forge.errors import EngineDead

NUM_SLOTS = 3
"""Slots of a ring: two steps may be in flight, and one more is written."""

SLOT_BYTES = 2**18
"""Bytes of a slot: a step of 256 decodes has about 10 KiB, one of 8,192 prompt tokens 130 KiB."""

MAX_MESSAGE_BYTES = 2**30
"""Most bytes of a message: far above any step, far below what would fill the host's memory."""

SPIN_S = 50e-6
"""Seconds that a reader polls before it sleeps, where processes share the cores."""

LONG_SPIN_S = 20e-3
"""The same where ranks have cores of their own: longer than most steps that decode."""

CORES_PER_RANK = 4
"""Cores that a rank's process needs so that one may poll: the server and its threads have others.

Waking a process takes longer than reading a message of 256 rows.
"""

_NOTICE = struct.Struct("<QII")
"""Number of a part, its bytes, and the bytes of the message after it."""


class RingMemory(NamedTuple):
    """Shared memory of a ring.

    path   path by which each process opens it; valid while the process that made it runs
    """

    path: str
    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES

    def map(self) -> mmap.mmap:
        """Return the memory, mapped into this process."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            return mmap.mmap(fd, self.num_slots * self.slot_bytes)
        finally:
            os.close(fd)


class RingWriter:
    """Writing end of a ring. One thread uses it.

    notices, acks   pipes to and from each reader, in the same order
    """

    def __init__(
        self, memory: RingMemory, notices: Sequence[Connection], acks: Sequence[Connection]
    ) -> None:
        self._memory = memory
        self._map = memory.map()
        self._view = memoryview(self._map)
        self._notices, self._acks = notices, acks
        self._num_free = [memory.num_slots] * len(acks)
        self._num_parts = 0
        for ack in acks:
            os.set_blocking(ack.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ring: readers receive None after the last message."""
        for pipe in (*self._notices, *self._acks):
            pipe.close()
        self._view.release()
        self._map.close()

    def send(self, buffers: Sequence[Any]) -> None:
        """Send the buffers' bytes, one after the other, as one message.

        buffers   objects with contiguous memory: bytes, arrays
        Waits while a reader has not copied the part that is `num_slots` before. Raises EngineDead
        where a reader has ended.
        """
        message = b"".join(buffers)  # One copy more, and cheaper than a slice for each buffer.
        assert len(message) <= MAX_MESSAGE_BYTES, f"a message of {len(message)} bytes"
        for first in range(0, max(1, len(message)), self._memory.slot_bytes):
            part = message[first : first + self._memory.slot_bytes]
            self._send_part(part, len(message) - first - len(part))

    def _send_part(self, part: bytes, num_after: int) -> None:
        for reader in range(len(self._num_free)):
            while not self._num_free[reader]:
                self._num_free[reader] += self._wait_for_acks(reader)
            self._num_free[reader] -= 1
        first = self._num_parts % self._memory.num_slots * self._memory.slot_bytes
        self._view[first : first + len(part)] = part
        notice = _NOTICE.pack(self._num_parts, len(part), num_after)
        self._num_parts += 1
        for reader, pipe in enumerate(self._notices):
            try:
                os.write(pipe.fileno(), notice)
            except BrokenPipeError:
                raise EngineDead(_lost_reader(reader)) from None

    def _wait_for_acks(self, reader: int) -> int:
        """Return the number of parts that the reader has copied since the last call: 1 or more."""
        fd = self._acks[reader].fileno()
        while True:
            try:
                acks = os.read(fd, 64)
            except BlockingIOError:
                _wait_readable(fd)
                continue
            if not acks:
                raise EngineDead(_lost_reader(reader))
            return len(acks)


def select_spin_s(num_ranks: int, num_cores: int) -> float:
    """Return how long a rank polls for a message before it sleeps, on a machine of such cores."""
    return LONG_SPIN_S if num_cores >= CORES_PER_RANK * num_ranks else SPIN_S


class RingReader:
    """Reading end of a ring. One thread uses it.

    spin_s   seconds of polling before it sleeps
    """

    def __init__(
        self, memory: RingMemory, notices: Connection, acks: Connection, spin_s: float = SPIN_S
    ) -> None:
        self._memory = memory
        self._spin_s = spin_s
        self._map = memory.map()
        self._view = memoryview(self._map)
        self._notices, self._acks = notices, acks
        self._num_parts = 0
        os.set_blocking(notices.fileno(), False)

    def close(self) -> None:
        """Leave the ring: the writer's next message raises EngineDead."""
        for pipe in (self._notices, self._acks):
            pipe.close()
        self._view.release()
        self._map.close()

    def receive(self) -> bytes | None:
        """Wait for the next message and return it; None where the writer has ended.

        A message of which only some parts have arrived is dropped then.
        """
        parts = []
        while (notice := self._wait_for_notice()) is not None:
            number, num_bytes, num_after = notice
            assert number == self._num_parts, f"part {number}, and {self._num_parts} is due"
            self._num_parts += 1
            first = number % self._memory.num_slots * self._memory.slot_bytes
            parts.append(bytes(self._view[first : first + num_bytes]))
            with suppress(BrokenPipeError):  # The writer has ended; what it announced is there.
                os.write(self._acks.fileno(), b"a")
            if not num_after:
                return parts[0] if len(parts) == 1 else b"".join(parts)
        return None

    def _wait_for_notice(self) -> tuple[int, int, int] | None:
        fd = self._notices.fileno()
        spin_end_s = time.perf_counter() + self._spin_s
        while True:
            try:
                notice = os.read(fd, _NOTICE.size)
            except BlockingIOError:
                if time.perf_counter() > spin_end_s:
                    _wait_readable(fd)
                else:
                    os.sched_yield()
                continue
            return _NOTICE.unpack(notice) if notice else None


def _wait_readable(fd: int) -> None:
    """Sleep until the pipe has bytes or its other end has closed."""
    poll = select.poll()  # select.select takes no descriptor from 1024 on.
    poll.register(fd, select.POLLIN)
    poll.poll()


def _lost_reader(reader: int) -> str:
    return f"rank {reader + 1} has ended"
