"""Noise: step times that vary around the table as measured ones did.

Owns the draw. The mean is that of sim/cost/table.py. Without noise the longest of a thousand times
between two tokens is too short; with noise a run is one of many.

    held-out samples    measured / predicted, in bins    one ratio of the bin, by (seed, step)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from forge.seam import StepPlan
from forge.sim.cost.table import TableCost
from forge.sim.draws import NOISE_DRAW, draw_uniform

PER_MILLION = 1_000_000
MAX_BINS, MIN_RATIOS, MAX_RATIOS = 3, 20, 200
"""Most bins of each kind; fewest and most ratios in one bin."""


class Bin(NamedTuple):
    """Ratios of steps that the table predicts to take up to `most_ns`.

    ratios   millionths, ascending, with a median of 1
    """

    most_ns: int
    ratios: tuple[int, ...]


class Residuals(NamedTuple):
    """Bins of steps in which every row is one token, and of other steps. Empty: no noise."""

    decode: tuple[Bin, ...] = ()
    mixed: tuple[Bin, ...] = ()


def create_bins(times: Iterable[tuple[int, int]]) -> tuple[Bin, ...]:
    """Return bins of (predicted, measured) nanoseconds, with equally many in each."""
    # Sorted by the prediction alone: otherwise stalls of equal steps would share one bin.
    ordered = sorted((each for each in times if each[0] > 0), key=lambda each: each[0])
    count = max(1, min(MAX_BINS, len(ordered) // MIN_RATIOS))
    found = []
    for i in range(count):
        pairs = ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count]
        if not pairs:
            continue
        median_ratio = median(measured / predicted for predicted, measured in pairs)
        ratios = sorted(round(PER_MILLION * m / p / median_ratio) for p, m in pairs)
        if len(ratios) > MAX_RATIOS:
            ratios = [ratios[k * (len(ratios) - 1) // (MAX_RATIOS - 1)] for k in range(MAX_RATIOS)]
        found.append(Bin(pairs[-1][0], tuple(ratios)))
    return tuple(found)


@dataclass(frozen=True)
class NoisyCost:
    """A CostModel: the time of the table, multiplied by a ratio drawn for (seed, step).

    A step is identified by its plan, so a world with noise runs step by step.
    """

    table: TableCost
    residuals: Residuals
    seed: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the table, multiplied by a ratio of its bin."""
        ns = self.table.step_ns(plan)
        chunks = plan.num_tokens > len(plan.rows)
        bins = self.residuals.mixed if chunks else self.residuals.decode
        if not bins:
            return ns
        index = bisect_left(bins, ns, key=lambda each: each.most_ns)
        ratios = bins[min(index, len(bins) - 1)].ratios
        ratio = ratios[int(draw_uniform(self.seed, NOISE_DRAW, plan.step) * len(ratios))]
        return ns * ratio // PER_MILLION

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Raise AssertionError: the noise of a step depends on its number."""
        raise AssertionError("the time of a step with noise needs its plan")

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the time of the table. Only the device has noise."""
        return self.table.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the time of the table. Only the device has noise."""
        return self.table.commit_ns(plan)
