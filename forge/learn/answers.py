"""Results of a check: the error of a wrong answer, and the calls that produce it.

Owns the wording of a failure. Knows no exercise.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any


class WrongAnswer(Exception):
    """An answer that is not right: which request, case or law broke, and a hint.

    what   what was computed, and what the engine computes
    hint   the idea that is missing, where the answer is a known wrong one
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


def call_for_number(module: ModuleType, function: str, *arguments: Any) -> float:
    """Call a function of the learner's file that returns a number, and return the number.

    Raises WrongAnswer for another type.
    """
    value = getattr(module, function)(*arguments)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongAnswer(f"{function} returned {shorten(value)}, which is not a number")
    return float(value)


def is_close(value: float, expected: float, share: float = 0.02) -> bool:
    """Return whether a value is within this share of the expected one."""
    return abs(value - expected) <= share * abs(expected)


def shorten(value: object, length: int = 120) -> str:
    """Return the repr of a value, cut to this length."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def create_random(seed: int, exercise: int) -> Random:
    """Return the random generator of one check: equal for an equal seed, in any process."""
    return Random(f"{exercise}:{seed}")
