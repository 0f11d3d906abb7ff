"""How many connections a server holds: the limit, the few beyond it, and the error for all others.

Real sockets, and limits so small that a handful of connections exceeds them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from forge import AsyncLLM
from forge.errors import InvalidConfig
from forge.limits import DEFAULT_LIMITS, Limits
from forge.server.app import create_app
from forge.server.connection import (
    MAX_OVERFLOW_CONNECTIONS,
    MAX_READ_BYTES,
    OVERFLOW_TIMEOUT_S,
    HTTPConnection,
    OpenConnections,
)
from forge.server.http_server import create_listener
from forge.server.routes import PROBES, RouteSpec
from tests.server.local_server import TIMEOUT_S, ManualClockLoop, serve_app, wait_until
from tests.server.test_limits import HOST, check_refusal, head, peek, read_until_close

MAX_CONNECTIONS = 3
MODELS_REQUEST = head("GET", "/v1/models", HOST)


class LimitedServer(NamedTuple):
    """A server with a limit of MOST connections, one of which is `client`'s."""

    url: httpx.URL
    client: httpx.Client
    clock: ManualClockLoop

    def count_open(self) -> tuple[int, int]:
        """Return the tasks of the server and the open files of this process, now."""
        tasks, files = self.client.get("/census").json()
        return tasks, files


async def count_open_route(request: Request) -> JSONResponse:
    return JSONResponse([len(asyncio.all_tasks()), len(os.listdir("/dev/fd"))])


@pytest.fixture(scope="module")
def running_server() -> Iterator[LimitedServer]:
    limits, clock = Limits(max_connections=MAX_CONNECTIONS), ManualClockLoop()
    llm = AsyncLLM("hash:step_ms=2")
    with create_listener("127.0.0.1", 0, ()) as socket_:
        app = create_app(llm, served_model_name="hash", limits=limits)
        app.router.routes.append(RouteSpec("/census").bind(GET=count_open_route))
        with serve_app(llm, app, socket_, limits, clock) as (url, client):
            client.get("/livez").raise_for_status()
            yield LimitedServer(httpx.URL(url), client, clock)


@contextmanager
def connect(server: LimitedServer) -> Iterator[socket.socket]:
    with socket.create_connection(
        (server.url.host, server.url.port or 80), TIMEOUT_S
    ) as connection:
        yield connection


def is_answered(connection: socket.socket) -> bool:
    """Return whether the connection is served: it gets a response and stays open."""
    connection.sendall(MODELS_REQUEST)
    return connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def fill(server: LimitedServer, stack: ExitStack) -> list[socket.socket]:
    """Open connections up to the limit, each known to be served."""
    wait_until(lambda: try_connect(server))
    found = [stack.enter_context(connect(server)) for _ in range(MAX_CONNECTIONS - 1)]
    assert all(map(is_answered, found))
    return found


def try_connect(server: LimitedServer) -> bool:
    with connect(server) as connection:
        return is_answered(connection)


def test_one_connection_too_many_is_503_and_closed() -> None:
    """A separate server, so that no other client is connected: silent connections count too."""
    limits, clock = Limits(max_connections=MAX_CONNECTIONS), ManualClockLoop()
    llm = AsyncLLM("hash")
    with ExitStack() as stack:
        socket_ = stack.enter_context(create_listener("127.0.0.1", 0, ()))
        url, client = stack.enter_context(serve_app(llm, create_app(llm), socket_, limits, clock))
        server = LimitedServer(httpx.URL(url), client, clock)
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(connect(server))
        with connect(server) as connection:
            connection.sendall(MODELS_REQUEST)
            answer = read_until_close(connection)
    check_refusal(answer, 503, "too_many_connections")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert f"{MAX_CONNECTIONS} connections are open already".encode() in answer


@pytest.mark.parametrize("path", [spec.path for spec in PROBES])
def test_health_checks_are_answered_when_every_place_is_taken(
    running_server: LimitedServer, path: str
) -> None:
    with ExitStack() as stack:
        fill(running_server, stack)
        with connect(running_server) as connection:
            connection.sendall(head("GET", path, HOST))
            lines, _, _ = read_until_close(connection).partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close" in lines


def test_a_silent_overflow_connection_is_refused_soon_and_one_beyond_the_reserve_at_once(
    running_server: LimitedServer,
) -> None:
    with ExitStack() as stack:
        fill(running_server, stack)
        before = count_responses(running_server, 503)
        silent = [
            stack.enter_context(connect(running_server)) for _ in range(MAX_OVERFLOW_CONNECTIONS)
        ]
        with connect(running_server) as connection:
            check_refusal(read_until_close(connection), 503, "too_many_connections")
        running_server.clock.advance_and_wait(OVERFLOW_TIMEOUT_S * 0.9)
        assert not any(map(peek, silent))
        running_server.clock.advance_and_wait(OVERFLOW_TIMEOUT_S * 0.1)
        for connection in silent:
            check_refusal(read_until_close(connection), 503, "too_many_connections")
        assert count_responses(running_server, 503) - before == MAX_OVERFLOW_CONNECTIONS + 1


def count_responses(server: LimitedServer, status: int) -> float:
    """Return how many responses with this status /metrics has counted."""
    lines = server.client.get("/metrics").text.splitlines()
    name = f'forge_http_responses_total{{status="{status}"}} '
    (count,) = [float(line.removeprefix(name)) for line in lines if line.startswith(name)]
    return count


def test_a_place_is_free_again_when_its_connection_ends(running_server: LimitedServer) -> None:
    with ExitStack() as stack:
        first, *_ = fill(running_server, stack)
        assert not try_connect(running_server)
        first.close()
        wait_until(lambda: try_connect(running_server))


def test_a_crowd_disturbs_no_stream_and_leaves_nothing(running_server: LimitedServer) -> None:
    """Two hundred connect at once: each gets a response, and all are removed."""
    body = {"model": "hash", "prompt": "one", "max_tokens": 120, "seed": 4, "ignore_eos": True}
    alone = running_server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    before = running_server.count_open()
    streamed = {**body, "stream": True}
    with ExitStack() as stack:
        fill(running_server, stack)
        answer = stack.enter_context(
            running_server.client.stream("POST", "/v1/completions", json=streamed)
        )
        events = answer.iter_lines()
        first = next(events)
        crowd = [stack.enter_context(connect(running_server)) for _ in range(200)]
        for connection in crowd:
            with suppress(ConnectionError):  # it was refused already
                connection.sendall(MODELS_REQUEST)
        for connection in crowd:
            check_refusal(read_until_close(connection), 503, "too_many_connections")
        chunks = [line[6:] for line in [first, *events] if line.startswith("data: ")]
    assert chunks.pop() == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == alone
    wait_until(
        lambda: all(
            now <= then for now, then in zip(running_server.count_open(), before, strict=True)
        )
    )


LIMITED_PROGRAM = """
import resource
from forge import AsyncLLM
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.limits import Limits
from forge.server.http_server import raise_file_limit, run_server

def limited(soft, call):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, 512))
    try:
        call()
    except InvalidConfig as error:
        print(error)
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)

limited(256, lambda: raise_file_limit(200))
limited(510, lambda: raise_file_limit(200))
limited(256, lambda: run_server(
    AsyncLLM("hash"), host="127.0.0.1", port=0, api_keys=(), served_model_name=None,
    on_ready=print, limits=Limits(max_connections=400),
))
print(main(["info"]))
"""


@pytest.mark.long
def test_open_files_are_raised_as_far_as_they_may_be_and_more_is_refused() -> None:
    command = [sys.executable, "-c", LIMITED_PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (
        0,
        [
            "500 512",
            "510 512",
            "max_connections: 400 take 700 open files, and this process may have 512. "
            "Raise its limit (ulimit -Hn), or give at most 212",
            "256 512",
            "2",
        ],
        "forge info: --max-connections: 2048 take 2348 open files, and this process may have 512. "
        "Raise its limit (ulimit -Hn), or give at most 212\n",
    )


@pytest.mark.parametrize("count", [0, -1, 2**21, True, 1.0, None])
def test_a_limit_on_connections_is_a_positive_number(count: int) -> None:
    with pytest.raises(InvalidConfig) as error:
        Limits(max_connections=count)
    assert error.value.option == "max_connections"


def test_a_client_cannot_have_much_read_in_one_callback() -> None:
    """A body of chunks of one byte has hundreds of thousands of events to parse."""
    sizes: list[int] = []

    class Counting(HTTPConnection):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))
            super().data_received(data)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def running_server() -> bytes:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        named: dict[str, Any] = {"limits": DEFAULT_LIMITS, "connections": OpenConnections()}
        server = await asyncio.get_running_loop().create_server(
            lambda: Counting(
                config=config,
                server_state=ServerState(),
                app_state={},
                on_response=lambda status: None,
                **named,
            ),
            "127.0.0.1",
            0,
        )
        async with server:
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address)
            head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
            line = await reader.readline()
            writer.close()
        return line

    assert b" 204 " in asyncio.run(running_server())
    assert sum(sizes) > 100_000 and max(sizes) <= MAX_READ_BYTES
