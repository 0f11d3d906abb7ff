"""The command `forge`: check that the package `forge` is this distribution's, then run it.

Owns the check. Imports nothing of `forge` before it. Other distributions install a package called
`forge` too, forge-infer among them. In one environment the later install overwrites files of the
earlier one, or Python finds one of them first on its path. This module has the distribution's own
name, so no other distribution replaces it.

    site-packages/                 the same folder, either order     refused: RECORD lists forge/
        forge/                     of both
    site-packages/forge/           theirs, first on the path         refused: not the folder next to
    clone/forge/                   ours, installed with --editable   this file
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION_NAME = "forge-llm-engine"
"""Name of the distribution. It is not on the package index: install from a clone or a wheel."""


def find_conflict(package: str | None, folder: Path) -> str | None:
    """Return why `forge` is not the package of this distribution, and the remedy; None if it is.

    package   the file that Python imports `forge` from, or None where there is no such file
    folder    the folder of this distribution's `forge` and of this file

    Reads the RECORD of each distribution in `folder`: none in a clone, about 10 ms for a hundred.
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
            f"Uninstall the distribution that has it, or remove its folder from PYTHONPATH"
        )
    return None


def main() -> int:
    """Run the command line of forge; return 1 where `forge` is another distribution's package."""
    spec = find_spec("forge")
    problem = find_conflict(None if spec is None else spec.origin, Path(__file__).parent)
    if problem is not None:
        print(f"forge: {problem}", file=sys.stderr)
        return 1
    from forge.cli.main import main as run

    return run()
