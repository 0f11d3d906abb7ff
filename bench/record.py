"""One JSON record per benchmark run: what was measured, on what, by which command, at which commit.

Owns the format that every benchmark shares. Knows no benchmark.

    {"benchmark", "machine": {...}, "versions": {...}, "command", "commit", "figures": {...}}
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit of the tree that runs, with a mark when it has changes; "unknown" outside git."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", "../forge", "."], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def record(benchmark: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The record of this run."""
    versions = {"python": platform.python_version()}
    for package in ("forge-infer", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "benchmark": benchmark,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions,
        "command": " ".join(["forge", *sys.argv[1:]]),
        "commit": _commit(),
        "figures": figures,
    }


def write(path: str, value: dict[str, Any]) -> None:
    """The record is in the file at `path`, whose folder is made if it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(value, indent=2) + "\n")
