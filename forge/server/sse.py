"""Server-sent events: framing, headers and how a stream ends.

Owns the bytes between events. Knows nothing of what an event says.

    data: {...}\\n\\n          an event; JSON has no raw newline, so a line is a whole event
    data: {"error":...}\\n\\n  a failure after the headers; the stream then ends without [DONE]
    data: [DONE]\\n\\n         the last event of a stream that says everything

Nothing is sent before the first event, so what fails earlier still gets a status of its own.
"""

from __future__ import annotations

import asyncio

from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """One response made of events. Several tasks may put events into it.

    started   headers are on their way: the status can no longer change
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._in_turn = asyncio.Lock()

    async def put(self, data: str) -> None:
        """The event is sent. `data` has no newline."""
        async with self._in_turn:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            event = f"data: {data}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """The response is complete."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
