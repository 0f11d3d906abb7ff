"""Traces: which HTTP requests have spans, and when these begin and end.

Owns the way of a request through the server. Knows no OpenTelemetry: what trace_option opens makes
and exports the spans.

    POST /v1/... ──► TraceMiddleware ──► begin ──► the request ──► end, with its status
                     traceparent           │          │
                                     a span of HTTP   EngineObserver: tokens, times, finish reasons

Always true: without an endpoint nothing is imported, timed or sent.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.async_llm import EngineObserver
from forge.server.request_head import IS_TRACED
from forge.server.routes import RouteSpec, route_spec

MAX_TRACEPARENT_BYTES = 512
"""Bytes of a traceparent. OpenTelemetry logs a warning for a longer one."""
CLIENT_DISCONNECTED = "client_disconnected"
"""Error type of a request whose client left before the end of the response."""


class SpanCounts(NamedTuple):
    """Spans since the start.

    num_lost   the queue was full, or the collector did not take them
    """

    num_exported: int = 0
    num_lost: int = 0


NO_SPANS = SpanCounts()


class RequestTraces(EngineObserver, Protocol):
    """Makes a span of each HTTP request that generates, and exports it."""

    @property
    def counts(self) -> SpanCounts:
        """Return the spans so far."""

    def begin(self, request_id: str, spec: RouteSpec, traceparent: str | None) -> bool:
        """Begin the span of an HTTP request; return whether it is sampled.

        spec          of its route, which has an operation
        traceparent   W3C trace context of its client; None, or one that is damaged: a new trace
        """

    def end(self, request_id: str, status: int | None, error_type: str | None) -> None:
        """End the span of an HTTP request that is sampled.

        status       of the response; None: there is none
        error_type   CLIENT_DISCONNECTED, or the name of an exception of the server, where the
                     response is not complete; None: it is
        """

    def close(self) -> None:
        """Export what is left within seconds, and end."""


class TraceMiddleware:
    """ASGI middleware inside SecurityMiddleware: requests that it refuses have no spans."""

    def __init__(self, app: ASGIApp, traces: RequestTraces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; a request that generates begins and ends a span."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        spec = route_spec(scope)
        if spec.operation is None:
            await self._app(scope, receive, send)
            return
        request_id: str = scope["state"]["request_id"]
        values = [value for name, value in scope["headers"] if name == b"traceparent"]
        is_parent = len(values) == 1 and len(values[0]) <= MAX_TRACEPARENT_BYTES
        parent = values[0].decode("latin-1") if is_parent else None
        if not self._traces.begin(request_id, spec, parent):
            await self._app(scope, receive, send)
            return
        scope["state"][IS_TRACED] = True
        status: int | None = None
        error_type: str | None = CLIENT_DISCONNECTED  # until the last part of the response is sent

        async def send_with_status(message: Message) -> None:
            nonlocal status, error_type
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                error_type = None

        try:
            await self._app(scope, receive, send_with_status)
        except Exception as error:
            # SecurityMiddleware sends the 500, which does not pass here.
            status, error_type = status or 500, type(error).__name__
            raise
        finally:
            self._traces.end(request_id, status, error_type)
