"""What a server reads after a response that was sent before the end of its request.

The connections run in this process, on transports that record, and time passes when it is advanced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from forge.server.connection import MAX_READ_BYTES, MAX_SLICE_LINES, OpenConnections
from forge.server.transport import DRAIN_S, MAX_DRAIN_BYTES
from tests.server.framing_worlds import (
    MAX_EVENTS,
    Application,
    CountingConnection,
    RecordingTransport,
    Response,
    open_connection,
    split_responses,
)
from tests.server.local_server import ManualClockLoop
from tests.server.test_limits import open_limits_server, send_and_read

CHUNK = b"1\r\na\r\n"
CHUNKED_HEAD = b"PUT /%s/0 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /echo/1 HTTP/1.1\r\nhost: a\r\n\r\n"


class Wire:
    """A connection and the bytes that it has read."""

    def __init__(self, connections: OpenConnections | None = None, app: Any = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualClockLoop)
        self.loop = loop
        self.transport = RecordingTransport(loop)
        self.connection = open_connection(
            app or Application(), self.transport, connections or OpenConnections()
        )
        self.num_read = 0
        self.most_unparsed = 0

    async def send(self, data: bytes) -> None:
        """Deliver the bytes in reads, for as long as the connection reads."""
        while data:
            for _ in range(2 * MAX_READ_BYTES):
                if self.transport.is_reading and not self.transport.is_closing():
                    break
                await asyncio.sleep(0)
            else:
                return
            self.connection.data_received(data[:MAX_READ_BYTES])
            self.num_read += len(data[:MAX_READ_BYTES])
            self.most_unparsed = max(self.most_unparsed, len(self.connection._unparsed))
            data = data[MAX_READ_BYTES:]
            await settle()

    async def advance(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.loop.advance(seconds)
        await settle()

    def responses(self) -> list[Response]:
        return split_responses(bytes(self.transport.written))


async def settle() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run the test on a loop whose time stands still."""

    async def main() -> None:
        await test()

    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED_HEAD % b"refuse" + CHUNK * 200_000,
        CHUNKED_HEAD % b"refuse" + b"fff\r\n" + b"a" * 4095 + b"\r\n" + b"1000\r\n" * 99_999,
        b"POST /refuse/0 HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n" + b"a" * 10**6,
        b"GET /refuse/0 HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n" + GET * 40_000,
    ],
    ids=["small chunks", "bad chunks", "length", "requests in a body"],
)
def test_little_is_read_after_a_response_that_comes_first(sent: bytes) -> None:
    async def test() -> None:
        wire = Wire()
        await wire.send(sent)
        (response,) = wire.responses()
        assert response.status in (400, 401) and b"\r\nconnection: close\r\n" in response.headers
        assert wire.transport.has_written_eof, "the client sees the end of the response"
        assert MAX_DRAIN_BYTES <= wire.num_read <= MAX_DRAIN_BYTES + 2 * MAX_READ_BYTES
        assert not wire.transport.is_closing(), "a reset could delete the response"
        await wire.advance(DRAIN_S)
        assert wire.transport.is_closing()

    run(test)


def test_a_short_body_may_follow_its_response_and_the_connection_is_kept() -> None:
    async def test() -> None:
        wire = Wire()
        head = b"POST /refuse/0 HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        await wire.send(head % MAX_DRAIN_BYTES)
        assert b"connection: close" not in wire.responses()[0].headers
        await wire.advance(DRAIN_S * 0.9)
        await wire.send(b"a" * MAX_DRAIN_BYTES + GET)
        await wire.advance(DRAIN_S * 2)
        assert [response.status for response in wire.responses()] == [401, 200]
        assert not wire.transport.is_closing()

    run(test)


def test_a_body_that_does_not_follow_its_response_in_time_ends_the_connection() -> None:
    async def test() -> None:
        wire = Wire()
        await wire.send(b"POST /refuse/0 HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc")
        await wire.advance(DRAIN_S * 0.9)
        assert not wire.connection.transport.is_closing()
        await wire.advance(DRAIN_S * 0.1)
        assert wire.transport.is_closing() and len(wire.responses()) == 1

    run(test)


def test_a_body_that_goes_wrong_after_its_response_gets_no_second_one() -> None:
    async def test() -> None:
        wire = Wire()
        await wire.send(CHUNKED_HEAD % b"refuse" + CHUNK)
        await wire.send(b"nonsense\r\n" + GET)
        assert [response.status for response in wire.responses()] == [401]
        assert wire.connection.transport.is_closing()

    run(test)


def test_a_request_that_ends_its_connection_is_answered_whatever_follows() -> None:
    async def test() -> None:
        wire = Wire()
        wire.connection.data_received(
            b"GET /echo/0 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        )
        wire.connection.data_received(GET)
        await settle()
        assert [response.status for response in wire.responses()] == [200]

    run(test)


@pytest.mark.parametrize("name", [b"echo", b"refuse"])
def test_forty_clients_with_small_chunks_leave_a_turn_short(name: bytes) -> None:
    """All that h11 parses in a turn of the event loop is counted, over all connections."""
    events: Counter[int] = Counter()
    turn = 0

    class Counting(CountingConnection):
        def handle_events(self) -> None:
            self.most_events = 0
            super().handle_events()
            events[turn] += self.most_events

    async def test() -> None:
        nonlocal turn
        connections = OpenConnections()
        wires = [Wire(connections) for _ in range(40)]
        for wire in wires:
            wire.connection.__class__ = Counting
            wire.connection.data_received(CHUNKED_HEAD % name + CHUNK * 600)
        for turn in range(1, 3000):
            await asyncio.sleep(0)
            if turn == 5:
                fresh = Wire(connections)
                fresh.connection.data_received(GET)
            if turn == 12:
                assert fresh.responses()[0].status == 200, "it waits for none of the forty"
        assert events[0] <= 40 * MAX_EVENTS
        assert max(events[each] for each in range(1, turn)) <= 2 * MAX_EVENTS
        assert events.total() > 40 * MAX_SLICE_LINES / 2

    run(test)


def test_one_read_at_most_waits_to_be_parsed() -> None:
    """An application that reads a body resumes reading at each part of it."""

    async def test() -> None:
        wire = Wire()
        await wire.send(CHUNKED_HEAD % b"echo" + CHUNK * 9000 + b"0\r\n\r\n" + GET * 900)
        assert 0 < wire.most_unparsed <= MAX_READ_BYTES
        assert wire.responses()[0].status == 200

    run(test)


@pytest.mark.parametrize("part", [b"a" * 100, b"1000\r\n" + b"a" * 4096 + b"\r\n"])
def test_a_body_that_is_not_read_is_not_received(part: bytes) -> None:
    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def test() -> None:
        wire = Wire(app=stuck)
        framing = b"content-length: 999999" if part[:1] == b"a" else b"transfer-encoding: chunked"
        await wire.send(
            b"POST / HTTP/1.1\r\nhost: a\r\n" + framing + b"\r\n\r\n" + part * (10**6 // len(part))
        )
        assert HIGH_WATER_LIMIT < wire.num_read <= HIGH_WATER_LIMIT + 4 * MAX_READ_BYTES
        wire.transport.close()

    run(test)


def test_a_client_reads_its_refusal_however_much_it_sends() -> None:
    """Over a socket: the server closes only once the client had time to read."""
    with open_limits_server(api_keys=("sesame",)) as server:
        for body in (CHUNK * 10_000, b"f" * 10**6):
            framing = (
                b"transfer-encoding: chunked" if body[:1] == b"1" else b"content-length: 9999999"
            )
            head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\n" + framing + b"\r\n\r\n"
            answer = send_and_read(head + body, server)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"invalid_api_key" in answer
            assert answer.count(b"HTTP/1.1") == 1
