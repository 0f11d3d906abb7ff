"""A closed loop over HTTP on any OpenAI-compatible server: latency and throughput by concurrency.

Owns the client: one connection per stream, kept open, and no more work per event than to note when
it came. The server may be forge's or a peer's; both get the same prompts of token ids.

    stream 1   POST ─► event event event ... [DONE]   POST ─► ...
    stream 2   POST ─► event event ...                             a stream that ends begins anew

Start the server first, then: python -m bench.serve http://127.0.0.1:8080 --label forge
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bench.record import record, write
from bench.sweep import HEADING, row
from bench.workload import IDS, Cells, Stream, Sweep, draw_prompts, level, say
from forge.errors import ForgeError, InvalidConfig, RequestFailed

DATA = b"data: "
NO_CHOICES = (b'"choices":[]', b'"choices": []')
"""How the event that only reports usage shows itself."""


class Reply:
    """One streamed response, fed as its bytes arrive.

    stamps   when each event with a piece of output was complete
    tokens   what the usage event counts; 0 before it
    ended    the response is complete, the connection is free
    Raises RequestFailed for a refusal, an error event, or a response that is not streamed.
    """

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.tokens = 0
        self.ended = False
        self._raw = b""
        self._text = b""
        self._headed = False

    def feed(self, data: bytes, now_s: float) -> None:
        """These bytes arrived at this moment."""
        self._raw += data
        if not self._headed:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return
            self._check(head, rest)
            self._headed, self._raw = True, rest
        while self._take_chunk(now_s):
            pass

    def _check(self, head: bytes, body: bytes) -> None:
        status, *fields = head.decode("latin-1").split("\r\n")
        if status.split(" ")[1:2] != ["200"]:
            raise RequestFailed(f"the server said {status}: {body[:400].decode(errors='replace')}")
        if not any(
            field.lower().replace(" ", "") == "transfer-encoding:chunked" for field in fields
        ):
            raise RequestFailed("the server does not stream its response in chunks")

    def _take_chunk(self, now_s: float) -> bool:
        """One whole chunk of the transfer is read, where there is one."""
        line, found, rest = self._raw.partition(b"\r\n")
        if not found:
            return False
        size = int(line.partition(b";")[0], 16)
        if len(rest) < size + 2:
            return False
        self._raw = rest[size + 2 :]
        if size == 0:
            self.ended = True
            return False
        *events, self._text = (self._text + rest[:size]).split(b"\n\n")
        for event in events:
            self._take_event(event, now_s)
        return True

    def _take_event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(DATA) or event.startswith(b"data: [DONE]"):
            return
        if any(mark in event for mark in NO_CHOICES):
            self.tokens = json.loads(event[len(DATA) :])["usage"]["completion_tokens"]
        elif event.startswith(b'data: {"error"'):
            raise RequestFailed(event[len(DATA) :][:400].decode(errors="replace"))
        else:
            self.stamps.append(now_s)


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply = Reply()
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for a request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The reply has these bytes; a complete or broken one wakes whoever waits for it."""
        now_s = time.perf_counter()
        if self._done is None or self._done.done():
            return
        try:
            self._reply.feed(data, now_s)
        except (RequestFailed, ValueError, KeyError) as fault:
            self._done.set_exception(fault)
            return
        if self._reply.ended:
            self._done.set_result(None)

    def connection_lost(self, fault: Exception | None) -> None:
        """Whoever waits for a reply learns that none will come."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestFailed(f"the connection was lost: {fault}"))

    async def exchange(self, message: bytes) -> Stream:
        """Send one request and wait for the end of its stream."""
        assert self._transport is not None, "there is no connection"
        self._reply = Reply()
        self._done = asyncio.get_running_loop().create_future()
        start_s = time.perf_counter()
        self._transport.write(message)
        await self._done
        return Stream(start_s, tuple(self._reply.stamps), self._reply.tokens)

    def close(self) -> None:
        """The connection is closed."""
        if self._transport is not None:
            self._transport.close()


class Server:
    """Where the server is, what its model is called there, and how requests to it are written."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        at: SplitResult = urlsplit(url)
        if at.scheme != "http" or at.hostname is None:
            raise InvalidConfig("url", f"{url!r} is not the address of a server", "Use http://...")
        self.host, self.port = at.hostname, at.port or 80
        self._fields = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        connection = HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", "/v1/models", headers=self._fields)
            answer = connection.getresponse()
            told = answer.read()
        except OSError as fault:
            at = f"{self.host}:{self.port}"
            raise InvalidConfig("url", f"no server at {at}: {fault}", "Start one") from None
        finally:
            connection.close()
        if answer.status != 200:
            problem = told[:400].decode(errors="replace")
            raise RequestFailed(f"the server said {answer.status} for its models: {problem}")
        return str(json.loads(told)["data"][0]["id"])

    def message(self, prompt: list[int], output: int) -> bytes:
        """The whole request for exactly `output` tokens, streamed, as it goes on the wire."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        fields = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._fields,
        }
        lines = [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + body


async def closed_loop(
    server: Server, messages: Sequence[bytes], concurrency: int
) -> tuple[list[Stream], float]:
    """The requests in order, `concurrency` at any time until none is left; wall seconds."""
    left = deque(messages)
    streams: list[Stream] = []
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(Connection, server.host, server.port))[1]
        for _ in range(concurrency)
    ]

    async def stream(connection: Connection) -> None:
        while left:
            streams.append(await connection.exchange(left.popleft()))

    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(stream(connection))
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        for connection in connections:
            connection.close()
    return streams, time.perf_counter() - start


async def measure(
    server: Server, cell: Sweep, ids: tuple[int, int], seed: int
) -> list[dict[str, float]]:
    """A level for each concurrency, after a warm-up of four streams."""
    rng = random.Random(seed)

    async def run(streams: int, count: int, output: int) -> dict[str, float]:
        prompts = draw_prompts(rng, count, (cell.input, cell.input), ids)
        messages = [server.message(prompt, output) for prompt in prompts]
        done, wall_s = await closed_loop(server, messages, streams)
        for each in done:
            if each.tokens != output or not each.stamps:
                raise RequestFailed(f"a stream ended after {each.tokens} tokens of {output}")
        return level(streams, done, wall_s)

    await run(4, 4, min(32, cell.output))
    return [await run(n, n * cell.rounds, cell.output) for n in cell.concurrency]


def main(
    url: str,
    json_path: str | None,
    label: str = "forge",
    concurrency: Sequence[int] = (),
    model: str | None = None,
    vocab_size: int | None = None,
    api_key: str | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, print a result for each concurrency, write the record where asked.

    label        the engine's name in results
    vocab_size   ids of prompts are below it; needed where the model has fewer than 100,000
    Raises InvalidConfig where no server answers, RequestFailed where one refuses or breaks off.
    """
    cells = cells or Cells.read()
    cell = cells.sweep._replace(concurrency=tuple(concurrency) or cells.sweep.concurrency)
    high = IDS[1] if vocab_size is None else min(IDS[1], vocab_size)
    server = Server(url, model, api_key)
    levels = asyncio.run(measure(server, cell, (min(IDS[0], high // 4), high), cells.seed))
    shape = os.path.basename(server.model.rstrip("/"))
    about = {"engine": label, "shape": shape, "path": "http"}
    results: list[dict[str, Any]] = [{**about, **figures} for figures in levels]
    print(HEADING)
    for result in results:
        print(row(result))
    for result in results:
        say(result)
    if json_path is not None:
        write(json_path, record("serve", {"levels": results}))
    return 0


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as integers."""
    return tuple(int(part) for part in text.split(","))


def command() -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--label", default="forge", help="the engine's name in results")
    parser.add_argument("--model", help="its name over HTTP; the first one listed")
    parser.add_argument("--concurrency", type=numbers, default=(), help="such as 1,8,64")
    parser.add_argument("--vocab-size", type=int, help="where it is below 100000")
    parser.add_argument("--api-key")
    parser.add_argument("--json", help="file for the record")
    args = parser.parse_args()
    try:
        return main(
            args.url,
            args.json,
            args.label,
            args.concurrency,
            args.model,
            args.vocab_size,
            args.api_key,
        )
    except ForgeError as refused:
        print(f"bench.serve: {refused}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(command())
