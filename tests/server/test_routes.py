"""The small routes: liveness, version and the tokens of a text."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route

from forge import __version__
from forge.async_llm import AsyncLLM
from forge.errors import EngineDead
from forge.request import SamplingParams
from forge.server.app import create_app
from forge.server.body import MAX_JSON_ITEMS, parse_json_object, read_json_body
from forge.server.error_responses import EXCEPTION_HANDLERS
from forge.server.errors import APIError
from forge.server.middleware import SHUTTING_DOWN, SecurityMiddleware
from forge.server.openapi import REQUEST_MODELS, REQUIRED, SUMMARIES, build_document
from forge.server.operations import OperationsEndpoints
from forge.server.routes import Access, APIRoute, RouteTable
from forge.server.tenants import Tenants
from tests.engine.test_async_llm import FAILING_POLICY, TIMEOUT_S, BlockingPolicy, wait_until_async
from tests.server.test_server import check_envelope, open_server
from tests.texts import ANY_CHARACTER

SMALL = {"num_blocks": 64, "block_size": 4, "max_model_len": 256}
GREEDY = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
USER = [{"role": "user", "content": "hi"}]
LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
HOSTS = pytest.mark.parametrize(
    "kind",
    [AsyncLLM, pytest.param(AsyncLLM.spawn, marks=pytest.mark.long)],
    ids=["thread", "process"],
)
LLMFactory = Callable[..., AsyncLLM]


async def call_app(
    app: Any, method: str, path: str, body: dict[str, Any] | None = None
) -> httpx.Response:
    """Return the response of an application that is called without a socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        headers = {"content-type": "application/json"}
        request = client.request(method, path, content=json.dumps(body), headers=headers)
        return await asyncio.wait_for(request, TIMEOUT_S)


def get(app: Any, path: str) -> httpx.Response:
    return asyncio.run(call_app(app, "GET", path))


def post(app: Any, path: str, **body: Any) -> httpx.Response:
    return asyncio.run(call_app(app, "POST", path, body))


@pytest.fixture(scope="module")
def app() -> Iterator[Starlette]:
    llm = AsyncLLM("hash", **SMALL)
    yield create_app(llm, served_model_name="hash")
    llm.close()


@pytest.fixture(scope="module")
def document(app: Starlette) -> dict[str, Any]:
    """Return the OpenAPI document, which takes a tenth of a second to build."""
    return build_document(app.routes)


# Probes.


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping", "/healthz", "/version"])
def test_an_idle_server_is_healthy(app: Starlette, path: str) -> None:
    assert get(app, path).status_code == 200
    response = asyncio.run(call_app(app, "DELETE", path))
    check_envelope(response, 405, None, "method_not_allowed")
    assert response.json()["error"]["message"] == f"{path} does not take DELETE. Use GET or HEAD"


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/models", "Use /v1/models"),
        ("/v1/v1/models", "Use /v1/models"),
        ("/healthz/", "Use /healthz"),
        ("/v1/health", "Use /health"),
        ("/v1", "All routes are in /openapi.json"),
        ("/docs", "All routes are in /openapi.json"),
    ],
)
def test_an_unknown_path_is_answered_with_the_one_that_is_meant(
    app: Starlette, path: str, remedy: str
) -> None:
    response = get(app, path)
    check_envelope(response, 404, None, "not_found")
    assert response.json()["error"]["message"] == f"There is nothing at {path}. {remedy}"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_has_no_body(app: Starlette, path: str) -> None:
    assert get(app, path).content == b""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 1}),
        ("/v1/chat/completions/batch", {"messages": [USER], "max_tokens": 1}),
        ("/invocations", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/generate", {"prompt": "a", "max_tokens": 1}),
    ],
)
def test_a_request_without_a_model_is_served_by_the_one_that_there_is(
    app: Starlette, path: str, body: dict[str, Any]
) -> None:
    answer = post(app, path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "hash") == "hash"
    assert post(app, path, **body, model="other").status_code == 404
    assert post(app, path, **body, model="").status_code == 404


def test_version_is_that_of_the_package(app: Starlette) -> None:
    assert get(app, "/version").json() == {"version": __version__}


def test_the_page_at_the_root_says_what_the_server_is_and_runs_nothing(app: Starlette) -> None:
    response = get(app, "/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none';")
    assert f"forge {__version__}" in response.text and "<code>hash</code>" in response.text
    for path in re.findall(r'href="([^"]*)"', response.text):
        assert get(app, path).status_code == 200, path
    check_envelope(asyncio.run(call_app(app, "DELETE", "/")), 405, None, "method_not_allowed")


def test_the_page_at_the_root_escapes_the_name_of_the_model() -> None:
    llm = AsyncLLM("hash", **SMALL)
    try:
        page = get(create_app(llm, served_model_name="<b>&"), "/").text
        assert "<code>&lt;b&gt;&amp;</code>" in page
    finally:
        llm.close()


@HOSTS
def test_an_engine_that_has_died_is_neither_alive_nor_ready(
    kind: LLMFactory, tmp_path: Path
) -> None:
    file = tmp_path / "poison.py"
    file.write_text(FAILING_POLICY.format(fault="RuntimeError('poison')"))
    llm = kind("hash", policy=str(file), **SMALL)
    try:
        app = create_app(llm)
        assert post(app, "/generate", prompt="x" * 13).status_code == 503
        for path in ("/livez", "/readyz"):
            check_envelope(get(app, path), 503, None, "engine_dead")
        for path in ("/health", "/ping"):
            answer = get(app, path)
            assert (answer.status_code, answer.content) == (503, b"")
        check_envelope(post(app, "/reset_prefix_cache"), 503, None, "engine_dead")
        assert get(app, "/metrics").status_code == 200
    finally:
        llm.close()


def create_probed_app(llm: AsyncLLM, stalled_s: float) -> Starlette:
    """Return an application whose stall limit is this long."""
    table = RouteTable(OperationsEndpoints(llm, stalled_s).routes())
    keys = {Access.CLIENT: Tenants(())}
    app = Starlette(
        middleware=[Middleware(SecurityMiddleware, routes=table, keys=keys)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router = table
    return app


@HOSTS
def test_an_engine_that_makes_no_step_is_not_alive_until_it_makes_one(
    kind: LLMFactory, tmp_path: Path
) -> None:
    """P8, /livez is true iff there is progress: the limit is 100 ms."""
    held = BlockingPolicy(tmp_path)

    async def watch(llm: AsyncLLM) -> list[int]:
        app = create_probed_app(llm, 0.1)
        found = [(await call_app(app, "GET", "/livez")).status_code]
        task = asyncio.create_task(llm.generate("a", SamplingParams(max_tokens=1)))
        await wait_until_async(lambda: llm.stalled_s > 0.1)
        stalled = await call_app(app, "GET", "/livez")
        check_envelope(stalled, 503, None, "engine_stalled")
        assert (await call_app(app, "GET", "/readyz")).status_code == 200
        held.release()
        await task
        return [*found, stalled.status_code, (await call_app(app, "GET", "/livez")).status_code]

    llm = kind("hash", policy=held.policy, **SMALL)
    try:
        assert asyncio.run(watch(llm)) == [200, 503, 200]
    finally:
        held.release()
        llm.close()


@HOSTS
def test_an_engine_that_makes_steps_is_alive_however_long_it_works(kind: LLMFactory) -> None:
    """It works for twice the stall limit. A probe within 250 ms of a step gets 200."""

    async def watch(llm: AsyncLLM) -> set[int]:
        app = create_probed_app(llm, 0.25)
        task = asyncio.create_task(llm.generate("a", LONG))
        found = set()
        while not task.done():
            before_s, steps = time.monotonic(), llm.status.num_steps
            await wait_until_async(lambda n=steps + 1: task.done() or llm.status.num_steps > n)  # type: ignore[misc]
            status = (await call_app(app, "GET", "/livez")).status_code
            if time.monotonic() - before_s < 0.25:  # otherwise the machine was slow
                found.add(status)
        return found

    llm = kind("hash:step_ms=5", **SMALL)
    try:
        assert asyncio.run(watch(llm)) <= {200}
    finally:
        llm.close()


def test_work_after_a_long_idle_time_is_not_late(tmp_path: Path) -> None:
    held = BlockingPolicy(tmp_path)

    async def watch(llm: AsyncLLM) -> float:
        await asyncio.sleep(0.3)
        assert llm.stalled_s == 0.0
        start_s = time.monotonic()
        task = asyncio.create_task(llm.generate("b", SamplingParams(max_tokens=1)))
        await wait_until_async(lambda: llm.stalled_s > 0)
        late_s = llm.stalled_s - (time.monotonic() - start_s)
        held.release()
        await task
        return late_s

    llm = AsyncLLM("hash", policy=held.policy, **SMALL)
    try:
        assert asyncio.run(watch(llm)) <= 0.0
    finally:
        held.release()
        llm.close()


def test_a_server_that_is_about_to_end_is_alive_and_not_ready(app: Starlette) -> None:
    async def closing(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {SHUTTING_DOWN: True}}, receive, send)

    check_envelope(get(closing, "/readyz"), 503, None, "shutting_down")
    assert get(closing, "/livez").status_code == 200


# Tokens.


@given(text=st.text(ANY_CHARACTER))
@settings(max_examples=30, deadline=None)
def test_tokens_of_a_text_are_its_text_again(app: Starlette, text: str) -> None:
    body = post(app, "/tokenize", prompt=text, parse_special_tokens=False).json()
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 256)
    assert post(app, "/detokenize", tokens=body["tokens"]).json() == {"prompt": text}


def test_tokens_are_those_that_a_completion_counts(app: Starlette) -> None:
    text = "é, 漢 and 😀"
    tokens = post(app, "/tokenize", prompt=text, model="hash").json()["tokens"]
    body = post(app, "/generate", prompt=text, **GREEDY).json()
    assert body["prompt_tokens"] == len(tokens) == len(text.encode())
    assert post(app, "/generate", prompt=tokens, **GREEDY).json()["token_ids"] == body["token_ids"]
    bare = post(app, "/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert bare == tokens, "nothing is around a prompt of this model"


def test_names_of_special_tokens_are_parsed_in_prompts_and_not_in_chats(app: Starlette) -> None:
    text = "a<|end|>b"
    parsed, plain = [98, 0, 99], [byte + 1 for byte in text.encode()]
    for fields, expected in (
        ({}, parsed),
        ({"parse_special_tokens": True}, parsed),
        ({"parse_special_tokens": False}, plain),
    ):
        assert post(app, "/tokenize", prompt=text, **fields).json()["tokens"] == expected
        body = {"prompt": text, "max_tokens": 1, **fields}
        answer = post(app, "/v1/completions", **body, return_token_ids=True).json()
        assert answer["choices"][0]["prompt_token_ids"] == expected
        assert post(app, "/generate", **body).json()["prompt_tokens"] == len(expected)
        scored = {"query": "a<|e", "items": ["nd|>b"], "label_token_ids": [5], **fields}
        usage = post(app, "/v1/score", **scored).json()["usage"]
        assert usage["prompt_tokens"] == len(expected)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    for path in ("/v1/chat/completions", "/invocations"):
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        ids = post(app, path, **body, parse_special_tokens=False).json()["prompt_token_ids"]
        assert 0 not in ids and ids == post(app, "/tokenize", messages=messages).json()["tokens"]
        answer = post(app, path, **body, parse_special_tokens=True)
        check_envelope(answer, 400, "parse_special_tokens", "unsupported_parameter")
    answer = post(app, "/tokenize", messages=messages, parse_special_tokens=True)
    check_envelope(answer, 400, "parse_special_tokens", "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": None}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt", "invalid_unicode"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens", None),
        ("/tokenize", {"messages": []}, 400, "messages", "empty_messages"),
        ("/tokenize", {"tools": []}, 400, "messages", "missing_required_parameter"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "conflicting_parameters"),
        ("/tokenize", {"prompt": "a", "odd": 1}, 400, "odd", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model", "model_not_found"),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "98"}, 400, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [98, "99"]}, 400, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [257]}, 400, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [10**400]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [], "model": "other"}, 404, "model", "model_not_found"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    app: Starlette, path: str, body: Any, status: int, param: str, code: str | None
) -> None:
    answer = post(app, path, **body)
    check_envelope(answer, status, param, code or answer.json()["error"]["code"])


def test_tokens_have_their_names_where_they_are_requested(app: Starlette) -> None:
    answer = post(app, "/tokenize", prompt="aé", return_token_strs=True).json()
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert post(app, "/tokenize", prompt="a").json()["token_strs"] is None


def test_tokens_of_messages_are_those_of_their_chat(app: Starlette) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "continue_final_message": True,
    }
    tokens = post(app, "/tokenize", **chat, model="hash").json()
    answer = post(app, "/v1/chat/completions", **chat, model="hash", return_token_ids=True).json()
    assert tokens["tokens"] == answer["prompt_token_ids"]
    assert tokens["count"] == answer["usage"]["prompt_tokens"]


def test_no_text_and_no_tokens_are_an_answer(app: Starlette) -> None:
    assert post(app, "/tokenize", prompt="").json()["tokens"] == []
    assert post(app, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_text_far_longer_than_the_model_takes_is_counted(app: Starlette) -> None:
    body = post(app, "/tokenize", prompt="abc" * 5000).json()
    assert body["count"] == 15000 and body["tokens"] == [98, 99, 100] * 5000


def test_the_tokenizer_info_describes_the_tokenizer(app: Starlette) -> None:
    assert get(app, "/tokenizer_info").json() == {
        "tokenizer_class": "ByteTokenizer",
        "vocab_size": 257,
        "eos_token_id": 0,
        "eos_token": "<|end|>",
        "has_chat_template": True,
        "max_model_len": 256,
    }


# The prefix cache.


@HOSTS
def test_after_a_reset_nothing_is_shared_and_the_text_is_the_same(kind: LLMFactory) -> None:
    body = {"prompt": "the same long prompt", **GREEDY}
    llm = kind("hash", **SMALL)
    try:
        app = create_app(llm)
        hits, texts = [], []
        for path in (None, None, "/reset_prefix_cache", None):
            if path is not None:
                answer = post(app, path)
                assert (answer.status_code, answer.content) == (200, b"")
                assert llm.status.num_cached_blocks == 0
            before = llm.status.num_cached_tokens
            texts.append(post(app, "/generate", **body).json()["text"])
            hits.append(llm.status.num_cached_tokens - before)
    finally:
        llm.close()
    assert hits == [0, 16, 0, 16]
    assert len(set(texts)) == 1


@HOSTS
def test_a_reset_leaves_open_requests_alone(kind: LLMFactory) -> None:
    async def both(llm: AsyncLLM) -> tuple[list[int], list[int]]:
        alone = (await llm.generate("undisturbed", LONG)).token_ids
        tokens: list[int] = []
        async with aclosing(llm.stream("undisturbed", LONG)) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                if delta.finish_reason is None:
                    await asyncio.gather(*(llm.reset_prefix_cache() for _ in range(2)))
        return tokens, alone

    llm = kind("hash:step_ms=1", **SMALL)
    try:
        tokens, alone = asyncio.run(asyncio.wait_for(both(llm), TIMEOUT_S))
        assert tokens == alone
        assert not llm.status.num_used_blocks and not llm._mailboxes
    finally:
        llm.close()


def test_a_waiting_reset_ends_with_the_engine(tmp_path: Path) -> None:
    held = BlockingPolicy(tmp_path)

    async def end(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate("a", LONG))
        await wait_until_async(held.is_blocked)
        reset = asyncio.create_task(llm.reset_prefix_cache())
        await wait_until_async(lambda: len(llm._mailboxes) == 2)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        await wait_until_async(lambda: llm._host._loop._stopping)  # type: ignore[attr-defined]
        held.release()
        await closing
        with pytest.raises(EngineDead, match=r"it was closed\. Start it again"):
            await reset
        await task

    llm = AsyncLLM("hash", policy=held.policy, **SMALL)
    asyncio.run(asyncio.wait_for(end(llm), TIMEOUT_S))


# Bodies.


def test_what_only_looks_like_parts_in_a_text_is_read() -> None:
    text = '[{":\\\\\\"' * MAX_JSON_ITEMS
    assert parse_json_object(json.dumps({"a": text, "b": [1.5, -7, None]}).encode()) == {
        "a": text,
        "b": [1.5, -7, None],
    }


def test_a_large_body_is_read_while_others_are_served() -> None:
    """The event loop gets its turn before a million numbers are parsed."""

    async def turns() -> int:
        raw = b'{"a": [' + b"1," * 2**20 + b"1]}"
        request = Request(
            {"type": "http", "headers": [(b"content-type", b"application/json")]},
            receive=receive_of({"type": "http.request", "body": raw}),
        )
        reading = asyncio.create_task(read_json_body(request, dict))
        count = 0
        while not reading.done():
            await asyncio.sleep(0)
            count += 1
        assert len((await reading)["a"]) == 2**20 + 1
        return count

    assert asyncio.run(turns()) > 1


def receive_of(message: dict[str, Any]) -> Callable[[], Any]:
    async def receive() -> dict[str, Any]:
        return message

    return receive


def test_a_byte_order_mark_is_named(app: Starlette) -> None:
    json_ = {"content_type": "application/json"}
    body = b'\xef\xbb\xbf{"prompt": "a"}'
    answer = request_with_headers(app, "POST", "/generate", body, **json_)
    assert "it begins with a byte order mark (EF BB BF)" in answer.json()["error"]["message"]


# Pages of other origins.

FORM = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain")


def request_with_headers(
    app: Any, method: str, path: str, content: bytes = b"", **headers: str
) -> httpx.Response:
    """Return the response to a request with these headers alone, whose names have _ for -."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:80") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, content=content, headers=named)

    return asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


def mutating_requests(app: Starlette) -> list[tuple[str, str]]:
    """Return method and path of each request that may change something.

    These are every route, also one that is added later, and a path without a route.
    """
    routes = [
        (route.path, route.methods or set()) for route in app.routes if type(route) is APIRoute
    ]
    assert len(routes) == len(app.routes) and ("/reset_prefix_cache", {"POST"}) in routes
    routes += [("/healthz", {"POST", "PUT"}), ("/nowhere", {"POST", "DELETE", "PATCH", "ODD"})]
    return [
        (method, path.replace("{name:path}", "hash"))
        for path, methods in routes
        for method in sorted(methods - {"GET", "HEAD"})
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:81"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": ""},
        {"origin": "file://127.0.0.1"},
        {"origin": "://127.0.0.1"},
        {"origin": "127.0.0.1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "origin": "http://127.0.0.1"},
        {"sec_fetch_site": "odd"},
    ],
    ids=str,
)
def test_no_change_is_made_for_a_page_of_another_origin(
    app: Starlette, headers: dict[str, str]
) -> None:
    """The rule holds for every route. The body may be JSON or absent."""
    for method, path in mutating_requests(app):
        for sent in ({}, {"content_type": "application/json"}):
            check_envelope(
                request_with_headers(app, method, path, **headers, **sent),
                403,
                None,
                "cross_origin",
            )


@pytest.mark.parametrize("content_type", FORM)
@pytest.mark.parametrize("content", [b"", b'{"prompt": "a"}'])
def test_no_change_is_made_for_a_form(app: Starlette, content_type: str, content: bytes) -> None:
    """Old browsers send a form without an origin."""
    for method, path in mutating_requests(app):
        response = request_with_headers(app, method, path, content, content_type=content_type)
        check_envelope(response, 415, None, "unsupported_media_type")
        if content:
            unnamed = request_with_headers(app, method, path, content)
            check_envelope(unnamed, 415, None, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1"},
        {"origin": "HTTP://127.0.0.1"},
        {"origin": "https://127.0.0.1"},
        {"origin": "https://public.example", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    ],
    ids=str,
)
def test_programs_and_own_pages_are_served(app: Starlette, headers: dict[str, str]) -> None:
    """After a proxy, a page's origin is not the host that the server sees."""
    assert request_with_headers(app, "POST", "/reset_prefix_cache", **headers).status_code == 200
    json_ = {"content_type": "application/json"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert (
        request_with_headers(app, "POST", "/generate", body, **json_, **headers).status_code == 200
    )


def test_a_page_of_another_origin_may_send_a_safe_request_and_not_read_the_answer(
    app: Starlette,
) -> None:
    for method in ("GET", "HEAD", "OPTIONS"):
        answer = request_with_headers(app, method, "/v1/models", origin="http://evil.example")
        assert answer.status_code == (405 if method == "OPTIONS" else 200)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


# The description.


def list_refs(value: Any) -> set[str]:
    """Return every reference in a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(list_refs, value.values()))
    return set().union(*map(list_refs, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_every_reference_leads_somewhere(app: Starlette) -> None:
    document = get(app, "/openapi.json").json()
    routes = [route for route in app.routes if isinstance(route, Route)]
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(path, m) for path, methods in document["paths"].items() for m in methods}
    assert {path for path, _ in served} == set(SUMMARIES)
    assert set(REQUEST_MODELS) == set(REQUIRED) < set(SUMMARIES)
    bodies = {path for path, m in served if m == "post"} - {
        "/reset_prefix_cache",
        "/v1/responses/{id}/cancel",
    }
    assert bodies == set(REQUEST_MODELS)
    for ref in list_refs(document):
        found = document
        for part in ref.removeprefix("#/").split("/"):
            found = found[part]
    assert document["openapi"] == "3.1.0" and document["info"]["version"] == __version__


@pytest.mark.parametrize("path", REQUEST_MODELS)
def test_a_body_is_described_field_by_field(
    app: Starlette, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    model = REQUEST_MODELS[path]
    assert schema["properties"].keys() == model.model_fields.keys() - model.unsupported.keys()
    assert set(schema["required"]) <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    with_all = dict.fromkeys(schema["properties"])
    missing = asyncio.run(call_app(app, "POST", path, with_all)).json()
    missing = missing.get("error", missing)
    field = missing["message"].partition(":")[0]
    assert missing.get("param", field) == field
    assert field in schema["required"] or (path, field) == ("/tokenize", "prompt")


def test_the_described_error_is_the_one_that_is_sent(app: Starlette) -> None:
    schema = get(app, "/openapi.json").json()["components"]["schemas"]["Error"]
    sent = get(app, "/nowhere").json()
    inner = schema["properties"]["error"]
    assert schema["required"] == list(sent) and inner["required"] == list(sent["error"])
    for status in (400, 401, 404, 429, 500, 503):
        kind = APIError(status, "code", "message").envelope["error"]["type"]  # type: ignore[index]
        assert kind in inner["properties"]["type"]["enum"]


def test_a_key_is_needed_where_something_is_read_or_changed() -> None:
    with open_server(api_keys=("sesame",)) as server:
        for path in ("/metrics", "/version", "/tokenizer_info", "/openapi.json"):
            check_envelope(server.client.get(path), 401, None, "invalid_api_key")
        for path in ("/tokenize", "/detokenize", "/reset_prefix_cache", "/resize_kv_cache"):
            check_envelope(server.client.post(path, json={}), 401, None, "invalid_api_key")
        for path in ("/livez", "/readyz", "/healthz", "/health", "/ping"):
            assert server.client.get(path).status_code == 200
