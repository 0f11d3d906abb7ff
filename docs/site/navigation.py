"""The navigation of the site, in the reading order of wiki/Home.md.

Owns the order and the titles of pages. A page that Home does not name is the last of its folder.

    wiki/Home.md   ## Reading order     ─► a section for each heading with a table
                   links to ../docs/    ─► Using forge
    CONTRIBUTING.md, ... CHANGELOG.md   ─► Project
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

HOME = "wiki/Home.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")


class Section(NamedTuple):
    """A heading of the navigation, with the titles and paths of its pages."""

    title: str
    pages: tuple[tuple[str, str], ...]


def read_sections(home: str, paths: Iterable[str]) -> list[Section]:
    """Return the sections for the text of Home and the paths of all pages, each page once.

    Home has at least one table with a link.
    """
    tables: dict[str, dict[str, str]] = {}
    in_tables: set[str] = set()
    using: dict[str, str] = {}
    heading = ""
    for line in home.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        for title, target in LINK.findall(line):
            path = f"wiki/{target}".replace("wiki/../", "")
            if line.startswith("|") and path not in in_tables:
                tables.setdefault(heading, {})[path] = title
                in_tables.add(path)
            elif path.startswith("docs/") and path not in in_tables:
                # The last of several links to a page has its name.
                using[path] = title[0].upper() + title[1:]
    rest = sorted(path for path in paths if path not in in_tables and path not in using)
    first, last = next(iter(tables)), next(reversed(tables))
    tables[last] |= {path: default_title(path) for path in rest if path.startswith("wiki/")}
    if HOME in rest:
        del tables[last][HOME]
        tables[first] = {HOME: "Home"} | tables[first]
    using |= {path: default_title(path) for path in rest if path.startswith("docs/")}
    project = {path: default_title(path) for path in rest if "/" not in path}
    named = {**tables, "Using forge": using, "Project": project}
    return [Section(title, listed(pages)) for title, pages in named.items()]


def listed(titles: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (title, path) of each page, for titles by path."""
    return tuple((title, path) for path, title in titles.items())


def default_title(path: str) -> str:
    """Return the title of a page that has no link on Home: its file name, as words."""
    name = path.rpartition("/")[2].removesuffix(".md").replace("-", " ")
    return name.capitalize() if name.isupper() else name
