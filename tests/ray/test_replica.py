"""EngineReplica and Ingress without Ray: what a client gets when replicas die at any point."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.errors import EngineDead
from forge.ray.call import Call, ReplicaLost, ResponseHead
from forge.ray.ingress import MAX_ATTEMPTS, Ingress
from forge.ray.replica import EngineReplica
from forge.ray.routing_key import RoutingKey
from forge.server.body import MAX_BODY_BYTES

SIZES = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 4}
BODY = {"model": "hash", "prompt": "once", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
KEY = RoutingKey((), 0, "", "")
Part = ResponseHead | bytes


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    made = EngineReplica("r0", "hash", "fcfs", SIZES, "hash")  # type: ignore[arg-type]
    yield made
    made.close()


def call(**fields: Any) -> Call:
    body = json.dumps({**BODY, **fields}).encode()
    headers = ((b"content-type", b"application/json"), (b"host", b"x"))
    return Call("POST", "/v1/completions", b"", headers, body, KEY)


async def collect(parts: AsyncGenerator[Part, None]) -> tuple[ResponseHead, bytes]:
    async with aclosing(parts):
        head = await anext(parts)
        body = b"".join([part async for part in parts if isinstance(part, bytes)])
    assert isinstance(head, ResponseHead)
    return head, body


def test_a_call_crosses_processes() -> None:
    made = call()
    assert pickle.loads(pickle.dumps(made)) == made
    error = pickle.loads(pickle.dumps(ReplicaLost("r7")))
    assert (type(error), error.name, str(error)) == (ReplicaLost, "r7", "replica r7 has no engine")


def test_a_replica_answers_as_the_server_does(replica: EngineReplica) -> None:
    head, body = asyncio.run(collect(replica(call())))
    assert (head.status, head.is_event_stream) == (200, False)
    assert json.loads(body)["usage"]["completion_tokens"] == 5
    head, body = asyncio.run(collect(replica(call(model="other"))))
    assert (head.status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    head, body = asyncio.run(collect(replica(call(stream=True))))
    assert head.is_event_stream and body.endswith(b"data: [DONE]\n\n")


def test_a_reader_that_stops_aborts_its_request(replica: EngineReplica) -> None:
    async def read_a_part() -> None:
        async with aclosing(replica(call(stream=True, max_tokens=100))) as parts:
            await anext(parts)
            await anext(parts)
        async with asyncio.timeout(60):
            while replica.llm.num_open_requests or replica.llm.load.num_running:
                await asyncio.sleep(0.001)

    asyncio.run(read_a_part())


def test_an_idle_replica_reports_no_load(replica: EngineReplica) -> None:
    asyncio.run(collect(replica(call())))
    replica.check_health()
    assert asyncio.run(replica.record_autoscaling_stats()) == {"queue_s": 0.0, "used_rows": 0.0}


def test_a_replica_whose_engine_has_ended_is_unhealthy_and_loses_its_requests() -> None:
    made = EngineReplica("r1", "hash", "fcfs", SIZES, "hash")  # type: ignore[arg-type]
    made.close()
    with pytest.raises(EngineDead, match="the engine has ended"):
        made.check_health()
    with pytest.raises(ReplicaLost):
        asyncio.run(collect(made(call())))


# The ingress. Replicas are scripts of the parts that they yield before they die.


class Died(Exception):
    """A replica that is gone."""


Script = list[Part | BaseException]
JSON_HEAD = ResponseHead(200, ((b"content-type", b"application/json"),))
SSE_HEAD = ResponseHead(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
REFUSAL = ResponseHead(429, ((b"content-type", b"application/json"),))


class Fleet:
    """Replicas by their scripts: each call is served by the next one."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.num_closed = 0

    async def send(self, call: Call) -> AsyncGenerator[Part, None]:
        self.calls.append(call)
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self.num_closed += 1


def request(fleet: Fleet, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    """Return the response of an ingress in front of these replicas."""
    ingress = Ingress(fleet.send, (Died,))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_until_sent() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                await asyncio.Event().wait()  # httpx reports the end of the body as one
            return message

        response = await ingress(Request(scope, receive_until_sent))
        await response(scope, receive_until_sent, send)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, **{"json": BODY, **options})

    return asyncio.run(asyncio.wait_for(get(), 60))


def test_a_response_is_forwarded_with_its_head() -> None:
    fleet = Fleet([JSON_HEAD, b'{"a":', b"1}"])
    response = request(fleet)
    assert (response.status_code, response.json()) == (200, {"a": 1})
    assert (fleet.calls[0].method, fleet.calls[0].path) == ("POST", "/v1/completions")
    assert json.loads(fleet.calls[0].body) == BODY


@pytest.mark.parametrize(
    "lost",
    [
        [Died()],
        [JSON_HEAD, Died()],
        [JSON_HEAD, b'{"a":', Died()],
        [SSE_HEAD, Died()],
        [SSE_HEAD, b": ping\n\n", Died()],
        [ReplicaLost("r0")],
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_has_not_started_moves_to_another_replica(
    lost: Script, is_stream: bool
) -> None:
    whole: Script = [SSE_HEAD, b"data: x\n\n", b"data: [DONE]\n\n"]
    pinged = b": ping\n\n" in lost
    if not is_stream and pinged:
        return  # the client has the head of a stream already
    fleet = Fleet(lost, whole if is_stream else [JSON_HEAD, b'{"a":1}'])
    response = request(fleet)
    expected = "data: x\n\ndata: [DONE]\n\n" if is_stream else '{"a":1}'
    assert (response.status_code, response.text) == (200, ": ping\n\n" * pinged + expected)
    assert (len(fleet.calls), fleet.num_closed) == (2, 2)


def test_a_replica_without_an_engine_is_named_in_the_next_call() -> None:
    fleet = Fleet([ReplicaLost("r0")], [Died()], [ReplicaLost("r2")], [JSON_HEAD, b"{}"])
    assert request(fleet).status_code == 200
    assert [each.tried for each in fleet.calls] == [(), ("r0",), ("r0",), ("r0", "r2")]


@pytest.mark.parametrize("first", [b"data: x\n\n", b": ping\n\ndata: x\n\n"])
def test_a_stream_that_has_started_ends_with_an_error_and_without_done(first: bytes) -> None:
    fleet = Fleet([SSE_HEAD, first, Died()])
    response = request(fleet)
    assert response.status_code == 200
    frame = response.text.removeprefix(first.decode())
    assert frame.startswith("data: {") and "[DONE]" not in response.text
    assert json.loads(frame.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(fleet.calls) == 1, "it is not sent again"


def test_a_stream_of_messages_ends_with_an_error_event() -> None:
    response = request(Fleet([SSE_HEAD, b"event: a\ndata: {}\n\n", Died()]), "/v1/messages")
    *_, name, data, _, _ = response.text.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == (
        "event: error",
        "error",
        "overloaded_error",
    )
    whole = request(Fleet(*[[Died()]] * 4), "/v1/messages")
    assert (whole.status_code, whole.json()["type"]) == (503, "error")


def test_after_some_replicas_the_client_gets_an_error() -> None:
    fleet = Fleet(*([Died()] for _ in range(MAX_ATTEMPTS)))
    response = request(fleet)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert len(fleet.calls) == MAX_ATTEMPTS


def test_an_error_of_the_next_replica_after_a_ping_is_an_event() -> None:
    fleet = Fleet([SSE_HEAD, b": ping\n\n", Died()], [REFUSAL, b'{"error":{}}'])
    assert request(fleet).text == ': ping\n\ndata: {"error":{}}\n\n'


def test_an_error_that_is_no_lost_replica_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        request(Fleet([ZeroDivisionError()]))


@pytest.mark.parametrize("path", ["/metrics", "/load", "/reset_prefix_cache", "/resize_kv_cache"])
def test_routes_about_one_replica_are_not_found(path: str) -> None:
    response = request(fleet := Fleet(), path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert fleet.calls == []


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/reset_prefix_cache", 404),
        (b"/reset_prefix_cache%0a", 400),
        (b"/v1/models/a%00", 400),
    ],
)
def test_routes_of_an_ingress_are_found_as_those_of_a_server(target: bytes, status: int) -> None:
    """A proxy of Ray leaves the target as it is."""
    scope = {
        **{"type": "http", "method": "POST", "path": unquote(target.decode()), "headers": []},
        **{"raw_path": target, "query_string": b""},
    }

    async def run() -> Response:
        return await Ingress(Fleet().send, ())(Request(scope))

    assert asyncio.run(run()).status_code == status


def test_a_path_that_decodes_to_a_url_is_a_path(replica: EngineReplica) -> None:
    """The path of a call is decoded already: it has no second decoding and no host."""
    for path in ("http://x/livez", "/livez%0a", "/livez?a"):
        made = call()._replace(method="GET", path=path)
        head, _ = asyncio.run(collect(replica(made)))
        assert head.status == 404, path


def test_a_body_that_a_replica_would_refuse_for_its_length_is_not_sent() -> None:
    options = {"json": None, "content": bytes(MAX_BODY_BYTES + 1)}
    response = request(fleet := Fleet(), **options)
    assert (response.status_code, fleet.calls) == (413, [])


def test_a_client_that_leaves_ends_the_call() -> None:
    """The stream stays open until the client's side reports the disconnect."""
    closed = asyncio.Event()

    async def send(call: Call) -> AsyncGenerator[Part, None]:
        try:
            yield SSE_HEAD
            yield b"data: x\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def run() -> None:
        left = asyncio.Event()
        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def client_send(message: Any) -> None:
            if message.get("body"):
                left.set()

        scope = {"type": "http", "method": "POST", "path": "/x", "query_string": b"", "headers": []}
        response = await Ingress(send, ())(Request(scope, receive))
        await asyncio.wait_for(response(scope, receive, client_send), 60)
        assert closed.is_set()

    asyncio.run(run())
