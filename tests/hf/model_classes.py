"""Runs every causal class of the installed transformers, tiny, and writes docs/Model-classes.md.

    python -m tests.hf.model_classes                      every class at its defaults, both dtypes
    python -m tests.hf.model_classes llama qwen3          some of them
    python -m tests.hf.model_classes --seeds 0 5     with random optional fields, five draws each
    python -m tests.hf.model_classes --write              every class; the page says what was found
    python -m tests.hf.model_classes --check [KIND ...]   fail where the page says something else

Each model has a process of its own with a limit of memory and of time, so a crash or a hang is one
line of the result. How a class is run_jobs: tests/hf/class_check.py. Exit status 1 when a token is
wrong, something crashes, or the page differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.hf.class_check import CLASSES, DTYPES, FAILURES, ClassOutcome, examine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "Model-classes.md"
BEGIN, END = "<!-- model-classes:begin -->", "<!-- model-classes:end -->"

QUICK = (
    *("llama", "phi3", "smollm3", "ministral3", "gemma2", "olmoe"),
    *("opt", "diffllama", "nemotron", "gpt_oss", "dots3_note_text"),
)
"""Model types that between them take every way through loading."""

WORKERS = 2
MEMORY_BYTES = 12 * 2**30
CPU_LIMIT_S = 120
WALL_LIMIT_S = 900
"""A hang that takes no processor time. Far above what a loaded machine needs."""

PRELOADED = (
    *("torch", "transformers.generation.utils", "transformers.models.llama.modeling_llama"),
    *("forge.models.hf.loading.model_loader", "forge.engine", "tests.hf.class_check"),
)
"""Modules that each process has from its start."""

ORDER = ("fused", "modules", "refused", "not constructible")
"""Order of the table's rows. Any other outcome is a failure, and comes first."""

Job = tuple[str, str, int | None]
"""Model type, dtype, and seed of the optional fields."""


def _child(job: Job, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # transformers warns of every tiny number
        os.dup2(nowhere, stream)
    torch.set_num_threads(1)
    answers.send(examine(*job))


def run_isolated(job: Job) -> ClassOutcome:
    """Return the job's outcome from a process of its own, also when the process dies."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, there))
    process.start()
    there.close()
    try:
        if here.poll(WALL_LIMIT_S):
            outcome: ClassOutcome = here.recv()
            process.join(WALL_LIMIT_S)
            return outcome
        detail = f"no outcome in {WALL_LIMIT_S} s"
    except EOFError:
        process.join(WALL_LIMIT_S)
        detail = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return ClassOutcome(*job, "CRASH", detail)


def run_jobs(jobs: Sequence[Job]) -> Iterator[ClassOutcome]:
    """Yield the outcome of each job, in order, WORKERS at a time."""
    os.environ["PYTHONPATH"] = str(PAGE.parent.parent)
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(run_isolated, jobs)


def summaries(outcomes: Iterable[ClassOutcome]) -> dict[str, str]:
    """Return one line for each model type: what happens in both dtypes, or in each."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for each in outcomes:
        line = f"{each.outcome}: {each.detail}" if each.detail else each.outcome
        found[each.kind][each.dtype] = line.replace("|", "/")  # a table has no room for it
    lines = {}
    for kind, by_dtype in found.items():
        first, *others = dict.fromkeys(by_dtype.values())
        parts = (f"{dtype} {line}" for dtype, line in by_dtype.items())
        lines[kind] = "; ".join(parts) if others else first
    return lines


def versions() -> str:
    """Return what the table was made with."""
    torch_version, _, _ = version("torch").partition("+")  # the rest says for which device
    return f"transformers {version('transformers')}, torch {torch_version}"


def table(lines: dict[str, str]) -> str:
    """Return what is between the page's markers: a row for each line, with its classes."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, line in sorted(lines.items()):
        rows[line][CLASSES[kind]].append(f"`{kind}`")
    counts = [
        f"{sum(line.startswith(start) for line in lines.values())} {start}" for start in ORDER
    ]
    out = [
        f"{versions()}: {len(lines)} model types, {', '.join(counts)}.",
        "",
        "| What happens | Classes and their model types |",
        "|---|---|",
    ]
    for line, classes in sorted(rows.items(), key=lambda row: _row_order(row[0])):
        names = [f"{name} ({', '.join(kinds)})" for name, kinds in classes.items()]
        out.append(f"| {line} | {', '.join(names)} |")
    return "\n".join(out)


def _row_order(line: str) -> tuple[int, str]:
    """Sort failures first, then the ways to run, then refusals."""
    rank = next((index for index, start in enumerate(ORDER) if line.startswith(start)), -1)
    return rank, line


def page_lines(page: str) -> dict[str, str]:
    """Return what the page says of each model type."""
    _, _, rest = page.partition(BEGIN)
    between, _, _ = rest.partition(END)
    rows = [row.strip("| ").split(" | ") for row in between.splitlines() if row.startswith("| ")]
    return {
        kind: line for line, *classes in rows for kind in re.findall(r"`([^`]+)`", str(classes))
    }


def with_table(page: str, text: str) -> str:
    """Return the page with the text between its markers."""
    before, begin_mark, rest = page.partition(BEGIN)
    _, end_mark, after = rest.partition(END)
    assert begin_mark and end_mark, f"{PAGE.name} has no {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def failures(outcomes: Iterable[ClassOutcome]) -> list[str]:
    """Return a line for each outcome that must not be."""
    return [
        f"{each.kind} {each.dtype} seed {each.seed}: {each.outcome}: {each.detail}"
        for each in outcomes
        if each.outcome in FAILURES
    ]


def differences(outcomes: Iterable[ClassOutcome], page: str) -> list[str]:
    """Return a line for each model type of which the page says something else."""
    lines = page_lines(page)
    return [
        f"{kind}: the page says {lines.get(kind)!r}, and it is {line!r}"
        for kind, line in summaries(outcomes).items()
        if lines.get(kind) != line
    ]


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hf.model_classes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model types; all of them")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "END"))
    parser.add_argument("--json", type=Path, help="append each outcome to this file")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--write", action="store_true")
    actions.add_argument("--check", action="store_true")
    args = parser.parse_args(words)
    os.nice(10)
    if args.seeds and (args.write or args.check):
        parser.error("the page is about defaults: it has no --seeds")
    kinds = args.kinds or (QUICK if args.check else sorted(CLASSES))
    seeds = range(*args.seeds) if args.seeds else [None]
    jobs = [(kind, dtype, seed) for seed, kind, dtype in product(seeds, kinds, DTYPES)]
    outcomes = []
    for each in run_jobs(jobs):
        outcomes.append(each)
        print(*each[:5], flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(each._asdict()) + "\n")
    if args.write:
        lines = page_lines(PAGE.read_text("utf-8")) | summaries(outcomes)
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table(lines)), "utf-8")
    wrong = failures(outcomes)
    if args.check:
        wrong += differences(outcomes, PAGE.read_text("utf-8"))
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(run_cli())
