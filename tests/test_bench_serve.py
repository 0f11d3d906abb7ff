"""The HTTP client of the benchmarks: it reads streams however they are cut, and loses no time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from bench import serve
from bench.workload import Cells, Sweep
from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig, RequestFailed
from forge.server.app import build

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
    """The address of a real server on the deterministic model."""
    with AsyncLLM("hash:step_ms=1", enable_prefix_caching=False) as llm:
        config = uvicorn.Config(build(llm), port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(10)
