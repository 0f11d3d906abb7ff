"""Hypothesis's examples: the same in every process, whatever it has imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRAW = """
import sys
import tests.conftest
from hypothesis import given, settings, strategies as st

if sys.argv[1:]:
    sys.path.append(sys.argv[1])
    import constants

@given(st.lists(st.integers(), min_size=20))
@settings(database=None)
def draw(numbers):
    print(numbers)

draw()
"""


def draw_examples(*arguments: str) -> str:
    """The examples of a test, in a process of its own."""
    command = [sys.executable, "-c", DRAW, *arguments]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_examples_do_not_depend_on_the_modules_that_are_imported(tmp_path: Path) -> None:
    names = [f"A{i} = {10**9 + 7 * i}" for i in range(1000)]
    (tmp_path / "constants.py").write_text("\n".join(names))
    examples = draw_examples()
    assert len(examples.splitlines()) >= 60
    assert draw_examples(str(tmp_path)) == examples
