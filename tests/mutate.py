"""Makes random small changes in forge, one at a time, and checks that a test fails on each.

    python tests/mutate.py                          200 changes, drawn with seed 0
    python tests/mutate.py --count 50 --seed 7      50 others
    python tests/mutate.py forge/server             of these files only

Every place that tests/mutations.py finds is equally likely. Same seed and same sources, same list.
A change is made in a copy of the tree, and the tests that run the changed lines run there, the
quickest first. Which tests run which lines is recorded once (tests/line_contexts.py) and kept under
build/mutate until the sources change; of the tests, only files that changed are recorded again.
A run that was cut off goes on where it was.

    killed       a test fails, or pytest cannot import what the test needs
    timed out    the tests did not end; counts as killed
    survived     every test that runs the lines passes
    not covered  no test runs the lines; counts as survived
    equivalent   reviewed: no test can see it (tests/mutate.toml gives the reason)
    needs a GPU  not killed, and only a GPU runs the lines (tests/mutate.toml)

The tests that killed run once more on the unchanged tree: one that fails there proves nothing, and
its change is reported as unsure. Exit status 1 when a change survived or is unsure.
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
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from line_contexts import Footprint, collect
from mutants import ROOT
from mutations import Site, changed_lines, sites

BUILD = ROOT / "build" / "mutate"
REVIEWED = ROOT / "tests" / "mutate.toml"
WORKERS = 2
FIRST = 30
"""Tests in the first of two runs of pytest: most changes are killed by one of a few."""
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


class Verdict(NamedTuple):
    """What became of a change, and the test or the review that says so."""

    outcome: str
    by: str = ""


def draw(count: int, seed: int, files: list[str]) -> list[Change]:
    """Draw `count` changes, each at a place of its own."""
    sources = {path: (ROOT / path).read_bytes() for path in files}
    every = [site for path in files for site in sites(path, sources[path])]
    rng = random.Random(seed)
    drawn = rng.sample(every, min(count, len(every)))
    changes = []
    for site in drawn:
        choice = rng.choice(site.choices)
        source = sources[site.path]
        line, old, new = changed_lines(source, site.replaced(source, choice))
        changes.append(Change(site, choice, line, _bare(old), _bare(new)))
    return changes


def _bare(lines: str) -> str:
    return "\n".join(line.strip() for line in lines.splitlines())


def listed(*patterns: str) -> list[str]:
    """Return the files of the working tree that git knows or does not ignore, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted({path for path in out.split("\0") if path and (ROOT / path).is_file()})


def copy_tree(target: Path) -> None:
    """Copy the working tree, without what git ignores."""
    for path in listed():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)


def digest(paths: Iterable[str]) -> str:
    """Return a hash of files and their names."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path}\0".encode() + hashlib.sha256((ROOT / path).read_bytes()).digest())
    return whole.hexdigest()[:16]


def recorded() -> dict[str, Footprint]:
    """Return the footprint of every test that passes; record those of files that changed."""
    folder = BUILD / digest(sources())
    folder.mkdir(parents=True, exist_ok=True)
    kept = {path: folder / f"{Path(path).stem}.{digest([path])}.json" for path in test_files()}
    missing = [path for path, file in kept.items() if not file.exists()]
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
            kept[path].write_text(json.dumps(by_file[path]))
    footprints = [json.loads(file.read_text()) for file in kept.values()]
    return {test: Footprint(*values) for each in footprints for test, values in each.items()}


def sources() -> list[str]:
    """Return the files that say which lines a test runs, without the file of the test."""
    tools = {f"tests/{name}.py" for name in ("mutants", "mutate", "mutations")}
    python = [path for path in listed("*.py") if not path.startswith("tests/test_")]
    return [*(path for path in python if path not in tools), "pyproject.toml"]


def test_files() -> list[str]:
    """Return the files of tests."""
    return listed("tests/test_*.py")


def file_of(test: str) -> str:
    """Return the file that a test stands in."""
    return test.partition("::")[0]


def lines_to_run(site: Site) -> dict[str, set[int]]:
    """Return by path the lines whose tests concern a site.

    What runs at import is of concern where its names are used: at the lines that mention them, and
    where it has none, anywhere in its file.
    """
    if site.function:
        return {site.path: set(site.lines)}
    if not site.used:
        source = (ROOT / site.path).read_text("utf-8")
        return {site.path: set(range(1, source.count("\n") + 2))}
    mentions = re.compile(rf"\b(?:{'|'.join(map(re.escape, site.used))})\b")
    found: dict[str, set[int]] = {}
    for path in listed("forge/*.py"):
        text = (ROOT / path).read_text("utf-8").splitlines()
        found[path] = {i for i, line in enumerate(text, 1) if mentions.search(line)}
    found[site.path] -= set(site.lines)
    return found


def tests_of(site: Site, footprints: dict[str, Footprint]) -> list[str]:
    """Return the tests that run a site, the quickest first, within the budget."""
    places = lines_to_run(site).items()
    covering = [
        test for test, each in footprints.items() if any(each.covers(p, ls) for p, ls in places)
    ]
    # By file in turns: the quickest tests of one file are often cases of one test.
    turns: dict[str, int] = Counter()
    order = []
    for test in sorted(covering, key=lambda test: footprints[test].seconds):
        function = test.partition("[")[0]
        turns[function] += 1
        order.append((turns[function] > 3, footprints[test].seconds, test))
    chosen, total = [], 0.0
    for _, seconds, test in sorted(order):
        total += seconds
        if total > BUDGET_S and chosen:
            break
        chosen.append(test)
    return chosen


class Tree:
    """A copy of the working tree in which one change at a time is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        copy_tree(folder)

    def judge(self, change: Change, tests: list[str], footprints: dict[str, Footprint]) -> Verdict:
        """Run `tests` on the change."""
        source = (self._folder / change.site.path).read_bytes()
        self._write(change.site.path, change.site.replaced(source, change.choice))
        try:
            for some in (tests[:FIRST], tests[FIRST:]):
                if not some:
                    continue
                seconds = sum(footprints[test].seconds for test in some)
                status, failed = self.run(some, seconds, "-x")
                if status is None:
                    return Verdict("timed out", some[0])
                if status not in (0, 5):
                    return Verdict("killed", failed[0] if failed else f"exit status {status}")
            return Verdict("survived", f"{len(tests)} tests pass")
        finally:
            self._write(change.site.path, source)

    def _write(self, path: str, source: bytes) -> None:
        """Write a file and forget what was compiled of it: two changes may share a second."""
        file = self._folder / path
        file.write_bytes(source)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def run(self, tests: list[str], seconds: float, *options: str) -> tuple[int | None, list[str]]:
        """Run tests that take `seconds`; return the exit status and those that failed.

        None is the status of tests that do not end: a limit with room for a loaded machine.
        """
        quiet = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=no", "-rfE", *options]
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *quiet, *tests],
            cwd=self._folder,
            env=kept | {"PYTHONPATH": str(self._folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=120 + 2 * seconds)
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            # A change can leave processes of a test running.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 4 and any("::" in test for test in tests):
            # The change is in a value that names tests.
            return self.run(sorted({file_of(test) for test in tests}), seconds, *options)
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        return process.returncode, failed


class Review(NamedTuple):
    """What people have decided about changes: tests/mutate.toml."""

    equivalent: dict[tuple[str, str, str], str]
    gpu: list[tuple[str, str, str]]

    def verdict(self, change: Change, tested: bool) -> Verdict | None:
        """Return the verdict of the review, or None. `tested` is whether a test runs the lines."""
        path, _, _, _, _, function, _, _ = change.site
        if reason := self.equivalent.get((path, change.old, change.new)):
            return Verdict("equivalent", reason)
        for where, functions, reason in self.gpu:
            if not tested and where == path and re.fullmatch(functions, function):
                return Verdict("needs a GPU", reason)
        return None


def read_review() -> Review:
    """Read tests/mutate.toml."""
    tables = tomllib.loads(REVIEWED.read_text("utf-8"))
    same = {(e["path"], e["old"], e["new"]): e["reason"] for e in tables.get("equivalent", [])}
    gpu = [(e["path"], e["functions"], e["reason"]) for e in tables.get("gpu", [])]
    return Review(same, gpu)


class Kept:
    """The verdicts of earlier runs, in a file.

    A change that was killed stays so until the file of the test that kills it changes, and one that
    survived until any test changes.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._every = digest(test_files())
        self._digests = {path: digest([path]) for path in test_files()}
        self._verdicts: dict[str, tuple[Verdict, str]] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                name, outcome, by, tests = json.loads(line)
                self._verdicts[name] = Verdict(outcome, by), tests

    def find(self, change: Change) -> Verdict | None:
        """Return the verdict on a change, or None where it must be judged."""
        verdict, tests = self._verdicts.get(change.name, (None, ""))
        return verdict if verdict is not None and tests == self._digest(verdict) else None

    def add(self, change: Change, verdict: Verdict) -> None:
        """Write a verdict down at once: a run may be cut off."""
        line = json.dumps([change.name, *verdict, self._digest(verdict)])
        with self._file.open("a") as file:
            file.write(line + "\n")

    def _digest(self, verdict: Verdict) -> str:
        return self._digests.get(file_of(verdict.by), self._every)


def judge_all(changes: list[Change]) -> dict[Change, Verdict]:
    """Return the verdict on each change."""
    footprints = recorded()
    kept = Kept(BUILD / digest(sources()) / "verdicts.jsonl")
    review = read_review()
    with tempfile.TemporaryDirectory() as scratch:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for i in range(WORKERS):
            trees.put(Tree(Path(scratch) / str(i)))

        def judge(change: Change) -> Verdict:
            tests = tests_of(change.site, footprints)
            if (verdict := review.verdict(change, bool(tests))) is None:
                if not tests:
                    verdict = Verdict("not covered")
                elif (verdict := kept.find(change)) is None:
                    tree = trees.get()
                    try:
                        verdict = tree.judge(change, tests, footprints)
                    finally:
                        trees.put(tree)
                    kept.add(change, verdict)
            print(f"{verdict.outcome:<12} {change.name}  [{verdict.by}]", flush=True)
            return verdict

        with ThreadPoolExecutor(WORKERS) as pool:
            verdicts = dict(zip(changes, pool.map(judge, changes), strict=True))
        killers = sorted({v.by for v in verdicts.values() if v.by in footprints})
        _, failed = trees.get().run(killers, sum(footprints[test].seconds for test in killers))
    return {
        change: Verdict("unsure", verdict.by) if verdict.by in failed else verdict
        for change, verdict in verdicts.items()
    }


def report(verdicts: dict[Change, Verdict]) -> str:
    """Return what survived, and the figures."""
    lines = []
    for change, verdict in verdicts.items():
        if verdict.outcome not in ("killed", "timed out"):
            old, new = (
                f"{sign} " + text.replace("\n", f"\n{sign} ")
                for sign, text in (("-", change.old), ("+", change.new))
            )
            where = f"{change.site.path}:{change.line} in {change.site.function or 'the module'}"
            lines += [f"{verdict.outcome}: {where} ({change.site.kind}) {verdict.by}", old, new, ""]
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    killed = counts["killed"] + counts["timed out"]
    judged = len(verdicts) - counts["equivalent"] - counts["needs a GPU"]
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    lines.append(f"{killed} of {judged} killed: {100 * killed / max(1, judged):.1f} %")
    return "\n".join(lines)


def main() -> int:
    """Judge the changes that the command line names and write the report."""
    parser = argparse.ArgumentParser(description="Make random changes in forge and run its tests.")
    parser.add_argument("paths", nargs="*", default=["forge"], help="files and folders to change")
    parser.add_argument("--count", type=int, default=200, help="how many changes (200)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others (0)")
    args = parser.parse_args()
    files = [path for path in listed(*args.paths) if path.endswith(".py")]
    verdicts = judge_all(draw(args.count, args.seed, files))
    text = report(verdicts)
    (BUILD / f"seed-{args.seed}.txt").write_text(text + "\n")
    table = [
        {"change": c._asdict() | {"site": c.site._asdict()}, **v._asdict()}
        for c, v in verdicts.items()
    ]
    (BUILD / f"seed-{args.seed}.json").write_text(json.dumps(table, indent=1))
    print(text)
    bad = ("survived", "not covered", "unsure")
    return 1 if any(verdict.outcome in bad for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
