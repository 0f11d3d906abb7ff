"""Join parts of attention, each of which subtracted a maximum of its own.

Few rows would leave most of a GPU idle, so the keys of a long row are divided into splits, and each
split computes attention over its own positions. `part` is given: it returns the largest score, the
sum of the weights exp(score - largest) and the sum of the weighted values, not normalised.

Write `join`: from the parts of a row, the attention over all positions. The weights of two parts
are relative to two maxima, so they cannot be added as they are. Scores may differ by 1,000, and a
part may have no positions. Weights relative to a and to b differ by one factor, exp(a - b).

The check compares with the attention over all positions at once, for drawn scores and splits.
"""

from math import exp, inf
from typing import NamedTuple


class Part(NamedTuple):
    """Attention over some positions: largest score, sum of weights, weighted sum of values."""

    top: float
    total: float
    output: list[float]


def part(scores: list[float], values: list[list[float]], head_dim: int) -> Part:
    """Return the part of these positions."""
    top = max(scores, default=-inf)
    weights = [exp(score - top) for score in scores]
    output = [0.0] * head_dim
    for weight, value in zip(weights, values, strict=True):
        output = [total + weight * each for total, each in zip(output, value, strict=True)]
    return Part(top, sum(weights), output)


def join(parts: list[Part]) -> list[float]:
    """Return the attention over the positions of all parts, normalised."""
    raise NotImplementedError
