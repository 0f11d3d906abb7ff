"""Sweep: the same requests under every combination of settings, in one table.

Owns the combinations and the table. Knows no option: a case is a mapping of names to values, and
the caller makes its scenario. Every run has the same seed, so differences come from the settings.

    policy  rate  │ offered │ TTFT │ ITL │ tokens/s │ good │ refused │ preempted │ shared
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import nan
from typing import Any

from forge.errors import PolicyError
from forge.sim.scenario import Scenario, summary

AxisValues = Mapping[str, Any]
RunOutcome = Mapping[str, Any]
Figures = Mapping[str, Any]

SHORT_NAMES = {
    "max_num_batched_tokens": "budget",
    "num_blocks": "blocks",
    "num_speculative_tokens": "drafts",
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
        return {"case": dict(case), "figures": summary(scenario.run())}
    except PolicyError as error:
        return {"case": dict(case), "error": str(error)}


COLUMNS: tuple[tuple[str, int, Callable[[Figures], float], str], ...] = (
    ("offered/s", 11, lambda f: f["offered_per_s"] or nan, ".2f"),
    ("ttft p50", 10, lambda f: f["ttft_ms"]["p50"], ".1f"),
    ("p99", 10, lambda f: f["ttft_ms"]["p99"], ".1f"),
    ("itl p50", 9, lambda f: f["itl_ms"]["p50"], ".2f"),
    ("p99", 9, lambda f: f["itl_ms"]["p99"], ".2f"),
    ("tokens/s", 10, lambda f: f["tokens_per_s"], ".0f"),
    ("good/s", 8, lambda f: f["goodput_per_s"], ".2f"),
    ("refused", 9, lambda f: f["refused"], "d"),
    ("preempted", 11, lambda f: f["preemptions"], "d"),
    ("shared %", 10, lambda f: 100 * f["shared_tokens"] / max(1, f["prompt_tokens"]), ".1f"),
    ("right %", 9, lambda f: 100 * f["accepted"] / max(1, f["drafted"]), ".1f"),
)
"""(title, width, figure, format). Times are milliseconds."""


class SweepTable:
    """The lines of a sweep, each of which can be printed when its run has ended.

    cases        of all runs, in order
    has_drafts   some runs have drafts, so the table has a column for them
    """

    def __init__(self, cases: Sequence[AxisValues], has_drafts: bool) -> None:
        self._columns = COLUMNS if has_drafts else COLUMNS[:-1]
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

    def format_row(self, outcome: RunOutcome) -> str:
        """Return the settings of the run, and its figures or its error."""
        case = "".join(f"{_format_value(outcome['case'][n]):<{w}}" for n, w in self._widths.items())
        if "error" in outcome:
            return f"{case}  failed: {outcome['error']}"
        figures = outcome["figures"]
        return case + "".join(f"{get(figures):>{w}{form}}" for _, w, get, form in self._columns)


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


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
