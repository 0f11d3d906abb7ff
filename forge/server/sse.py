"""Server-sent events: framing, headers, pings and the end of a stream.

Owns the bytes around an event's data. Knows nothing of the data.

    data: {...}\\n\\n          an event; JSON has no raw newline, so a line is a whole event
    event: NAME\\ndata: {...}  the same with a name, where an API has names
    : ping\\n\\n               nothing was sent for a while; readers skip it, proxies stay open
    data: {"error":...}\\n\\n  a failure after the headers; the stream then ends without [DONE]
    data: [DONE]\\n\\n         the last event of a complete stream

Always true: nothing is sent before the first event or ping, so an earlier failure gets its own
status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Send

from forge.limits import DEFAULT_LIMITS

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = ": ping\n\n"
LINE_BOUNDARIES = ("\u0085", "\u2028", "\u2029")
"""Characters that end no line of an event, and that httpx splits lines at. JSON may have them raw.
"""


def encode_event(data: str) -> str:
    """Return an event. `data` is JSON on one line, or [DONE]."""
    return f"data: {_escape_line_boundaries(data)}\n\n"


def encode_named_event(name: str, data: str) -> str:
    """Return an event of this name. `data` is JSON on one line."""
    return f"event: {name}\ndata: {_escape_line_boundaries(data)}\n\n"


def _escape_line_boundaries(data: str) -> str:
    if not data.isascii():
        for char in LINE_BOUNDARIES:  # `str.translate` would visit each character
            data = data.replace(char, f"\\u{ord(char):04x}")
    return data


def comment_ping() -> str:
    """Return a comment, which readers of events skip."""
    return PING


class EventStream:
    """A response made of events. Several tasks may send events.

    started   whether the headers are sent, so that the status can no longer change
    """

    def __init__(
        self,
        send: Send,
        ping_interval: float = DEFAULT_LIMITS.ping_interval,
        encode_ping: Callable[[], str] = comment_ping,
    ) -> None:
        self.started = False
        self._send = send
        self._ping_interval = ping_interval
        self._encode_ping = encode_ping
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = self._loop.time()

    async def send(self, event: str) -> None:
        """Send an encoded event."""
        await self._send_bytes(event.encode())

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run_with_pings(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, which sends events, and send a ping whenever the stream is silent."""
        ping_task = asyncio.create_task(self._send_pings())
        try:
            await work
        finally:
            ping_task.cancel()
            await asyncio.gather(ping_task, return_exceptions=True)

    async def _send_pings(self) -> None:
        while True:
            silent_s = self._loop.time() - self._last_sent_s
            if silent_s < self._ping_interval:
                await asyncio.sleep(self._ping_interval - silent_s)
            else:
                await self._send_bytes(self._encode_ping().encode())

    async def _send_bytes(self, event: bytes) -> None:
        async with self._lock:
            if not self.started:
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self.started = True
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self._last_sent_s = self._loop.time()
