"""Text to token ids and back, over HTTP: counts the tokens of a prompt without the engine.

Owns the bodies of /tokenize, /detokenize and /tokenizer_info. Knows no step. The ids are equal to
those that /v1/completions makes of the same prompt, or /v1/chat/completions of the same messages.

    {"prompt": "ab"} ──► /tokenize   ──► {"tokens": [98, 99], "count": 2, "max_model_len": 64, ...}
    {"tokens": [98]} ──► /detokenize ──► {"prompt": "a"}

A prompt may have a million tokens. A thread makes and writes them in parts, so that the event loop
serves others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge.async_llm import AsyncLLM
from forge.errors import InvalidRequest
from forge.server import routes
from forge.server.body import read_json_body
from forge.server.chat import ChatRequest, MessagesField, TemplateVariablesField, ToolsField
from forge.server.protocol import (
    BooleanField,
    EncodedRequest,
    RequestBody,
    StringField,
    missing_field_error,
    parse_request,
)
from forge.server.routes import APIRoute
from forge.server.served_model import ServedModel
from forge.server.time_slicing import JSONPartsResponse, iter_json
from forge.tokenizer import Tokenizer

CHAT_FIELDS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    "chat_template_kwargs",
)
"""Fields of /tokenize that only a chat has."""

MAX_TEXT_CHARS = 2**20
"""Characters of a text for /tokenize: more than the longest context of a model."""

MAX_IDS = 2**18
"""Ids for /detokenize."""


class TokenizeRequest(EncodedRequest):
    """The body of POST /tokenize: a prompt, or the messages of a chat, with the rules of each.

    return_token_strs   the answer has the tokens as the vocabulary writes them
    """

    model: StringField = None
    prompt: StringField = None
    return_token_strs: BooleanField = None
    messages: MessagesField = None
    tools: ToolsField = None
    add_generation_prompt: BooleanField = None
    continue_final_message: BooleanField = None
    chat_template_kwargs: TemplateVariablesField = None

    def encoder(self, tokenizer: Tokenizer) -> Callable[[], list[int]]:
        """Return the function that makes the ids. Both raise InvalidRequest."""
        chat = {name: getattr(self, name) for name in CHAT_FIELDS}
        given = {name: value for name, value in chat.items() if value is not None}
        if not given:
            return self._prompt_encoder(tokenizer)
        if self.prompt is not None:
            raise InvalidRequest(
                "prompt",
                f"{next(iter(given))} belongs to a chat",
                "Give a prompt, or messages",
                "conflicting_parameters",
            )
        given |= {name: getattr(self, name) for name in EncodedRequest.model_fields}
        return partial(parse_request(ChatRequest, given).render_prompt, tokenizer)

    def _prompt_encoder(self, tokenizer: Tokenizer) -> Callable[[], list[int]]:
        if self.prompt is None:
            raise missing_field_error("prompt", "Give text, or the messages of a chat")
        if len(self.prompt) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                "prompt",
                f"{len(self.prompt)} characters, at most {MAX_TEXT_CHARS}",
                "Send it in parts",
                "string_too_long",
            )
        return partial(tokenizer.encode, self.prompt, **self.encoding)


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    model: StringField = None
    tokens: Annotated[list[int] | None, Field(description="a list of token ids")] = None


class TokenizationEndpoints:
    """Handlers of the routes."""

    def __init__(self, llm: AsyncLLM, served_model: ServedModel) -> None:
        self._llm = llm
        self._served_model = served_model

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [
            routes.TOKENIZE.bind(POST=self.tokenize),
            routes.DETOKENIZE.bind(POST=self.detokenize),
            routes.TOKENIZER_INFO.bind(GET=self.tokenizer_info),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        request_body = await read_json_body(request, partial(parse_request, TokenizeRequest))
        self._served_model.check(request_body.model)
        encode = request_body.encoder(self._llm.tokenizer)
        max_model_len = self._llm.engine.config.max_model_len

        def encode_body() -> list[bytes]:
            tokens, tokenizer = encode(), self._llm.tokenizer
            pieces = None
            if request_body.return_token_strs:
                pieces = [tokenizer.token_piece(token) for token in tokens]
            body = {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": max_model_len,
                "token_strs": pieces,
            }
            return [part.encode() for part in iter_json(body)]

        return JSONPartsResponse(await asyncio.to_thread(encode_body))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        request_body = await read_json_body(request, _parse_detokenize_request)
        self._served_model.check(request_body.model)
        tokens = request_body.tokens
        if tokens is None:
            raise missing_field_error("tokens", "Give token ids")

        def encode_body() -> bytes:
            self._check_tokens(tokens)
            return json.dumps({"prompt": self._llm.tokenizer.decode(tokens)}).encode()

        body = await asyncio.to_thread(encode_body)
        return Response(body, media_type="application/json")

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info."""
        tokenizer = self._llm.tokenizer
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "eos_token_id": tokenizer.eos_token,
                "eos_token": tokenizer.token_text(tokenizer.eos_token),
                # A tokenizer without the attribute has a template that is not text.
                "has_chat_template": getattr(tokenizer, "chat_template", "") is not None,
                "max_model_len": self._llm.engine.config.max_model_len,
            }
        )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab_size = self._llm.engine.model.vocab_size()
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    "tokens",
                    f"{token} is not a token id below {vocab_size}",
                    "Give ids of this model's vocabulary",
                    "token_out_of_range",
                )


def _parse_detokenize_request(body: dict[str, Any]) -> DetokenizeRequest:
    """Return the body; count its ids before visiting them. Raises InvalidRequest."""
    tokens = body.get("tokens")
    if isinstance(tokens, list) and len(tokens) > MAX_IDS:
        raise InvalidRequest(
            "tokens",
            f"{len(tokens)} items, at most {MAX_IDS}",
            "Send them in parts",
            "too_many_items",
        )
    return parse_request(DetokenizeRequest, body)
