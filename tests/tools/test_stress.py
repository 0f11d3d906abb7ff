"""tests/tools/stress.py: what it says of a run that failed."""

from __future__ import annotations

from tests.tools.stress import failed_lines


def test_lines_of_a_log_are_no_failures() -> None:
    summary = ["FAILED tests/test_a.py::test_b - assert 1 == 2", "ERROR tests/test_a.py - OSError"]
    log = ["ERROR forge.server: request a-1f failed", "ERROR    forge.engine:the engine has ended"]
    assert failed_lines([*log, *summary, "2 errors"]) == summary
