"""SecurityMiddleware: the outermost layer of the server, with request ids, the key and the checks.

Owns which requests may enter, and the response to a bug of the server. Knows no path: it finds the
route of a request, once, and the route says which clients may enter. Default deny: with API keys, a
path without a route needs one too. A request that may change something must come from this origin
and have no body but JSON, whatever its path is. Each check is bounded by those before it, so no
length or content of a request makes one slow.

    client ──► SecurityMiddleware ── route, id, path, head, host, key, origin, type ──► its handler
                 ├── 400, 401, 403, 415, 421, 431
                 ├── 503 ◄── the server shuts down, or has too many connections
                 └── 500 ◄── an exception without a handler
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.errors import InvalidConfig
from forge.server.body import media_type_error
from forge.server.error_responses import create_error_response
from forge.server.errors import (
    CLOSE_HEADERS,
    APIError,
    bad_framing_error,
    bad_host_error,
    cross_origin_error,
    excerpt,
    headers_too_large_error,
    server_error,
    shutting_down_error,
)
from forge.server.routes import Access, RouteTable, path_error, route_spec, to_route_scope
from forge.server.tenants import Tenants

LOG = logging.getLogger("forge.server")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""
MAX_HEADERS = 100
MAX_HEAD_BYTES = 16 * 2**10
"""Bytes of the request line and all headers."""
SHUTTING_DOWN = "closing"
"""Key in the state that the server shares with its requests, set once it takes no more."""
OVERFLOW = "crowded"
"""Key in the state of requests on an overflow connection; its value is max_connections."""

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class SecurityMiddleware:
    """ASGI middleware. Requests that pass have `request_id` in their state.

    routes        find the route of each request
    keys          those of each access that needs one; the state of its requests has the `tenant`
    root_path     beginning of paths that is left out, where a path has it
    on_response   called with the status of every response
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        keys: Mapping[Access, Tenants],
        hosts: Collection[str] | None = None,
        on_response: Callable[[int], None] = lambda status: None,
        root_path: str = "",
    ) -> None:
        self._root_path = root_path
        self._app = app
        self._on_response = on_response
        self._routes = routes
        self._keys = keys
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse. The response has the client's x-request-id, if that is plain."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # no route has WebSockets
            return
        # Before every check: all of them and the dispatch read this route.
        scope = self._routes.find(to_route_scope(scope, self._root_path))
        client_id = _single_header(scope, b"x-request-id")
        generated_id = secrets.token_hex(12)
        response_id, request_id = generated_id.encode(), generated_id
        if client_id is not None and _REQUEST_ID.fullmatch(client_id):
            # Two clients may send the same id; the id in the log must differ.
            response_id, request_id = client_id, f"{client_id.decode()}-{generated_id[:8]}"
        scope.setdefault("state", {})["request_id"] = request_id
        extra_headers = [(b"x-request-id", response_id)]
        if scope["state"].get(OVERFLOW):
            extra_headers.append((b"connection", b"close"))
        response_started = False
        # After an early response the client may omit the body: the next bytes are not part of it.
        body_unread = _has_header(scope, b"expect")

        async def receive_body() -> Message:
            nonlocal body_unread
            body_unread = False
            return await receive()

        async def send_with_headers(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                self._on_response(message["status"])
                close_headers = [(b"connection", b"close")] if body_unread else []
                message["headers"] = [*message.get("headers", ()), *extra_headers, *close_headers]
            await send(message)

        error = self._request_error(scope)
        if error is not None:
            await create_error_response(error, scope)(scope, receive_body, send_with_headers)
            return
        try:
            await self._app(scope, receive_body, send_with_headers)
        except Exception:
            if response_started:
                raise  # the ASGI server logs it and cuts the connection
            LOG.exception("request %s failed", request_id)
            response = create_error_response(server_error(), scope)
            await response(scope, receive_body, send_with_headers)

    def _request_error(self, scope: Scope) -> APIError | None:
        """Return the error of a request that may not enter, or None."""
        access = route_spec(scope).access
        is_probe = access is Access.PROBE
        return (
            path_error(scope)
            or _head_error(scope)
            or (None if is_probe else _overflow_error(scope["state"].get(OVERFLOW)))
            or self._host_error(scope, is_probe)
            or self._key_error(scope, access)
            or (None if scope["method"] in SAFE_METHODS else _unsafe_request_error(scope))
            or (
                shutting_down_error()
                if scope["state"].get(SHUTTING_DOWN) and not is_probe
                else None
            )
        )

    def _host_error(self, scope: Scope, is_probe: bool) -> APIError | None:
        header = _single_header(scope, b"host")
        if header is None:
            if is_probe and scope.get("http_version") == "1.0" and not _has_header(scope, b"host"):
                return None  # probes with HTTP/1.0 send no host
            return bad_host_error("the request must have exactly one", "Send one")
        text = header.decode("latin-1")
        match = _HOST.fullmatch(text)
        if match is None:
            return bad_host_error(f"'{excerpt(text)}' is not a name and a port", "Send NAME:PORT")
        # A probe uses the machine's address, and its response reveals nothing.
        if self._hosts is None or is_probe or is_allowed_host(match[1], self._hosts):
            return None
        remedy = "Start the server with --allowed-hosts, or call it by its own name"
        return bad_host_error(f"'{excerpt(text)}' is not this server", remedy, status=421)

    def _key_error(self, scope: Scope, access: Access) -> APIError | None:
        """Put the tenant into the request's state; return the error of a request without a key."""
        if access in (Access.PROBE, Access.PAGE):
            return None
        keys = self._keys[access]
        if _has_header(scope, b"authorization"):
            tenant = keys.of_request(_single_header(scope, b"authorization"))
        else:  # clients of Anthropic's API
            tenant = keys.of_key(_single_header(scope, b"x-api-key"))
        if tenant is None:
            return APIError(
                401,
                "invalid_api_key",
                "The API key is missing or wrong. Send the header Authorization: Bearer KEY, or "
                "x-api-key: KEY",
                headers={"www-authenticate": "Bearer"},
            )
        scope["state"]["tenant"] = tenant
        return None


def is_allowed_host(name: str, hosts: Iterable[str]) -> bool:
    """Return whether the host is listed, or is a loopback name. Case does not matter."""
    host_name = name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    if host_name == "localhost" or host_name in hosts:
        return True
    try:
        return ipaddress.ip_address(host_name).is_loopback
    except ValueError:
        return False


def is_host_name(text: str) -> bool:
    """Return whether the text is a host without a port, as a header may have it."""
    match = _HOST.fullmatch(text)
    return match is not None and match[1] == text


def _single_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header that is there exactly once, else None."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


def _has_header(scope: Scope, name: bytes) -> bool:
    """Return whether there is such a header."""
    return any(key == name for key, _ in scope["headers"])


def check_root_path(root_path: str) -> None:
    """Raise InvalidConfig unless it is "" or the beginning of a path, such as /llm."""
    if not _ROOT_PATH.fullmatch(root_path):
        raise InvalidConfig(
            "root_path", f"{root_path[:64]!r} is not the beginning of a path", "Give /llm, say"
        )


def _head_error(scope: Scope) -> APIError | None:
    """Return the error of a head that is too large or has two body lengths, or None.

    An ASGI server that parses a whole head at once has no such limits.
    """
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        return headers_too_large_error(f"{len(headers)} headers are more than {MAX_HEADERS}")
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD_BYTES:
        return headers_too_large_error(f"The head has more than {MAX_HEAD_BYTES} bytes")
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        return bad_framing_error("There are both content-length and transfer-encoding")
    return None


def _unsafe_request_error(scope: Scope) -> APIError | None:
    """Return the error of a request that may change something, or None.

    A page of another origin can send a form or a text without the server's consent.
    """
    headers = scope["headers"]
    if not _is_own_origin(headers):
        return cross_origin_error()
    by_name = dict(headers)
    has_body = by_name.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in by_name
    if has_body or b"content-type" in by_name:
        return media_type_error(headers)
    return None


def _is_own_origin(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the request comes from no web page, or from a page of this server.

    The rule of Go's net/http.CrossOriginProtection. A browser sends `sec-fetch-site` where it
    trusts the connection, and `origin` everywhere; no page can change either.
    """
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    if sites:
        return all(site in (b"same-origin", b"none") for site in sites)
    host = next((value.lower() for name, value in headers if name == b"host"), b"")
    origins = [value.lower() for name, value in headers if name == b"origin"]
    # A proxy that ends TLS changes the scheme of its requests, so both schemes are this server's.
    own_origins = (b"http://" + host, b"https://" + host)
    return all(host and origin in own_origins for origin in origins)


def too_many_connections_error(max_connections: int) -> APIError:
    """Return the 503 for a connection beyond the limit."""
    return APIError(
        503,
        "too_many_connections",
        f"{max_connections} connections are open already. Try again in 1 s",
        headers={"retry-after": "1", **CLOSE_HEADERS},
    )


def _overflow_error(max_connections: int | None) -> APIError | None:
    return None if max_connections is None else too_many_connections_error(max_connections)
