"""Log lines that no client can forge, written so that no thread waits for their reader.

Owns the format of a record, and the way to standard output and error. Text of a client may be
part of a message or of an exception. A line break in it must not start a line that looks like a
record. A terminal must not execute its control characters.

    ERROR forge.server: request a-1f failed: bad \\x1b[2J\\nERROR nothing of the kind
        | Traceback (most recent call last):
        | ...

A full pipe, a full disk or a stopped terminal holds up only one thread, which does nothing else:

    logging, print, warnings ──► at most MAX_QUEUED_TEXTS ──► thread ──► descriptor
                                 a text beyond them is dropped and counted
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TextIO, cast

MAX_QUEUED_TEXTS = 4096
MAX_TEXT_CHARS = 2**14
"""Characters of one text. A longer one loses its middle: the end of a traceback says most."""
DRAIN_TIMEOUT_S = 1.0
"""Seconds that the end of a process waits for its last lines, for each of two files."""
NUM_DRAIN_WAITS = 10


class PrintableFormatter(logging.Formatter):
    """Formats a message as one line and a traceback as indented lines, all printable."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message as one line."""
        return escape_unprintable(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """Return the traceback, each line marked so that none looks like a message."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    | {escape_unprintable(line)}" for line in lines)


class NonBlockingWriter(io.TextIOBase):
    """A text stream on a descriptor. No call waits for the descriptor, except `drain`.

    Texts that cannot be written are dropped. Their number is written once writing works again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        # SimpleQueue is reentrant: a signal handler or a finalizer may write in the middle of it.
        self._queue: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._num_dropped = 0
        threading.Thread(target=self._run, name="forge-log", daemon=True).start()

    encoding = "utf-8"
    errors = "backslashreplace"

    def write(self, text: str) -> int:
        """Queue the text for the thread, or drop it when the queue is full."""
        if self._queue.qsize() < MAX_QUEUED_TEXTS:
            half = MAX_TEXT_CHARS // 2
            kept = text if len(text) <= MAX_TEXT_CHARS else f"{text[:half]} [...] {text[-half:]}"
            self._queue.put(kept)
        else:
            self._num_dropped += 1
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
        """Wait until all queued texts are written or dropped. Return False on a timeout."""
        written = threading.Event()
        self._queue.put(written)
        # Short waits: after the process was stopped, its writer still gets turns before the end.
        return any(written.wait(timeout_s / NUM_DRAIN_WAITS) for _ in range(NUM_DRAIN_WAITS))

    def _run(self) -> None:
        num_failed = num_reported = 0
        while True:
            item = self._queue.get()
            if isinstance(item, str) and not self._write_all(item):
                num_failed += 1
                continue
            num_dropped = self._num_dropped + num_failed - num_reported
            if num_dropped and self._queue.empty():
                problem = "lines were lost: their reader was too slow. Read it faster"
                if self._write_all(f"WARNING forge.log: {num_dropped} {problem}\n"):
                    num_reported += num_dropped
            if isinstance(item, threading.Event):
                item.set()

    def _write_all(self, text: str) -> bool:
        """Write the whole text; False where the descriptor does not take it."""
        data = text.encode(self.encoding, self.errors)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process shares it and made it non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:  # the reader has left, or the disk is full
                return False
        return True


@contextmanager
def nonblocking_logging() -> Iterator[None]:
    """Write what this process logs to standard error, line by line, and never wait for a reader.

    In the block, `sys.stdout` and `sys.stderr` are NonBlockingWriters: what libraries print does
    not wait either. After it they are restored, unless the last lines could not be written.
    """
    _reserve_descriptors()
    streams = (sys.stdout, sys.stderr)
    writers = (NonBlockingWriter(1), NonBlockingWriter(2))
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], writers)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(handlers=[handler])
    try:
        yield
    finally:
        drained = [writer.drain() for writer in writers]
        if all(drained):
            sys.stdout, sys.stderr = streams[0] or sys.stdout, streams[1] or sys.stderr


def _reserve_descriptors() -> None:
    """Open 0, 1 and 2 where they are closed: a socket there would get what a library prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def escape_unprintable(text: str) -> str:
    """Return the text with every unprintable character escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )
