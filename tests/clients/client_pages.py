"""The pages of the clients: the commands that they show, and the table of what was run.

Owns where a client is shown. Knows no server and no environment.

    docs/Clients-*.md    ## openai            one section for each client
                         ```text              its commands, which run.py runs after the script
    docs/Clients.md      | client | ...       a row for each client, which run.py --write replaces
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX = DOCS / "Clients.md"
ADDRESS = "127.0.0.1:8080"
"""Address of the server on the pages. Its key is `none` there."""
HEADER = (
    "| client | version | Python package | what was done | result |",
    "|---|---|---|---|---|",
)
_SETUP = ("pip install", "npm install", "forge serve")
"""How a line begins that the runner has already done in its own way."""


class ClientRow(NamedTuple):
    """A row of the table. `result` is "passed", or what failed."""

    name: str
    version: str
    package: str
    done: str
    result: str

    def write(self) -> str:
        """Return the line of the table."""
        page, _ = find_section(self.name)
        link = f"[{self.name}]({page.name}#{self.name})"
        return f"| {link} | {self.version} | `{self.package}` | {self.done} | {self.result} |"


def find_section(name: str) -> tuple[Path, str]:
    """Return the page that has the client's section, and the section."""
    found = []
    for page in sorted(DOCS.glob("Clients-*.md")):
        text = page.read_text("utf-8")
        sections = re.findall(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        found += [(page, section) for section in sections]
    assert len(found) == 1, f"{name} has {len(found)} sections in docs/Clients-*.md, not one"
    return found[0]


def shown_commands(name: str, address: str) -> str:
    """Return the commands of the client's section, for the server at this address."""
    _, section = find_section(name)
    blocks = re.findall(r"^```(?:sh|text)\n(.*?)^```$", section, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = "\n".join(line for line in lines if not line.startswith(_SETUP))
    assert commands, f"the section of {name} shows no command"
    return commands.replace(ADDRESS, address)


def read_rows() -> dict[str, str]:
    """Return the lines of the table by client."""
    text = INDEX.read_text("utf-8")
    return {m[1]: m[0] for m in re.finditer(r"^\| \[([^]]+)\]\(Clients-.*\|$", text, re.M)}


def write_rows(rows: Sequence[ClientRow], names: Sequence[str]) -> None:
    """Replace these rows of the table, and keep the others that are in `names`."""
    lines: Mapping[str, str] = read_rows() | {row.name: row.write() for row in rows}
    text = INDEX.read_text("utf-8")
    before, _, after = text.partition("\n".join(HEADER))
    _, _, after = after.partition("\n\n")
    table = "\n".join([*HEADER, *(lines[name] for name in names if name in lines)])
    INDEX.write_text(f"{before}{table}\n\n{after}", "utf-8")
