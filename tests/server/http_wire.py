"""HTTP/1.1 as bytes: the requests of a test and the responses it reads, without a library between.

A request is bytes, so that a test may damage it in any way. `PersistentConnection` keeps its
connection, on an event loop; a `RawExchange` blocks, and has a separate connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, NamedTuple

KEY = "sesame"
HOST = "host: localhost"
JSON = "content-type: application/json"
AUTHORIZATION = f"authorization: Bearer {KEY}"

Address = tuple[str, int]


class WireResponse(NamedTuple):
    """A whole response. A header that comes twice has its last value."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def build_head(method: str, path: str, *headers: str) -> bytes:
    """Return the head of a request, with these headers and no others."""
    return ("\r\n".join([f"{method} {path} HTTP/1.1", *headers]) + "\r\n\r\n").encode("latin-1")


def build_post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a request with a key and a body of JSON."""
    length = f"content-length: {len(body)}"
    return build_head("POST", path, HOST, JSON, AUTHORIZATION, length, *headers) + body


class RawExchange:
    """A request on a separate connection: sent at once, its response is read on demand."""

    def __init__(self, address: Address, request: bytes, timeout_s: float) -> None:
        self._connection = socket.create_connection(address, timeout=timeout_s)
        try:
            self._connection.sendall(request)
        except ConnectionError:
            pass  # the server has closed its side; its response can still be read

    def read_responses(self, count: int) -> list[WireResponse]:
        """Return the first `count` responses; fewer if the server ends the connection."""
        data = b""
        with self._connection:
            while chunk := self._connection.recv(2**20):
                data += chunk
                if len(found := _parse_responses(data)) >= count:
                    return found
        return _parse_responses(data)

    def read_until_close(self) -> list[WireResponse]:
        """Return all responses until the server ends the connection, or raise TimeoutError."""
        data = b""
        with self._connection:
            try:
                while chunk := self._connection.recv(2**20):
                    data += chunk
            except ConnectionResetError:
                pass
        return _parse_responses(data)

    def close(self) -> None:
        """Leave without reading a response."""
        self._connection.close()


def send_request(address: Address, request: bytes, timeout_s: float) -> WireResponse:
    """Return the response to one request."""
    (answer,) = RawExchange(address, request, timeout_s).read_responses(1)
    return answer


def _parse_responses(data: bytes) -> list[WireResponse]:
    """Return the responses that are complete, in order."""
    answers = []
    stream = BytesIO(data)
    while (end := data.find(b"\r\n\r\n", stream.tell())) >= 0:
        status, headers = _parse_head(stream.read(end + 4 - stream.tell()))
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(stream.readline() or b"0", 16):
                body += stream.read(size + 2)[:-2]
            if stream.readline() != b"\r\n":
                break
        else:
            length = int(headers.get("content-length", "0"))
            body = stream.read(length)
            if len(body) < length:
                break
        answers.append(WireResponse(status, headers, body))
    return answers


def _parse_head(raw: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = raw.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in rest if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


class PersistentConnection:
    """A connection that is kept, and opened again when the server has ended it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(
        self, request: bytes, on_chunk: Callable[[bytes], object] = lambda chunk: None
    ) -> WireResponse:
        """Return the response to the request.

        on_chunk   called with each chunk of a chunked body when it has come
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=2**20)
        reader, writer = self._streams
        writer.write(request)
        status, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        if headers.get("transfer-encoding") == "chunked":
            chunks = []
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
                on_chunk(chunks[-1])
            await reader.readline()
            body = b"".join(chunks)
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            await self.close()
        return WireResponse(status, headers, body)

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass
