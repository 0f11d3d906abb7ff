"""Shrinking: the fewest items of a failing list that still fail. Knows nothing of the items.

    [1 2 3 4 5 6 7 8]     fails
    [        5 6 7 8]     fails: go on with these
    [            7 8]     passes, and so does [5 6]: leave out smaller pieces
    [        5   7 8]     fails
    [        5     8]     fails, and without either it passes: done

Delta debugging: Zeller and Hildebrandt 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

MOST_TRIALS = 2_000
"""A list of n items takes some n log n trials, and never more than this."""


def shrunk(items: Sequence[Item], fails: Callable[[list[Item]], bool]) -> list[Item]:
    """A list in the order of `items`, without any one of whose items nothing fails.

    `fails` must be true of all items, and give the same answer to the same list. Where MOST_TRIALS
    do not suffice, what is left still fails.
    """
    left, pieces, trials = list(items), 2, 0
    assert fails(left), "what does not fail cannot be shrunk"
    while left and trials < MOST_TRIALS:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            without = left[:start] + left[start + size :]
            trials += 1
            if fails(without):
                left, pieces = without, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(left), 2 * pieces)
    return left
