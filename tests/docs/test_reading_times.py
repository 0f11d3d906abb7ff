"""The minutes of wiki/Home.md follow from the pages: words, and blocks of code and output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, parse_blocks, text_outside_blocks

WIKI = ROOT / "wiki"
ROW = re.compile(r"^\| (\d+) \| \[[^\]]+\]\(([\w-]+\.md)\)", re.MULTILINE)
WORDS_PER_MINUTE, BLOCKS_PER_MINUTE = 200, 2
WITHOUT_MINUTES = {
    *("Glossary.md", "Invariants.md", "Measurements.md", "decisions.md"),
    *("Releasing.md", "Style.md", "Testing.md", "Exercises.md"),
}
"""Pages to look things up in or to work with, and those about changing forge."""


def reading_minutes(text: str) -> float:
    words, blocks = len(text_outside_blocks(text).split()), len(parse_blocks(text))
    return words / WORDS_PER_MINUTE + blocks / BLOCKS_PER_MINUTE


def listed_minutes() -> dict[str, int]:
    """Return the minutes of each page in the tables."""
    rows = ROW.findall((WIKI / "Home.md").read_text(encoding="utf-8"))
    assert len(rows) == len({page for _, page in rows}), "a page is there twice"
    return {page: int(minutes) for minutes, page in rows}


def test_every_page_is_in_the_reading_order_or_a_reference() -> None:
    pages = {page.name for page in WIKI.glob("*.md")}
    assert pages - listed_minutes().keys() - WITHOUT_MINUTES == set()


def test_minutes_are_those_of_the_rule() -> None:
    """Within a quarter or two minutes: a page may change a little without Home."""
    wrong = {}
    for page, minutes in listed_minutes().items():
        exact = reading_minutes((WIKI / page).read_text(encoding="utf-8"))
        if abs(minutes - exact) > max(2, exact / 4):
            wrong[page] = f"{minutes}, should be {exact:.0f}"
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("word " * 400, 2.0),
        ("word " * 200 + "\n```python\n" + "x = 1\n" * 500 + "```\n", 1.5),
        ("```text\na b c\n```\n\n```sh\ntrue\n```\n", 1.0),
    ],
)
def test_words_in_blocks_do_not_count(text: str, minutes: float) -> None:
    assert reading_minutes(text) == minutes


def test_the_first_page_is_the_one_that_explains_the_words() -> None:
    first = next(iter(listed_minutes()))
    text = Path(WIKI / first).read_text(encoding="utf-8")
    words = ("KV cache", "prefill", "decode", "roofline", "TTFT", "ITL", "goodput", "scheduler")
    assert [word for word in words if word not in text] == []
