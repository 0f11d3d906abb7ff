"""Build the site of docs/ and wiki/ into build/site.

pages ──► staging ──► build/site-pages ──► zensical ──► build/site ──► checks
forge sim --html ──► films ─────┘

python -m docs.site.build                         with zensical on PATH
python -m docs.site.build .venv/site/bin/zensical
python -m docs.site.build --url https://example.org/forge/   the address it will have
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from docs.site.link_check import find_problems
from docs.site.navigation import HOME, Section, read_sections
from docs.site.staging import (
    Film,
    find_films,
    linked_files,
    linked_sources,
    source_page,
    stage_page,
)
from forge.cli.main import main as run_forge
from tests.docs.pages import ROOT

HERE = Path(__file__).parent
PAGES, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
CONFIGURATION = ROOT / "build" / "zensical.toml"
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def read_pages() -> dict[str, str]:
    """Return the texts of the pages by their path in the repository."""
    paths = [ROOT / name for name in ROOT_PAGES]
    paths += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "wiki").rglob("*.md")])
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def write_pages(pages: Mapping[str, str], films: Mapping[str, Film], target: Path) -> None:
    """Write the pages, the sources and files that they link to, and their pictures."""
    for path, text in pages.items():
        write(target / page_name(path), stage_page(text, path, films))
        for source in linked_sources(text, path):
            code = (ROOT / source).read_text(encoding="utf-8")
            write(target / f"{source}.md", source_page(source, code))
        for link in linked_files(text, path):
            # The generator reports links to folders, and to what does not exist.
            if (ROOT / link).is_file():
                (target / link).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / link, target / link)
    for name in ("site.css", "favicon.svg"):
        shutil.copy(HERE / name, target)


def page_name(path: str) -> str:
    """Return the path of a page in the site; README.md is its first page."""
    return "index.md" if path == "README.md" else path


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def collect_films(pages: Mapping[str, str]) -> dict[str, Film]:
    """Return the films of all pages by name. Raises SystemExit if two commands write one name."""
    films: dict[str, Film] = {}
    for path, text in pages.items():
        for film in find_films(text):
            if films.setdefault(film.name, film).words != film.words:
                raise SystemExit(
                    f"{path}: another command writes build/{film.name}.html too. "
                    "Give one of the films another name"
                )
    return films


def write_films(films: Mapping[str, Film], folder: Path) -> None:
    """Run the command of each film. Raises SystemExit with its message if one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, film in films.items():
        words = list(film.words)
        words[words.index("--html") + 1] = str(folder / f"{name}.html")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = run_forge(words)
        if status != 0:
            raise SystemExit(f"the film {name}.html: exit status {status}\n{printed.getvalue()}")


def configuration(sections: list[Section], url: str) -> str:
    """Return the configuration of the generator, with the navigation."""
    rows = ",\n".join(f"  {each}" for each in ['{ "forge" = "index.md" }', *map(entry, sections)])
    address = f"site_url = {json.dumps(url)}\n" if url else ""
    text = (HERE / "zensical.toml").read_text(encoding="utf-8")
    return text.replace("[project]\n", f"[project]\n{address}nav = [\n{rows}\n]\n", 1)


def entry(section: Section) -> str:
    """Return a section of the navigation in TOML, whose strings are those of JSON."""
    entries = [f"{{ {json.dumps(title)} = {json.dumps(path)} }}" for title, path in section.pages]
    return f"{{ {json.dumps(section.title)} = [{', '.join(entries)}] }}"


def build(zensical: str, url: str) -> list[str]:
    """Build the site and return what is wrong with it."""
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    pages = read_pages()
    films = collect_films(pages)
    write_pages(pages, films, PAGES)
    write_films(films, PAGES / "films")
    sections = read_sections(pages[HOME], [path for path in pages if path != "README.md"])
    write(CONFIGURATION, configuration(sections, url))
    command = [zensical, "build", "--strict", "--config-file", str(CONFIGURATION)]
    if subprocess.run(command, check=False).returncode != 0:
        return ["zensical failed"]
    sources = {str(Path(page_name(path)).with_suffix(".html")): pages[path] for path in pages}
    return find_problems(SITE, sources, urlsplit(url).path or "/")


def main(words: list[str] | None = None) -> int:
    """Build the site. Returns 1 if something is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m docs.site.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("zensical", nargs="?", default="zensical", help="path of the generator")
    parser.add_argument("--url", default="", help="address of the site, for its map and 404 page")
    arguments = parser.parse_args(words)
    problems = build(arguments.zensical, arguments.url)
    print("\n".join(problems) or f"{SITE.relative_to(ROOT)}/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
