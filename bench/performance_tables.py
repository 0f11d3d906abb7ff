"""What README.md says about speed, made from bench/results and from nothing else.

Owns the tables between the two markers and the plot in docs/. A figure that is not in a record of
one run on one machine cannot get onto the page, and one that changed cannot stay.

    bench/results/*.json ─► tables ─► <!-- bench:begin --> ... <!-- bench:end -->   in README.md
                         └► plot   ─► docs/sweep.png, a row of panels for each closed loop

An engine has a column, a figure and a line where the record has it, and nothing where it has not.

    python -m forge.bench.performance_tables           print the tables
    python -m forge.bench.performance_tables --write   put them into README.md
    python -m forge.bench.performance_tables --check   fail where README.md says something else
    python -m forge.bench.performance_tables --plot    draw docs/sweep.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, InvalidConfig

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
README = ROOT / "README.md"
PLOT = ROOT / "docs" / "sweep.png"

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NO_RESULTS = "No run beside another engine is recorded yet."

OURS, THEIRS = "forge", "vllm"
NAMES = {OURS: "forge", THEIRS: "vLLM"}
"""Engines that are not called as they are in results. A ratio is always between these two."""

RATIO = "as fast as vLLM"

LINE_STYLES = {OURS: "C1s-", THEIRS: "C0o--"}
PANELS = (
    ("ttft_p50", "ms to the first token, median"),
    ("itl_p50", "ms between tokens, median"),
    ("tok_s", "output tokens a second"),
)
"""What the plot shows of each level."""

PATHS = {"http": "over HTTP", "offline": "on the engine"}

Result = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """The records that compare engines, by name, in the order of their names."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: each for name, each in every.items() if each["benchmark"] == "peers"}


def label(key: str) -> str:
    """How a figure is called on the page."""
    name, _, _ = key.rpartition("_ms") if key.endswith("_ms") else key.rpartition("_tok_s")
    if key.startswith("ttft_prefix_"):
        prefix, _, new = name.removeprefix("ttft_prefix_").partition("_")
        return f"TTFT, {new} tokens behind a cached {prefix}, ms"
    if key.startswith("ttft_"):
        return f"TTFT, {int(name.removeprefix('ttft_')):,} tokens, ms"
    return f"{name}, tok/s"


def format_value(value: float | None) -> str:
    """A figure with as many digits as it is good for; a dash for one that is missing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def speed(key: str, ours: float | None, theirs: float | None) -> str:
    """How many times as fast forge is: throughput by theirs, their time by ours."""
    if not ours or not theirs:
        return "-"
    less_is_better = key.startswith(("ttft", "itl", "gap"))
    return f"{theirs / ours if less_is_better else ours / theirs:.2f}x"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown; the first column to the left, the others to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def is_compared(key: str) -> bool:
    """The figure is one that every engine has. A start is not: caches differ in what they hold."""
    return key.endswith("_tok_s") or key.startswith("ttft_")


def engine_columns(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The engines of the entries as columns: others as they come, then vLLM, then forge."""
    every = dict.fromkeys(each["engine"] for each in entries)
    return sorted(every, key=lambda engine: (engine in NAMES, engine == OURS))


def has_both_engines(engines: Sequence[str]) -> bool:
    """There is something to compare."""
    return OURS in engines and THEIRS in engines


def cell_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of one shape, a row each; a column for each engine."""
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
    return _format_table(["", *(NAMES.get(name, name) for name in engines), *ratio], rows)


def level_table(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """One closed loop, a row for each concurrency; every engine's figure in each cell."""
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
    return _format_table(
        [first, "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "tok/s", *ratio], rows
    )


def loops(record: Result) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The closed loops of one record: what each is called, and its levels."""
    levels = record["figures"]["levels"]
    shape_paths = dict.fromkeys((each["shape"], each["path"]) for each in levels)
    return [
        (
            f"{shape}, closed loop {PATHS[path]}",
            [each for each in levels if (each["shape"], each["path"]) == (shape, path)],
        )
        for shape, path in shape_paths
    ]


def device(record: Result) -> str:
    """What the record was measured on."""
    machine = record["machine"]
    count = Counter(gpu["name"] for gpu in machine.get("gpus", []))
    several = [f"{number} x {name}" if number > 1 else name for name, number in count.items()]
    return ", ".join(several) or machine["processor"]


def section(name: str, record: Result) -> list[str]:
    """All tables of one record, under a line that says where and with what it was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    lines = [
        f"{device(record)}; {versions}; commit {record['commit']}; `bench/results/{name}.json`. "
        "One run on one machine."
    ]
    figures = record["figures"]
    for shape in dict.fromkeys(each["shape"] for each in figures["cells"]):
        lines += ["", f"**{shape}**", ""]
        lines += cell_table([each for each in figures["cells"] if each["shape"] == shape])
    for title, levels in loops(record):
        lines += ["", f"**{title}**", "", *level_table(levels)]
    return lines


def tables(results: Mapping[str, Result]) -> str:
    """What stands between the markers."""
    parts = ["\n".join(section(name, record)) for name, record in results.items()]
    return "\n\n".join(parts) or NO_RESULTS


def replace_tables(page: str, text: str) -> str:
    """The page with the text between its markers. Raises InvalidConfig where it has none."""
    before, begin_mark, rest = page.partition(BEGIN)
    _, end_mark, after = rest.partition(END)
    if not begin_mark or not end_mark:
        raise InvalidConfig("README.md", "it has no place for the tables", f"Add {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


MIN_CURVE_POINTS = 4
"""Numbers of streams that make a curve. Fewer are in the tables alone."""


def draw_loops(results: Mapping[str, Result]) -> Any:
    """The figure: a row for each closed loop of each record, a panel for each kind of figure.

    Raises InvalidConfig where there is nothing to draw, or nothing to draw with.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "plot", f"{missing.name} is not installed", "pip install matplotlib"
        ) from None
    titled = [
        (f"{title}, {device(record)}", levels)
        for record in results.values()
        for title, levels in loops(record)
        if len({each["c"] for each in levels}) >= MIN_CURVE_POINTS
    ]
    if not titled:
        raise InvalidConfig(
            "plot", "no record has a closed loop", "Join a run of forge bench sweep or serve"
        )
    figure = Figure(figsize=(14, 3.8 * len(titled)), layout="constrained")
    rows = figure.subfigures(len(titled), 1, squeeze=False)
    for (row,), (title, levels) in zip(rows, titled, strict=True):
        row.suptitle(title)
        for axes, (key, about) in zip(row.subplots(1, len(PANELS)), PANELS, strict=True):
            draw_panel(axes, levels, key)
            axes.set(xlabel="streams", ylabel=about)
    return figure


def draw_panel(axes: Any, levels: Sequence[Mapping[str, Any]], key: str) -> None:
    """One kind of figure by streams is on the axes, a line for each engine that has it."""
    for engine in engine_columns(levels):
        points = sorted((each["c"], each[key]) for each in levels if each["engine"] == engine)
        streams, values = zip(*points, strict=True)
        axes.plot(streams, values, LINE_STYLES.get(engine, "C2^:"), label=NAMES.get(engine, engine))
    axes.set_xscale("log")
    axes.set_xticks(ticks := sorted({each["c"] for each in levels}), map(str, ticks))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def write_sweep_plot(results: Mapping[str, Result], path: Path) -> None:
    """The picture of the records' closed loops is at `path`. Raises InvalidConfig."""
    figure = draw_loops(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run_cli(words: Sequence[str] | None = None) -> int:
    """The command line of this module. 1 when the page differs from the results, or on refusal."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.performance_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_mutually_exclusive_group()
    for action in ("--write", "--check", "--plot"):
        actions.add_argument(action, dest="way", action="store_const", const=action)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--picture", type=Path, default=PLOT)
    args = parser.parse_args(words)
    try:
        results = read_results(args.results)
        if args.way == "--plot":
            write_sweep_plot(results, args.picture)
            print(args.picture)
            return 0
        text = tables(results)
        if args.way is None:
            print(text)
            return 0
        page = args.readme.read_text()
        wanted = replace_tables(page, text)
        if args.way == "--write":
            args.readme.write_text(wanted)
        elif page != wanted:
            raise InvalidConfig(
                args.readme.name,
                "its tables are not those of bench/results",
                "Run python -m forge.bench.performance_tables --write",
            )
    except (ForgeError, OSError) as refused:
        print(f"forge.bench.performance_tables: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
