"""Random requests on one connection, cut at random: each gets one answer, and no body is a request.

A world is a seed. Its requests are built together with the answers that they must get, so the
answers share no parser with the server. Bodies, extensions and trailers have requests in them. The
connection runs in this process on a transport that records, and time stands still.

    requests, cut ──► HTTPConnection ──► app: 200 with the body's digest, or 401 before the body
          └── expected answers ◄── compared ──► recorded bytes
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import uvicorn
from uvicorn.server import ServerState

from forge.limits import DEFAULT_LIMITS
from forge.server.connection import MAX_READ_BYTES, MAX_SLICE_LINES, HTTPConnection, OpenConnections
from forge.server.middleware import MAX_HEAD_BYTES
from forge.server.transport import MAX_DRAIN_BYTES
from tests.server.local_server import ManualClockLoop

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
MAX_EVENTS = MAX_SLICE_LINES + 4
"""Events that h11 may parse in one callback."""
MAX_TURNS = 20_000
"""Turns of the event loop in which a connection must go on."""


class Case(NamedTuple):
    """A request and what becomes of it.

    answers    each that it may get: status and body; the body of an error is not compared
    ends       no later request is answered
    may_end    a later request may be unanswered, where its answer says `connection: close`
    """

    kind: str
    data: bytes
    answers: tuple[tuple[int, bytes], ...]
    ends: bool = False
    may_end: bool = False


def digest(target: bytes, body: bytes) -> bytes:
    """Return the body of the application's answer to a request."""
    return target + b" " + sha256(body).hexdigest().encode()


# Requests.


def random_body(rng: random.Random) -> bytes:
    """Return a body that may look like the end of a body and a request after it."""
    if rng.random() < 0.01:
        return HIDDEN * (MAX_DRAIN_BYTES // len(HIDDEN) + 9)
    size = rng.choice((0, 1, 2, 7, 64, 300, 5000))
    parts = (
        HIDDEN,
        b"0\r\n\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"1\r\na\r\n",
        bytes([rng.randrange(256)]),
    )
    body = b""
    while len(body) < size:
        body += rng.choice(parts)
    return body


def random_chunks(rng: random.Random, body: bytes) -> bytes:
    """Return a body as chunks of random sizes with any extensions, without the last chunk."""
    largest = rng.choice((1, 3, 50, 10_000)) if len(body) < MAX_DRAIN_BYTES else 10_000
    extensions = (b"", b"", b";a", b';a="x; y"', b";GET /hidden HTTP/1.1", b" ", b"\t")
    data = b""
    while body:
        part = body[: rng.randint(1, largest)]
        body = body[len(part) :]
        digits = rng.choice((b"%x", b"%X", b"%04x", b"%016x")) % len(part)
        data += digits + rng.choice(extensions) + b"\r\n" + part + b"\r\n"
    return data


def last_chunk(rng: random.Random) -> bytes:
    """Return the end of a body in chunks, with any trailers."""
    trailers = (b"", b"", b"x: y\r\n", b"content-length: 5\r\n", b"host: a\r\nx:\r\n")
    return rng.choice((b"0", b"000", b"0;a=b")) + b"\r\n" + rng.choice(trailers) + b"\r\n"


def good_case(rng: random.Random, number: int) -> Case:
    """Return a valid request."""
    name = rng.choice((b"echo", b"echo", b"echo", b"refuse"))
    target = b"/%s/%d" % (name, number)
    headers = [b"host: a", *(b"x-%d: %s" % (i, b"v" * i) for i in range(rng.choice((0, 1, 40))))]
    version, ends = b"1.1", False
    if rng.random() < 0.03:
        headers, ends = [*headers, b"Connection: close"], True
    elif rng.random() < 0.03:
        version, ends = b"1.0", True
    body, method = b"", b"GET"
    data, may_end = b"", False
    framing = rng.choice(("none", "length", "length", "chunks"))
    if framing == "length" or version == b"1.0":
        body, method = random_body(rng), b"POST"
        headers.append(rng.choice((b"content-length: %d", b"Content-Length:\t%d ")) % len(body))
        data = body
        may_end = name == b"refuse" and len(body) > MAX_DRAIN_BYTES
    elif framing == "chunks":
        body, method = random_body(rng), b"PUT"
        headers.append(rng.choice((b"transfer-encoding: chunked", b"Transfer-Encoding: Chunked")))
        data = random_chunks(rng, body) + last_chunk(rng)
        may_end = name == b"refuse"
    if body and name == b"echo" and rng.random() < 0.1:
        headers.append(b"expect: 100-continue")
    if rng.random() < 0.03 and not ends:
        headers += [b"connection: upgrade", b"upgrade: h2c"]
    rng.shuffle(headers)
    start = rng.choice((b"", b"", b"", b"\r\n"))
    head = b"\r\n".join([b"%s %s HTTP/%s" % (method, target, version), *headers, b"", b""])
    answer = (200, digest(target, body)) if name == b"echo" else (401, b"")
    return Case(f"{name.decode()} {framing}", start + head + data, (answer,), ends, may_end)


BAD_HEADS = {
    "line feed": b"GET / HTTP/1.1\nhost: a\r\n\r\n",
    "line feed in a header": b"GET / HTTP/1.1\r\nhost: a\nx: y\r\n\r\n",
    "folded": b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\n z\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\nhost: a\r\n: v\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nhost: a\r\nx : y\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nhost: a\r\nxy\r\n\r\n",
    "NUL": b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n",
    "list of lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    "no length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: \r\n\r\n",
    "another coding": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
    "two codings": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "chunks of HTTP/1.0": b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
    "HTTP/2": b"GET / HTTP/2.0\r\nhost: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\nx: y\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "two empty lines": b"\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
}
BAD_CHUNKS = {
    "sign": b"+1\r\na\r\n",
    "prefix": b"0x1\r\na\r\n",
    "17 digits": b"0" * 16 + b"1\r\na\r\n",
    "no digits": b";a\r\na\r\n",
    "line feed": b"1\na\r\n",
    "carriage return": b"1\rx\r\na\r\n",
    "NUL in an extension": b"1;\x00\r\na\r\n",
    "line feed in an extension": b"1;a\nb\r\na\r\n",
    "too long": b"1\r\nab\r\n",
    "no end": b"1\r\na0\r\n\r\n",
    "line feed at the end": b"1\r\na\n0\r\n\r\n",
    "folded trailer": b"0\r\nx: y\r\n z\r\n\r\n",
    "trailer without a name": b"0\r\n: v\r\n\r\n",
}


def bad_case(rng: random.Random, number: int) -> Case:
    """Return a request that is not HTTP/1.1, with a request after it that must not be answered."""
    if rng.random() < 0.1:
        data = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"v" * (
            MAX_HEAD_BYTES + rng.randint(4000, 9000)
        )
        return Case("long head", data + b"\r\n\r\n" + HIDDEN, ((431, b""),), ends=True)
    if rng.random() < 0.5:
        kind, data = rng.choice([*BAD_HEADS.items()])
        return Case(f"head: {kind}", data + HIDDEN, ((400, b""),), ends=True)
    kind, data = rng.choice([*BAD_CHUNKS.items()])
    name = rng.choice((b"echo", b"refuse"))
    head = b"PUT /%s/%d HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" % (name, number)
    body = random_chunks(rng, random_body(rng))
    answers = ((400, b""),) if name == b"echo" else ((400, b""), (401, b""))
    return Case(f"chunk: {kind}", head + body + data + HIDDEN, answers, ends=True)


def random_cases(rng: random.Random) -> list[Case]:
    """Return the requests of a connection, of which the last may be bad."""
    cases = [good_case(rng, number) for number in range(rng.choice((1, 2, 3, 9)))]
    if rng.random() < 0.4:
        cases.append(bad_case(rng, len(cases)))
    return cases


def random_cuts(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Yield the data as reads of a transport: whole, byte by byte, in two, or at random."""
    largest = rng.choice((MAX_READ_BYTES, MAX_READ_BYTES, 1 if len(data) < 2000 else 64, 9, 700))
    if rng.random() < 0.2:
        cut = rng.randrange(min(len(data), MAX_READ_BYTES))
        yield data[:cut]
        data = data[cut:]
    while data:
        size = largest if largest in (1, MAX_READ_BYTES) else rng.randint(1, largest)
        yield data[:size]
        data = data[size:]


# The connection.


class RecordingTransport(asyncio.Transport):
    """A transport that keeps what is written, and delivers nothing by itself."""

    max_size = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.written = bytearray()
        self.is_reading = True
        self.has_written_eof = False
        self.protocol: HTTPConnection | None = None
        self._is_closing = False

    def write(self, data: Any) -> None:
        assert not self.has_written_eof, "written after the end"
        self.written += data

    def write_eof(self) -> None:
        self.has_written_eof = True

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            assert self.protocol is not None
            self.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Application:
    """An ASGI application that keeps the targets it is called for.

    delays   turns of the event loop that it may wait before it reads and responds
    """

    def __init__(self, rng: random.Random | None = None, delays: tuple[int, ...] = (0,)) -> None:
        self.targets: list[bytes] = []
        self._rng = rng or random.Random(0)
        self._delays = delays

    async def _wait(self) -> None:
        for _ in range(self._rng.choice(self._delays)):
            await asyncio.sleep(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target = scope["raw_path"]
        self.targets.append(target)
        await self._wait()
        status, body = 401, b""
        if target.startswith(b"/echo/"):
            status, parts = 200, []
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                parts.append(message["body"])
                await self._wait()
                if not message["more_body"]:
                    break
            body = digest(target, b"".join(parts))
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


class CountingConnection(HTTPConnection):
    """An HTTPConnection that counts the events that h11 parses in one callback.

    most_events   largest number of them
    """

    most_events = 0

    def handle_events(self) -> None:
        next_event = self.conn.next_event
        num_events = 0

        def count() -> Any:
            nonlocal num_events
            num_events += 1
            return next_event()

        self.conn.next_event = count  # type: ignore[method-assign]
        try:
            super().handle_events()
        finally:
            self.conn.next_event = next_event  # type: ignore[method-assign]
            self.most_events = max(self.most_events, num_events)


def open_connection(
    app: Any, transport: RecordingTransport, connections: OpenConnections
) -> CountingConnection:
    """Return a connection on this transport, which is regular."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, h11_max_incomplete_event_size=MAX_HEAD_BYTES
    )
    config.load()
    connection = CountingConnection(
        config=config,
        server_state=ServerState(),
        app_state={},
        _loop=transport.loop,
        limits=DEFAULT_LIMITS,
        connections=connections,
        on_response=lambda status: None,
    )
    transport.protocol = connection
    connection.connection_made(transport)
    return connection


class Response(NamedTuple):
    """A response on the wire."""

    status: int
    headers: bytes
    body: bytes


def split_responses(data: bytes) -> list[Response]:
    """Return the responses, without those of 100."""
    responses = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator and head.startswith(b"HTTP/1.1 "), head
        status, headers = int(head[9:12]), head.lower() + b"\r\n"
        if status != 100:
            length = int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert len(data) >= length
            responses.append(Response(status, headers, data[:length]))
            data = data[length:]
    return responses


async def deliver(
    transport: RecordingTransport,
    connection: HTTPConnection,
    reads: Iterator[bytes],
    rng: random.Random,
) -> None:
    """Deliver the reads as a transport does: none while it is paused or closed."""
    for read in reads:
        for _ in range(MAX_TURNS):
            if transport.is_reading or transport.is_closing():
                break
            if transport.has_written_eof:
                return
            await asyncio.sleep(0)
        else:
            raise AssertionError("the connection reads nothing more")
        if transport.is_closing():
            return
        connection.data_received(read)
        for _ in range(rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)


async def run_world_async(seed: int) -> Counter[str]:
    """Run the world of a seed; return how many requests of each kind were answered."""
    rng = random.Random(seed)
    cases = random_cases(rng)
    app, loop = Application(rng, (0, 0, 1, 9)), asyncio.get_running_loop()
    transport = RecordingTransport(loop)
    connection = open_connection(app, transport, OpenConnections())
    await deliver(transport, connection, random_cuts(rng, b"".join(c.data for c in cases)), rng)
    written = -1
    for _ in range(MAX_TURNS):
        if len(transport.written) == written and not loop._ready:  # type: ignore[attr-defined]
            break
        written = len(transport.written)
        await asyncio.sleep(0)
    check_answers(cases, split_responses(bytes(transport.written)), connection, app)
    assert connection.most_events <= MAX_EVENTS, f"{connection.most_events} events at once"
    transport.close()
    await asyncio.sleep(0)
    return Counter(case.kind for case in cases)


def check_answers(
    cases: list[Case], responses: list[Response], connection: HTTPConnection, app: Application
) -> None:
    """Check that each request has its one answer, in order, and no other request was seen."""
    has_ended = False
    for number, case in enumerate(cases):
        if has_ended or (number == len(responses) and may_have_ended(cases[:number], responses)):
            assert len(responses) == number, f"{len(responses)} answers, not {number}"
            break
        assert number < len(responses), f"request {number} ({case.kind}) has no answer"
        found = responses[number]
        bodies = dict(case.answers)
        assert found.status in bodies, f"request {number} ({case.kind}): {found.status}"
        if found.status == 200:
            assert found.body == bodies[200], f"request {number} ({case.kind}): another body"
        has_ended = case.ends
    else:
        assert len(responses) == len(cases), f"{len(responses)} answers to {len(cases)} requests"
    assert connection.transport.is_closing() or not has_ended, "the connection is still open"
    numbers = [target.rpartition(b"/")[2] for target in app.targets]
    assert numbers == [b"%d" % number for number in range(len(numbers))], app.targets


def may_have_ended(cases: list[Case], responses: list[Response]) -> bool:
    """Return whether the last of these requests was answered with the end of the connection."""
    return (
        bool(cases) and cases[-1].may_end and b"\r\nconnection: close\r\n" in responses[-1].headers
    )


def run_world(seed: int) -> Counter[str]:
    """Run the world of a seed; return how many requests of each kind it had."""
    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        return runner.run(run_world_async(seed))
