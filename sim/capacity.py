"""Capacity: the highest rate of requests at which enough of them meet the latency objectives.

Owns the search and its table. Knows no command. All rates have the same requests and seed.

    rate      10 ──► 20 ──► 14.1 ──► 16.8 ──► ...
    enough?   yes    no     yes      no          until two rates differ by 5 %

Zhong et al. 2024 (DistServe): the highest rate that serves 90 % of requests within the objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from forge.cli.options import define_option
from forge.errors import InvalidConfig
from forge.sim.reports.text_report import describe_scenario, print_cost_origin
from forge.sim.scenario import DEFAULT_RATE, Scenario, summary
from forge.sim.sweep import COLUMNS, Column, SweepTable

GOOD_SHARE_OPTION = define_option(
    "good_share", float, 0.9, "share of requests that must be good: within --slo-ttft-ms and "
    "--slo-itl-ms",
)  # fmt: skip

MIN_RATE, MAX_RATE = 1e-3, 1e5
"""Bounds of the search, in requests a second."""

RESOLUTION = 1.05
"""Quotient of two rates at which the search ends."""

MIN_TRAFFIC_S = 30.0
"""Seconds of arrivals below which a result is too high: a queue takes about a minute to grow."""

CAPACITY_COLUMNS = (
    *(each for each in COLUMNS if each.head not in ("good/s", "refused", "shared %")),
    Column("good %", 8, lambda f: 100 * f["good"] / f["requests"], ".1f"),
)


class RateBounds(NamedTuple):
    """Result of a search: the highest rate that was enough and the lowest that was not.

    None where no rate between MIN_RATE and MAX_RATE was.
    """

    met: float | None
    missed: float | None


def search_rate(is_met: Callable[[float], bool], first: float) -> RateBounds:
    """Return the two rates between which `is_met` becomes False. Tries `first` first.

    The rates are within RESOLUTION of each other and have three digits. A function that becomes
    False several times gives one of these places.
    """
    met = missed = None
    rate = first
    while MIN_RATE <= rate <= MAX_RATE:
        if is_met(rate):
            met = rate
        else:
            missed = rate
        if missed is None:
            rate *= 2
        elif met is None:
            rate /= 2
        elif missed > RESOLUTION * met:
            rate = float(f"{sqrt(met * missed):.3g}")
        else:
            break
    return RateBounds(met, missed)


def find_capacity(scenario: Scenario, good_share: float) -> dict[str, Any]:
    """Search for the capacity, print a line for each rate, and return the record of `--json`.

    scenario   its rate is tried first
    Raises InvalidConfig where the workload has no rate, or it or `good_share` is out of range.
    """
    if not 0 < good_share <= 1:
        raise InvalidConfig("good_share", f"{good_share:g} is not a share", "Give 0.9, say")
    if "rate" not in scenario.options:
        raise InvalidConfig(
            "workload",
            f"{scenario.workload} has no rate of requests: its clients wait for answers",
            "Take poisson, bursty, sample or the file of a trace",
        )
    first = scenario.rate or DEFAULT_RATE
    if not MIN_RATE <= first <= MAX_RATE:
        raise InvalidConfig(
            "rate", f"{first:g} is not from {MIN_RATE:g} to {MAX_RATE:g}", "Give 10, say"
        )
    title = describe_scenario(scenario)
    print(f"{title}, seed {scenario.seed}; {scenario.engine.num_blocks} blocks")
    print_cost_origin(scenario)
    table = SweepTable([{"rate": 1000.5}], CAPACITY_COLUMNS, num_seeds=1)
    print(table.header(), flush=True)
    outcomes: dict[float, Mapping[str, Any]] = {}

    def is_met(rate: float) -> bool:
        figures = summary(replace(scenario, rate=rate).run())
        outcome = {"case": {"rate": rate}, "figures": figures}
        outcomes[rate] = outcome
        print(table.format_row([outcome]), flush=True)  # a search may take minutes
        return bool(figures["good"] >= good_share * figures["requests"])

    bounds = search_rate(is_met, first)
    best = {} if bounds.met is None else outcomes[bounds.met]["figures"]
    offered = best.get("offered_per_s")
    if offered is not None and (traffic_s := best["requests"] / offered) < MIN_TRAFFIC_S:
        print(
            f"too short   {best['requests']} requests came within {traffic_s:.1f} s, and a queue "
            "takes about a minute to grow. Give more --requests"
        )
    print(f"capacity    {_describe_bounds(bounds, offered, good_share)}")
    return {
        "title": title,
        "header": scenario.header(),
        "capacity": {**bounds._asdict(), "offered": offered},
        "outcomes": list(outcomes.values()),
    }


def _describe_bounds(bounds: RateBounds, offered: float | None, good_share: float) -> str:
    """Return the result in words.

    offered   rate at which the drawn requests came in the best run; None where all came at once
    """
    share = f"{100 * good_share:g} % of requests are good"
    if bounds.met is None:
        return f"none: at no rate, down to {bounds.missed:g} requests a second, {share}"
    more = " or more" if bounds.missed is None else ""
    drawn = "" if offered is None else f", {offered:.2f} offered"
    return f"{bounds.met:g} requests a second{more}{drawn}: at least {share}"
