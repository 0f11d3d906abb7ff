"""The outermost layer of the server: a name for every request, the key, and the last resort.

Owns who may come in and what a fault of the server looks like. Knows no route but the public ones.
Default deny: with a key set, a path that is not listed as public needs it, whether or not there is
anything at that path. A request that may change something must come from no other origin and have
no body but JSON, whatever its path is. Nothing here is decided by the length or the content of what
was sent alone: each check is bounded by those before it.

    client ──► Guard ── x-request-id, head, host, key, origin, type ──► Starlette ──► routes
                  ├── 400, 401, 403, 415, 421, 431
                  ├── 503 ◄── the server is about to end, or has too many connections
                  └── 500 ◄── whatever nobody expected
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from hashlib import sha256
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.server.body import media_refusal
from forge.server.refusal import (
    CLOSE,
    Refused,
    bad_framing,
    bad_host,
    cross_origin,
    headers_too_large,
    response_of,
    server_fault,
    shown,
    shutting_down,
)

LOG = logging.getLogger("forge.server")
PUBLIC_PATHS = frozenset({"/healthz", "/health", "/livez", "/ping", "/readyz"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""
MAX_HEADERS = 100
MAX_HEAD_BYTES = 16 * 2**10
"""Of the request line and all headers."""
CLOSING = "closing"
"""Set in the state that the server shares with its requests once it takes no more."""
CROWDED = "crowded"
"""In the state of requests on a connection that is one too many: how many may be open."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class Guard:
    """ASGI middleware. What passes has `request_id` in its state and, where set, the key.

    answered   told the status of every answer
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        hosts: Collection[str] | None = None,
        answered: Callable[[int], None] = lambda status: None,
    ) -> None:
        self._app = app
        self._answered = answered
        self._digest = None if api_key is None else sha256(api_key.encode()).digest()
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse. The request id is the client's where it brings a plain one."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # no route speaks it
            return
        scope = _in_origin_form(scope)
        given = _only(scope, b"x-request-id")
        made = secrets.token_hex(12)
        told, request_id = made.encode(), made
        if given is not None and _REQUEST_ID.fullmatch(given):
            # Two requests may bring the same. Inside, no two have one name.
            told, request_id = given, f"{given.decode()}-{made[:8]}"
        scope.setdefault("state", {})["request_id"] = request_id
        added = [(b"x-request-id", told)]
        if scope["state"].get(CROWDED):
            added.append((b"connection", b"close"))
        started = False
        # Its client may leave out a body that was not asked for: what comes next is not that body.
        waits = _has(scope, b"expect")

        async def read() -> Message:
            nonlocal waits
            waits = False
            return await receive()

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(message["status"])
                closed = [(b"connection", b"close")] if waits else []
                message["headers"] = [*message.get("headers", ()), *added, *closed]
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await response_of(refused)(scope, read, named)
            return
        try:
            await self._app(scope, read, named)
        except Exception:
            if started:
                raise  # the ASGI server logs it and cuts the connection
            LOG.exception("request %s failed", request_id)
            await response_of(server_fault())(scope, read, named)

    def _refusal(self, scope: Scope) -> Refused | None:
        """Why the request may not come in, if so."""
        # The path that the router will see, not one rebuilt from a header that a client controls.
        is_public = scope["path"] in PUBLIC_PATHS
        return (
            _head_refusal(scope)
            or (None if is_public else _crowded(scope["state"].get(CROWDED)))
            or self._host_refusal(scope, is_public)
            or (None if is_public or self._has_key(scope) else _unauthorized())
            or (None if scope["method"] in SAFE_METHODS else _change_refusal(scope))
            or (shutting_down() if scope["state"].get(CLOSING) and not is_public else None)
        )

    def _host_refusal(self, scope: Scope, is_public: bool) -> Refused | None:
        raw = _only(scope, b"host")
        if raw is None:
            if is_public and scope.get("http_version") == "1.0" and not _has(scope, b"host"):
                return None  # a probe of that time sends none
            return bad_host("there is not exactly one", "Send one")
        text = raw.decode("latin-1")
        found = _HOST.fullmatch(text)
        if found is None:
            return bad_host(f"'{shown(text)}' is not a name and a port", "Send NAME:PORT")
        # A probe calls a machine by its address, and learns nothing from a public path.
        if self._hosts is None or is_public or names_one_of(found[1], self._hosts):
            return None
        remedy = "Start the server with --allowed-hosts, or call it by its own name"
        return bad_host(f"'{shown(text)}' is not this server", remedy, status=421)

    def _has_key(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = _only(scope, b"authorization")
        if given is None or given[:7].lower() != b"bearer ":  # a scheme has no case
            return False
        # Digests have one length, so the time taken says nothing about the key's.
        return secrets.compare_digest(sha256(given[7:]).digest(), self._digest)


def names_one_of(name: str, hosts: Iterable[str]) -> bool:
    """The host is listed, or this very machine calls itself so. Names have no case."""
    bare = name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    if bare == "localhost" or bare in hosts:
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def is_name(text: str) -> bool:
    """The text is a host without a port, as it may be in a header."""
    found = _HOST.fullmatch(text)
    return found is not None and found[1] == text


def _only(scope: Scope, name: bytes) -> bytes | None:
    """The value of the header, which must be there once."""
    given: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return given[0] if len(given) == 1 else None


def _has(scope: Scope, name: bytes) -> bool:
    """There is such a header."""
    return any(key == name for key, _ in scope["headers"])


def _head_refusal(scope: Scope) -> Refused | None:
    """The head is larger than anything a client needs, or says twice where the body ends.

    A parser that reads a whole head at once has no such limit of its own.
    """
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        return headers_too_large(f"{len(headers)} headers are more than {MAX_HEADERS}")
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD_BYTES:
        return headers_too_large(f"The head has more than {MAX_HEAD_BYTES} bytes")
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        return bad_framing("There are both content-length and transfer-encoding")
    return None


def _in_origin_form(scope: Scope) -> Scope:
    """Return the scope of a request whose target is a path, if it was a whole URL.

    The URL names the host then, whatever the host header says (RFC 9112, 3.2.2).
    """
    found = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return scope
    headers = [each for each in scope["headers"] if each[0] != b"host"]
    path: bytes = found[2] or b"/"
    return {
        **scope,
        "raw_path": path,
        "path": unquote(path.decode("latin-1")),
        "headers": [(b"host", found[1]), *headers],
    }


def _change_refusal(scope: Scope) -> Refused | None:
    """Return why a request that may change something is refused, or None.

    A page of another origin can send a form, or a text, without the server's consent.
    """
    headers = scope["headers"]
    if not _is_own_origin(headers):
        return cross_origin()
    given = dict(headers)
    has_body = given.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in given
    if has_body or b"content-type" in given:
        return media_refusal(headers)
    return None


def _is_own_origin(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """The request comes from no page, or from one of this server's own.

    The rule of Go's net/http.CrossOriginProtection. A browser sends `sec-fetch-site` where it
    trusts the connection, and `origin` everywhere; no page can change either.
    """
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    if sites:
        return all(site in (b"same-origin", b"none") for site in sites)
    host = next((value.lower() for name, value in headers if name == b"host"), b"")
    origins = [value.lower() for name, value in headers if name == b"origin"]
    return all(host and origin.partition(b"://")[2] == host for origin in origins)


def too_many_connections(most: int) -> Refused:
    """As many are connected as may be."""
    return Refused(
        503,
        "too_many_connections",
        f"{most} connections are open already. Try again in 1 s",
        headers={"retry-after": "1", **CLOSE},
    )


def _crowded(most: int | None) -> Refused | None:
    return None if most is None else too_many_connections(most)


def _unauthorized() -> Refused:
    return Refused(
        401,
        "invalid_api_key",
        "The API key is missing or wrong. Send the header Authorization: Bearer KEY",
        headers={"www-authenticate": "Bearer"},
    )
