"""Exceptions as error responses: the handlers that Starlette calls, and the response itself.

Owns which status an exception has. Knows no path: the shape of an error is that of the request's
route.

    raise APIError ──► EXCEPTION_HANDLERS ──► create_error_response ──► RouteSpec.envelope
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forge.errors import EngineClosed, EngineDead, InvalidRequest
from forge.server.errors import (
    APIError,
    ClientDisconnected,
    engine_dead_error,
    excerpt,
    shutting_down_error,
)
from forge.server.routes import route_spec


def create_error_response(error: APIError, scope: Scope) -> Response:
    """Return the response of the error, in the shape of the API that the request's route is of.

    scope   of a request whose route was found; its state has its id, where there is one
    """
    request_id = scope.get("state", {}).get("request_id")
    body = route_spec(scope).envelope(error, request_id)
    return JSONResponse(body, error.status, error.headers)


class NoResponse(Response):
    """A response that sends nothing, because the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return at once."""


async def _handle_api_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, APIError)
    return create_error_response(exc, request.scope)


async def _handle_invalid_request(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, InvalidRequest)
    error = APIError(400, exc.code, str(exc), param=exc.field)
    return create_error_response(error, request.scope)


async def _handle_engine_dead(request: Request, exc: Exception) -> Response:
    return create_error_response(engine_dead_error(), request.scope)


async def _handle_engine_closed(request: Request, exc: Exception) -> Response:
    return create_error_response(shutting_down_error(), request.scope)


async def _handle_disconnect(_: Request, exc: Exception) -> Response:
    return NoResponse()


def _meant_path(path: str, known: Collection[str]) -> str | None:
    """Return the path of a route that a client with another base URL meant, or None."""
    bare_path = "/" + path.strip("/")
    for each in (bare_path, f"/v1{bare_path}", bare_path.removeprefix("/v1")):
        if each in known:
            return each
    return None


async def _handle_http_exception(request: Request, exc: Exception) -> Response:
    """Return the error of an unknown path, or of a method that the path does not have."""
    assert isinstance(exc, HTTPException)
    path = excerpt(request.scope["path"])
    code, message = "http_error", f"{path}: {excerpt(str(exc.detail))}"
    if exc.status_code == 404:
        paths = {route.path for route in request.app.routes if isinstance(route, Route)}
        meant = _meant_path(request.scope["path"], paths)
        remedy = "All routes are in /openapi.json" if meant is None else f"Use {meant}"
        code, message = "not_found", f"There is nothing at {path}. {remedy}"
    if exc.status_code == 405:
        allowed = " or ".join(sorted((exc.headers or {})["Allow"].split(", ")))
        code = "method_not_allowed"
        message = f"{path} does not take {excerpt(request.method)}. Use {allowed}"
    error = APIError(exc.status_code, code, message, headers=exc.headers)
    return create_error_response(error, request.scope)


EXCEPTION_HANDLERS = {
    APIError: _handle_api_error,
    InvalidRequest: _handle_invalid_request,
    EngineDead: _handle_engine_dead,
    EngineClosed: _handle_engine_closed,
    ClientDisconnected: _handle_disconnect,
    HTTPException: _handle_http_exception,
}
"""Handler of each exception, for Starlette. SecurityMiddleware handles all others, as bugs."""
