"""Ingress: forwards HTTP requests to replicas, and moves those that have not started.

Owns the retries and what a client sees of a replica that dies. Knows no engine, and of Ray only the
errors that mean a dead replica.

    request ──► Call ──► send ──┬─► head, body                   a response
                 ▲              ├─► the replica dies             nothing was sent: another replica
                 └── again ◄────┘
                                └─► ... after the first event    data: {"error": ...}, and no [DONE]

Always true: a response that is not a stream of events is sent when it is complete, so it can begin
again elsewhere until then. A stream has started with its first event; pings before it are no event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.ray.call import Call, ReplicaLost, ResponseHead
from forge.ray.routing_key import create_routing_key
from forge.server.body import MAX_BODY_BYTES, THREAD_MIN_BYTES
from forge.server.error_responses import create_error_response
from forge.server.errors import APIError, ClientDisconnected, anthropic_envelope, excerpt
from forge.server.generation import run_until_disconnect
from forge.server.routes import ROUTES, SESSION, RouteTable, path_error, route_spec, to_route_scope
from forge.server.sse import encode_event, encode_named_event

LOG = logging.getLogger("forge.ray")

MAX_ATTEMPTS = 4
"""Replicas that a request may lose, and one that serves it."""
FLEET_ROUTES = RouteTable([spec.bind() for spec in ROUTES])
"""Finds the routes of the replicas. They handle the requests."""
PING = b":"

SendCall = Callable[[Call], AsyncGenerator[ResponseHead | bytes, None]]


class Ingress:
    """Handles HTTP requests of a fleet.

    send          sends a call to a replica that a router chooses, and yields its response
    lost_errors   raised by `send` where a replica has died
    """

    def __init__(self, send: SendCall, lost_errors: tuple[type[BaseException], ...]) -> None:
        self._send = send
        self._lost_errors: tuple[type[BaseException], ...] = (ReplicaLost, *lost_errors)

    async def __call__(self, request: Request) -> Response:
        """Return the response to a request, which is forwarded when the response is sent."""
        scope = FLEET_ROUTES.find(to_route_scope(request.scope))
        path = scope["path"]
        error = path_error(scope)
        if error is None and route_spec(scope).is_about_replica:
            error = APIError(404, "not_found", f"'{excerpt(path)}' is a route of one replica")
        if error is not None:
            return create_error_response(error, scope)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return create_error_response(
                    APIError(
                        413,
                        "request_too_large",
                        f"The body is above {MAX_BODY_BYTES} bytes. Send less",
                    ),
                    scope,
                )
        raw, headers = bytes(body), tuple(scope["headers"])
        session_id = scope["path_params"]["id"] if route_spec(scope) is SESSION else ""
        if len(raw) > THREAD_MIN_BYTES:
            key = await asyncio.to_thread(create_routing_key, session_id, headers, raw)
        else:
            key = create_routing_key(session_id, headers, raw)
        call = Call(request.method, path, scope["query_string"], headers, raw, key)
        return ForwardedResponse(call, scope, self._send, self._lost_errors)


class ForwardedResponse(Response):
    """The response of a replica, or of the last of several.

    scope   of the request, with its route
    """

    def __init__(
        self, call: Call, scope: Scope, send: SendCall, lost_errors: tuple[type[BaseException], ...]
    ) -> None:
        self._call = call
        self._scope = scope
        self._send = send
        self._lost_errors = lost_errors
        self._head_is_sent = False
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, unless the client leaves: then its request is aborted."""
        try:
            await run_until_disconnect(receive, self._forward(scope, receive, send))
        except ClientDisconnected:
            return

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._attempt(call, send)
                return
            except self._lost_errors as error:
                cause = getattr(error, "cause", error)  # Ray wraps what a replica raises
                LOG.warning("a replica was lost: %s", type(cause).__name__)
                if self._has_started:
                    break
                if isinstance(cause, ReplicaLost):
                    call = call._replace(tried=(*call.tried, cause.name))
        failure = APIError(
            503,
            "replica_lost",
            "The replica that served this request has ended. Send it again"
            if self._has_started
            else f"{MAX_ATTEMPTS} replicas ended before they served this request. Send it later",
        )
        if not self._head_is_sent:
            await create_error_response(failure, self._scope)(scope, receive, send)
            return
        # Without its last event a reader can detect that the text is cut.
        body = route_spec(self._scope).envelope(failure, None)
        await self._send_error_event(json.dumps(body, separators=(",", ":")), send)

    async def _attempt(self, call: Call, send: Send) -> None:
        """Forward the response of one replica. Raises one of the errors of a lost replica."""
        async with aclosing(self._send(call)) as parts:
            head = await anext(parts)
            assert isinstance(head, ResponseHead), f"{head!r} before the head"
            if not head.is_event_stream:
                body = b"".join([part async for part in parts if isinstance(part, bytes)])
                await self._send_whole(head, body, send)
                return
            async for part in parts:
                assert isinstance(part, bytes), f"{part!r} after the head"
                if not self._head_is_sent:
                    await self._send_head(head, send)
                if not part.startswith(PING) or b"data:" in part:
                    self._has_started = True
                await _send_body(send, part, more_body=True)
            await _send_body(send, b"", more_body=False)

    async def _send_whole(self, head: ResponseHead, body: bytes, send: Send) -> None:
        if self._head_is_sent:  # of a stream that has lost its replica: pings have been sent
            await self._send_error_event(body.decode(), send)
            return
        await self._send_head(head, send)
        await _send_body(send, body, more_body=False)

    async def _send_head(self, head: ResponseHead, send: Send) -> None:
        self._head_is_sent = True
        await send(
            {
                "type": "http.response.start",
                "status": head.status,
                # Ray's proxy adds its own id of the request.
                "headers": [list(each) for each in head.headers if each[0] != b"x-request-id"],
            }
        )

    async def _send_error_event(self, error: str, send: Send) -> None:
        """End the stream with an error, in the form of the API that the route is of."""
        is_named = route_spec(self._scope).envelope is anthropic_envelope
        event = encode_named_event("error", error) if is_named else encode_event(error)
        await _send_body(send, event.encode(), more_body=False)


async def _send_body(send: Send, body: bytes, *, more_body: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
