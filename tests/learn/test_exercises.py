"""Each stub fails, each reference passes, and each known wrong answer gets its own hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.learn.answers import WrongAnswer as Wrong
from forge.learn.catalogue import EXERCISES, STUB_FOLDER, Exercise
from forge.learn.checks.bug import check_full_pool
from forge.learn.grading import Grade, grade, load_answer
from tests.docs.pages import ROOT
from tests.learn.wrong_answers import WRONG_ANSWERS, WrongAnswer

REFERENCES = Path(__file__).parent / "references"
SEED = 7
BY_NAME = {each.name: each for each in EXERCISES}
SIMULATED = {"bug", "budget", "policy", "capacity", "acceptance"}
"""Exercises whose references take more than half a second."""


def mark(name: str, *values: Any, is_long: bool, id: str) -> Any:
    return pytest.param(name, *values, id=id, marks=[pytest.mark.long] if is_long else [])


def check(exercise: Exercise, path: Path, seed: int = SEED) -> Grade:
    return grade(exercise, path, seed)


@pytest.mark.parametrize("name", [mark(n, is_long=n in ("bug", "policy"), id=n) for n in BY_NAME])
def test_a_stub_does_not_pass(name: str) -> None:
    result = check(BY_NAME[name], STUB_FOLDER / f"{name}.py")
    assert not result.passed
    assert result.text.startswith("not yet")


@pytest.mark.parametrize("name", [mark(n, is_long=n in SIMULATED, id=n) for n in BY_NAME])
def test_a_reference_passes(name: str) -> None:
    result = check(BY_NAME[name], REFERENCES / f"{name}.py")
    assert result.passed, result.text
    assert result.text.endswith(f"seed      {SEED}")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            each,
            id=f"{each.exercise}: {each.name}",
            marks=[pytest.mark.long] if each.is_long else [],
        )
        for each in WRONG_ANSWERS
    ],
)
def test_a_wrong_answer_gets_its_own_hint(wrong: WrongAnswer, tmp_path: Path) -> None:
    text = (REFERENCES / f"{wrong.exercise}.py").read_text(encoding="utf-8")
    assert text.count(wrong.old) == 1, f"{wrong.old!r} occurs {text.count(wrong.old)} times"
    path = tmp_path / "answer.py"
    path.write_text(text.replace(wrong.old, wrong.new), encoding="utf-8")
    result = check(BY_NAME[wrong.exercise], path)
    assert not result.passed
    assert "\nhint      " in result.text and wrong.hint in result.text, result.text


def test_every_hint_of_a_wrong_answer_is_another() -> None:
    hints = [each.hint for each in WRONG_ANSWERS if each.hint]
    assert len(hints) == len(set(hints))


@pytest.mark.parametrize("name", ["plans", "pool", "depth", "attention"])
def test_a_seed_repeats_a_failure_and_other_seeds_have_other_cases(
    name: str, tmp_path: Path
) -> None:
    wrong = next(each for each in WRONG_ANSWERS if each.exercise == name)
    text = (REFERENCES / f"{name}.py").read_text(encoding="utf-8")
    path = tmp_path / "answer.py"
    path.write_text(text.replace(wrong.old, wrong.new), encoding="utf-8")
    results = [check(BY_NAME[name], path, seed).text for seed in (1, 1, 2, 3)]
    assert results[0] == results[1]
    assert f"--check --seed {1}" in results[0]
    if name != "depth":  # whose first cases are the same
        assert len(set(results)) == 3


@pytest.mark.parametrize("folder", [STUB_FOLDER, REFERENCES], ids=["stub", "reference"])
def test_the_planted_bug_shows_without_a_seed(folder: Path) -> None:
    """32 worlds with faults miss it now and then."""
    pool = load_answer(BY_NAME["bug"], folder / "bug.py").Pool
    if folder is REFERENCES:
        check_full_pool(pool)
    else:
        with pytest.raises(Wrong, match="block 1 has the hash of another content"):
            check_full_pool(pool)


def test_exercises_are_numbered_and_their_pages_exist() -> None:
    assert [each.number for each in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    for each in EXERCISES:
        assert (ROOT / "wiki" / f"{each.page}.md").is_file(), each.page
        assert each.task and len(each.title) < 90


def test_the_page_lists_every_exercise_by_its_title() -> None:
    page = (ROOT / "wiki" / "Exercises.md").read_text(encoding="utf-8")
    lines = [f"{each.number:>2}  new       {each.title}\n" for each in EXERCISES]
    assert [line for line in lines if line not in page] == []


def test_references_are_not_in_the_package() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "forge/learn").rglob("*.py")]
    for reference in REFERENCES.glob("[a-z]*.py"):
        assert reference.read_text("utf-8") not in texts
