"""Routes for operators: liveness, readiness, version, and the cache.

Owns the meaning of each probe. Knows no key: the middleware decides which routes need one.

    /livez     the engine has work and makes no step    ─► 503: restart the server
               it is idle, or makes steps               ─► 200
    /readyz    the server accepts requests              ─► 200
               it shuts down, or the engine has ended   ─► 503: use another server
    /health    the engine has not ended                 ─► 200, as /healthz, without a body
    /load      what the engine has to do, for routers and autoscalers

A probe needs nothing of the engine, so it is answered during a step. Liveness is progress: the
number of steps shows it, not a flag.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge import __version__
from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig, NeverFits
from forge.server import routes
from forge.server.body import read_json_body
from forge.server.errors import APIError, engine_dead_error, shutting_down_error
from forge.server.middleware import SHUTTING_DOWN
from forge.server.protocol import IntegerField, RequestBody, missing_field_error, parse_request
from forge.server.routes import APIRoute

STALL_LIMIT_S = 12.0
"""Seconds after which a step counts as one that never ends."""


class ResizeRequest(RequestBody):
    """The body of POST /resize_kv_cache and /admin/resize.

    num_blocks        blocks of the cache on the device
    num_host_blocks   blocks of the host pool; left out: as many as before
    """

    num_blocks: IntegerField = None
    num_host_blocks: IntegerField = None


class OperationsEndpoints:
    """Handlers of the routes.

    stall_limit_s   seconds that the engine may have work and make no step
    """

    def __init__(self, llm: AsyncLLM, stall_limit_s: float = STALL_LIMIT_S) -> None:
        self._llm = llm
        self._stall_limit_s = stall_limit_s

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.LIVEZ.bind(GET=self.livez),
            routes.READYZ.bind(GET=self.readyz),
            routes.HEALTH.bind(GET=self.health),
            routes.PING.bind(GET=self.health),
            routes.VERSION.bind(GET=self.version),
            routes.LOAD.bind(GET=self.load),
            routes.RESET_PREFIX_CACHE.bind(POST=self.reset_prefix_cache),
            routes.RESIZE_KV_CACHE.bind(POST=self.resize_kv_cache),
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

    async def load(self, request: Request) -> Response:
        """GET /load."""
        self._check_engine()
        load = self._llm.load
        return JSONResponse(
            {
                "server_load": self._llm.num_open_requests,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "kv_blocks_total": load.num_blocks,
                "kv_blocks_free": load.num_free_blocks,
                "queue_s": round(load.queue_s, 6),
            }
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache. The response follows the reset."""
        await self._llm.reset_prefix_cache()
        return Response()

    async def resize_kv_cache(self, request: Request) -> Response:
        """POST /resize_kv_cache and /admin/resize. The response follows the resize."""
        body = await read_json_body(request, partial(parse_request, ResizeRequest))
        if body.num_blocks is None:
            raise missing_field_error("num_blocks", "Give the blocks of the cache")
        try:
            await self._llm.resize(body.num_blocks, body.num_host_blocks)
        except InvalidConfig as error:
            raise APIError(400, "invalid_value", str(error), param=error.option) from None
        except NeverFits as error:
            raise APIError(400, "invalid_value", str(error), param=error.field) from None
        return Response()

    def _check_engine(self) -> None:
        if self._llm.failure is not None:
            raise engine_dead_error()
