"""Catalogue: the exercises, in the order of the path of wiki/Exercises.md.

Owns their numbers, names and pages. A check is imported only when it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from forge.errors import InvalidConfig

STUB_FOLDER = Path(__file__).parent / "stubs"

Check = Callable[[ModuleType, int], str]
"""Checks a learner's file on the cases of a seed. Returns a line that says what held.

Raises WrongAnswer otherwise.
"""


class Exercise(NamedTuple):
    """A task of the path.

    number   place in the path
    name     name of its stub and of its check
    page     page to read before
    names    names that the learner's file must define
    """

    number: int
    name: str
    page: str
    names: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """Name of the learner's copy of the stub."""
        return f"{self.number:02}_{self.name}.py"

    @property
    def task(self) -> str:
        """The docstring of the stub: what is to be written, and what the check does."""
        return ast.get_docstring(ast.parse(self.read_stub())) or ""

    @property
    def title(self) -> str:
        """The first line of the task, without its full stop."""
        return self.task.partition("\n")[0].rstrip(".")

    def read_stub(self) -> str:
        """Return the text of the stub."""
        return (STUB_FOLDER / f"{self.name}.py").read_text(encoding="utf-8")

    def load_check(self) -> Check:
        """Import the check of the exercise and return it."""
        check: Check = import_module(f"forge.learn.checks.{self.name}").check
        return check


EXERCISES = (
    Exercise(
        1,
        "memory",
        "From-generate-to-a-server",
        ("kv_bytes_per_token", "num_cache_tokens", "decode_ms"),
    ),
    Exercise(2, "plans", "Home", ("predict_plans",)),
    Exercise(3, "pool", "Paging", ("Pool",)),
    Exercise(4, "bug", "Preemption", ("Pool",)),
    Exercise(5, "budget", "Token-budget", ("MAX_NUM_BATCHED_TOKENS",)),
    Exercise(6, "policy", "Policies", ("policy",)),
    Exercise(7, "acceptance", "Speculation", ("acceptance", "residual", "next_token")),
    Exercise(8, "depth", "Depth", ("order", "FORBIDDEN_BY")),
    Exercise(9, "capacity", "Capacity", ("highest_rate",)),
    Exercise(10, "attention", "Attention", ("Part", "join")),
)


def find_exercise(number: str) -> Exercise:
    """Return the exercise of this number. Raises InvalidConfig."""
    for exercise in EXERCISES:
        if str(exercise.number) == number.removeprefix("0"):  # as the files are named
            return exercise
    raise InvalidConfig(
        "exercise", f"there is no number {number[:64]!r}", f"Give 1 to {len(EXERCISES)}"
    )
