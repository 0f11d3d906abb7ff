"""Plot of returning prefixes: time to the first token by length and tier, and what a hit gains.

Owns the panels. Knows no engine: it plots the figures of a record.

    a row for each shape    TTFT of each tier by tokens of the prefix │ break-even: miss / load

    python -m forge.bench.kv_plot RESULT.json FILE.png

Lines of vLLM are dashed. Entries with an error have no point.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.kv_record import Entry, times_of
from forge.bench.performance_plots import create_figure, set_log_ticks, set_log_values
from forge.bench.table_format import NAMES, OURS
from forge.errors import ForgeError, InvalidConfig

TIER_LABELS: Mapping[str, tuple[str, str]] = {
    "miss": ("computed", "C7o"),
    "device": ("on the device", "C2^"),
    "host": ("host memory", "C0s"),
    "file_cached": ("file, in the page cache", "C1D"),
    "file_cold": ("file, on storage", "C3v"),
}
"""Tier -> its label, and the colour and marker of its line."""


def check_plot(path: str) -> None:
    """Raise InvalidConfig unless a plot can be written to `path`."""
    create_figure()
    if Path(path).suffix.lower() != ".png":
        raise InvalidConfig("plot", f"{path!r} does not end in .png", "Name a .png")


def draw_returning(figures: Mapping[str, Any]) -> Any:
    """Return the picture: a row of two panels for each shape. Raises InvalidConfig without any."""
    times = times_of(figures["entries"])
    shapes = list(dict.fromkeys(shape for _, shape in times))
    if not shapes:
        raise InvalidConfig("plot", "no entry has a figure", "Measure again")
    picture = create_figure(figsize=(11, 4.2 * len(shapes)), layout="constrained")
    rows = picture.subplots(len(shapes), 2, squeeze=False)
    for (time_axes, gain_axes), shape in zip(rows, shapes, strict=True):
        lengths: set[int] = set()
        for (engine, name), tiers in times.items():
            if name == shape:
                lengths |= draw_tiers(time_axes, gain_axes, engine, tiers)
        for axes in (time_axes, gain_axes):
            set_log_ticks(axes, lengths)
            axes.set(title=shape, xlabel="tokens of the prefix")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        time_axes.set(ylabel="ms to the first token, median")
        set_log_values(time_axes)
        gain_axes.axhline(1.0, color="black", linewidth=0.8)
        gain_axes.set(ylabel="time of computing / time of a load")
        set_log_values(gain_axes)
        gain_axes.yaxis.set_major_formatter("{x:g}x")
    return picture


def draw_tiers(
    time_axes: Any, gain_axes: Any, engine: str, tiers: Mapping[str, Mapping[int, Entry]]
) -> set[int]:
    """Draw the lines of one engine and shape. Returns the lengths that have a point."""
    dashes = "-" if engine == OURS else "--"
    misses = tiers.get("miss", {})
    for tier, (text, style) in TIER_LABELS.items():
        points = sorted((n, each["ttft_ms"]) for n, each in tiers.get(tier, {}).items())
        if not points:
            continue
        label = f"{NAMES.get(engine, engine)}: {text}"
        time_axes.plot(*zip(*points, strict=True), style + dashes, label=label)
        gains = [(n, misses[n]["ttft_ms"] / value) for n, value in points if n in misses]
        if gains and tier not in ("miss", "device"):
            gain_axes.plot(*zip(*gains, strict=True), style + dashes, label=label)
    return {length for of in tiers.values() for length in of}


def write_plot(path: str, figures: Mapping[str, Any]) -> None:
    """Write the plot of a record's figures to `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw_returning(figures).savefig(path, dpi=100)


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.kv_plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", help="a result file of returning prefixes")
    parser.add_argument("picture", help="FILE.png")
    args = parser.parse_args(words)
    try:
        check_plot(args.picture)
        write_plot(args.picture, json.loads(Path(args.record).read_text())["figures"])
    except (ForgeError, OSError) as error:
        print(f"forge.bench.kv_plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
