"""Framing: valid bytes pass unchanged; the first invalid one ends them, however they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import h11
import pytest

from forge.server.framing import INVALID_BYTES, Framing

HEAD = b"POST /generate HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"

VALID = [
    GET,
    GET + GET,
    HEAD + b"content-length: 4\r\n\r\n\n \n\r" + GET,
    HEAD + b"Content-Length:\t0  \r\n\r\n" + GET,
    CHUNKED + b"3\r\n\n\n\n\r\n1\r\n \r\n0\r\n\r\n" + GET,
    CHUNKED + b'a;name="x; y" \r\n0123456789\r\n000  \r\nx: y\r\nz:\r\n\r\n' + GET,
    CHUNKED + b"ffffffffffffffff\r\n",
]
INVALID = [
    (b"", b"GET / HTTP/1.1\nhost: a\r\n\r\n"),
    (b"GET / HTTP/1.1\r\n", b"host: a\n\r\n"),
    (b"GET / HTTP/1.1\r\nhost: a\r\n", b"\n"),
    (b"GET / HTTP/1.1\r\n", b"host: a\rx: b\r\n\r\n"),
    (b"GET / HTTP/1.1\r\nhost: a\r\n", b" folded\r\n\r\n"),
    (b"GET / HTTP/1.1\r\n", b"\thost: a\r\n\r\n"),
    (b"", b" GET / HTTP/1.1\r\n"),
    (b"GET / HTTP/1.1\r\nhost: a\r\n", b": v\r\n\r\n"),
    (b"GET / HTTP/1.1\r\nhost: a\r\n", b":\r\n\r\n"),
    (CHUNKED + b"0\r\n", b": v\r\n\r\n"),
    (GET, b"GET / HTTP/1.1\nhost: a\r\n\r\n"),
    (HEAD, b"transfer-encoding: chunked\n\r\n"),
    (HEAD + b"content-length: 1\r\ncontent-length: 1\r\n", b"\r\n"),
    (HEAD + b"content-length: 1, 1\r\n", b"\r\n"),
    (HEAD + b"content-length: +1\r\n", b"\r\n"),
    (HEAD + b"content-length: \xb9\r\n", b"\r\n"),
    (HEAD + b"content-length:\r\n", b"\r\n"),
    (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n", b"\r\n"),
    (HEAD + b"transfer-encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"\r\n"),
    (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n", b"\r\n"),
    (CHUNKED, b"11111111111111111\r\n"),
    (CHUNKED, b"-1\r\n"),
    (CHUNKED, b"0x1\r\n"),
    (CHUNKED, b"1_0\r\n"),
    (CHUNKED, b" 1\r\n"),
    (CHUNKED, b"1\n"),
    (CHUNKED, b"1;a\nb\r\n"),
    (CHUNKED, b"1;a\rb\r\n"),
    (CHUNKED, b"1;a\x00\r\n"),
    (CHUNKED, b"\r\n"),
    (CHUNKED + b"1\r\nab"[:-1], b"b\r\n"),
    (CHUNKED + b"1\r\na", b"\n"),
    (CHUNKED + b"0\r\n", b"\n"),
    (CHUNKED + b"0\r\nx: y\r\n", b" z\r\n\r\n"),
    (CHUNKED + b"0\r\n", b"x: y\n\r\n"),
]


def filter_all(framing: Framing, data: bytes) -> bytes:
    """Return the bytes for the parser, read line by line."""
    found = b""
    while data:
        output, num_bytes = framing.filter(data, 1)
        assert num_bytes > 0
        found, data = found + output, data[num_bytes:]
    return found


def parse_parts(parts: Iterable[bytes]) -> tuple[bytes, Framing]:
    """Return the bytes for the parser of data that comes in these parts."""
    framing = Framing()
    return b"".join(filter_all(framing, part) for part in parts), framing


def split_everywhere(data: bytes) -> Iterator[list[bytes]]:
    """Yield the bytes whole, one by one, and cut in two at each position."""
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for position in range(1, len(data)):
        yield [data[:position], data[position:]]


@pytest.mark.parametrize("data", VALID)
def test_valid_bytes_pass_unchanged(data: bytes) -> None:
    for parts in split_everywhere(data):
        found, framing = parse_parts(parts)
        assert (found, framing.error) == (data, None)


@pytest.mark.parametrize(("right", "wrong"), INVALID)
def test_invalid_bytes_are_refused_by_the_parser_where_they_begin(
    right: bytes, wrong: bytes
) -> None:
    """A part of the invalid line may have passed before its invalid byte."""
    for parts in split_everywhere(right + wrong + GET):
        found, framing = parse_parts(parts)
        assert framing.error is not None and found.endswith(INVALID_BYTES)
        before = found.removesuffix(INVALID_BYTES)
        assert (right + wrong).startswith(before) and len(before) >= len(right)
        assert framing.filter(GET, 99) == (b"", len(GET))
        assert is_refused(found)


def is_refused(data: bytes) -> bool:
    """Return whether h11 refuses the bytes without needing more of them."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    with suppress(h11.RemoteProtocolError):
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if event is h11.PAUSED:
                parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                parser.send(h11.EndOfMessage())
                parser.start_next_cycle()
        return False
    return True


def test_one_empty_line_before_a_request_is_left_out() -> None:
    for parts in split_everywhere(b"\r\n" + GET + b"\r\n" + GET):
        assert parse_parts(parts)[0] == GET + GET
    framing = Framing()
    assert filter_all(framing, b"\r\n\r\n" + GET) == b"\r\n" + GET, "h11 refuses a second one"
