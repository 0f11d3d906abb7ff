"""Log lines that no client can forge, written so that no thread waits for who reads them.

Owns what a record looks like, and the way to standard output and error. What a client sent may be
part of a message or of an exception: a line break in it must not begin a line of its own, and a
terminal must not obey it.

    ERROR forge.server: request a-1f failed: bad \\x1b[2J\\nERROR nothing of the kind
        | Traceback (most recent call last):
        | ...

A pipe that is full, a disk that is full or a terminal that is stopped holds up one thread, which
does nothing else:

    logging, print, warnings ──► at most MAX_WAITING texts ──► thread ──► descriptor
                                 one more is lost, and counted
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

MAX_WAITING = 4096
MAX_CHARS = 2**14
"""Of one text. What is cut is its middle: a traceback says most at its end."""
DRAIN_S = 1.0
"""How long the end of a process waits for its last lines to be written, for each of two files."""
DRAIN_PARTS = 10


class PlainLines(logging.Formatter):
    """One line for a message, and indented ones for a traceback, all printable."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message in one line."""
        return plain(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """The traceback. None of its lines can be taken for a message."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    | {plain(line)}" for line in lines)


class Writer(io.TextIOBase):
    """A text stream on a descriptor. No call waits for the descriptor, but for `drain`.

    Texts that cannot be written are lost; how many is written once writing works again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        # Safe where a signal or a finalizer writes in the middle of a write.
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._num_lost = 0
        threading.Thread(target=self._run, name="forge-log", daemon=True).start()

    encoding = "utf-8"
    errors = "backslashreplace"

    def write(self, text: str) -> int:
        """Hand the text to the thread, or lose it."""
        if self._waiting.qsize() < MAX_WAITING:
            half = MAX_CHARS // 2
            cut = text if len(text) <= MAX_CHARS else f"{text[:half]} [...] {text[-half:]}"
            self._waiting.put(cut)
        else:
            self._num_lost += 1
        return len(text)

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """A terminal reads it."""
        return os.isatty(self._descriptor)

    def drain(self, within_s: float = DRAIN_S) -> bool:
        """Wait until what was handed over is written or lost. Return False if that takes longer."""
        done = threading.Event()
        self._waiting.put(done)
        # Short waits: after a stall of the process, its writer still gets turns before the end.
        return any(done.wait(within_s / DRAIN_PARTS) for _ in range(DRAIN_PARTS))

    def _run(self) -> None:
        num_failed = num_reported = 0
        while True:
            item = self._waiting.get()
            if isinstance(item, str) and not self._written(item):
                num_failed += 1
                continue
            lost = self._num_lost + num_failed - num_reported
            if lost and self._waiting.empty():
                said = f"{lost} lines were lost, for this was full. Read it faster"
                if self._written(f"WARNING forge.log: {said}\n"):
                    num_reported += lost
            if isinstance(item, threading.Event):
                item.set()

    def _written(self, text: str) -> bool:
        """The descriptor has the whole text."""
        data = text.encode(self.encoding, self.errors)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares it has made it so
                select.select((), (self._descriptor,), ())
            except OSError:  # its reader has left, or its disk is full
                return False
        return True


@contextmanager
def write_plainly() -> Iterator[None]:
    """Write what this process logs to standard error, line by line, and never wait for a reader.

    In the block, `sys.stdout` and `sys.stderr` are Writers: what libraries print does not wait
    either. They stay so after it only where the last lines cannot be written.
    """
    _reserve_descriptors()
    before = (sys.stdout, sys.stderr)
    writers = (Writer(1), Writer(2))
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], writers)
    written = logging.StreamHandler(sys.stderr)
    written.setFormatter(PlainLines())
    logging.basicConfig(handlers=[written])
    try:
        yield
    finally:
        drained = [writer.drain() for writer in writers]
        if all(drained):
            sys.stdout, sys.stderr = before[0] or sys.stdout, before[1] or sys.stderr


def _reserve_descriptors() -> None:
    """Open 0, 1 and 2 where they are closed: a socket there would get what a library prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def plain(text: str) -> str:
    """The text with everything that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
