"""Framing: finds where each request ends, as strictly as RFC 9112.

Owns line ends, and the lengths of bodies and chunks. Knows no socket and no response. Some parsers
accept a lone line feed, a folded line or a second length. They may then disagree with the proxy
before them about the end of a request, and bytes of one client pass for another's request. So this
filter replaces the first invalid byte by bytes that no parser accepts. Requests before it are
answered in order, and h11 refuses the invalid one.

    head ─┬─► content-length ─► that many bytes ──────────────────────────────┬─► next head
          ├─► chunked ─► size line ─► that many bytes ─► line end ─┐          │
          │              ▲    └─ 0 ─► trailers ───────────────────┼──────────┤
          │              └────────────────────────────────────────┘          │
          └─► neither ─────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Callable

INVALID_BYTES = b"\x00\n\r\n"
"""Invalid in any line, head or trailer."""

# Patterns of a line or of its beginning. The first character of a folded line is a space, and that
# of a header without a name is a colon: some parsers take it for the end of the head.
_HEADER_LINE = re.compile(rb"(?:[^\r\n \t:][^\r\n]*)?(?:\r\n?)?")
_CHUNK_SIZE_LINE = re.compile(rb"(?:[0-9A-Fa-f]{1,16}(?:;[^\r\n\x00]*)?[ \t]*)?(?:\r\n?)?")
_OTHER_HTTP_VERSION = re.compile(rb"HTTP/[02-9]\.[0-9]")
_CHUNK_END = re.compile(rb"(?:\r\n?)?")


class Framing:
    """Tracks the request boundaries in the bytes of one connection.

    error   what is wrong with the bytes; None while they are valid
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self._num_bytes_left = 0  # bytes of a body or a chunk that are still to come
        self._line = b""
        self._allow_empty_line: bool
        self._begin_head()

    def filter(self, data: bytes, max_lines: int) -> tuple[bytes, int]:
        """Return bytes for the parser, and how many of `data` were read for them.

        Reads at most `max_lines` lines, with the parts of bodies before and between them. The bytes
        are those that were read, or their valid beginning and INVALID_BYTES. One empty line before
        a request is left out (RFC 9112, 2.2).
        """
        output = bytearray()
        position = num_lines = 0
        while position < len(data) and num_lines < max_lines and self.error is None:
            if self._num_bytes_left:
                part = data[position : position + self._num_bytes_left]
                self._num_bytes_left -= len(part)
                output += part
            else:
                part = data[position : data.find(b"\n", position) + 1 or len(data)]
                output += self._read_line(part)
                num_lines += 1
            position += len(part)
        return bytes(output), position if self.error is None else len(data)

    def has_body_left(self, num_bytes: int) -> bool:
        """Return whether more than `num_bytes` of the current request's body may be to come."""
        return self._is_chunked or self._num_bytes_left > num_bytes

    def _read_line(self, part: bytes) -> bytes:
        """Return the bytes for the parser of this part of a line, which may lack its line feed."""
        self._line += part
        if not self._pattern.fullmatch(self._line):
            self.error = (
                "A line does not end with CR LF, is folded, has no name or is not the size of a "
                "chunk"
            )
        elif self._allow_empty_line and self._line in (b"\r", b"\r\n"):
            if part.endswith(b"\n"):
                self._line, self._allow_empty_line = b"", False
            return b""
        elif part.endswith(b"\n"):
            line, self._line = self._line[:-2], b""
            self._on_line(line)
        return part if self.error is None else INVALID_BYTES

    def _begin_head(self) -> None:
        self._expect(_HEADER_LINE, self._on_request_line)
        self._lengths: list[bytes] = []
        self._codings: list[bytes] = []
        self._version = b""
        self._is_chunked = False
        self._allow_empty_line = True

    def _expect(self, pattern: re.Pattern[bytes], on_line: Callable[[bytes], None]) -> None:
        """Expect a next line that matches; call `on_line` with it, without its line end."""
        self._pattern, self._on_line = pattern, on_line

    def _on_request_line(self, line: bytes) -> None:
        self._version = line[-8:]
        if _OTHER_HTTP_VERSION.fullmatch(self._version):
            self.error = "The request has another major version of HTTP"
        self._allow_empty_line = False
        self._expect(_HEADER_LINE, self._on_header)

    def _on_header(self, line: bytes) -> None:
        if not line:
            self._on_head_end()
            return
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                self._lengths.append(value.strip(b" \t"))
            case b"transfer-encoding":
                self._codings.append(value)

    def _on_head_end(self) -> None:
        """Check the lengths of a complete head, and expect its body."""
        if len(self._lengths) + len(self._codings) > 1:
            self.error = "There are several content-length or transfer-encoding headers"
        elif self._codings and self._version == b"HTTP/1.0":
            self.error = "HTTP/1.0 has no transfer-encoding"
        elif self._codings:
            self._is_chunked = True
            self._expect(_CHUNK_SIZE_LINE, self._on_chunk_size)
        elif self._lengths and not self._lengths[0].isdigit():
            self.error = "content-length is not a number"
        else:
            length = int(self._lengths[0][:32]) if self._lengths else 0
            self._begin_head()
            self._num_bytes_left = length

    def _on_chunk_size(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip(b" \t")
        if not digits:
            self.error = "A chunk has no size"
        elif size := int(digits, 16):
            self._num_bytes_left = size
            self._expect(
                _CHUNK_END, lambda line: self._expect(_CHUNK_SIZE_LINE, self._on_chunk_size)
            )
        else:
            self._expect(_HEADER_LINE, self._on_trailer)

    def _on_trailer(self, line: bytes) -> None:
        if not line:
            self._begin_head()
