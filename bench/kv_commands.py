"""The parts of `forge bench kv`: their flags, and the benchmark that each of them runs.

Owns the flags of benchmarks of KV memory. Knows no figure, like forge.bench.commands.

    forge bench kv returning qwen3-4b     TTFT of a prefix from each tier
                   overhead qwen3-4b      throughput with tiers in which nothing is found
                   memory                 bytes of a sequence, by kind of cache
                   moves                  GB/s between device and host memory
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from forge.bench.commands import (
    BENCH_ENGINE_OPTIONS,
    MODEL,
    add_benchmark,
    parse_ints,
    parse_positive,
)
from forge.bench.shapes import SHAPES
from forge.cli.options import define_option
from forge.cli.parser import Parser
from forge.cli.settings import Settings
from forge.errors import InvalidConfig
from forge.models.loader import refuse_missing_packages

RETURNING_OPTIONS = (
    define_option("lengths", str, None, "tokens of the prefixes", "N,N")._replace(
        default_text="1024 to 32768, as far as max_model_len goes"
    ),
    define_option("file_lengths", str, None, "those that are read from files too", "N,N")._replace(
        default_text="those up to 16384"
    ),
    define_option("repeats", int, 5, "samples of each figure"),
    define_option("plot", str, None, "plot the figures; needs matplotlib", "FILE.png"),
)
SHAPES_OPTION = define_option("shapes", str, "qwen3-4b,llama-3.1-8b", "shapes of models", "NAMES")
DEVICES = ("cpu", "cuda")
SHAPES_NEED = "keys and values of a model need"
"""Beginning of the error that names a missing package."""


def run_returning(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure TTFT of a returning prefix by the tier that has it; files with --kv-disk-path."""
    from forge.bench.kv_returning import main

    values, repeats = chosen.values, parse_positive(chosen, "repeats")
    assert repeats is not None, "it has a default"
    return main(
        values["model"],
        values["json"],
        parse_ints(chosen, "lengths"),
        parse_ints(chosen, "file_lengths"),
        repeats,
        values["plot"],
        chosen.engine_options,
    )


def run_overhead(args: argparse.Namespace, chosen: Settings) -> int:
    """Compare throughput with tiers in which nothing is found, and without them."""
    from forge.bench.kv_overhead import main

    rounds = parse_positive(chosen, "rounds")
    assert rounds is not None, "it has a default"
    return main(chosen.values["model"], chosen.values["json"], rounds, chosen.engine_options)


def run_memory(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure the bytes that keys and values of a sequence hold, by kind of cache."""
    shapes, device = chosen.values["shapes"].split(","), chosen.values["device"]
    # Before torch is imported, which takes seconds.
    for name in shapes:
        if name not in SHAPES:
            raise InvalidConfig("shapes", f"there is no shape {name!r}", f"Use {', '.join(SHAPES)}")
    if device not in DEVICES:
        raise InvalidConfig("device", f"{device!r} is not known", f"Use {' or '.join(DEVICES)}")
    with refuse_missing_packages("shapes", SHAPES_NEED):
        from forge.bench.kv_memory import main

    return main(shapes, device, chosen.values["json"])


def run_moves(args: argparse.Namespace, chosen: Settings) -> int:
    """Measure moves of blocks between a GPU and host memory, against one plain copy."""
    with refuse_missing_packages("shapes", SHAPES_NEED):
        from forge.bench.kv_moves import main

    num_blocks = parse_positive(chosen, "num_blocks")
    assert num_blocks is not None, "it has a default"
    values = chosen.values
    return main(values["shapes"].split(","), num_blocks, values["json"])


def add_kv_parts(benches: Any) -> None:
    """Add `kv` with its parts to the subparsers of `forge bench`."""
    text = "Measure what KV tiers and paged memory gain and cost."
    parser: Parser = benches.add_parser("kv", help=text, description=text, allow_abbrev=False)
    add = partial(add_benchmark, parser.add_subparsers(dest="part", metavar="PART", required=True))
    add("returning", run_returning, MODEL, *RETURNING_OPTIONS, *BENCH_ENGINE_OPTIONS)
    rounds = define_option("rounds", int, 1, "times that off, on, on, off are run")
    add("overhead", run_overhead, MODEL, rounds, *BENCH_ENGINE_OPTIONS)
    device = define_option("device", str, "cpu", "cpu or cuda", "NAME")
    add("memory", run_memory, None, SHAPES_OPTION, device)
    blocks = define_option("num_blocks", int, 4096, "blocks of the device's pool")
    shapes = SHAPES_OPTION._replace(default="qwen3-4b,qwen3-0.6b")
    add("moves", run_moves, None, shapes, blocks)
