"""Keys and error shapes of every route, by every method and every spelling of its path.

The expected key and shape of a path are written out here and compared as text, so that they share
nothing with the router. A server that shuts down refuses what passes its key. So the requests of
the product need no handler: 401 is a wrong key, 503 a right one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from forge.async_llm import AsyncLLM
from forge.server.app import create_app
from forge.server.error_responses import EXCEPTION_HANDLERS
from forge.server.film import FilmFeed
from forge.server.middleware import SHUTTING_DOWN, SecurityMiddleware
from forge.server.routes import (
    ADMIN_ROUTES,
    FILM,
    FILM_PAGE,
    HOME,
    ROUTES,
    Access,
    APIRoute,
    Handler,
    RouteSpec,
    RouteTable,
)
from forge.server.tenants import Tenants
from forge.trainer_access import TrainerAccess

ROOT_PATH = "/llm"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "ODD")
KEYS = ("client", "other", "admin", "wrong", "client ", "")
Headers = list[tuple[bytes, bytes]]
HEADERS: list[Headers] = [
    [],
    *([(b"authorization", f"Bearer {key}".encode())] for key in KEYS),
    *([(b"x-api-key", key.encode())] for key in KEYS),
    [(b"authorization", b"Bearer client"), (b"x-api-key", b"admin")],
    [(b"authorization", b"Bearer admin"), (b"x-api-key", b"client")],
    [(b"authorization", b"Bearer admin"), (b"authorization", b"Bearer admin")],
]
PROBES = ("/healthz", "/health", "/livez", "/ping", "/readyz")
ADMIN = tuple(
    f"/admin/{name}" for name in ("weights", "pause", "resume", "sleep", "wake", "resize")
)
PATHS = (
    *PROBES,
    *ADMIN,
    *("/", "/film", "/metrics", "/load", "/version", "/openapi.json", "/invocations", "/generate"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/reset_prefix_cache", "/resize_kv_cache"),
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/score"),
    *("/v1/responses", "/v1/responses/r", "/v1/responses/r/cancel", "/v1/responses/r/input_items"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches", "/v1/sessions/a/b"),
    *("/v1/models", "/v1/models/hash", "/v1/models/a/b", "/nowhere", "/admin", "/admin/nothing"),
)
"""A path of each route, and some without one."""
SUFFIXES = tuple(f"%{byte:02x}" for byte in range(256))


class Target(NamedTuple):
    """A request target, and the path that it means; None: it is refused."""

    text: str
    path: str | None


class Answer(NamedTuple):
    """Status of a response, and the API whose errors have its shape."""

    status: int
    shape: str | None


def spell(path: str) -> Iterator[str]:
    """Yield targets that are this path or almost are."""
    yield path
    yield from (path + suffix for suffix in SUFFIXES)
    yield from (
        path + suffix for suffix in ("/", "//", "/.", "/..", ";", ";a=b", "%250a", "%0d%0a")
    )
    yield from (f"{path}?{query}" for query in ("", "%0a", "a=%00", "/livez"))
    yield from ("/" + path, "/." + path, "/x/.." + path, "/%2e" + path, "/livez/.." + path)
    yield from (f"/%0a{path[1:]}", f"/%00{path}", f"/livez%0a{path}", f"/livez%00{path}")
    yield from (path.upper(), path.title(), path.replace("/", "//"), path.replace("/", "%2f"))
    yield "/" + "".join(f"%{ord(each):02x}" for each in path[1:])
    yield "/" + "".join(f"%25{ord(each):02x}" for each in path[1:])
    yield from (path.replace("a", "%61"), path.replace("e", "%C3%A9"), path + "%e2%80%a8")
    yield from (f"{ROOT_PATH}{path}", f"{ROOT_PATH}{ROOT_PATH}{path}", f"{ROOT_PATH}{path}%0a")
    yield from (f"{ROOT_PATH}%2f{path[1:]}", f"{ROOT_PATH}%0a{path}", f"{ROOT_PATH}/{path}")
    yield from (
        f"http://localhost{path}",
        f"HTTPS://LOCALHOST:1{path}",
        f"http://localhost{path}%0a",
    )
    yield from (f"http://localhost{ROOT_PATH}{path}", f"http:/localhost{path}", f"ftp://a{path}")


TARGETS = [target for path in PATHS for target in spell(path)] + ["*", "localhost:443", "http://a"]


def meant_path(target: str) -> str | None:
    """Return the path that a target means, or None where it has a control character."""
    raw = target.partition("?")[0]
    for scheme in ("http://", "https://"):
        if raw.lower().startswith(scheme):
            raw = "/" + raw[len(scheme) :].partition("/")[2]
    path = unquote(raw)
    if any(ord(each) < 32 or ord(each) == 127 for each in path):
        return None
    return path[len(ROOT_PATH) :] if path.startswith(ROOT_PATH + "/") else path


def expected_shape(path: str) -> str:
    """Return the API whose errors a path has."""
    if path == "/v1/messages" or path[:13] == "/v1/messages/":
        return "anthropic"
    return "sglang" if path == "/v1/score" else "openai"


def valid_keys(path: str) -> Sequence[str] | None:
    """Return the keys that a path takes; None: it needs none."""
    if path == "/" or path in PROBES:
        return None
    return ("admin",) if path in ADMIN else ("client", "other")


def sent_key(headers: Headers) -> str | None:
    """Return the key of a request, or None where there is not exactly one."""
    bearers = [value for name, value in headers if name == b"authorization"]
    if bearers:
        return bearers[0][7:].decode() if len(bearers) == 1 else None
    return next((value.decode() for name, value in headers if name == b"x-api-key"), None)


def error_shape(body: bytes) -> str | None:
    """Return the API whose errors the body has the shape of; None: it is no error."""
    parsed = json.loads(body) if body.startswith(b"{") else {}
    if parsed.get("type") == "error":
        return "anthropic"
    if parsed.get("object") == "error":
        return "sglang"
    return "openai" if "error" in parsed else None


async def send(app: Any, method: str, target: str, headers: Headers, **state: Any) -> Answer:
    """Return the answer to a request whose target is split as uvicorn does it."""
    raw_path, _, query = target.encode().partition(b"?")
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def keep(message: Any) -> None:
        answers.append(message)

    scope = {
        **{"type": "http", "method": method, "path": unquote(raw_path.decode())},
        **{"raw_path": raw_path, "query_string": query, "root_path": "", "http_version": "1.1"},
        **{"headers": [(b"host", b"localhost"), *headers], "state": state},
    }
    await app(scope, receive, keep)
    body = b"".join(message.get("body", b"") for message in answers)
    return Answer(answers[0]["status"], error_shape(body))


async def check(app: Any, method: str, target: str, headers: Headers) -> None:
    """Check a request to a server that shuts down, so that no handler but a probe's runs."""
    answer = await send(app, method, target, headers, **{SHUTTING_DOWN: True})
    path = meant_path(target)
    keys = () if path is None else valid_keys(path)
    told = f"{method} {target} {headers}: {answer}"
    if path is None:
        assert answer.status == 400, told
    elif keys is not None and sent_key(headers) not in keys:
        assert answer == (401, expected_shape(path)), told
    elif path in PROBES:
        assert answer.status in (200, 405, 503), told
    else:
        assert answer == (503, expected_shape(path)), told


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starlette]:
    """Return a server with every feature that has routes."""
    llm, folder = AsyncLLM("hash"), tmp_path_factory.mktemp("weights")
    yield create_app(
        llm,
        served_model_name="hash",
        api_keys=("client", "other"),
        root_path=ROOT_PATH,
        trainer_access=TrainerAccess("admin", folder.resolve()),
        film=FilmFeed(llm, "fcfs"),
    )
    llm.close()


def check_all(app: Any, requests: Iterable[tuple[str, str, Headers]]) -> None:
    async def run() -> None:
        for method, target, headers in requests:
            await check(app, method, target, headers)

    asyncio.run(run())


def test_admin_paths_with_any_last_byte_need_the_admin_key(app: Starlette) -> None:
    """A path that ends with a line feed is that path to a regular expression with a $."""
    targets = [path + suffix for path in ADMIN for suffix in SUFFIXES]
    keys = ([], [(b"authorization", b"Bearer client")])
    check_all(app, itertools.product(("POST",), targets, keys))


def test_keys_and_shapes_are_those_of_the_path_a_target_means(app: Starlette) -> None:
    chosen = random.Random(1)
    check_all(
        app,
        (
            (chosen.choice(METHODS), chosen.choice(TARGETS), chosen.choice(HEADERS))
            for _ in range(2000)
        ),
    )


def product(step: int) -> Iterator[tuple[str, str, Headers]]:
    """Return every `step`-th request of all methods, targets and keys: two million in all."""
    return itertools.islice(itertools.product(METHODS, TARGETS, HEADERS), 0, None, step)


@pytest.mark.long
def test_keys_and_shapes_of_a_part_of_the_product(app: Starlette) -> None:
    check_all(app, product(41))


@pytest.mark.soak
def test_keys_and_shapes_of_the_whole_product(app: Starlette) -> None:
    check_all(app, product(1))


def create_recording_app() -> tuple[Starlette, list[str]]:
    """Return an application whose handlers add the path of their route to the list."""
    calls: list[str] = []

    def record(spec: RouteSpec) -> Handler:
        async def handle(request: Request) -> Response:
            calls.append(spec.path)
            return Response()

        return handle

    specs = [spec for spec in ROUTES if spec is not HOME]
    table = RouteTable(
        [
            spec.bind(GET=record(spec), POST=record(spec))
            for spec in (*specs, FILM_PAGE, FILM, *ADMIN_ROUTES)
        ]
    )
    keys = {Access.CLIENT: Tenants(("client", "other")), Access.ADMIN: Tenants(("admin",))}
    security = Middleware(SecurityMiddleware, routes=table, keys=keys, root_path=ROOT_PATH)
    app = Starlette(middleware=[security], exception_handlers=EXCEPTION_HANDLERS)
    app.router = table
    return app, calls


def check_handlers(requests: Iterable[tuple[str, str, Headers]]) -> set[str]:
    """Check that a handler runs only for its own path and key; return the routes of those."""
    app, calls = create_recording_app()
    reached = set()

    async def run() -> None:
        for method, target, headers in requests:
            answer = await send(app, method, target, headers)
            if answer.status == 200:
                (called,) = calls
                path = meant_path(target)
                assert path is not None, target
                keys = valid_keys(path)
                assert keys is None or sent_key(headers) in keys, (method, target, headers)
                assert called == path or "{" in called, (called, target)
                reached.add(called)
            else:
                assert calls == [], (answer, method, target, headers)
            calls.clear()

    asyncio.run(run())
    return reached


def test_a_handler_runs_for_its_own_path_and_key() -> None:
    chosen = random.Random(2)
    keys = ([(b"authorization", b"Bearer client")], [(b"x-api-key", b"admin")])
    reached = check_handlers(itertools.product(("GET", "POST"), PATHS, keys))
    assert reached == {spec.path for spec in (*ROUTES, FILM, *ADMIN_ROUTES)}
    check_handlers(
        (chosen.choice(METHODS), chosen.choice(TARGETS), chosen.choice(HEADERS))
        for _ in range(2000)
    )


@pytest.mark.long
def test_handlers_of_a_part_of_the_product_run_for_their_own_path_and_key() -> None:
    check_handlers(product(41))


@pytest.mark.soak
def test_handlers_of_the_whole_product_run_for_their_own_path_and_key() -> None:
    check_handlers(product(1))


def test_every_route_of_a_server_is_declared_once(app: Starlette) -> None:
    specs = [route.spec for route in app.routes if isinstance(route, APIRoute)]
    assert len(specs) == len(app.routes)
    assert set(specs) == {*ROUTES, FILM_PAGE, FILM, *ADMIN_ROUTES} - {HOME}
    for spec in specs:
        assert (spec.access is Access.ADMIN) == spec.path.startswith("/admin/")


def test_two_routes_cannot_have_one_path() -> None:
    with pytest.raises(AssertionError, match="two routes have one path"):
        RouteTable([HOME.bind(), FILM_PAGE.bind()])


def test_a_path_with_a_control_character_is_named_and_has_an_id(app: Starlette) -> None:
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/v1/messages%0A", headers={"x-request-id": "mine"})
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
    assert error["message"] == ("The path has the control character %0A. Send a path without it")
