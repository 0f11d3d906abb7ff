"""Code and pages follow the mechanical part of the style: see tests/project/prose.py."""

from __future__ import annotations

import pytest

from tests.docs.pages import ROOT
from tests.project.prose import (
    FIXED_TEXTS,
    INSTEAD,
    INSTEAD_IN_CODE,
    all_findings,
    find_in_code,
    find_in_page,
)


def test_code_and_pages_follow_the_style() -> None:
    assert [str(finding) for finding in all_findings()] == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""Of a row: its tokens."""', "begins with 'Of'"),
        ('def f():\n    """Whether it is so."""', "begins with 'Whether'"),
        ('class A:\n    x: int\n    """Where it is."""', "begins with 'Where'"),
        ('"""Return a token. Nobody waits."""', "a docstring has 'nobody'"),
        ("x = 1  # the row behind it", "a comment has 'behind'"),
        ('raise ValueError("Mend it")', "a text has 'mend'"),
        ('raise ValueError(f"{x} has no use for it")', "a text has 'has no use for'"),
        ('raise ValueError("it waits for "\n    f"ever: {x}")', "a text has 'for ever'"),
        ("# rows who wait", "a comment has 'who'"),
    ],
)
def test_a_place_that_does_not_follow_the_style_is_found(source: str, problem: str) -> None:
    (found,) = find_in_code(source, "forge/a.py")
    assert problem in found.problem


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the tokens of `told`, a name."""',
        '"""Configure a server behind a reverse proxy."""',
        'x = "told"',
        "told = 1",
        '"""[rows, vocabulary] logits."""',
    ],
)
def test_names_keys_and_phrases_of_the_field_are_left_alone(source: str) -> None:
    assert list(find_in_code(source, "forge/a.py")) == []


def test_a_page_is_searched_outside_of_its_code() -> None:
    page = "Fix it.\n\n```python\ntold = 1\n```\n\nNobody is `told`.\n"
    (found,) = find_in_page(page, "docs/A.md")
    assert "'nobody'" in found.problem


def test_each_word_is_in_one_list_and_in_lower_case() -> None:
    assert not INSTEAD.keys() & INSTEAD_IN_CODE.keys()
    assert [word for word in (INSTEAD | INSTEAD_IN_CODE) if word != word.lower()] == []


def test_each_text_that_must_stay_is_in_the_files_that_it_stays_for() -> None:
    for text, pattern in FIXED_TEXTS.items():
        files = list(ROOT.glob(pattern))
        assert any(text in file.read_text(encoding="utf-8") for file in files), text
