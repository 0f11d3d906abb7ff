"""The command `forge`: check that the package `forge` is this distribution's, then run it.

Owns the check. Other distributions install a package called `forge` too, forge-infer among them. In
one environment the later install overwrites files of the earlier one, or one is found first on
Python's path. This module has the distribution's own name, so that no other replaces it. It imports
nothing of `forge` before the check.

    site-packages/                 the same folder, either order     refused: RECORD lists forge/
        forge/                     of both
    site-packages/forge/           theirs, first on the path         refused: not the folder beside
    clone/forge/                   ours, installed with --editable   this file
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION_NAME = "forge-llm-engine"
"""The distribution's name. On the package index nothing has it: install from a clone or a wheel."""


def find_conflict(package: str | None, folder: Path) -> str | None:
    """Return why `forge` is not the one this distribution installs, and the remedy, or None.

    package   the file that Python imports `forge` from, or None where it finds no such file
    folder    where this distribution is: the folder of `forge` and of this file

    Reads the RECORD of each distribution in `folder`: none in a clone, and some 10 ms for a
    hundred of them.
    """
    own_init = folder / "forge" / "__init__.py"
    reinstall_hint = (
        f"and install {DISTRIBUTION_NAME} again from its clone or wheel, with --force-reinstall"
    )
    distributions = [
        record.parent.name.removesuffix(".dist-info").rpartition("-")[0].replace("_", "-")
        for record in sorted(folder.glob("*.dist-info/RECORD"))
        if "\nforge/" in "\n" + record.read_text(encoding="utf-8", errors="replace")
    ]
    for other in distributions:
        if other != DISTRIBUTION_NAME:
            return (
                f"the distribution {other} installs a package forge into {folder} as well, "
                f"and one overwrites the other. Run: pip uninstall {other}, {reinstall_hint}"
            )
    if not own_init.is_file():
        return (
            f"{own_init} is missing: another distribution was removed with it. Uninstall, "
            f"{reinstall_hint}"
        )
    if package is None or not Path(package).samefile(own_init):
        return (
            f"Python finds another package forge first, in {package}, and not {own_init}. "
            f"Uninstall the distribution that has it, or take its folder from PYTHONPATH"
        )
    return None


def main() -> int:
    """Run the command line of forge, or exit with 1 where `forge` is another's package."""
    spec = find_spec("forge")
    problem = find_conflict(None if spec is None else spec.origin, Path(__file__).parent)
    if problem is not None:
        print(f"forge: {problem}", file=sys.stderr)
        return 1
    from forge.cli.main import main as run

    return run()
