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
from forge.server.framing import Framing
from forge.server.guard import CROWDED, too_many_connections
from forge.server.refusal import (
    Refused,
    bad_framing,
    bad_host,
    headers_too_large,
    request_timeout,
)

HIGH_WATER = 64 * 2**10
"""Bytes that wait here for the kernel before whoever sends must wait too."""
SEND_BUFFER = 256 * 2**10
"""Bytes that the kernel keeps for one client. Left to itself it would take megabytes."""
RESERVED = 32
"""Connections beyond the limit that may ask one thing, so that a health check gets its answer."""
CROWDED_S = 0.5
"""Seconds they have for it. A health check asks at once."""
READ_BYTES = 4 * 2**10
"""Of one read. Each byte or two may be a chunk; all are parsed before others are served."""
REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(slots=True)
class Places:
    """Who is connected to one server. Each connection adds and removes itself."""

    served: set[Connection] = field(default_factory=set)
    crowded: set[Connection] = field(default_factory=set)


class Connection(H11Protocol):
    """HTTP/1.1 within `limits`, as one of those in `places`.

    answered   called with the status of every answer that the application does not give
    """

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        places: Places,
        answered: Callable[[int], None],
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._places = places
        self._answered = answered
        self._framing = Framing()
        self._reading = _Alarm(self.loop, limits.read_timeout, self._too_slow)
        self._writing = _Alarm(self.loop, limits.write_timeout, self._not_read)
        self._unsent = 0

    # The client sends.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has as long for its first request as for any, if there is a place for it."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        places = self._places
        if len(places.served) < self._limits.max_connections:
            places.served.add(self)
        elif len(places.crowded) < RESERVED:
            places.crowded.add(self)
            self.app_state = {**self.app_state, CROWDED: self._limits.max_connections}
            self._reading = _Alarm(self.loop, CROWDED_S, self._too_slow)
        else:
            self._refuse(too_many_connections(self._limits.max_connections))
            return
        self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for, and its place is free."""
        self._places.served.discard(self)
        self._places.crowded.discard(self)
        self._reading.stop()
        self._writing.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The clock of a request starts with its first byte and stops with its last."""
        if not (data := self._framing.read(data)):
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._reading.stop()
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch_reading()

    def _watch_reading(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._reading.stop()
        else:
            self._reading.set()

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self in self._places.crowded:
            self._refuse(too_many_connections(self._limits.max_connections))
            return
        if self.conn.their_state is h11.SEND_BODY:
            is_worth_a_word = not self.cycle.response_started
        else:
            is_worth_a_word = bool(self.conn.trailing_data[0])  # it has begun to ask
        if is_worth_a_word:
            self._refuse(request_timeout(self._limits.read_timeout))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not read. Called while its error is being handled."""
        fault = sys.exception()
        hint = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        if hint == 431 and (self.cycle is None or not self.cycle.more_body):
            self._refuse(headers_too_large("The head is too large"))
        elif "Host:" in str(fault):  # there is none, or there are two
            self._refuse(bad_host("there is not exactly one", "Send one"))
        else:
            self._refuse(bad_framing(self._framing.fault or msg.rstrip(".")))

    def _refuse(self, refused: Refused) -> None:
        """The connection is closed, after an envelope if nothing else is being said on it."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(refused.envelope).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "x-request-id": secrets.token_hex(12),
                **(refused.headers or {}),
                "connection": "close",
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(
                b"HTTP/1.1 %d %s\r\n%s\r\n%s"
                % (refused.status, REASONS[refused.status], lines.encode(), body)
            )
            self._answered(refused.status)
        self.transport.close()
        self._watch_writing()

    # The client reads.

    def pause_writing(self) -> None:
        """More waits than should: the client must read now."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """There is room again."""
        self._writing.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """What is left of the last answer of a connection is waited for no longer than any."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writing()
        elif self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._watch_reading()  # of what it sent ahead, part is missing

    def timeout_keep_alive_handler(self) -> None:
        """A client that did not even read its last answer is cut."""
        super().timeout_keep_alive_handler()
        self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._writing.set()  # a connection that closes with nothing left stops it at once

    def _not_read(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent:
            # With a reset: a plain close would keep what the kernel holds until it is read.
            socket_ = self.transport.get_extra_info("socket")
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif unsent:
            self._watch_writing()  # slow, but it reads


class _Alarm:
    """Calls `ring` when it was set this long ago and not stopped since."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, ring: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """It is set. One that was set before rings when it would have."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self._now)

    def stop(self) -> None:
        """It will not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> None:
        self._timer = None
        self._ring()
