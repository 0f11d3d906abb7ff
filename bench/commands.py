"""The commands of `forge bench`: which there are, what each takes, and the benchmark that it runs.

Owns the flags of benchmarks. Knows no figure: each benchmark is a module with a `main`, which is
imported when its command is given and not before.

    forge bench step qwen3-4b --cells b1,b64 --json FILE
                │    │          └── options ──────────┘
                │    └── a shape, a folder, an id or an embedded model
                └── bench.step.main

What is not on the command line is the benchmark's own to choose. Neither the environment nor a file
is asked, for the record has the command and should say what was measured. The key of a server is
the exception.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from forge.cli import ENGINE, SERVER, Command, Option, Parser, Settings, add_flags, option
from forge.errors import InvalidConfig

JSON = option("json", str, None, "write the figures there", "FILE")
MODEL = option(
    "model",
    str,
    None,
    "a shape such as qwen3-4b, a checkpoint's folder or HuggingFace id, or an embedded model",
    "MODEL",
)
URL = option("url", str, None, "where the server is: http://127.0.0.1:8080", "URL")
CELLS = option("cells", str, None, "cells to run, such as c1,ttft_128,b64", "NAMES")._replace(
    unset="all"
)
REPEATS = option("repeats", int, None, "first tokens that a median is of")._replace(
    unset="that of the cells"
)
CONCURRENCY = option("concurrency", str, None, "numbers of streams: 1,8,64", "N,N")._replace(
    unset="those of the cells"
)
FLAGS = tuple(each._replace(default=None, unset="the benchmark's") for each in ENGINE)
"""What an engine takes. Defaults are the benchmark's own, so that figures can be compared."""

CLIENT = (
    CONCURRENCY,
    option("label", str, "forge", "the engine's name in results"),
    option("model", str, None, "the model's name over HTTP")._replace(unset="the first listed"),
    option("vocab_size", int, None, "ids of prompts are below it; for models of less than 100000"),
    *(each for each in SERVER if each.name == "api_key"),
)
OPEN = (
    option("rate", str, None, "open loops of so many requests a second: 0.5,2", "R,R"),
    option("requests", int, None, "how many requests of each rate"),
    option("seconds", float, None, "or for how long requests of each rate come")._replace(
        unset="20"
    ),
    option("slo_ttft_ms", float, None, "most ms to the first token of a good request"),
    option("slo_itl_ms", float, None, "most ms between tokens of a good request, their mean"),
    option("plot", str, None, "draw the figures there; needs matplotlib", "FILE.png"),
)
"""What `forge bench serve` takes beside; what nobody gave is not passed on."""
SPEC = (
    option("streams", str, None, "numbers of streams: 1,8,64", "N,N")._replace(
        unset="1,8,64, as far as max_num_seqs goes"
    ),
    option("prompt_tokens", int, None, "tokens of a prompt")._replace(unset="those of the cells"),
    option("output_tokens", int, None, "tokens of an output")._replace(unset="those of the cells"),
    option("agreement", float, 0.8, "share of the oracle's tokens that are right"),
    option("repeats", int, 3, "runs that a median is of"),
)
"""What `forge bench spec` takes beside."""
KEY = "FORGE_API_KEY"
"""The only name that is read from the environment."""


def numbers(chosen: Settings, name: str) -> tuple[int, ...]:
    """`1,8,64` as integers, or none where nothing was given. Raises InvalidConfig."""
    text = chosen.values[name]
    if text is None:
        return ()
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,6}", part) for part in parts):
        raise InvalidConfig(name, f"{text[:64]!r} is not a list of numbers", "Give 1,8,64, say")
    return tuple(map(int, parts))


def amounts(chosen: Settings, name: str) -> tuple[float, ...]:
    """`0.5,8` as numbers above 0. Raises InvalidConfig."""
    text = chosen.values[name]
    try:
        given = tuple(map(float, text.split(",")))
    except ValueError:
        given = ()
    if not given or not all(0 < each < math.inf for each in given):
        raise InvalidConfig(
            name, f"{text[:64]!r} is not a list of numbers above 0", "Give 0.5,8, say"
        )
    return given


def positive(chosen: Settings, name: str) -> int | None:
    """The number, which is 1 or more, or None where nothing was given. Raises InvalidConfig."""
    value: int | None = chosen.values[name]
    if value is not None and value < 1:
        raise InvalidConfig(name, f"{value} is not a positive integer", "Give 1 or more")
    return value


def cells(chosen: Settings) -> tuple[str, ...]:
    """Names of cells, none where all are meant."""
    text = chosen.values["cells"]
    return () if text is None else tuple(text.split(","))


def batches(names: Sequence[str]) -> tuple[int, ...]:
    """Batch sizes of the named cells of steady decode. Raises InvalidConfig for other cells."""
    for name in names:
        if not re.fullmatch(r"b[1-9]\d{0,6}", name):
            raise InvalidConfig("cells", f"{name!r} has no single steps to profile", "Give b1,b64")
    return tuple(int(name[1:]) for name in names) or (1, 64)


# One function for each benchmark.


def policy(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure what the policy costs on this machine."""
    from bench.policy import main

    return main(chosen.values["json"], args.check)


def step(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure first token, throughput and single steps of the fixed workload."""
    model, json = chosen.values["model"], chosen.values["json"]
    repeats = positive(chosen, "repeats")
    if args.profile:
        from bench import breakdown

        if repeats is not None:
            raise InvalidConfig("repeats", "a profile has no first tokens", "Leave it out")
        return breakdown.main(model, json, batches(cells(chosen)), chosen.engine)
    from bench.step import main

    return main(model, json, cells(chosen), repeats, chosen.engine)


def ttft(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure the first token behind prompts of several lengths and behind a cached prefix."""
    from bench.ttft import main

    repeats = positive(chosen, "repeats")
    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, cells(chosen), repeats, chosen.engine)


def sweep(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure latency and throughput against the number of streams, without a server."""
    from bench.sweep import main

    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, numbers(chosen, "concurrency"), chosen.engine)


def serve(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure latency, throughput and goodput of a running server by streams or by rate."""
    from bench.serve import main

    values = chosen.values
    more = {each.name: values[each.name] for each in OPEN if each.name in chosen.given}
    if "rate" in more:
        more["rate"] = amounts(chosen, "rate")
    return main(
        values["url"],
        values["json"],
        values["label"],
        numbers(chosen, "concurrency"),
        values["model"],
        positive(chosen, "vocab_size"),
        values["api_key"],
        **more,
    )


def spec(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure what drafts gain over plain decoding, whoever proposes them and however many."""
    from bench.spec import main

    values, repeats = chosen.values, positive(chosen, "repeats")
    assert repeats is not None, "it has a default"
    return main(
        values["model"],
        values["json"],
        numbers(chosen, "streams"),
        positive(chosen, "prompt_tokens"),
        positive(chosen, "output_tokens"),
        values["agreement"],
        repeats,
        chosen.engine,
    )


def pairs(args: argparse.Namespace, chosen: Settings) -> int:
    """Compare the tokens of the same greedy requests when they are run in different ways."""
    from bench.pairs import main

    requests, tokens = positive(chosen, "requests"), positive(chosen, "tokens")
    assert requests is not None and tokens is not None, "both have defaults"
    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, requests, tokens, chosen.engine)


def soak(args: argparse.Namespace, chosen: Settings) -> int:
    """Run and abort many random requests; status 1 where a block is lost."""
    from bench.soak import main

    requests = positive(chosen, "requests")
    assert requests is not None, "it has a default"
    return main(chosen.values["model"], chosen.values["json"], requests, chosen.engine)


# The parsers.


def run(args: argparse.Namespace, chosen: Settings) -> int:
    """The benchmark has run. What cannot be written is refused before anything is measured."""
    for name in ("json", "plot"):
        path = chosen.values.get(name)
        if path is None:
            continue
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("a").close()
        except OSError as fault:
            raise InvalidConfig(
                name, f"{path!r} cannot be written: {fault.strerror}", "Name another file"
            ) from None
    return int(args.measure(args, chosen))


def add(parser: Parser) -> None:
    """The parser of `forge bench` has a command for each benchmark."""
    benches = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    sources = {KEY: os.environ[KEY]} if KEY in os.environ else {}

    def command(name: str, measure: Command, subject: Option | None, *flags: Option) -> Parser:
        text = measure.__doc__
        made: Parser = benches.add_parser(name, help=text, description=text, allow_abbrev=False)
        options = (*flags, JSON)
        if subject is not None:
            count = None if subject.default is None else "?"
            made.add_argument(subject.name, metavar=subject.metavar, help=subject.help, nargs=count)
            made.set_defaults(positional=subject.name)
        add_flags(made, options)
        taken = options if subject is None else (subject, *options)
        made.set_defaults(run=run, measure=measure, options=taken, sources=sources, parser=made)
        return made

    text = "exit with 1 when a bound is broken"
    command("policy", policy, None).add_argument("--check", action="store_true", help=text)
    text = "show where the time of a step goes; with --cells b1,b64 at these batch sizes"
    made = command("step", step, MODEL, CELLS, REPEATS, *FLAGS)
    made.add_argument("--profile", action="store_true", help=text)
    command("ttft", ttft, MODEL, CELLS, REPEATS, *FLAGS)
    command("sweep", sweep, MODEL, CONCURRENCY, *FLAGS)
    command("serve", serve, URL, *CLIENT, *OPEN)
    command("spec", spec, MODEL._replace(default="hash:step_ms=5"), *SPEC, *FLAGS)
    requests = option("requests", int, 32, "how many")
    tokens = option("tokens", int, 64, "output tokens of each")
    command("pairs", pairs, MODEL, requests, tokens, *FLAGS)
    command("soak", soak, MODEL, requests._replace(default=10_000), *FLAGS)
