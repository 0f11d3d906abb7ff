"""The glossary has terms that are in use, once each, and links to where they are.

That its links and paths exist: tests/docs/test_pages.py and tests/docs/test_identifiers.py.
"""

from __future__ import annotations

import re

from tests.docs.pages import PAGES, ROOT

GLOSSARY = ROOT / "wiki" / "Glossary.md"
FOLDERS = ("forge", "sim", "tests")
ROW = re.compile(r"^\| (?!term |---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Return term, meaning and links of each row."""
    return ROW.findall(GLOSSARY.read_text(encoding="utf-8"))


def terms() -> list[str]:
    """Return each term. A row may have several, with commas between them."""
    return [term for terms, _, _ in rows() for term in terms.split(", ")]


def squeeze(text: str) -> str:
    """Return the text without what differs between words, identifiers and line ends."""
    return re.sub(r"[\s_-]", "", text).lower()


def test_every_term_is_used() -> None:
    files = [page for page in PAGES if page != GLOSSARY]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    text = squeeze("\n".join(path.read_text(encoding="utf-8") for path in files))
    assert len(terms()) > 60
    assert [term for term in terms() if squeeze(term) not in text] == []


def test_every_term_is_there_once_with_a_meaning_and_a_link() -> None:
    assert sorted(terms()) == sorted(set(terms()))
    bad = [term for term, meaning, link in rows() if not meaning.endswith(".") or "](" not in link]
    assert bad == []
