"""The handling of a request with a JSON body: parsed, then answered until the client leaves.

Owns the order of the two. Knows no route.

    body ──► parse ──► respond ──► response
                         └─ the client leaves ──► ClientDisconnected
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from forge.server import generation
from forge.server.body import read_json_body
from forge.server.request_head import RequestHead

T = TypeVar("T")


async def handle_json(
    request: Request,
    parse_body: Callable[[dict[str, Any]], T],
    respond: Callable[[T, RequestHead], Coroutine[Any, Any, Response]],
) -> Response:
    """Parse the body and return its response. Raises ClientDisconnected when the client leaves.

    respond   called with the result of `parse_body` and the head of the request
    """
    parsed_body = await read_json_body(request, parse_body)
    return await generation.run_until_disconnect(
        request.receive, respond(parsed_body, RequestHead.from_request(request))
    )
