"""Routes for trainers: pause and resume, updates of weights, sleep and wake.

Owns the bodies and the responses. Knows no key: SecurityMiddleware checks it. Parameters
of the query have the names of vLLM.

    POST /admin/pause?mode=keep     GET /admin/pause     POST /admin/weights {"files", ...}
    POST /admin/resume                                   POST /admin/resize {"num_blocks", ...}
    POST /admin/sleep?level=1       GET /admin/sleep
    POST /admin/wake

Always true: these routes exist only with a TrainerAccess, and none of them takes a client's key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from functools import partial
from typing import Annotated, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.async_llm import AsyncLLM
from forge.errors import EnginePaused, InvalidConfig, InvalidWeights
from forge.llm import parse_pause_mode
from forge.server import routes
from forge.server.body import read_json_body
from forge.server.errors import APIError, excerpt
from forge.server.operations import OperationsEndpoints
from forge.server.protocol import RequestBody, StringField, missing_field_error, parse_request
from forge.server.routes import APIRoute
from forge.trainer_access import TrainerAccess

T = TypeVar("T")

LEVELS = {"1": 1, "2": 2}


class UpdateWeightsRequest(RequestBody):
    """The body of POST /admin/weights.

    files            names of safetensors files, relative to the folder of weights
    weight_version   name of the weights in later outputs; left out: the number of updates
    """

    files: Annotated[list[str] | None, Field(description="a list of names of files")] = None
    weight_version: StringField = None


class TrainerEndpoints:
    """Handlers of the routes."""

    def __init__(self, llm: AsyncLLM, access: TrainerAccess) -> None:
        self._llm = llm
        self._access = access

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.WEIGHTS.bind(POST=self.update_weights),
            routes.PAUSE.bind(GET=self.pause_state, POST=self.pause),
            routes.RESUME.bind(POST=self.resume),
            routes.SLEEP.bind(GET=self.sleep_state, POST=self.sleep),
            routes.WAKE.bind(POST=self.wake),
            routes.RESIZE.bind(POST=OperationsEndpoints(self._llm).resize_kv_cache),
        ]

    async def pause(self, request: Request) -> Response:
        """POST /admin/pause. The response follows when no step is in flight."""
        _check_query(request, ("mode",))
        await _refuse(self._llm.pause(request.query_params.get("mode", "abort")))
        return _respond("paused", self._llm.weight_version)

    async def resume(self, request: Request) -> Response:
        """POST /admin/resume."""
        await _refuse(self._llm.resume())
        return _respond("resumed", self._llm.weight_version)

    async def pause_state(self, request: Request) -> Response:
        """GET /admin/pause. A pause of mode wait begins when no request is open."""
        status = self._llm.status
        return JSONResponse(
            {
                "is_paused": status.is_paused,
                "mode": status.pause_mode,
                "weight_version": status.weight_version,
            }
        )

    async def update_weights(self, request: Request) -> Response:
        """POST /admin/weights. The response follows when every later token is of new weights."""
        body = await read_json_body(request, partial(parse_request, UpdateWeightsRequest))
        if not body.files:
            raise missing_field_error("files", "Name files of the folder of weights")
        try:
            source = self._access.find_files(body.files)
        except InvalidWeights as error:
            raise _weights_error(error) from None
        update = await _refuse(self._llm.update_weights(source, body.weight_version))
        return _respond("updated", update.version, update.seconds)

    async def sleep(self, request: Request) -> Response:
        """POST /admin/sleep. An engine that is not paused is paused first."""
        _check_query(request, ("level", "mode"))
        level = request.query_params.get("level", "1")
        if level not in LEVELS:
            raise APIError(400, "invalid_value", "level: it is not 1 or 2. Give one", param="level")
        mode = request.query_params.get("mode", "abort")
        try:
            parse_pause_mode(mode)  # of a paused engine too
        except InvalidConfig as error:
            raise APIError(400, "invalid_value", str(error), param=error.option) from None
        if not self._llm.status.is_paused:
            await _refuse(self._llm.pause(mode))
        times = await _refuse(self._llm.sleep(LEVELS[level]))
        return _respond("sleeping", self._llm.weight_version, times)

    async def wake(self, request: Request) -> Response:
        """POST /admin/wake. The engine stays paused until /admin/resume."""
        times = await _refuse(self._llm.wake())
        return _respond("awake", self._llm.weight_version, times)

    async def sleep_state(self, request: Request) -> Response:
        """GET /admin/sleep."""
        return JSONResponse({"is_sleeping": bool(self._llm.status.sleep_level)})


def _respond(status: str, version: str, times: dict[str, float] | None = None) -> Response:
    return JSONResponse(command_response(status, version, times))


def command_response(
    status: str, version: str, times: Mapping[str, float] | None = None
) -> dict[str, object]:
    """Return the body of the response to a command that was carried out, over HTTP or a socket.

    version   of the weights after it
    times     seconds of its parts; None: it has none
    """
    body: dict[str, object] = {"status": status, "weight_version": version}
    if times is not None:
        body["seconds"] = {name: round(seconds, 6) for name, seconds in times.items()}
    return body


async def _refuse(command: Awaitable[T]) -> T:
    """Return the result of the command. Raises APIError where the engine refuses it."""
    try:
        return await command
    except EnginePaused as error:
        raise APIError(409, "engine_paused", str(error)) from None
    except InvalidWeights as error:
        raise _weights_error(error) from None
    except InvalidConfig as error:
        raise APIError(400, "invalid_value", str(error), param=error.option) from None


def _weights_error(error: InvalidWeights) -> APIError:
    return APIError(400, "invalid_weights", str(error), param="files")


def _check_query(request: Request, names: Collection[str]) -> None:
    for name in request.query_params:
        if name not in names:
            raise APIError(
                400,
                "unknown_parameter",
                f"{excerpt(name)}: there is no such parameter. Use {', '.join(names)}",
                param=excerpt(name),
            )
