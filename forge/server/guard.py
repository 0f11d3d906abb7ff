"""The outermost layer of the server: a name for every request, the key, and the last resort.

Owns who may come in and what a fault of the server looks like. Knows no route but the public ones.
Default deny: with a key set, a path that is not listed as public needs it, whether or not there is
anything at that path.

    client ──► Guard ── x-request-id, Authorization ──► Starlette ──► routes
                  ├── 401
                  └── 500 ◄── whatever nobody expected
"""

from __future__ import annotations

import logging
import secrets
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.server.refusal import Refused, response_of, server_fault

LOG = logging.getLogger("forge.server")
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
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        # The path that the router will see, not one rebuilt from a header that a client controls.
        if scope["path"] not in PUBLIC_PATHS and not self._has_key(scope):
            await response_of(_unauthorized())(scope, receive, named)
            return
        try:
            await self._app(scope, receive, named)
        except Exception:
            if started:
                raise  # the ASGI server logs it and cuts the connection
            LOG.exception("request %s failed", request_id)
            await response_of(server_fault())(scope, receive, named)

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
