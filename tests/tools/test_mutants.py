"""tests/tools/mutants.py: which mutants its arguments choose."""

from __future__ import annotations

import pytest

from tests.tools.mutants import Mutant, choose_mutants, main

MUTANTS = [Mutant(name, "", "", "", "") for name in ("leak a block", "leak a slot", "tie breaks")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["leak a block", "leak a slot", "tie breaks"]),
        (["leak"], ["leak a block", "leak a slot"]),
        (["slot", "tie"], ["leak a slot", "tie breaks"]),
    ],
)
def test_mutants_are_chosen_by_a_word_of_their_name(words: list[str], names: list[str]) -> None:
    assert [mutant.name for mutant in choose_mutants(MUTANTS, words)] == names


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["leek"], "no mutant's name has 'leek'. Close to it: leak"),
        (["tie", "leak a blok"], "no mutant's name has 'leak a blok'. Close to it: leak a block"),
        (["xyz"], "no mutant's name has 'xyz'. One is: leak a block"),
    ],
)
def test_a_word_of_no_name_is_refused_with_close_names(words: list[str], remedy: str) -> None:
    with pytest.raises(ValueError) as refused:
        choose_mutants(MUTANTS, words)
    assert str(refused.value).startswith(remedy)


def test_a_word_of_no_name_runs_no_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["salt not hased"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Close to it: salt not hashed" in printed.err
