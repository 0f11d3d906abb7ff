"""PartWatch: the seconds of each part of a slow command.

Owns the clock. Knows no model.
"""

from __future__ import annotations

import time

from forge.weights import PartTimes


class PartWatch:
    """Measures parts that follow each other, from when this is made."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []
        self._start_s = time.perf_counter()

    def end(self, name: str) -> None:
        """End the part of this name, and begin the next one."""
        now_s = time.perf_counter()
        self._parts.append((name, now_s - self._start_s))
        self._start_s = now_s

    @property
    def times(self) -> PartTimes:
        """Parts so far, each with its seconds."""
        return tuple(self._parts)
