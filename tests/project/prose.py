"""The mechanical part of the style of writing: words to replace, and first words of docstrings.

Owns the lists and the search. What they cannot see, readers must: see CONTRIBUTING.md.

    python -m tests.project.prose                     every finding
    python -m tests.project.prose forge/engine.py     those of some files
    python -m tests.project.prose --count             how many there are in each file
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import PAGES, ROOT, text_outside_blocks

INSTEAD = {
    "anew": "again",
    "apart": "separate, separately",
    "asked": "requested, called",
    "asks": "requests, calls, reads",
    "begun": "started",
    "behind": "after",
    "beside": "alongside, with, next to",
    "for ever": "indefinitely",
    "has no use for": "does not accept",
    "heard": "received",
    "hears": "receives",
    "heed": "check",
    "judged": "tested, accepted or rejected",
    "laid": "placed",
    "mend": "fix",
    "mended": "fixed",
    "nobody": "no request, no caller, nothing",
    "seldom": "rarely",
    "somebody": "a request, a client, a caller",
    "tell": "report, say",
    "tells": "reports, says",
    "told": "given, sent, reported",
    "verdict": "result",
    "wants": "needs, takes",
    "whereupon": "then",
    "whoever": "the caller, the client",
    "whom": "which",
}
"""Word or phrase -> what to write in its place, in code and in pages."""

INSTEAD_IN_CODE = {"who": "that, which: sequences and threads are things"}
"""The same, in code only: pages write of people too."""

PHRASES = INSTEAD | INSTEAD_IN_CODE
"""What code is searched for."""

BEGINNINGS = re.compile(
    r"\b(?:"
    + "|".join(
        r"\b(?=.*\b".join(phrase.split(" ", 1)) + ")" * (" " in phrase) for phrase in PHRASES
    )
    + r")\b",
    re.IGNORECASE,
)
"""Word or phrase of a line, with anything within the phrase. Most lines have none."""

ENDINGS = {
    tuple(phrase.split()): re.compile(r"""\W+(?:\w{1,2}["'])?\W*""".join(phrase.split()) + r"\b")
    for phrase in PHRASES
}
"""Words of a phrase -> where it ends, within one text or over two parts of it, in lower case."""

NOT_FIRST = frozenset(
    "also as at behind beside but by else for from how i if in its it less like more never nobody "
    "of one only so some somebody such than that their there these they this those to what when "
    "where whether which who whoever whose why with".split()
)
"""Words that no docstring begins with. It begins with a verb, or a noun phrase for the result."""

FOREIGN_PHRASES = re.compile(r"behind (?:a |the )?(?:reverse )?(?:proxy|proxies|nginx|Caddy)")
"""Phrases of the field that have one of these words."""

FIXED_TEXTS: dict[str, str] = {
    "behind a prefix": "bench/results/h200-pairs-*.json",
    "together / behind a prefix": "bench/results/h200-pairs-*.json",
}
"""Texts that stay -> the files that have them as keys."""

NOT_PROSE = re.compile(r"``.*?``|`[^`\n]*`|\"[^\"\n]*\"|https?://\S+")
"""Code and quotations within prose."""


class Finding(NamedTuple):
    """A place that does not follow the style: the file, its line, and what to change."""

    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


def may_have_words(source: str) -> bool:
    """Return False if no word or phrase of the lists is in a file of code."""
    lowered = source.lower()
    # Faster than one pattern of all words, which compares each of them at each character.
    return any(
        all(word in lowered for word in words) and ending.search(lowered) is not None
        for words, ending in ENDINGS.items()
    )


def find_words(text: str, words: dict[str, str]) -> list[str]:
    """Return the words of the list that stand in a text, in lower case, one for each place."""
    if not BEGINNINGS.search(text):
        return []
    plain = FOREIGN_PHRASES.sub(" ", NOT_PROSE.sub(" ", text))
    pattern = r"\b(" + "|".join(map(re.escape, words)) + r")\b"
    return [found.lower() for found in re.findall(pattern, plain, re.IGNORECASE)]


def find_in_code(source: str, path: str) -> Iterator[Finding]:
    """Find words and first words in the comments, docstrings and texts of a module."""
    is_test = path.startswith("tests/")
    has_words = may_have_words(source)
    # Parsing takes longer than all else here. Only first words are looked for without it.
    if is_test and not has_words:
        return
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    for node in docstrings:
        first = re.match(r"[\W_]*(\w+)", node.value)
        # A file's tests are sentences; their helpers follow the rule as well as they can.
        if first and first[1].lower() in NOT_FIRST and not is_test:
            problem = f"the docstring begins with {first[1]!r}: begin with a verb or a noun phrase"
            yield Finding(path, node.lineno, problem)
        yield from _word_findings(node.value, path, node.lineno, "a docstring", PHRASES)
    if not has_words:
        return
    documents = {id(node) for node in docstrings}
    # Texts of tests are data: prompts, and outputs of the code under test.
    for node in () if is_test else ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documents:
            continue
        if isinstance(node.value, str) and " " in node.value and node.value not in FIXED_TEXTS:
            yield from _word_findings(node.value, path, node.lineno, "a text", PHRASES)
    # Most modules have no comment with one of the words, and need not be divided into tokens.
    if not any(BEGINNINGS.search(line.partition("#")[2]) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _word_findings(token.string, path, token.start[0], "a comment", PHRASES)


def find_in_page(text: str, path: str) -> Iterator[Finding]:
    """Find words in the prose of a page, outside of code."""
    for number, line in enumerate(text_outside_blocks(text).splitlines(), 1):
        yield from _word_findings(line, path, number, "the page", INSTEAD)


def _word_findings(
    text: str, path: str, line: int, place: str, words: dict[str, str]
) -> Iterator[Finding]:
    for offset, part in enumerate(text.split("\n")):
        for word in find_words(part, words):
            problem = f"{place} has {word!r}: write {words[word]}"
            yield Finding(path, line + offset, problem)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes, functions and of assigned names."""
    for node in _blocks(tree):
        body = getattr(node, "body", [])
        for before, statement in zip((None, *body), body, strict=False):
            text = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
                continue
            documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if before is None and isinstance(node, documented):
                yield text
            elif isinstance(before, ast.Assign | ast.AnnAssign):
                yield text


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and the statements within it that have a body."""
    yield node
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, field, ()):
            if hasattr(inner, "body") or isinstance(inner, ast.Match):
                yield from _blocks(inner)


def code_files(*folders: str) -> list[Path]:
    """Return the Python files of some folders. forge/sim and forge/bench are links to others."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    links = (ROOT / "forge" / "sim", ROOT / "forge" / "bench")
    return [path for path in files if not any(path.is_relative_to(link) for link in links)]


def all_findings() -> list[Finding]:
    """Return the findings in all code and pages."""
    found: list[Finding] = []
    for path in code_files("forge", "sim", "bench", "tests"):
        name = path.relative_to(ROOT).as_posix()
        # This file and its test have the words on purpose.
        if name not in ("tests/project/prose.py", "tests/project/test_prose.py"):
            found += find_in_code(path.read_text(encoding="utf-8"), name)
    for page in PAGES:
        found += find_in_page(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    return found


def main(words: list[str]) -> int:
    """Print the findings, of all files or of those named; 1 where there are some."""
    count = "--count" in words
    paths = [word for word in words if not word.startswith("--")]
    found = [f for f in all_findings() if not paths or any(f.path.startswith(p) for p in paths)]
    if count:
        for name in sorted({finding.path for finding in found}):
            print(f"{sum(finding.path == name for finding in found):5} {name}")
        print(f"{len(found):5} in all")
    else:
        print("\n".join(map(str, found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
