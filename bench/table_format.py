"""Formats of the tables of speed: figures, ratios, Markdown and where a run was measured.

Owns the text of single values. Knows no benchmark.

    figures of forge and vLLM ─► | 64 streams, tok/s | 11,957 | 13,525 | 1.13x |
    machine, versions, commit ─► NVIDIA H200; python 3.12.3, ...; commit 4879987; ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]

OURS, THEIRS = "forge", "vllm"
NAMES = {OURS: "forge", THEIRS: "vLLM"}
"""Names on pages of engines that results name otherwise. A ratio is always between these two."""

RATIO = "as fast as vLLM"


def format_value(value: float | None) -> str:
    """Format a figure with three digits, or all before the point; a dash if it is missing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def ratio(key: str, ours: float | None, theirs: float | None) -> float | None:
    """Return how many times as fast forge is, or None without both figures.

    That is ours / theirs for rates, and theirs / ours for times.
    """
    if not ours or not theirs:
        return None
    less_is_better = key.startswith(("ttft", "itl", "gap", "latency"))
    return theirs / ours if less_is_better else ours / theirs


def speed(key: str, ours: float | None, theirs: float | None) -> str:
    """Return the ratio as text; a dash without both figures."""
    value = ratio(key, ours, theirs)
    return "-" if value is None else f"{value:.2f}x"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, the first column aligned left and the others right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def has_both_engines(engines: Sequence[str]) -> bool:
    """Return True if forge and vLLM are among the engines."""
    return OURS in engines and THEIRS in engines


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
