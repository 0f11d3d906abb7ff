"""HTTP client of the load generators: sends requests and notes the times of streamed events.

Owns connections and parsing. The work for each event is to store it and its time. Knows no load.
The server may be forge or a peer; both receive the same prompts of token ids.

    ConnectionPool ─► ClientConnection ─► POST ─► event event ... [DONE] ─► RequestTimes
     ▲                     │                └► 429, 503 ──────────────────► None, connection free
     └──────── idle ───────┘
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urlsplit

from forge.bench.workload import RequestTimes
from forge.errors import InvalidConfig, RequestFailed

DATA = b"data: "
NO_CHOICES = (b'"choices":[]', b'"choices": []')
"""Marks of the event that only reports usage."""

REJECTIONS = ("429", "503")
"""Status codes of an overloaded server: counted as an answer to load, not as a failure."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

MAX_IDLE_S = 2.0
"""Idle connections are not reused after this many seconds.

Servers close them after 5 or more, and a request that meets the close is lost.
"""


class StreamedResponse:
    """A streamed response, parsed as its bytes arrive.

    chunk_times_s   times at which each event with output was complete
    output_events   those events, as they came
    usage           content of the usage event; empty before it
    is_rejected     the server rejected the request as overloaded
    keep_alive      the connection accepts another request after this one
    is_complete     the response is complete
    Raises RequestFailed for any other refusal, an error event, or a response that is not streamed.
    """

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []
        self.output_events: list[bytes] = []
        self.usage: dict[str, Any] = {}
        self.is_rejected = False
        self.keep_alive = True
        self.is_complete = False
        self._raw = b""
        self._event_tail = b""
        self._has_head = False
        self._refusal = ""  # status line of any other refusal
        self._body_bytes = 0  # of a rejection or refusal

    @property
    def num_tokens(self) -> int:
        """Output tokens by the usage event; 0 before it."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the server found in its cache; None where it does not report them."""
        details = self.usage.get("prompt_tokens_details") or {}
        count: int | None = details.get("cached_tokens")
        return count

    @property
    def num_loaded_tokens(self) -> int:
        """Prompt tokens of those that came from host memory or files; 0 if none is reported."""
        details = self.usage.get("prompt_tokens_details") or {}
        tiers = details.get("cached_tokens_by_tier") or {}
        return sum(int(tiers.get(tier, 0)) for tier in ("host", "disk"))

    def token_ids(self) -> list[int]:
        """Return the token ids of the output, for a request with `return_token_ids`.

        Raises RequestFailed where an event has none.
        """
        choices = [json.loads(each[len(DATA) :])["choices"][0] for each in self.output_events]
        if any(choice.get("token_ids") is None for choice in choices):
            raise RequestFailed("the server does not return the token ids of its output")
        return [token for choice in choices for token in choice["token_ids"]]

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse bytes that arrived at `now_s`."""
        self._raw += data
        if not self._has_head:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(head)
            self._has_head, self._raw = True, rest
        if self.is_rejected or self._refusal:
            self._read_refusal()
            return
        while self._read_chunk(now_s):
            pass

    def _read_head(self, head: bytes) -> None:
        status, *lines = head.decode("latin-1").lower().split("\r\n")
        fields = {
            name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        code = status.split(" ")[1:2]
        self.keep_alive = fields.get("connection") != "close"
        if code != ["200"]:
            self.is_rejected = bool(code) and code[0] in REJECTIONS
            if not self.is_rejected:
                self._refusal = head.partition(b"\r\n")[0].decode("latin-1")
            # Without a length the start of the next answer is unknown.
            self.keep_alive &= "content-length" in fields
            self._body_bytes = int(fields.get("content-length", 0))
        elif fields.get("transfer-encoding") != "chunked":
            raise RequestFailed("the server does not stream its response in chunks")

    def _read_refusal(self) -> None:
        """Wait for the body of a rejection or refusal. Raises RequestFailed for the latter."""
        if len(self._raw) < self._body_bytes:
            return
        if self._refusal:
            problem = self._raw[:400].decode(errors="replace")
            if "token_out_of_range" in problem:
                problem += ". Give the size of its vocabulary as --vocab-size"
            raise RequestFailed(f"the server said {self._refusal}: {problem}")
        self.is_complete = True

    def _read_chunk(self, now_s: float) -> bool:
        """Parse one chunk of the transfer encoding. Returns False where none is complete."""
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
            self.usage = json.loads(event[len(DATA) :])["usage"]
        elif event.startswith(b'data: {"error"'):
            raise RequestFailed(event[len(DATA) :][:400].decode(errors="replace"))
        else:
            self.chunk_times_s.append(now_s)
            self.output_events.append(event)


class ClientConnection(asyncio.Protocol):
    """A connection that carries one request at a time. `is_free` while it accepts one."""

    def __init__(self) -> None:
        self.is_free = False
        self._transport: asyncio.Transport | None = None
        self._response = StreamedResponse()
        self._completed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Become free for a request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_free = True

    def data_received(self, data: bytes) -> None:
        """Parse the bytes. A complete or failed response resolves the future of `exchange`."""
        now_s = time.perf_counter()
        if self._completed is None or self._completed.done():
            return
        try:
            self._response.feed(data, now_s)
        except (RequestFailed, ValueError, KeyError) as error:
            self._completed.set_exception(error)
            return
        if self._response.is_complete:
            self._completed.set_result(None)

    def connection_lost(self, fault: Exception | None) -> None:
        """Fail the request in flight."""
        self.is_free = False
        if self._completed is not None and not self._completed.done():
            self._completed.set_exception(RequestFailed(f"the connection was lost: {fault}"))

    async def exchange(self, message: bytes, start_s: float) -> RequestTimes | None:
        """Send a request and wait for the end of its stream. Returns None where it was rejected.

        start_s   the time that the latencies count from
        """
        reply = await self.send(message)
        if reply.is_rejected:
            return None
        return RequestTimes(start_s, tuple(reply.chunk_times_s), reply.num_tokens)

    async def send(self, message: bytes) -> StreamedResponse:
        """Send a request and return its complete response, or its rejection."""
        assert self._transport is not None and self.is_free, "there is no free connection"
        self.is_free = False
        self._response = reply = StreamedResponse()
        self._completed = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._completed
        self.is_free = reply.keep_alive and not self._transport.is_closing()
        return reply

    def close(self) -> None:
        self.is_free = False
        if self._transport is not None:
            self._transport.close()


class Endpoint:
    """The address of a server, the name of its model, and the format of requests."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        at: SplitResult = urlsplit(url)
        if at.scheme != "http" or at.hostname is None:
            raise InvalidConfig("url", f"{url!r} is not the address of a server", "Use http://...")
        self.host, self.port = at.hostname, at.port or 80
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or str(self._fetch_models()[0]["id"])

    def fetch_max_model_len(self) -> int | None:
        """Return the longest sequence of the model, or None where the server does not report it."""
        found = (each for each in self._fetch_models() if each["id"] == self.model)
        length: int | None = next(found, {}).get("max_model_len")
        return length

    def _fetch_models(self) -> list[dict[str, Any]]:
        connection = HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", "/v1/models", headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except OSError as error:
            at = f"{self.host}:{self.port}"
            raise InvalidConfig("url", f"no server at {at}: {error}", "Start one") from None
        finally:
            connection.close()
        if answer.status != 200:
            problem = body[:400].decode(errors="replace")
            raise RequestFailed(f"the server said {answer.status} for its models: {problem}")
        models: list[dict[str, Any]] = json.loads(body)["data"]
        return models

    def build_request(
        self, prompt: Sequence[int], output: int, fields: Mapping[str, Any] = NO_FIELDS
    ) -> bytes:
        """Return the bytes of a streamed request for exactly `output` tokens.

        fields   further fields of its body
        """
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **fields,
            }
        ).encode()
        headers = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + body


class ConnectionPool:
    """Connections to one server. An idle one is reused; where there is none, one is opened.

    Their number is at most that of the requests in flight, plus those opened in advance.
    """

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        self._connections: set[ClientConnection] = set()
        # (time at which it became idle, connection), the oldest first
        self._idle: list[tuple[float, ClientConnection]] = []

    async def open(self, count: int) -> None:
        """Open `count` more idle connections."""
        for connection in [await self._connect() for _ in range(count)]:
            self.release(connection)

    async def acquire(self) -> ClientConnection:
        """Return a free connection. Raises RequestFailed where none can be opened."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.is_free and time.perf_counter() - since_s < MAX_IDLE_S:
                return connection
            self._close(connection)
        return await self._connect()

    def release(self, connection: ClientConnection) -> None:
        """Return a connection to the pool."""
        self._idle.append((time.perf_counter(), connection))

    def close(self) -> None:
        """Close all connections, those in use too."""
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
        except OSError as error:
            count = len(self._connections)
            raise RequestFailed(
                f"no connection to {host}:{port} with {count} open ones: {error}"
            ) from None
        self._connections.add(connection)
        return connection
