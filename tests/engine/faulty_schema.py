"""A schema that does something to the process that compiles it.

The process imports this module to read such a schema. It has no imports of tests: those take it
longer than all else that it does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def abort_process(text: str) -> None:
    os.abort()


def exit_process(text: str) -> None:
    os._exit(7)


def kill_process(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_base_exception(text: str) -> None:
    raise BaseException("as a panic in Rust is one")


def raise_key_error(text: str) -> None:
    raise KeyError(text)


def raise_memory_error(text: str) -> None:
    raise MemoryError


class FaultySchema(str):
    """A schema with which something happens to the process that reads it."""

    fault: Callable[[str], None]

    def startswith(self, *_: object) -> bool:
        self.fault(str(self))
        return False
