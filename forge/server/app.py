"""The ASGI application: the routes of one engine.

Owns which path does what. Knows no socket: any ASGI server can run it. Errors are raised as
exceptions; error_responses.EXCEPTION_HANDLERS makes each a response.
    SecurityMiddleware ──► router ─┬─ POST /v1/completions ─┐
                                   ├─ POST /v1/chat/complet…┤
                                   ├─ /v1/responses, ...    ┤     responses_api/
                                   ├─ /v1/messages, ...     ┤     messages_api/
                                   ├─ POST /v1/score ───────┤     score.py
                                   ├─ POST /generate ───────┼─► AsyncLLM ──► one engine
                                   ├─ GET  /v1/models[/NAME]│
                                   ├─ DELETE /v1/sessions/ID┤     sessions.py
                                   ├─ GET  /healthz ────────┘
                                   ├─ /livez, /readyz, ...       operations.py
                                   ├─ /tokenize, ...             tokenization.py
                                   ├─ /                          home.py
                                   ├─ /admin/pause, ...          trainers.py, off by default
                                   ├─ /metrics                   metrics.py
                                   └─ /openapi.json              openapi.py
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.async_llm import AsyncLLM
from forge.limits import DEFAULT_LIMITS, Limits
from forge.outputs import RequestOutput, TextDelta
from forge.request import SamplingParams
from forge.server import batch_chat, chat, generation, routes
from forge.server.admission import AdmissionQueue
from forge.server.batch_chat import BatchChatRequest, BatchChatResponse
from forge.server.chat import ChatCompletionResponse, ChatRequest
from forge.server.chat_formats import ChatFormats, find_chat_formats
from forge.server.choice_end import end_fields, find_violation
from forge.server.completions import (
    CompletionRequest,
    CompletionResponse,
    GenerateRequest,
)
from forge.server.error_responses import EXCEPTION_HANDLERS
from forge.server.errors import APIError, engine_dead_error
from forge.server.film import FilmFeed
from forge.server.home import HomeEndpoint
from forge.server.json_route import handle_json
from forge.server.messages_api.endpoints import MessagesEndpoints
from forge.server.metrics import MetricsEndpoint
from forge.server.middleware import SecurityMiddleware, check_root_path
from forge.server.openapi import openapi
from forge.server.operations import OperationsEndpoints
from forge.server.protocol import NamedPrompt, parse_request
from forge.server.request_defaults import NO_DEFAULTS, RequestDefaults
from forge.server.request_head import RequestHead
from forge.server.responses_api.endpoints import ResponsesEndpoints
from forge.server.routes import Access, APIRoute, RouteTable
from forge.server.score import ScoreEndpoints
from forge.server.served_model import ServedModel
from forge.server.sessions import SessionEndpoints
from forge.server.sse import comment_ping, encode_event
from forge.server.stat_logger import StatLogger
from forge.server.streaming import GeneratedStream
from forge.server.tenants import Tenants
from forge.server.time_slicing import SlicedWork
from forge.server.timings import AnswerTimings
from forge.server.tokenization import TokenizationEndpoints
from forge.server.traces import RequestTraces, TraceMiddleware
from forge.server.trainers import TrainerEndpoints
from forge.server.weights_socket import WeightsSocket
from forge.trainer_access import TrainerAccess

COUNT_RESPONSE = "answered"
"""Name in the application's state of the function that counts a connection's own responses."""

ParamsAndPrompts: TypeAlias = tuple[SamplingParams, list[NamedPrompt]]
ParsedCompletion: TypeAlias = tuple[CompletionRequest, ParamsAndPrompts]
T = TypeVar("T")


def create_app(
    llm: AsyncLLM,
    *,
    served_model_name: str | None = None,
    api_keys: tuple[str, ...] = (),
    hosts: Collection[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    metrics_compat: str | None = None,
    reasoning_parser: str | None = None,
    reasoning_config: str | None = None,
    tool_call_parser: str | None = None,
    request_defaults: RequestDefaults = NO_DEFAULTS,
    root_path: str = "",
    trainer_access: TrainerAccess | None = None,
    film: FilmFeed | None = None,
    traces: RequestTraces | None = None,
    weights_socket: WeightsSocket | None = None,
) -> Starlette:
    """Build the server's application on this engine, which it closes at its shutdown.

    served_model_name   name that requests give for the model; default: the name it was loaded by
    api_keys            where there are any, every route but the probes needs one
    hosts               where set, the host names that requests may use for the server
    limits              bounds on requests; the HTTP server applies those on connections
    metrics_compat      vllm: /metrics has vLLM's names too
    reasoning_parser    name of the format of reasoning; default: the chat template's
    reasoning_config    JSON of the text that ends a reasoning whose budget is spent
    tool_call_parser    name of the format of tool calls; default: the chat template's
    request_defaults    fields that the server sets in requests
    root_path           path before that of every route, which a proxy adds; routes are found with
                        and without it
    trainer_access      key and files of the routes of trainers; None: there are no such routes
    film                feed of the engine's film, which is then the page at /; None: there is none
    traces              receives the spans of requests, and is closed at the shutdown; None: there
                        are none
    weights_socket      receives updates of weights from trainers, and is closed at the shutdown;
                        None: there is none

    Raises InvalidConfig for an unknown name of a format, and for a wrong reasoning_config.
    """
    served_model = ServedModel(served_model_name or llm.model)
    check_root_path(root_path)
    queue, tenants = AdmissionQueue(llm, limits), Tenants(api_keys)
    formats = find_chat_formats(llm.tokenizer, reasoning_parser, tool_call_parser, reasoning_config)
    endpoints = InferenceEndpoints(queue, served_model, formats, request_defaults)
    metrics = MetricsEndpoint(llm, model=served_model.name, compat=metrics_compat, traces=traces)

    if traces is not None:
        llm.add_observer(traces)
    keys = {Access.CLIENT: tenants}
    if trainer_access is not None:
        keys[Access.ADMIN] = Tenants((trainer_access.admin_key,))
    table = RouteTable(
        [
            *endpoints.routes(),
            *(HomeEndpoint(served_model.name) if film is None else film).routes(),
            *ResponsesEndpoints(queue, served_model, formats, tenants.count).routes(),
            *MessagesEndpoints(queue, served_model, formats).routes(),
            *ScoreEndpoints(queue, served_model).routes(),
            *SessionEndpoints(llm).routes(),
            *OperationsEndpoints(llm).routes(),
            *TokenizationEndpoints(llm, served_model).routes(),
            *([] if trainer_access is None else TrainerEndpoints(llm, trainer_access).routes()),
            routes.METRICS.bind(GET=metrics.scrape),
            routes.OPENAPI.bind(GET=openapi),
        ],
        lifespan=lambda app: _lifespan(queue, metrics, traces, weights_socket),
    )
    app = Starlette(
        middleware=[
            Middleware(
                SecurityMiddleware,
                routes=table,
                keys=keys,
                hosts=hosts,
                root_path=root_path,
                on_response=metrics.stats.count_response,
            ),
            *([] if traces is None else [Middleware(TraceMiddleware, traces=traces)]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router = table
    setattr(app.state, COUNT_RESPONSE, metrics.stats.count_response)
    return app


@asynccontextmanager
async def _lifespan(
    queue: AdmissionQueue,
    metrics: MetricsEndpoint,
    traces: RequestTraces | None,
    weights_socket: WeightsSocket | None,
) -> AsyncGenerator[None, None]:
    """Log statistics and receive weights meanwhile; at the end close all that the engine has."""
    stat_logger_task = asyncio.create_task(StatLogger(metrics.stats).run())
    if weights_socket is not None:
        weights_socket.start(queue.llm, asyncio.get_running_loop())
    yield
    stat_logger_task.cancel()
    if weights_socket is not None:
        await asyncio.to_thread(weights_socket.close)
    await asyncio.to_thread(queue.close)
    await asyncio.to_thread(queue.llm.close)
    if traces is not None:
        await asyncio.to_thread(traces.close)


class InferenceEndpoints:
    """Handlers of the routes that generate or describe the model."""

    def __init__(
        self,
        queue: AdmissionQueue,
        served_model: ServedModel,
        formats: ChatFormats,
        defaults: RequestDefaults,
    ) -> None:
        self._defaults = defaults
        self._queue = queue
        self._formats = formats
        self._llm = queue.llm
        self._served_model = served_model
        self._created_s = int(time.time())

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.COMPLETIONS.bind(POST=self.completions),
            routes.CHAT.bind(POST=self.chat),
            routes.BATCH_CHAT.bind(POST=self.batch_chat),
            routes.INVOCATIONS.bind(POST=self.invocations),
            routes.GENERATE.bind(POST=self.generate),
            routes.MODELS.bind(GET=self.models),
            routes.MODEL.bind(GET=self.model),
            routes.HEALTHZ.bind(GET=self.health),
        ]

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await handle_json(request, self._parse_completion, self._respond_completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await handle_json(request, self._parse_chat, self._respond_chat)

    async def invocations(self, request: Request) -> Response:
        """POST /invocations, the one route of a SageMaker container: a chat or a completion."""

        def parse_body(body: dict[str, Any]) -> ChatRequest | ParsedCompletion:
            parse = self._parse_chat if "messages" in body else self._parse_completion
            return parse(body)

        async def respond(
            parsed_body: ChatRequest | ParsedCompletion, head: RequestHead
        ) -> Response:
            if isinstance(parsed_body, ChatRequest):
                return await self._respond_chat(parsed_body, head)
            return await self._respond_completion(parsed_body, head)

        return await handle_json(request, parse_body, respond)

    async def batch_chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/batch."""

        def parse_body(body: dict[str, Any]) -> list[ChatRequest]:
            # A batch is several requests, and has no metrics.
            defaults = self._defaults._replace(enable_per_request_metrics=False)
            request_body = parse_request(BatchChatRequest, defaults.apply(body))
            self._served_model.check(request_body.model)
            return request_body.split()

        async def respond(chats: list[ChatRequest], head: RequestHead) -> Response:
            requests = await batch_chat.build_requests(self._queue, chats, head, self._formats)
            response_head = self._response_head("chatcmpl", head)
            batch = BatchChatResponse(
                [
                    ChatCompletionResponse(
                        each, request, self._llm.tokenizer, self._formats, response_head
                    )
                    for each, request in zip(chats, requests, strict=True)
                ],
                response_head,
            )
            return await generation.create_response(
                self._queue, batch.requests, head.request_id, batch.body
            )

        return await handle_json(request, parse_body, respond)

    def _parse_completion(self, body: dict[str, Any]) -> ParsedCompletion:
        request_body = parse_request(CompletionRequest, self._defaults.apply(body))
        self._served_model.check(request_body.model)
        params = request_body.sampling_params(self._llm.sampling_defaults)
        sampling = params, request_body.parse_prompts()
        return request_body.without_prompt(), sampling

    async def _respond_completion(
        self, parsed_body: ParsedCompletion, head: RequestHead
    ) -> Response:
        request_body, (params, prompts) = parsed_body
        requests = await generation.build_requests(self._queue, request_body, prompts, params, head)
        response_head = {**self._response_head("cmpl", head), "object": "text_completion"}
        completion = await generation.run_in_thread_if_long(
            prompts,
            lambda: CompletionResponse(
                request_body, prompts, requests, self._llm.tokenizer, response_head
            ),
        )
        prompts.clear()  # the requests have the ids
        return await self._create_response(completion, head.request_id, bool(request_body.stream))

    def _parse_chat(self, body: dict[str, Any]) -> ChatRequest:
        request_body = parse_request(ChatRequest, self._defaults.apply(body))
        self._served_model.check(request_body.model)
        return request_body

    async def _respond_chat(self, request_body: ChatRequest, head: RequestHead) -> Response:
        engine_request = await chat.build_request(self._queue, request_body, head, self._formats)
        completion = ChatCompletionResponse(
            request_body,
            engine_request,
            self._llm.tokenizer,
            self._formats,
            self._response_head("chatcmpl", head),
        )
        return await self._create_response(completion, head.request_id, bool(request_body.stream))

    def _response_head(self, prefix: str, head: RequestHead) -> dict[str, object]:
        """Return the fields that answers begin with."""
        return {
            "id": f"{prefix}-{head.request_id}",
            "created": int(time.time()),
            "model": self._served_model.name,
        }

    async def generate(self, request: Request) -> Response:
        """POST /generate."""

        def parse_body(body: dict[str, Any]) -> tuple[GenerateRequest, ParamsAndPrompts]:
            request_body = parse_request(GenerateRequest, body)
            self._served_model.check(request_body.model)
            params = request_body.sampling_params(self._llm.sampling_defaults)
            return request_body, (params, request_body.parse_prompts())

        async def respond(
            parsed_body: tuple[GenerateRequest, ParamsAndPrompts], head: RequestHead
        ) -> Response:
            request_body, (params, prompts) = parsed_body
            requests = await generation.build_requests(
                self._queue, request_body, prompts, params, head
            )
            return await generation.create_response(
                self._queue,
                requests,
                head.request_id,
                partial(_build_generate_body, AnswerTimings(request_body.return_timings)),
            )

        return await handle_json(request, parse_body, respond)

    async def _create_response(
        self,
        completion: CompletionResponse | ChatCompletionResponse,
        http_request_id: str,
        is_stream: bool,
    ) -> Response:
        """Return the whole response, or one that streams its chunks."""
        if is_stream:
            return GeneratedStream(
                self._queue, completion.requests, http_request_id, CompletionEvents(completion)
            )
        return await generation.create_response(
            self._queue, completion.requests, http_request_id, completion.body
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME. A name may have slashes."""
        self._served_model.check(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._served_model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "forge",
            "root": self._served_model.name,
            "max_model_len": self._llm.engine.config.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """GET /healthz."""
        if self._llm.failure is not None:
            raise engine_dead_error()
        status = self._llm.status
        return JSONResponse(
            {
                "status": "ok",
                "steps": status.num_steps,
                "running": status.num_running,
                "waiting": status.num_waiting,
                "kv_blocks_total": status.num_blocks,
                "kv_blocks_used": status.num_used_blocks,
            }
        )


def _build_generate_body(
    timings: AnswerTimings, outputs: Sequence[RequestOutput]
) -> SlicedWork[dict[str, Any]]:
    """Build the body of a response of /generate, in slices."""
    (output,) = outputs
    yield 0
    num_prompt, num_output = len(output.prompt_token_ids), len(output.token_ids)
    timings.add(output.choices[0].timings)
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "finish_reason": output.finish_reason,
        **end_fields(output.choices[0], find_violation(output.choices[0])),
        **timings.fields(num_prompt, output.cached_tokens.total, num_output),
    }


class CompletionEvents:
    """StreamEncoder of a completion or a chat: chunks, and [DONE] where the stream was not cut."""

    def __init__(self, completion: CompletionResponse | ChatCompletionResponse) -> None:
        self._completion = completion

    def encode_ping(self) -> str:
        """Return a comment."""
        return comment_ping()

    def encode_delta(self, index: int, delta: TextDelta) -> Iterable[str]:
        """Return the chunks of a delta."""
        return map(encode_event, self._completion.chunks(index, delta))

    def encode_end(self) -> Iterable[str]:
        """Return the last chunks and [DONE]."""
        return map(encode_event, (*self._completion.last_chunks(), "[DONE]"))

    def encode_error(self, error: APIError) -> Iterable[str]:
        """Return the error. Without [DONE] a reader can detect that the text is cut."""
        return (encode_event(json.dumps(error.envelope, separators=(",", ":"))),)

    def close(self) -> None:
        """Do nothing: a completion holds nothing."""
