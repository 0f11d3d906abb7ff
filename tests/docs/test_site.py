"""The site of the pages: its navigation, its links to sources and films, and its checks.

`make site` builds the whole of it, and runs those checks on every page.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs.site.build import collect_films, configuration, read_pages
from docs.site.link_check import find_problems
from docs.site.navigation import HOME, Section, read_sections
from docs.site.staging import (
    find_films,
    linked_files,
    linked_sources,
    source_page,
    stage_page,
)
from tests.docs.pages import ROOT
from tests.film.presets import FILMS

PAGES = read_pages()


def pages_of(sections: list[Section]) -> list[str]:
    return [path for section in sections for _, path in section.pages]


def test_the_navigation_has_each_page_once() -> None:
    sections = read_sections(PAGES[HOME], [path for path in PAGES if path != "README.md"])
    found = pages_of(sections)
    assert HOME in found[:3]
    assert sorted(found) == sorted(path for path in PAGES if path != "README.md")


def test_the_navigation_follows_the_tables_and_then_the_other_links_of_home() -> None:
    home = (
        "# Home\n\n[Late](Late.md)\n\n## First\n\n"
        "| 5 | [B](B.md), [A](A.md) |\n| 1 | [B](B.md#x) |\n\n"
        "## Second\n\n| [Server](../docs/Server.md) | [A again](A.md) |\n\n"
        "Using it is in [docs](../docs/Use.md): [use](../docs/Use.md).\n"
    )
    paths = ["NOTES.md", "docs/Use.md", "docs/Server.md", "docs/Rest-of-it.md", "docs/Also.md"]
    paths += ["wiki/A.md", "wiki/B.md", HOME, "wiki/Late.md"]
    rest = (("Also", "docs/Also.md"), ("Rest of it", "docs/Rest-of-it.md"))
    assert read_sections(home, paths) == [
        Section("First", (("Home", HOME), ("B", "wiki/B.md"), ("A", "wiki/A.md"))),
        Section("Second", (("Server", "docs/Server.md"), ("Late", "wiki/Late.md"))),
        Section("Using forge", (("Use", "docs/Use.md"), *rest)),
        Section("Project", (("Notes", "NOTES.md"),)),
    ]


def test_home_stays_where_one_of_its_tables_has_it() -> None:
    home = "## First\n\n| [A](A.md) |\n| [This page](Home.md) |\n"
    (first, *_) = read_sections(home, ["wiki/A.md", HOME])
    assert first.pages == (("A", "wiki/A.md"), ("This page", HOME))


def test_the_configuration_has_the_navigation_and_the_address() -> None:
    section = Section('A "b"', (("C", "wiki/C.md"), ("D", "wiki/D.md")))
    text = configuration([section], "https://example.org/forge/")
    nav = tomllib.loads(text)["project"]["nav"]
    assert nav == [{"forge": "index.md"}, {'A "b"': [{"C": "wiki/C.md"}, {"D": "wiki/D.md"}]}]
    assert 'site_url = "https://example.org/forge/"' in text
    assert "site_url" not in configuration([], "")


def test_links_to_sources_lead_to_pages_with_them() -> None:
    page = (
        "[Seam](../forge/seam.py#L9), [results](../bench/results/a.json), [start](../README.md#x)\n"
    )
    assert linked_sources(page, "wiki/Seam.md") == ["forge/seam.py"]
    assert linked_files(page, "wiki/Seam.md") == ["bench/results/a.json"]
    assert stage_page(page, "wiki/Seam.md", ()) == (
        "[Seam](../forge/seam.py.md), [results](../bench/results/a.json), [start](../index.md#x)\n"
    )
    assert "\n~~~~~~ python\nx = '```'\n~~~~~~\n" in source_page("a.py", "x = '```'\n")


def test_the_films_of_the_wiki_are_found_with_their_commands() -> None:
    films = {film.name: film for film in find_films(PAGES["wiki/Film.md"])}
    assert set(films) == set(FILMS)
    assert films["thrash"].words[:3] == ("sim", "--num-blocks", "160")
    assert films["thrash"].frame == "#at=490&seq=24"


def test_a_picture_after_the_command_of_a_film_becomes_the_film() -> None:
    command = "```sh\nforge sim --seed 3 --html build/one.html\n```\n"
    text = "Go to `one.html#at=5`, not `two.html#at=5` or [`one.html`](other.md).\n"
    page = f"{command}\n![One](one.png)\n\n{text}\n![Two](two.png)\n"
    staged = stage_page(page, "wiki/Page.md", {"one"})
    assert '<iframe class="film" src="../films/one.html#at=5"' in staged
    assert "![One](one.png){ .film-picture }\n" in staged
    link = "[`one.html#at=5`](../films/one.html#at=5)"
    assert f"Go to {link}, not `two.html#at=5` or [`one.html`](other.md).\n" in staged
    assert staged.count("<iframe") == 1 and staged.endswith("![Two](two.png)\n")


def test_two_commands_for_one_film_are_refused() -> None:
    page = "```sh\nforge sim --seed {} \\\n  --html build/one.html\n```\n"
    same = collect_films({"a.md": page.format(1), "b.md": page.format(1)})
    assert same["one"].words == ("sim", "--seed", "1", "--html", "build/one.html")
    with pytest.raises(SystemExit, match=r"b\.md: another command writes build/one\.html too"):
        collect_films({"a.md": page.format(1), "b.md": page.format(2)})


@pytest.mark.parametrize(
    "command",
    [
        "forge sim replay run.jsonl --html build/one.html",
        "forge sim --rate 5 --html run.html",
        "forge sim --rate 5",
        "forge serve --film",
    ],
)
def test_a_command_whose_film_cannot_be_made_or_found_has_no_film(command: str) -> None:
    assert find_films(f"```sh\n{command}\n```\n") == []


def test_what_github_accepts_and_python_markdown_does_not_is_changed() -> None:
    page = "Two:\n- a\n- b\n\n<details><summary>c</summary>\n</details>\n"
    assert stage_page(page, "a.md", ()) == (
        'Two:\n\n- a\n- b\n\n<details markdown="1"><summary>c</summary>\n</details>\n'
    )
    block = "```text\nTwo:\n- a\n[x](a.py)\n```\n"
    assert stage_page(block, "a.md", ()) == block


# The checks of a built site.

SOUND = {
    "index.html": '<a href="wiki/a.html#b"><a href="https://a.org"><img src="p.png"><table>',
    "wiki/a.html": '<h1 id="b">b</h1><a href="../films/f.html#at=3"><pre></pre><a href="#b">',
    "films/f.html": '<script>"<a href=c>"</script>',
    "404.html": '<a href="/forge/wiki/a.html">a</a>',
    "p.png": "",
}
SOURCES = {
    "index.html": "a\n\n| | |\n|---|---:|\n| b | c |\n",
    "wiki/a.html": "# b\n\n```text\nc\n```\n",
}


def write_site(folder: Path, files: Mapping[str, str], searched: tuple[str, ...]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    items = [{"location": each, "text": "words"} for each in searched]
    (folder / "search.json").write_text(json.dumps({"items": items}), encoding="utf-8")
    return folder


def test_a_sound_site_has_no_problems(tmp_path: Path) -> None:
    site = write_site(tmp_path, SOUND, ("index.html", "wiki/a.html#b"))
    assert find_problems(site, SOURCES, "/forge/") == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("index.html", '<table><a href="wiki/b.html">', "index.html: wiki/b.html leads nowhere"),
        (
            "index.html",
            '<table><a href="wiki/a.html#c">',
            "index.html: wiki/a.html#c leads nowhere",
        ),
        ("index.html", '<table><a href="wiki/">', "index.html: wiki/ leads nowhere"),
        ("index.html", '<table><a href="#c">', "index.html: #c leads nowhere"),
        (
            "index.html",
            '<table><iframe src="films/g.html">',
            "index.html: films/g.html leads nowhere",
        ),
        ("404.html", '<a href="/wiki/a.html">', "404.html: /wiki/a.html leads nowhere"),
        ("index.html", '<table><script src="https://a.org/b">', "index.html loads https://a.org/b"),
        ("index.html", '<table><link rel="icon" href="//a.org/b">', "index.html loads //a.org/b"),
        ("wiki/a.html", '<p id="b">```text c```', "wiki/a.html has 0 <pre> of 1"),
        ("index.html", "<p>| | |</p>", "index.html has 0 <table> of 1"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, name: str, text: str, problem: str) -> None:
    site = write_site(tmp_path, SOUND | {name: text}, ("index.html", "wiki/a.html"))
    assert find_problems(site, SOURCES, "/forge/") == [problem]


def test_a_page_that_the_search_does_not_have_is_found(tmp_path: Path) -> None:
    site = write_site(tmp_path, SOUND, ("index.html",))
    assert find_problems(site, SOURCES, "/forge/") == ["wiki/a.html is not in the search"]


def test_the_versions_of_the_generator_are_pinned() -> None:
    lines = (ROOT / "constraints" / "site.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("#") or line.count("==") == 1 for line in lines)
