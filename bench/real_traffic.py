"""Traffic cells on forge or vLLM, through the public API of each, and a record of their ratios.

Owns the rounds of offline cells and the command line. The cells are data: bench/traffic_cells.py.

    cells.json ─► requests ─┬─► LLM.generate    of either engine     ┐
    trace file              └─► POST /v1/completions of its server   ├─► RESULT {"cell", "figures"}
                                                                     ┘   one line as soon as it is
                                                                         measured
    python -m forge.bench.real_traffic
        forge qwen3-4b /tmp/models --cells top_p64,chat300    LLM.generate of forge
        vllm qwen3-4b /tmp/models --cells top_p64,chat300     the same requests on vLLM
        forge qwen3-4b /tmp/models --cells served25           a server, started and stopped here
        join h200-traffic LOG...                              bench/results/h200-traffic.json

A round runs all requests of a cell. One round warms up, then each figure has the median, the least
and the greatest of `--rounds` rounds. Without `--cells` all offline cells run.

Always true: output lengths are those requested, or the run ends with an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from forge.bench.engine_driver import defaults, open_llm
from forge.bench.peer import read_vocab_size
from forge.bench.result_file import create_result
from forge.bench.served_traffic import measure_served, open_server
from forge.bench.shapes import model_folder
from forge.bench.traffic_cells import (
    Cell,
    Conversations,
    OpenLoop,
    Params,
    Traffic,
    create_params,
)
from forge.bench.traffic_record import UNKNOWN, write_record
from forge.bench.traffic_requests import (
    Conversation,
    RequestDraw,
    TrafficRequest,
    digest,
    read_trace,
)
from forge.bench.vllm_peer import VLLMPeer
from forge.bench.workload import PROMPT_ID_RANGE, Cells, print_result, prompt_id_range
from forge.engine_options import Options
from forge.errors import ForgeError, InvalidConfig, RequestFailed
from forge.llm import LLM
from forge.request import SamplingParams
from forge.sim.workloads.traces import SAMPLE_TRACE


class OfflineEngine(Protocol):
    """An engine that generates for prompts of ids, through its public API.

    start_s   seconds of its start, imports included
    """

    start_s: float

    def create_params(self, fields: Params, output: int) -> Any:
        """Return parameters with these fields for exactly `output` tokens."""
        ...

    def generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        """Return the output ids of each prompt. All prompts are sent at once."""
        ...


class ForgeEngine:
    """forge's LLM as an OfflineEngine."""

    def __init__(self, llm: LLM, start_s: float) -> None:
        self.start_s = start_s
        self._llm = llm

    def create_params(self, fields: Params, output: int) -> SamplingParams:
        """Return parameters with these fields for exactly `output` tokens."""
        return create_params(fields, output)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        """Return the output ids of each prompt. All prompts are sent at once."""
        return [each.token_ids for each in self._llm.generate(list(prompts), list(params))]


# Rounds of offline cells.


def run_requests(
    engine: OfflineEngine, requests: Sequence[TrafficRequest]
) -> tuple[float, list[list[int]]]:
    """Return the seconds of one call of generate, and the outputs of the requests.

    Raises RequestFailed for an output of another length.
    """
    prompts = [each.prompt for each in requests]
    params = [engine.create_params(each.params, each.output) for each in requests]
    start_s = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - start_s
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != request.output:
            raise RequestFailed(f"an output has {len(output)} tokens instead of {request.output}")
    return seconds, outputs


def run_conversations(
    engine: OfflineEngine, conversations: Sequence[Conversation]
) -> tuple[float, int]:
    """Run all conversations turn by turn. Returns the seconds in generate, and output tokens.

    The prompt of a turn is the whole context before it, answers included, and its new tokens.
    """
    contexts = [list(each.prefix) for each in conversations]
    total_s, tokens = 0.0, 0
    for turn in zip(*(each.turns for each in conversations), strict=True):
        for context, request in zip(contexts, turn, strict=True):
            context += request.prompt
        requests = [
            request._replace(prompt=list(context))
            for context, request in zip(contexts, turn, strict=True)
        ]
        seconds, answers = run_requests(engine, requests)
        for context, answer in zip(contexts, answers, strict=True):
            context += answer
        total_s, tokens = total_s + seconds, tokens + sum(map(len, answers))
    return total_s, tokens


Figures = Mapping[str, float | None]


def measure_offline(
    engine: OfflineEngine, cell: Cell, draw: RequestDraw, rounds: int
) -> tuple[str, list[Figures]]:
    """Return the digest of the first round, and the figures of each after a warm-up.

    tok_s   output tokens a second, from each call of generate to its return
    """
    work_digest, figures = "", list[Figures]()
    for index in range(rounds + 1):
        work: Sequence[TrafficRequest | Conversation]
        if isinstance(cell.load, Conversations):
            work = conversations = draw.conversations(cell, index)
            seconds, tokens = run_conversations(engine, conversations)
        else:
            work = requests = draw.batch(cell, index)
            seconds, outputs = run_requests(engine, requests)
            tokens = sum(map(len, outputs))
        if index == 1:
            work_digest = digest(work)
        if index:
            figures.append({"tok_s": round(tokens / seconds, 1), "seconds": round(seconds, 4)})
    return work_digest, figures


def spreads(rounds: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Return median, min and max of each figure that every round has."""
    found = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        numbers = [value for value in values if value is not None]
        if len(numbers) == len(values):
            middle = round(statistics.median(numbers), 4)
            found[name] = {"median": middle, "min": min(numbers), "max": max(numbers)}
    return found


# The command line.


@contextmanager
def open_offline(
    engine: str, model: str, root: str, options: Mapping[str, Any]
) -> Iterator[OfflineEngine]:
    """Open the engine on a model. Raises InvalidConfig."""
    if engine == "vllm":
        yield VLLMPeer(model, root, skip_tokenizer_init=False, **options)
        return
    folder = model_folder(model, root)
    chosen = cast(Options, {**defaults(folder, Cells.read()), **options})
    with open_llm(folder, chosen) as (llm, _, start_s):
        yield ForgeEngine(llm, start_s)


def is_embedded(model: str) -> bool:
    """Return True for a model that is part of forge and has no device."""
    return model.partition(":")[0] in ("hash", "tiny")


def id_range(model: str, vocab_size: int | None) -> tuple[int, int]:
    """Return the range of prompt ids for a folder, or for a vocabulary of this size."""
    if vocab_size is None and Path(model, "config.json").is_file():
        vocab_size = read_vocab_size(model)
    return prompt_id_range(vocab_size or PROMPT_ID_RANGE[1])


def check_cells(engine: str, cells: Sequence[Cell]) -> None:
    """Raise InvalidConfig for cells that one command cannot run on this engine."""
    served = [cell.name for cell in cells if isinstance(cell.load, OpenLoop)]
    if served and len(served) < len(cells):
        raise InvalidConfig(
            "cells",
            f"{', '.join(served)} need a server, and the others an engine without one",
            "Run them in two commands",
        )
    structured = [
        cell.name for cell in cells if any("structured_outputs" in each for each in cell.params)
    ]
    if engine == "vllm" and structured and not has_package("xgrammar"):
        raise InvalidConfig(
            "cells",
            f"{', '.join(structured)} need xgrammar, vLLM's backend of structured outputs, and it "
            "is not installed",
            "Install xgrammar, or leave them out",
        )


def has_package(name: str) -> bool:
    """Return True where a distribution is installed. A module of that name does not count."""
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def measure(
    engine: str,
    model: str,
    root: str,
    traffic: Traffic,
    trace: Path,
    extra: Mapping[str, Any],
    vocab_size: int | None,
    log: Path,
) -> None:
    """Run the cells and print a result for each as soon as it is measured.

    extra        options of the engine besides those of the cells
    vocab_size   of an embedded model, whose vocabulary no file has
    log          file of what a server prints
    Raises InvalidConfig and RequestFailed.
    """
    check_cells(engine, traffic.cells)
    folder = model_folder(model, root)
    options = {**traffic.options, **extra}
    if is_embedded(model):
        options.pop("gpu_memory_utilization", None)
    draw = RequestDraw(
        traffic._replace(options=options), read_trace(trace), id_range(folder, vocab_size)
    )

    def report(cell: Cell, start_s: float, work: str, figures: Sequence[Figures]) -> None:
        record = create_result("traffic", {})
        print_result(
            {
                "engine": engine,
                "shape": Path(model).name,
                "cell": cell.name,
                "label": cell.label,
                "workload": work,
                "trace": trace.name,
                "options": options,
                "rounds": len(figures),
                "start_s": start_s,
                "figures": spreads(figures),
                **{key: record[key] for key in ("machine", "versions", "commit")},
            }
        )

    if isinstance(traffic.cells[0].load, OpenLoop):
        with open_server(engine, folder, options, log) as (url, start_s):
            for cell in traffic.cells:
                first = draw.arrivals(cell, 1)
                figures = measure_served(url, cell, draw, traffic.rounds, first)
                report(cell, start_s, digest(first), figures)
        return
    with open_offline(engine, model, root, options) as offline:
        for cell in traffic.cells:
            report(cell, offline.start_s, *measure_offline(offline, cell, draw, traffic.rounds))


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of this module's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.real_traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for engine in ("forge", "vllm"):
        each = commands.add_parser(engine)
        each.add_argument("model", help="a shape such as qwen3-4b, or a checkpoint's folder")
        each.add_argument("root", help="folder for the files of shapes")
        each.add_argument("--cells", help="such as top_p64,chat300; default: all offline cells")
        each.add_argument("--rounds", type=int, help="measured rounds; default: that of the cells")
        each.add_argument("--seconds", type=int, help="of a round of served cells; default: theirs")
        each.add_argument("--trace", type=Path, default=SAMPLE_TRACE, help="default: a sample")
        each.add_argument("--options", type=json.loads, default={}, help="JSON for the engine")
        each.add_argument("--vocab-size", type=int, help="of an embedded model")
        each.add_argument("--log", type=Path, help="file for what a server prints")
    join_parser = commands.add_parser("join")
    join_parser.add_argument("name")
    join_parser.add_argument("logs", nargs="+")
    join_parser.add_argument(
        "--commit", default=UNKNOWN, help="commit of lines from a tree without git"
    )
    return parser


def select_cells(
    traffic: Traffic, chosen: str | None, rounds: int | None, seconds: int | None = None
) -> Traffic:
    """Return the cells of a command line. Raises InvalidConfig.

    seconds   of a round of the served cells, which get a name and a label of their own; None: as
              the cells have it
    """
    for name, value in (("rounds", rounds), ("seconds", seconds)):
        if value is not None and value < 1:
            raise InvalidConfig(name, f"{value} is not a positive integer", "Give 1 or more")
    offline = [cell.name for cell in traffic.cells if not isinstance(cell.load, OpenLoop)]
    selected = traffic.select(offline if chosen is None else chosen.split(","))
    if seconds is not None:
        cells = tuple(with_seconds(cell, seconds) for cell in selected.cells)
        selected = selected._replace(cells=cells)
    return selected._replace(rounds=rounds or traffic.rounds)


def with_seconds(cell: Cell, seconds: int) -> Cell:
    """Return the cell with rounds of so many seconds. Raises InvalidConfig for offline cells."""
    if not isinstance(cell.load, OpenLoop):
        raise InvalidConfig("seconds", f"{cell.name} has no duration", "Leave it out")
    return cell._replace(
        name=f"{cell.name}_{seconds}s",
        label=f"{cell.label}, {seconds} s",
        load=cell.load._replace(seconds=float(seconds)),
    )


def run_cli(words: Sequence[str] | None = None, traffic: Traffic | None = None) -> int:
    """Run the command line of this module. Returns the exit status.

    traffic   cells instead of those of cells.json
    """
    args = create_parser().parse_args(words)
    try:
        if args.command == "join":
            print(write_record(args.name, args.logs, commit=args.commit))
            return 0
        selected = select_cells(traffic or Traffic.read(), args.cells, args.rounds, args.seconds)
        log = args.log or Path(tempfile.gettempdir(), f"{args.command}-server.log")
        measure(
            args.command,
            args.model,
            args.root,
            selected,
            args.trace,
            args.options,
            args.vocab_size,
            log,
        )
    except (ForgeError, OSError) as error:
        print(f"forge.bench.real_traffic: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
