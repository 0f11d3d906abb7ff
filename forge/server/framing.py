"""Framing: where each request ends, read as strictly as RFC 9112 has it.

Owns line ends, and the lengths of bodies and chunks. Knows no socket and no answer. A parser that
forgives a lone line feed, a folded line or a second length may see another end of a request than
the proxy before it, and then what one client sent is taken for the request of another. Whatever
is wrong here becomes bytes that no parser takes, at the place where it is wrong. So requests before
it are answered, in order, and h11 refuses this one.

    head ─┬─► content-length ─► that many bytes ──────────────────────────────┬─► next head
          ├─► chunked ─► size line ─► that many bytes ─► line end ─┐          │
          │              ▲    └─ 0 ─► trailers ───────────────────┼──────────┤
          │              └────────────────────────────────────────┘          │
          └─► neither ─────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Callable

POISON = b"\x00\n\r\n"
"""Ends any line, head or trailer, and is part of none."""

# Of a line, or of its beginning. The first character of a folded line is a space.
_FIELD = re.compile(rb"(?:[^\r\n \t][^\r\n]*)?(?:\r\n?)?")
_SIZE = re.compile(rb"(?:[0-9A-Fa-f]{1,16}(?:;[^\r\n\x00]*)?[ \t]*)?(?:\r\n?)?")
_OTHER_VERSION = re.compile(rb"HTTP/[02-9]\.[0-9]")
_END = re.compile(rb"(?:\r\n?)?")


class Framing:
    """Follows the bytes of one connection.

    fault   what is wrong; None while nothing is
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self._left = 0  # bytes of a body or a chunk that are still to come
        self._line = b""
        self._may_be_empty = True
        self._begin_head()

    def read(self, data: bytes) -> bytes:
        """Return the bytes for the parser: these, or those that are right and then POISON.

        One empty line before a request is left out (RFC 9112, 2.2).
        """
        passed = bytearray()
        place = 0
        while place < len(data) and self.fault is None:
            if self._left:
                part = data[place : place + self._left]
                self._left -= len(part)
                passed += part
            else:
                part = data[place : data.find(b"\n", place) + 1 or len(data)]
                passed += self._read_line(part)
            place += len(part)
        return bytes(passed)

    def _read_line(self, part: bytes) -> bytes:
        """Return what the parser has of this part of a line, which ends with a line feed or not."""
        self._line += part
        if not self._allowed.fullmatch(self._line):
            self.fault = "A line does not end with CR LF, is folded or is no size of a chunk"
        elif part.endswith(b"\n"):
            line, self._line = self._line[:-2], b""
            if not line and self._take == self._take_request and self._may_be_empty:
                self._may_be_empty = False
                return b""
            self._take(line)
        return part if self.fault is None else POISON

    def _begin_head(self) -> None:
        self._expect(_FIELD, self._take_request)
        self._lengths: list[bytes] = []
        self._codings: list[bytes] = []
        self._version = b""

    def _expect(self, allowed: re.Pattern[bytes], take: Callable[[bytes], None]) -> None:
        """The next line is like this, and goes there without its end."""
        self._allowed, self._take = allowed, take

    def _take_request(self, line: bytes) -> None:
        self._version = line[-8:]
        if _OTHER_VERSION.fullmatch(self._version):
            self.fault = "Another major version of HTTP"
        self._may_be_empty = True
        self._expect(_FIELD, self._take_field)

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                self._lengths.append(value.strip(b" \t"))
            case b"transfer-encoding":
                self._codings.append(value)
            case b"":
                self._take_body()

    def _take_body(self) -> None:
        """The head is over."""
        if len(self._lengths) + len(self._codings) > 1:
            self.fault = "There are several content-length or transfer-encoding headers"
        elif self._codings and self._version == b"HTTP/1.0":
            self.fault = "HTTP/1.0 has no transfer-encoding"
        elif self._codings:
            self._expect(_SIZE, self._take_size)
        elif self._lengths and not self._lengths[0].isdigit():
            self.fault = "content-length is not a number"
        else:
            length = int(self._lengths[0][:32]) if self._lengths else 0
            self._begin_head()
            self._left = length

    def _take_size(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip(b" \t")
        if not digits:
            self.fault = "A chunk has no size"
        elif size := int(digits, 16):
            self._left = size
            self._expect(_END, lambda line: self._expect(_SIZE, self._take_size))
        else:
            self._expect(_FIELD, self._take_trailer)

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self._begin_head()
