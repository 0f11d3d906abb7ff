"""The commands of `forge sim`: what each takes, and what it prints.

Owns the flags of the simulator. Knows no event: a run is a Scenario's.
Neither the environment nor a file of options is asked: what is on the command line decides the run.

    forge sim --rate 20 --policy ageing --log run.jsonl --draw --plot run.png --trace run.json
    forge sim sweep --policies fcfs,ageing --rates 10,20 --plot sweep.png
    forge sim replay recording.jsonl
    forge sim calibrate MODEL --out calibration.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from forge.cli import (
    ENGINE,
    MODEL,
    Command,
    Option,
    Parser,
    Settings,
    add_flags,
    option,
    options_of,
)
from forge.config import EngineConfig, Speculation
from forge.engine import Engine
from forge.errors import InvalidConfig
from sim.chrome import write_trace
from sim.drawing import Drawing
from sim.log import Log
from sim.replay import replay
from sim.report import offered, show, show_costs, show_refusals, title
from sim.scenario import RATE, REQUESTS, SHAPES, USES, Scenario, policy_names, policy_of, summary
from sim.trail import Trail
from sim.world import Watcher

FILES = {
    "log": "write what was decided and when there, as lines of JSON",
    "plot": "draw the run there, as .png, .svg or .pdf; needs matplotlib",
    "trace": "write events there that ui.perfetto.dev opens",
    "json": "write the figures there",
}
PATHS = tuple(option(name, str, None, text, "FILE") for name, text in FILES.items())

WORDED: dict[str, dict[str, Any]] = {
    "workload": {"metavar": "NAME|FILE"},
    "rate": {"help": "requests a second", "unset": f"{RATE:g}, or those of the file"},
    "requests": {"help": "how many", "unset": f"{REQUESTS}, or those of the file, once"},
    "longest_prompt": {"help": "of a file: longer prompts are cut", "unset": "none is"},
    "longest_output": {"help": "of a file: longer answers are cut", "unset": "none is"},
    "prompt": {
        "metavar": "SPREAD",
        "help": "tokens that are new in a request: 512, 16-1024, exp:300; of several with commas "
        "between, one",
    },
    "output": {"metavar": "SPREAD", "help": "tokens of an answer, written as --prompt"},
    "policy": {"metavar": "NAME|FILE.py", "help": f"{', '.join(policy_names())} or a FILE.py"},
    "cost": {
        "metavar": "COST",
        "help": "what steps take: unit, a millisecond each; affine:BASE,ROW,TOKEN in us; "
        "roofline:GPU,MODEL, as roofline:h200,qwen3-4b; or FILE.json of forge sim calibrate",
    },
    "model": {"metavar": "NAME"},
}
"""Where an option of Scenario says more on a command line than in Python."""

SCENARIO = tuple(
    each._replace(**WORDED.get(each.name, {}))
    for each in options_of(Scenario, [f.name for f in fields(Scenario) if f.name != "engine"])
)
GEOMETRY = tuple(
    each._replace(default=getattr(EngineConfig(), each.name), unset="")
    for each in ENGINE
    if each.name in EngineConfig.__dataclass_fields__ and each.name != "seed"
)
DRAFTS = option("num_speculative_tokens", int, 0, "drafts of a sequence in a step, 0 to 16")
RUN = (*SCENARIO, *GEOMETRY, DRAFTS)
"""What decides a run."""

FAULTS = (
    option("faults", str, None, "break small worlds, one a seed: all, or abort=0.1,reset", "SPEC"),
    option("seeds", int, 1, "of --faults: so many seeds, from --seed on"),
)
"""What a run with faults takes, beside --seed."""

MEASURED = tuple(each for each in ENGINE if each.name != "record")
CALIBRATION = (
    option("out", str, "calibration.json", "write the calibration there", "FILE.json"),
    option("minutes", float, 10.0, "to measure for, at most"),
)
"""What a calibration takes: the options of the engine, and these."""

RECORDING = option("recording", str, None, "what forge serve --record has written", "FILE")
REPLAY = (
    RECORDING,
    option("policy", str, None, "the policy's file, where it was one", "FILE.py"),
)
"""What a replay takes."""

AXES = (
    option("policies", str, None, "policies to compare, with commas between", "NAMES"),
    option("rates", str, None, "values of --rate: 10,20,40", "X,X"),
    option("budgets", str, None, "values of --max-num-batched-tokens: 512,2048", "N,N"),
    option("blocks", str, None, "values of --num-blocks: 256,1024", "N,N"),
    option("drafts", str, None, "values of --num-speculative-tokens: 0,2,4", "N,N"),
)
"""What a sweep takes beside; each combination is a run."""

SWEPT = {
    "policies": "policy",
    "rates": "rate",
    "budgets": "max_num_batched_tokens",
    "blocks": "num_blocks",
    "drafts": "num_speculative_tokens",
}
"""Each of AXES, and the option that it gives several values."""


def scenario_of(values: Mapping[str, Any], given: frozenset[str]) -> Scenario:
    """The scenario of these options. Raises InvalidConfig.

    given   those that somebody gave: what the workload has no use for is refused
    """
    drafts: int = values[DRAFTS.name]
    geometry = {each.name: values[each.name] for each in GEOMETRY}
    speculation = Speculation(num_tokens=drafts) if drafts else None
    engine = EngineConfig(**geometry, seed=values["seed"], speculation=speculation)
    scenario = Scenario(**{each.name: values[each.name] for each in SCENARIO}, engine=engine)
    policy_of(scenario.policy)  # before anything else has run for minutes
    for name in SHAPES:
        if name in given and name not in scenario.uses:
            others = [known for known, uses in USES.items() if name in uses]
            raise InvalidConfig(
                name,
                f"the workload {scenario.workload} has no use for it",
                f"Leave it out, or take --workload {others[0]}",
            )
    return scenario


# forge sim


def simulate(args: argparse.Namespace, chosen: Settings) -> int:
    """Run the engine on a virtual clock and print what its users would have seen."""
    if chosen.values["faults"] is not None:
        return sabotage(args, chosen)
    if "seeds" in chosen.given:
        raise InvalidConfig("seeds", "a run without faults has one", "Leave it out")
    scenario = scenario_of(chosen.values, chosen.given)
    values = chosen.values
    if values["plot"] is not None:
        from sim.plots import check_plot

        check_plot(values["plot"])
    watchers: list[Watcher] = []

    def watch(engine: Engine) -> Sequence[Watcher]:
        if values["plot"] is not None or values["trace"] is not None:
            watchers.append(Trail(engine))
        if args.draw:
            watchers.append(Drawing(sys.stdout.write, engine))
        return watchers

    with ExitStack() as files:
        log = None
        if values["log"] is not None:
            log = Log(_opened(values["log"], files), scenario.header())
        world = scenario.run(log, watch)
        digest = None if log is None else log.close()
    figures = summary(world)
    for watcher in watchers:
        if isinstance(watcher, Drawing):
            watcher.close()
        if isinstance(watcher, Trail) and values["trace"] is not None:
            with ExitStack() as files:
                write_trace(_opened(values["trace"], files), watcher)
        if isinstance(watcher, Trail) and values["plot"] is not None:
            from sim.plots import write_run

            heading = f"{title(scenario)}\noffered {offered(scenario, figures)}"
            write_run(values["plot"], watcher, world.measures, heading)
    show_costs(scenario)
    show(scenario, figures, digest)
    record = {"title": title(scenario), "header": scenario.header(), "figures": figures}
    _write_json(values["json"], record)
    return 0


def sabotage(args: argparse.Namespace, chosen: Settings) -> int:
    """Small worlds have run with faults and every check on. 1 where a check was broken."""
    from sim.faults import parse_faults
    from sim.seeds import run_seeds

    others = chosen.given - {"faults", "seeds", "seed"} | ({"draw"} if args.draw else set())
    for name in sorted(others):
        raise InvalidConfig(
            name, "a world with faults is drawn from its seed alone", "Leave it out, or --faults"
        )
    rates = parse_faults(chosen.values["faults"])
    first, count = chosen.values["seed"], chosen.values["seeds"]
    if count < 1:
        raise InvalidConfig("seeds", f"{count} is not a positive integer", "Give 1 or more")
    report = run_seeds(first, first + count - 1, rates)
    print(f"seeds       {report.num_seeds} from {first}, {report.num_steps} steps")
    for what, times in sorted(report.reached.items()):
        print(f"{times:>9}   {what}")
    print(f"violations  {'none' if report.found is None else 'one: see above'}")
    return 0 if report.found is None else 1


# forge sim sweep


def sweep(args: argparse.Namespace, chosen: Settings) -> int:
    """Run every combination of policies, rates, budgets, blocks and drafts, and compare them."""
    from sim.sweep import Table, combinations, outcome, refused_in

    values = dict(chosen.values)
    axes = {SWEPT[each.name]: listed(each.name, values.pop(each.name)) for each in AXES}
    swept = {name: found for name, found in axes.items() if found}
    if not swept:
        raise InvalidConfig(
            "policies", "nothing is compared", "Give --policies fcfs,ageing or --rates 10,20, say"
        )
    if values["plot"] is not None:
        from sim.plots import check_plot

        check_plot(values["plot"])
    given = chosen.given | swept.keys()
    runs = [(case, scenario_of({**values, **case}, given)) for case in combinations(swept)]
    print(f"{title(runs[0][1])}, seed {values['seed']}; first of {len(runs)}")
    show_costs(runs[0][1])
    drafted = any(scenario.engine.speculation is not None for _, scenario in runs)
    table = Table([case for case, _ in runs], drafted)
    print(table.head(), flush=True)
    outcomes = []
    for case, scenario in runs:
        outcomes.append(outcome(case, scenario))
        print(table.line(outcomes[-1]), flush=True)  # a sweep may take hours
    show_refusals(refused_in(outcomes))
    whole = [each for each in outcomes if "figures" in each]
    if values["plot"] is not None and whole:
        from sim.plots import write_sweep

        write_sweep(values["plot"], whole)
    first = runs[0][1]
    record = {"title": title(first), "header": first.header(), "outcomes": outcomes}
    _write_json(values["json"], record)
    if len(whole) < len(outcomes):
        print(f"{len(outcomes) - len(whole)} of {len(outcomes)} runs failed", file=sys.stderr)
    return 0 if len(whole) == len(outcomes) else 1


def listed(name: str, text: str | None) -> list[Any]:
    """`10,20` as values of the axis; none where it was not given. Raises InvalidConfig."""
    if text is None:
        return []
    parts = text.split(",")
    if name == "policies":
        return parts
    kind: Callable[[str], Any] = float if name == "rates" else int
    pattern = r"\d{1,9}(\.\d{1,9})?" if name == "rates" else r"\d{1,9}"
    if not all(re.fullmatch(pattern, part) for part in parts):
        raise InvalidConfig(name, f"{text[:64]!r} is not a list of numbers", "Give 10,20, say")
    return list(map(kind, parts))


# forge sim replay


def replayed(args: argparse.Namespace, chosen: Settings) -> int:
    """Decide a recorded run again; status 1 where a decision differs or the end is missing."""
    path = chosen.values["recording"]
    try:
        with open(path, encoding="utf-8") as file:
            found = replay(file, chosen.values["policy"])
    except (OSError, ValueError) as fault:
        if isinstance(fault, InvalidConfig):
            raise
        why = getattr(fault, "strerror", None) or "it is not text"
        raise InvalidConfig(
            "recording", f"{path!r} cannot be read: {why}", "Name a file of --record"
        ) from None
    print(f"recorded    by forge {found.version}, {found.lines} lines")
    print(f"decided     {found.steps} steps, {found.requests} requests, {found.tokens} tokens")
    print(f"difference  {found.difference or 'none'}")
    if found.difference is not None:
        return 1
    if not found.whole:
        print(
            "forge sim replay: FILE: the end of the recording is missing. "
            "Close the server before its recording is copied, or record the run again",
            file=sys.stderr,
        )
        return 1
    return 0


# forge sim calibrate


def calibrate(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure what a model's steps take here, for simulations to predict it."""
    from sim.calibrate import main

    values = chosen.values
    if not 0 < values["minutes"] <= 60:
        raise InvalidConfig("minutes", f"{values['minutes']} is not from 0 to 60", "Give 10, say")
    _check_writable("out", values["out"])
    names = [each.name for each in MEASURED if each.name in chosen.given]
    options = {name: values[name] for name in names}
    return main(values["model"], options, values["out"], values["seed"], 60 * values["minutes"])


# Files.


def _opened(path: str, files: ExitStack) -> Callable[[str], object]:
    """Writes to the file, which is closed with the others. The same bytes on every machine."""
    file = files.enter_context(open(path, "w", encoding="utf-8", newline="\n"))
    return file.write


def _write_json(path: str | None, record: Mapping[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run(args: argparse.Namespace, chosen: Settings) -> int:
    """The command has run. What cannot be written is refused before anything is simulated."""
    for each in PATHS:
        path = chosen.values.get(each.name)
        if path is None:
            continue
        _check_writable(each.name, path)
    return int(args.simulate(args, chosen))


def _check_writable(name: str, path: str) -> None:
    """Raise InvalidConfig where the file cannot be written. No file is left behind."""
    file = Path(path).resolve()  # of a link: its target, which is what is written
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        file.open("a").close()
        if not there:
            file.unlink()
    except OSError as fault:
        raise InvalidConfig(
            name, f"{path!r} cannot be written: {fault.strerror}", "Name another file"
        ) from None


# The parsers.

DRAWS = "draw every step on the terminal"


def _ready(parser: Parser, simulation: Command, options: Sequence[Option]) -> None:
    add_flags(parser, [each for each in options if each not in (MODEL, RECORDING)])
    parser.set_defaults(run=run, simulate=simulation, options=options, sources={}, parser=parser)


def add(parser: Parser, words: Sequence[str]) -> None:
    """The parser of `forge sim` has the command that `words` begin with, or is that of a run."""
    if words[:1] and words[0] in COMMANDS:
        commands = parser.add_subparsers(dest="simulation", metavar="COMMAND", required=True)
        for name, fill in COMMANDS.items():
            text = fill.__doc__
            fill(commands.add_parser(name, help=text, description=text, allow_abbrev=False))
        return
    parser.epilog = f"Other commands: {', '.join(f'forge sim {name}' for name in COMMANDS)}."
    _ready(parser, simulate, (*RUN, *FAULTS, *PATHS))
    parser.add_argument("--draw", action="store_true", help=DRAWS)


def _sweep(parser: Parser) -> None:
    """Compare policies, rates, budgets, blocks and drafts."""
    kept = [each for each in PATHS if each.name in ("plot", "json")]
    _ready(parser, sweep, (*AXES, *RUN, *kept))


def _replay(parser: Parser) -> None:
    """Decide a recorded run again, and find the first difference."""
    parser.add_argument(RECORDING.name, metavar=RECORDING.metavar, help=RECORDING.help)
    _ready(parser, replayed, REPLAY)
    parser.set_defaults(positional=RECORDING.name)


def _calibrate(parser: Parser) -> None:
    """Measure what a model's steps take here, for simulations to predict it."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL.help} (default hash)")
    _ready(parser, calibrate, (MODEL, *CALIBRATION, *MEASURED))
    parser.set_defaults(positional="model")


COMMANDS: dict[str, Callable[[Parser], None]] = {
    "sweep": _sweep,
    "replay": _replay,
    "calibrate": _calibrate,
}
"""Commands of `forge sim` by name: what gives a parser its flags."""
