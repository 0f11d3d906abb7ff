"""Checks of the built site: links, code, tables and search, and nothing is loaded from elsewhere.

Owns the rules. Reads the HTML that a browser would get, so it also sees what templates add.

    a link        leads to a file, and to an anchor of it
    a page        loads nothing from another site
                  has the blocks of code and the tables of its source
                  is in the index of the search
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from tests.docs.pages import parse_blocks, text_outside_blocks

EXTERNAL = ("http:", "https:", "mailto:", "//")
FILMS = "films/"
"""Pages of `forge sim --html`: their fragments are positions, not anchors."""


class BuiltPage(HTMLParser):
    """The ids of a page, its links, the addresses that a browser loads with it, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        of = {name: value or "" for name, value in attributes}
        self.ids |= {of[key] for key in ("id", "name") if key in of and tag != "meta"}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag == "link" and of.get("rel") not in ("canonical", "alternate"):
            self.loads.append(of.get("href", ""))
        elif "src" in of:
            self.loads.append(of["src"])


def find_problems(site: Path, sources: Mapping[str, str], root: str = "/") -> list[str]:
    """Return what is wrong with a site, one line each.

    sources     text of each page in Markdown, by the path of its HTML in the site
    root        path of the site on its server, with which the links of its 404 page begin
    """
    pages = {
        path.relative_to(site).as_posix(): BuiltPage(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    problems = []
    for name, page in pages.items():
        problems += [f"{name} loads {each}" for each in page.loads if each.startswith(EXTERNAL)]
        for link in [*page.links, *page.loads]:
            here = link.removeprefix(root) if name == "404.html" else link
            if not link.startswith((*EXTERNAL, "data:")) and not resolves(site, pages, name, here):
                problems.append(f"{name}: {link} leads nowhere")
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    searched = {item["location"].partition("#")[0] for item in index["items"] if item["text"]}
    problems += [f"{name} is not in the search" for name in sources if name not in searched]
    for name, text in sources.items():
        problems += [f"{name} {each}" for each in find_missing(pages[name].tags, text)]
    return problems


def find_missing(tags: Counter[str], text: str) -> list[str]:
    """Return how many tables or blocks of code of a source a page lacks."""
    prose = text_outside_blocks(text)
    expected = {
        "pre": len(parse_blocks(text)),
        "table": len(re.findall(r"^\|(?: *:?-+:? *\|)+$", prose, re.MULTILINE)),
    }
    return [f"has {tags[tag]} <{tag}> of {n}" for tag, n in expected.items() if tags[tag] != n]


def resolves(site: Path, pages: dict[str, BuiltPage], name: str, link: str) -> bool:
    """Return True if a link on a page leads to a file, and to an anchor of it if it names one."""
    address, fragment = urldefrag(unquote(link))
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), address))
    target = name if not address else target
    if (site / target).is_dir():
        target = posixpath.normpath(posixpath.join(target, "index.html"))
    if not (site / target).exists():
        return False
    is_film = target.startswith(FILMS)
    return not fragment or is_film or target not in pages or fragment in pages[target].ids
