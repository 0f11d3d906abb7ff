"""Pictures of a run and of a sweep.

Owns the panels. Knows no engine: it draws what a trail, measures or outcomes hold. matplotlib is
loaded when a picture is asked for.

    a run     TTFT and ITL, their distribution │ TTFT by length of prompt │ tokens a second by kind
              blocks and the line over time    │ what each request had    │ how long steps took
    a sweep   TTFT p99 │ ITL p99 │ tokens a second │ goodput        by the axis with the most values
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import InvalidConfig
from sim.measures import Measures
from sim.trail import AGAIN, DRAFTS, KINDS, PROMPT, TOKEN, Trail

COLOURS = {PROMPT: "C1", TOKEN: "C0", DRAFTS: "C2", AGAIN: "C3"}
MARKERS = "os^Dv<>phX"
BINS = 200
MOST_LIVES = 80
"""Requests whose lives are drawn: more would be thinner than a line."""

NANOSECONDS = 1e9
COLOURS_IN_FILE = 128

PICTURES: dict[str, dict[str, None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Endings of files that can be drawn, and what such a file does not say of its making."""

PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("ttft p99, ms", lambda f: f["ttft_ms"]["p99"]),
    ("itl p99, ms", lambda f: f["itl_ms"]["p99"]),
    ("output tokens a second", lambda f: f["tokens_per_s"]),
    ("good requests a second", lambda f: f["goodput_per_s"]),
)
"""Of a sweep: name and figure."""

UNITS = {"rate": "requests a second, asked"}
"""Axes of a sweep whose names do not say what they count."""


def figure(**size: Any) -> Any:
    """An empty figure. Raises InvalidConfig where there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "plot",
            f"{(missing.name or '').partition('.')[0]} is not installed",
            "pip install matplotlib",
        ) from None
    return Figure(layout="constrained", **size)


def check_plot(path: str) -> None:
    """A picture can be drawn at `path`. Raises InvalidConfig."""
    figure()
    if Path(path).suffix.lower() not in PICTURES:
        known = ", ".join(PICTURES)
        raise InvalidConfig("plot", f"{path!r} does not end in one of {known}", "Name a .png, say")


def write_run(path: str, trail: Trail, measures: Measures, title: str) -> None:
    """The picture of a run is at `path`."""
    picture = figure(figsize=(12, 6.4))
    panels = picture.subplots(2, 3).flat
    draws = (_distributions, _by_length, _composition, _occupancy, _lives, _durations)
    for axes, draw in zip(panels, draws, strict=True):
        draw(axes, trail, measures)
        axes.grid(alpha=0.3)
    picture.suptitle(title, fontsize=9)
    _save(path, picture)


def write_sweep(path: str, outcomes: Sequence[Mapping[str, Any]]) -> None:
    """The picture of a sweep is at `path`: a line for each combination of the other axes."""
    names = list(outcomes[0]["case"])
    values = {name: list(dict.fromkeys(o["case"][name] for o in outcomes)) for name in names}
    if names == ["policy"]:
        _save(path, _bars(outcomes))
        return
    across = max(names, key=lambda name: (name != "policy", len(values[name])))
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for each in outcomes:
        label = ", ".join(_named(each["case"][n]) for n in names if n != across)
        lines.setdefault(label, []).append(each)
    picture = figure(figsize=(12, 6.4))
    for axes, (name, value) in zip(picture.subplots(2, 2).flat, PANELS, strict=True):
        for place, (label, found) in enumerate(lines.items()):
            x = [values[across].index(each["case"][across]) for each in found]
            y = [value(each["figures"]) for each in found]
            axes.plot(x, y, MARKERS[place % len(MARKERS)] + "-", label=label)
        axes.set_xticks(range(len(values[across])), [_named(each) for each in values[across]])
        axes.set(xlabel=UNITS.get(across, across.replace("_", " ")), ylabel=name)
        axes.grid(alpha=0.3)
        if name.startswith("ttft"):  # it grows with the line, by orders of magnitude
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1e-9))
    if len(lines) > 1:
        handles, labels = axes.get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside right center", fontsize=8)
    _save(path, picture)


def _bars(outcomes: Sequence[Mapping[str, Any]]) -> Any:
    """Policies below each other, a panel for each figure."""
    names = [each["case"]["policy"] for each in outcomes]
    picture = figure(figsize=(12, 1.2 + 0.3 * len(names)))
    for axes, (name, value) in zip(picture.subplots(1, 4, sharey=True), PANELS, strict=True):
        bars = axes.barh(names, [value(each["figures"]) for each in outcomes], color="C0")
        axes.bar_label(bars, fmt="%.4g", padding=2, fontsize=8)
        axes.set_xlim(0, 1.25 * max(axes.get_xlim()[1], 1e-9))
        axes.set_xlabel(name)
    axes.invert_yaxis()
    return picture


def _named(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# The panels of a run.


def _distributions(axes: Any, trail: Trail, measures: Measures) -> None:
    for name, times in (
        ("to the first token", measures.first_token),
        ("between tokens", measures.between_tokens),
    ):
        points = [(ns / 1e6, share) for ns, share in times.distribution() if ns > 0]
        if points:
            axes.step(*zip(*points, strict=True), where="post", label=name)
    axes.set_xscale("log")
    axes.set(xlabel="ms", ylabel="share of all", ylim=(0, 1.02))
    _legend(axes)


def _by_length(axes: Any, trail: Trail, measures: Measures) -> None:
    served = [life for life in trail.lives.values() if life.first_ns >= 0]
    times = [(life.first_ns - life.arrived_ns) / 1e6 for life in served]
    axes.plot([life.prompt for life in served], times, ".", markersize=3, alpha=0.6)
    if times:
        axes.set_yscale("log")
    axes.set(xlabel="tokens of the prompt", ylabel="ms to the first token")


def _composition(axes: Any, trail: Trail, measures: Measures) -> None:
    """Tokens that steps computed, by kind."""
    end_s = max((seen.end_ns for seen in trail.steps), default=1) / NANOSECONDS
    width_s = end_s / BINS
    rates = {kind: [0.0] * BINS for kind in KINDS}
    for seen in trail.steps:
        place = min(BINS - 1, int(seen.end_ns / NANOSECONDS / width_s))
        for kind, count in zip(KINDS, seen.tokens, strict=True):
            rates[kind][place] += count / width_s
    there = [kind for kind in KINDS if any(rates[kind])]
    if there:
        times = [(place + 0.5) * width_s for place in range(BINS)]
        colours = [COLOURS[kind] for kind in there]
        axes.stackplot(times, *(rates[kind] for kind in there), labels=there, colors=colours)
    axes.set(xlabel="seconds", ylabel="tokens computed a second")
    _legend(axes)


def _occupancy(axes: Any, trail: Trail, measures: Measures) -> None:
    times = [seen.told_ns / NANOSECONDS for seen in trail.steps]
    line = axes.twinx()
    line.plot(times, [seen.num_waiting for seen in trail.steps], "C7", linewidth=0.8)
    line.set_ylabel("requests in line", color="C7")
    line.set_ylim(bottom=0)
    used = [100 * seen.used_blocks / trail.num_blocks for seen in trail.steps]
    axes.plot(times, used, "C4", linewidth=0.8)
    preempted = [mark.at_ns / NANOSECONDS for mark in trail.marks if mark.what == "preempted"]
    axes.plot(preempted, [103.0] * len(preempted), "C3|", label=f"{len(preempted)} preemptions")
    axes.set(xlabel="seconds", ylim=(0, 106))
    axes.set_ylabel("% of blocks held", color="C4")
    if preempted:
        _legend(axes)


def _lives(axes: Any, trail: Trail, measures: Measures) -> None:
    """From arrival to end, and what was computed for each: what is bare has waited."""
    places = {request_id: place for place, request_id in enumerate(trail.lives)}
    ends = [seen.end_ns for seen in trail.steps]
    last_ns = 0
    for request_id, life in list(trail.lives.items())[:MOST_LIVES]:
        end_ns = life.ended_ns if life.ended_ns >= 0 else ends[-1] if ends else life.arrived_ns
        last_ns = max(last_ns, end_ns)
        width = (end_ns - life.arrived_ns) / NANOSECONDS
        axes.barh(places[request_id], width, 0.3, life.arrived_ns / NANOSECONDS, color="0.8")
    for kind in KINDS:
        spans = [s for s in trail.spans if s.kind == kind and places[s.request_id] < MOST_LIVES]
        if spans:
            axes.barh(
                [places[span.request_id] for span in spans],
                [(span.end_ns - span.begin_ns) / NANOSECONDS for span in spans],
                0.8,
                [span.begin_ns / NANOSECONDS for span in spans],
                color=COLOURS[kind],
                label=kind,
            )
    axes.set(xlabel="seconds", ylabel="request, in order of arrival")
    axes.set_xlim(0, max(last_ns, 1) / NANOSECONDS)
    axes.invert_yaxis()
    _legend(axes)


def _durations(axes: Any, trail: Trail, measures: Measures) -> None:
    times = [seen.begin_ns / NANOSECONDS for seen in trail.steps]
    durations = [(seen.end_ns - seen.begin_ns) / 1e6 for seen in trail.steps]
    axes.plot(times, durations, ".", markersize=2, alpha=0.6)
    axes.set(xlabel="seconds", ylabel="ms of a step")
    axes.set_ylim(bottom=0)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _save(path: str, picture: Any) -> None:
    """Write the picture as the path ends. Nothing in the file says when it was made."""
    import matplotlib

    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        _save_png(path, picture)
        return
    with matplotlib.rc_context({"svg.hashsalt": "forge"}):  # ids by content, not by chance
        picture.savefig(path, format=suffix[1:], metadata=PICTURES[suffix])


def _save_png(path: str, picture: Any) -> None:
    """Write the picture in few colours: a third of the bytes."""
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    drawing = io.BytesIO()
    picture.savefig(drawing, dpi=80)
    Image.open(drawing).convert("RGB").quantize(COLOURS_IN_FILE).save(path, optimize=True)
