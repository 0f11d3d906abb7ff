"""A schema that does something to the process that compiles it.

The process imports this module to read such a schema. It has no imports of tests: those take it
longer than all else that it does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def aborts(text: str) -> None:
    os.abort()


def ends(text: str) -> None:
    os._exit(7)


def is_killed(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def panics(text: str) -> None:
    raise BaseException("as a panic in Rust is one")


def fails(text: str) -> None:
    raise KeyError(text)


def has_no_memory(text: str) -> None:
    raise MemoryError


class Faulty(str):
    """A schema with which something happens to the process that reads it."""

    happens: Callable[[str], None]

    def startswith(self, *_: object) -> bool:
        self.happens(str(self))
        return False
