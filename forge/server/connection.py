"""HTTPConnection: HTTP/1.1 with time limits, and errors in the shape of all others.

Owns the number of open connections, the time a client may take to send and to read, and the errors
for bytes that are not HTTP. Knows no path. A request refused here never reaches the application.

    1 ... max_connections     served
      ... 32 overflow ones    0.5 s for one request: a health check is answered, others get 503
      ... any other           503 and closed, before anything is read

    bytes ──► Framing ──► h11 ──► a request, or 400 and closed

    first byte ── read_timeout ──► the whole request is here, else 408 and closed
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
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

WRITE_HIGH_WATER_BYTES = 64 * 2**10
"""Bytes that wait here for the kernel before a response is paused."""
SEND_BUFFER_BYTES = 256 * 2**10
"""Bytes that the kernel buffers for one client. Its default grows to megabytes."""
MAX_OVERFLOW_CONNECTIONS = 32
"""Connections beyond the limit that may send one request, so that a health check is answered."""
OVERFLOW_TIMEOUT_S = 0.5
"""Seconds that an overflow connection may take to send. A health check sends at once."""
MAX_READ_BYTES = 4 * 2**10
"""Bytes of one read. Two bytes may be a chunk, and all are parsed before others are served."""
REASON_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(slots=True)
class OpenConnections:
    """The open connections of one server. Each connection adds and removes itself.

    regular    connections within max_connections
    overflow   connections beyond them, which may send one request
    """

    regular: set[HTTPConnection] = field(default_factory=set)
    overflow: set[HTTPConnection] = field(default_factory=set)


class HTTPConnection(H11Protocol):
    """HTTP/1.1 within `limits`, as one of `connections`.

    on_response   called with the status of every response that the application does not send
    """

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
        self._framing = Framing()
        self._read_timer = _Timer(self.loop, limits.read_timeout, self._on_read_timeout)
        self._write_timer = _Timer(self.loop, limits.write_timeout, self._on_write_timeout)
        self._unsent_bytes = 0

    # Reading from the client.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the read timer of a new connection, or refuse it when too many are open."""
        super().connection_made(transport)
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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; the read timer runs from a request's first byte to its last."""
        if not (data := self._framing.filter(data)):
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._read_timer.stop()
        super().data_received(data)
        if not self.transport.is_closing():
            self._update_read_timer()

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
        if hint == 431 and (self.cycle is None or not self.cycle.more_body):
            self._send_error(headers_too_large_error("The head is too large"))
        elif "Host:" in str(exc):  # the header is missing, or it is there twice
            self._send_error(bad_host_error("the request must have exactly one", "Send one"))
        else:
            self._send_error(bad_framing_error(self._framing.error or msg.rstrip(".")))

    def _send_error(self, error: APIError) -> None:
        """Send the error, unless part of a response is already sent, and close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
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
        elif self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._update_read_timer()  # of the request sent ahead, a part is missing

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
