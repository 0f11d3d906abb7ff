"""Result files: a JSON record for each benchmark run, with machine, versions, command and commit.

Owns the format that all benchmarks share. Knows no benchmark.

    {"benchmark", "machine": {...}, "versions": {...}, "command", "commit", "figures": {...}}
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("forge-llm-engine", "torch", "triton", "flashinfer-python", "transformers", "vllm")
"""Packages that figures can depend on."""


def _processor() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Return the commit of this tree, marked if it has changes; "unknown" outside git."""
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


def _gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU from nvidia-smi; empty where it is missing."""
    names = ("name", "driver_version", "memory.total")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if output.returncode:
        return []
    keys = ("name", "driver", "memory")
    rows = [[field.strip() for field in line.split(",")] for line in output.stdout.splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if gpus := _gpus():
        machine["gpus"] = gpus
    return machine


def _versions() -> dict[str, str]:
    """Return the versions of python, of installed PACKAGES, and of CUDA if torch is imported."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds
    cuda = None if torch is None else torch.version.cuda
    return versions if cuda is None else {**versions, "cuda": cuda}


def redacted_command(words: Sequence[str]) -> str:
    """Return the command line of sys.argv, without keys: others read the record."""
    program, *rest = words
    shown = [
        "..." if before == "--api-key" else re.sub("(?s)^(--api-key=).*", r"\1...", word)
        for before, word in zip(("", *rest), rest, strict=False)
    ]
    is_module = Path(program).parent == Path(__file__).parent
    head = f"python -m forge.bench.{Path(program).stem}" if is_module else "forge"
    return " ".join([head, *shown])


def create_result(benchmark: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the record of this run."""
    return {
        "benchmark": benchmark,
        "machine": _machine(),
        "versions": _versions(),
        "command": redacted_command(sys.argv),
        "commit": _commit(),
        "figures": figures,
    }


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write the record to `path`. A missing folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(value, indent=2) + "\n")
