"""Write the outcome of each test to the file of --results, a line of JSON each.

Part of a plugin of pytest. Tests that are not applicable, by the list of --expected, are not run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expected import FAILS, NOT_APPLICABLE, PASSES, find_expected, read_expected

OUTCOMES = {"passed": PASSES, "failed": FAILS}


class ResultWriter:
    """Writes a test's outcome when the test has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        text = report.longreprtext
        errors = [line for line in text.splitlines() if line.startswith("E ")][:3]
        self.write(report.nodeid, OUTCOMES[report.outcome], " ".join(errors) or text[-300:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, FAILS, report.longreprtext[-300:])

    def write(self, test: str, outcome: str, text: str = "") -> None:
        """Write a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True)
    parser.addoption("--expected", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ResultWriter(config.getoption("--results")), "results-writer")


def leave_out_file(collection_path: Path, config: pytest.Config) -> bool | None:
    """Return True for a file none of whose tests is applicable, and write that it is not.

    Such a file is not imported: it may need packages for what forge does not have.
    """
    if not collection_path.is_relative_to(config.rootpath):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    for each in read_expected(config.getoption("--expected")):
        if each.outcome == NOT_APPLICABLE and each.file == file and not each.tests:
            config.pluginmanager.get_plugin("results-writer").write(file, NOT_APPLICABLE)
            return True
    return None


def leave_out_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests that are not applicable, and write that they are."""
    expected = read_expected(config.getoption("--expected"))
    writer = config.pluginmanager.get_plugin("results-writer")
    kept = []
    for item in items:
        if find_expected(expected, item.nodeid) == NOT_APPLICABLE:
            writer.write(item.nodeid, NOT_APPLICABLE)
        else:
            kept.append(item)
    items[:] = kept
