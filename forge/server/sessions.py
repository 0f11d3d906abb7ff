"""The route that ends a session.

Owns its response. Knows no request: a session opens with its first turn.

    DELETE /v1/sessions/ID ──► (tenant of the key, ID) ──► AsyncLLM.end_session ─┬─► 200
                                                                                 └─► 404

Always true: the tenant is part of a session's key, so no client ends a session of another tenant.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.async_llm import AsyncLLM
from forge.server import routes
from forge.server.errors import APIError, excerpt
from forge.server.routes import APIRoute


class SessionEndpoints:
    """Handler of the route."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def routes(self) -> list[APIRoute]:
        """Return the route with its handler. An id may have slashes."""
        return [routes.SESSION.bind(DELETE=self.delete)]

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/sessions/ID. With an open request, the session ends after it."""
        session_id = request.path_params["id"]
        if not await self._llm.end_session(session_id, tenant=request.state.tenant):
            raise APIError(
                404,
                "session_not_found",
                f"id: there is no open session '{excerpt(session_id)}'. It has ended, or its first "
                "request has not arrived",
                param="id",
            )
        return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})
