"""Routes for whoever runs the server: is it alive, does it take requests, what is it.

Owns what each probe means. Knows no key: which of these need one is the guard's.

    /livez     has work and makes no step    ─► 503: start it again
               rests, or makes steps         ─► 200
    /readyz    takes requests                ─► 200
               is about to end, or has ended ─► 503: ask another one
    /health    the engine has not ended      ─► 200, as /healthz, without a body

A probe asks nothing of the engine, so it is answered while a step is running. Life is progress: no
flag says that the engine is well, its steps do.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge import __version__
from forge.async_llm import AsyncLLM
from forge.server.errors import APIError, engine_dead_error, shutting_down_error
from forge.server.middleware import SHUTTING_DOWN

STALL_LIMIT_S = 12.0
"""A step that takes longer than this is taken for one that never ends."""


class OperationsEndpoints:
    """The handlers.

    stall_limit_s   for how long the engine may have work and make no step
    """

    def __init__(self, llm: AsyncLLM, stall_limit_s: float = STALL_LIMIT_S) -> None:
        self._llm = llm
        self._stall_limit_s = stall_limit_s

    def routes(self) -> list[Route]:
        """Where each is served."""
        return [
            Route("/livez", self.livez, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]

    async def livez(self, request: Request) -> Response:
        """GET /livez."""
        self._check_engine()
        stalled_s = self._llm.stalled_s
        if stalled_s > self._stall_limit_s:
            raise APIError(
                503,
                "engine_stalled",
                f"The engine has work and has made no step for {stalled_s:.0f} s, at most "
                f"{self._stall_limit_s:g} s are normal. Start the server again",
            )
        return JSONResponse({"status": "ok", "steps": self._llm.status.num_steps})

    async def readyz(self, request: Request) -> Response:
        """GET /readyz."""
        self._check_engine()
        if request.scope["state"].get(SHUTTING_DOWN):
            raise shutting_down_error()
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        """GET /health and /ping."""
        return Response(status_code=200 if self._llm.failure is None else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache. Answered once the engine has done so."""
        await self._llm.reset_prefix_cache()
        return Response()

    def _check_engine(self) -> None:
        if self._llm.failure is not None:
            raise engine_dead_error()
