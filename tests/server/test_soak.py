"""Requests of every kind, good and bad, for long: the server then holds what it held before.

The client speaks HTTP by hand, on connections that it keeps, so that it costs little and can leave
in the middle of anything. Figures are read from /proc, for this process and the engine's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.limits import Limits
from forge.server.app import create_app
from forge.server.http_server import create_listener
from tests.server.local_server import create_client, serve_app, wait_until

PROC = Path("/proc")
pytestmark = pytest.mark.skipif(
    not (PROC / "self" / "fd").exists(), reason="what a process holds is read from /proc"
)

CLIENTS = 16
QUEUE = 7
SMALL = {"num_blocks": 64, "block_size": 16, "max_model_len": 256, "max_num_seqs": 8}
KNOWN_REQUEST = {"model": "hash", "prompt": "a known request", "max_tokens": 6, "temperature": 0}
BYTES_PER_REQUEST = 16.0
"""Less than the smallest thing that could be kept of a request: an entry of a dictionary."""


class Resources(NamedTuple):
    """Resources of an idle server.

    objects   instances of forge's classes in this process
    """

    descriptors: int
    threads: int
    tasks: int
    blocks: int
    mailboxes: int
    objects: int


class SoakServer(NamedTuple):
    """A running server with access to its figures.

    loops   the event loop that serves, once it has served a request
    """

    url: str
    llm: AsyncLLM
    client: httpx.Client
    loops: set[asyncio.AbstractEventLoop]

    def pids(self) -> list[int]:
        """Return the ids of this process and of the engine's, if it has one."""
        return [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]

    def threads(self) -> int:
        """Count threads, without those of the event loop's executor, whose number may vary."""
        here = sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
        return here + sum(len(os.listdir(PROC / str(pid) / "task")) for pid in self.pids()[1:])

    def count_resources(self) -> Resources:
        """Count the resources of the idle server.

        Closing a connection takes the server a moment, so call this through `wait_until_idle`.
        """
        tasks = sum(len(asyncio.all_tasks(loop)) for loop in self.loops)
        return Resources(
            sum(len(os.listdir(PROC / str(pid) / "fd")) for pid in self.pids()),
            self.threads(),
            tasks,
            self.llm.status.num_used_blocks,
            len(self.llm._mailboxes),
            0,
        )

    def wait_until_idle(self) -> Resources:
        """Wait until all work has ended, check a known request, and return the resources."""
        with create_client(self.url) as client:
            answer = client.post("/v1/completions", json=KNOWN_REQUEST)
            assert answer.status_code == 200, answer.text
        status = self.llm
        wait_until(lambda: not (status.status.has_work or status._mailboxes))
        found = self.count_resources()
        for _ in range(20):
            time.sleep(0.02)
            found, before = self.count_resources(), found
            if found == before:
                break
        for loop in self.loops:
            loop.call_soon_threadsafe(forget_timers, loop)
        time.sleep(0.02)
        gc.collect()
        mine = sum(str(type(each).__module__).startswith("forge.") for each in gc.get_objects())
        return found._replace(objects=mine)

    def resident_bytes(self) -> int:
        """Return the bytes in memory of the server, its engine and the client."""
        pages = (int((PROC / str(pid) / "statm").read_text().split()[1]) for pid in self.pids())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def forget_timers(loop: asyncio.AbstractEventLoop) -> None:
    """Remove cancelled timers from the loop, which does so itself only when most are cancelled.

    Until then each keeps its request alive, some hundred at a time.
    """
    for timer in [loop.call_later(1_000.0, print) for _ in range(1_000)]:
        timer.cancel()


@contextmanager
def open_soak_server(make: Callable[..., AsyncLLM]) -> Iterator[SoakServer]:
    llm = make("hash", **SMALL)
    limits = Limits(max_queue=QUEUE)
    app = create_app(llm, served_model_name="hash", limits=limits)
    loops: set[asyncio.AbstractEventLoop] = set()

    def remembering(inner: Any) -> Any:
        async def remember(scope: Any, receive: Any, send: Any) -> None:
            loops.add(asyncio.get_running_loop())
            await inner(scope, receive, send)

        return remember

    app.add_middleware(remembering)
    with create_listener("127.0.0.1", 0, ()) as socket_:
        with serve_app(llm, app, socket_, limits) as (url, client):
            client.close()  # the client's open connections are not the server's
            yield SoakServer(url, llm, client, loops)


# Requests.


class SoakRequest(NamedTuple):
    """A request of the run.

    kind          name it is counted under
    leave_after   number of parts of the response after which the client closes the connection;
                  None: it stays
    """

    kind: str
    path: str
    body: bytes
    statuses: tuple[int, ...]
    leave_after: int | None = None


def draw_request(rng: Random) -> SoakRequest:
    """Return a random request: three of four are good, and one in five of these is left."""
    if rng.random() < 0.25:
        return draw_bad_request(rng)
    text = "".join(rng.choices("abcdefgh é漢", k=rng.randint(1, 12)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 8)}
    path, kind = "/v1/completions", "completion"
    draw = rng.random()
    if draw < 0.2:
        path, kind = "/generate", "generate"
        body["prompt"] = text
    elif draw < 0.5:
        path, kind = "/v1/chat/completions", "chat"
        body |= {"model": "hash", "messages": [{"role": "user", "content": text}]}
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
    else:
        body |= {"model": "hash", "prompt": text if rng.random() < 0.8 else [text, "b"]}
        if rng.random() < 0.2:
            body["echo"] = True
        elif rng.random() < 0.2:
            body["logprobs"] = rng.randint(0, 3)
    if kind != "generate":
        body["stream"] = rng.random() < 0.5
        if body["stream"] and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.2:
            body["n"] = rng.randint(2, 4)
    for field, value, share in (
        ("stop", ["e", "th", text[:2]], 0.3),
        ("seed", rng.getrandbits(32), 0.3),
        ("temperature", 0.0, 0.8),
        ("cache_salt", rng.choice("abc"), 0.2),
        ("user", f"user-{rng.getrandbits(64)}", 0.2),
    ):
        if rng.random() < share:
            body[field] = value
    leaves = None
    if rng.random() < 0.2:
        leaves = rng.randint(0, 2) if body.get("stream") else 0
        body |= {"max_tokens": 64, "ignore_eos": True}
        kind = f"{kind}, left"
    elif body.get("stream"):
        kind = f"{kind}, stream"
    return SoakRequest(kind, path, json.dumps(body).encode(), (200, 429), leaves)


def draw_bad_request(rng: Random) -> SoakRequest:
    """Return a request that is refused, each time with another text."""
    odd = f"odd-{rng.getrandbits(64):x}"
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/generate"))
    match rng.randrange(5):
        case 0:
            return SoakRequest("no json", path, f'{{"prompt": "{odd}'.encode(), (400,))
        case 1:
            return SoakRequest("unknown field", path, json.dumps({odd: 1}).encode(), (400,))
        case 2:
            body = {"model": odd, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
            del body["prompt" if path.startswith("/v1/chat") else "messages"]
            return SoakRequest("unknown model", path, json.dumps(body).encode(), (404,))
        case 3:
            return SoakRequest("unknown path", f"/{odd}", b"{}", (404,))
        case _:
            body = {"model": "hash", "prompt": odd, "max_tokens": 10**6}
            return SoakRequest("too long", "/v1/completions", json.dumps(body).encode(), (400, 429))


# Clients.


class SoakClient:
    """A client: sends one request after another, on a connection that it opens when needed."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: SoakRequest) -> str:
        """Return the outcome of the request: "left", or its status."""
        if self._open is None:
            self._open = await asyncio.open_connection(*self._address)
        reader, writer = self._open
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s"
            % (request.path.encode(), len(request.body), request.body)
        )
        if request.leave_after == 0:
            await writer.drain()
            await self.close()
            return "left"
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        assert status in request.statuses, f"{status} for {request}"
        body = b""
        if b"transfer-encoding: chunked" in head:
            parts = 0
            while size := int(await reader.readline(), 16):
                body = (await reader.readexactly(size + 2))[:-2]
                parts += 1
                if parts == request.leave_after:
                    await self.close()
                    return "left"
            await reader.readline()
            assert body.endswith(b"data: [DONE]\n\n"), body
        else:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            assert ("error" in json.loads(body)) == (status >= 400), body
        if b"connection: close" in head:
            await self.close()
        return str(status)

    async def close(self) -> None:
        """Close the connection, whatever was in flight."""
        if self._open is not None:
            _, writer = self._open
            self._open = None
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def run_clients(
    url: str, count: int, seed: int, every: Callable[[int], None]
) -> Counter[str]:
    """Send `count` requests from CLIENTS clients. `every` is called after each 200 of them."""
    rng, reached = Random(seed), Counter[str]()
    parts = urlsplit(url)
    numbers = iter(range(count))

    async def client() -> None:
        connection = SoakClient(str(parts.hostname), int(parts.port or 0))
        try:
            for number in numbers:
                request = draw_request(rng)
                reached[request.kind] += 1
                reached[await connection.send(request)] += 1
                if number % (count // 200) == 0:
                    every(number)
        finally:
            await connection.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())
    return reached


def slope(points: list[tuple[int, int]]) -> float:
    """Return the slope of the least-squares line through the points: bytes per request."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


KINDS = (
    *("generate", "generate, left", "chat", "chat, stream", "chat, left"),
    *("completion", "completion, stream", "completion, left"),
    *("no json", "unknown field", "unknown model", "unknown path", "too long"),
    *("200", "400", "404", "429", "left"),
)


def run_soak(
    server: SoakServer, count: int, warm_up: int
) -> tuple[Resources, Resources, list[tuple[int, int]]]:
    """Return the resources after `warm_up` requests and after `count` more, and the memory."""
    memory: list[tuple[int, int]] = []
    asyncio.run(run_clients(server.url, warm_up, 1, lambda number: None))
    before = server.wait_until_idle()
    start_s = time.monotonic()
    reached = asyncio.run(
        run_clients(
            server.url, count, 2, lambda number: memory.append((number, server.resident_bytes()))
        )
    )
    took_s = time.monotonic() - start_s
    after = server.wait_until_idle()
    for _ in range(50):
        if not list_growth(before, after):
            break
        after = server.wait_until_idle()  # an idle server may still be closing connections
    print(f"{count / took_s:.0f} requests/s, {dict(reached)}")
    print(f"before {before}\nafter  {after}")
    print(f"{memory[0][1] / 2**20:.1f} to {memory[-1][1] / 2**20:.1f} MiB, {slope(memory):.2f} B")
    assert not [kind for kind in KINDS if reached[kind] < count // 200]
    return before, after, memory


def list_growth(before: Resources, after: Resources) -> list[str]:
    """Return the resources that have grown, except objects."""
    return [name for name in Resources._fields[:-1] if getattr(after, name) > getattr(before, name)]


def check_growth(before: Resources, after: Resources) -> None:
    """Check that nothing has grown; resources of earlier tests may have gone."""
    assert not list_growth(before, after) and before.blocks == before.mailboxes == 0, (
        before,
        after,
    )
    assert after.objects - before.objects < 200  # cancelled timers keep some for a while


@pytest.mark.long
def test_requests_of_every_kind_leak_nothing() -> None:
    """P13, no slow leak: three hundred mixed requests after two hundred.

    Descriptors, threads, tasks and blocks are the same. Of the requests only the state of the last
    users of each slot stays.
    """
    with open_soak_server(AsyncLLM) as server:
        before, after, _ = run_soak(server, 300, 200)
    check_growth(before, after)


# 20,000 requests warm it up: then the allocator has all its arenas.
@pytest.mark.soak
@pytest.mark.parametrize("make", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_two_hundred_thousand_requests_of_every_kind_leak_nothing(
    make: Callable[..., AsyncLLM],
) -> None:
    """P13, no slow leak: memory, descriptors, threads and tasks stay flat after a warm-up."""
    with open_soak_server(make) as server:
        before, after, memory = run_soak(server, 200_000, 20_000)
    check_growth(before, after)
    assert slope(memory) < BYTES_PER_REQUEST
