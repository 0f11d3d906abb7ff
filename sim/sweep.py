"""Sweep: the same requests under every combination of settings, in one table.

Owns the combinations and the table. Knows no option: a case is a mapping of names to values, and
the caller makes its scenario. All cases have the same seeds, so differences come from the
settings.

    policy  rate  │ offered │ TTFT │ ITL │ tokens/s │ good │ refused │ preempted │ shared

With several seeds a row has the mean of each figure and its 95 % confidence interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import nan, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from forge.errors import PolicyError
from forge.sim.scenario import Scenario, summary

AxisValues = Mapping[str, Any]
RunOutcome = Mapping[str, Any]
Figures = Mapping[str, Any]

SHORT_NAMES = {
    "max_num_batched_tokens": "budget",
    "num_blocks": "blocks",
    "num_speculative_tokens": "drafts",
    "oversubscription": "over",
}
"""Column titles for long names."""


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[AxisValues]:
    """Yield each choice of one value of each axis; the last axis changes first."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def run_case(case: AxisValues, scenario: Scenario) -> RunOutcome:
    """Run the scenario. Returns its case with `figures`, or with the `error` of its policy.

    A policy that fails ends its own run only. Any other error would end every run and is raised.
    """
    try:
        return {
            "case": dict(case), "seed": scenario.seed, "figures": summary(scenario.run())
        }  # fmt: skip
    except PolicyError as error:
        return {"case": dict(case), "seed": scenario.seed, "error": str(error)}


class Column(NamedTuple):
    """A column of the table.

    width   characters, of which at least one separates it
    get     the figure
    form    format of a single figure
    """

    head: str
    width: int
    get: Callable[[Figures], float]
    form: str


COLUMNS = (
    Column("offered/s", 11, lambda f: f["offered_per_s"] or nan, ".2f"),
    Column("ttft p50", 10, lambda f: f["ttft_ms"]["p50"], ".1f"),
    Column("p99", 10, lambda f: f["ttft_ms"]["p99"], ".1f"),
    Column("itl p50", 9, lambda f: f["itl_ms"]["p50"], ".2f"),
    Column("p99", 9, lambda f: f["itl_ms"]["p99"], ".2f"),
    Column("tokens/s", 10, lambda f: f["tokens_per_s"], ".0f"),
    Column("good/s", 8, lambda f: f["goodput_per_s"], ".2f"),
    Column("refused", 9, lambda f: f["refused"], "d"),
    Column("preempted", 11, lambda f: f["preemptions"], "d"),
    Column("shared %", 10, lambda f: 100 * f["shared_tokens"] / max(1, f["prompt_tokens"]), ".1f"),
)
"""Columns of every workload. Times are milliseconds."""

DRAFT_COLUMN = Column("right %", 9, lambda f: 100 * f["accepted"] / max(1, f["drafted"]), ".1f")

SESSION_COLUMNS = (
    *(column for column in COLUMNS if column.head not in ("offered/s", "good/s")),
    Column("session s", 11, lambda f: _session_figure(f, "completion_ms", "mean") / 1e3, ".1f"),
    Column("p99 s", 10, lambda f: _session_figure(f, "completion_ms", "p99") / 1e3, ".1f"),
    Column("makespan s", 12, lambda f: _session_figure(f, "makespan_ms") / 1e3, ".1f"),
    Column("turns/s", 9, lambda f: _session_figure(f, "turns_per_s"), ".3f"),
    Column("fair", 7, lambda f: _session_figure(f, "fairness", "sessions"), ".3f"),
)
"""Columns of a workload with sessions: their rate follows from the latencies."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5 % quantiles of Student's distribution with 1, 2, ... degrees of freedom."""

INTERVAL_WIDTH = 8
"""Characters that an interval adds to a column."""


def _session_figure(figures: Figures, *names: str) -> float:
    """Return a figure of the sessions; NaN where no turn has ended."""
    found: Any = figures["sessions"] or nan
    for name in names if figures["sessions"] else ():
        found = found[name]
    return float(found)


def interval_95(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean. Two values at least."""
    degrees = len(values) - 1
    t_value = T_975[degrees - 1] if degrees <= len(T_975) else 1.96 + 2.5 / degrees
    return t_value * stdev(values) / sqrt(len(values))


class SweepTable:
    """The lines of a sweep, each of which can be printed when its run has ended.

    cases       of all runs, in order
    columns     columns besides the settings of the cases
    num_seeds   runs of a case
    """

    def __init__(
        self,
        cases: Sequence[AxisValues],
        columns: Sequence[Column],
        num_seeds: int,
    ) -> None:
        added = INTERVAL_WIDTH if num_seeds > 1 else 0
        self._columns = [each._replace(width=each.width + added) for each in columns]
        self._widths = {
            name: 2
            + max(
                len(SHORT_NAMES.get(name, name)),
                *(len(_format_value(case[name])) for case in cases),
            )
            for name in cases[0]
        }

    def header(self) -> str:
        """Return the titles of the columns."""
        names = (f"{SHORT_NAMES.get(name, name):<{width}}" for name, width in self._widths.items())
        return "".join(names) + "".join(f"{head:>{width}}" for head, width, _, _ in self._columns)

    def format_row(self, outcomes: Sequence[RunOutcome]) -> str:
        """Return the settings of a case, and the figures of its runs or the error of one."""
        settings = outcomes[0]["case"]
        case = "".join(f"{_format_value(settings[n]):<{w}}" for n, w in self._widths.items())
        for outcome in outcomes:
            if "error" in outcome:
                return f"{case}  failed: {outcome['error']}"
        return case + "".join(
            f"{_format_figures([get(each['figures']) for each in outcomes], form):>{width}}"
            for _, width, get, form in self._columns
        )


def sum_refusals(outcomes: Sequence[RunOutcome]) -> Figures:
    """Return requests and refusals of all runs, with the error of the longest for each reason."""
    total: dict[str, Any] = {"requests": 0, "refused": 0, "refusals": {}}
    for figures in (outcome["figures"] for outcome in outcomes if "figures" in outcome):
        total["requests"] += figures["requests"]
        total["refused"] += figures["refused"]
        for reason, each in figures["refusals"].items():
            previous = total["refusals"].get(reason, {"requests": 0, "tokens": -1})
            longest = max(previous, each, key=lambda one: one["tokens"])
            requests = previous["requests"] + each["requests"]
            total["refusals"][reason] = {**longest, "requests": requests}
    return total


def _format_figures(values: Sequence[float], form: str) -> str:
    """Return the only value, or the mean with its interval."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    form = form.replace("d", ".1f")
    return f"{fmean(values):{form}} ±{interval_95(values):{form}}"


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
