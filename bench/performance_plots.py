"""Pictures of speed: closed loops by streams, and forge and vLLM next to each other.

Owns docs/sweep.png and docs/speed.png. Figures are those of bench/results, read by
bench/performance_tables.py.

    levels of each closed loop ─► a row of panels: TTFT, ITL, tok/s     docs/sweep.png
    cells of forge and vLLM    ─► throughput by streams, TTFT by length docs/speed.png
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.performance_tables import (
    THROUGHPUT,
    TTFT,
    cells_by_shape,
    engine_columns,
    loops,
)
from forge.bench.table_format import NAMES, OURS, THEIRS, Result, device, has_both_engines
from forge.errors import InvalidConfig

PICTURE = "h200-third"
"""The run in docs/speed.png: the newest of forge.bench.peers with every cell of every shape."""

LINE_STYLES = {OURS: "C1s-", THEIRS: "C0o--"}
PANELS = (
    ("ttft_p50", "ms to the first token, median"),
    ("itl_p50", "ms between tokens, median"),
    ("tok_s", "output tokens a second"),
)
"""Figures of each level in the plot of closed loops, with the labels of their axes."""

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
    if PICTURE in results:
        figures[folder / "speed.png"] = draw_summary(results[PICTURE])
    folder.mkdir(parents=True, exist_ok=True)
    for path, figure in figures.items():
        figure.savefig(path, dpi=100)
    return list(figures)
