"""What the container files promise, as far as it can be known without building them."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from forge.cli.main import create_parser
from forge.cli.options import SERVE_OPTIONS
from forge.server.routes import PROBES

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile", "Dockerfile.gpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments, comments left out and lines joined."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def arguments(name: str, word: str) -> list[str]:
    return [rest for each, rest in instructions(name) if each == word]


def is_in_build_context(path: str) -> bool:
    """.dockerignore lets the file into the build. The last line that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there_and_is_sent_to_the_build(name: str) -> None:
    sources = [
        source
        for rest in arguments(name, "COPY")
        if not rest.startswith("--from=")
        for source in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "forge"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert is_in_build_context(source), source


@pytest.mark.parametrize("path", ["docs", "tests", ".git", ".venv", "bench/results"])
def test_what_is_not_needed_is_not_sent(path: str) -> None:
    assert not is_in_build_context(path)


@pytest.mark.parametrize("name", FILES)
def test_the_program_is_forge_itself_and_takes_its_arguments(name: str) -> None:
    """Exec form: a shell in between would keep SIGTERM to itself."""
    (entry,), (default,) = arguments(name, "ENTRYPOINT"), arguments(name, "CMD")
    program, *words = [*json.loads(entry), *json.loads(default)]
    assert program == "forge"
    args = create_parser(words).parse_args(words)
    assert (args.command, args.model) == ("serve", "tiny")


@pytest.mark.parametrize("name", FILES)
def test_the_environment_sets_options_that_exist_and_no_key(name: str) -> None:
    names = set(
        re.findall(r"\b(FORGE_\w+)=", " ".join(arguments(name, "ENV") + arguments(name, "ARG")))
    )
    assert names == {"FORGE_ADDR"}
    assert names <= {each.env_var for each in SERVE_OPTIONS}


@pytest.mark.parametrize("name", FILES)
def test_the_server_runs_without_root_privileges(name: str) -> None:
    found = instructions(name)
    user = found.index(("USER", "10001"))
    assert "--uid 10001" in " ".join(arguments(name, "RUN"))
    assert not {word for word, _ in found[user:]} & {"RUN", "COPY", "ADD", "FROM"}
    assert arguments(name, "USER") == ["10001"]


@pytest.mark.parametrize("name", FILES)
def test_the_health_check_asks_a_path_that_needs_no_key(name: str) -> None:
    (check,) = arguments(name, "HEALTHCHECK")
    (path,) = re.findall(r"'http://127\.0\.0\.1:%s(/\w+)'", check)
    assert path in [spec.path for spec in PROBES]
    command = json.loads(check.partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], name, "exec")
