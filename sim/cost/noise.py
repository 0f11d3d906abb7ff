"""Noise: steps that take now more, now less than the tables say, as measured ones did.

Owns the draw. The mean model is sim/cost/table.py's and stays as it is: without noise the longest
of a thousand times between two tokens is too short, with it a run is one of many.

    sample held out of the fit    measured / predicted    one of its bin's ratios, by (seed, step)
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
"""Of each kind at most; ratios in one, at least and at most."""


class Bin(NamedTuple):
    """Ratios of steps that the tables put at up to `most_ns`: millionths, ascending, median 1."""

    most_ns: int
    ratios: tuple[int, ...]


class Residuals(NamedTuple):
    """Bins of steps in which every row is one token, and of others. None: there is no noise."""

    decode: tuple[Bin, ...] = ()
    mixed: tuple[Bin, ...] = ()


def create_bins(times: Iterable[tuple[int, int]]) -> tuple[Bin, ...]:
    """Bins of (predicted, measured) nanoseconds, each of as many."""
    # By what is predicted alone, or the stalls among equal steps would be in one bin.
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
    """A Cost: the table's, times what chance adds to this seed's step of this number.

    It knows a step by its plan only, so a world on it runs step by step.
    """

    table: TableCost
    residuals: Residuals
    seed: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        """The table's, times a ratio of its bin."""
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
        """Nobody may ask: which step it is decides."""
        raise AssertionError("the time of a step with noise is known by its plan only")

    def plan_ns(self, plan: StepPlan) -> int:
        """The table's."""
        return self.table.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """The table's."""
        return self.table.commit_ns(plan)
