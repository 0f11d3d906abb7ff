"""HTTPConnection: HTTP/1.1 with time limits, and errors in the shape of all others.

Owns the number of open connections, the time a client may take to send and to read, the work that
its bytes cause at once, and the errors for bytes that are not HTTP. Knows no path. A request
refused here never reaches the application.

    1 ... max_connections     served
      ... 32 overflow ones    0.5 s for one request: a health check is answered, others get 503
      ... any other           503 and closed, before anything is read

    bytes ──► Framing ──► h11 ──► a request, or 400 and closed
          MAX_SLICE_LINES at once; the rest waits in the ParseQueue, and nothing is read meanwhile

    first byte ── read_timeout ──► the whole request is here, else 408 and closed
    a response before the end of its request ── more than MAX_DRAIN_BYTES are left ──► closed
                                             └─ DRAIN_S ──► the whole request is here, else closed
    the buffer is full ── write_timeout ──► the client has read some of it, else cut

Unread bytes wait in three places. First here: at most WRITE_HIGH_WATER_BYTES and one event. Then in
the kernel of this machine, at most SEND_BUFFER_BYTES, then at the client. A request goes on until
all three are full. When the client then reads nothing for `write_timeout` seconds, its connection
is cut. Its request ends like that of a client that left.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from forge.limits import Limits
from forge.server.errors import (
    APIError,
    bad_framing_error,
    bad_host_error,
    headers_too_large_error,
    request_timeout_error,
)
from forge.server.framing import Framing
from forge.server.middleware import OVERFLOW, too_many_connections_error
from forge.server.transport import DRAIN_S, MAX_DRAIN_BYTES, LingeringTransport

WRITE_HIGH_WATER_BYTES = 64 * 2**10
"""Bytes that wait here for the kernel before a response is paused."""
SEND_BUFFER_BYTES = 256 * 2**10
"""Bytes that the kernel buffers for one client. Its default grows to megabytes."""
MAX_OVERFLOW_CONNECTIONS = 32
"""Connections beyond the limit that may send one request, so that a health check is answered."""
OVERFLOW_TIMEOUT_S = 0.5
"""Seconds that an overflow connection may take to send. A health check sends at once."""
MAX_READ_BYTES = 4 * 2**10
"""Bytes of one read."""
MAX_SLICE_LINES = 32
"""Lines that are parsed before others are served: most heads, or 16 chunks, which take 0.3 ms."""
REASON_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class ParseQueue:
    """Connections with bytes to parse. Each turn of the event loop parses a slice of one of them.

    So the time of a turn does not grow with the number of clients that send small chunks.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[HTTPConnection, None] = OrderedDict()

    def add(self, connection: HTTPConnection) -> None:
        """Add a connection at the end, unless it waits already."""
        if not self._waiting:
            connection.loop.call_soon(self._parse_next)
        self._waiting.setdefault(connection)

    def _parse_next(self) -> None:
        connection, _ = self._waiting.popitem(last=False)
        if self._waiting:
            connection.loop.call_soon(self._parse_next)
        connection.parse_slice()


@dataclass(slots=True)
class OpenConnections:
    """The open connections of one server. Each connection adds and removes itself.

    regular    connections within max_connections
    overflow   connections beyond them, which may send one request
    unparsed   those of both with bytes to parse
    """

    regular: set[HTTPConnection] = field(default_factory=set)
    overflow: set[HTTPConnection] = field(default_factory=set)
    unparsed: ParseQueue = field(default_factory=ParseQueue)


class _ReadGate(FlowControl):
    """uvicorn's control of reading, which `hold` overrides while bytes wait to be parsed."""

    is_held = False

    def resume_reading(self) -> None:
        """Read again, unless bytes wait."""
        self.read_paused = False
        if not self.is_held:
            self._transport.resume_reading()

    def hold(self) -> None:
        """Read nothing: bytes wait."""
        self.is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Read again, unless uvicorn has paused: no bytes wait."""
        self.is_held = False
        if not self.read_paused:
            self._transport.resume_reading()


class HTTPConnection(H11Protocol):
    """HTTP/1.1 within `limits`, as one of `connections`.

    on_response   called with the status of every response that the application does not send
    """

    transport: LingeringTransport
    flow: _ReadGate

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        connections: OpenConnections,
        on_response: Callable[[int], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._connections = connections
        self._on_response = on_response
        self._application = self.app
        self.app = self._serve
        self._framing = Framing()
        self._unparsed = b""
        self._read_timer = _Timer(self.loop, limits.read_timeout, self._on_read_timeout)
        self._write_timer = _Timer(self.loop, limits.write_timeout, self._on_write_timeout)
        self._drain_timer = _Timer(self.loop, DRAIN_S, self._on_drain_timeout)
        self._unsent_bytes = 0

    # Reading from the client.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the read timer of a new connection, or refuse it when too many are open."""
        super().connection_made(LingeringTransport(transport, self.loop, self._client_sends))
        self.flow = _ReadGate(self.transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]
        connections = self._connections
        if len(connections.regular) < self._limits.max_connections:
            connections.regular.add(self)
        elif len(connections.overflow) < MAX_OVERFLOW_CONNECTIONS:
            connections.overflow.add(self)
            self.app_state = {**self.app_state, OVERFLOW: self._limits.max_connections}
            self._read_timer = _Timer(self.loop, OVERFLOW_TIMEOUT_S, self._on_read_timeout)
        else:
            self._send_error(too_many_connections_error(self._limits.max_connections))
            return
        self._update_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and make room for another connection."""
        self._connections.regular.discard(self)
        self._connections.overflow.discard(self)
        self._read_timer.stop()
        self._write_timer.stop()
        self._drain_timer.stop()
        self._unparsed = b""
        self.transport.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a slice of the bytes, or drop them where the connection is closing."""
        if self.transport.is_closing():
            self.transport.drain(len(data))
            return
        self._unparsed += data
        if not self.flow.is_held:
            self.parse_slice()

    def parse_slice(self) -> None:
        """Parse up to MAX_SLICE_LINES lines. What is left waits for a turn, or for a response."""
        if self._is_parsing():
            data, num_bytes = self._framing.filter(self._unparsed, MAX_SLICE_LINES)
            self._unparsed = self._unparsed[num_bytes:]
            if data:
                self._parse(data)
        if self.transport.is_closing():
            self._unparsed = b""
        elif not self._unparsed:
            self.flow.release()
        else:
            self.flow.hold()
            if self._is_parsing():
                self._connections.unparsed.add(self)

    def _is_parsing(self) -> bool:
        """Return whether the next bytes may be parsed; False: a response comes before them."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _parse(self, data: bytes) -> None:
        """Parse valid bytes; the read timer runs from a request's first byte to its last."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._read_timer.stop()
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._drain_timer.stop()
        if not self.transport.is_closing():
            self._update_read_timer()

    def _client_sends(self) -> bool:
        """Return whether bytes of a request may be unread. A refused connection has no time."""
        return self in self._connections.regular and bool(
            self._unparsed
            or self.conn.trailing_data[0]
            or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        )

    def _update_read_timer(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._read_timer.stop()
        else:
            self._read_timer.start()

    def _on_read_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self in self._connections.overflow:
            self._send_error(too_many_connections_error(self._limits.max_connections))
            return
        if self.conn.their_state is h11.SEND_BODY:
            can_respond = not self.cycle.response_started
        else:
            can_respond = bool(self.conn.trailing_data[0])  # it has sent part of a request
        if can_respond:
            self._send_error(request_timeout_error(self._limits.read_timeout))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that h11 could not parse. Called while h11's error is being handled."""
        exc = sys.exception()
        hint = exc.error_status_hint if isinstance(exc, h11.RemoteProtocolError) else 400
        if hint == 431 and self.conn.our_state is h11.IDLE:  # else a line of a body is too long
            self._send_error(headers_too_large_error("The head is too large"))
        elif "Host:" in str(exc):  # the header is missing, or it is there twice
            self._send_error(bad_host_error("the request must have exactly one", "Send one"))
        else:
            self._send_error(bad_framing_error(self._framing.error or msg.rstrip(".")))

    def _send_error(self, error: APIError) -> None:
        """Send the error, unless the request has a response or a part of one, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.envelope).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "x-request-id": secrets.token_hex(12),
                **(error.headers or {}),
                "connection": "close",
            }
            header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(
                b"HTTP/1.1 %d %s\r\n%s\r\n%s"
                % (error.status, REASON_PHRASES[error.status], header_lines.encode(), body)
            )
            self._on_response(error.status)
        self.transport.close()
        self._start_write_timer()

    # Writing to the client.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. A response that leaves much of its request unread says `close`."""
        cycle = self.cycle

        async def send_with_close(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and cycle.more_body
                and self._framing.has_body_left(MAX_DRAIN_BYTES)
            ):
                headers = [header for header in message["headers"] if header != CLOSE_HEADER]
                message = {**message, "headers": [*headers, CLOSE_HEADER]}
            await send(message)

        await self._application(scope, receive, send_with_close)

    def _on_drain_timeout(self) -> None:
        """Close: the response is sent, and the rest of its request has not come."""
        self.transport.end()
        self._start_write_timer()

    def pause_writing(self) -> None:
        """Pause the response and start the write timer: too many bytes are unread."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        """Stop the write timer and resume the response: the buffer has room again."""
        self._write_timer.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Start the timer for what remains: the end of the response, or a request sent ahead."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_timer()
            return
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._drain_timer.start()
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._update_read_timer()  # of the request sent ahead, a part is missing
        if self._unparsed:
            self._connections.unparsed.add(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; the write timer cuts it if its last response stays unread."""
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer.start()  # closing a connection that has no bytes left stops it at once

    def _on_write_timeout(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes and unsent_bytes >= self._unsent_bytes:
            # With a reset: a plain close would keep the kernel's buffer until it is read.
            socket_ = self.transport.get_extra_info("socket")
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif unsent_bytes:
            self._start_write_timer()  # the client is slow, but it reads


class _Timer:
    """Calls `callback` once `delay_s` after `start`, unless `stop` comes first."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it runs already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._delay_s, self._fire)

    def stop(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
