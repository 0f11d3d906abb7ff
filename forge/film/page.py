"""The page of a film: one HTML file with its lines, style and code, which needs no network.

Owns how the parts are joined, and the policy that lets the page run its own code alone. Knows no
engine: the lines are those of forge.film.recorder.

    lines ──┐
    page.html, page.css, *.js ──► text of one file; its content security policy names their digests
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from forge.film.state import Line

SCRIPTS = ("fold.js", "draw.js", "page.js", "selftest.js")
NO_NETWORK = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"


def encode_line(line: Line) -> str:
    """Return a line as JSON, without a character that could end the element it stands in."""
    return json.dumps(line, separators=(",", ":")).replace("<", "\\u003c")


def build_page(
    films: Sequence[Sequence[Line]], title: str, checks: Mapping[str, Any] | None = None
) -> str:
    """Return the page of one film, or of several over the same time.

    checks   what the page compares itself with at #selftest
    """
    data = [
        f'<script type="application/x-ndjson" class="film-lines">\n{text}\n</script>'
        for text in ("\n".join(map(encode_line, film)) for film in films)
    ]
    if checks is not None:
        data.append(
            f'<script type="application/json" id="checks">{encode_line({**checks})}</script>'
        )
    page, _ = _join_parts(title, "\n".join(data), (*SCRIPTS, "file.js"), NO_NETWORK)
    return page


def build_live_page(title: str) -> tuple[str, str]:
    """Return the page that reads its film from /film, and its content security policy."""
    parts = _read("live.html"), (*SCRIPTS, "live.js"), f"{NO_NETWORK}; connect-src 'self'"
    return _join_parts(title, *parts)


def _join_parts(title: str, films: str, scripts: Sequence[str], policy: str) -> tuple[str, str]:
    """Return a page of these films and scripts, and the policy with the digests of its code."""
    css, js = _read("page.css"), "\n".join(map(_read, scripts))
    policy = f"{policy}; style-src '{_digest(css)}'; script-src '{_digest(js)}'"
    parts = {"policy": policy, "title": escape(title), "css": css, "films": films, "js": js}
    page = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _read("page.html"))
    return page, policy


def _read(name: str) -> str:
    return files("forge.film").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the source expression of an inline element with this text."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
