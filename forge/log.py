"""Log lines that nobody can forge.

Owns what a record looks like. What a client sent may be part of a message or of an exception: a
line break in it must not begin a line of its own, and a terminal must not obey it.

    ERROR forge.server: request a-1f failed: bad \\x1b[2J\\nERROR nothing of the kind
        | Traceback (most recent call last):
        | ...
"""

from __future__ import annotations

import logging


class PlainLines(logging.Formatter):
    """One line for a message, and indented ones for a traceback, all printable."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message in one line."""
        return plain(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """The traceback. None of its lines can be taken for a message."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    | {plain(line)}" for line in lines)


def write_plainly() -> None:
    """What this process logs goes to standard error, line by line."""
    written = logging.StreamHandler()
    written.setFormatter(PlainLines())
    logging.basicConfig(handlers=[written])


def plain(text: str) -> str:
    """The text with everything that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
