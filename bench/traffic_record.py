"""Record of traffic cells: the RESULT lines of both engines in one run, with their ratios.

Owns the merge and its checks. Knows no engine.

    forge.log ─┬─► RESULT lines ─► same machine, same work ─► bench/results/NAME.json
    vllm.log  ─┘                                              cells, ratios

Always true: the entries of a cell have equal requests, by their digest, and one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.peers import RESULTS, parse_results
from forge.bench.result_file import write_json
from forge.bench.table_format import OURS
from forge.bench.traffic_tables import ratios
from forge.errors import InvalidConfig

UNKNOWN = "unknown"
"""The commit of a line that was measured in a tree without git."""

IDENTITY = ("engine", "shape", "cell")
SHARED = ("machine", "commit")
"""Fields that all lines of one run have in common. They are the record's, not an entry's."""


def join_cells(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return cells and ratios of the results of one run.

    Raises InvalidConfig where a cell is there twice or engines ran different requests.
    """
    entries: dict[tuple[str, ...], dict[str, Any]] = {}
    work: dict[tuple[str, str], tuple[str, str]] = {}
    for result in results:
        engine, shape, cell = (result[key] for key in IDENTITY)
        if (engine, shape, cell) in entries:
            raise InvalidConfig(
                "results", f"{cell} of {engine} on {shape} is there twice", "Join one run"
            )
        other, digest = work.setdefault((shape, cell), (engine, result["workload"]))
        if digest != result["workload"]:
            raise InvalidConfig(
                "results",
                f"{other} and {engine} ran different requests for {cell} on {shape}",
                "Run both with one trace, one cells.json and one --options",
            )
        entries[engine, shape, cell] = {
            key: value for key, value in result.items() if key not in SHARED
        }
    figures: dict[str, Any] = {"cells": list(entries.values())}
    return {**figures, "ratios": ratios({"figures": figures})}


def create_record(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of the results. Raises InvalidConfig where they are of two runs.

    Versions are those of forge's lines, and of other lines where those have none.
    """
    for key in SHARED:
        if any(each[key] != results[0][key] for each in results):
            raise InvalidConfig(
                "results", f"two lines have another {key}", "Join the lines of one run"
            )
    figures = join_cells(results)
    versions: dict[str, str] = {}
    for each in sorted(results, key=lambda result: result["engine"] == OURS):
        versions |= each["versions"]
    return {
        "benchmark": "traffic",
        "machine": results[0]["machine"],
        "versions": versions,
        "command": f"python -m forge.bench.real_traffic join {name}",
        "commit": results[0]["commit"],
        "figures": figures,
    }


def write_record(
    name: str, logs: Sequence[str], folder: Path = RESULTS, commit: str = UNKNOWN
) -> Path:
    """Write the record of the RESULT lines in the logs. Returns its path. Raises InvalidConfig.

    commit   of lines that were measured in a tree without git
    """
    lines = [line for log in logs for line in Path(log).read_text(errors="replace").splitlines()]
    results = [each for each in parse_results(lines) if "cell" in each]
    results = [
        {**each, "commit": commit} if each["commit"] == UNKNOWN else each for each in results
    ]
    if not results:
        raise InvalidConfig("results", f"no traffic cell in {', '.join(logs)}", "Name other logs")
    path = folder / f"{name}.json"
    write_json(str(path), create_record(name, results))
    return path
