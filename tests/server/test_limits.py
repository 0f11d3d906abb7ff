"""What one client may cost the others, over real sockets: slow, greedy, gone or too many clients.

The limits are a server's defaults. Its clock is advanced where a user would wait for half a minute,
and stands still otherwise, so that no machine is too slow for a test. An endless stream runs for
longer than a test waits. The cache is small, so that blocks left by a request are detected.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from forge import AsyncLLM
from forge.cli.main import main
from forge.errors import InvalidConfig
from forge.limits import DEFAULT_LIMITS, Limits
from forge.log import PrintableFormatter
from forge.server.admission import AdmissionQueue
from forge.server.app import create_app
from forge.server.body import MAX_JSON_ITEMS, item_positions, parse_json_object
from forge.server.connection import SEND_BUFFER_BYTES, WRITE_HIGH_WATER_BYTES
from forge.server.errors import APIError
from forge.server.http_server import create_listener, parse_allowed_hosts
from forge.server.middleware import MAX_HEADERS, is_allowed_host
from forge.server.routes import PROBES
from forge.server.transport import DRAIN_S
from tests.forge_process import start_server
from tests.server.local_server import (
    TIMEOUT_S,
    GatedModel,
    ManualClockLoop,
    block_compilation,
    create_client,
    serve_app,
    unexpected_log,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[2]
NEVER_ENDS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
STREAM: dict[str, Any] = {"model": "hash", "prompt": "open", "stream": True}
SIZES = {"num_blocks": 4096, "block_size": 4, "max_model_len": 4096}


class LimitsServer(NamedTuple):
    """A running server and its limits."""

    url: str
    llm: AsyncLLM
    client: httpx.Client
    clock: ManualClockLoop

    def post(self, path: str = "/generate", **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def is_idle(self) -> bool:
        status = self.llm.status
        return (status.num_running, status.num_waiting, status.num_used_blocks) == (0, 0, 0)

    def has_counts(self, running: int, waiting: int) -> bool:
        """Return whether so many run and wait, by the engine's latest report."""
        status = self.llm.status
        return (status.num_running, status.num_waiting) == (running, waiting)

    def wait_until_read(self) -> None:
        """Wait until the server has read all bytes sent before this call, on any connection."""
        with create_client(self.url) as client:
            assert client.get("/livez").status_code == 200


@contextmanager
def open_limits_server(
    model: str = "hash",
    *,
    make: Callable[..., AsyncLLM] = AsyncLLM,
    prepare: Callable[[AsyncLLM], None] = lambda llm: None,
    limits: Limits | None = None,
    send_buffer: int | None = None,
    api_keys: tuple[str, ...] = (),
    allowed_hosts: str | None = None,
    **options: Any,
) -> Iterator[LimitsServer]:
    """Serve on a free port until the end of the block."""
    llm = make(model, **{**SIZES, **options})
    prepare(llm)
    limits = limits or Limits()
    clock = ManualClockLoop()
    with create_listener("127.0.0.1", 0, api_keys) as socket_:
        if send_buffer is not None:
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        hosts = parse_allowed_hosts(socket_, "127.0.0.1", allowed_hosts)
        app = create_app(
            llm, served_model_name="hash", api_keys=api_keys, hosts=hosts, limits=limits
        )
        with serve_app(llm, app, socket_, limits, clock) as (url, client):
            yield LimitsServer(url, llm, client, clock)


READ_S, WRITE_S = DEFAULT_LIMITS.read_timeout, DEFAULT_LIMITS.write_timeout


@pytest.fixture(scope="module")
def running_server() -> Iterator[LimitsServer]:
    with open_limits_server() as server:
        yield server


@contextmanager
def connect(server: LimitsServer, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(TIMEOUT_S)
        connection.connect((url.host, url.port or 80))
        yield connection


def head(method: str, path: str, *headers: str) -> bytes:
    return ("\r\n".join([f"{method} {path} HTTP/1.1", *headers]) + "\r\n\r\n").encode("latin-1")


HOST = "host: localhost"
JSON = "content-type: application/json"


def build_post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """Return a whole request."""
    text = json.dumps(body).encode()
    return head("POST", path, HOST, JSON, f"content-length: {len(text)}") + text


def read_until_close(connection: socket.socket) -> bytes:
    """Read until the server closes or cuts the connection."""
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionError:
        pass
    return data


def peek(connection: socket.socket) -> bytes:
    """Return the bytes that have come so far, and leave them to be read."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return connection.recv(2**20, socket.MSG_PEEK) if poll.poll(0) else b""


def is_reset(connection: socket.socket) -> bool:
    """Return whether the server has cut the connection, without reading from it."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def send_and_read(data: bytes, server: LimitsServer) -> bytes:
    """Send the bytes; return all that the server sends until it closes."""
    with connect(server) as connection:
        connection.setblocking(False)
        with suppress(ConnectionError):  # the server has closed before the last bytes
            while data:
                try:
                    data = data[connection.send(data) :]
                except BlockingIOError:  # it reads no more, and closes after a while
                    server.clock.advance_and_wait(DRAIN_S)
        connection.settimeout(TIMEOUT_S)
        return read_until_close(connection)


def check_refusal(answer: bytes, status: int, code: str) -> None:
    """Check that the response is this error, alone, in the shape of all errors."""
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 %d " % status), answer[:400]
    assert b"x-request-id: " in lines and b"connection: close" in lines.lower()
    assert error_of(json.loads(body), status) == code


def error_of(found: dict[str, Any], status: int) -> str:
    """Check an error envelope and return its code."""
    assert list(found) == ["error"]
    error = found["error"]
    assert list(error) == ["message", "type", "param", "code"]
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    assert error["type"] == ("server_error" if status >= 500 else kind)
    assert 0 < len(error["message"]) <= 512 and error["message"].isprintable()
    return str(error["code"])


def check_error(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text[:400]
    assert error_of(answer.json(), status) == code
    assert answer.headers["x-request-id"]


def check_serves(server: LimitsServer) -> None:
    """Check that the server still answers, and that no request is left."""
    assert server.post(prompt="ok", max_tokens=2).status_code == 200
    wait_until(server.is_idle)


def last_error(text: str) -> str:
    """Return the code of the error that ends a stream, which has no [DONE]."""
    events = text.split("\n\n")
    assert events.pop() == "" and "[DONE]" not in text
    return error_of(json.loads(events[-1].removeprefix("data: ")), 500)


# The head of a request.


@pytest.mark.parametrize(
    "sent",
    [
        head("GET", "/healthz", HOST, "x: " + "a" * 8 * 2**20),
        head("GET", "/healthz", HOST, "x: " + "a" * 70_000),
        head("GET", "/healthz", HOST, *(f"h{i}: 1" for i in range(5000))),
        head("GET", "/healthz", HOST, *(f"h{i}: 1" for i in range(MAX_HEADERS))),
        head("GET", "/" + "a" * 17_000, HOST),
        head("GET", "/healthz?" + "a" * 17_000, HOST),
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 20_000,
    ],
    ids=["8 MB", "70 KB", "5,000", "one too many", "path", "query", "endless"],
)
def test_a_head_over_the_limits_is_431_and_the_end(
    running_server: LimitsServer, sent: bytes
) -> None:
    check_refusal(send_and_read(sent, running_server), 431, "headers_too_large")
    check_serves(running_server)


def test_a_head_at_the_limits_is_served(running_server: LimitsServer) -> None:
    headers = [f"h{i}: 1" for i in range(MAX_HEADERS - 3)]
    answer = send_and_read(
        head("GET", "/healthz", HOST, "connection: close", *headers, "x: y"), running_server
    )
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_two_lengths_of_a_body_are_refused(running_server: LimitsServer) -> None:
    ways = ("content-length: 5", "transfer-encoding: chunked")
    smuggled = head("POST", "/generate", HOST, JSON, *ways) + b"0\r\n\r\n" + head("GET", "/", HOST)
    check_refusal(send_and_read(smuggled, running_server), 400, "bad_framing")
    check_serves(running_server)


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ("host: a", "host: b"),
        ("host: ",),
        ("host: evil/?x=",),
        ("host: a/#",),
        ("host: localhost@evil",),
        ("host: localhost:80:80",),
        ("host: [::1",),
        ("host: caf\xe9",),
        ("host: a b",),
    ],
    ids=str,
)
def test_an_invalid_host_is_refused_also_with_a_public_path(
    running_server: LimitsServer, hosts: tuple[str, ...]
) -> None:
    check_refusal(send_and_read(head("GET", "/healthz", *hosts), running_server), 400, "bad_host")


def test_a_server_of_this_machine_alone_answers_to_its_own_names(
    running_server: LimitsServer,
) -> None:
    def status(host: str, path: str = "/v1/models") -> int:
        return running_server.client.get(path, headers={"host": host}).status_code

    for own in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "127.8.8.8", "[::1]:80", "localhost."):
        assert status(own) == 200, own
    for other in ("evil.example", "192.0.2.1", "localhost.evil.example", "[::2]", "x127.0.0.1"):
        check_error(
            running_server.client.get("/v1/models", headers={"host": other}), 421, "bad_host"
        )
    assert status("192.0.2.1:8080", "/healthz") == 200  # a probe uses the address


def test_a_target_that_is_a_whole_url_names_the_host(running_server: LimitsServer) -> None:
    for own, other in (("localhost", "evil.example"), ("127.0.0.1:1", "[::2]")):
        request = head("GET", f"http://{own}/v1/models", f"host: {other}", "connection: close")
        assert send_and_read(request, running_server).startswith(b"HTTP/1.1 200 ")
        request = head("GET", f"http://{other}/v1/models", f"host: {own}")
        check_refusal(send_and_read(request, running_server), 421, "bad_host")


def test_allowed_hosts_are_names_with_commas_or_any() -> None:
    with create_listener("127.0.0.1", 0, ()) as socket_:

        def allows(name: str, allowed: str | None) -> bool:
            hosts = parse_allowed_hosts(socket_, "127.0.0.1", allowed)
            return hosts is None or is_allowed_host(name, hosts)

        assert allows("a.example", "b.example, A.example")
        assert not allows("c.example", "b.example,a.example")
        assert allows("c.example", "a.example,*")
        for bad in ("", "a.example,", "http://a.example", "a.example:80"):
            with pytest.raises(InvalidConfig, match="allowed_hosts: "):
                allows("a.example", bad)


def test_a_public_server_answers_to_any_name_unless_some_are_allowed() -> None:
    with create_listener("0.0.0.0", 0, ("key",)) as socket_:
        assert parse_allowed_hosts(socket_, "0.0.0.0", None) is None
        assert parse_allowed_hosts(socket_, "0.0.0.0", "a.example") == {"0.0.0.0", "a.example"}


def test_no_host_replaces_the_key() -> None:
    with open_limits_server(api_keys=("sesame",), allowed_hosts="*") as server:
        for host in ("evil/?x=", "localhost/healthz?", "a/#"):
            answer = send_and_read(head("GET", "/v1/models", f"host: {host}"), server)
            check_refusal(answer, 400, "bad_host")
        for path in ("//healthz", "/v1/../healthz", "/healthz/../v1/models", "/v1/models#/healthz"):
            answer = send_and_read(head("GET", path, HOST, "connection: close"), server)
            assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), path
        long = {"authorization": "Bearer " + "x" * 2**20}
        try:
            answer_ = server.client.get("/v1/models", headers=long)
        except httpx.TransportError:
            return  # the connection was cut before the last bytes
        check_error(answer_, 431, "headers_too_large")


def test_every_route_but_the_probes_needs_the_key() -> None:
    """The routes are those of the application, so a new one is public only if it is listed."""
    with open_limits_server(api_keys=("sesame",)) as server:
        routes = create_app(server.llm, api_keys=("sesame",)).routes
        served_routes = {
            (route.path, *route.methods) for route in routes if isinstance(route, Route)
        }
        assert {"/v1/completions", "/healthz"} < {path for path, *_ in served_routes}
        for path, *methods in served_routes:
            for method in methods:
                for headers in (
                    {},
                    {"authorization": "Bearer sesame2"},
                    {"x-api-key": "sesame2"},
                ):
                    answer = server.client.request(method, path, headers=headers)
                    if path in [spec.path for spec in PROBES]:
                        assert answer.status_code == 200, path
                    elif method == "HEAD":
                        assert answer.status_code == 401, path
                    else:
                        assert answer.status_code == 401, path
                        # Errors of /v1/score have SGLang's shape, whose types are coarser.
                        kind = "BadRequestError" if path == "/v1/score" else "authentication_error"
                        body = answer.json()
                        assert body.get("error", body)["type"] == kind


def test_keys_are_hashed_at_once_and_each_is_compared_in_constant_time() -> None:
    """Checked in the source: no response shows how long a comparison takes."""
    tree = ast.parse((ROOT / "forge" / "server" / "tenants.py").read_text(encoding="utf-8"))
    (keys,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    names = ("api_key", "api_keys", "_by_digest", "key_digest")
    uses = [
        ast.unparse(node)
        for node in ast.walk(keys)
        if isinstance(node, ast.expr | ast.Assign | ast.comprehension)
        and any(
            getattr(part, "id", getattr(part, "attr", None)) in names
            for part in ast.iter_child_nodes(node)
        )
    ]
    assert sorted(uses) == sorted(
        [
            "api_key.encode",
            "tenant_name(api_key)",
            " for api_key in api_keys",
            "self._by_digest = [(sha256(api_key.encode()).digest(), tenant_name(api_key)) "
            "for api_key in api_keys]",
            "len(self._by_digest)",
            "not self._by_digest",
            "api_key is None",
            "sha256(api_key)",
            "(key_digest, tenant)",
            " for key_digest, tenant in self._by_digest if "
            "secrets.compare_digest(digest, key_digest)",
            "secrets.compare_digest(digest, key_digest)",
        ]
    )


def test_neither_key_nor_prompt_nor_path_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with open_limits_server(api_keys=("sesame",)) as server:
        key = {"authorization": "Bearer sesame"}
        for body in ({"prompt": "secret"}, {"prompt": "secret", "temperature": 9}):
            server.client.post("/generate", json=body, headers=key)
        server.client.get("/secret?api_key=sesame", headers=key)
        send_and_read(b"secret\r\n\r\n", server)
    own = [each for each in caplog.records if each.name.startswith(("forge", "uvicorn"))]
    text = "".join(PrintableFormatter().format(each) for each in own)
    assert "secret" not in text and "sesame" not in text


def test_a_plain_request_id_of_the_client_is_kept(running_server: LimitsServer) -> None:
    headers = {"x-request-id": "trace-1.A_b"}
    body = {"model": "hash", "prompt": "a", "max_tokens": 1}
    ids = set()
    for _ in range(2):
        answer = running_server.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "trace-1.A_b"
        ids.add(answer.json()["id"])
    assert len(ids) == 2 and all("trace-1.A_b" in each for each in ids)


@pytest.mark.parametrize("given", ["", "a b", "a" * 65, "a\tb", "\xe9", '"x"', "a;b", "x\x1b[2J"])
def test_any_other_request_id_is_replaced(running_server: LimitsServer, given: str) -> None:
    answer = send_and_read(
        head("GET", "/healthz", HOST, f"x-request-id: {given}", "connection: close"), running_server
    )
    lines = answer.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    ids = [line.partition(": ")[2] for line in lines if line.startswith("x-request-id: ")]
    if answer.startswith(b"HTTP/1.1 400 "):
        return  # the parser refuses it as a header
    assert len(ids) == 1 and len(ids[0]) == 24 and ids[0].isalnum()


def test_a_log_line_cannot_be_made_by_a_client() -> None:
    record = logging.LogRecord(
        "forge.server", logging.ERROR, "", 0, "said %s", (INJECTED_TEXT,), None
    )
    try:
        raise ValueError(INJECTED_TEXT)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *rest = PrintableFormatter().format(record).split("\n")
    assert first == r"ERROR forge.server: said a\r\nERROR root: forged\x1b[2J\u2028"
    assert len(rest) > 2 and all(line.startswith("    | ") for line in rest)
    assert all(line.isprintable() for line in rest)


INJECTED_TEXT = "a\r\nERROR root: forged\x1b[2J\u2028"


@pytest.mark.parametrize(
    ("sent", "status", "waits"),
    [
        (b"nothing of the kind\r\n\r\n", 400, False),
        (head("GET", "/healthz", "host: a", "host: b"), 400, False),
        (head("GET", "/healthz", HOST, "content-length: x"), 400, False),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 20_000, 431, False),
        (head("GET", "/healthz", HOST, "x: " + "a" * 20_000), 431, False),
        (head("GET", "/nowhere", HOST, "connection: close"), 404, False),
        (b"GET /healthz HTTP/1.1\r\n", 408, True),
        (head("POST", "/generate", HOST, JSON, "content-length: 9") + b"{", 408, True),
    ],
    ids=["nothing", "hosts", "length", "endless", "long", "nowhere", "slow head", "slow body"],
)
def test_every_answer_is_counted_also_those_below_the_application(
    running_server: LimitsServer, sent: bytes, status: int, waits: bool
) -> None:
    def counted() -> Counter[str]:
        pairs = re.findall(r'_responses_total{status="(\d+)"} (.+)', metrics(running_server))
        return Counter({status: float(count) for status, count in pairs})

    before = counted()
    with connect(running_server) as connection:
        connection.sendall(sent)
        if waits:
            running_server.wait_until_read()
            running_server.clock.advance_and_wait(READ_S)
        assert read_until_close(connection).startswith(b"HTTP/1.1 %d " % status)
    assert counted() - before == Counter({str(status): 1, "200": 1 + waits})


def metrics(server: LimitsServer) -> str:
    return server.client.get("/metrics").text


# A client that sends slowly.


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\r\n",
        head("POST", "/generate", HOST, JSON, "content-length: 9") + b"{",
        head("POST", "/generate", HOST, JSON, "transfer-encoding: chunked") + b"1\r\n{\r\n",
        head("GET", "/healthz", HOST) + b"GET /hea",
    ],
    ids=["head", "body", "chunks", "second"],
)
def test_a_request_that_does_not_arrive_in_time_is_408(
    running_server: LimitsServer, sent: bytes
) -> None:
    with connect(running_server) as connection:
        connection.sendall(sent)
        running_server.wait_until_read()
        running_server.clock.advance_and_wait(READ_S - 1)
        running_server.wait_until_read()
        assert b" 408 " not in peek(connection)
        running_server.clock.advance_and_wait(1)
        answer = read_until_close(connection)
    check_refusal(answer[answer.rindex(b"HTTP/1.1 ") :], 408, "request_timeout")
    check_serves(running_server)


def test_bytes_one_by_one_do_not_buy_time(running_server: LimitsServer) -> None:
    with connect(running_server) as connection:
        for _ in range(11):  # it is refused after ten, and the next byte is dropped
            connection.sendall(b"a")
            running_server.wait_until_read()
            running_server.clock.advance_and_wait(READ_S / 10)
        check_refusal(read_until_close(connection), 408, "request_timeout")
    check_serves(running_server)


def test_a_silent_connection_is_closed_without_a_response(
    running_server: LimitsServer,
) -> None:
    with connect(running_server) as connection:
        running_server.wait_until_read()
        running_server.clock.advance_and_wait(READ_S)
        assert read_until_close(connection) == b""


def test_a_connection_may_be_idle_between_requests(running_server: LimitsServer) -> None:
    url = httpx.URL(running_server.url)
    with closing(HTTPConnection(url.host, url.port, timeout=TIMEOUT_S)) as connection:
        for rest_s in (READ_S * 1.5, 0.0):
            connection.request("GET", "/healthz")
            assert b'"ok"' in connection.getresponse().read()
            running_server.clock.advance_and_wait(rest_s)


def test_the_clock_of_a_request_starts_with_its_first_byte(running_server: LimitsServer) -> None:
    with connect(running_server) as connection:
        for part in (b"GET /healthz HTTP/1.1\r\n", b"host: localhost\r\n\r\n"):
            running_server.wait_until_read()
            running_server.clock.advance_and_wait(READ_S * 0.65)
            connection.sendall(part)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_an_answer_that_takes_long_is_no_slow_client() -> None:
    """The timer of sending has stopped once the request is complete."""
    with open_limits_server("hash:step_ms=10") as server, connect(server) as connection:
        connection.sendall(build_post({**STREAM, **NEVER_ENDS, "stream": False}))
        wait_until(lambda: server.has_counts(1, 0))
        server.clock.advance_and_wait(READ_S * 2)
        server.wait_until_read()
        assert peek(connection) == b"" and server.has_counts(1, 0)


def test_a_hundred_requests_sent_at_once_are_answered_in_order(
    running_server: LimitsServer,
) -> None:
    requests = [
        head("GET", "/healthz", HOST, f"x-request-id: r{i}", *(["connection: close"] * (i == 99)))
        for i in range(100)
    ]
    answers = (
        send_and_read(b"".join(requests), running_server).decode().split("HTTP/1.1 200 OK\r\n")[1:]
    )
    ids = [answer.partition("x-request-id: ")[2].partition("\r\n")[0] for answer in answers]
    assert ids == [f"r{i}" for i in range(100)]


def test_requests_before_one_that_is_wrong_are_answered_and_none_after_it(
    running_server: LimitsServer,
) -> None:
    good, wrong = head("GET", "/healthz", HOST), b"GET /healthz HTTP/1.1\nhost: localhost\r\n\r\n"
    answers = send_and_read(b"\r\n" + good + b"\r\n" + good + wrong + good, running_server).split(
        b"HTTP/1.1 "
    )[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"400"]
    check_refusal(b"HTTP/1.1 " + answers[-1], 400, "bad_framing")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_counts_as_gone(stream: bool) -> None:
    """A client that has left altogether looks the same until something is sent to it."""
    with open_limits_server("hash:step_ms=10") as server, connect(server) as connection:
        connection.sendall(build_post({**STREAM, **NEVER_ENDS, "stream": stream}))
        wait_until(lambda: server.has_counts(1, 0))
        connection.shutdown(socket.SHUT_WR)
        wait_until(server.is_idle)


# A client that reads slowly.

FLOOD: dict[str, Any] = {**STREAM, **NEVER_ENDS, "n": 4, "logprobs": 10, "seed": 1}


def are_reset(server: LimitsServer, *connections: socket.socket) -> bool:
    """Return whether each connection is cut after another `write_timeout`."""
    server.clock.advance_and_wait(WRITE_S)
    return all(map(is_reset, connections))


@pytest.mark.long
def test_a_client_that_does_not_read_is_cut_and_the_others_go_on() -> None:
    with open_limits_server(send_buffer=4096) as server, ExitStack() as stack:
        body = {"prompt": "beside", "max_tokens": 100, "ignore_eos": True, "seed": 2}
        alone = server.post(**body).json()
        stalled = [stack.enter_context(connect(server, 4096)) for _ in range(2)]
        steps = server.llm.status.num_steps
        for connection in stalled:
            connection.sendall(build_post(FLOOD))
        wait_until(lambda: server.llm.status.num_steps > steps)
        assert server.post(**body).json() == alone
        wait_until(lambda: are_reset(server, *stalled))
        wait_until(server.is_idle)
        check_serves(server)


@pytest.mark.long
def test_a_client_that_reads_slowly_is_not_cut() -> None:
    """It reads again and again, four times before the write timeout.

    That is more than the kernel buffers, so some of it came from the server's own buffer.
    """
    with open_limits_server(send_buffer=4096) as server, connect(server, 4096) as connection:
        connection.sendall(build_post({**FLOOD, "max_tokens": 200}))
        wait_until(lambda: server.llm.status.num_steps >= 200 and server.is_idle())
        server.wait_until_read()  # and has written all it can
        data, num_slow = b"", 0
        while not data.endswith(b"0\r\n\r\n"):
            chunk = connection.recv(8192)
            assert chunk, "it was cut"
            data += chunk
            if num_slow < 24 and len(data) > 2**13 * (num_slow + 1):
                num_slow += 1
                server.clock.advance_and_wait(WRITE_S * 0.25)
        assert num_slow == 24 and len(data) > 2 * WRITE_HIGH_WATER_BYTES, (
            "this much it could have left unread"
        )
        assert data.count(b'"finish_reason":"length"') == FLOOD["n"]
        assert data.count(b"data: [DONE]") == 1


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [20, 200])
def test_an_unread_answer_does_not_keep_its_connection(max_tokens: int) -> None:
    """The work is done and the connection should close, but bytes are left: few, or many."""
    with open_limits_server(send_buffer=4096) as server:
        body = {**FLOOD, "stream": False, "max_tokens": max_tokens}
        size = len(server.post("/v1/completions", **body).content)
        assert (size < WRITE_HIGH_WATER_BYTES) == (max_tokens == 20) and size > 8192
        with connect(server, 4096) as connection:
            text = json.dumps(body).encode()
            headers = (HOST, JSON, f"content-length: {len(text)}", "connection: close")
            connection.sendall(head("POST", "/v1/completions", *headers) + text)
            wait_until(lambda: bool(peek(connection)))
            wait_until(lambda: are_reset(server, connection))


# A queue.

ONE_SLOT = {"max_num_seqs": 1}


@contextmanager
def occupy(server: LimitsServer) -> Iterator[None]:
    """Run a stream in the block, which has the only slot of a server with one."""
    body = {**STREAM, **NEVER_ENDS}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # referenced, or the stream would be closed
        next(lines)
        yield


class BurstResult(NamedTuple):
    """Responses of simultaneous requests, and the longest queue meanwhile."""

    answers: list[httpx.Response]
    most_waiting: int


async def send_burst(
    server: LimitsServer,
    count: int,
    shed: int = 0,
    then: Callable[[], None] = lambda: None,
    **body: Any,
) -> BurstResult:
    """Send `count` requests at once. When `shed` of them have been answered, call `then`."""
    async with httpx.AsyncClient(
        base_url=server.url, trust_env=False, verify=False, timeout=TIMEOUT_S
    ) as client:

        async def ask() -> httpx.Response:
            return await client.post("/generate", json={"prompt": "a", "max_tokens": 1, **body})

        asking = [asyncio.create_task(ask()) for _ in range(count)]
        most = 0
        while (done := sum(each.done() for each in asking)) < count:
            most = max(most, server.llm.status.num_waiting)
            await asyncio.sleep(0.002)
            if done == shed:
                await asyncio.to_thread(then)
        return BurstResult([each.result() for each in asking], most)


def test_a_burst_fills_the_queue_exactly_and_the_rest_is_429_at_once() -> None:
    """Steps of 50 ms: the burst comes between two or three, and the engine reports few of it.

    At once: waiting requests start only when the others have been answered.
    """
    limits = Limits(max_queue=3)
    with (
        open_limits_server("hash:step_ms=50", limits=limits, **ONE_SLOT) as server,
        ExitStack() as running,
    ):
        running.enter_context(occupy(server))
        found = asyncio.run(send_burst(server, 12, shed=9, then=running.close))
        assert sorted(answer.status_code for answer in found.answers) == [200] * 3 + [429] * 9
        assert found.most_waiting <= 3
        for answer in found.answers:
            if answer.status_code == 429:
                check_error(answer, 429, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
        check_serves(server)


def test_a_place_in_the_queue_comes_back_however_a_request_ends() -> None:
    """Two places. A waiting client leaves: of a stream, of a whole answer, of one that started."""
    with open_limits_server("hash:step_ms=10", limits=Limits(max_queue=2), **ONE_SLOT) as server:
        for stream in (True, False, True, False):
            with occupy(server):
                with connect(server) as connection:
                    body = {**STREAM, **NEVER_ENDS, "stream": stream, "prompt": ["a", "b"]}
                    connection.sendall(build_post(body))
                    wait_until(lambda: server.llm.status.num_waiting == 2)
                    check_error(server_post(server), 429, "queue_full")
                wait_until(lambda: server.llm.status.num_waiting == 0)
            wait_until(server.is_idle)
        check_serves(server)


def test_no_more_structures_wait_to_be_compiled_than_requests_may_wait() -> None:
    """The limit is two, so that the number differs from the seconds in the message."""
    with open_limits_server(limits=Limits(max_queue=2)) as server, ThreadPoolExecutor(1) as pool:
        with block_compilation(server.llm) as waiting, connect(server) as connection:
            first = pool.submit(server_post, server, regex="a{9}", max_tokens=9)
            assert waiting.wait(TIMEOUT_S)
            connection.sendall(build_post({"model": "hash", "prompt": "a", "regex": "c{9}"}))
            server.wait_until_read()
            answer = server.post(prompt="a", regex="b{9}")
            check_error(answer, 429, "queue_full")
            assert "2 requests are waiting already. Try again in 1 s" in answer.text
            assert answer.headers["retry-after"] == "1"
            assert server.post(prompt="a", max_tokens=1).status_code == 200
        assert first.result().json()["choices"][0]["text"] == "a" * 9
        assert server.post(prompt="a", regex="b{9}").status_code == 200


def test_a_structure_waits_for_its_compiler_as_long_as_a_request_for_the_engine() -> None:
    with (
        open_limits_server(limits=Limits(queue_timeout=20.0)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with block_compilation(server.llm) as waiting:
            future = pool.submit(server.post, prompt="a", regex="a{9}")
            assert waiting.wait(TIMEOUT_S)
            server.clock.advance_and_wait(20.0)
            check_error(future.result(), 503, "queue_timeout")
            assert future.result().headers["retry-after"] == "1"
        assert server.post(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_structure_is_ready_after_the_shutdown_gets_its_error(stream: bool) -> None:
    with open_limits_server() as server, ThreadPoolExecutor(1) as pool:
        with block_compilation(server.llm) as waiting:
            future = pool.submit(server_post, server, prompt="a", regex="a{9}", stream=stream)
            assert waiting.wait(TIMEOUT_S)
            server.llm.abort_all()
        check_error(future.result(), 503, "shutting_down")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"prompt": "a"}),
    ],
    ids=["stream", "completion", "chat", "generate"],
)
def test_a_client_that_leaves_while_its_structure_waits_gives_its_place_back(
    path: str, fields: dict[str, Any]
) -> None:
    """The queue has one place, which the next request takes. No time passes meanwhile."""
    body = {"model": "hash", "max_tokens": 9, "regex": "a{9}", **fields}

    async def run() -> None:
        llm = AsyncLLM("hash", **SIZES)
        app = create_app(llm, limits=Limits(max_queue=1))
        async with app.router.lifespan_context(app), asyncio.timeout(TIMEOUT_S):
            with block_compilation(llm) as waiting:
                left = asyncio.Event()
                task = asyncio.create_task(call_app(app, path, body, left))
                await asyncio.to_thread(waiting.wait, TIMEOUT_S)
                left.set()
                assert await task == []
            assert await call_app(app, path, body, asyncio.Event()) == [200]

    asyncio.run(run())


async def call_app(
    app: Starlette, path: str, body: dict[str, Any], disconnected: asyncio.Event
) -> list[int]:
    """Return the status that the application sends; none if it notices that the client left."""
    text = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": text, "more_body": False}]
    headers = {"host": "localhost", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    found: list[int] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await disconnected.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    return found


def server_post(server: LimitsServer, **body: Any) -> httpx.Response:
    """Send on a separate connection: the client's is taken by a stream."""
    with create_client(server.url) as client:
        body = {"model": "hash", "prompt": "a", "max_tokens": 1, **body}
        return client.post("/v1/completions", json=body)


def test_more_prompts_than_may_ever_wait_are_an_error_of_the_client() -> None:
    with open_limits_server(limits=Limits(max_queue=2)) as server:
        answer = server_post(server, prompt=["a", "b", "c"])
        check_error(answer, 400, "too_many_prompts")
        assert answer.json()["error"]["param"] == "prompt"
        assert server_post(server, prompt=["a", "b"]).status_code == 200


def test_a_request_that_waits_too_long_is_503_and_the_running_one_goes_on() -> None:
    limits = Limits(queue_timeout=20.0, ping_interval=15.0)
    with (
        open_limits_server("hash:step_ms=10", limits=limits, **ONE_SLOT) as server,
        occupy(server),
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(server_post, server)
        wait_until(lambda: server.has_counts(1, 1))
        server.clock.advance_and_wait(19)
        server.wait_until_read()
        assert not future.done() and server.has_counts(1, 1)
        server.clock.advance_and_wait(1)
        check_error(future.result(), 503, "queue_timeout")
        assert int(future.result().headers["retry-after"]) >= 1
        wait_until(lambda: server.has_counts(1, 0))
        future = pool.submit(server_post, server, stream=True)
        wait_until(lambda: server.has_counts(1, 1))
        server.clock.advance_and_wait(15)
        server.clock.advance_and_wait(5)
        streamed = future.result()
        assert streamed.status_code == 200 and streamed.text.startswith(": ping\n\n")
        assert last_error(streamed.text) == "queue_timeout"
        check_running(server)


def check_running(server: LimitsServer) -> None:
    """Check that one request runs and will run on."""
    wait_until(lambda: server.has_counts(1, 0))
    steps = server.llm.status.num_steps
    wait_until(lambda: server.llm.status.num_steps > steps + 2)
    assert server.has_counts(1, 0)


def test_a_request_that_has_started_is_past_the_queue_timeout() -> None:
    with open_limits_server("hash:step_ms=10") as server, occupy(server):
        server.clock.advance_and_wait(DEFAULT_LIMITS.queue_timeout * 2)
        check_running(server)


def test_a_request_that_takes_too_long_is_504_or_ends_in_an_error() -> None:
    """One of its prompts may still wait: then the queue is not what takes too long."""
    limits = Limits(request_timeout=200.0)
    body = {**NEVER_ENDS, "prompt": ["a", "b"]}
    with (
        open_limits_server("hash:step_ms=10", limits=limits, **ONE_SLOT) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(server_post, server, **body)
        wait_until(lambda: server.has_counts(1, 1))
        server.clock.advance_and_wait(199)
        server.wait_until_read()
        assert not future.done() and server.has_counts(1, 1)
        server.clock.advance_and_wait(1)
        check_error(future.result(), 504, "deadline_exceeded")
        assert future.result().headers["x-should-retry"] == "false"
        wait_until(server.is_idle)
        with server.client.stream("POST", "/v1/completions", json={**STREAM, **body}) as several:
            parts = several.iter_text()
            text = next(parts)
            server.clock.advance_and_wait(200)
            text += "".join(parts)
        assert several.status_code == 200 and text.startswith("data: {")
        assert last_error(text) == "deadline_exceeded"
        wait_until(server.is_idle)
        check_serves(server)


def test_the_retry_time_is_the_wait_of_the_last_request_that_started() -> None:
    async def run() -> None:
        async with AsyncLLM("hash") as llm:
            queue = AdmissionQueue(llm)
            assert queue.retry_after_s == 1
            async with queue.enter(2) as on_first_token:
                assert queue.num_waiting == 2
                loop.advance(1.01)
                on_first_token()
                assert queue.num_waiting == 1
            assert (queue.num_waiting, queue.retry_after_s) == (0, 2)

    loop = ManualClockLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())


# A silent stream.


PING_S = DEFAULT_LIMITS.ping_interval


@contextmanager
def open_gated_server() -> Iterator[tuple[LimitsServer, GatedModel]]:
    """Open a server whose steps the test permits."""
    model = GatedModel(num_blocks=SIZES["num_blocks"], block_size=SIZES["block_size"])

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    with open_limits_server(prepare=prepare) as server, model.open_at_exit():
        yield server, model


@pytest.mark.long
def test_a_stream_that_waits_or_pauses_sends_pings(openai: Any) -> None:
    """The official client ignores one kind of sign."""
    with open_gated_server() as (server, model):
        with connect(server) as connection:
            connection.sendall(build_post({**STREAM, "max_tokens": 3, "ignore_eos": True}))
            wait_until(lambda: bool(server.llm._mailboxes))
            received = b""
            for count in (1, 2, 3):
                while received.count(b": ping\n\n") < count:
                    server.clock.advance_and_wait(PING_S)
                    server.wait_until_read()
                    received += connection.recv(65536) if peek(connection) else b""
                model.permits.release()
                while received.count(b"data: {") < count:
                    received += connection.recv(65536)
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
        first_bytes = [
            line[:7] for line in received.split(b"\r\n") if line.startswith((b": ", b"data: "))
        ]
        assert first_bytes == [b": ping\n", b"data: {"] * 3 + [b"data: ["]
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            options: Any = {"model": "hash", "prompt": "open", "max_tokens": 3, "stream": True}
            opened = pool.submit(client.completions.create, **options)
            wait_until(lambda: bool(server.llm._mailboxes))
            while not opened.done():  # A ping opens it. Many would reach the first-token limit.
                server.clock.advance_and_wait(PING_S)
                wait([opened], timeout=5)
            model.permits.release(3)
            with opened.result() as stream:
                assert 0 < len(list(stream)) <= 3


def test_a_stream_with_regular_events_has_no_pings() -> None:
    with open_gated_server() as (server, model), connect(server) as connection:
        connection.sendall(build_post({**STREAM, "max_tokens": 12, "ignore_eos": True}))
        received = b""  # a step's token is read before the clock is advanced
        for count in range(1, 13):
            model.permits.release()
            while received.count(b"data: {") < count:
                received += connection.recv(65536)
            server.clock.advance_and_wait(PING_S * 0.7)
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
        assert b": ping" not in received


# A client that leaves; the engine has a separate process.


@pytest.fixture(scope="module")
def process_server() -> Iterator[LimitsServer]:
    with open_limits_server("hash:step_ms=10", make=AsyncLLM.spawn, max_num_seqs=2) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_leaves_gives_its_blocks_back_across_processes(
    process_server: LimitsServer, stream: bool, waits: bool
) -> None:
    """Two run and others wait."""
    body = {
        **STREAM,
        **NEVER_ENDS,
        "stream": stream,
        "prompt": ["a", "b", "c"][: 3 if waits else 2],
    }
    with connect(process_server) as connection:
        connection.sendall(build_post(body))
        wait_until(lambda: process_server.llm.status.num_running == 2)
        wait_until(lambda: process_server.llm.status.num_waiting == int(waits))
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    wait_until(process_server.is_idle)
    check_serves(process_server)


def connect_and_leave(server: LimitsServer, clients: int) -> None:
    """So many clients send requests, half of them for a stream, and leave: early or late."""
    with ExitStack() as stack:
        for i in range(clients):
            connection = stack.enter_context(connect(server))
            body = {**STREAM, **NEVER_ENDS, "stream": i % 2 == 0, "prompt": f"{i % 3}" * 200}
            connection.sendall(build_post(body))
        time.sleep(0.01 * (clients % 7))


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.soak)])
def test_after_all_clients_left_new_requests_are_served_as_before(
    process_server: LimitsServer, times: int
) -> None:
    for i in range(times):
        connect_and_leave(process_server, 24 + i)
        answers = [process_server.post(prompt="b", max_tokens=2, temperature=0) for _ in range(5)]
        assert len({answer.json()["text"] for answer in answers}) == 1
        wait_until(process_server.is_idle)


# The end of the engine and of the server, as processes.

EXITING_POLICY = """
import os, time
from forge.policy import FCFS, first_in_queue
def admit(waiting, context):
    if any(len(each.request.prompt) == 13 for each in waiting):
        {}
    return first_in_queue(waiting, context)
policy = FCFS._replace(admit=admit)
"""


HANGS = """
        open({!r}, "w").close()
        for _ in range(9000):
            if os.path.exists({!r}):
                break
            time.sleep(0.01)
"""


@contextmanager
def open_server_process(*words: str) -> Iterator[tuple[subprocess.Popen[str], LimitsServer]]:
    """Run `forge serve` as a process, of hash unless a word names a model; yield a client too."""
    words = ("--served-model-name=hash", *words)
    with (
        start_server(*words, stderr=subprocess.PIPE, FORGE_MODEL="hash") as (process, url),
        create_client(url) as client,
    ):
        yield process, LimitsServer(url, None, client, None)  # type: ignore[arg-type]


def read_streams(
    server: LimitsServer, pool: ThreadPoolExecutor, count: int, **body: Any
) -> list[Future[str]]:
    """Yield the texts of streams, each on its connection, once all run, wait or have ended."""

    def read() -> str:
        with create_client(server.url) as client:
            return client.post("/v1/completions", json={**STREAM, **body}).text

    reading = [pool.submit(read) for _ in range(count)]
    wait_until(lambda: count_requests(server) == count or any(each.done() for each in reading))
    return reading


@contextmanager
def stop_engine(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop the engine in the block: children of the server's process stand still."""
    words = ["ps", "-A", "-o", "pid=,ppid="]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()]
    children = [int(pid) for pid, parent in pairs if int(parent) == process.pid]
    assert children
    for child in children:
        os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)


def is_closing(server: LimitsServer) -> bool:
    """Return whether new requests are refused."""
    with create_client(server.url) as client:
        return client.get("/readyz").status_code == 503


def count_requests(server: LimitsServer) -> int:
    """Return how many requests run or wait."""
    found = server.client.get("/healthz").json()
    return int(found["running"] + found["waiting"])


@pytest.mark.long
@pytest.mark.parametrize(
    "deed",
    [
        pytest.param("raise RuntimeError('detail')", id="raises", marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), 9)", id="killed"),
    ],
)
def test_a_dead_engine_is_reported_to_all_and_ends_the_server_with_status_1(
    tmp_path: Path, deed: str
) -> None:
    file = tmp_path / "deadly.py"
    file.write_text(EXITING_POLICY.format(deed))
    with (
        open_server_process("hash:step_ms=10", "--policy", str(file)) as (process, server),
        ThreadPoolExecutor(8) as pool,
    ):
        open_ = read_streams(server, pool, 4, **NEVER_ENDS)
        killer = server.post(prompt="x" * 13)
        check_error(killer, 503, "engine_dead")
        assert [last_error(each.result()) for each in open_] == ["engine_dead"] * 4
        with suppress(httpx.TransportError):  # it answers for a second, and may have ended
            check_error(server.client.get("/healthz"), 503, "engine_dead")
        _, complained = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        assert complained.splitlines()[-1].startswith("forge serve: the engine has ended: ")


@pytest.mark.long
@pytest.mark.parametrize(
    "count", [8, *(pytest.param(128, id=f"128-{i}", marks=pytest.mark.soak) for i in range(20))]
)
def test_a_signal_ends_what_runs_and_waits_and_refuses_what_comes(count: int) -> None:
    """Half of the requests run, the others wait."""
    words = ("hash:step_ms=10", f"--max-num-seqs={count // 2}", "--drain-timeout=300")
    with open_server_process(*words) as (process, server), ThreadPoolExecutor(count) as pool:
        open_ = read_streams(server, pool, count, max_tokens=100, ignore_eos=True, seed=1)
        with stop_engine(process):
            if not count_requests(server):
                pytest.skip("the requests have ended before all of them were there")
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_closing(server))
            answer = server_post(server)
            check_error(answer, 503, "shutting_down")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["connection"] == "close"
        texts = {each.result().replace("\n", "")[-12:] for each in open_}
        assert texts == {"data: [DONE]"}
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None and unexpected_log(process.stderr.read()) == ""


@pytest.mark.long
def test_a_second_signal_ends_all_with_an_error_across_processes() -> None:
    with (
        open_server_process("hash:step_ms=10", "--max-num-seqs=4", "--drain-timeout=300") as (
            process,
            server,
        ),
        ThreadPoolExecutor(8) as pool,
    ):
        open_ = read_streams(server, pool, 6, **NEVER_ENDS)
        end_by_two_signals(process, server)
        assert {error_of_any(each.result()) for each in open_} == {"shutting_down"}
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None and unexpected_log(process.stderr.read()) == ""
        with pytest.raises(httpx.ConnectError):
            server.client.get("/healthz")


@pytest.mark.long
def test_a_second_signal_ends_streams_with_an_error_also_where_the_engine_hangs(
    tmp_path: Path,
) -> None:
    """Three of them have started. The engine hangs in a step until they have ended."""
    file, hangs, go = (tmp_path / name for name in ("deadly.py", "hangs", "go"))
    file.write_text(EXITING_POLICY.format(HANGS.format(str(hangs), str(go))))
    with (
        open_server_process("hash:step_ms=10", "--policy", str(file), "--drain-timeout=300") as (
            process,
            server,
        ),
        ThreadPoolExecutor(8) as pool,
    ):
        open_ = read_streams(server, pool, 3, **NEVER_ENDS)
        open_.append(pool.submit(lambda: server_post(server, prompt="x" * 13).text))
        try:
            wait_until(hangs.exists)
            end_by_two_signals(process, server)
            codes = {error_of_any(each.result()) for each in open_}
        finally:
            go.touch()
        assert codes == {"shutting_down"}
        assert process.wait(TIMEOUT_S) == 0


def end_by_two_signals(process: subprocess.Popen[str], server: LimitsServer) -> None:
    """Send the second signal once the first has taken effect."""
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: is_closing(server))
    process.send_signal(signal.SIGTERM)


def error_of_any(text: str) -> str:
    """Return the code of the error of a stream, or of a request that had not started."""
    is_stream = text.startswith(("data: ", ": ping"))
    return last_error(text) if is_stream else error_of(json.loads(text), 503)


# The options.


@pytest.mark.parametrize("name", ["queue_timeout", "request_timeout", "read_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e9, "1"])
def test_seconds_are_seconds(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as error:
        Limits(**{name: value})
    assert error.value.option == name


@pytest.mark.parametrize("value", [0, -1, 2**21, True, 1.0])
def test_a_queue_has_numbered_positions(value: Any) -> None:
    with pytest.raises(InvalidConfig) as error:
        Limits(max_queue=value)
    assert error.value.option == "max_queue"


@pytest.mark.parametrize("command", ["serve", "info"])
def test_a_limit_that_cannot_be_is_refused_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--read-timeout", "nan"]) == 2
    message = "--read-timeout: nan is not a number of seconds. Give 30, say"
    assert capsys.readouterr() == ("", f"forge {command}: {message}\n")


# Long runs.


@pytest.mark.soak
def test_two_hundred_clients_that_read_nothing_disturb_no_stream() -> None:
    """Memory stays, each is cut, its blocks come back, and a good stream is unchanged."""
    options = {"num_blocks": 2**16, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    with open_limits_server(send_buffer=4096, **options) as server, ExitStack() as stack:
        body = {"prompt": "beside", "max_tokens": 400, "ignore_eos": True, "seed": 2}
        alone = server.post(**body).json()
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(200):
            connection = stack.enter_context(connect(server, 4096))
            connection.sendall(build_post({**STREAM, "max_tokens": 1000, "ignore_eos": True}))
        assert httpx.post(f"{server.url}/generate", json=body, timeout=600).json() == alone
        wait_until(lambda: are_reset(server) and server.is_idle(), 600)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        print(f"200 clients that read nothing: {grown_kib / 1024:.0f} MiB more")
        assert grown_kib < 64 * 1024
        check_serves(server)


@pytest.mark.soak
def test_ten_times_what_fits_for_a_while_is_shed_and_forgotten() -> None:
    """Closed loops of 160 clients on 8 slots and a queue of 8: the queue holds, all is counted."""
    with open_limits_server("hash:step_ms=5", limits=Limits(max_queue=8), max_num_seqs=8) as server:
        good, shed, end_s = 0, 0, time.monotonic() + 10.0
        while time.monotonic() < end_s:
            found = asyncio.run(send_burst(server, 160, max_tokens=20))
            codes = [answer.status_code for answer in found.answers]
            assert set(codes) <= {200, 429} and found.most_waiting <= 8
            good, shed = good + codes.count(200), shed + codes.count(429)
        print(f"{good} served, {shed} shed")
        assert good > 0 and shed > good
        check_serves(server)


def test_a_first_token_that_comes_as_its_time_is_over_is_late() -> None:
    """Both are due in one turn of the event loop, the deadline first."""

    async def late() -> tuple[APIError, int]:
        queue = AdmissionQueue(None, Limits(queue_timeout=20.0))  # type: ignore[arg-type]
        clock.set_exception_handler(lambda _, context: loop_errors.append(context))
        with pytest.raises(APIError) as exc_info:
            async with queue.enter(1) as on_first_token:
                clock.call_later(30.0, on_first_token)
                clock.advance(60.0)
                await asyncio.Event().wait()
        return exc_info.value, queue.num_waiting

    clock = ManualClockLoop()
    loop_errors: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        error, waiting = runner.run(late())
    assert (error.status, error.code, waiting) == (503, "queue_timeout", 0)
    assert loop_errors == []


def test_what_is_sent_ahead_of_a_client_is_bounded_in_the_kernel_too() -> None:
    with create_listener("127.0.0.1", 0, ()) as bounded, socket.socket() as like:
        like.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        size = like.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert bounded.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == size


def test_brackets_in_strings_are_no_items_of_a_body() -> None:
    """Strings with more brackets and quotes than a body may have items."""
    body = {"a": ["[:" * MAX_JSON_ITEMS, '\\"[' * MAX_JSON_ITEMS]}
    assert parse_json_object(json.dumps(body).encode()) == body
    with pytest.raises(APIError) as error:
        parse_json_object(json.dumps({"a": [[]] * MAX_JSON_ITEMS}).encode())
    assert error.value.code == "too_many_items"


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\\\:[{,\u20ac'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\\\:[{'), inner),
)


def num_parts(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(num_parts, value))
    if isinstance(value, dict):
        return 1 + sum(1 + num_parts(each) for each in value.values())
    return 0


@pytest.mark.long
@given(VALUES)
def test_items_of_a_body_are_its_lists_objects_and_strings(value: Any) -> None:
    assert len(list(item_positions(json.dumps(value).encode()))) == num_parts(value)
