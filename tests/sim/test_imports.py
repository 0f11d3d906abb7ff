"""The import arrows within the simulator: each folder and module of sim/ imports lower ones only.

7 commands   6 reports, sweep   5 scenario   4 fast_forward, faults
3 world, decision_log, wall_clock, answer_recorder   2 clock, calibration
1 cost, workloads, metrics   0 units, draws, length_model, replay
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SIM = Path(__file__).resolve().parents[2] / "sim"

FLOORS = (
    {"units", "draws", "length_model", "replay"},
    {"cost", "workloads", "metrics"},
    {"clock", "calibration"},
    {"world", "decision_log", "wall_clock", "answer_recorder"},
    {"fast_forward", "faults"},
    {"scenario"},
    {"reports", "sweep"},
    {"commands"},
)
"""Folders and modules of sim/, the lowest first. A node may import nodes of lower floors only."""

FLOOR_OF = {node: floor for floor, nodes in enumerate(FLOORS) for node in nodes}


def node_of(path: Path) -> str:
    """The folder that a file is in, or its own name where it is in none."""
    return path.relative_to(SIM).with_suffix("").parts[0]


def upward_imports(node: str, source: str) -> list[str]:
    """Imports of `source` that do not lead to a lower floor, one sentence each."""
    faults = []
    for statement in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(statement, ast.ImportFrom) and statement.module == "forge.sim":
            modules = [f"forge.sim.{alias.name}" for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
        elif isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        for module in modules:
            if module.startswith("forge.sim."):
                target = module.split(".")[2]
                if target != node and FLOOR_OF.get(target, len(FLOORS)) >= FLOOR_OF[node]:
                    faults.append(f"{node} line {statement.lineno} imports {target}")
    return faults


FILES = sorted(
    path for path in SIM.rglob("*.py") if node_of(path) not in ("__init__", "policies", "data")
)


def test_every_file_has_a_floor_and_every_floor_has_files() -> None:
    assert {node_of(path) for path in FILES} == FLOOR_OF.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SIM).as_posix())
def test_every_import_leads_to_a_lower_floor(path: Path) -> None:
    assert upward_imports(node_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("node", "source"),
    [
        ("cost", "from forge.sim.clock import Clock"),
        ("cost", "from forge.sim import clock"),
        ("workloads", "import forge.sim.metrics"),
        ("world", "def late():\n    from forge.sim.scenario import Scenario"),
        ("units", "from forge.sim.draws import draw_uniform"),
        ("reports", "from forge.sim.gossip import Gossip"),
    ],
)
def test_an_import_of_the_same_or_a_higher_floor_is_found(node: str, source: str) -> None:
    assert len(upward_imports(node, source)) == 1
