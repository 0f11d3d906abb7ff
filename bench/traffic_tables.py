"""Tables of traffic cells: forge and vLLM next to each other, for pages.

Owns the rows of a joined record of forge.bench.real_traffic. Formats are in bench/table_format.py.

    figures: cells ─► (cell, figure) ─► | 64 streams, top-p 0.95, tok/s | vLLM | forge | ratio |
                                        docs/Performance.md   every row of a record
                                        README.md             five rows of several records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    "itl_p50": "TPOT p50, ms",
    "itl_p99": "TPOT p99, ms",
    "gap_p50": "ITL p50, ms",
    "gap_p99": "ITL p99, ms",
}
"""Figures of a cell that are compared, with their labels. Offline cells have the first alone.

In a record `itl` is the mean time between the tokens of a request (TPOT), `gap` one wait (ITL).
"""


class SummaryRow(NamedTuple):
    """Row of the table in README.md: a figure of a cell in a record, for a shape."""

    record: str
    shape: str
    cell: str
    figure: str


SUMMARY_ROWS = (
    SummaryRow("h200-served-4b-30s", "qwen3-4b", "served25_30s", "ttft_p50"),
    SummaryRow("h200-served-4b-30s", "qwen3-4b", "served25_30s", "itl_p99"),
    SummaryRow("h200-served-4b-30s", "qwen3-4b", "served25_30s", "gap_p99"),
    SummaryRow("h200-offline-8b", "llama-3.1-8b", "greedy256", "tok_s"),
    SummaryRow("h200-offline-8b", "llama-3.1-8b", "chat300", "tok_s"),
    SummaryRow("h200-served-4b-30s", "qwen3-4b", "served40_30s", "gap_p50"),
)
"""The rows of README.md: a served load, a full batch, chat-like lengths, and a case for vLLM."""

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


def comparison(of: Mapping[str, Entry], figure: str) -> list[str]:
    """Return the cells of vLLM, of forge and of their ratio."""
    ours, theirs = of.get(OURS), of.get(THEIRS)
    spreads = [format_spread(each, figure) for each in (theirs, ours)]
    return [*spreads, speed(figure, median(ours, figure), median(theirs, figure))]


def shape_table(rows: Mapping[RowKey, Mapping[str, Entry]]) -> list[str]:
    """Return the table of one shape: a row for each figure of each cell."""
    lines = []
    for (_, figure), of in rows.items():
        lines.append([label(of, figure), *comparison(of, figure)])
    return format_table(["", NAMES[THEIRS], NAMES[OURS], RATIO], lines)


def traffic_section(name: str, result: Result) -> list[str]:
    """Return the tables of a run, one for each shape, after its name and provenance."""
    lines = [f"### {name}", "", provenance(name, result)]
    for shape, rows in entries_by_shape(result).items():
        lines += ["", f"**{shape}**", "", *shape_table(rows)]
    return lines


def summary_table(results: Mapping[str, Result], rows: Sequence[SummaryRow]) -> list[str]:
    """Return one table of rows of several records, and a line that names the records.

    Rows whose record is not among the results are left out. No row gives no lines.
    """
    lines = []
    names = dict.fromkeys(row.record for row in rows if row.record in results)
    for row in rows:
        if row.record not in results:
            continue
        of = entries_by_shape(results[row.record])[row.shape][row.cell, row.figure]
        lines.append([f"{row.shape}: {label(of, row.figure)}", *comparison(of, row.figure)])
    if not lines:
        return []
    sources = ", ".join(
        f"`bench/results/{name}.json` (commit {results[name]['commit']}, "
        f"vLLM {results[name]['versions'][THEIRS]})"
        for name in names
    )
    return [*format_table(["", NAMES[THEIRS], NAMES[OURS], RATIO], lines), "", f"From {sources}."]
