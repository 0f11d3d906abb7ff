"""The commands of `forge sim`: their flags and their output.

Owns the flags that do not decide a run; forge.sim.run_options has the others. Knows no event: a run
belongs to a Scenario.

    forge sim --rate 20 --policy ageing --log run.jsonl --draw --plot run.png --trace run.json
    forge sim sweep --policies fcfs,ageing --rates 10,20 --plot sweep.png
    forge sim capacity --cost roofline:h200,qwen3-4b --gpu-memory-utilization 0.9
    forge sim fleet --replicas 2,4 --routers round-robin,prefix-aware
    forge sim replay recording.jsonl --html run.html
    forge sim eviction trace.jsonl --blocks 1000,2000 --block-size 512
    forge sim calibrate MODEL --out calibration.json
    forge sim explore --world forks --policy fcfs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forge.cli.options import ENGINE_OPTIONS, MODEL_OPTION, Option, define_option
from forge.cli.parser import CommandFunction, Parser, add_flags
from forge.cli.settings import Settings
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.policies import policy_names
from forge.sim.baselines import baselines
from forge.sim.capacity import GOOD_SHARE_OPTION, find_capacity
from forge.sim.decision_log import DecisionLog
from forge.sim.exploration.worlds import WORLDS, find_world
from forge.sim.film_command import (
    HTML_OPTION,
    VERSUS_OPTION,
    describe_policy,
    second_scenario,
    write_film,
    write_page,
)
from forge.sim.fleet_command import FLEET_OPTIONS, simulate_fleet
from forge.sim.replay import replay
from forge.sim.reports.chrome_trace import write_chrome_trace
from forge.sim.reports.film import ReplayFilm, WorldFilm
from forge.sim.reports.run_history import RunHistory
from forge.sim.reports.terminal import TerminalDrawing
from forge.sim.reports.text_report import (
    describe_rate,
    describe_scenario,
    print_baselines,
    print_cost_origin,
    print_refusals,
    print_report,
)
from forge.sim.run_options import (
    AXIS_OPTIONS,
    AXIS_TARGETS,
    RUN_OPTIONS,
    SEEDS_OPTION,
    create_scenario,
    parse_axis,
)
from forge.sim.scenario import summary
from forge.sim.world import WorldObserver

OUTPUT_FILES = {
    "log": "write every decision with its time to FILE, as lines of JSON",
    "plot": "plot the run to FILE, a .png, .svg or .pdf; needs matplotlib",
    "trace": "write trace events to FILE, for ui.perfetto.dev",
    "json": "write the figures to FILE",
}
OUTPUT_OPTIONS = (
    *(define_option(name, str, None, text, "FILE") for name, text in OUTPUT_FILES.items()),
    HTML_OPTION,
)

FAULT_OPTIONS = (
    define_option(
        "faults", str, None, "inject faults into small worlds: all, or abort=0.1,reset", "SPEC"
    ),
    define_option("seeds", int, 1, "number of worlds of --faults, one a seed, from --seed on"),
)
"""Options of a run with faults, besides --seed."""

BASELINES_OPTION = define_option(
    "baselines", bool, True, "simulate agents with an infinite cache as well, and count Belady"
)

MODEL_OPTIONS = tuple(each for each in ENGINE_OPTIONS if each.name != "record")
CALIBRATION_OPTIONS = (
    define_option(
        "out", str, "calibration.json", "write the calibration to FILE.json", "FILE.json"
    ),
    define_option("minutes", float, 10.0, "limit of the time to measure"),
)
"""Options of a calibration besides those of the engine."""

RECORDING_OPTION = define_option(
    "recording", str, None, "recording of forge serve --record", "FILE"
)
REPLAY_OPTIONS = (
    RECORDING_OPTION,
    HTML_OPTION,
    define_option("policy", str, None, "file of the policy, where it is not built in", "FILE.py"),
)
"""Options of a replay."""

MAX_EXPLORED_STATES = 100_000_000

EXPLORATION_OPTIONS = (
    define_option("world", str, "pair", f"one of: {', '.join(WORLDS)}", "NAME"),
    define_option("policy", str, "fcfs", f"{', '.join(policy_names())} or a FILE.py")._replace(
        metavar="NAME|FILE.py"
    ),
    define_option("depth", int, 2, "steps in flight, 1 or 2"),
    define_option("states", int, 100_000, "distinct states after which the search ends"),
    define_option(
        "checkpoint", str, None, "save the search to FILE now and then, and continue it", "FILE"
    ),
    next(each for each in OUTPUT_OPTIONS if each.name == "json"),
)
"""Options of an exploration."""

TRACE_OPTION = next(each for each in RUN_OPTIONS if each.name == "workload")._replace(
    metavar="TRACE"
)
POOL_OPTION = define_option("blocks", str, None, "sizes of the pool: 1000,2000", "N,N")
EVICTION_OPTIONS = (
    TRACE_OPTION,
    POOL_OPTION,
    *(each for each in RUN_OPTIONS if each.name != TRACE_OPTION.name),
)
"""Options of a comparison of eviction rules; those of a run decide the accesses."""


# forge sim


def simulate(args: argparse.Namespace, settings: Settings) -> int:
    """Run the engine on a virtual clock and print the latencies that its users would see."""
    if settings.values["faults"] is not None:
        return run_faults(args, settings)
    if "seeds" in settings.explicit:
        raise InvalidConfig("seeds", "a run without faults has one", "Leave it out, or sweep")
    scenario = create_scenario(settings.values, settings.explicit)
    values = settings.values
    if BASELINES_OPTION.name in settings.explicit and scenario.workload != "agent":
        raise InvalidConfig(
            BASELINES_OPTION.name,
            f"the workload {scenario.workload} has no sessions",
            "Leave it out, or take --workload agent",
        )
    if values["plot"] is not None:
        from forge.sim.reports.plots import check_plot_path

        check_plot_path(values["plot"])
    second = second_scenario(values, settings.explicit)
    observers: list[WorldObserver] = []

    def create_observers(engine: Engine) -> Sequence[WorldObserver]:
        if values["plot"] is not None or values["trace"] is not None:
            observers.append(RunHistory(engine))
        if args.draw:
            observers.append(TerminalDrawing(sys.stdout.write, engine))
        if values["html"] is not None:
            title = describe_scenario(scenario) if second is None else "the run"
            observers.append(WorldFilm(engine, title, describe_policy(scenario)))
        return observers

    with ExitStack() as files:
        log = None
        if values["log"] is not None:
            log = DecisionLog(_open_output(values["log"], files), scenario.header())
        world = scenario.run(log, create_observers)
        digest = None if log is None else log.close()
    figures = summary(world)
    for observer in observers:
        if isinstance(observer, TerminalDrawing):
            observer.close()
        if isinstance(observer, WorldFilm):
            write_film(values["html"], scenario, observer.lines, second)
        if isinstance(observer, RunHistory) and values["trace"] is not None:
            with ExitStack() as files:
                write_chrome_trace(_open_output(values["trace"], files), observer)
        if isinstance(observer, RunHistory) and values["plot"] is not None:
            from forge.sim.reports.plots import plot_run

            heading = f"{describe_scenario(scenario)}\noffered {describe_rate(scenario, figures)}"
            plot_run(values["plot"], observer, world.metrics, heading)
    print_cost_origin(scenario)
    print_report(scenario, figures, digest)
    record = {"title": describe_scenario(scenario), "header": scenario.header(), "figures": figures}
    if figures["sessions"] and values["baselines"]:
        best = baselines(scenario, world)
        print_baselines(figures, best)
        record = {**record, "baselines": best}
    _write_json(values["json"], record)
    return 0


def run_faults(args: argparse.Namespace, settings: Settings) -> int:
    """Run small worlds with faults and all checks. Returns 1 where a check failed."""
    from forge.sim.faults.fuzz import run_seeds
    from forge.sim.faults.operations import parse_faults

    unsupported = settings.explicit - {"faults", "seeds", "seed"} | (
        {"draw"} if args.draw else set()
    )
    for name in sorted(unsupported):
        raise InvalidConfig(
            name, "a world with faults is drawn from its seed alone", "Leave it out, or --faults"
        )
    rates = parse_faults(settings.values["faults"])
    first, count = settings.values["seed"], settings.values["seeds"]
    if count < 1:
        raise InvalidConfig("seeds", f"{count} is not a positive integer", "Give 1 or more")
    report = run_seeds(first, first + count - 1, rates)
    print(f"seeds       {report.num_seeds} from {first}, {report.num_steps} steps")
    for event, times in sorted(report.reached.items()):
        print(f"{times:>9}   {event}")
    print(f"violations  {'none' if report.failure is None else 'one: see above'}")
    return 0 if report.failure is None else 1


# forge sim sweep


def sweep(args: argparse.Namespace, settings: Settings) -> int:
    """Run every combination of policies, rates, budgets, blocks and drafts, and print a table."""
    from forge.sim.sweep import (
        COLUMNS,
        DRAFT_COLUMN,
        SESSION_COLUMNS,
        SweepTable,
        combinations,
        run_case,
        sum_refusals,
    )

    values = dict(settings.values)
    axes = {
        AXIS_TARGETS[each.name]: parse_axis(each.name, values.pop(each.name))
        for each in AXIS_OPTIONS
    }
    swept = {name: found for name, found in axes.items() if found}
    if not swept:
        raise InvalidConfig(
            "policies",
            "there is nothing to compare",
            "Give --policies fcfs,ageing or --rates 10,20, for example",
        )
    if values["plot"] is not None:
        from forge.sim.reports.plots import check_plot_path

        check_plot_path(values["plot"])
    explicit = (settings.explicit | swept.keys()) - {SEEDS_OPTION.name}
    seeds = range(values["seed"], values["seed"] + _parse_num_seeds(values))
    runs = [
        (case, [create_scenario({**values, **case, "seed": seed}, explicit) for seed in seeds])
        for case in combinations(swept)
    ]
    first = runs[0][1][0]
    print(f"{describe_scenario(first)}, seed {values['seed']}; first of {len(runs) * len(seeds)}")
    print_cost_origin(first)
    has_drafts = any(scenarios[0].engine.speculation is not None for _, scenarios in runs)
    columns = SESSION_COLUMNS if first.workload == "agent" else COLUMNS
    columns += (DRAFT_COLUMN,) * has_drafts
    table = SweepTable([case for case, _ in runs], columns, len(seeds))
    print(table.header(), flush=True)
    outcomes = []
    for case, scenarios in runs:
        found = [run_case(case, scenario) for scenario in scenarios]
        outcomes += found
        print(table.format_row(found), flush=True)  # a sweep may take hours
    print_refusals(sum_refusals(outcomes))
    succeeded = [each for each in outcomes if "figures" in each]
    if values["plot"] is not None and succeeded:
        from forge.sim.reports.plots import plot_sweep

        plot_sweep(values["plot"], succeeded)
    record = {"title": describe_scenario(first), "header": first.header(), "outcomes": outcomes}
    _write_json(values["json"], record)
    if len(succeeded) < len(outcomes):
        print(f"{len(outcomes) - len(succeeded)} of {len(outcomes)} runs failed", file=sys.stderr)
    return 0 if len(succeeded) == len(outcomes) else 1


def _parse_num_seeds(values: Mapping[str, Any]) -> int:
    """Return the runs of each combination. Raises InvalidConfig."""
    count: int = values[SEEDS_OPTION.name]
    if count < 1:
        raise InvalidConfig("seeds", f"{count} is not a positive integer", "Give 1 or more")
    if count > 1 and values["plot"] is not None:
        raise InvalidConfig("plot", "a plot has one run of each combination", "Leave out --seeds")
    return count


# forge sim capacity


def search_capacity(args: argparse.Namespace, settings: Settings) -> int:
    """Search for the highest rate that meets the objectives, and print each rate."""
    scenario = create_scenario(settings.values, settings.explicit)
    record = find_capacity(scenario, settings.values[GOOD_SHARE_OPTION.name])
    _write_json(settings.values["json"], record)
    return 0


# forge sim fleet


def run_fleet(args: argparse.Namespace, settings: Settings) -> int:
    """Run replicas and a router on one virtual clock, and print a report or a table."""
    with ExitStack() as files:
        record = simulate_fleet(settings, lambda path: _open_output(path, files))
    _write_json(settings.values["json"], record._asdict())
    return 0


# forge sim eviction


def compare_eviction(args: argparse.Namespace, settings: Settings) -> int:
    """Print the share of prompt tokens that each eviction rule finds, for each size of the pool."""
    from forge.sim.eviction.study import compare_rules, describe_pool, format_share, read_accesses

    sizes = parse_axis(POOL_OPTION.name, settings.values[POOL_OPTION.name])
    if not sizes:
        raise InvalidConfig(POOL_OPTION.name, "no size of the pool is given", "Give --blocks 1000")
    scenario = create_scenario(settings.values, settings.explicit)
    trace = read_accesses(scenario)
    print(f"{describe_scenario(scenario)}; {len(trace.chains)} requests, the second half reported")
    found = []
    for num_blocks in sizes:
        print(describe_pool(num_blocks, trace.block_size))
        for share in compare_rules(trace, num_blocks):
            found.append(share._asdict())
            print(format_share(share), flush=True)  # a long trace takes minutes
    record = {"title": describe_scenario(scenario), "header": scenario.header(), "shares": found}
    _write_json(settings.values["json"], record)
    return 0


# forge sim replay


def replay_recording(args: argparse.Namespace, settings: Settings) -> int:
    """Replay a recording. Returns 1 where a decision differs or the end is missing."""
    path = settings.values["recording"]
    film = ReplayFilm(f"replay of {Path(path).name}")
    page = settings.values[HTML_OPTION.name]
    try:
        with open(path, encoding="utf-8") as file:
            policy = settings.values["policy"]
            if page is None:
                result = replay(file, policy)
            else:
                result = replay(file, policy, film.on_entry, film.on_start)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidConfig):
            raise
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidConfig(
            "recording", f"{path!r} cannot be read: {reason}", "Name a file of --record"
        ) from None
    if page is not None:
        write_page(page, [film.close()], film.title)
    print(f"recorded    by forge {result.version}, {result.lines} lines")
    print(f"decided     {result.steps} steps, {result.requests} requests, {result.tokens} tokens")
    print(f"difference  {result.difference or 'none'}")
    if result.difference is not None:
        return 1
    if not result.is_complete:
        print(
            "forge sim replay: FILE: the end of the recording is missing: its disk was full, or "
            "its server still runs or was killed. All before it replays as it was recorded",
            file=sys.stderr,
        )
        return 1
    return 0


# forge sim calibrate


def calibrate(args: argparse.Namespace, settings: Settings) -> int:
    """Measure how long the steps of a model take here, and write a calibration."""
    from forge.sim.calibration.calibrate import main

    values = settings.values
    if not 0 < values["minutes"] <= 60:
        raise InvalidConfig("minutes", f"{values['minutes']} is not from 0 to 60", "Give 10, say")
    _check_writable("out", values["out"])
    names = [each.name for each in MODEL_OPTIONS if each.name in settings.explicit]
    options = {name: values[name] for name in names}
    return main(values["model"], options, values["out"], values["seed"], 60 * values["minutes"])


# forge sim explore


def explore(args: argparse.Namespace, settings: Settings) -> int:
    """Explore every state of a tiny world. Returns 1 where a check failed."""
    from forge.sim.exploration.command import explore_world

    values = settings.values
    _check_range("states", values["states"], 1, MAX_EXPLORED_STATES)
    if values["checkpoint"] is not None:
        _check_writable("checkpoint", values["checkpoint"])
    world = find_world(values["world"], values["depth"])
    record = explore_world(world, values["policy"], values["states"], values["checkpoint"])
    _write_json(values["json"], record)
    return 0 if record["error"] is None else 1


# Files.


def _open_output(path: str, files: ExitStack) -> Callable[[str], object]:
    """Return the write method of a new file, which `files` closes.

    Line ends do not depend on the system, so the bytes are the same on every machine.
    """
    file = files.enter_context(open(path, "w", encoding="utf-8", newline="\n"))
    return file.write


def _write_json(path: str | None, record: Mapping[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run_command(args: argparse.Namespace, settings: Settings) -> int:
    """Run the command. Refuses output files that cannot be written before anything is simulated."""
    for each in OUTPUT_OPTIONS:
        path = settings.values.get(each.name)
        if path is None:
            continue
        _check_writable(each.name, path)
    return int(args.simulate(args, settings))


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidConfig(name, f"{value} is not from {least} to {most}", "Give 100000, say")


def _check_writable(name: str, path: str) -> None:
    """Raise InvalidConfig where the file cannot be written. Does not create the file."""
    file = Path(path).resolve()  # a link is written at its target
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise InvalidConfig(
            name, f"{path!r} cannot be written: {error.strerror}", "Name another file"
        ) from None


# The parsers.

DRAW_HELP = "draw every step on the terminal"


def _configure(parser: Parser, simulation: CommandFunction, options: Sequence[Option]) -> None:
    positional = (MODEL_OPTION, RECORDING_OPTION, TRACE_OPTION)
    add_flags(parser, [each for each in options if each not in positional])
    parser.set_defaults(
        run=run_command, simulate=simulation, options=options, sources={}, parser=parser
    )


def add_commands(parser: Parser, words: Sequence[str]) -> None:
    """Give the parser of `forge sim` the command that `words` begin with, or the flags of a run."""
    if words[:1] and words[0] in COMMANDS:
        commands = parser.add_subparsers(dest="simulation", metavar="COMMAND", required=True)
        for name, add_command in COMMANDS.items():
            text = add_command.__doc__
            add_command(commands.add_parser(name, help=text, description=text, allow_abbrev=False))
        return
    parser.epilog = f"Other commands: {', '.join(f'forge sim {name}' for name in COMMANDS)}."
    options = (*RUN_OPTIONS, *FAULT_OPTIONS, BASELINES_OPTION, *OUTPUT_OPTIONS, VERSUS_OPTION)
    _configure(parser, simulate, options)
    parser.add_argument("--draw", action="store_true", help=DRAW_HELP)


def _add_sweep(parser: Parser) -> None:
    """Compare policies, rates, budgets, blocks and drafts."""
    outputs = [each for each in OUTPUT_OPTIONS if each.name in ("plot", "json")]
    _configure(parser, sweep, (*AXIS_OPTIONS, SEEDS_OPTION, *RUN_OPTIONS, *outputs))


def _add_capacity(parser: Parser) -> None:
    """Search for the highest rate of requests that meets the latency objectives."""
    outputs = [each for each in OUTPUT_OPTIONS if each.name == "json"]
    _configure(parser, search_capacity, (GOOD_SHARE_OPTION, *RUN_OPTIONS, *outputs))


def _add_fleet(parser: Parser) -> None:
    """Run replicas and a router, and compare routers and numbers of replicas."""
    outputs = [each for each in OUTPUT_OPTIONS if each.name in ("log", "json")]
    _configure(parser, run_fleet, (*FLEET_OPTIONS, *RUN_OPTIONS, *outputs))


def _add_eviction(parser: Parser) -> None:
    """Compare rules for evicting cached blocks on the prompts of a workload."""
    parser.add_argument(TRACE_OPTION.name, metavar="TRACE", help=TRACE_OPTION.help)
    outputs = [each for each in OUTPUT_OPTIONS if each.name == "json"]
    _configure(parser, compare_eviction, (*EVICTION_OPTIONS, *outputs))
    parser.set_defaults(positional=TRACE_OPTION.name)


def _add_replay(parser: Parser) -> None:
    """Replay a recorded run and find the first decision that differs."""
    parser.add_argument(
        RECORDING_OPTION.name, metavar=RECORDING_OPTION.metavar, help=RECORDING_OPTION.help
    )
    _configure(parser, replay_recording, REPLAY_OPTIONS)
    parser.set_defaults(positional=RECORDING_OPTION.name)


def _add_calibrate(parser: Parser) -> None:
    """Measure how long the steps of a model take here, for simulations to predict it."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL_OPTION.help} (default {MODEL_OPTION.default})",
    )
    _configure(parser, calibrate, (MODEL_OPTION, *CALIBRATION_OPTIONS, *MODEL_OPTIONS))
    parser.set_defaults(positional="model")


def _add_explore(parser: Parser) -> None:
    """Explore every state of a tiny world, and check each one."""
    _configure(parser, explore, EXPLORATION_OPTIONS)


COMMANDS: dict[str, Callable[[Parser], None]] = {
    "sweep": _add_sweep,
    "capacity": _add_capacity,
    "fleet": _add_fleet,
    "eviction": _add_eviction,
    "replay": _add_replay,
    "calibrate": _add_calibrate,
    "explore": _add_explore,
}
"""Name of a command -> the function that adds its flags to a parser."""
