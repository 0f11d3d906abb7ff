"""The command `forge sim fleet`: its flags, one run with a report, or a table of several.

Owns the flags that a run of one engine does not have. Knows no event: a run belongs to a
FleetScenario.

    forge sim fleet --replicas 4 --routers prefix-aware --log fleet.jsonl
    forge sim fleet --replicas 2,4,8 --routers round-robin,prefix-aware --seeds 5
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from forge.cli.options import define_option
from forge.cli.settings import Settings
from forge.errors import InvalidConfig
from forge.routing.router import ROUTERS
from forge.sim.fleet import ReplicaEvents
from forge.sim.fleet_log import FleetLog
from forge.sim.fleet_scenario import (
    FEEDS,
    FleetScenario,
    fleet_summary,
    parse_replica_events,
    share_percent,
)
from forge.sim.reports.fleet_report import print_fleet_report
from forge.sim.reports.text_report import describe_scenario, print_cost_origin
from forge.sim.run_options import RUN_OPTIONS, SEEDS_OPTION, create_scenario, parse_axis
from forge.sim.sweep import Column, SweepTable, combinations

ROUTERS_OPTION = define_option(
    "routers", str, "prefix-aware", f"routers, separated by commas: {', '.join(ROUTERS)}", "NAMES"
)
REPLICAS_OPTION = define_option("replicas", str, "4", "numbers of replicas: 2,4,8", "N,N")
BLOCKS_OPTION = define_option(
    "blocks", str, None, "values of --num-blocks, of each replica: 25000,50000", "N,N"
)
FEED_OPTION = define_option(
    "feed",
    str,
    FEEDS[0],
    "what the router knows of the caches: events, their KV events; decisions, where it has sent "
    "requests",
    "NAME",
)
DEATHS_OPTION = define_option(
    "deaths", str, None, "replicas that die, each with its second: 1@30,2@60", "N@X,..."
)
STARTS_OPTION = define_option(
    "starts", str, None, "replicas that start late, or again after they died: 1@90", "N@X,..."
)
FLEET_OPTIONS = (
    *(REPLICAS_OPTION, ROUTERS_OPTION, BLOCKS_OPTION, FEED_OPTION),
    *(DEATHS_OPTION, STARTS_OPTION, SEEDS_OPTION),
)
"""Options of a fleet, besides those of a run and its output files."""

FLEET_COLUMNS = (
    Column("shared %", 10, share_percent, ".1f"),
    Column("imbalance", 11, lambda f: f["imbalance"], ".2f"),
    Column("ttft mean", 11, lambda f: f["ttft_ms"]["mean"], ".0f"),
    Column("p50", 8, lambda f: f["ttft_ms"]["p50"], ".0f"),
    Column("p99", 9, lambda f: f["ttft_ms"]["p99"], ".0f"),
    Column("itl p99", 9, lambda f: f["itl_ms"]["p99"], ".1f"),
    Column("good/s", 8, lambda f: f["goodput_per_s"], ".2f"),
    Column("moved", 7, lambda f: f["moved"], "d"),
    Column("failed", 8, lambda f: f["failed"], "d"),
    Column("refused", 9, lambda f: f["refused"], "d"),
)
"""Columns of a table of fleets. Times are milliseconds."""


class FleetRecord(NamedTuple):
    """Content of the file of `--json`."""

    title: str
    header: Mapping[str, Any]
    outcomes: Sequence[Mapping[str, Any]]


OpenOutput = Callable[[str], Callable[[str], object]]
"""Returns the write method of a new file."""


def simulate_fleet(settings: Settings, open_output: OpenOutput) -> FleetRecord:
    """Run every combination of replicas, routers and blocks, and print a report or a table."""
    values = dict(settings.values)
    axes = {
        "replicas": parse_axis("replicas", values[REPLICAS_OPTION.name]),
        "router": values[ROUTERS_OPTION.name].split(","),
        "num_blocks": parse_axis("blocks", values.pop(BLOCKS_OPTION.name)),
    }
    if not axes["num_blocks"]:
        del axes["num_blocks"]
    explicit = settings.explicit & {each.name for each in RUN_OPTIONS}
    explicit |= {"num_blocks"} & axes.keys()
    if values[SEEDS_OPTION.name] < 1:
        raise InvalidConfig(
            "seeds", f"{values[SEEDS_OPTION.name]} is not a positive integer", "Give 1 or more"
        )
    seeds = range(values["seed"], values["seed"] + values[SEEDS_OPTION.name])
    cases = [
        (case, [_create_fleet({**values, **case, "seed": seed}, explicit) for seed in seeds])
        for case in combinations(axes)
    ]
    first = cases[0][1][0]
    record = FleetRecord(describe_scenario(first.base), first.header(), [])
    if len(cases) == len(seeds) == 1:
        figures = _run_one(first, values["log"], open_output)
        return record._replace(outcomes=[{"seed": first.base.seed, "figures": figures}])
    if values["log"] is not None:
        raise InvalidConfig(
            "log", "a log has one run", "Give one of --replicas, --routers, --blocks and --seeds"
        )
    return record._replace(outcomes=_run_all(cases, values["feed"], record.title))


def _create_fleet(values: Mapping[str, Any], explicit: frozenset[str]) -> FleetScenario:
    events = ReplicaEvents(
        parse_replica_events("deaths", values["deaths"]),
        parse_replica_events("starts", values["starts"]),
    )
    return FleetScenario(
        base=create_scenario(values, explicit),
        num_replicas=values["replicas"],
        router=values["router"],
        feed=values["feed"],
        replica_events=events,
    )


def _run_one(
    fleet: FleetScenario, log_path: str | None, open_output: OpenOutput
) -> Mapping[str, Any]:
    """Run a fleet, print its report, and return the figures."""
    log = None if log_path is None else FleetLog(open_output(log_path), fleet.header())
    figures = fleet_summary(fleet.run(*(() if log is None else (log,))))
    print_cost_origin(fleet.base)
    print_fleet_report(fleet, figures, None if log is None else log.close())
    return figures


def _run_all(
    cases: Sequence[tuple[Mapping[str, Any], Sequence[FleetScenario]]], feed: str, title: str
) -> list[Mapping[str, Any]]:
    """Run all fleets, print a line for each case, and return the outcomes."""
    num_seeds = len(cases[0][1])
    print(f"{title}; router fed by {feed}, first seed {cases[0][1][0].base.seed}")
    print_cost_origin(cases[0][1][0].base)
    table = SweepTable([case for case, _ in cases], FLEET_COLUMNS, num_seeds)
    print(table.header(), flush=True)
    outcomes: list[Mapping[str, Any]] = []
    for case, fleets in cases:
        found = [
            {"case": dict(case), "seed": each.base.seed, "figures": fleet_summary(each.run())}
            for each in fleets
        ]
        outcomes += found
        print(table.format_row(found), flush=True)  # all runs may take hours
    return outcomes
