"""Make random small changes in forge, one at a time, and check that a test fails on each.

    python tests/tools/mutate.py                          200 changes, drawn with seed 0
    python tests/tools/mutate.py --count 50 --seed 7      50 others
    python tests/tools/mutate.py forge/server             of these files only

Every place that mutations.py finds is equally likely. Same seed and same sources, same list.
A change is made in a copy of the tree, and the tests that run the changed lines run there, the
quickest first. Which tests run which lines is recorded once (line_contexts.py) and kept under
build/mutate until the sources change; of the tests, only files that changed are recorded again.
A run that was cut off goes on where it was.

    killed       a test fails, or pytest cannot import what the test needs
    timed out    the tests did not end; counts as killed
    survived     every test that runs the lines passes
    not covered  no test runs the lines; counts as survived
    equivalent   reviewed: no test can see it (tests/tools/mutate.toml gives the reason)
    needs a GPU  not killed, and only a GPU runs the lines (tests/tools/mutate.toml)

The tests that killed run once more on the unchanged tree: one that fails there proves nothing. Its
changes are tested again without it. Exit status 1 when a change survived.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
from line_contexts import Footprint, collect
from mutants import LIBRARIES as MOST_TESTS
from mutants import ROOT
from mutations import Site, assignments, changed_lines, sites

BUILD = ROOT / "build" / "mutate"
REVIEW_FILE = ROOT / "tests" / "tools" / "mutate.toml"
LIBRARIES = (*MOST_TESTS, "torch", "transformers")
WORKERS = 2
TIMEOUT_FACTOR = 10
"""Times as long as recorded that tests may take before they count as endless."""
NUM_FIRST_TESTS, NUM_FIRST_FILES = 20, 3
"""Tests, and their files, in the first of two runs of pytest."""
BUDGET_S = 400.0
"""Recorded seconds of tests after which a change counts as survived; the slowest are left out."""


class Change(NamedTuple):
    """One change to a file, as lines before and after."""

    site: Site
    choice: str
    line: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.site.path}:{self.line} {self.site.kind}: {self.old} => {self.new}"


class MutationResult(NamedTuple):
    """What became of a change, and the test or the review that says so."""

    outcome: str
    by: str = ""


def draw_changes(count: int, seed: int, files: list[str]) -> list[Change]:
    """Draw `count` changes, each at a place of its own."""
    sources = {path: (ROOT / path).read_bytes() for path in files}
    every = [site for path in files for site in sites(path, sources[path])]
    rng = random.Random(seed)
    chosen_sites = rng.sample(every, min(count, len(every)))
    changes = []
    for site in chosen_sites:
        choice = rng.choice(site.choices)
        source = sources[site.path]
        line, old, new = changed_lines(source, site.replaced(source, choice))
        changes.append(Change(site, choice, line, _strip_lines(old), _strip_lines(new)))
    return changes


def _strip_lines(lines: str) -> str:
    return "\n".join(line.strip() for line in lines.splitlines())


def list_files(*patterns: str) -> list[str]:
    """Return the files of the working tree that git knows or does not ignore, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted({path for path in out.split("\0") if path and (ROOT / path).is_file()})


def copy_tree(target: Path) -> None:
    """Copy the working tree, without what git ignores."""
    for path in list_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)
    for package in ("bench", "sim"):
        (target / "forge" / package).symlink_to(f"../{package}")


def digest(paths: Iterable[str]) -> str:
    """Return a hash of files and their names."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path}\0".encode() + hashlib.sha256((ROOT / path).read_bytes()).digest())
    return whole.hexdigest()[:16]


def record_footprints() -> dict[str, Footprint]:
    """Return the footprint of every test that passes; record those of files that changed."""
    folder = BUILD / digest(sources())
    folder.mkdir(parents=True, exist_ok=True)
    cache_files = {
        path: folder / f"{Path(path).stem}.{digest([path])}.json" for path in test_files()
    }
    missing = [path for path, file in cache_files.items() if not file.exists()]
    if missing:
        print(f"recording which lines the tests of {len(missing)} files run", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            tree, data = Path(scratch) / "tree", Path(scratch) / "data"
            data.mkdir()
            copy_tree(tree)
            every = collect(tree, data, missing, WORKERS)
            shutil.copy(data / "log", folder / "log")
        by_file: dict[str, dict[str, Footprint]] = defaultdict(dict)
        for test, footprint in every.items():
            by_file[file_of(test)][test] = footprint
        for path in missing:
            cache_files[path].write_text(json.dumps(by_file[path]))
    footprints = [json.loads(file.read_text()) for file in cache_files.values()]
    return {test: Footprint(*values) for each in footprints for test, values in each.items()}


def sources() -> list[str]:
    """Return the files that say which lines a test runs, without the file of the test."""
    tools = {f"tests/tools/{name}.py" for name in ("mutants", "mutate", "mutations")}
    python = [path for path in list_files("*.py") if not Path(path).name.startswith("test_")]
    return [*(path for path in python if path not in tools), "pyproject.toml"]


def test_files() -> list[str]:
    """Return the files of tests."""
    return list_files("tests/**/test_*.py")


def file_of(test: str) -> str:
    """Return the file that a test stands in."""
    return test.partition("::")[0]


def lines_to_run(site: Site) -> dict[str, set[int]]:
    """Return by path the lines whose tests concern a site.

    What runs at import is of concern in functions that use its names, and those of the values that
    are made of it. Where it has none, all of its file is.
    """
    if site.function:
        return {site.path: set(site.lines)}
    texts = {path: (ROOT / path).read_text("utf-8") for path in list_files("forge/*.py")}
    if not site.used:
        return {site.path: set(range(1, texts[site.path].count("\n") + 2))}
    found: dict[str, set[int]] = {path: set() for path in texts}
    names, new = set(site.used), set(site.used)
    while new:
        mentions = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(new)))})\b")
        new = set()
        for path, text in texts.items():
            if not mentions.search(text):
                continue
            lines = {i for i, line in enumerate(text.splitlines(), 1) if mentions.search(line)}
            for values, assigned in assignments(text):
                if lines & values:
                    new |= {*assigned} - names
                    lines -= values
            found[path] |= lines
        names |= new
    return found


def covering_tests(site: Site, footprints: dict[str, Footprint]) -> list[str]:
    """Return the tests that run a site, within the budget.

    First come those that are quick and run little else: they are the ones that are about it. Of the
    cases of one test the first three come first.
    """
    lines_by_path = lines_to_run(site).items()
    covering = {
        test: each.seconds * each.size
        for test, each in footprints.items()
        if any(each.covers(path, lines) for path, lines in lines_by_path)
    }
    cases: Counter[str] = Counter()
    order = []
    for test in sorted(covering, key=lambda test: (covering[test], test)):
        cases[test.partition("[")[0]] += 1
        order.append((cases[test.partition("[")[0]] > 3, covering[test], test))
    chosen, total = [], 0.0
    for _, _, test in sorted(order):
        if total <= BUDGET_S:
            chosen.append(test)
        total += footprints[test].seconds
    return chosen


def split_tests(tests: list[str]) -> list[list[str]]:
    """Return the few tests that most changes are killed by, of a few files, and the others."""
    files = list(dict.fromkeys(file_of(test) for test in tests))[:NUM_FIRST_FILES]
    first = [test for test in tests if file_of(test) in files][:NUM_FIRST_TESTS]
    others = [test for test in tests if test not in set(first)]
    return [part for part in (first, others) if part]


class FailureWriter:
    """A pytest plugin that writes the tests that fail to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\0")


class WorkingCopy:
    """A copy of the working tree in which one change at a time is made, and one run of tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tree"
        self._failed = folder / "failed"
        copy_tree(self._folder)

    def write(self, path: str, source: bytes) -> None:
        """Write a file and forget what was compiled of it: two changes may share a second."""
        file = self._folder / path
        file.write_bytes(source)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def fork(self, tests: list[str], *options: str) -> int:
        """Run tests in a process that has imported the libraries; return its id."""
        self._failed.write_text("")
        if pid := os.fork():
            return pid
        status = 70
        try:
            os.setsid()
            status = self._run([*options, *tests])
        finally:
            os._exit(status)

    def failed(self) -> list[str]:
        """Return the tests that failed in the last run."""
        return self._failed.read_text().split("\0")[:-1]

    def _run(self, words: list[str]) -> int:
        os.chdir(self._folder)
        sys.path.insert(0, str(self._folder))
        os.environ["PYTHONPATH"] = str(self._folder)
        # A process that a test spawns imports this one's main module.
        sys.modules["__main__"] = import_module("pytest.__main__")
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        options = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=no", "-m", "not soak"]
        return pytest.main([*options, *words], plugins=[FailureWriter(self._failed)])


class MutationRun:
    """The runs of one change: first the quickest tests, then the others."""

    def __init__(
        self, change: Change, tests: list[str], tree: WorkingCopy, footprints: dict[str, Footprint]
    ) -> None:
        self.change = change
        self.tree = tree
        self._tests = tests
        self._pending_parts = split_tests(tests)
        self._footprints = footprints
        source = (ROOT / change.site.path).read_bytes()
        tree.write(change.site.path, change.site.replaced(source, change.choice))
        self._begin(self._pending_parts.pop(0))

    def _begin(self, tests: list[str]) -> None:
        # Room for a loaded machine.
        seconds = sum(self._footprints[test].seconds for test in tests if test in self._footprints)
        self._deadline_s = time.monotonic() + 120 + TIMEOUT_FACTOR * seconds
        self._running_tests = tests
        self.pid = self.tree.fork(tests, "-x")

    def end_if_late(self) -> None:
        """Kill tests that are past their limit."""
        if time.monotonic() > self._deadline_s:
            os.kill(self.pid, signal.SIGKILL)

    def finish_run(self, wait_status: int) -> MutationResult | None:
        """Return the result after a run with this status, or None if another run was started."""
        status = os.waitstatus_to_exitcode(wait_status)
        if status < 0:
            return MutationResult("timed out", self._running_tests[0])
        if status == 4 and any("::" in test for test in self._running_tests):
            # The change is in a value that names tests.
            self._begin(sorted({file_of(test) for test in self._running_tests}))
            return None
        if status not in (0, 5):
            return MutationResult("killed", next(iter(self.tree.failed()), f"exit status {status}"))
        if self._pending_parts:
            self._begin(self._pending_parts.pop(0))
            return None
        return MutationResult("survived", f"{len(self._tests)} tests pass")

    def close(self) -> None:
        """Take the change back."""
        path = self.change.site.path
        self.tree.write(path, (ROOT / path).read_bytes())


class Review(NamedTuple):
    """Reviewed changes, from tests/tools/mutate.toml."""

    equivalent: dict[tuple[str, str, str], str]
    gpu: list[tuple[str, str, str]]

    def reviewed_result(self, change: Change, tested: bool) -> MutationResult | None:
        """Return the result of the review, or None. `tested`: a test runs the lines."""
        path, _, _, _, _, function, _, _ = change.site
        if reason := self.equivalent.get((path, change.old, change.new)):
            return MutationResult("equivalent", reason)
        for where, functions, reason in self.gpu:
            if not tested and where == path and re.fullmatch(functions, function):
                return MutationResult("needs a GPU", reason)
        return None


def read_review() -> Review:
    """Read tests/tools/mutate.toml."""
    tables = tomllib.loads(REVIEW_FILE.read_text("utf-8"))
    same = {(e["path"], e["old"], e["new"]): e["reason"] for e in tables.get("equivalent", [])}
    gpu = [(e["path"], e["functions"], e["reason"]) for e in tables.get("gpu", [])]
    return Review(same, gpu)


class ResultCache:
    """The revieweds of earlier runs, in a file.

    A change that was killed stays so until the file of the test that kills it changes, and one that
    survived until any test changes.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._all_tests_digest = digest(test_files())
        self._digests = {path: digest([path]) for path in test_files()}
        self._results: dict[str, tuple[MutationResult, str]] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                name, outcome, by, tests = json.loads(line)
                self._results[name] = MutationResult(outcome, by), tests

    def find(self, change: Change) -> MutationResult | None:
        """Return the kept result of a change, or None if it must be tested."""
        result, tests = self._results.get(change.name, (None, ""))
        return result if result is not None and tests == self._digest(result) else None

    def add(self, change: Change, result: MutationResult) -> None:
        """Write a result to the file at once, since a run may be cut off."""
        line = json.dumps([change.name, *result, self._digest(result)])
        with self._file.open("a") as file:
            file.write(line + "\n")

    def forget(self, change: Change) -> None:
        """Drop the result of a change, so that it is tested again."""
        self._results.pop(change.name, None)

    def _digest(self, result: MutationResult) -> str:
        return self._digests.get(file_of(result.by), self._all_tests_digest)


def run_all_changes(changes: list[Change]) -> dict[Change, MutationResult]:
    """Return the result of each change."""
    footprints = record_footprints()
    cache = ResultCache(BUILD / digest(sources()) / "revieweds.jsonl")
    results: dict[Change, MutationResult] = {}
    pending = changes
    with tempfile.TemporaryDirectory() as scratch:
        trees = [WorkingCopy(Path(scratch) / str(i)) for i in range(WORKERS)]
        import_libraries()
        while pending:
            results |= run_changes(pending, footprints, cache, trees)
            broken = set[str]()
            if killers := {reviewed.by for reviewed in results.values()} & {*footprints}:
                print("running the tests that killed on the unchanged tree", flush=True)
                os.waitpid(trees[0].fork(sorted(killers)), 0)
                broken |= {*trees[0].failed()}
            footprints = {test: each for test, each in footprints.items() if test not in broken}
            pending = [change for change in changes if results[change].by in broken]
            for change in pending:
                cache.forget(change)
    return {change: results[change] for change in changes}


def run_changes(
    changes: list[Change],
    footprints: dict[str, Footprint],
    cache: ResultCache,
    trees: list[WorkingCopy],
) -> dict[Change, MutationResult]:
    """Test each change with the tests that have footprints, and return the results."""
    review = read_review()
    results: dict[Change, MutationResult] = {}

    def find_result(change: Change, tests: list[str]) -> MutationResult | None:
        if (reviewed := review.reviewed_result(change, bool(tests))) is not None:
            return reviewed
        return cache.find(change) if tests else MutationResult("not covered")

    def add_result(change: Change, result: MutationResult) -> None:
        results[change] = result
        print(f"{len(results):>4} {result.outcome:<12} {change.name}  [{result.by}]", flush=True)

    pending, free, running = list(reversed(changes)), list(trees), dict[int, MutationRun]()
    while pending or running:
        while pending and free:
            change = pending.pop()
            tests = covering_tests(change.site, footprints)
            if (reviewed := find_result(change, tests)) is not None:
                add_result(change, reviewed)
            else:
                trial = MutationRun(change, tests, free.pop(), footprints)
                running[trial.pid] = trial
        if not running:
            break
        ended_pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if ended_pid:
            trial = running.pop(ended_pid)
            # A change can leave processes of a test running.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(ended_pid, signal.SIGKILL)
            if (reviewed := trial.finish_run(wait_status)) is None:
                running[trial.pid] = trial
                continue
            trial.close()
            free.append(trial.tree)
            cache.add(trial.change, reviewed)
            add_result(trial.change, reviewed)
            continue
        for trial in running.values():
            trial.end_if_late()
        time.sleep(0.02)
    return results


def import_libraries() -> None:
    """Import what most tests import and no change touches: the forks have it."""
    own = (ROOT, ROOT / "tests")
    sys.path[:] = [each for each in sys.path if Path(each).resolve() not in own]
    for name in LIBRARIES:
        with suppress(ImportError):
            import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()


def report(results: dict[Change, MutationResult]) -> str:
    """Return what survived, and the figures."""
    lines = []
    for change, reviewed in results.items():
        if reviewed.outcome not in ("killed", "timed out"):
            old, new = (
                f"{sign} " + text.replace("\n", f"\n{sign} ")
                for sign, text in (("-", change.old), ("+", change.new))
            )
            where = f"{change.site.path}:{change.line} in {change.site.function or 'the module'}"
            lines += [
                f"{reviewed.outcome}: {where} ({change.site.kind}) {reviewed.by}",
                old,
                new,
                "",
            ]
    counts = Counter(reviewed.outcome for reviewed in results.values())
    killed = counts["killed"] + counts["timed out"]
    num_judged = len(results) - counts["equivalent"] - counts["needs a GPU"]
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    lines.append(f"{killed} of {num_judged} killed: {100 * killed / max(1, num_judged):.1f} %")
    return "\n".join(lines)


def main() -> int:
    """Judge the changes that the command line names and write the report."""
    parser = argparse.ArgumentParser(description="Make random changes in forge and run its tests.")
    parser.add_argument("paths", nargs="*", default=["forge"], help="files and folders to change")
    parser.add_argument("--count", type=int, default=200, help="how many changes (200)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others (0)")
    args = parser.parse_args()
    files = [path for path in list_files(*args.paths) if path.endswith(".py")]
    results = run_all_changes(draw_changes(args.count, args.seed, files))
    text = report(results)
    (BUILD / f"seed-{args.seed}.txt").write_text(text + "\n")
    table = [
        {"change": c._asdict() | {"site": c.site._asdict()}, **v._asdict()}
        for c, v in results.items()
    ]
    (BUILD / f"seed-{args.seed}.json").write_text(json.dumps(table, indent=1))
    print(text)
    bad = ("survived", "not covered")
    return 1 if any(reviewed.outcome in bad for reviewed in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
