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

MAX_MESSAGE = 512
MAX_SHOWN = 64
DO_NOT_RETRY = {"x-should-retry": "false"}
"""Official clients repeat a 5xx unless told that it would be the same again."""
CLOSE = {"connection": "close"}
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""Types of errors that their status alone tells."""


class Refused(Exception):
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


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def shown(text: str) -> str:
    """What a user sent, fit to be part of a message: escaped and cut."""
    return text[:MAX_SHOWN].encode("unicode_escape").decode()


def envelope(status: int, message: str, param: str | None, code: str) -> dict[str, object]:
    """The body of an error."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = message.encode("ascii", "backslashreplace").decode()
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def engine_dead() -> Refused:
    """Nothing more will be served by this process."""
    return Refused(
        503,
        "engine_dead",
        "The engine has ended, its log says why. Start the server again",
        headers=DO_NOT_RETRY,
    )


def shutting_down() -> Refused:
    """The process is about to end."""
    return Refused(
        503,
        "shutting_down",
        "The server is shutting down. Ask another one",
        headers={"connection": "close", "retry-after": "1"},
    )


def queue_full(most: int, retry_after_s: int) -> Refused:
    """As many wait as may."""
    return Refused(
        429,
        "queue_full",
        f"{most} requests wait already. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def compiler_full(problem: str, retry_after_s: int) -> Refused:
    """Return the refusal where as many structures that take long to compile wait as may."""
    return Refused(
        429,
        "queue_full",
        f"{problem}. Simplify it, or try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def queue_timeout(waited_s: float, retry_after_s: int) -> Refused:
    """The engine did not begin in time."""
    return Refused(
        503,
        "queue_timeout",
        f"The request waited {waited_s:g} s for its first token. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def compiler_ended(problem: str) -> Refused:
    """Return the refusal for a structure whose compiler ended. The next one starts another."""
    return Refused(503, "compiler_ended", problem, headers={"retry-after": "1"})


def past_deadline(most_s: float | None) -> Refused:
    """The engine began, and did not end in time."""
    return Refused(
        504,
        "deadline_exceeded",
        f"The request took more than {most_s} s. Ask for fewer tokens",
        headers=DO_NOT_RETRY,
    )


def request_timeout(most_s: float) -> Refused:
    """The client did not send in time."""
    return Refused(
        408,
        "request_timeout",
        f"The request did not arrive within {most_s:g} s. Send it faster",
        headers=CLOSE,
    )


def headers_too_large(problem: str) -> Refused:
    """The head of a request is over a limit; what follows it is not read."""
    return Refused(431, "headers_too_large", f"{problem}. Send less", headers=CLOSE)


def bad_framing(problem: str) -> Refused:
    """Where the request ends cannot be told; what follows it is not read."""
    return Refused(400, "bad_framing", f"{problem}. Send HTTP/1.1", headers=CLOSE)


def bad_host(problem: str, remedy: str, status: int = 400) -> Refused:
    """The host header is none, or names another server."""
    return Refused(status, "bad_host", f"host: {problem}. {remedy}", headers=CLOSE)


def cross_origin() -> Refused:
    """A page of another origin asks for a change; no page may."""
    return Refused(
        403,
        "cross_origin",
        "The request comes from a web page of another origin. Send it from a program, or let your "
        "own server send it",
    )


def engine_fault() -> Refused:
    """One request hit a fault inside; others go on."""
    return Refused(
        500,
        "internal_error",
        "The engine failed on this request, its log says why. Other requests go on",
        headers=DO_NOT_RETRY,
    )


def structure_too_complex() -> Refused:
    """What may come next took too long to find out."""
    return Refused(
        400,
        "structure_too_complex",
        "The structure of the output became too complex to follow. Simplify it",
        headers=DO_NOT_RETRY,
    )


def server_fault() -> Refused:
    """The server itself has a fault."""
    return Refused(
        500, "internal_error", "The server failed, its log says why", headers=DO_NOT_RETRY
    )


def response_of(refused: Refused) -> Response:
    """The refusal as a response."""
    return JSONResponse(refused.envelope, refused.status, refused.headers)


class Silence(Response):
    """Nothing is sent: the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return at once."""


async def _on_refused(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Refused)
    return response_of(fault)


async def _on_invalid(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, InvalidRequest)
    return response_of(Refused(400, fault.code, str(fault), param=fault.field))


async def _on_engine_dead(_: Request, fault: Exception) -> Response:
    return response_of(engine_dead())


async def _on_engine_closed(_: Request, fault: Exception) -> Response:
    return response_of(shutting_down())


async def _on_gone(_: Request, fault: Exception) -> Response:
    return Silence()


async def _on_routing(request: Request, fault: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(fault, HTTPException)
    path = shown(request.scope["path"])
    code, message = "http_error", f"{path}: {shown(str(fault.detail))}"
    if fault.status_code == 404:
        code, message = "not_found", f"There is nothing at {path}. See /v1/models and the docs"
    if fault.status_code == 405:
        method = shown(request.method)
        code, message = "method_not_allowed", f"{path} does not take {method}. See the allow header"
    return response_of(Refused(fault.status_code, code, message, headers=fault.headers))


HANDLERS = {
    Refused: _on_refused,
    InvalidRequest: _on_invalid,
    EngineDead: _on_engine_dead,
    EngineClosed: _on_engine_closed,
    ClientGone: _on_gone,
    HTTPException: _on_routing,
}
"""What each exception becomes, for Starlette. Any other is a fault of the server: see Guard."""
