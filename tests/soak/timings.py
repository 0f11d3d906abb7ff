"""Timings of windows with and without hostile requests, and the ratio of their percentiles.

Owns the order of the windows and the arithmetic. Knows no clock.

    warm-up | with without | without with | with without | ...     a pair in random order
            |..============|..============|                        the start of a window is left out

A time is kept as its logarithm, to one part in a thousand, so an hour takes little memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.soak.connection import AnswerTimes

METRICS = ("ttft", "itl", "total")
"""Time to the first event, between two events with output, and of a whole request."""
BINS_PER_E = 1000
MIN_S = 1e-4
NUM_BINS = 16_500
"""Bins up to 1460 s."""
QUANTILES = (0.5, 0.9, 0.99)
NUM_RESAMPLES = 2000


class Window(NamedTuple):
    """A part of the run: [start_s, end_s) since its start, with hostile requests or without."""

    start_s: float
    end_s: float
    is_hostile: bool


def plan_windows(total_s: float, warm_up_s: float, window_s: float, seed: int) -> list[Window]:
    """Return the windows of a run, in pairs of which a random one is hostile."""
    rng = Random(f"{seed} windows")
    windows, start_s = [], warm_up_s
    while start_s + 2 * window_s <= total_s:
        first = rng.random() < 0.5
        for is_hostile in (first, not first):
            windows.append(Window(start_s, start_s + window_s, is_hostile))
            start_s += window_s
    return windows


class WindowTimings:
    """Times of the requests that began and ended within a window, after its first `settle_s`."""

    def __init__(self, windows: Sequence[Window], settle_s: float) -> None:
        self._windows = windows
        self._settle_s = settle_s
        shape = (len(METRICS), len(windows), NUM_BINS)
        self._counts: NDArray[np.int64] = np.zeros(shape, np.int64)

    def find(self, at_s: float) -> int | None:
        """Return the index of the window at this time, or None outside of all."""
        if not self._windows or not self._windows[0].start_s <= at_s < self._windows[-1].end_s:
            return None
        first = self._windows[0]
        return int((at_s - first.start_s) / (first.end_s - first.start_s))

    def add(self, times: AnswerTimes, run_start_s: float) -> None:
        """Add a request of a run that started at this time."""
        sent_s = times.sent_s - run_start_s
        index = self.find(sent_s)
        if index is None or self.find(times.end_s - run_start_s) != index:
            return
        if sent_s < self._windows[index].start_s + self._settle_s:
            return
        self._count(2, index, times.end_s - times.sent_s)
        if times.first_s is not None:
            self._count(0, index, times.first_s - times.sent_s)
        for before_s, after_s in pairwise(times.output_s):
            self._count(1, index, after_s - before_s)

    def _count(self, metric: int, window: int, seconds: float) -> None:
        index = int(math.log(max(seconds, MIN_S) / MIN_S) * BINS_PER_E)
        self._counts[metric, window, min(index, NUM_BINS - 1)] += 1

    def figures(self, seed: int) -> dict[str, Any]:
        """Return the percentiles with and without hostile requests, and the ratio of each p99.

        The interval of a ratio has 95 %: windows are drawn again in pairs, as they were run.
        """
        found: dict[str, Any] = {}
        hostile = [index for index, each in enumerate(self._windows) if each.is_hostile]
        quiet = [index for index, each in enumerate(self._windows) if not each.is_hostile]
        rng = np.random.default_rng(seed)
        # Each row says how often a pair of windows is drawn.
        num_pairs = len(hostile)
        drawn = rng.multinomial(num_pairs, [1 / num_pairs] * num_pairs, NUM_RESAMPLES)
        for metric, name in enumerate(METRICS):
            counts = self._counts[metric]
            with_, without = counts[hostile].sum(axis=0), counts[quiet].sum(axis=0)
            by_window = _quantile(counts, 0.99) * 1e3
            found[name] = {
                "with_hostile_ms": _quantiles(with_),
                "without_ms": _quantiles(without),
                "samples": [int(with_.sum()), int(without.sum())],
                "p99_ratio": round(float(_quantile(with_, 0.99) / _quantile(without, 0.99)), 4),
                "p99_ratio_95": _interval(counts[hostile], counts[quiet], drawn),
                "p99_by_pair": np.round([by_window[hostile], by_window[quiet]], 2).T.tolist(),
            }
        return found


def _interval(
    hostile: NDArray[np.int64], quiet: NDArray[np.int64], drawn: NDArray[np.int64]
) -> list[float]:
    """Return the interval of the ratio of the 99th percentiles over these drawings of pairs."""
    used = np.flatnonzero((hostile + quiet).sum(axis=0))
    if not len(used):
        return [0.0, 0.0]
    seconds = _bin_seconds(used)
    ratios = [
        _quantile(draw @ hostile[:, used], 0.99, seconds)
        / _quantile(draw @ quiet[:, used], 0.99, seconds)
        for draw in np.array_split(drawn.astype(float), 20)
    ]
    return [round(float(each), 4) for each in np.quantile(np.concatenate(ratios), (0.025, 0.975))]


def _bin_seconds(indices: NDArray[np.int64]) -> NDArray[np.float64]:
    return MIN_S * np.exp((indices + 0.5) / BINS_PER_E)


def _quantile(
    counts: NDArray[Any], share: float, seconds: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the quantile of each row of counts, in seconds.

    seconds   time of each column; left out: the columns are all bins
    """
    cumulative = np.cumsum(counts, axis=-1)
    indices = (cumulative >= share * cumulative[..., -1:]).argmax(axis=-1)
    return _bin_seconds(indices) if seconds is None else seconds[indices]


def _quantiles(counts: NDArray[np.int64]) -> dict[str, float]:
    return {
        f"p{share * 100:g}": round(float(_quantile(counts, share)) * 1e3, 2) for share in QUANTILES
    }
