"""Every page runs as it is written, its links lead somewhere, and the tests it names exist.

What a page may hold and how it is run: tests/docs/pages.py.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from forge.cli.options import SAMPLING_OPTIONS, SERVE_OPTIONS
from forge.server.completions import StreamOptions
from forge.server.openapi import REQUEST_MODELS
from tests.docs.page_outputs import with_outputs
from tests.docs.pages import (
    PAGES,
    REPLACEMENTS,
    ROOT,
    SKIPPED_COMMANDS,
    ForkServer,
    PageError,
    find_dead_links,
    is_ready,
    make_targets,
    names_of_tests,
    parse_blocks,
    parse_commands,
    run_blocks,
    run_page,
    starts_with,
    text_outside_blocks,
)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    # Not in tmp_path: the address of a socket has room for a hundred characters.
    with TemporaryDirectory() as folder, closing(ForkServer(Path(folder))) as running:
        yield running


LONG_PAGES = {
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("Clients-OpenAI", "Command-line", "Server", "Simulator")
    ),
    *(ROOT / "docs" / f"{name}.md" for name in ("Messages", "Responses")),
    *(ROOT / "wiki" / f"{name}.md" for name in ("Exploration", "Film")),
    *(ROOT / "wiki" / f"{name}.md" for name in ("Capacity", "KV-tiers", "Token-budget")),
}
"""Pages that start many servers, search many states, or film or simulate many runs."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page in LONG_PAGES)) for page in PAGES],
    ids=page_id,
)
def test_everything_a_page_shows_happens(page: Path, fork_server: ForkServer) -> None:
    run_page(page, fork_server)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert find_dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_tests_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"\btest_\w+", text_outside_blocks(page.read_text("utf-8"))))
    assert named - names_of_tests() == set()


def test_the_readme_shows_the_two_commands_a_newcomer_needs() -> None:
    blocks = parse_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [
        text for b in blocks if b.language in {"sh", "bash"} for _, text in parse_commands(b)
    ]
    for needed in ("make serve", "make test"):
        assert any(starts_with(command, needed) for command in commands), needed


def test_the_tables_of_commands_name_targets_that_exist() -> None:
    named = {words for words in [*SKIPPED_COMMANDS, *REPLACEMENTS] if words.startswith("make ")}
    assert {words.removeprefix("make ") for words in named} <= make_targets()


# Whatever a user can write is on a page. The tables of options: tests/cli/test_cli.py.

SERVER = ROOT / "docs" / "Server.md"
FIELD_PAGES = {
    "/v1/responses": ROOT / "docs" / "Responses.md",
    "/v1/messages": ROOT / "docs" / "Messages.md",
    "/v1/messages/count_tokens": ROOT / "docs" / "Messages.md",
}
"""Page of a route's fields, where that is not SERVER."""
OTHER_FLAGS = {"--init": "of docker", "--stop": "of forge generate", "--config": "a flag only"}
"""Flags on the pages of the server that no option has."""


def words_in_code(page: Path) -> set[str]:
    """Every word that is in `code` in the text of a page."""
    text = text_outside_blocks(page.read_text(encoding="utf-8"))
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("path", REQUEST_MODELS)
def test_every_field_of_a_request_is_on_the_page(path: str) -> None:
    body, page = REQUEST_MODELS[path], FIELD_PAGES.get(path, SERVER)
    assert {*body.model_fields, *body.unsupported} - words_in_code(page) == set()


def test_every_field_inside_a_field_is_on_the_page() -> None:
    assert set(StreamOptions.model_fields) - words_in_code(SERVER) == set()


def error_codes(source: str) -> set[str]:
    """The codes that errors are made with in a source."""
    found: set[str] = set()
    code_positions = {"APIError": 1, "InvalidRequest": 3}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        position = code_positions.get(node.func.id, len(node.args))
        arguments = [
            *node.args[position : position + 1],
            *(k.value for k in node.keywords if k.arg == "code"),
        ]
        found |= {each.value for each in arguments if isinstance(each, ast.Constant)}
    return found


def test_every_code_of_an_error_is_on_the_page() -> None:
    files = [*(ROOT / "forge").glob("*.py"), *(ROOT / "forge" / "server").rglob("*.py")]
    codes = set().union(*(error_codes(file.read_text(encoding="utf-8")) for file in files))
    assert {"queue_full", "too_many_connections", "empty_prompt"} <= codes
    assert codes - words_in_code(SERVER) == set()


@pytest.mark.parametrize("name", ["Deployment.md", "Responses.md", "Security.md", "Server.md"])
def test_the_flags_that_a_page_names_exist(name: str) -> None:
    text = text_outside_blocks((ROOT / "docs" / name).read_text(encoding="utf-8"))
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    no = {f"--no-{each.flag[2:]}" for each in SERVE_OPTIONS if each.value_type is bool}
    assert (
        named - {each.flag for each in (*SERVE_OPTIONS, *SAMPLING_OPTIONS)} - no - set(OTHER_FLAGS)
        == set()
    )
    assert named


@pytest.mark.parametrize(
    ("shown", "fault"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", 'page.md", line 6'),
        ("```python\nraise SystemExit(0)\n```\n", "ends the program"),
        ("```sh\ntrue\nfalse\n```\n", "line 3: false\nexit status 1"),
        ("```sh\nforge no-such-command\n```\n", "exit status 2"),
        ("```sh\ncurl -s http://127.0.0.1:8080/healthz\n```\n", "exit status 7"),
        ("```sh\nmake dinner\n```\n", "no target dinner"),
        ("```sh\ngit push\n```\n", "in no table"),
        ("```sh\necho 'open\n```\n", "cannot parse"),
        ("```basic\n10 GOTO 10\n```\n", "no language"),
        ("```\nplain\n```\n", "no language"),
        ("```sh\ntrue\n", "not closed"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "line 2: the page does not show"),
        ("```python\nx = 1\n```\n```text\n1\n```\n", "line 2: the page does not show"),
        ("```sh\necho a\necho b\n```\n\n```text\na\n```\n", "line 2: the page does not show"),
        ("```python\nprint(1)\n```\n", "line 2: the page does not show"),
    ],
)
def test_a_page_that_shows_what_does_not_happen_fails(
    tmp_path: Path, fork_server: ForkServer, shown: str, fault: str
) -> None:
    page = tmp_path / "wiki" / "page.md"
    page.parent.mkdir()
    page.write_text(shown, encoding="utf-8")
    with pytest.raises(PageError, match=re.escape(fault)):
        run_page(page, fork_server)


def test_a_page_with_json_that_does_not_parse_fails(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```json\n{,}\n```\n", encoding="utf-8")
    with pytest.raises(json.JSONDecodeError):
        run_page(page, fork_server)


def test_blocks_of_a_page_share_names_and_commands_may_span_lines(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    page = tmp_path / "page.md"
    kept = tmp_path / "kept"
    page.write_text(
        f"""
```python
total = 40
```
1. In a list:
   ```sh
   # A comment, an open quote, a backslash, a status other than 0.
   printf '%s
   ' one \\
     two > {kept}
   exit 3   # exit 3
   ```
```python
with open({str(kept)!r}, "a") as out:
    out.write(str(total + 2))
```
""",
        encoding="utf-8",
    )
    run_page(page, fork_server)
    assert kept.read_text(encoding="utf-8") == "one\ntwo\n42"


def test_outputs_are_written_under_the_blocks_that_print(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    page = tmp_path / "wiki" / "page.md"
    page.parent.mkdir()
    silent = (
        "```python\nx = 1\n```\n\n```sh\necho seen\n```\n\nIn other words:\n\n```text\nx\n```\n"
    )
    missing = "1. One:\n   ```python\n   print('a ')\n   print()\n   print('b')\n   ```\n"
    stale = "```sh\necho 127.0.0.1:8080\n```\n\n```text\nold\n```\n"
    gone = "```python\nx = 2\n```\n\n```text\nold\n```\n"
    page.write_text(silent + missing + stale + gone, encoding="utf-8")
    text = with_outputs(page.read_text(encoding="utf-8"), run_blocks(page, fork_server))
    missing += "\n   ```text\n   a\n\n   b\n   ```\n"
    stale = stale.replace("old", "127.0.0.1:8080")
    assert text == silent + missing + stale + gone.partition("\n\n")[0] + "\n"
    page.write_text(text, encoding="utf-8")
    run_page(page, fork_server)


def test_a_page_calls_the_server_it_starts_and_nothing_of_it_stays(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    page = tmp_path / "page.md"
    address = tmp_path / "address"
    page.write_text(
        f"""
```sh
make serve ARGS="--max-num-seqs 2"
curl -s http://127.0.0.1:8080/healthz
curl -s http://localhost:8080/nowhere   # 404
echo 127.0.0.1:8080 > {address}
```
""",
        encoding="utf-8",
    )
    run_page(page, fork_server)
    port = int(address.read_text(encoding="utf-8").rpartition(":")[2])
    assert port != 8080
    assert not is_ready(port)


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `noun` per page\n[a](page.md) [b](#one-noun-per-page) [c](none.md) [d](#two)\n"
        "`[e](in-code.md)` [f](https://example.org)\n```text\n[g](in-a-block.md)\n```\n",
        encoding="utf-8",
    )
    assert find_dead_links(page) == ["none.md", "#two"]
