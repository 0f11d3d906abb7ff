"""The outermost layer of the server: a name for every request, and the key.

Owns who may come in. Knows no route but the public ones. Default deny: with a key set, a path that
is not listed as public needs it, whether or not there is anything at that path.

    client ──► Guard ── x-request-id, Authorization ──► Starlette ──► routes
                  └── 401
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.server.refusal import Refused, response_of

PUBLIC_PATHS = frozenset({"/healthz"})


class Guard:
    """ASGI middleware. What passes has `request_id` in its state and, where set, the key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._digest = None if api_key is None else sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 401."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # no route speaks it
            return
        request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        # The path that the router will see, not one rebuilt from a header that a client controls.
        if scope["path"] in PUBLIC_PATHS or self._has_key(scope):
            await self._app(scope, receive, named)
        else:
            await response_of(_unauthorized())(scope, receive, named)

    def _has_key(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not given[0].startswith(b"Bearer "):
            return False
        # Digests have one length, so the time taken says nothing about the key's.
        return secrets.compare_digest(sha256(given[0][7:]).digest(), self._digest)


def _unauthorized() -> Refused:
    return Refused(
        401,
        "invalid_api_key",
        "The API key is missing or wrong. Send the header Authorization: Bearer KEY",
        headers={"www-authenticate": "Bearer"},
    )
