"""Policies that ship as files: each is written as a user would write one, for `--policy FILE.py`.

They import forge.policy and nothing above it. `--policy working-set` finds working_set.py here.
"""

from __future__ import annotations

from pathlib import Path

from forge.policy import POLICIES

POLICY_FOLDER = Path(__file__).parent


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies: those of forge.policy, then the files of this folder."""
    files = sorted(file.stem for file in POLICY_FOLDER.glob("*.py") if file.stem != "__init__")
    return (*POLICIES, *(name.replace("_", "-") for name in files))


def policy_path(choice: str) -> Path | None:
    """Return the file of a policy, by its name or path; None for one of forge.policy itself."""
    if choice.endswith(".py"):
        return Path(choice)
    file = POLICY_FOLDER / f"{choice.replace('-', '_')}.py"
    return file if choice in policy_names() and choice not in POLICIES else None
