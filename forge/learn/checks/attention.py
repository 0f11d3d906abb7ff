"""Check of exercise 10: joined parts of attention, against attention over all positions at once.

Owns the drawn scores and the known wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, isclose, isfinite
from random import Random
from types import ModuleType
from typing import NamedTuple

from forge.learn.answers import WrongAnswer, create_random, shorten

NUM_CASES = 40
HEAD_DIM = 3
SPREADS = (0.0, 3.0, 1000.0)
"""Standard deviations of scores: equal ones, those of a model, and those that overflow."""

Values = list[list[float]]


class Part(NamedTuple):
    """Attention over some positions, with the fields of the stub's."""

    top: float
    total: float
    output: list[float]


def compute_part(scores: Sequence[float], values: Values) -> Part:
    """Return the attention over these positions, not normalised."""
    top = max(scores, default=-inf)
    weights = [exp(score - top) for score in scores]
    output = [
        sum(w * value[i] for w, value in zip(weights, values, strict=True)) for i in range(HEAD_DIM)
    ]
    return Part(top, sum(weights), output)


def add(parts: Sequence[Part], factor: Callable[[Part], float]) -> list[float]:
    """Return the sum of the parts, each multiplied by its factor, and normalised."""
    total = sum(factor(each) * each.total for each in parts)
    return [sum(factor(each) * each.output[i] for each in parts) / total for i in range(HEAD_DIM)]


def draw_parts(random: Random) -> tuple[list[Part], Part]:
    """Draw scores and values; return their parts, some of them empty, and the part of all."""
    count = random.randrange(1, 40)
    spread = random.choice(SPREADS)
    scores = [random.gauss(0, spread) for _ in range(count)]
    values = [[random.uniform(-1, 1) for _ in range(HEAD_DIM)] for _ in range(count)]
    ends = sorted(random.randrange(count + 1) for _ in range(random.randrange(1, 6)))
    parts = [
        compute_part(scores[start:end], values[start:end])
        for start, end in zip([0, *ends], [*ends, count], strict=True)
    ]
    return parts, compute_part(scores, values)


def check(module: ModuleType, seed: int) -> str:
    """Join drawn parts and compare with the attention over all positions."""
    random = create_random(seed, 10)
    for _ in range(NUM_CASES):
        parts, whole = draw_parts(random)
        expected = [each / whole.total for each in whole.output]
        try:
            found = module.join([module.Part(*each) for each in parts])
        except (OverflowError, ZeroDivisionError) as error:
            raise WrongAnswer(
                f"{_describe(parts)}: {error}",
                "Scale every part to the largest of all maxima: then no weight is above 1, and one "
                "is not 0",
            ) from error
        if not isinstance(found, list) or len(found) != HEAD_DIM:
            raise WrongAnswer(f"join returned {shorten(found)}, which is no list of {HEAD_DIM}")
        if not _are_close(found, expected):
            raise WrongAnswer(
                f"{_describe(parts)}: {shorten(found)}, expected {shorten(expected)}",
                _find_hint(found, parts, whole),
            )
    return f"{NUM_CASES} rows in splits are as their positions at once"


def _describe(parts: Sequence[Part]) -> str:
    tops = ", ".join(f"{each.top:.4g}" for each in parts)
    return f"parts with maxima {tops}"


def _are_close(found: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in pairs)


def _find_hint(found: Sequence[float], parts: Sequence[Part], whole: Part) -> str:
    """Return the hint of a known wrong answer."""
    if not all(map(isfinite, found)):
        return (
            "The maximum of a part without positions is -inf. Scale to the largest of all maxima, "
            "which is finite: then such a part has the factor exp(-inf), which is 0"
        )
    full = [each for each in parts if each.total]
    if _are_close(found, add(full, lambda each: 1.0)):
        return (
            "The weights of each part are relative to its own maximum: scale them to a common one"
        )
    if _are_close(found, add(full, lambda each: 1 / each.total)):
        return "A part with larger weights counts for more: normalise after adding, not before"
    if _are_close(found, whole.output):
        return "The sum of all weights divides the result"
    return "The factor of a part is exp(its maximum - the largest of all maxima)"
