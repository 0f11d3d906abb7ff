"""Error responses: every response that is not a success, in one shape for each API.

Owns the error envelope and the status of each error. Knows no route. A field that cannot be served
is an InvalidRequest, here as in the engine. Any other refusal is an APIError.

    {"error": {"message": "temperature: 9.0 is not a number from 0 to 2. Give a value in range",
               "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}

Under /v1/messages the shape is Anthropic's: {"type": "error", "error": {"type", "message"}}. That
of /v1/score is SGLang's: {"object": "error", "type", "message", "param", "code"}.

Always true: a message has at most 512 characters, all printable ASCII. Text of a client in it is
escaped and cut. The cause of an internal error is logged and not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

MAX_MESSAGE_CHARS = 512
MAX_EXCERPT_CHARS = 64
NO_RETRY_HEADERS = {"x-should-retry": "false"}
"""Official clients retry a 5xx response unless this header says that the result would be equal."""
CLOSE_HEADERS = {"connection": "close"}
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of Anthropic's API by status, other than api_error and invalid_request_error."""
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Error types by status, other than server_error and invalid_request_error."""


class APIError(Exception):
    """An error response. `code` names the kind of error, `param` the field, if there is one."""

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
        """The JSON body of the response."""
        return envelope(self.status, self.message, self.param, self.code)


class ClientDisconnected(Exception):
    """The client closed the connection; a response has no reader."""


Envelope: TypeAlias = Callable[[APIError, str | None], dict[str, object]]
"""Returns the JSON body of an error, of a request with this id; None: it has none."""


def excerpt(text: str) -> str:
    """Return text of a client as part of a message: escaped and cut."""
    return text[:MAX_EXCERPT_CHARS].encode("unicode_escape").decode()


def envelope(status: int, message: str, param: str | None, code: str) -> dict[str, object]:
    """Return the JSON body of an error."""
    error_type = ERROR_TYPES.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    message = _printable(message)
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def openai_envelope(error: APIError, request_id: str | None) -> dict[str, object]:
    """Return the JSON body of an error in OpenAI's API, which has no id of the request."""
    return error.envelope


def anthropic_envelope(error: APIError, request_id: str | None) -> dict[str, object]:
    """Return the JSON body of an error in Anthropic's API. The message begins with the field."""
    error_type = ANTHROPIC_ERROR_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return {
        "type": "error",
        "error": {"type": error_type, "message": _printable(error.message)},
        "request_id": request_id,
    }


def score_envelope(error: APIError, request_id: str | None) -> dict[str, object]:
    """Return the JSON body of an error of /v1/score. Its code is the status, as in SGLang."""
    return {
        "object": "error",
        "message": _printable(error.message),
        "type": "InternalServerError" if error.status >= 500 else "BadRequestError",
        "param": error.param,
        "code": error.status,
    }


def _printable(message: str) -> str:
    """Return a message in printable ASCII, cut to MAX_MESSAGE_CHARS."""
    message = message.encode("ascii", "backslashreplace").decode()
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    return message


def engine_dead_error() -> APIError:
    """Return the 503 of a process whose engine has ended."""
    return APIError(
        503,
        "engine_dead",
        "The engine has ended; its log has the reason. Start the server again",
        headers=NO_RETRY_HEADERS,
    )


def shutting_down_error() -> APIError:
    """Return the 503 of a process that is shutting down."""
    return APIError(
        503,
        "shutting_down",
        "The server is shutting down. Send the request to another one",
        headers={"connection": "close", "retry-after": "1"},
    )


def queue_full_error(max_queue: int, retry_after_s: int) -> APIError:
    """Return the 429 for a queue that has max_queue requests."""
    return APIError(
        429,
        "queue_full",
        f"{max_queue} requests are waiting already. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def logprobs_full_error(count: int, max_logprobs: int, retry_after_s: int) -> APIError:
    """Return the 429 for a response with many log probabilities while others have too many."""
    return APIError(
        429,
        "queue_full",
        f"The response has {count} log probabilities, and those in progress have too many for "
        f"{max_logprobs} together. Request fewer, or try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def sandbox_full_error(problem: str, retry_after_s: int) -> APIError:
    """Return the 429 for a sandbox whose queue of slow structures is full."""
    return APIError(
        429,
        "queue_full",
        f"{problem}. Simplify it, or try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def queue_timeout_error(waited_s: float, retry_after_s: int) -> APIError:
    """Return the 503 for a request without a first token in time."""
    return APIError(
        503,
        "queue_timeout",
        f"The request waited {waited_s:g} s for its first token. Try again in {retry_after_s} s",
        headers={"retry-after": str(retry_after_s)},
    )


def sandbox_died_error(problem: str) -> APIError:
    """Return the 503 for a structure whose compiler died. The next structure starts another."""
    return APIError(503, "compiler_ended", problem, headers={"retry-after": "1"})


def request_aborted_error() -> APIError:
    """Return the 503 for a request that a pause of the engine has ended."""
    return APIError(
        503,
        "request_aborted",
        "A pause of the engine ended the request before its output was complete. Send it again",
        headers={"retry-after": "1"},
    )


def deadline_exceeded_error(limit_s: float | None) -> APIError:
    """Return the 504 for a request that started and did not end in time."""
    return APIError(
        504,
        "deadline_exceeded",
        f"The request took more than {limit_s} s. Request fewer tokens",
        headers=NO_RETRY_HEADERS,
    )


def request_timeout_error(limit_s: float) -> APIError:
    """Return the 408 for a client that did not send its request in time."""
    return APIError(
        408,
        "request_timeout",
        f"The request did not arrive within {limit_s:g} s. Send it faster",
        headers=CLOSE_HEADERS,
    )


def headers_too_large_error(problem: str) -> APIError:
    """Return the 431 for a head over a limit. The connection is read no further."""
    return APIError(431, "headers_too_large", f"{problem}. Send less", headers=CLOSE_HEADERS)


def bad_framing_error(problem: str) -> APIError:
    """Return the 400 for a request whose end is unclear. The connection is read no further."""
    return APIError(400, "bad_framing", f"{problem}. Send HTTP/1.1", headers=CLOSE_HEADERS)


def bad_host_error(problem: str, remedy: str, status: int = 400) -> APIError:
    """Return the error for a host header that is missing, invalid or of another server."""
    return APIError(status, "bad_host", f"host: {problem}. {remedy}", headers=CLOSE_HEADERS)


def cross_origin_error() -> APIError:
    """Return the 403 for a change that a web page of another origin requests."""
    return APIError(
        403,
        "cross_origin",
        "The request comes from a web page of another origin. Send it from a program, or let your "
        "own server send it",
    )


def request_failed_error() -> APIError:
    """Return the 500 for a request that the engine failed on, while others continue."""
    return APIError(
        500,
        "internal_error",
        "The engine failed on this request; its log has the reason. Other requests continue",
        headers=NO_RETRY_HEADERS,
    )


def structure_too_complex_error() -> APIError:
    """Return the 400 for a structure whose next mask exceeds the limits."""
    return APIError(
        400,
        "structure_too_complex",
        "The structure of the output became too complex to follow. Simplify it",
        headers=NO_RETRY_HEADERS,
    )


def schema_violation_error(problem: str) -> APIError:
    """Return the 400 for an output that is complete and does not have its schema.

    It can be sent again: other tokens may be sampled.
    """
    return APIError(
        400,
        "schema_violation",
        f"The output does not have its schema: {problem}. Send the request again",
    )


def server_error() -> APIError:
    """Return the 500 for a bug of the server."""
    return APIError(
        500, "internal_error", "The server failed; its log has the reason", headers=NO_RETRY_HEADERS
    )
