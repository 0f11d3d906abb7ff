"""A time that passes only where something sleeps or reads it: what a test measures is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTime:
    """A clock for everything in this process that reads `time`.

    now_s   seconds
    tick_s  each reading takes so long
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.tick_s = 0.0

    def read(self) -> float:
        """The time, a tick later."""
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Pass so many seconds."""
        self.now_s += seconds

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine on a loop that sleeps in this time."""
        with asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(_VirtualSelector(self))
        ) as runner:
            return runner.run(work)


class _VirtualSelector(selectors.DefaultSelector):
    """Time passes where nothing is ready, as far as the next timer."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, at once if possible."""
        if timeout is None:
            return super().select()
        ready = super().select(0)
        if not ready:
            self._time.now_s += max(0.0, timeout)
        return ready
