"""Sweep: the same requests under every combination of settings, side by side.

Owns the combinations and the table. Knows no option: a case is a mapping of names to values, and a
scenario is what somebody made of it. Every run has the same seed, so differences are the settings'.

    policy  rate  │ offered │ TTFT p50, p99 │ ITL p50, p99 │ tokens/s │ good │ preempted │ shared
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import nan
from typing import Any

from sim.scenario import Scenario, summary

Case = Mapping[str, Any]
Outcome = Mapping[str, Any]
Figures = Mapping[str, Any]

SHORT = {
    "max_num_batched_tokens": "budget",
    "num_blocks": "blocks",
    "num_speculative_tokens": "drafts",
}
"""How long names are shown."""


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """Each choice of one value of each axis; the last axis changes first."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def outcome(case: Case, scenario: Scenario) -> Outcome:
    """What came of the scenario, with what sets it apart."""
    return {"case": dict(case), "figures": summary(scenario.run())}


COLUMNS: tuple[tuple[str, int, Callable[[Figures], float], str], ...] = (
    ("offered/s", 11, lambda f: f["offered_per_s"] or nan, ".2f"),
    ("ttft p50", 10, lambda f: f["ttft_ms"]["p50"], ".1f"),
    ("p99", 10, lambda f: f["ttft_ms"]["p99"], ".1f"),
    ("itl p50", 9, lambda f: f["itl_ms"]["p50"], ".2f"),
    ("p99", 9, lambda f: f["itl_ms"]["p99"], ".2f"),
    ("tokens/s", 10, lambda f: f["tokens_per_s"], ".0f"),
    ("good/s", 8, lambda f: f["goodput_per_s"], ".2f"),
    ("preempted", 11, lambda f: f["preemptions"], "d"),
    ("shared %", 10, lambda f: 100 * f["shared_tokens"] / max(1, f["prompt_tokens"]), ".1f"),
    ("right %", 9, lambda f: 100 * f["accepted"] / max(1, f["drafted"]), ".1f"),
)
"""Head, width, figure, format. Times are milliseconds."""


def show_table(outcomes: Sequence[Outcome]) -> None:
    """A line for each outcome. Drafts are shown where there are any."""
    drafted = any(each["figures"]["drafted"] for each in outcomes)
    columns = COLUMNS if drafted else COLUMNS[:-1]
    names = list(outcomes[0]["case"])
    widths = [
        2 + max(len(SHORT.get(name, name)), *(len(_text(o["case"][name])) for o in outcomes))
        for name in names
    ]
    heads = zip(names, widths, strict=True)
    print(
        "".join(f"{SHORT.get(name, name):<{width}}" for name, width in heads)
        + "".join(f"{head:>{width}}" for head, width, _, _ in columns)
    )
    for each in outcomes:
        case = (
            f"{_text(each['case'][n]):<{width}}" for n, width in zip(names, widths, strict=True)
        )
        figures = each["figures"]
        print("".join(case) + "".join(f"{get(figures):>{w}{form}}" for _, w, get, form in columns))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
