"""Server-sent events: framing, headers, pings and the end of a stream.

Owns the bytes around an event's data. Knows nothing of the data.

    data: {...}\\n\\n          an event; JSON has no raw newline, so a line is a whole event
    : ping\\n\\n               nothing was sent for a while; readers skip it, proxies stay open
    data: {"error":...}\\n\\n  a failure after the headers; the stream then ends without [DONE]
    data: [DONE]\\n\\n         the last event of a complete stream

Always true: nothing is sent before the first event or ping, so an earlier failure gets its own
status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Send

from forge.limits import DEFAULT_LIMITS

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"


class EventStream:
    """A response made of events. Several tasks may send events.

    started   whether the headers are sent, so that the status can no longer change
    """

    def __init__(self, send: Send, ping_interval: float = DEFAULT_LIMITS.ping_interval) -> None:
        self.started = False
        self._send = send
        self._ping_interval = ping_interval
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = self._loop.time()

    async def send_event(self, data: str) -> None:
        """Send an event. `data` has no newline."""
        await self._send_bytes(f"data: {data}\n\n".encode())

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
                await self._send_bytes(PING)

    async def _send_bytes(self, event: bytes) -> None:
        async with self._lock:
            if not self.started:
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self.started = True
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self._last_sent_s = self._loop.time()
