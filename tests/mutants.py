"""Plants one bug at a time in a copy of the core and checks that the named test fails on it.

    python tests/mutants.py                         all of the core's
    python tests/mutants.py leak tie                those whose name has one of these words
    python tests/mutants.py tests/mutants_hf.toml   those of another file; these need torch

A mutant is a piece of source, what it becomes, and the test that must see it: tests/mutants.toml.
The tests must pass on the unchanged copy, so a failure is the bug's. Exit status 1 when one
survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120.0


class Mutant(NamedTuple):
    """A bug: in `path`, `old` (which stands there once) becomes `new`; `test` must fail."""

    name: str
    path: str
    old: str
    new: str
    test: str


def recorded(path: str) -> list[Mutant]:
    """Every mutant of the file, in order."""
    text = (ROOT / path).read_text("utf-8")
    return [Mutant(**fields) for fields in tomllib.loads(text)["mutant"]]


def copy_tree(target: Path) -> None:
    """What the tests need stands in `target`."""
    for folder in ("forge", "sim", "tests", "bench"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)


def run_tests(tree: Path, *words: str) -> int:
    """The exit status of pytest on some tests in `tree`: 0 passed, 1 failed, others did not run.

    Why a test fails is of no interest, so nothing is rewritten or kept to tell it.
    """
    options = ["-q", "-x", "-m", "not soak", "-p", "no:cacheprovider", "--assert=plain", "--tb=no"]
    # What one run has compiled, the next need not.
    written = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *words],
            cwd=tree,
            env=written,
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1  # a bug that makes a test hang is seen
    return done.returncode


def verdict(mutant: Mutant, unchanged: Path) -> str:
    """Whether the mutant was killed, or why not. `unchanged` has been run: it is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(unchanged, tree, ignore=shutil.ignore_patterns(".hypothesis"))
        path = tree / mutant.path
        source = path.read_text()
        if source.count(mutant.old) != 1:
            return f"stale: its source stands {source.count(mutant.old)} times in {mutant.path}"
        path.write_text(source.replace(mutant.old, mutant.new))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        status = run_tests(tree, mutant.test)
    if status == 1:
        return "killed"
    return "SURVIVED" if status == 0 else f"broken: pytest ended with {status}"


def main(words: list[str]) -> int:
    """Run the chosen mutants and report each; 1 unless all are killed."""
    files = [word for word in words if word.endswith(".toml")] or ["tests/mutants.toml"]
    words = [word for word in words if not word.endswith(".toml")]
    listed = [mutant for path in files for mutant in recorded(path)]
    chosen = [m for m in listed if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        unchanged = Path(folder)
        copy_tree(unchanged)
        tests = sorted({mutant.test for mutant in chosen})
        if run_tests(unchanged, "-n", "auto", "--dist", "worksteal", *tests) != 0:
            print("a test that should see a mutant fails, or is not there, on the unchanged source")
            return 1
        start = time.monotonic()
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            verdicts = list(pool.map(verdict, chosen, [unchanged] * len(chosen)))
    for mutant, said in zip(chosen, verdicts, strict=True):
        print(f"{said:<10} {mutant.name:<60} {mutant.test}")
    killed = verdicts.count("killed")
    print(f"{killed} of {len(chosen)} mutants killed in {time.monotonic() - start:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
