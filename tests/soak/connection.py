"""SoakConnection: one client's connection, which times the events of its streams.

Owns the events of a stream and their times.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from tests.server.http_wire import HOST, JSON, Address, PersistentConnection, build_head
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
        self._connection = PersistentConnection(address)
        self._authorization = f"authorization: Bearer {key}"

    async def request(self, path: str, body: bytes) -> TimedAnswer:
        """Send a request of a generation API and return its answer."""
        length = f"content-length: {len(body)}"
        head = build_head("POST", path, HOST, JSON, self._authorization, length)
        events = _TimedEvents(READERS[path]())
        sent_s = time.monotonic()
        response = await self._connection.send(head + body, events.add_chunk)
        end_s = time.monotonic()
        if response.status != 200:
            raise ValueError(f"{response.status}: {response.body[:300]!r}")
        if events.rest:
            raise ValueError(f"a stream ends within an event: {events.rest[:200]!r}")
        if events.event_s:
            answer, response_id = events.reader.answer(), events.reader.response_id()
        else:
            answer, response_id = WHOLE[path](response.json), response.json["id"]
        first_s = events.event_s[0] if events.event_s else None
        times = AnswerTimes(sent_s, first_s, events.output_s, end_s)
        return TimedAnswer(answer, response_id, times)

    async def close(self) -> None:
        """Close the connection, whatever is in flight."""
        await self._connection.close()


class _TimedEvents:
    """The events of a stream, and the times of the chunks that end one.

    rest   bytes of the event that is not complete
    """

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.rest = b""
        self.event_s: list[float] = []
        self.output_s: list[float] = []

    def add_chunk(self, chunk: bytes) -> None:
        """Read the events that end in the chunk."""
        *whole, self.rest = (self.rest + chunk).split(b"\n\n")
        data = [event.partition(b"data: ")[2] for event in whole]
        data = [each for each in data if each]  # a comment has none
        has_output = [self.reader.add(each.decode()) for each in data]
        if data:
            self.event_s.append(time.monotonic())
            if any(has_output):
                self.output_s.append(self.event_s[-1])
