"""Noise: steps that take now more, now less than the tables say, as measured ones did.

Owns the draw. The mean model is sim/table.py's and stays as it is: without noise the longest of
thousand times between two tokens is too short, with it a run is one of many.

    sample held out of the fit    measured / predicted    one of its bin's ratios, by (seed, step)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from forge.seam import StepPlan
from sim.table import Table
from sim.workload import drawn

NOISE = 85
"""Purpose of the draws."""

MILLION = 1_000_000
BINS, FEWEST, MOST = 3, 20, 200
"""Of each kind at most; ratios in one, at least and at most."""


class Bin(NamedTuple):
    """Ratios of steps that the tables put at up to `most_ns`: millionths, ascending, median 1."""

    most_ns: int
    ratios: tuple[int, ...]


class Residuals(NamedTuple):
    """Bins of steps in which every row is one token, and of others. None: there is no noise."""

    decode: tuple[Bin, ...] = ()
    mixed: tuple[Bin, ...] = ()


def bins_of(times: Iterable[tuple[int, int]]) -> tuple[Bin, ...]:
    """Bins of (predicted, measured) nanoseconds, each of as many."""
    # By what is predicted alone, or the stalls among equal steps would be in one bin.
    ordered = sorted((each for each in times if each[0] > 0), key=lambda each: each[0])
    count = max(1, min(BINS, len(ordered) // FEWEST))
    found = []
    for i in range(count):
        own = ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count]
        if not own:
            continue
        middle = median(measured / predicted for predicted, measured in own)
        ratios = sorted(round(MILLION * m / p / middle) for p, m in own)
        if len(ratios) > MOST:
            ratios = [ratios[k * (len(ratios) - 1) // (MOST - 1)] for k in range(MOST)]
        found.append(Bin(own[-1][0], tuple(ratios)))
    return tuple(found)


@dataclass(frozen=True)
class Noisy:
    """A Cost: the table's, times what chance adds to this seed's step of this number.

    It knows a step by its plan only, so a world on it runs step by step.
    """

    table: Table
    residuals: Residuals
    seed: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        """The table's, times a ratio of its bin."""
        ns = self.table.step_ns(plan)
        chunks = plan.num_tokens > len(plan.rows)
        bins = self.residuals.mixed if chunks else self.residuals.decode
        if not bins:
            return ns
        place = bisect_left(bins, ns, key=lambda each: each.most_ns)
        ratios = bins[min(place, len(bins) - 1)].ratios
        ratio = ratios[int(drawn(self.seed, NOISE, plan.step) * len(ratios))]
        return ns * ratio // MILLION

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        """Nobody may ask: which step it is decides."""
        raise AssertionError("the time of a step with noise is known by its plan only")

    def plan_ns(self, plan: StepPlan) -> int:
        """The table's."""
        return self.table.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """The table's."""
        return self.table.commit_ns(plan)
