"""The plot of a run of forge bench serve.

Owns the panels. Knows no server: it plots the levels that it receives, and writes one file.

    closed loop by streams       TTFT p50, p99 │ ITL p50, p99 │ completed, good; share rejected
    open loop by offered rate    TTFT p50, p99 │ ITL p50, p99 │ completed, good; share rejected

A row exists if the run has levels of that kind. matplotlib is imported when a plot is created.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import InvalidConfig

Level = Mapping[str, Any]

LOAD_KINDS = (
    ("c", "closed loop", "streams"),
    ("rate", "open loop", "requests a second, offered"),
)
"""(key that only its levels have, name, axis label) of each kind of load."""

BLUE, GREEN, VERMILION, GREY = "#0072B2", "#009E73", "#D55E00", "0.4"
"""Colours of Okabe and Ito. Markers and line styles differ as well."""

TIMES = (("ttft", "ms to the first token"), ("gap", "ms between events of a stream"))


def create_figure(**size: Any) -> Any:
    """Return an empty figure. Raises InvalidConfig where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "plot",
            f"{(missing.name or '').partition('.')[0]} is not installed",
            "pip install matplotlib",
        ) from None
    return Figure(**size)


def check_plot(path: str) -> None:
    """Raise InvalidConfig unless a plot can be written to `path`."""
    create_figure()
    if Path(path).suffix.lower() != ".png":
        raise InvalidConfig("plot", f"{path!r} does not end in .png", "Name a .png")


def draw_levels(levels: Sequence[Level]) -> Any:
    """Return the figure: a row of three panels for each kind of load."""
    kinds = [each for each in LOAD_KINDS if any(each[0] in level for level in levels)]
    picture = create_figure(figsize=(12, 4 * len(kinds)), layout="constrained")
    rows = picture.subfigures(len(kinds), 1, squeeze=False)
    for (part,), (key, name, axis_label) in zip(rows, kinds, strict=True):
        matching = sorted((level for level in levels if key in level), key=lambda level: level[key])
        part.suptitle(f"{matching[0]['engine']}, {matching[0]['shape']}, {name}")
        *time_axes, rate_axes = part.subplots(1, 3)
        for axes, (stem, unit) in zip(time_axes, TIMES, strict=True):
            plot_times(axes, matching, key, stem)
            axes.set(ylabel=unit)
        plot_rates(rate_axes, matching, key)
        for axes in (*time_axes, rate_axes):
            axes.set(xlabel=axis_label)
            set_ticks(axes, matching, key)
            axes.grid(alpha=0.3)
            # Above the panel: it covers no data there.
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    return picture


def plot_times(axes: Any, levels: Sequence[Level], key: str, stem: str) -> None:
    """Plot the median and the 99th percentile of one kind of time."""
    plot_line(axes, levels, key, f"{stem}_p50", BLUE, "o-", "p50")
    plot_line(axes, levels, key, f"{stem}_p99", VERMILION, "s--", "p99")
    if stem == "ttft":  # it grows with the queue, by orders of magnitude
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def plot_rates(axes: Any, levels: Sequence[Level], key: str) -> None:
    """Plot the outcomes of requests and, for an open loop, the offered rate."""
    fraction_axes = axes.twinx()
    plot_line(fraction_axes, levels, key, "rejected_share", VERMILION, "s--", "rejected")
    fraction_axes.set(ylabel="share rejected", ylim=(-0.02, 1.02))
    plot_line(axes, levels, key, "offered", GREY, ":", "offered")
    plot_line(axes, levels, key, "req_s", BLUE, "o-", "completed")
    plot_line(axes, levels, key, "goodput", GREEN, "^-", "good")
    axes.plot([], [], "s--", color=VERMILION, label="share rejected")
    axes.set(ylabel="requests a second")
    axes.set_ylim(bottom=0)


def plot_line(
    axes: Any, levels: Sequence[Level], key: str, value: str, colour: str, style: str, name: str
) -> None:
    """Plot a figure by load, if there are levels that have it."""
    points = [(level[key], level[value]) for level in levels if level.get(value) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, color=colour, label=name)


def set_ticks(axes: Any, levels: Sequence[Level], key: str) -> None:
    """Set the ticks: a logarithmic axis for streams, which double, and a linear one for rates."""
    values = [level[key] for level in levels]
    if key == "c":
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def write_serve_plot(path: str, levels: Sequence[Level]) -> None:
    """Write the plot of these levels to `path`, in 64 colours: a third of the bytes."""
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    draw_levels(levels).savefig(buffer, dpi=90)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)
