"""Which tests run which lines of forge, subprocesses and threads included.

`collect` runs tests with coverage.py and returns a Footprint for each of them. This file is also
the pytest plugin that does the recording: it names the context after the test that runs and its
phase. A process that a test starts takes its context from PYTEST_CURRENT_TEST, which it inherits.
What a fixture runs counts for every test of the file, because it may serve all of them.

Coverage is started by the .pth file that coverage.py installs, in pytest's process and in each
process below it. A process that is killed, or that starts with an environment of its own, leaves
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

SETTINGS = """\
[run]
include = {tree}/forge/*
data_file = {folder}/coverage
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
disable_warnings = no-data-collected, module-not-measured
[report]
fail_under = 0
"""


class Footprint(NamedTuple):
    """How long a test took that passed, and by path the lines it ran: the bits of a number."""

    seconds: float
    lines: dict[str, int]

    @property
    def size(self) -> int:
        """Return the number of lines that the test ran, and one."""
        return 1 + sum(bits.bit_count() for bits in self.lines.values())

    def covers(self, path: str, lines: Iterable[int]) -> bool:
        """Return whether the test ran one of these lines."""
        bits = self.lines.get(path, 0)
        return any(bits >> line & 1 for line in lines)


def collect(tree: Path, folder: Path, words: list[str], workers: int) -> dict[str, Footprint]:
    """Run the tests that `words` select in `tree` and return the footprint of each that passed.

    `folder` is scratch and must be empty.
    """
    settings = folder / "coveragerc"
    settings.write_text(SETTINGS.format(tree=tree, folder=folder))
    environment = os.environ | {
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": str(tree),
        "LINE_CONTEXTS_OUTCOMES": str(folder / "outcomes.json"),
    }
    # A test takes longer when its lines are recorded.
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.tools.line_contexts",
        "--timeout=300",
        "--tb=short",
        "-m",
        "not soak",
    ]
    command = [sys.executable, "-m", "pytest", *options, "-n", str(workers), "--dist", "worksteal"]
    with (folder / "log").open("w") as log:
        subprocess.run([*command, *words], cwd=tree, env=environment, stdout=log, stderr=log)
    passed: dict[str, float] = json.loads((folder / "outcomes.json").read_text())
    return _footprints(tree, folder, passed)


def _footprints(tree: Path, folder: Path, passed: dict[str, float]) -> dict[str, Footprint]:
    """Read what coverage.py has recorded in `folder`."""
    tests_of: dict[str, list[str]] = defaultdict(list)
    for test in passed:
        tests_of[test.partition("::")[0]].append(test)
    lines: dict[str, dict[str, int]] = {test: defaultdict(int) for test in passed}
    for file in folder.glob("coverage.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for path in data.measured_files():
            name = str(Path(path).relative_to(tree))
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    for test in _tests_of_context(context, tests_of):
                        if test in lines:
                            lines[test][name] |= 1 << line
        data.close()
    return {test: Footprint(seconds, dict(lines[test])) for test, seconds in passed.items()}


def _tests_of_context(context: str, tests_of: dict[str, list[str]]) -> list[str]:
    """Return the tests that a context is of: `TEST (call)`, or another phase of it."""
    test, _, phase = context.rpartition(" (")
    if phase == "call)":
        return [test]
    if phase in ("setup)", "teardown)"):
        return tests_of[test.partition("::")[0]]
    return []


# The plugin.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Record what fixtures run."""
    return (yield from _with_context(f"{item.nodeid} (setup)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Record what the test runs."""
    return (yield from _with_context(f"{item.nodeid} (call)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Record what ends with the fixtures."""
    return (yield from _with_context(f"{item.nodeid} (teardown)"))


def _with_context(context: str) -> Generator[None, object, object]:
    running = coverage.Coverage.current()
    assert running is not None, "coverage was not started: COVERAGE_PROCESS_START names no settings"
    running.switch_context(context)
    try:
        return (yield)
    finally:
        running.switch_context("")


class Outcomes:
    """The seconds of each test that passed, written at the end of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._others: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._others.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: s for test, s in self._seconds.items() if test not in self._others}
        self._path.write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that xdist's workers report to writes the outcomes."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ["LINE_CONTEXTS_OUTCOMES"])))
