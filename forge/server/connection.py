"""One connection: HTTP/1.1 with time limits, and refusals that look like all others.

Owns how many connections are open, how long a client may take to send and to read, and what it is
told when it speaks no HTTP. Knows no path. What is refused here never becomes a request of the
application.

    1 ... max_connections     a place of its own
      ... RESERVED more       CROWDED_S to ask: the guard answers a health check, to all else 503
      ... any other           503 and closed, before anything is read

    bytes ──► Framing ──► h11 ──► a request, or 400 and closed

    first byte ── read_timeout ──► the whole request is here, else 408 and cut
    the buffer is full ── write_timeout ──► it has room again, else cut without a word

Bytes wait in three places: here, at most HIGH_WATER and one event, then in the kernel of this
machine, at most SEND_BUFFER, then with the client. A request whose client reads nothing goes on
until all are full; who then makes no room for `write_timeout` seconds is cut, and its request ends
like that of a client that left.
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
"""Bytes that wait here for the kernel before whoever sends must wait too."""
SEND_BUFFER_BYTES = 256 * 2**10
"""Bytes that the kernel keeps for one client. Left to itself it would take megabytes."""
MAX_OVERFLOW_CONNECTIONS = 32
"""Connections beyond the limit that may ask one thing, so that a health check gets its answer."""
OVERFLOW_TIMEOUT_S = 0.5
"""Seconds they have for it. A health check asks at once."""
MAX_READ_BYTES = 4 * 2**10
"""Of one read. Each byte or two may be a chunk; all are parsed before others are served."""
REASON_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(slots=True)
class OpenConnections:
    """Who is connected to one server. Each connection adds and removes itself."""

    regular: set[HTTPConnection] = field(default_factory=set)
    overflow: set[HTTPConnection] = field(default_factory=set)


class HTTPConnection(H11Protocol):
    """HTTP/1.1 within `limits`, as one of those in `connections`.

    on_response   called with the status of every answer that the application does not give
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

    # The client sends.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has as long for its first request as for any, if there is a place for it."""
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
        """Nothing is waited for, and its place is free."""
        self._connections.regular.discard(self)
        self._connections.overflow.discard(self)
        self._read_timer.stop()
        self._write_timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The clock of a request starts with its first byte and stops with its last."""
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
            can_respond = bool(self.conn.trailing_data[0])  # it has begun to ask
        if can_respond:
            self._send_error(request_timeout_error(self._limits.read_timeout))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not read. Called while its error is being handled."""
        exc = sys.exception()
        hint = exc.error_status_hint if isinstance(exc, h11.RemoteProtocolError) else 400
        if hint == 431 and (self.cycle is None or not self.cycle.more_body):
            self._send_error(headers_too_large_error("The head is too large"))
        elif "Host:" in str(exc):  # there is none, or there are two
            self._send_error(bad_host_error("there is not exactly one", "Send one"))
        else:
            self._send_error(bad_framing_error(self._framing.error or msg.rstrip(".")))

    def _send_error(self, error: APIError) -> None:
        """The connection is closed, after an envelope if nothing else is being said on it."""
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

    # The client reads.

    def pause_writing(self) -> None:
        """More waits than should: the client must read now."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        """There is room again."""
        self._write_timer.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """What is left of the last answer of a connection is waited for no longer than any."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_timer()
        elif self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._update_read_timer()  # of what it sent ahead, part is missing

    def timeout_keep_alive_handler(self) -> None:
        """A client that did not even read its last answer is cut."""
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer.start()  # a connection that closes with nothing left stops it at once

    def _on_write_timeout(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes and unsent_bytes >= self._unsent_bytes:
            # With a reset: a plain close would keep what the kernel holds until it is read.
            socket_ = self.transport.get_extra_info("socket")
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif unsent_bytes:
            self._start_write_timer()  # slow, but it reads


class _Timer:
    """Calls `ring` when it was set this long ago and not stopped since."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It is set. One that was set before rings when it would have."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._delay_s, self._fire)

    def stop(self) -> None:
        """It will not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
