"""Pages as the generator reads them: links to sources lead to pages, and films can be opened.

Owns the changes of a page's text. The pages of the repository are written for GitHub, and stay so.

    [scheduler](../forge/scheduler.py)       ─► a page with the source
    forge sim ... --html build/thrash.html   ─► a link to the film, made by that command
    ![...](film.png) after such a command    ─► the film; the picture where there is no room
    `thrash.html#at=490&seq=24`              ─► a link to that frame
"""

from __future__ import annotations

import html
import posixpath
import re
import shlex
from collections.abc import Collection
from typing import NamedTuple

from tests.docs.pages import parse_blocks, parse_commands, text_outside_blocks

FILM_FILE = re.compile(r"build/([\w-]+)\.html$")


class Film(NamedTuple):
    """A film that a page shows.

    name    of its file
    words   arguments of forge
    line    last line of its block, counted from 1
    frame   first fragment of its address on the page, or nothing
    """

    name: str
    words: tuple[str, ...]
    line: int
    frame: str


def find_films(text: str) -> list[Film]:
    """Return the films that the commands of a page write into the folder build."""
    films = []
    for block in parse_blocks(text):
        if block.language not in ("sh", "bash") or "--html" not in block.text:
            continue
        for _, command in parse_commands(block):
            words = shlex.split(command.replace("\\\n", " "))
            if words[:2] != ["forge", "sim"] or "--html" not in words[2:]:
                continue
            # A subcommand such as replay reads a file that other commands wrote.
            found = FILM_FILE.match(words[words.index("--html") + 1])
            if found and words[2].startswith("--"):
                frame = re.search(rf"`{found[1]}\.html(#[^`]+)`", text)
                end = block.line + block.text.count("\n")
                films.append(Film(found[1], tuple(words[1:]), end, frame[1] if frame else ""))
    return films


def linked_paths(text: str, path: str) -> list[str]:
    """Return the paths in the repository to which the links and pictures of a page lead."""
    links = re.findall(r"\]\(([^)\s#:]+)[)#]", text_outside_blocks(text))
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), each)) for each in links]


def linked_sources(text: str, path: str) -> list[str]:
    """Return the paths of the sources to which a page links; the site has a page for each."""
    return [each for each in linked_paths(text, path) if each.endswith(".py")]


def linked_files(text: str, path: str) -> list[str]:
    """Return the paths of pictures and data to which a page links."""
    return [each for each in linked_paths(text, path) if not each.endswith((".py", ".md"))]


def stage_page(text: str, path: str, film_names: Collection[str]) -> str:
    """Return the text of a page for the generator."""
    up = "../" * path.count("/")
    films = {film.line: film for film in reversed(find_films(text))}
    lines: list[str] = []
    fenced = False
    film = None
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r" *(```|~~~)", line):
            fenced = not fenced
        elif not fenced:
            # Python-Markdown begins a list after an empty line only.
            if re.match(r"(- |\d+\. )", line) and lines and re.match(r"\w", lines[-1]):
                lines.append("")
            if film and line.startswith("!["):
                lines += [film_frame(film, up), ""]
                line += "{ .film-picture }"
            film = film if not line else None
            line = stage_line(line, up, film_names)
        lines.append(line)
        if number in films:
            film = films[number]
            address = f"{up}films/{film.name}.html{film.frame}"
            lines += ["", f"[Open this film: {film.name}.html]({address})", ""]
    return "\n".join([*lines, ""])


def stage_line(line: str, up: str, film_names: Collection[str]) -> str:
    """Return a line of prose with links to pages of sources, the first page and films."""
    line = re.sub(r"\]\(([^)\s#:]+\.py)(?:#[^)\s]*)?\)", r"](\1.md)", line)
    line = re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", line)
    line = line.replace("<details>", '<details markdown="1">')
    names = "|".join(map(re.escape, film_names))
    if not names:
        return line
    return re.sub(rf"(?<!\[)`((?:{names})\.html[^`\s]*)`", rf"[`\1`]({up}films/\1)", line)


def film_frame(film: Film, up: str) -> str:
    """Return the HTML that shows a film within a page."""
    address = html.escape(f"{up}films/{film.name}.html{film.frame}")
    return (
        f'<iframe class="film" src="{address}" title="Film: {film.name}" loading="lazy"></iframe>'
    )


def source_page(path: str, source: str) -> str:
    """Return a page with a source, which the search leaves out."""
    front = f'---\ntitle: "{path}"\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n'
    return f"{front}\n# {path}\n\n~~~~~~ python\n{source}~~~~~~\n"
