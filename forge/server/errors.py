"""Refusals: every answer that is not a success, in one shape.

Owns the error envelope and which status goes with which fault. Knows no route. A field that cannot
be served is an InvalidRequest, here as in the engine; any other refusal is a Refused.

    {"error": {"message": "temperature: 9.0 is not a number from 0 to 2. Give a value in range",
               "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}

A message has at most 512 characters, all printable ASCII: what a user sent is escaped and cut, and
what went wrong inside is logged, not told.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forge.errors import EngineClosed, EngineDead, InvalidRequest

MAX_MESSAGE_CHARS = 512
MAX_EXCERPT_CHARS = 64
NO_RETRY_HEADERS = {"x-should-retry": "false"}
"""Official clients repeat a 5xx unless told that it would be the same again."""
CLOSE_HEADERS = {"connection": "close"}
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Types of errors that their status alone tells."""


class APIError(Exception):
    """The answer is an error of this status. `code` names the kind, `param` the field, if one."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def envelope(self) -> dict[str, object]:
        """What the body says."""
        return envelope(self.status, self.message, self.param, self.code)


class ClientDisconnected(Exception):
    """The client closed the connection; nobody reads an answer."""


def excerpt(text: str) -> str:
    """What a user sent, fit to be part of a message: escaped and cut."""
    return text[:MAX_EXCERPT_CHARS].encode("unicode_escape").decode()


def envelope(status: int, message: str, param: str | None, code: str) -> dict[str, object]:
    """The body of an error."""
    error_type = ERROR_TYPES.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    message = message.encode("ascii", "backslashreplace").decode()
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def engine_dead_error() -> APIError:
    """Nothing more will be served by this process."""
    return APIError(
        503,
        "engine_dead",
        "The engine has ended, its log says why. Start the server again",
        headers=NO_RETRY_HEADERS,
    )


def shutting_down_error() -> APIError:
    """The process is about to end."""
    return APIError(
        503,
        "shutting_down",
        "The server is shutting down. Ask another one",
        headers={"connection": "close", "retry-after": "1"},
    )


def queue_full_error(max_queue: int, retry_after_s: int) -> APIError:
    """As many wait as may."""
    return APIError(
        429,
        "queue_full",
        f"{max_queue} requests wait already. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def sandbox_full_error(problem: str, retry_after_s: int) -> APIError:
    """Return the refusal where as many structures that take long to compile wait as may."""
    return APIError(
        429,
        "queue_full",
        f"{problem}. Simplify it, or try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def queue_timeout_error(waited_s: float, retry_after_s: int) -> APIError:
    """The engine did not begin in time."""
    return APIError(
        503,
        "queue_timeout",
        f"The request waited {waited_s:g} s for its first token. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def sandbox_died_error(problem: str) -> APIError:
    """Return the refusal for a structure whose compiler ended. The next one starts another."""
    return APIError(503, "compiler_ended", problem, headers={"retry-after": "1"})


def deadline_exceeded_error(limit_s: float | None) -> APIError:
    """The engine began, and did not end in time."""
    return APIError(
        504,
        "deadline_exceeded",
        f"The request took more than {limit_s} s. Ask for fewer tokens",
        headers=NO_RETRY_HEADERS,
    )


def request_timeout_error(limit_s: float) -> APIError:
    """The client did not send in time."""
    return APIError(
        408,
        "request_timeout",
        f"The request did not arrive within {limit_s:g} s. Send it faster",
        headers=CLOSE_HEADERS,
    )


def headers_too_large_error(problem: str) -> APIError:
    """The head of a request is over a limit; what follows it is not read."""
    return APIError(431, "headers_too_large", f"{problem}. Send less", headers=CLOSE_HEADERS)


def bad_framing_error(problem: str) -> APIError:
    """Where the request ends cannot be told; what follows it is not read."""
    return APIError(400, "bad_framing", f"{problem}. Send HTTP/1.1", headers=CLOSE_HEADERS)


def bad_host_error(problem: str, remedy: str, status: int = 400) -> APIError:
    """The host header is none, or names another server."""
    return APIError(status, "bad_host", f"host: {problem}. {remedy}", headers=CLOSE_HEADERS)


def cross_origin_error() -> APIError:
    """A page of another origin asks for a change; no page may."""
    return APIError(
        403,
        "cross_origin",
        "The request comes from a web page of another origin. Send it from a program, or let your "
        "own server send it",
    )


def request_failed_error() -> APIError:
    """One request hit a fault inside; others go on."""
    return APIError(
        500,
        "internal_error",
        "The engine failed on this request, its log says why. Other requests go on",
        headers=NO_RETRY_HEADERS,
    )


def structure_too_complex_error() -> APIError:
    """What may come next took too long to find out."""
    return APIError(
        400,
        "structure_too_complex",
        "The structure of the output became too complex to follow. Simplify it",
        headers=NO_RETRY_HEADERS,
    )


def server_error() -> APIError:
    """The server itself has a fault."""
    return APIError(
        500, "internal_error", "The server failed, its log says why", headers=NO_RETRY_HEADERS
    )


def create_error_response(error: APIError) -> Response:
    """The refusal as a response."""
    return JSONResponse(error.envelope, error.status, error.headers)


class NoResponse(Response):
    """Nothing is sent: the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return at once."""


async def _handle_api_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, APIError)
    return create_error_response(exc)


async def _handle_invalid_request(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, InvalidRequest)
    return create_error_response(APIError(400, exc.code, str(exc), param=exc.field))


async def _handle_engine_dead(_: Request, exc: Exception) -> Response:
    return create_error_response(engine_dead_error())


async def _handle_engine_closed(_: Request, exc: Exception) -> Response:
    return create_error_response(shutting_down_error())


async def _handle_disconnect(_: Request, exc: Exception) -> Response:
    return NoResponse()


async def _handle_http_exception(request: Request, exc: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(exc, HTTPException)
    path = excerpt(request.scope["path"])
    code, message = "http_error", f"{path}: {excerpt(str(exc.detail))}"
    if exc.status_code == 404:
        code, message = "not_found", f"There is nothing at {path}. See /v1/models and the docs"
    if exc.status_code == 405:
        method = excerpt(request.method)
        code, message = "method_not_allowed", f"{path} does not take {method}. See the allow header"
    return create_error_response(APIError(exc.status_code, code, message, headers=exc.headers))


EXCEPTION_HANDLERS = {
    APIError: _handle_api_error,
    InvalidRequest: _handle_invalid_request,
    EngineDead: _handle_engine_dead,
    EngineClosed: _handle_engine_closed,
    ClientDisconnected: _handle_disconnect,
    HTTPException: _handle_http_exception,
}
"""What each exception becomes, for Starlette. Any other is a fault of the server: see Guard."""
