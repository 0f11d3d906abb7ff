"""The tables and plots of speed on pages, made from bench/results and from nothing else.

Owns the text between the markers of two pages, and two pictures. A figure that is not in the result
file of one run on one machine cannot get onto a page, and one that changed cannot stay.

    bench/results/*.json ─┬─► <!-- bench:begin --> ... <!-- bench:end -->      docs/Performance.md
                          ├─► docs/sweep.png      a row of panels for each closed loop
         SUMMARY.json ────┼─► <!-- summary:begin --> ... <!-- summary:end -->  README.md
                          └─► docs/speed.png      forge and vLLM in one picture

An engine has a column, a figure and a line where the results have it, and nothing elsewhere.

    python -m forge.bench.performance_tables           print the tables of docs/Performance.md
    python -m forge.bench.performance_tables --write   put the tables into both pages
    python -m forge.bench.performance_tables --check   fail where a page differs from the results
    python -m forge.bench.performance_tables --plot    draw both pictures; needs matplotlib
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, InvalidConfig

ROOT = Path(__file__).resolve().parents[1]  # resolved: forge/bench is a link
RESULTS = ROOT / "bench" / "results"

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin -->", "<!-- summary:end -->"
NO_RESULTS = "No run of forge and another engine is recorded yet."

SUMMARY = "h200-third"
"""The newest run in which forge and vLLM have every cell of every shape."""

OURS, THEIRS = "forge", "vllm"
NAMES = {OURS: "forge", THEIRS: "vLLM"}
"""Names on pages of engines that results name otherwise. A ratio is always between these two."""

RATIO = "as fast as vLLM"

LINE_STYLES = {OURS: "C1s-", THEIRS: "C0o--"}
PANELS = (
    ("ttft_p50", "ms to the first token, median"),
    ("itl_p50", "ms between tokens, median"),
    ("tok_s", "output tokens a second"),
)
"""Figures of each level in the plot of closed loops, with the labels of their axes."""

PATHS = {"http": "over HTTP", "offline": "on the engine"}

THROUGHPUT = re.compile(r"c(\d+)_tok_s")
MIXED = re.compile(r"mixed(\d+)_tok_s")
TTFT = re.compile(r"ttft_(\d+)_ms")

Result = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the results that compare engines by name, in the order of their names."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in results.items() if result["benchmark"] == "peers"}


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


def format_value(value: float | None) -> str:
    """Format a figure with three digits, or all before the point; a dash if it is missing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def speed(key: str, ours: float | None, theirs: float | None) -> str:
    """Return how many times as fast forge is: ours / theirs for rates, theirs / ours for times."""
    if not ours or not theirs:
        return "-"
    less_is_better = key.startswith(("ttft", "itl", "gap"))
    return f"{theirs / ours if less_is_better else ours / theirs:.2f}x"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, the first column aligned left and the others right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def is_compared(key: str) -> bool:
    """Return True for throughput and TTFT. Starts depend on what compile caches hold."""
    return key.endswith("_tok_s") or key.startswith("ttft_")


def engine_columns(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the engines of the entries in the order of columns: vLLM and forge are last."""
    engines = dict.fromkeys(each["engine"] for each in entries)
    return sorted(engines, key=lambda engine: (engine in NAMES, engine == OURS))


def has_both_engines(engines: Sequence[str]) -> bool:
    """Return True if forge and vLLM are among the engines."""
    return OURS in engines and THEIRS in engines


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
    return _format_table(["", *(NAMES.get(name, name) for name in engines), *ratio], rows)


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
    return _format_table(
        [first, "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "tok/s", *ratio], rows
    )


def loops(result: Result) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return title and levels of each closed loop of a run."""
    levels = result["figures"]["levels"]
    shape_paths = dict.fromkeys((each["shape"], each["path"]) for each in levels)
    return [
        (
            f"{shape}, closed loop {PATHS[path]}",
            [each for each in levels if (each["shape"], each["path"]) == (shape, path)],
        )
        for shape, path in shape_paths
    ]


def device(result: Result) -> str:
    """Return the names of the GPUs of a run, or of the processor."""
    machine = result["machine"]
    count = Counter(gpu["name"] for gpu in machine.get("gpus", []))
    several = [f"{number} x {name}" if number > 1 else name for name, number in count.items()]
    return ", ".join(several) or machine["processor"]


def provenance(name: str, result: Result) -> str:
    """Return the line that says where, with what and at which commit a run was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return (
        f"{device(result)}; {versions}; commit {result['commit']}; `bench/results/{name}.json`. "
        "One run on one machine."
    )


def cells_by_shape(result: Result) -> dict[str, list[Mapping[str, Any]]]:
    """Return the entries of each shape, one for each engine."""
    by_shape: dict[str, list[Mapping[str, Any]]] = {}
    for entry in result["figures"]["cells"]:
        by_shape.setdefault(entry["shape"], []).append(entry)
    return by_shape


def section(name: str, result: Result) -> list[str]:
    """Return all tables of one run, under its name and its provenance."""
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


def summary(name: str, result: Result) -> str:
    """Return one table of a run, forge and vLLM in columns for each shape, and its provenance."""
    by_shape = {
        shape: {entry["engine"]: entry for entry in entries}
        for shape, entries in cells_by_shape(result).items()
        if has_both_engines([entry["engine"] for entry in entries])
    }
    head = [f"{shape}: {column}" for shape in by_shape for column in ("vLLM", "forge", "ratio")]
    keys = dict.fromkeys(key for of in by_shape.values() for key in of[OURS] if is_compared(key))
    rows = []
    for key in keys:
        cells = [label(key)]
        for of in by_shape.values():
            ours, theirs = of[OURS].get(key), of[THEIRS].get(key)
            cells += [format_value(theirs), format_value(ours), speed(key, ours, theirs)]
        rows.append(cells)
    return "\n".join([*_format_table(["", *head], rows), "", provenance(name, result)])


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
    short = summary(SUMMARY, results[SUMMARY]) if SUMMARY in results else NO_RESULTS
    return {
        readme: replace_between(readme.read_text(), SUMMARY_BEGIN, SUMMARY_END, short),
        performance: replace_between(performance.read_text(), BEGIN, END, tables(results)),
    }


MIN_CURVE_POINTS = 4
"""Numbers of streams that make a curve. Shorter closed loops are in the tables only."""


def create_figure(**size: Any) -> Any:
    """Return an empty matplotlib figure. Raises InvalidConfig without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            "plot", f"{error.name} is not installed", "pip install matplotlib"
        ) from None
    return Figure(**size)


def draw_loops(results: Mapping[str, Result]) -> Any:
    """Draw the closed loops: a row for each of them, a panel for each figure of PANELS.

    Raises InvalidConfig if there is none, or without matplotlib.
    """
    titled = [
        (f"{title}, {device(result)}", levels)
        for result in results.values()
        for title, levels in loops(result)
        if len({each["c"] for each in levels}) >= MIN_CURVE_POINTS
    ]
    if not titled:
        raise InvalidConfig(
            "plot", "no result has a closed loop", "Join a run of forge bench sweep or serve"
        )
    figure = create_figure(figsize=(14, 3.8 * len(titled)), layout="constrained")
    rows = figure.subfigures(len(titled), 1, squeeze=False)
    for (row,), (title, levels) in zip(rows, titled, strict=True):
        row.suptitle(title)
        for axes, (key, about) in zip(row.subplots(1, len(PANELS)), PANELS, strict=True):
            for engine in engine_columns(levels):
                points = [(each["c"], each[key]) for each in levels if each["engine"] == engine]
                draw_line(axes, engine, points)
            set_log_ticks(axes, {each["c"] for each in levels})
            axes.set(xlabel="streams", ylabel=about)
            axes.set_ylim(bottom=0)
    return figure


def draw_summary(result: Result) -> Any:
    """Draw throughput by streams and TTFT by prompt length, a row for each shape, both engines.

    Raises InvalidConfig if no shape has both engines, or without matplotlib.
    """
    shapes = {
        shape: entries
        for shape, entries in cells_by_shape(result).items()
        if has_both_engines([entry["engine"] for entry in entries])
    }
    if not shapes:
        raise InvalidConfig("plot", "no shape has forge and vLLM", "Join a run of both engines")
    figure = create_figure(figsize=(9.5, 3.3 * len(shapes)), layout="constrained")
    panels = (
        (THROUGHPUT, "streams", "output tokens a second"),
        (TTFT, "tokens of the prompt", "ms to the first token"),
    )
    rows = figure.subplots(len(shapes), len(panels), squeeze=False)
    for row, (shape, entries) in zip(rows, shapes.items(), strict=True):
        for axes, (pattern, xlabel, ylabel) in zip(row, panels, strict=True):
            by_engine = {entry["engine"]: points_of(entry, pattern) for entry in entries}
            for engine in (THEIRS, OURS):
                draw_line(axes, engine, by_engine[engine])
            annotate_ratios(axes, by_engine[OURS], by_engine[THEIRS], pattern is TTFT)
            set_log_ticks(axes, {x for x, _ in by_engine[OURS]})
            axes.set(title=shape, xlabel=xlabel, ylabel=ylabel)
            set_log_values(axes)
    figure.supxlabel(f"{device(result)}, one run, commit {result['commit']}", fontsize="small")
    return figure


def points_of(entry: Mapping[str, Any], pattern: re.Pattern[str]) -> list[tuple[int, float]]:
    """Return (number in the key, figure) for each figure of an entry that the pattern matches."""
    return [(int(match[1]), entry[key]) for key in entry if (match := pattern.fullmatch(key))]


def draw_line(axes: Any, engine: str, points: Sequence[tuple[int, float]]) -> None:
    """Draw one engine's points in the order of x."""
    xs, values = zip(*sorted(points), strict=True)
    axes.plot(xs, values, LINE_STYLES.get(engine, "C2^:"), label=NAMES.get(engine, engine))
    axes.grid(alpha=0.3)
    axes.legend()


def annotate_ratios(
    axes: Any,
    ours: Sequence[tuple[int, float]],
    theirs: Sequence[tuple[int, float]],
    less_is_better: bool,
) -> None:
    """Write at each of forge's points how many times as fast as vLLM it is."""
    other = dict(theirs)
    for x, value in ours:
        ratio = other[x] / value if less_is_better else value / other[x]
        offset = (0, -15) if less_is_better else (0, 8)
        axes.annotate(f"{ratio:.2f}x", (x, value), offset, textcoords="offset points", ha="center")


def set_log_ticks(axes: Any, ticks: Iterable[int]) -> None:
    """Make the x axis logarithmic, with a tick at each measured value."""
    axes.set_xscale("log")
    axes.set_xticks(values := sorted(ticks), map(str, values))
    axes.minorticks_off()
    axes.margins(x=0.12)


def set_log_values(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.2)


def write_plots(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write the pictures into the folder and return their paths. Raises InvalidConfig."""
    figures = {folder / "sweep.png": draw_loops(results)}
    if SUMMARY in results:
        figures[folder / "speed.png"] = draw_summary(results[SUMMARY])
    folder.mkdir(parents=True, exist_ok=True)
    for path, figure in figures.items():
        figure.savefig(path, dpi=100)
    return list(figures)


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
