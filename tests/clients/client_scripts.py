"""The scripts of the clients: what each does, and the packages that it needs.

Owns how a script states these: its docstring is `name: what is done`, its head that of PEP 723.
Knows no server.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.clients.client_pages import ClientRow

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-clients"


class Client(NamedTuple):
    """A client's script, what it does, and the packages it needs."""

    name: str
    script: Path
    done: str
    requirements: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def package(self) -> str:
        """Name of the client's own package, as pip writes it."""
        return re.split(r"[^\w.-]", self.requirements[0])[0]

    def row(self, result: str) -> ClientRow:
        """Return the row of the table. Its version is the one that is installed."""
        package, _, version = self.requirements[0].partition("==")
        return ClientRow(self.name, version, package, self.done, result)


def clients() -> list[Client]:
    """Return every with_NAME.py in this folder, by name."""
    found = []
    for script in sorted(HERE.glob("with_*.py")):
        source = script.read_text("utf-8")
        _, _, done = (ast.get_docstring(ast.parse(source)) or "").partition(": ")
        head = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", source, re.M)
        assert head, f"{script.name} does not say what it needs: begin it with a `# /// script`"
        stated = tomllib.loads(re.sub(r"^# ?", "", head[1], flags=re.M))
        name = script.stem.removeprefix("with_").replace("_", "-")
        done = " ".join(done.partition("\n\n")[0].rstrip(".").split())
        found.append(Client(name, script, done, tuple(stated["dependencies"])))
    return found
