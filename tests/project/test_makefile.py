"""Tests that the Makefile names: each is there, or pytest would leave out another one silently."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DESELECTED = re.compile(r"--deselect=(\S+), ((?:\\\n| |[\w/.:])+)\)")
"""A prefix, and the tests of a list after it."""


def deselected_tests(makefile: str) -> list[str]:
    """Return the tests that targets leave out, each as its file, "::" and its function."""
    return [
        prefix + name
        for prefix, names in DESELECTED.findall(makefile)
        for name in re.findall(r"[\w/.:]+", names)
    ]


def has_test(name: str) -> bool:
    """Return whether the file has this function."""
    path, _, function = name.partition("::")
    file = ROOT / path
    return file.is_file() and bool(re.search(rf"^def {function}\(", file.read_text("utf-8"), re.M))


def test_every_test_that_a_target_leaves_out_is_there() -> None:
    names = deselected_tests((ROOT / "Makefile").read_text("utf-8"))
    assert len(names) > 10
    assert [name for name in names if not has_test(name)] == []


def test_a_test_that_was_renamed_is_found() -> None:
    words = "test_makefile.py::test_gone \\\n  b.py::c"
    names = deselected_tests(f"$(addprefix --deselect=tests/project/, {words})")
    assert names == ["tests/project/test_makefile.py::test_gone", "tests/project/b.py::c"]
    assert not any(map(has_test, names))
    assert has_test("tests/project/test_makefile.py::test_a_test_that_was_renamed_is_found")
