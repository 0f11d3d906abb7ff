"""The wire between the load generators and a server: requests out, the times of events in.

Owns connections and what is read from them, with no more work per event than to note when it came.
Knows no load. The server may be forge's or a peer's; both get the same prompts of token ids.

    Pool ─► Connection ─► POST ─► event event event ... [DONE] ─► Stream
     ▲          │              └► 429, 503 ─────────────────────► None, and the connection is free
     └── idle ──┘
"""

from __future__ import annotations

import asyncio
import json
import time
from http.client import HTTPConnection
from urllib.parse import SplitResult, urlsplit

from forge.bench.workload import RequestTimes
from forge.errors import InvalidConfig, RequestFailed

DATA = b"data: "
NO_CHOICES = (b'"choices":[]', b'"choices": []')
"""How the event that only reports usage shows itself."""

REJECTIONS = ("429", "503")
"""What a server says that has too much to do: an answer to load, and no failure of it."""

MAX_IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. Servers close them after 5 or more,
and a request that meets the closing is lost."""


class StreamedResponse:
    """One streamed response, fed as its bytes arrive.

    chunk_times_s   when each event with a piece of output was complete
    num_tokens      what the usage event counts; 0 before it
    is_rejected     the server has too much to do
    keep_alive      the connection can take another request after this one
    is_complete     the response is complete
    Raises RequestFailed for any other refusal, an error event, or a response that is not streamed.
    """

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []
        self.num_tokens = 0
        self.is_rejected = False
        self.keep_alive = True
        self.is_complete = False
        self._raw = b""
        self._event_tail = b""
        self._has_head = False
        self._body_bytes = 0  # of a rejection

    def feed(self, data: bytes, now_s: float) -> None:
        """These bytes arrived at this moment."""
        self._raw += data
        if not self._has_head:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(head, rest)
            self._has_head, self._raw = True, rest
        if self.is_rejected:
            self.is_complete = len(self._raw) >= self._body_bytes
            return
        while self._read_chunk(now_s):
            pass

    def _read_head(self, head: bytes, body: bytes) -> None:
        status, *lines = head.decode("latin-1").lower().split("\r\n")
        fields = {
            name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        code = status.split(" ")[1:2]
        self.keep_alive = fields.get("connection") != "close"
        if code and code[0] in REJECTIONS:
            self.is_rejected = True
            # Without a length nobody knows where the next answer would begin.
            self.keep_alive &= "content-length" in fields
            self._body_bytes = int(fields.get("content-length", 0))
            return
        if code != ["200"]:
            first = head.partition(b"\r\n")[0].decode("latin-1")
            raise RequestFailed(f"the server said {first}: {body[:400].decode(errors='replace')}")
        if fields.get("transfer-encoding") != "chunked":
            raise RequestFailed("the server does not stream its response in chunks")

    def _read_chunk(self, now_s: float) -> bool:
        """One whole chunk of the transfer is read, where there is one."""
        line, found, rest = self._raw.partition(b"\r\n")
        if not found:
            return False
        size = int(line.partition(b";")[0], 16)
        if len(rest) < size + 2:
            return False
        self._raw = rest[size + 2 :]
        if size == 0:
            self.is_complete = True
            return False
        *events, self._event_tail = (self._event_tail + rest[:size]).split(b"\n\n")
        for event in events:
            self._read_event(event, now_s)
        return True

    def _read_event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(DATA) or event.startswith(b"data: [DONE]"):
            return
        if any(mark in event for mark in NO_CHOICES):
            self.num_tokens = json.loads(event[len(DATA) :])["usage"]["completion_tokens"]
        elif event.startswith(b'data: {"error"'):
            raise RequestFailed(event[len(DATA) :][:400].decode(errors="replace"))
        else:
            self.chunk_times_s.append(now_s)


class ClientConnection(asyncio.Protocol):
    """One connection, one request at a time. `is_free` while it can take one."""

    def __init__(self) -> None:
        self.is_free = False
        self._transport: asyncio.Transport | None = None
        self._response = StreamedResponse()
        self._completed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for a request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_free = True

    def data_received(self, data: bytes) -> None:
        """The reply has these bytes; a complete or broken one wakes whoever waits for it."""
        now_s = time.perf_counter()
        if self._completed is None or self._completed.done():
            return
        try:
            self._response.feed(data, now_s)
        except (RequestFailed, ValueError, KeyError) as fault:
            self._completed.set_exception(fault)
            return
        if self._response.is_complete:
            self._completed.set_result(None)

    def connection_lost(self, fault: Exception | None) -> None:
        """Whoever waits for a reply learns that none will come."""
        self.is_free = False
        if self._completed is not None and not self._completed.done():
            self._completed.set_exception(RequestFailed(f"the connection was lost: {fault}"))

    async def exchange(self, message: bytes, start_s: float) -> RequestTimes | None:
        """Send one request and wait for the end of its stream; None where it was rejected.

        start_s   what its times are counted from
        """
        assert self._transport is not None and self.is_free, "there is no free connection"
        self.is_free = False
        self._response = reply = StreamedResponse()
        self._completed = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._completed
        self.is_free = reply.keep_alive and not self._transport.is_closing()
        if reply.is_rejected:
            return None
        return RequestTimes(start_s, tuple(reply.chunk_times_s), reply.num_tokens)

    def close(self) -> None:
        """The connection is closed."""
        self.is_free = False
        if self._transport is not None:
            self._transport.close()


class Endpoint:
    """Where the server is, what its model is called there, and how requests to it are written."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        at: SplitResult = urlsplit(url)
        if at.scheme != "http" or at.hostname is None:
            raise InvalidConfig("url", f"{url!r} is not the address of a server", "Use http://...")
        self.host, self.port = at.hostname, at.port or 80
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or self._fetch_model_name()

    def _fetch_model_name(self) -> str:
        connection = HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", "/v1/models", headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except OSError as fault:
            at = f"{self.host}:{self.port}"
            raise InvalidConfig("url", f"no server at {at}: {fault}", "Start one") from None
        finally:
            connection.close()
        if answer.status != 200:
            problem = body[:400].decode(errors="replace")
            raise RequestFailed(f"the server said {answer.status} for its models: {problem}")
        return str(json.loads(body)["data"][0]["id"])

    def build_request(self, prompt: list[int], output: int) -> bytes:
        """The whole request for exactly `output` tokens, streamed, as it goes on the wire."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        fields = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
        }
        lines = [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + body


class ConnectionPool:
    """Connections to one server: an idle one is used again, and where there is none one is opened.

    Their number is that of the requests in flight at most, plus those opened ahead.
    """

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        self._connections: set[ClientConnection] = set()
        self._idle: list[
            tuple[float, ClientConnection]
        ] = []  # with when it became so, oldest first

    async def open(self, count: int) -> None:
        """So many more are idle."""
        for connection in [await self._connect() for _ in range(count)]:
            self.release(connection)

    async def acquire(self) -> ClientConnection:
        """A free connection. Raises RequestFailed where none can be opened."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.is_free and time.perf_counter() - since_s < MAX_IDLE_S:
                return connection
            self._close(connection)
        return await self._connect()

    def release(self, connection: ClientConnection) -> None:
        """Whoever took it needs it no more."""
        self._idle.append((time.perf_counter(), connection))

    def close(self) -> None:
        """All are closed, those in use too."""
        for connection in tuple(self._connections):
            self._close(connection)
        self._idle.clear()

    def _close(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        connection.close()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        host, port = self._server.host, self._server.port
        try:
            _, connection = await loop.create_connection(ClientConnection, host, port)
        except OSError as fault:
            count = len(self._connections)
            raise RequestFailed(
                f"no connection to {host}:{port} beside {count} open ones: {fault}"
            ) from None
        self._connections.add(connection)
        return connection
