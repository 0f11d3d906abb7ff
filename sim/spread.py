"""Spread: how lengths are written on a command line, and how they are drawn.

Owns the notation. Knows no workload: a spread is a function of (seed, request).

    512                  always so many tokens
    16-1024              each length as likely
    exp:300              exponential with this mean, 1 at least
    64,64,64,16-4000     one of these, each as likely
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from forge.errors import InvalidConfig
from sim.workload import OUTPUT, PROMPT, drawn, exponential_ns

PURPOSES = {"prompt": PROMPT, "output": OUTPUT}
MOST = 2**24
"""Tokens: as the longest sequence of an engine."""

Part = Callable[[float], int]


class Spread(NamedTuple):
    """Lengths of prompts or of outputs, by request."""

    purpose: int
    parts: tuple[Part, ...]

    def __call__(self, seed: int, request_id: int) -> int:
        """Tokens, one or more."""
        part = int(drawn(seed, self.purpose, request_id, 1) * len(self.parts))
        return self.parts[part](drawn(seed, self.purpose, request_id))


def lengths_of(option: str, text: str) -> Spread:
    """The spread that `text` says. Raises InvalidConfig naming the option."""
    parts = [_part(each) for each in text.split(",")]
    good = [each for each in parts if each is not None]
    if len(good) < len(parts):
        raise InvalidConfig(
            option, f"{text[:64]!r} is no length", "Give 512, 16-1024, exp:300 or 64,64,4000, say"
        )
    return Spread(PURPOSES[option], tuple(good))


def _part(text: str) -> Part | None:
    found = re.fullmatch(r"(?:(exp:)|(\d{1,8})-)?(\d{1,8})", text)
    if found is None:
        return None
    high = int(found[3])
    low = int(found[2] or high)
    if not 1 <= low <= high <= MOST:
        return None
    if found[1]:
        return lambda share: min(MOST, max(1, exponential_ns(high, share)))
    return lambda share: low + int(share * (high - low + 1))
