"""SoakConnection: one client's connection, which times the events of its streams.

Owns the bytes of HTTP/1.1. Opens a connection when it needs one.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import NamedTuple

from tests.server.http_wire import HOST, JSON, Address, build_head
from tests.soak.answers import READERS, WHOLE, Answer, EventReader


class AnswerTimes(NamedTuple):
    """Times of one request.

    sent_s     when it was sent
    first_s    when the first event came, which the first token causes; None for a whole body
    output_s   when each event with output came; of a call, the first tokens have none
    end_s      when the last byte came
    """

    sent_s: float
    first_s: float | None
    output_s: list[float]
    end_s: float


class TimedAnswer(NamedTuple):
    """An answer and its times.

    response_id   id by which a later request continues it
    """

    answer: Answer
    response_id: str
    times: AnswerTimes


class SoakConnection:
    """A client's connection. Every failure raises OSError, EOFError or ValueError."""

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._authorization = f"authorization: Bearer {key}"
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, path: str, body: bytes) -> TimedAnswer:
        """Send a request of a generation API and return its answer."""
        if self._open is None:
            self._open = await asyncio.open_connection(*self._address)
        reader, writer = self._open
        length = f"content-length: {len(body)}"
        head = build_head("POST", path, HOST, JSON, self._authorization, length)
        sent_s = time.monotonic()
        writer.write(head + body)
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        event_s: list[float] = []
        output_s: list[float] = []
        if b"\r\ntransfer-encoding: chunked" in answer_head:
            events = READERS[path]()
            await self._read_events(reader, events, event_s, output_s)
            answer, response_id = events.answer(), events.response_id()
        else:
            length_text = answer_head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            content = await reader.readexactly(int(length_text))
            if not answer_head.startswith(b"http/1.1 200 "):
                raise ValueError(f"{answer_head[9:12].decode()}: {content[:300]!r}")
            found = json.loads(content)
            answer, response_id = WHOLE[path](found), found["id"]
        end_s = time.monotonic()
        if b"\r\nconnection: close" in answer_head:
            await self.close()
        times = AnswerTimes(sent_s, event_s[0] if event_s else None, output_s, end_s)
        return TimedAnswer(answer, response_id, times)

    async def _read_events(
        self,
        reader: asyncio.StreamReader,
        events: EventReader,
        event_s: list[float],
        output_s: list[float],
    ) -> None:
        """Read the chunks of a stream to its end, and add the times of those with events."""
        rest = b""
        while size := int(await reader.readline(), 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *whole, rest = rest.split(b"\n\n")
            data = [event.partition(b"data: ")[2] for event in whole]
            data = [each for each in data if each]  # a comment has none
            has_output = [events.add(each.decode()) for each in data]
            if data:
                event_s.append(time.monotonic())
                if any(has_output):
                    output_s.append(event_s[-1])
        await reader.readline()
        if rest:
            raise ValueError(f"a stream ends within an event: {rest[:200]!r}")

    async def close(self) -> None:
        """Close the connection, whatever is in flight."""
        if self._open is not None:
            _, writer = self._open
            self._open = None
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass
