"""Length distributions: how lengths are written on a command line, and how they are drawn.

Owns the notation. Knows no workload: a distribution is a function of (seed, request).

    512                  always this length
    16-1024              uniform, both bounds included
    exp:300              exponential with this mean, at least 1
    64,64,64,16-4000     one of these, with equal probability
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.sim.draws import OUTPUT_DRAW, PROMPT_DRAW, draw_uniform, exponential_ns

DRAW_PURPOSES = {"prompt": PROMPT_DRAW, "output": OUTPUT_DRAW}
MAX_TOKENS = 2**24
"""Largest length in tokens: the longest sequence of an engine."""

Component = Callable[[float], int]


class LengthDistribution(NamedTuple):
    """Lengths of prompts or of outputs, by request.

    purpose      of the draws
    components   functions of a uniform draw; one is chosen for each request
    """

    purpose: int
    components: tuple[Component, ...]

    def __call__(self, seed: int, request_id: int) -> int:
        """Return the tokens of a request, at least 1."""
        part = int(draw_uniform(seed, self.purpose, request_id, 1) * len(self.components))
        return self.components[part](draw_uniform(seed, self.purpose, request_id))


def parse_lengths(option: str, text: str) -> LengthDistribution:
    """Return the distribution that the text names. Raises InvalidConfig naming the option."""
    parts = [_parse_component(each) for each in text.split(",")]
    components = [each for each in parts if each is not None]
    if len(components) < len(parts):
        raise InvalidConfig(
            option, f"{text[:64]!r} is no length", "Give 512, 16-1024, exp:300 or 64,64,4000, say"
        )
    return LengthDistribution(DRAW_PURPOSES[option], tuple(components))


def _parse_component(text: str) -> Component | None:
    match = re.fullmatch(r"(?:(exp:)|(\d{1,8})-)?(\d{1,8})", text)
    if match is None:
        return None
    high = int(match[3])
    low = int(match[2] or high)
    if not 1 <= low <= high <= MAX_TOKENS:
        return None
    if match[1]:
        return lambda share: min(MAX_TOKENS, max(1, exponential_ns(high, share)))
    return lambda share: low + int(share * (high - low + 1))
