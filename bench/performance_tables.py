"""The tables of speed on pages, made from bench/results and from nothing else.

Owns the text between the markers of two pages. Pictures: bench/performance_plots.py. A figure that
is not in the result file of one run on one machine cannot get onto a page, and one that changed
cannot stay.

    bench/results/*.json ─┬─► <!-- bench:begin --> ... <!-- bench:end -->      docs/Performance.md
                          └─► docs/sweep.png, docs/speed.png
         SUMMARY_ROWS ──────► <!-- summary:begin --> ... <!-- summary:end -->  README.md

An engine has a column, a figure and a line where the results have it, and nothing elsewhere.

    python -m forge.bench.performance_tables           print the tables of docs/Performance.md
    python -m forge.bench.performance_tables --write   put the tables into both pages
    python -m forge.bench.performance_tables --check   fail where a page differs from the results
    python -m forge.bench.performance_tables --plot    draw the pictures; needs matplotlib
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.table_format import (
    NAMES,
    OURS,
    RATIO,
    THEIRS,
    Result,
    format_table,
    format_value,
    has_both_engines,
    provenance,
    speed,
)
from forge.bench.traffic_tables import SUMMARY_ROWS, summary_table, traffic_section
from forge.errors import ForgeError, InvalidConfig

ROOT = Path(__file__).resolve().parents[1]  # resolved: forge/bench is a link
RESULTS = ROOT / "bench" / "results"

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin -->", "<!-- summary:end -->"
NO_RESULTS = "No run of forge and another engine is recorded yet."

BENCHMARKS = ("peers", "traffic")
"""Benchmarks whose results compare engines."""

PATHS = {"http": "over HTTP", "offline": "on the engine"}

THROUGHPUT = re.compile(r"c(\d+)_tok_s")
MIXED = re.compile(r"mixed(\d+)_tok_s")
TTFT = re.compile(r"ttft_(\d+)_ms")


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the results that compare engines by name, in the order of their names."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in results.items() if result["benchmark"] in BENCHMARKS}


def label(key: str) -> str:
    """Return the label of a figure: its unit last."""
    if match := TTFT.fullmatch(key):
        return f"TTFT, {int(match[1]):,} tokens, ms"
    if match := THROUGHPUT.fullmatch(key):
        streams = int(match[1])
        return f"{streams} stream{'s' * (streams > 1)}, tok/s"
    if match := MIXED.fullmatch(key):
        return f"{match[1]} streams of mixed lengths, tok/s"
    prefix, _, new = key.removeprefix("ttft_prefix_").removesuffix("_ms").partition("_")
    return f"TTFT, {new} tokens after a cached {prefix}, ms"


def is_compared(key: str) -> bool:
    """Return True for throughput and TTFT. Starts depend on what compile caches hold."""
    return key.endswith("_tok_s") or key.startswith("ttft_")


def engine_columns(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the engines of the entries in the order of columns: vLLM and forge are last."""
    engines = dict.fromkeys(each["engine"] for each in entries)
    return sorted(engines, key=lambda engine: (engine in NAMES, engine == OURS))


def cell_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of one shape: a row for each cell, a column for each engine."""
    of = {each["engine"]: each for each in entries}
    engines = engine_columns(entries)
    rows = []
    for key in dict.fromkeys(key for name in reversed(engines) for key in of[name]):
        if not is_compared(key):
            continue
        cells = [label(key), *(format_value(of[name].get(key)) for name in engines)]
        if has_both_engines(engines):
            cells.append(speed(key, of[OURS].get(key), of[THEIRS].get(key)))
        rows.append(cells)
    ratio = [RATIO] if has_both_engines(engines) else []
    return format_table(["", *(NAMES.get(name, name) for name in engines), *ratio], rows)


def level_table(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of one closed loop: a row for each concurrency, all engines in each cell."""
    at = {(each["engine"], each["c"]): each for each in levels}
    engines = engine_columns(levels)
    rows = []
    for streams in sorted({each["c"] for each in levels}):
        of = {name: at.get((name, streams), {}) for name in engines}
        cells = [str(streams)]
        for key in ("ttft_p50", "itl_p50", "itl_p99", "tok_s"):
            cells.append(" / ".join(format_value(of[name].get(key)) for name in engines))
        if has_both_engines(engines):
            cells.append(speed("tok_s", of[OURS].get("tok_s"), of[THEIRS].get("tok_s")))
        rows.append(cells)
    first = f"streams, {' / '.join(NAMES.get(name, name) for name in engines)}"
    ratio = [RATIO] if has_both_engines(engines) else []
    return format_table(
        [first, "TTFT p50, ms", "TPOT p50, ms", "TPOT p99, ms", "tok/s", *ratio], rows
    )


def loops(result: Result) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return title and levels of each closed loop of a run."""
    levels = result["figures"].get("levels", ())
    shape_paths = dict.fromkeys((each["shape"], each["path"]) for each in levels)
    return [
        (
            f"{shape}, closed loop {PATHS[path]}",
            [each for each in levels if (each["shape"], each["path"]) == (shape, path)],
        )
        for shape, path in shape_paths
    ]


def cells_by_shape(result: Result) -> dict[str, list[Mapping[str, Any]]]:
    """Return the entries of each shape, one for each engine."""
    by_shape: dict[str, list[Mapping[str, Any]]] = {}
    for entry in result["figures"]["cells"]:
        by_shape.setdefault(entry["shape"], []).append(entry)
    return by_shape


def section(name: str, result: Result) -> list[str]:
    """Return all tables of one run, under its name and its provenance."""
    if result["benchmark"] == "traffic":
        return traffic_section(name, result)
    lines = [f"### {name}", "", provenance(name, result)]
    for shape, entries in cells_by_shape(result).items():
        lines += ["", f"**{shape}**", "", *cell_table(entries)]
    for title, levels in loops(result):
        lines += ["", f"**{title}**", "", *level_table(levels)]
    return lines


def tables(results: Mapping[str, Result]) -> str:
    """Return the text between the markers of docs/Performance.md."""
    parts = ["\n".join(section(name, result)) for name, result in results.items()]
    return "\n\n".join(parts) or NO_RESULTS


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with the text between two markers. Raises InvalidConfig without them."""
    before, begin_mark, rest = page.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not begin_mark or not end_mark:
        raise InvalidConfig("page", "it has no markers for the tables", f"Add {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def updated_pages(root: Path, results: Mapping[str, Result]) -> dict[Path, str]:
    """Return the text that each page should have. Raises InvalidConfig without markers."""
    readme, performance = root / "README.md", root / "docs" / "Performance.md"
    short = "\n".join(summary_table(results, SUMMARY_ROWS)) or NO_RESULTS
    return {
        readme: replace_between(readme.read_text(), SUMMARY_BEGIN, SUMMARY_END, short),
        performance: replace_between(performance.read_text(), BEGIN, END, tables(results)),
    }


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 when a page differs from the results, or on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.performance_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_mutually_exclusive_group()
    for action in ("--write", "--check", "--plot"):
        actions.add_argument(action, dest="action", action="store_const", const=action)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    args = parser.parse_args(words)
    try:
        results = read_results(args.results)
        if args.action is None:
            print(tables(results))
        elif args.action == "--plot":
            # performance_plots draws what this module reads, and imports it.
            from forge.bench.performance_plots import write_plots

            for path in write_plots(results, args.root / "docs"):
                print(path)
        else:
            for path, text in updated_pages(args.root, results).items():
                if args.action == "--write":
                    path.write_text(text)
                elif path.read_text() != text:
                    raise InvalidConfig(
                        path.name,
                        "its tables differ from bench/results",
                        "Run python -m forge.bench.performance_tables --write",
                    )
    except (ForgeError, OSError) as error:
        print(f"forge.bench.performance_tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
