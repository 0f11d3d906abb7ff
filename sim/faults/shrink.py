"""Shrinking: the fewest items of a failing list that still fail. Knows nothing of the items.

    [1 2 3 4 5 6 7 8]     fails
    [        5 6 7 8]     fails: continue with these
    [            7 8]     passes, and so does [5 6]: remove smaller pieces
    [        5   7 8]     fails
    [        5     8]     fails, and without either it passes: done

Delta debugging: Zeller and Hildebrandt 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

MAX_TRIALS = 2_000
"""Most trials. A list of n items takes about n log n."""


def shrink(items: Sequence[Item], fails: Callable[[list[Item]], bool]) -> list[Item]:
    """Return a failing list, in the order of `items`, that passes without any one of its items.

    `fails` must be true of all items, and return the same for the same list. After MAX_TRIALS
    trials, the list may have more items than needed, and still fails.
    """
    remaining, pieces, trials = list(items), 2, 0
    assert fails(remaining), "only a failing list can be shrunk"
    while remaining and trials < MAX_TRIALS:
        size = -(-len(remaining) // pieces)
        for start in range(0, len(remaining), size):
            without = remaining[:start] + remaining[start + size :]
            trials += 1
            if fails(without):
                remaining, pieces = without, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(remaining), 2 * pieces)
    return remaining
