"""tests/tools/decision_logs.py: which scenarios it compares, and what it reports as different."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.decision_logs import (
    compare_recordings,
    first_difference,
    main,
    scenarios,
    without_digests,
)

ROOT = Path(__file__).resolve().parents[2]


def test_digests_are_left_out_of_a_log() -> None:
    lines = ['{"seed": 0, "code": "ab", "policy": "cd"}', '{"at": 1}', '{"sha256": "ef"}']
    assert without_digests(lines) == ['{"seed": 0}', '{"at": 1}']


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "b"], ["a", "c"], "line 2\n    old  b\n    new  c"),
        (["a"], ["a", "b"], "line 2\n    old  None\n    new  b"),
        (['{"a": {"b": 1}}'], ['{"a": {"b": 1, "c": 2}, "d": 3}'], None),
        (['{"a": 1}'], ['{"a": 2}'], 'line 1\n    old  {"a": 1}\n    new  {"a": 2}'),
    ],
)
def test_the_first_line_that_differs_is_quoted(
    old: list[str], new: list[str], difference: str | None
) -> None:
    assert first_difference(old, new) == difference


@pytest.mark.long
def test_a_checkout_equals_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), str(ROOT), "closed-depth1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 equal"


@pytest.mark.long
def test_recordings_of_one_checkout_are_equal_apart_from_their_times() -> None:
    assert compare_recordings(ROOT, ROOT) is None


def test_a_word_in_no_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(ROOT), str(ROOT), "nothing"])
    assert "no scenario's name has nothing" in capsys.readouterr().err


def test_each_scenario_is_a_run_of_its_own() -> None:
    arguments = [tuple(words) for words in scenarios().values()]
    assert len(set(arguments)) == len(arguments) == 43
