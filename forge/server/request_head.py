"""RequestHead: what the head of an HTTP request says about the requests of its body.

Owns the header that names a session, and its place among the fields that do. Knows no engine.

    authorization: Bearer KEY ──► SecurityMiddleware ──► tenant
    x-session-id: s           ┐
    {"session_id": "s"}       ├─► one session id: the body's field, else the header, else the key
    {"prompt_cache_key": "s"} ┘   for OpenAI's cache

Always true: field and header name one session, or the request is refused.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from starlette.requests import Request

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.protocol import SESSION_ID, SESSION_ID_TEXT, SamplingRequest

SESSION_HEADER = "x-session-id"
IS_TRACED = "is_traced"
"""Key in the state of requests whose spans are exported."""


class RequestHead(NamedTuple):
    """Values of a request's head.

    request_id   id in the log and in the response
    tenant       owner of the key; "" where the server has no keys
    session_id   value of SESSION_HEADER; "" where there is none
    is_traced    its spans have the times of its choices
    """

    request_id: str
    tenant: str
    session_id: str
    is_traced: bool

    @classmethod
    def from_request(cls, request: Request) -> Self:
        """Return the head of a request that passed SecurityMiddleware. Raises InvalidRequest."""
        state = request.state
        is_traced = getattr(state, IS_TRACED, False)
        return cls(state.request_id, state.tenant, _session_header(request), is_traced)

    def session_id_with(self, request_body: SamplingRequest) -> str:
        """Return the id of the session that the request names, or "". Raises InvalidRequest."""
        named = request_body.session_id
        if named is not None and self.session_id not in ("", named):
            raise InvalidRequest(
                "session_id",
                f"the header {SESSION_HEADER} has another value",
                "Give only one of them",
                "conflicting_parameters",
            )
        return named or self.session_id or request_body.prompt_cache_key or ""


def _session_header(request: Request) -> str:
    """Return the session that a header names, or "". Raises InvalidRequest."""
    values = request.headers.getlist(SESSION_HEADER)
    if not values:
        return ""
    if len(values) > 1:
        raise InvalidRequest(SESSION_HEADER, f"it comes {len(values)} times", "Send it once")
    try:
        session_id = values[0].encode("latin-1").decode()  # headers are bytes, and ids are UTF-8
    except UnicodeDecodeError:
        raise InvalidRequest(
            SESSION_HEADER, "it is not UTF-8", "Send UTF-8", "invalid_unicode"
        ) from None
    if not SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            SESSION_HEADER, f"'{excerpt(session_id)}' is not {SESSION_ID_TEXT}", "Fix it"
        )
    return session_id
