"""Tables of traffic cells: forge and vLLM next to each other, for pages.

Owns the rows of a joined record of forge.bench.real_traffic. Formats are in bench/table_format.py.

    figures: cells ─► (cell, figure) ─► | 64 streams, top-p 0.95, tok/s | vLLM | forge | ratio |
                                        docs/Performance.md   median, and min to max of the rounds
                                        README.md             some rows, medians alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.bench.table_format import (
    NAMES,
    OURS,
    RATIO,
    THEIRS,
    Result,
    format_table,
    format_value,
    provenance,
    ratio,
    speed,
)

FIGURES: Mapping[str, str] = {
    "tok_s": "tok/s",
    "ttft_p50": "TTFT p50, ms",
    "ttft_p99": "TTFT p99, ms",
    "itl_p50": "ITL p50, ms",
    "itl_p99": "ITL p99, ms",
}
"""Figures of a cell that are compared, with their labels. Offline cells have the first alone."""

SUMMARY_ROWS = (
    *(("greedy1", "tok_s"), ("greedy64", "tok_s"), ("top_p64", "tok_s")),
    *(("top_k_top_p256", "tok_s"), ("mixed_params256", "tok_s"), ("logprobs64", "tok_s")),
    *(("chat300_top_p", "tok_s"), ("served25", "ttft_p50"), ("served25", "itl_p50")),
)
"""(cell, figure) of the rows of README.md."""

Entry = Mapping[str, Any]
RowKey = tuple[str, str]


def entries_by_shape(result: Result) -> dict[str, dict[RowKey, dict[str, Entry]]]:
    """Return shape -> (cell, figure) -> engine -> entry, in the order of the record."""
    shapes: dict[str, dict[RowKey, dict[str, Entry]]] = {}
    for entry in result["figures"]["cells"]:
        rows = shapes.setdefault(entry["shape"], {})
        for figure in FIGURES:
            if figure in entry["figures"]:
                rows.setdefault((entry["cell"], figure), {})[entry["engine"]] = entry
    return shapes


def median(entry: Entry | None, figure: str) -> float | None:
    """Return the median of a figure, or None without an entry."""
    return None if entry is None else entry["figures"][figure]["median"]


def ratios(result: Result) -> dict[str, dict[str, dict[str, float]]]:
    """Return shape -> cell -> figure -> how many times as fast as vLLM forge is."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape, rows in entries_by_shape(result).items():
        for (cell, figure), of in rows.items():
            value = ratio(figure, median(of.get(OURS), figure), median(of.get(THEIRS), figure))
            if value is not None:
                found.setdefault(shape, {}).setdefault(cell, {})[figure] = round(value, 4)
    return found


def label(of: Mapping[str, Entry], figure: str) -> str:
    """Return the name of a row: the cell's label and the unit."""
    entry = next(iter(of.values()))
    return f"{entry['label']}, {FIGURES[figure]}"


def format_spread(entry: Entry | None, figure: str) -> str:
    """Return the median with the least and the greatest round; a dash without an entry.

    One round has no spread.
    """
    if entry is None:
        return "-"
    spread = entry["figures"][figure]
    if entry["rounds"] == 1:
        return format_value(spread["median"])
    low, high = format_value(spread["min"]), format_value(spread["max"])
    return f"{format_value(spread['median'])} ({low} to {high})"


def shape_table(rows: Mapping[RowKey, Mapping[str, Entry]]) -> list[str]:
    """Return the table of one shape: a row for each figure of each cell."""
    lines = []
    for (_, figure), of in rows.items():
        ours, theirs = of.get(OURS), of.get(THEIRS)
        ratio_text = speed(figure, median(ours, figure), median(theirs, figure))
        spreads = [format_spread(each, figure) for each in (theirs, ours)]
        lines.append([label(of, figure), *spreads, ratio_text])
    return format_table(["", NAMES[THEIRS], NAMES[OURS], RATIO], lines)


def traffic_section(name: str, result: Result) -> list[str]:
    """Return the tables of a run, one for each shape, after its name and provenance."""
    lines = [f"### {name}", "", provenance(name, result)]
    for shape, rows in entries_by_shape(result).items():
        lines += ["", f"**{shape}**", "", *shape_table(rows)]
    return lines


def traffic_summary(
    name: str, result: Result, row_keys: Sequence[RowKey] = SUMMARY_ROWS
) -> list[str]:
    """Return one table of these rows, with columns for each shape, and the provenance."""
    by_shape = entries_by_shape(result)
    head = [f"{shape}: {column}" for shape in by_shape for column in ("vLLM", "forge", "ratio")]
    lines = []
    for cell, figure in row_keys:
        entries = [rows.get((cell, figure), {}) for rows in by_shape.values()]
        found = next((of for of in entries if of), None)
        if found is None:
            continue
        texts = [label(found, figure)]
        for of in entries:
            ours, theirs = median(of.get(OURS), figure), median(of.get(THEIRS), figure)
            texts += [format_value(theirs), format_value(ours), speed(figure, ours, theirs)]
        lines.append(texts)
    return [*format_table(["", *head], lines), "", provenance(name, result)]
