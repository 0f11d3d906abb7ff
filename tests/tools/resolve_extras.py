"""pip's choice for each extra in a clean environment, compared with the ranges that were tested.

    make resolve                               every extra, for this Python
    make resolve ARGS="--python 3.12 gpu"      one, for another

Needs a package index, so no test runs it. Nothing is installed: pip only reports. The
exit status is 1 where a choice is outside its range.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from forge.requirements import TESTED_REQUIREMENTS
from tests.project.test_requirements import EXTRAS, extra_requirements

ROOT = Path(__file__).resolve().parents[2]


def resolve(python: Path, wheel: Path, extra: str, version: str | None) -> dict[str, str]:
    """Return pip's choice of each package: name and version."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--report", "-"]
    if version is not None:
        command += ["--python-version", version, "--only-binary", ":all:", "--target", "unused"]
    target = f"{wheel}[{extra}]" if extra else str(wheel)
    report = subprocess.run([*command, target], capture_output=True, text=True, check=True).stdout
    found = (each["metadata"] for each in json.loads(report)["install"])
    return {canonicalize_name(each["name"]): each["version"] for each in found}


def tested_ranges(extra: str) -> list[Requirement]:
    """Return the tested ranges of an extra, with those of the extras that it has in it."""
    included = {"": [""], "gpu": ["", "hf", "gpu"]}.get(extra, ["", extra])
    tested = [Requirement(text) for name in included for text in TESTED_REQUIREMENTS.get(name, ())]
    return tested if extra in TESTED_REQUIREMENTS else [*tested, *extra_requirements(extra)]


def main() -> int:
    """Print a table for each extra; return 1 where a choice is outside its range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", default=list(EXTRAS), help="hf, gpu, plot, dev")
    parser.add_argument("--python", help="resolve for this version, 3.12 say")
    args = parser.parse_args()
    num_outside = 0
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        venv.create(Path(folder, "clean"), with_pip=True)
        python = Path(folder, "clean", "bin", "python")
        for extra in args.extras:
            choice = resolve(python, wheel, extra, args.python)
            print(f"\n[{extra}] {len(choice)} packages", flush=True)
            for each in tested_ranges(extra):
                version = choice.get(canonicalize_name(each.name))
                fits = version is not None and each.specifier.contains(version, prereleases=False)
                num_outside += not fits
                note = "" if fits else "OUTSIDE"
                print(f"  {each.name:20} {version!s:12} {each.specifier!s:18} {note}".rstrip())
    print(f"\n{num_outside} outside their ranges.")
    return 1 if num_outside else 0


if __name__ == "__main__":
    sys.exit(main())
