"""The commands of `forge bench`: their flags, and the benchmark that each of them runs.

Owns the flags of benchmarks. Knows no figure: each benchmark is a module with a `main`, which is
imported only when its command runs.

    forge bench step qwen3-4b --cells b1,b64 --json FILE
                │    │          └── options ──────────┘
                │    └── a shape, a folder, an id or an embedded model
                └── forge.bench.step.main

The benchmark chooses everything that is not on the command line. Neither the environment nor a file
is read, because the record holds the command and should say what was measured. The key of a server
is the exception.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge.cli.options import ENGINE_OPTIONS, Option, define_option
from forge.cli.parser import CommandFunction, Parser, add_flags
from forge.cli.settings import Settings
from forge.errors import InvalidConfig

JSON = define_option("json", str, None, "write the figures to FILE", "FILE")
MODEL = define_option(
    "model",
    str,
    None,
    "a shape such as qwen3-4b, a checkpoint's folder or HuggingFace id, or an embedded model",
    "MODEL",
)
URL = define_option("url", str, None, "address of the server: http://127.0.0.1:8080", "URL")
CELLS = define_option(
    "cells", str, None, "cells to run, such as c1,ttft_128,b64", "NAMES"
)._replace(default_text="all")
REPEATS = define_option("repeats", int, None, "first tokens in a median")._replace(
    default_text="that of the cells"
)
CONCURRENCY = define_option("concurrency", str, None, "numbers of streams: 1,8,64", "N,N")._replace(
    default_text="those of the cells"
)
BENCH_ENGINE_OPTIONS = tuple(
    each._replace(default=None, default_text="the benchmark's") for each in ENGINE_OPTIONS
)
"""Options of an engine. Each benchmark has its own defaults, so that figures can be compared."""

HTTP_CLIENT_OPTIONS = (
    define_option("label", str, "forge", "the engine's name in results"),
    define_option("model", str, None, "the model's name over HTTP")._replace(
        default_text="the first listed"
    ),
    define_option(
        "vocab_size", int, None, "bound of the ids of prompts, for models of less than 100000"
    ),
    define_option("api_key", str, None, "the server's key, if it has one"),
)
OPEN_LOOP_OPTIONS = (
    define_option("rate", str, None, "rates of open loops in requests a second: 0.5,2", "R,R"),
    define_option("requests", int, None, "requests of each rate"),
    define_option("seconds", float, None, "or duration of each rate")._replace(default_text="20"),
    define_option("slo_ttft_ms", float, None, "limit of a good request: ms to the first token"),
    define_option("slo_itl_ms", float, None, "limit of a good request: mean ms between tokens"),
    define_option("plot", str, None, "plot the figures; needs matplotlib", "FILE.png"),
)
"""Further options of `forge bench serve`. Only those that were given are passed on."""
SESSION_OPTIONS = (
    define_option("agents", int, 64, "sessions that are open at a time"),
    define_option("sessions", int, 128, "sessions in all"),
    define_option("turns", int, 20, "most turns of a session"),
    define_option("system", int, 8192, "tokens of the system prompt that all sessions share"),
    define_option("new", str, "exp:2000", "new tokens of a turn: 512, 16-1024, exp:300", "LENGTH"),
    define_option("output", str, "exp:300", "tokens of an answer", "LENGTH"),
    define_option("pause", float, 3.0, "mean seconds of a tool, between answer and next turn"),
    define_option("seed", int, 0, "seed of all draws"),
)
"""The sessions of `forge bench agents`: fields of AgentLoad."""
AGENT_OPTIONS = (
    define_option("hints", str, "none", "none or sessions: forge's fields of a session", "NAME"),
    define_option(
        "answers", str, "fixed", "fixed: one token is allowed; returned: the model's", "NAME"
    ),
)
"""Further options of `forge bench agents`."""
SPEC_OPTIONS = (
    define_option("streams", str, None, "numbers of streams: 1,8,64", "N,N")._replace(
        default_text="1,8,64, as far as max_num_seqs goes"
    ),
    define_option("prompt_tokens", int, None, "tokens of a prompt")._replace(
        default_text="those of the cells"
    ),
    define_option("output_tokens", int, None, "tokens of an output")._replace(
        default_text="those of the cells"
    ),
    define_option("agreement", float, 0.8, "share of the oracle's drafts that are right"),
    define_option("repeats", int, 3, "runs in a median"),
)
"""Options of `forge bench spec`."""
API_KEY_VARIABLE = "FORGE_API_KEY"
"""The only environment variable that is read."""


def parse_ints(chosen: Settings, name: str) -> tuple[int, ...]:
    """Return `1,8,64` as integers, or () where the option was not given. Raises InvalidConfig."""
    text = chosen.values[name]
    if text is None:
        return ()
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,6}", part) for part in parts):
        raise InvalidConfig(name, f"{text[:64]!r} is not a list of numbers", "Give 1,8,64, say")
    return tuple(map(int, parts))


def parse_floats(chosen: Settings, name: str) -> tuple[float, ...]:
    """Return `0.5,8` as numbers above 0. Raises InvalidConfig."""
    text = chosen.values[name]
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(0 < each < math.inf for each in values):
        raise InvalidConfig(
            name, f"{text[:64]!r} is not a list of numbers above 0", "Give 0.5,8, say"
        )
    return values


def parse_positive(chosen: Settings, name: str) -> int | None:
    """Return the number, 1 or more, or None where the option was not given.

    Raises InvalidConfig.
    """
    value: int | None = chosen.values[name]
    if value is not None and value < 1:
        raise InvalidConfig(name, f"{value} is not a positive integer", "Give 1 or more")
    return value


def parse_cell_names(chosen: Settings) -> tuple[str, ...]:
    """Return the names of cells, or () for all cells."""
    text = chosen.values["cells"]
    return () if text is None else tuple(text.split(","))


def parse_batch_sizes(names: Sequence[str]) -> tuple[int, ...]:
    """Return the batch sizes of the named steady-decode cells. Raises InvalidConfig for others."""
    for name in names:
        if not re.fullmatch(r"b[1-9]\d{0,6}", name):
            raise InvalidConfig("cells", f"{name!r} has no single steps to profile", "Give b1,b64")
    return tuple(int(name[1:]) for name in names) or (1, 64)


# One function for each benchmark.


def run_policy(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure the cost of scheduling on this machine."""
    from forge.bench.policy import main

    return main(chosen.values["json"], args.check)


def run_step(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure first token, throughput and single steps of the fixed workload."""
    model, json = chosen.values["model"], chosen.values["json"]
    repeats = parse_positive(chosen, "repeats")
    if args.profile:
        from forge.bench import breakdown

        if repeats is not None:
            raise InvalidConfig("repeats", "a profile has no first tokens", "Leave it out")
        return breakdown.main(
            model, json, parse_batch_sizes(parse_cell_names(chosen)), chosen.engine_options
        )
    from forge.bench.step import main

    return main(model, json, parse_cell_names(chosen), repeats, chosen.engine_options)


def run_ttft(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure the time to the first token after prompts of several lengths and a cached prefix."""
    from forge.bench.ttft import main

    repeats = parse_positive(chosen, "repeats")
    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, parse_cell_names(chosen), repeats, chosen.engine_options)


def run_sweep(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure latency and throughput by the number of streams, without a server."""
    from forge.bench.sweep import main

    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, parse_ints(chosen, "concurrency"), chosen.engine_options)


def run_serve(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure latency, throughput and goodput of a running server, by streams or by rate."""
    from forge.bench.serve import main

    values = chosen.values
    open_loop = {
        each.name: values[each.name] for each in OPEN_LOOP_OPTIONS if each.name in chosen.explicit
    }
    if "rate" in open_loop:
        open_loop["rate"] = parse_floats(chosen, "rate")
    return main(
        values["url"],
        values["json"],
        values["label"],
        parse_ints(chosen, "concurrency"),
        values["model"],
        parse_positive(chosen, "vocab_size"),
        values["api_key"],
        **open_loop,
    )


def run_agents(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure sessions of agents on a running server: completion times and turns a second."""
    from forge.bench.agent_load import AgentLoad
    from forge.bench.agents import main

    values = chosen.values
    load = AgentLoad(**{each.name: values[each.name] for each in SESSION_OPTIONS})
    return main(
        values["url"],
        values["json"],
        load,
        values["hints"],
        values["answers"],
        values["label"],
        values["model"],
        parse_positive(chosen, "vocab_size"),
        values["api_key"],
    )


def run_spec(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure the gain of speculative decoding, by proposer and number of drafts."""
    from forge.bench.spec import main

    values, repeats = chosen.values, parse_positive(chosen, "repeats")
    assert repeats is not None, "it has a default"
    return main(
        values["model"],
        values["json"],
        parse_ints(chosen, "streams"),
        parse_positive(chosen, "prompt_tokens"),
        parse_positive(chosen, "output_tokens"),
        values["agreement"],
        repeats,
        chosen.engine_options,
    )


def run_pairs(args: argparse.Namespace, chosen: Settings) -> int:
    """Compare the tokens of the same greedy requests between batching modes."""
    from forge.bench.pairs import main

    requests, tokens = parse_positive(chosen, "requests"), parse_positive(chosen, "tokens")
    assert requests is not None and tokens is not None, "both have defaults"
    model, json = chosen.values["model"], chosen.values["json"]
    return main(model, json, requests, tokens, chosen.engine_options)


def run_soak(args: argparse.Namespace, chosen: Settings) -> int:
    """Run and abort many random requests; status 1 if a block is lost."""
    from forge.bench.soak import main

    requests = parse_positive(chosen, "requests")
    assert requests is not None, "it has a default"
    return main(chosen.values["model"], chosen.values["json"], requests, chosen.engine_options)


# The parsers.


def run_benchmark(args: argparse.Namespace, chosen: Settings) -> int:
    """Run the benchmark.

    Refuses output files that cannot be written before anything is measured.
    """
    for name in ("json", "plot"):
        path = chosen.values.get(name)
        if path is None:
            continue
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("a").close()
        except OSError as error:
            raise InvalidConfig(
                name, f"{path!r} cannot be written: {error.strerror}", "Name another file"
            ) from None
    return int(args.measure(args, chosen))


def add_benchmark(
    subparsers: Any, name: str, measure: CommandFunction, subject: Option | None, *flags: Option
) -> Parser:
    """Add a benchmark with these flags and --json, and return its parser.

    subparsers   of `forge bench`, or of a benchmark that has parts
    subject      what is measured, the positional argument; optional where it has a default
    """
    sources = (
        {API_KEY_VARIABLE: os.environ[API_KEY_VARIABLE]} if API_KEY_VARIABLE in os.environ else {}
    )
    text = measure.__doc__
    subparser: Parser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
    options = (*flags, JSON)
    if subject is not None:
        count = None if subject.default is None else "?"
        subparser.add_argument(
            subject.name, metavar=subject.metavar, help=subject.help, nargs=count
        )
        subparser.set_defaults(positional=subject.name)
    add_flags(subparser, options)
    arguments = options if subject is None else (subject, *options)
    subparser.set_defaults(
        run=run_benchmark, measure=measure, options=arguments, sources=sources, parser=subparser
    )
    return subparser


def add_subparsers(parser: Parser) -> None:
    """Give the parser of `forge bench` a command for each benchmark."""
    from forge.bench.kv_commands import add_kv_parts

    benches = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    add = partial(add_benchmark, benches)
    text = "exit with 1 if a bound is exceeded"
    add("policy", run_policy, None).add_argument("--check", action="store_true", help=text)
    text = "show where the time of a step goes; with --cells b1,b64 at these batch sizes"
    step_parser = add("step", run_step, MODEL, CELLS, REPEATS, *BENCH_ENGINE_OPTIONS)
    step_parser.add_argument("--profile", action="store_true", help=text)
    add("ttft", run_ttft, MODEL, CELLS, REPEATS, *BENCH_ENGINE_OPTIONS)
    add("sweep", run_sweep, MODEL, CONCURRENCY, *BENCH_ENGINE_OPTIONS)
    add("serve", run_serve, URL, CONCURRENCY, *HTTP_CLIENT_OPTIONS, *OPEN_LOOP_OPTIONS)
    add("agents", run_agents, URL, *SESSION_OPTIONS, *AGENT_OPTIONS, *HTTP_CLIENT_OPTIONS)
    model = MODEL._replace(default="hash:step_ms=5")
    add("spec", run_spec, model, *SPEC_OPTIONS, *BENCH_ENGINE_OPTIONS)
    requests = define_option("requests", int, 32, "number of requests")
    tokens = define_option("tokens", int, 64, "output tokens of each")
    add("pairs", run_pairs, MODEL, requests, tokens, *BENCH_ENGINE_OPTIONS)
    add("soak", run_soak, MODEL, requests._replace(default=10_000), *BENCH_ENGINE_OPTIONS)
    add_kv_parts(benches)
