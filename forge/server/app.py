"""The routes: one engine behind them all.

Owns which path does what. Knows no socket: any ASGI server can run it. A fault is raised as an
exception; refusal.HANDLERS says what each becomes.

    Guard ──► router ─┬─ POST /v1/completions ─┐
                      ├─ POST /v1/chat/complet…┤
                      ├─ POST /generate ───────┼─► AsyncLLM ──► one engine, all requests
                      ├─ GET  /v1/models[/NAME]│
                      ├─ GET  /healthz ────────┘
                      ├─ /livez, /readyz, ...       operations.py
                      ├─ /tokenize, ...             tokens.py
                      ├─ /metrics                   metrics.py
                      └─ /openapi.json              openapi.py
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forge.async_llm import AsyncLLM
from forge.limits import DEFAULT_LIMITS, Limits
from forge.llm import RequestOutput, TextDelta
from forge.request import SamplingParams
from forge.server import chat, generation
from forge.server.body import read_object
from forge.server.chat import ChatCompletion, ChatRequest
from forge.server.fields import NamedPrompt, missing, parse
from forge.server.guard import Guard
from forge.server.line import Line
from forge.server.metrics import Metrics
from forge.server.openai import Completion, CompletionRequest, GenerateRequest, usage
from forge.server.openapi import openapi
from forge.server.operations import Operations
from forge.server.refusal import HANDLERS, ClientGone, Refused, engine_dead, shown
from forge.server.slices import Pace, Slices, entries_of
from forge.server.sse import EventStream
from forge.server.statistics import Statistics
from forge.server.tokens import Tokens

ANSWERED = "answered"
"""In the application's state: what counts an answer that a connection gives without it."""

Sampling: TypeAlias = tuple[SamplingParams, list[NamedPrompt]]
T = TypeVar("T")


def create_app(
    llm: AsyncLLM,
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    metrics_compat: str | None = None,
) -> Starlette:
    """The server's application on this engine, which is closed when the application shuts down.

    served_model_name   what requests call the model; by default the name it was loaded by
    api_key             where set, every route but the guard's PUBLIC_PATHS needs it
    hosts               where set, the names that requests may call the server by
    limits              on requests; those on connections are the server's
    metrics_compat      vllm: /metrics has the names of vLLM too
    """
    name = served_model_name or llm.model
    line = Line(llm, limits)
    service = Service(line, name)
    metrics = Metrics(llm, model=name, compat=metrics_compat)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        telling = asyncio.create_task(Statistics(metrics.figures).run())
        yield
        telling.cancel()
        await asyncio.to_thread(line.close)
        await asyncio.to_thread(llm.close)

    app = Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/generate", service.generate, methods=["POST"]),
            Route("/v1/models", service.models, methods=["GET"]),
            Route("/v1/models/{name:path}", service.model, methods=["GET"]),
            Route("/healthz", service.health, methods=["GET"]),
            *Operations(llm).routes(),
            *Tokens(llm, name).routes(),
            Route("/metrics", metrics.scrape, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
        ],
        middleware=[
            Middleware(Guard, api_key=api_key, hosts=hosts, answered=metrics.figures.answered)
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    setattr(app.state, ANSWERED, metrics.figures.answered)
    app.router.redirect_slashes = False  # a path is a route or it is nothing
    return app


class Service:
    """The routes' handlers."""

    def __init__(self, line: Line, name: str) -> None:
        self._line = line
        self._llm = line.llm
        self._name = name
        self._opened = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""

        def read(
            body: dict[str, Any],
        ) -> tuple[CompletionRequest, Sampling]:
            asked = parse(CompletionRequest, body)
            self._check_named(asked.model)
            sampling = asked.sampling_params(), asked.named_prompts()
            return asked.without_prompt(), sampling

        async def answer(given: tuple[CompletionRequest, Sampling], label: str) -> Response:
            asked, (params, prompts) = given
            requests = await generation.admit(self._line, asked, prompts, params)
            head = {
                "id": f"cmpl-{label}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._name,
            }
            completion = await generation.aside(
                prompts, lambda: Completion(asked, prompts, requests, self._llm.tokenizer, head)
            )
            prompts.clear()  # the requests have their ids
            return await self._answer(completion, label, bool(asked.stream))

        return await self._serve(request, read, answer)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""

        def read(body: dict[str, Any]) -> ChatRequest:
            asked = parse(ChatRequest, body)
            self._check_named(asked.model)
            return asked

        async def answer(asked: ChatRequest, label: str) -> Response:
            admitted = await chat.admit(self._line, asked)
            head = {"id": f"chatcmpl-{label}", "created": int(time.time()), "model": self._name}
            completion = ChatCompletion(asked, admitted, self._llm.tokenizer, head)
            return await self._answer(completion, label, bool(asked.stream))

        return await self._serve(request, read, answer)

    async def generate(self, request: Request) -> Response:
        """POST /generate."""

        def read(body: dict[str, Any]) -> tuple[GenerateRequest, Sampling]:
            asked = parse(GenerateRequest, body)
            if asked.model is not None:
                self._check_model(asked.model)
            return asked, (asked.sampling_params(), asked.named_prompts())

        async def answer(given: tuple[GenerateRequest, Sampling], label: str) -> Response:
            asked, (params, prompts) = given
            requests = await generation.admit(self._line, asked, prompts, params)
            return await generation.answer_of(self._line, requests, label, _generated)

        return await self._serve(request, read, answer)

    async def _serve(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], T],
        answer: Callable[[T, str], Coroutine[Any, Any, Response]],
    ) -> Response:
        """Answer what the body asks for, or raise ClientGone as soon as the client leaves.

        answer   is called with what `read` makes of the body, and the request's label
        """
        asked = await read_object(request, read)
        return await generation.unless_gone(
            request.receive, answer(asked, request.state.request_id)
        )

    async def _answer(
        self, completion: Completion | ChatCompletion, label: str, is_stream: bool
    ) -> Response:
        """The whole answer, or one that is sent as it comes."""
        if is_stream:
            return CompletionStream(self._line, completion, label)
        return await generation.answer_of(self._line, completion.requests, label, completion.body)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME. A name may have slashes."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._opened,
            "owned_by": "forge",
            "max_model_len": self._llm.engine.config.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """GET /healthz."""
        if self._llm.failure is not None:
            raise engine_dead()
        status = self._llm.status
        return JSONResponse(
            {
                "status": "ok",
                "steps": status.num_steps,
                "running": status.running,
                "waiting": status.waiting,
                "kv_blocks_total": status.num_blocks,
                "kv_blocks_used": status.blocks_used,
            }
        )

    def _check_named(self, asked: str | None) -> None:
        if not asked:
            raise missing("model", f"Use {self._name}")
        self._check_model(asked)

    def _check_model(self, asked: str) -> None:
        if asked != self._name:
            raise Refused(
                404,
                "model_not_found",
                f"model: there is no '{shown(asked)}' here. Use {self._name}",
                param="model",
            )


def _generated(outputs: Sequence[RequestOutput]) -> Slices[dict[str, Any]]:
    """The body of an answer of /generate."""
    (output,) = outputs
    yield 0
    counts = usage(len(output.prompt_token_ids), len(output.token_ids))
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": counts["prompt_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "finish_reason": output.finish_reason,
    }


class CompletionStream(Response):
    """A completion as server-sent events."""

    def __init__(self, line: Line, completion: Completion | ChatCompletion, label: str) -> None:
        self._line = line
        self._completion = completion
        self._label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every event is sent, or the client is gone. Raises Refused before the first event."""
        events = EventStream(send, self._line.limits.ping_interval)
        try:
            await generation.unless_gone(receive, events.alive(self._write(events)))
        except ClientGone:
            return
        except Refused as refused:
            if not events.started:
                raise
            # No [DONE] after it: a reader can tell that the text is cut.
            await events.put(json.dumps(refused.envelope, separators=(",", ":")))
            await events.end()

    async def _write(self, events: EventStream) -> None:
        completion, pace = self._completion, Pace()

        async def take(place: int, delta: TextDelta) -> None:
            for chunk in completion.chunks(place, delta):
                await events.put(chunk)
            await pace.spend(1 + entries_of(delta.token_ids, delta.logprobs))

        await generation.run(self._line, completion.requests, take, self._label)
        for chunk in completion.last_chunks():
            await events.put(chunk)
        await events.put("[DONE]")
        await events.end()
