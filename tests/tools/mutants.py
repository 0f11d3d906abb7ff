"""Plants one bug at a time in a copy of the core and checks that the named test fails on it.

    cd tests/tools
    python mutants.py                       all of the core's
    python mutants.py leak tie              those whose name has one of these words
    python mutants.py mutants_hf.toml       those of another file; these need torch
    python mutants.py --tests-passed        without the tests on the unchanged copy

A mutant is a piece of source, its replacement, and the test that must fail: see mutants.toml. The
tests must pass on the unchanged copy, so a failure is the bug's. After `make test test-long` has
passed on the same sources, `--tests-passed` does not repeat them. Exit status 1 when a mutant
survives, 2 when no mutant's name has a word that was given.

    collecting process ── fork with the mutant in memory ── its test fails: killed
                                      │ passes, or it cannot be planted there
    copy of the sources ◄─────────────┘── a new process with the mutant in its file decides
"""

from __future__ import annotations

import compileall
import gc
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
"""A test that takes longer hangs. On the unchanged source nearly all take less than a second."""
MAX_RUNNING = 2 * (os.cpu_count() or 1)
"""Tests at a time, with mutants in memory and in files each.

Those of mutants that hang are not counted: they compute nothing.
"""
LIBRARIES = (
    "pytest",
    "pdb",
    "statistics",
    "packaging.version",
    "hypothesis",
    "pydantic.main",
    "starlette.applications",
    "uvicorn",
    "httpx",
)
"""What most tests import and no mutant changes: imported once, before the forks."""
TESTS_PASSED = "--tests-passed"
UNUSED_PLUGINS = (
    *("xdist", "pytest_cov", "anyio", "doctest", "junitxml", "legacypath", "pastebin"),
    *("setuponly", "setupplan", "stepwise", "unittest"),
)
"""Plugins that one test in one process does not need. They take a fifth of its time to start."""
IN_ONE_PROCESS = tuple(word for name in UNUSED_PLUGINS for word in ("-p", f"no:{name}"))


class Mutant(NamedTuple):
    """A bug: in `path`, `old` (which stands there once) becomes `new`; `test` must fail.

    hangs   True where the test waits until a limit ends it, so that it starts first
    """

    name: str
    path: str
    old: str
    new: str
    test: str
    hangs: bool = False


class Arguments(NamedTuple):
    """What the command line chooses.

    files          of mutants, in this folder
    words          parts of names; all mutants where there is none
    tests_passed   the tests have passed on these sources
    """

    files: list[str]
    words: list[str]
    tests_passed: bool


def parse_arguments(words: list[str]) -> Arguments:
    """Return the arguments of the command, of which any order is allowed."""
    files = [word for word in words if word.endswith(".toml")] or ["mutants.toml"]
    names = [word for word in words if not word.endswith(".toml") and word != TESTS_PASSED]
    return Arguments(files, names, TESTS_PASSED in words)


def read_mutants(path: str) -> list[Mutant]:
    """Read the mutants of a file in this folder, in order."""
    text = (Path(__file__).parent / path).read_text("utf-8")
    return [Mutant(**fields) for fields in tomllib.loads(text)["mutant"]]


def choose_mutants(mutants: list[Mutant], words: list[str]) -> list[Mutant]:
    """The mutants whose name has one of the words; all where there is none.

    Raises ValueError for a word that is in no name: without a mutant, pytest would run every test.
    """
    names = [mutant.name for mutant in mutants]
    for word in words:
        if not any(word in name for name in names):
            parts = {part for name in names for part in (name, *name.split())}
            close = get_close_matches(word, sorted(parts), n=5)
            remedy = f"Close to it: {', '.join(close)}" if close else f"One is: {names[0]}"
            raise ValueError(f"no mutant's name has {word!r}. {remedy}")
    return [m for m in mutants if not words or any(word in m.name for word in words)]


def copy_tree(target: Path) -> None:
    """What the tests need stands in `target`."""
    target.mkdir()
    for folder in ("forge", "sim", "tests", "bench"):
        # What `make test` has compiled of forge need not be compiled again.
        ignored = shutil.ignore_patterns("*-pytest-*.pyc", "results")
        # forge/sim and forge/bench are links; copied, they would be second packages.
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)


def run_tests(tree: Path, words: Sequence[str], plugins: Sequence[object]) -> int:
    """Return the exit status of pytest on some tests in `tree`: 0 passed, 1 failed, else not run.

    Call it in a fork of this process. Only the status counts, so assertions are not rewritten and
    no traceback is kept.
    """
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    # What one run has compiled, the next need not.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import pytest

    # Which of the failing examples is the smallest does not matter.
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    options = ["-q", "-x", "-m", "not soak", "-p", "no:cacheprovider", "--assert=plain", "--tb=no"]
    return pytest.main([*options, *words], plugins=plugins)


def fork_tests(tree: Path, words: Sequence[str], plugins: Sequence[object] = ()) -> int:
    """Run tests in a new process group; return the process id. Its status is that of the tests."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        status = run_tests(tree, words, plugins)
    finally:
        os._exit(status)


def link_tree(unchanged: Path, folder: Path) -> Path:
    """Return a new tree in `folder` with the files of `unchanged`, which stay one on the disk.

    `unchanged` is compiled.
    """
    tree = Path(tempfile.mkdtemp(dir=folder)) / "tree"
    ignored = shutil.ignore_patterns(".hypothesis")
    shutil.copytree(unchanged, tree, symlinks=True, ignore=ignored, copy_function=os.link)
    return tree


def compiled_files(path: Path) -> list[Path]:
    """Return what Python has compiled of a source."""
    return list(path.parent.glob(f"__pycache__/{path.stem}.*"))


def plant_mutant(mutant: Mutant, tree: Path) -> str:
    """Why the mutant cannot be in `tree`, which is unchanged; nothing where it is."""
    path = tree / mutant.path
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"stale: its source stands {source.count(mutant.old)} times in {mutant.path}"
    for stale in (path, *compiled_files(path)):
        stale.unlink()
    path.write_text(source.replace(mutant.old, mutant.new))
    return ""


def remove_mutant(mutant: Mutant, unchanged: Path, tree: Path) -> None:
    """Make `tree` what it was before the mutant was planted and its test ran."""
    for stale in (tree / mutant.path, *compiled_files(tree / mutant.path)):
        stale.unlink()
    for source in (unchanged / mutant.path, *compiled_files(unchanged / mutant.path)):
        os.link(source, tree / source.relative_to(unchanged))
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)


def order_mutants(chosen: list[Mutant]) -> list[Mutant]:
    """Return the mutants in the order of their starts: those that hang, then the rest shuffled.

    Neighbours take about the same time, and should not all run together.
    """
    shuffled = random.Random(0).sample(chosen, len(chosen))
    return sorted(shuffled, key=lambda mutant: not mutant.hangs)


def describe_status(status: int) -> str:
    """What the exit status of the tests says of a mutant."""
    if status == 1:
        return "killed"
    return "SURVIVED" if status == 0 else f"broken: pytest ended with {status}"


class CollectingProcess:
    """The process whose forks have mutants in memory (see mutant_forks.py), and its results.

    is_running   True until all results were read
    """

    def __init__(self, mutants: list[Mutant], unchanged: Path) -> None:
        # A module of this folder: found where this file is the command.
        from mutant_forks import RESULT_SIZE, MutantForks

        self.is_running = True
        self._result_size = RESULT_SIZE
        self._mutants = dict(enumerate(mutants))
        self._results, writer = os.pipe()
        forks = MutantForks(mutants, unchanged, writer, MAX_RUNNING, TIMEOUT_S)
        files = {mutant.test.partition("::")[0] for mutant in mutants}
        self._pid = fork_tests(unchanged, [*IN_ONE_PROCESS, *sorted(files)], [forks])
        os.close(writer)

    def read(self) -> list[tuple[Mutant, bool]]:
        """Return the next mutants and whether a test failed; none after a short wait."""
        if not self.is_running or not select.select([self._results], [], [], 0.01)[0]:
            return []
        if line := os.read(self._results, self._result_size):
            index, status = map(int, line.split())
            return [(self._mutants.pop(index), status == 1)]
        self.is_running = False
        os.waitpid(self._pid, 0)
        return [(mutant, False) for mutant in self._mutants.values()]


def run_mutants(
    chosen: list[Mutant], unchanged: Path, folder: Path
) -> Iterator[tuple[Mutant, str]]:
    """Whether each mutant was killed, or why not, as they end.

    Where no test fails with the mutant in memory, it is planted in a tree of files.
    """
    ordered = order_mutants(chosen)
    in_memory = [each for each in ordered if each.path.endswith(".py") and not each.hangs]
    pending = [each for each in ordered if each not in in_memory][::-1]
    collecting = CollectingProcess(in_memory, unchanged)
    running: dict[int, tuple[Mutant, Path, float]] = {}
    free_trees: list[Path] = []
    while pending or running or collecting.is_running:
        for mutant, is_killed in collecting.read():
            if is_killed:
                yield mutant, "killed"
            else:
                pending.append(mutant)
        while pending and sum(not each.hangs for each, *_ in running.values()) < MAX_RUNNING:
            mutant = pending.pop()
            tree = free_trees.pop() if free_trees else link_tree(unchanged, folder)
            if why := plant_mutant(mutant, tree):
                free_trees.append(tree)
                yield mutant, why
            else:
                options = [*IN_ONE_PROCESS, f"--basetemp={tree.parent / 'pytest'}"]
                pid = fork_tests(tree, [*options, mutant.test])
                running[pid] = mutant, tree, time.monotonic() + TIMEOUT_S
        for pid, (mutant, tree, deadline_s) in list(running.items()):
            ended_pid, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                del running[pid]
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what its tests have left
                remove_mutant(mutant, unchanged, tree)
                free_trees.append(tree)
                # A bug that makes a test hang is seen.
                hung = os.WIFSIGNALED(wait_status)
                yield mutant, describe_status(1 if hung else os.waitstatus_to_exitcode(wait_status))
            elif time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
        if not collecting.is_running:
            time.sleep(0.01)


def run_unchanged(unchanged: Path, chosen: list[Mutant]) -> bool:
    """Run the tests of the mutants on a copy, which compiles it; return whether they pass."""
    tests = sorted({mutant.test for mutant in chosen})
    first = fork_tests(unchanged, ["-n", "auto", "--dist", "worksteal", *tests])
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0


def main(words: list[str]) -> int:
    """Run the chosen mutants and report each; 1 unless all are killed."""
    arguments = parse_arguments(words)
    mutants = [mutant for path in arguments.files for mutant in read_mutants(path)]
    try:
        chosen = choose_mutants(mutants, arguments.words)
    except ValueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    # The copies must be imported, and nothing of what they were copied from.
    sys.path[:] = [each for each in sys.path if Path(each).resolve() not in (ROOT, ROOT / "tests")]
    for name in LIBRARIES:
        import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # no collection of a fork looks at these objects, and none copies their pages
    killed, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        unchanged = Path(folder) / "unchanged"
        copy_tree(unchanged)
        if arguments.tests_passed:
            compileall.compile_dir(unchanged, quiet=1, workers=0)
        elif not run_unchanged(unchanged, chosen):
            print("a test that should see a mutant fails, or is not there, on the unchanged source")
            return 1
        for mutant, outcome in run_mutants(chosen, unchanged, Path(folder)):
            print(f"{outcome:<10} {mutant.name:<60} {mutant.test}", flush=True)
            killed += outcome == "killed"
    print(f"{killed} of {len(chosen)} mutants killed in {time.monotonic() - start:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
