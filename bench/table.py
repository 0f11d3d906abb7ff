"""What README.md says about speed, made from bench/results and from nothing else.

Owns the tables between the two markers and the plot in docs/. A figure that is not in a record of
one run on one machine cannot get onto the page, and one that changed cannot stay.

    bench/results/*.json ─► tables ─► <!-- bench:begin --> ... <!-- bench:end -->   in README.md
                         └► plot   ─► docs/sweep.png

    python -m bench.table           print the tables
    python -m bench.table --write   put them into README.md
    python -m bench.table --check   fail where README.md says something else
    python -m bench.table --plot    draw docs/sweep.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, InvalidConfig

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
README = ROOT / "README.md"
PLOT = ROOT / "docs" / "sweep.png"

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NOTHING = "No run beside another engine is recorded yet."

OURS, THEIRS = "forge", "vllm"
NAMES = {OURS: "forge", THEIRS: "vLLM"}
PATHS = {"http": "over HTTP", "offline": "on the engine"}

Record = Mapping[str, Any]


def records(folder: Path = RESULTS) -> dict[str, Record]:
    """The records that compare engines, by name, in the order of their names."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: each for name, each in every.items() if each["benchmark"] == "peers"}


def label(key: str) -> str:
    """How a figure is called on the page."""
    if key == "start_s":
        return "start, s"
    name, _, _ = key.rpartition("_ms") if key.endswith("_ms") else key.rpartition("_tok_s")
    if key.startswith("ttft_prefix_"):
        prefix, _, new = name.removeprefix("ttft_prefix_").partition("_")
        return f"TTFT, {new} tokens behind a cached {prefix}, ms"
    if key.startswith("ttft_"):
        return f"TTFT, {int(name.removeprefix('ttft_')):,} tokens, ms"
    return f"{name}, tok/s"


def shown(value: float | None) -> str:
    """A figure with as many digits as it is good for; a dash for one that is missing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def speed(key: str, ours: float | None, theirs: float | None) -> str:
    """How many times as fast forge is: throughput by theirs, their time by ours."""
    if not ours or not theirs:
        return "-"
    less_is_better = key.startswith(("start", "ttft", "itl", "gap"))
    return f"{theirs / ours if less_is_better else ours / theirs:.2f}x"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown; the first column to the left, the others to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def compared(key: str) -> bool:
    """The figure is one that every engine has."""
    return key == "start_s" or key.endswith("_tok_s") or key.startswith("ttft_")


def cell_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of one shape, a row each."""
    ours, theirs = (
        next((each for each in entries if each["engine"] == engine), {})
        for engine in (OURS, THEIRS)
    )
    rows = []
    for key in dict.fromkeys(key for each in (ours, theirs) for key in each if compared(key)):
        a, b = ours.get(key), theirs.get(key)
        rows.append([label(key), shown(b), shown(a), speed(key, a, b)])
    return _lines(["", NAMES[THEIRS], NAMES[OURS], "forge is"], rows)


def level_table(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """One closed loop, a row for each concurrency; both engines' figures in each cell."""
    at = {(each["engine"], each["c"]): each for each in levels}
    rows = []
    for streams in sorted({each["c"] for each in levels}):
        ours, theirs = (at.get((engine, streams), {}) for engine in (OURS, THEIRS))
        row = [str(streams)]
        for key in ("ttft_p50", "itl_p50", "itl_p99", "tok_s"):
            a, b = ours.get(key), theirs.get(key)
            row.append(f"{shown(b)} / {shown(a)}")
        row.append(speed("tok_s", ours.get("tok_s"), theirs.get("tok_s")))
        rows.append(row)
    head = ["streams, vLLM / forge", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "tok/s"]
    return _lines([*head, "forge is"], rows)


def section(name: str, record: Record) -> list[str]:
    """All tables of one record, under a line that says where and with what it was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    machine = record["machine"]
    where = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or machine["processor"]
    lines = [
        f"{where}; {versions}; commit {record['commit']}; `bench/results/{name}.json`. "
        "One run on one machine."
    ]
    figures = record["figures"]
    for shape in dict.fromkeys(each["shape"] for each in figures["cells"]):
        lines += ["", f"**{shape}**", ""]
        lines += cell_table([each for each in figures["cells"] if each["shape"] == shape])
    for shape, path in dict.fromkeys((each["shape"], each["path"]) for each in figures["levels"]):
        chosen = [e for e in figures["levels"] if (e["shape"], e["path"]) == (shape, path)]
        lines += ["", f"**{shape}**, closed loop {PATHS[path]}", "", *level_table(chosen)]
    return lines


def tables(told: Mapping[str, Record]) -> str:
    """What stands between the markers."""
    parts = ["\n".join(section(name, record)) for name, record in told.items()]
    return "\n\n".join(parts) or NOTHING


def replaced(page: str, text: str) -> str:
    """The page with the text between its markers. Raises InvalidConfig where it has none."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise InvalidConfig("README.md", "it has no place for the tables", f"Add {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def plot(levels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The picture is at `path`: a row per shape, time between tokens and throughput by streams."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "plot", f"{missing.name} is not installed", "pip install matplotlib"
        ) from None
    loops = list(dict.fromkeys((each["shape"], each["path"]) for each in levels))
    if not loops:
        raise InvalidConfig("plot", NOTHING, "Run bench/serve.py first")
    figure = Figure(figsize=(10, 3.6 * len(loops)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(loops), 2, squeeze=False)
    kinds = (("itl_p50", "ms between tokens, median"), ("tok_s", "output tokens a second"))
    for panel_row, (shape, way) in zip(panels, loops, strict=True):
        for axes, (key, title) in zip(panel_row, kinds, strict=True):
            for engine, style in ((THEIRS, "o--"), (OURS, "s-")):
                of = (shape, way, engine)
                line = [e for e in levels if (e["shape"], e["path"], e["engine"]) == of]
                line.sort(key=lambda each: int(each["c"]))
                axes.plot(
                    [e["c"] for e in line], [e[key] for e in line], style, label=NAMES[engine]
                )
            axes.set(xscale="log", xlabel="streams", ylabel=title)
            axes.set_title(f"{shape}, {PATHS[way]}")
            axes.set_xticks(ticks := sorted({e["c"] for e in levels}), map(str, ticks))
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def command(words: Sequence[str] | None = None) -> int:
    """The command line of this module. 1 when the page differs from the results, or on refusal."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = parser.add_mutually_exclusive_group()
    for way in ("--write", "--check", "--plot"):
        ways.add_argument(way, dest="way", action="store_const", const=way)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--picture", type=Path, default=PLOT)
    args = parser.parse_args(words)
    try:
        told = records(args.results)
        if args.way == "--plot":
            levels = [each for record in told.values() for each in record["figures"]["levels"]]
            plot(levels, args.picture)
            print(args.picture)
            return 0
        text = tables(told)
        if args.way is None:
            print(text)
            return 0
        page = args.readme.read_text()
        wanted = replaced(page, text)
        if args.way == "--write":
            args.readme.write_text(wanted)
        elif page != wanted:
            raise InvalidConfig(
                args.readme.name,
                "its tables are not those of bench/results",
                "Run python -m bench.table --write",
            )
    except (ForgeError, OSError) as refused:
        print(f"bench.table: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command())
