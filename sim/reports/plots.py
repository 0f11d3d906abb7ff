"""Plots of a run and of a sweep.

Owns the panels. Knows no engine: it plots a RunHistory, RunMetrics or the outcomes of a sweep.
matplotlib is imported when a plot is created.

    a run     TTFT and ITL distributions   │ TTFT by length of prompt
              tokens a second by kind      │ blocks and queue over time
              timeline of each request     │ step durations
    a sweep   TTFT p99 │ ITL p99 │ tokens a second │ goodput        by the axis with the most values
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from forge.errors import InvalidConfig
from forge.sim.metrics import RunMetrics
from forge.sim.reports.run_history import DECODE, KINDS, PREFILL, RECOMPUTE, VERIFY, RunHistory
from forge.sim.units import NS_PER_S

ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    *("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
)
"""Colours of Okabe and Ito, which differ for readers with any colour vision."""

COLOURS = {PREFILL: ORANGE, DECODE: SKY, VERIFY: GREEN, RECOMPUTE: VERMILION}
HATCHES = {PREFILL: "", DECODE: "", VERIFY: "..", RECOMPUTE: "///"}
LINE_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = "os^Dv<>phX"
NUM_TIME_BINS = 200
MAX_TIMELINES = 400
"""Limit of the requests in a plot: lines of more would be thinner than a pixel."""

WIDTH_INCHES = 9.6
FONT = {"font.size": 11, "legend.fontsize": 10}
DOTS_PER_INCH = 110
NUM_PNG_COLOURS = 128

FILE_METADATA: dict[str, dict[str, None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Suffix of a plot -> metadata that would make equal plots differ, and is left out."""

SWEEP_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("ttft p99, ms", lambda f: f["ttft_ms"]["p99"]),
    ("itl p99, ms", lambda f: f["itl_ms"]["p99"]),
    ("output tokens a second", lambda f: f["tokens_per_s"]),
    ("good requests a second", lambda f: f["goodput_per_s"]),
)
"""(name, figure) of each panel of a sweep."""

AXIS_LABELS = {"rate": "requested rate, requests a second"}
"""Labels of the axes of a sweep whose names do not say what they count."""


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
    return Figure(layout="constrained", **size)


def check_plot_path(path: str) -> None:
    """Raise InvalidConfig unless a plot can be written to `path`."""
    create_figure()
    if Path(path).suffix.lower() not in FILE_METADATA:
        suffixes = ", ".join(FILE_METADATA)
        raise InvalidConfig(
            "plot", f"{path!r} does not end in one of {suffixes}", "Name a .png, say"
        )


def plot_run(path: str, history: RunHistory, metrics: RunMetrics, title: str) -> None:
    """Write the plot of a run to `path`."""
    with _font():
        picture = create_figure(figsize=(WIDTH_INCHES, 10))
        panels = picture.subplots(3, 2).flat
        draws = (
            _plot_latency_cdfs,
            _plot_ttft_by_length,
            _plot_throughput,
            _plot_occupancy,
            _plot_timelines,
            _plot_step_durations,
        )
        for axes, draw in zip(panels, draws, strict=True):
            draw(axes, history, metrics)
            axes.grid(alpha=0.3)
        picture.suptitle(title, fontsize=10, wrap=True)
        _save_figure(path, picture)


def plot_sweep(path: str, outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Write the plot of a sweep to `path`: a line for each combination of the other axes."""
    names = list(outcomes[0]["case"])
    values = {name: list(dict.fromkeys(o["case"][name] for o in outcomes)) for name in names}
    with _font():
        _save_figure(
            path,
            _create_policy_bars(outcomes)
            if names == ["policy"]
            else _create_sweep_lines(outcomes, names, values),
        )


def _font() -> AbstractContextManager[None]:
    """Return a context in which text is large enough for a page that shows the picture whole.

    Raises InvalidConfig where matplotlib is not installed.
    """
    create_figure()
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(FONT)
    return context


def _create_sweep_lines(
    outcomes: Sequence[Mapping[str, Any]], names: Sequence[str], values: Mapping[str, Any]
) -> Any:
    """Return a figure with a panel for each figure and a line for each combination."""
    x_axis = max(names, key=lambda name: (name != "policy", len(values[name])))
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for each in outcomes:
        label = ", ".join(_format_value(each["case"][n]) for n in names if n != x_axis)
        lines.setdefault(label, []).append(each)
    picture = create_figure(figsize=(WIDTH_INCHES, 7))
    for axes, (name, value) in zip(picture.subplots(2, 2).flat, SWEEP_PANELS, strict=True):
        for index, (label, found) in enumerate(lines.items()):
            x = [values[x_axis].index(each["case"][x_axis]) for each in found]
            y = [value(each["figures"]) for each in found]
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            axes.plot(x, y, MARKERS[index % len(MARKERS)] + "-", color=colour, label=label)
        axes.set_xticks(
            range(len(values[x_axis])), [_format_value(each) for each in values[x_axis]]
        )
        axes.set(xlabel=AXIS_LABELS.get(x_axis, x_axis.replace("_", " ")), ylabel=name)
        axes.grid(alpha=0.3)
        if name.startswith("ttft"):  # it grows with the queue, by orders of magnitude
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1e-9))
    if len(lines) > 1:
        handles, labels = axes.get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside upper center", ncols=min(4, len(lines)))
    return picture


def _create_policy_bars(outcomes: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure with policies below each other and a panel for each figure."""
    names = [each["case"]["policy"] for each in outcomes]
    picture = create_figure(figsize=(WIDTH_INCHES, 1.2 + 0.35 * len(names)))
    for axes, (name, value) in zip(picture.subplots(1, 4, sharey=True), SWEEP_PANELS, strict=True):
        bars = axes.barh(names, [value(each["figures"]) for each in outcomes], color=SKY)
        axes.bar_label(bars, fmt="%.4g", padding=2, fontsize=10)
        axes.set_xlim(0, 1.45 * max(axes.get_xlim()[1], 1e-9))
        axes.set_xlabel(name)
    axes.invert_yaxis()
    return picture


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# The panels of a run.


def _plot_latency_cdfs(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    for name, times, colour, style in (
        ("to the first token", metrics.ttft, BLUE, "-"),
        ("between tokens", metrics.itl, VERMILION, "--"),
    ):
        points = [(ns / 1e6, share) for ns, share in times.cdf() if ns > 0]
        if points:
            axes.step(
                *zip(*points, strict=True), where="post", color=colour, linestyle=style, label=name
            )
    axes.set_xscale("log")
    axes.set(xlabel="ms", ylabel="share of all", ylim=(0, 1.02))
    _add_legend(axes)


def _plot_ttft_by_length(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    timelines = [life for life in history.timelines.values() if life.first_token_ns >= 0]
    times = [(life.first_token_ns - life.arrival_ns) / 1e6 for life in timelines]
    lengths = [life.prompt_len for life in timelines]
    axes.plot(lengths, times, ".", color=BLUE, markersize=4, alpha=0.6)
    if times:
        axes.set_yscale("log")
    axes.set(xlabel="tokens of the prompt", ylabel="ms to the first token")


def _plot_throughput(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    """Plot the tokens that steps computed, by kind."""
    end_s = _end_s(history)
    width_s = end_s / NUM_TIME_BINS
    rates = {kind: [0.0] * NUM_TIME_BINS for kind in KINDS}
    for step in history.steps:
        index = min(NUM_TIME_BINS - 1, int(step.end_ns / NS_PER_S / width_s))
        for kind, count in zip(KINDS, step.tokens, strict=True):
            rates[kind][index] += count / width_s
    kinds = [kind for kind in KINDS if any(rates[kind])]
    if kinds:
        times = [(index + 0.5) * width_s for index in range(NUM_TIME_BINS)]
        areas = axes.stackplot(
            times,
            *(rates[kind] for kind in kinds),
            labels=kinds,
            colors=[COLOURS[kind] for kind in kinds],
        )
        for kind, area in zip(kinds, areas, strict=True):
            area.set(hatch=HATCHES[kind], edgecolor="white" if HATCHES[kind] else "none")
            area.set_linewidth(0)
    axes.set(xlabel="seconds", ylabel="tokens computed a second", xlim=(0, end_s))
    _add_legend(axes)


def _plot_occupancy(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    times = [step.commit_time_ns / NS_PER_S for step in history.steps]
    queue_axes = axes.twinx()
    waiting = [step.num_waiting for step in history.steps]
    (queue,) = queue_axes.plot(times, waiting, color="0.35", linestyle=":", label="waiting")
    queue_axes.set_ylabel("waiting requests (dotted)")
    queue_axes.set_ylim(0, 1.1 * max(1, *waiting) if waiting else 1)
    used = [100 * step.used_blocks / history.num_blocks for step in history.steps]
    (blocks,) = axes.plot(times, used, color=BLUE, linewidth=1, label="blocks")
    handles = [blocks, queue]
    preempted = [mark.at_ns / NS_PER_S for mark in history.events if mark.what == "preempted"]
    if preempted:
        name = f"{len(preempted)} preemptions"
        handles += axes.plot(preempted, [104.0] * len(preempted), "|", color=VERMILION, label=name)
    axes.set(xlabel="seconds", xlim=(0, _end_s(history)), ylim=(0, 110))
    axes.set_ylabel("% of blocks used (line)")
    _add_legend(axes, handles)


def _plot_timelines(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    """Plot each request from arrival to end, with its computed spans: grey parts are waits."""
    from matplotlib import patches

    shown = list(history.timelines.items())[:MAX_TIMELINES]
    row_of = {request_id: row for row, (request_id, _) in enumerate(shown)}
    end_s = _end_s(history)
    points = min(8.0, 150 / max(1, len(shown)))
    axes.hlines(
        list(row_of.values()),
        [timeline.arrival_ns / NS_PER_S for _, timeline in shown],
        [
            timeline.finish_ns / NS_PER_S if timeline.finish_ns >= 0 else end_s
            for _, timeline in shown
        ],
        color="0.6",
        linewidth=0.7 * points,
        label="waits",
    )
    for kind in KINDS:
        spans = [s for s in history.spans if s.kind == kind and s.request_id in row_of]
        if spans:
            axes.hlines(
                [row_of[span.request_id] for span in spans],
                [span.begin_ns / NS_PER_S for span in spans],
                [span.end_ns / NS_PER_S for span in spans],
                color=COLOURS[kind],
                linewidth=points,
                label=kind,
            )
    total = len(history.timelines)
    cut = f"the first {len(shown)} of {total}, " if len(shown) < total else ""
    axes.set(xlabel="seconds", ylabel=f"request, {cut}in order of arrival", xlim=(0, end_s))
    axes.invert_yaxis()
    _add_legend(
        axes,
        [
            patches.Patch(color=line.get_color()[0], label=line.get_label())
            for line in axes.collections
        ],
    )


def _plot_step_durations(axes: Any, history: RunHistory, metrics: RunMetrics) -> None:
    times = [step.begin_ns / NS_PER_S for step in history.steps]
    durations = [(step.end_ns - step.begin_ns) / 1e6 for step in history.steps]
    axes.plot(times, durations, ".", color=BLUE, markersize=3, alpha=0.6)
    axes.set(xlabel="seconds", ylabel="ms of a step", xlim=(0, _end_s(history)))
    axes.set_ylim(bottom=0)


def _end_s(history: RunHistory) -> float:
    """Return when the last step ends: all panels over time have one axis."""
    return max((step.end_ns for step in history.steps), default=NS_PER_S) / NS_PER_S


def _add_legend(axes: Any, handles: Sequence[Any] = ()) -> None:
    """Add a legend above the panel, where it covers no data."""
    handles = handles or axes.get_legend_handles_labels()[0]
    if handles:
        axes.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=len(handles),
            frameon=False,
            columnspacing=1.2,
            handlelength=1.5,
        )


def _save_figure(path: str, picture: Any) -> None:
    """Write the picture as the path ends. Nothing in the file says when it was made."""
    import matplotlib

    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        _save_png(path, picture)
        return
    with matplotlib.rc_context({"svg.hashsalt": "forge"}):  # ids by content, not by chance
        picture.savefig(path, format=suffix[1:], metadata=FILE_METADATA[suffix])


def _save_png(path: str, picture: Any) -> None:
    """Write the plot with NUM_PNG_COLOURS colours: a third of the bytes."""
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    drawing = io.BytesIO()
    picture.savefig(drawing, dpi=DOTS_PER_INCH)
    Image.open(drawing).convert("RGB").quantize(NUM_PNG_COLOURS).save(path, optimize=True)
