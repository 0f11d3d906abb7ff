"""The routes of /v1/messages: a message, a stream of its events, and the tokens of a prompt.

Owns their responses. Knows no template.

    POST /v1/messages                ──► a chat request ──► the engine ──► MessageOutput
    POST /v1/messages/count_tokens   ──► a chat request ──► its prompt ──► {"input_tokens": ...}
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.server import chat, generation, routes
from forge.server.admission import AdmissionQueue
from forge.server.chat_formats import ChatFormats
from forge.server.json_route import handle_json
from forge.server.messages_api.output import MessageOutput
from forge.server.messages_api.request import CountTokensRequest, MessagesRequest
from forge.server.output_items import OutputItems
from forge.server.protocol import parse_request
from forge.server.request_head import RequestHead
from forge.server.routes import APIRoute
from forge.server.served_model import ServedModel
from forge.server.streaming import GeneratedStream


class MessagesEndpoints:
    """Handlers of the routes."""

    def __init__(
        self, queue: AdmissionQueue, served_model: ServedModel, formats: ChatFormats
    ) -> None:
        self._queue = queue
        self._served_model = served_model
        self._formats = formats

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.MESSAGES.bind(POST=self.create),
            routes.COUNT_TOKENS.bind(POST=self.count_tokens),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""

        def parse_body(body: dict[str, Any]) -> MessagesRequest:
            request_body = parse_request(MessagesRequest, body)
            self._served_model.check(request_body.model)
            request_body.check_max_tokens()
            return request_body

        return await handle_json(request, parse_body, self._create)

    async def _create(self, request_body: MessagesRequest, head: RequestHead) -> Response:
        queue, tokenizer = self._queue, self._queue.llm.tokenizer
        queue.check_capacity(1)  # before the costly part
        # Texts may be long: a thread keeps the event loop free.
        chat_body, names = await asyncio.to_thread(request_body.translate)
        if not self._formats.end_ids:  # clients send a budget to any model
            chat_body = chat_body.model_copy(update={"thinking_token_budget": None})
        with names.rename_errors():
            engine_request = await chat.build_request(queue, chat_body, head, self._formats)
        output = MessageOutput(
            {"id": f"msg_{secrets.token_hex(12)}", "model": self._served_model.name},
            engine_request,
            OutputItems.of_chat(chat_body, engine_request.prompt, tokenizer, self._formats),
            head.request_id,
        )
        if request_body.stream:
            return GeneratedStream(queue, (engine_request,), head.request_id, output)
        return await generation.create_response(
            queue, (engine_request,), head.request_id, lambda outputs: output.build(outputs[0])
        )

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""

        def parse_body(body: dict[str, Any]) -> CountTokensRequest:
            request_body = parse_request(CountTokensRequest, body)
            self._served_model.check(request_body.model)
            return request_body

        async def respond(request_body: CountTokensRequest, head: RequestHead) -> Response:
            self._queue.check_capacity(1)
            return JSONResponse({"input_tokens": await asyncio.to_thread(count, request_body)})

        def count(request_body: CountTokensRequest) -> int:
            chat_body, names = request_body.translate()
            with names.rename_errors():
                return len(chat_body.render_prompt(self._queue.llm.tokenizer))

        return await handle_json(request, parse_body, respond)
