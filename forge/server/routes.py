"""Routes: what each path of the server is, and the one place that finds the route of a request.

Owns the declaration of every route: its key, the shape of its errors, its operation in traces.
Knows no engine and no handler. A route is found once, before every decision. Keys, errors, traces
and the dispatch read that route, and none of them reads the path again. So no spelling of a path
can be one route for the key and another for the handler.

    target ──► to_route_scope ──► RouteTable.find ──► scope[ROUTE] ─┬─► SecurityMiddleware: access
               one path: no URL,                                    ├─► TraceMiddleware: operation
               no root path                                         ├─► error responses: envelope
                                                                    └─► RouteTable: its handler

Always true: every path has a route. UNKNOWN is that of a path without another one: it needs a
client's key, and then it is 404.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from forge.server.errors import (
    APIError,
    Envelope,
    anthropic_envelope,
    openai_envelope,
    score_envelope,
)

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

ROUTE = "forge.route"
"""Key in the scope of a request: its APIRoute."""

_ABSOLUTE_URL = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


class Access(Enum):
    """Clients that a route serves.

    PROBE    any, by any name of the machine, also while the server is full or shuts down
    PAGE     any
    CLIENT   those with a tenant's key
    ADMIN    those with the admin key
    """

    PROBE = "probe"
    PAGE = "page"
    CLIENT = "client"
    ADMIN = "admin"


class RouteSpec(NamedTuple):
    """Declaration of a route.

    path               as Starlette writes it: {name} is a segment, {name:path} any rest
    envelope           shape of its errors
    operation          gen_ai.operation.name of its spans; None: it generates nothing
    is_described       /openapi.json has it
    is_about_replica   it is about one engine, so a fleet does not have it
    """

    path: str
    access: Access = Access.CLIENT
    envelope: Envelope = openai_envelope
    operation: str | None = None
    is_described: bool = True
    is_about_replica: bool = False

    def bind(self, **handlers: Handler) -> APIRoute:
        """Return the route with a handler for each method. Without handlers it is 404."""
        return APIRoute(self, handlers)


class APIRoute(Route):
    """A route of the server: its declaration and its handlers. HEAD is handled as GET.

    There is one for each path, so the key of a path does not depend on the method.
    """

    def __init__(self, spec: RouteSpec, handlers: dict[str, Handler]) -> None:
        async def handle(request: Request) -> Response:
            method = "GET" if request.method == "HEAD" else request.method
            if method not in handlers:
                raise HTTPException(404)
            return await handlers[method](request)

        super().__init__(
            spec.path, handle, methods=list(handlers), include_in_schema=spec.is_described
        )
        self.spec = spec


COMPLETIONS = RouteSpec("/v1/completions", operation="text_completion")
CHAT = RouteSpec("/v1/chat/completions", operation="chat")
BATCH_CHAT = RouteSpec("/v1/chat/completions/batch", operation="chat")
INVOCATIONS = RouteSpec("/invocations", operation="chat")
GENERATE = RouteSpec("/generate", operation="text_completion")
SCORE = RouteSpec("/v1/score", envelope=score_envelope, operation="text_completion")
MODELS = RouteSpec("/v1/models")
MODEL = RouteSpec("/v1/models/{name:path}")
RESPONSES = RouteSpec("/v1/responses", operation="chat")
RESPONSE = RouteSpec("/v1/responses/{id}")
CANCEL_RESPONSE = RouteSpec("/v1/responses/{id}/cancel")
INPUT_ITEMS = RouteSpec("/v1/responses/{id}/input_items")
MESSAGES = RouteSpec("/v1/messages", envelope=anthropic_envelope, operation="chat")
COUNT_TOKENS = RouteSpec("/v1/messages/count_tokens", envelope=anthropic_envelope)
SESSION = RouteSpec("/v1/sessions/{id:path}")
TOKENIZE = RouteSpec("/tokenize")
DETOKENIZE = RouteSpec("/detokenize")
TOKENIZER_INFO = RouteSpec("/tokenizer_info")
HOME = RouteSpec("/")
VERSION = RouteSpec("/version")
OPENAPI = RouteSpec("/openapi.json")
HEALTHZ = RouteSpec("/healthz", Access.PROBE)
HEALTH = RouteSpec("/health", Access.PROBE)
PING = RouteSpec("/ping", Access.PROBE)
LIVEZ = RouteSpec("/livez", Access.PROBE)
READYZ = RouteSpec("/readyz", Access.PROBE)
METRICS = RouteSpec("/metrics", is_about_replica=True)
LOAD = RouteSpec("/load", is_about_replica=True)
RESET_PREFIX_CACHE = RouteSpec("/reset_prefix_cache", is_about_replica=True)
RESIZE_KV_CACHE = RouteSpec("/resize_kv_cache", is_about_replica=True)

ROUTES = (
    *(COMPLETIONS, CHAT, BATCH_CHAT, INVOCATIONS, GENERATE, SCORE, MODELS, MODEL),
    *(RESPONSES, RESPONSE, CANCEL_RESPONSE, INPUT_ITEMS, MESSAGES, COUNT_TOKENS, SESSION),
    *(TOKENIZE, DETOKENIZE, TOKENIZER_INFO, HOME, VERSION, OPENAPI),
    *(HEALTHZ, HEALTH, PING, LIVEZ, READYZ),
    *(METRICS, LOAD, RESET_PREFIX_CACHE, RESIZE_KV_CACHE),
)
"""Routes of every server."""

FILM_PAGE = RouteSpec("/", Access.PAGE)
"""Replaces HOME where there is a film: a page without data, which its reader gives a key."""
FILM = RouteSpec("/film", is_described=False)

WEIGHTS, PAUSE, RESUME, SLEEP, WAKE, RESIZE = ADMIN_ROUTES = tuple(
    RouteSpec(f"/admin/{name}", Access.ADMIN, is_described=False)
    for name in ("weights", "pause", "resume", "sleep", "wake", "resize")
)
"""Routes of trainers."""

PROBES = tuple(spec for spec in ROUTES if spec.access is Access.PROBE)

UNKNOWN_MESSAGES = RouteSpec("/v1/messages/{path:path}", envelope=anthropic_envelope)
UNKNOWN = RouteSpec("/{path:path}")


class RouteTable(Router):
    """The routes of an application. `find` puts a request's route into its scope, for `app`."""

    def __init__(
        self, routes: Sequence[APIRoute], lifespan: Lifespan[object] | None = None
    ) -> None:
        super().__init__(routes, redirect_slashes=False, lifespan=lifespan)
        paths = [route.path for route in routes]
        assert len(paths) == len(set(paths)), f"two routes have one path: {sorted(paths)}"
        self._fallbacks = (UNKNOWN_MESSAGES.bind(), UNKNOWN.bind())

    def find(self, scope: Scope) -> Scope:
        """Return the scope with the first route that has its path, whatever its method is.

        scope   of to_route_scope
        """
        for route in (*self.routes, *self._fallbacks):
            match, child_scope = route.matches(scope)
            if match is not Match.NONE:
                return {**scope, **child_scope, ROUTE: route}
        return {**scope, ROUTE: self._fallbacks[-1]}  # "*", say

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the request by the route that was found, or the lifespan."""
        if scope["type"] == "http":
            await scope[ROUTE].handle(scope, receive, send)
        else:
            await super().app(scope, receive, send)


def route_spec(scope: Scope) -> RouteSpec:
    """Return the declaration of a request's route."""
    spec: RouteSpec = scope[ROUTE].spec
    return spec


def to_route_scope(scope: Scope, root_path: str = "") -> Scope:
    """Return the scope with the path that its route is found by.

    A target that is a whole URL becomes its path. The path at which the application is mounted, and
    then `root_path`, are left out where the path begins with them.
    """
    scope = _to_origin_form(scope)
    path: str = scope["path"]
    for prefix in (scope.get("root_path", ""), root_path):
        if prefix and path.startswith(f"{prefix}/"):
            path = path.removeprefix(prefix)
    return {**scope, "path": path, "root_path": ""}


def path_error(scope: Scope) -> APIError | None:
    """Return the error of a path with a control character, or None.

    No route has one, and programs differ in whether such a character ends a line or a name.
    """
    match = _CONTROL_CHARACTER.search(scope["path"])
    if match is None:
        return None
    return APIError(
        400,
        "invalid_path",
        f"The path has the control character %{ord(match[0]):02X}. Send a path without it",
    )


def _to_origin_form(scope: Scope) -> Scope:
    """Return the scope with a path for its target, where that was a whole URL.

    The URL's host replaces the host header (RFC 9112, 3.2.2).
    """
    match = _ABSOLUTE_URL.fullmatch(scope.get("raw_path") or b"")
    if match is None:
        return scope
    headers = [header for header in scope["headers"] if header[0] != b"host"]
    path: bytes = match[2] or b"/"
    return {
        **scope,
        "raw_path": path,
        "path": unquote(path.decode("latin-1")),
        "headers": [(b"host", match[1]), *headers],
    }
