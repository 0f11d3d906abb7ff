"""Expected outcomes of the peers' tests: the lists vllm.toml and sglang.toml, and their checks.

Owns the form of the lists. Knows no pytest. A test that is on no list is expected to pass.

    [[fails]]
    file = "tests/entrypoints/openai/test_root_path.py"
    tests = ["test_chat_session_root_path_with_api_key"]    a name, or a name with its parameters
    why = "--root-path has no counterpart"                  without `tests`: every test of the file

    [[not_applicable]]                                      and either of these two:
    page = "docs/Server.md"                                 `sentence` of the page says that the
    sentence = "Other parts (images, audio, files) ..."     feature is absent
    weights = "Qwen/Qwen3-8B"                               it asserts what these weights write
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PASSES, FAILS, NOT_APPLICABLE = "passes", "fails", "not applicable"


class Expectation(NamedTuple):
    """An expected outcome of some tests of a file.

    tests      names, with or without parameters; empty: every test of the file
    page       page of the documentation whose `sentence` says that the feature is absent
    weights    model whose weights the tests depend on
    """

    outcome: str
    file: str
    tests: tuple[str, ...]
    why: str
    page: str
    sentence: str
    weights: str

    def covers(self, test: str) -> bool:
        """Return whether the expectation is about the test of this id."""
        file, _, name = test.partition("::")
        return file == self.file and (
            not self.tests or name in self.tests or name.partition("[")[0] in self.tests
        )


class Total(NamedTuple):
    """How many tests of a file have each expected outcome."""

    file: str
    passes: int
    fails: int
    not_applicable: int


def read_expected(path: Path) -> list[Expectation]:
    """Read a list."""
    stated = tomllib.loads(path.read_text("utf-8"))
    return [
        *(_parse(FAILS, each) for each in stated["fails"]),
        *(_parse(NOT_APPLICABLE, each) for each in stated["not_applicable"]),
    ]


def _parse(outcome: str, stated: Mapping[str, Any]) -> Expectation:
    optional = {name: stated.get(name, "") for name in ("page", "sentence", "weights")}
    return Expectation(
        outcome, stated["file"], tuple(stated.get("tests", ())), stated["why"], **optional
    )


def find_expected(expected: Sequence[Expectation], test: str) -> str:
    """Return the expected outcome of a test."""
    return next((each.outcome for each in expected if each.covers(test)), PASSES)


def find_faults(expected: Sequence[Expectation], root: Path) -> list[str]:
    """Return what is wrong with a list, for people. A quoted sentence must be on its page."""
    faults = []
    for each in expected:
        name = f"{each.outcome}: {each.file} {' '.join(each.tests)}"
        if not each.why:
            faults.append(f"{name}: it does not say why")
        if each.outcome == FAILS:
            continue
        if bool(each.sentence) == bool(each.weights):
            faults.append(f"{name}: give a sentence of the documentation, or the weights")
        elif each.sentence:
            text = " ".join((root / each.page).read_text("utf-8").split())
            if " ".join(each.sentence.split()) not in text:
                faults.append(f"{name}: {each.page} has no {each.sentence!r}")
    return faults


def compare(
    expected: Sequence[Expectation], outcomes: Mapping[str, str], files: Sequence[str]
) -> list[str]:
    """Return where outcomes differ from the list, for people.

    outcomes   by test id: PASSES, FAILS or NOT_APPLICABLE
    files      that were run: an expectation of one of them must be about at least one test
    """
    faults = [
        f"{test}: {outcome}, expected: {wanted}"
        for test, outcome in sorted(outcomes.items())
        if outcome != (wanted := find_expected(expected, test))
    ]
    for each in expected:
        if each.file in files and not any(map(each.covers, outcomes)):
            faults.append(f"{each.file} {' '.join(each.tests)}: there is no such test")
    return faults


def count(outcomes: Mapping[str, str]) -> list[Total]:
    """Return the totals, a file each."""
    counts: dict[str, Counter[str]] = {}
    for test, outcome in sorted(outcomes.items()):
        counts.setdefault(test.partition("::")[0], Counter())[outcome] += 1
    return [
        Total(file, each[PASSES], each[FAILS], each[NOT_APPLICABLE])
        for file, each in counts.items()
    ]
