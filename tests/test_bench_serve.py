"""The HTTP client of the benchmarks: it reads streams however they are cut, and loses no time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import serve
from bench.workload import Cells, Sweep
from forge import AsyncLLM
from forge.errors import InvalidConfig, RequestFailed
from forge.server.app import create_app
from forge.server.serve import Server, listener

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """The data as one chunk of a transfer."""
    return b"%x\r\n%s\r\n" % (len(data), data)


WHOLE = HEAD + b"".join(map(chunk, (TOKEN, TOKEN, USAGE, DONE, b"")))


@pytest.mark.parametrize("size", range(1, 80))
def test_a_reply_reads_the_same_however_it_is_cut(size: int) -> None:
    reply = serve.Reply()
    for start in range(0, len(WHOLE), size):
        reply.feed(WHOLE[start : start + size], float(start))
    assert (len(reply.stamps), reply.tokens, reply.ended) == (2, 2, True)


def test_events_of_one_chunk_arrive_together() -> None:
    reply = serve.Reply()
    reply.feed(HEAD + chunk(TOKEN + TOKEN[:9]), 1.0)
    reply.feed(chunk(TOKEN[9:] + USAGE + DONE) + chunk(b""), 2.0)
    assert reply.stamps == [1.0, 2.0]
    assert reply.ended


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 7\r\n\r\nno such", "404 Not Found: no such"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "does not stream its response"),
        (HEAD + chunk(b'data: {"error":{"message":"broken"}}\n\n'), "broken"),
    ],
)
def test_a_reply_that_is_no_stream_is_a_failure(data: bytes, problem: str) -> None:
    with pytest.raises(RequestFailed, match=problem):
        serve.Reply().feed(data, 0.0)


@contextmanager
def forge_server() -> Iterator[str]:
    """The address of forge's own server on the deterministic model."""
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    llm = AsyncLLM("hash", enable_prefix_caching=False)
    with listener("127.0.0.1", 0, None) as socket_:
        server = Server(create_app(llm), llm, on_ready)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket_]})
        thread.start()
        try:
            assert ready.wait(20), "the server does not start"
            yield urls[0]
        finally:
            server.should_exit = True
            thread.join(20)


def test_a_sweep_over_http_prints_a_result_for_each_concurrency(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells = Cells.read()._replace(sweep=Sweep((1, 3), 10, 6, 2))
    path = tmp_path / "serve.json"
    with forge_server() as url:
        assert serve.main(url, str(path), label="mine", vocab_size=200, cells=cells) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    told = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [(each["engine"], each["shape"], each["path"], each["c"]) for each in told] == [
        ("mine", "hash", "http", 1),
        ("mine", "hash", "http", 3),
    ]
    assert json.loads(path.read_text())["figures"] == {"levels": told}


def test_a_server_that_refuses_ends_the_measurement() -> None:
    """Ids reach up to 100,000 here, and the model has a few hundred."""
    cells = Cells.read()._replace(sweep=Sweep((1,), 10, 6, 2))
    with forge_server() as url, pytest.raises(RequestFailed, match="400 Bad Request"):
        serve.main(url, None, cells=cells)


def test_without_a_server_the_address_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"url: no server at 127\.0\.0\.1:1:"):
        serve.main("http://127.0.0.1:1", None)


class Threes(asyncio.Protocol):
    """Answers three requests at once, a while after the third came.

    waiting   connections of all instances whose request has no answer yet
    counts    how many were waiting each time that answers were sent
    """

    def __init__(self, waiting: list[asyncio.Transport], counts: list[int]) -> None:
        self.waiting, self.counts = waiting, counts
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        if len(body) < int(head.lower().partition(b"content-length: ")[2].split()[0]):
            return
        self.data = b""
        self.waiting.append(self.transport)
        if len(self.waiting) == 3:
            asyncio.get_running_loop().call_later(0.01, self.answer)

    def answer(self) -> None:
        self.counts.append(len(self.waiting))
        for transport in self.waiting:
            transport.write(WHOLE)
        self.waiting.clear()


class HangsUp(asyncio.Protocol):
    """Closes the connection as soon as something is asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.close()


def loop_over(kind: Callable[[], asyncio.Protocol], requests: int, concurrency: int) -> int:
    """How many streams a closed loop gets from a server made of this protocol."""

    async def run() -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(kind, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = serve.Server(f"http://127.0.0.1:{port}", "any", None)
            message = target.message([1, 2], 2)
            try:
                streams, _ = await serve.closed_loop(target, [message] * requests, concurrency)
            finally:
                await asyncio.sleep(0.01)  # both sides see that the connections are closed
        return len(streams)

    return asyncio.run(run())


def test_a_closed_loop_over_http_keeps_as_many_streams_in_flight_as_asked() -> None:
    waiting: list[asyncio.Transport] = []
    counts: list[int] = []
    assert loop_over(lambda: Threes(waiting, counts), 9, 3) == 9
    assert counts == [3, 3, 3]


def test_a_lost_connection_ends_the_measurement() -> None:
    with pytest.raises(RequestFailed, match="the connection was lost"):
        loop_over(HangsUp, 1, 1)
