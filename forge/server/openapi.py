"""The OpenAPI document of this server: /openapi.json.

Owns the descriptions of the routes. Knows no engine. The paths are the application's routes and the
bodies are the models that parse them. So a route cannot be missing here, and a body cannot differ
from its parser.

    Starlette's routes ────────────────┐
    REQUEST_MODELS, RESPONSE_SCHEMAS ──┼──► {"openapi": "3.1.0", "paths": {...}, "components": ...}
    the error envelope ────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from forge import __version__
from forge.server.batch_chat import BatchChatRequest
from forge.server.chat import ChatRequest
from forge.server.completions import CompletionRequest, GenerateRequest
from forge.server.errors import Envelope, anthropic_envelope, openai_envelope, score_envelope
from forge.server.json_schema import (
    BOOLEAN,
    COUNT,
    STRING,
    WEIGHTS,
    list_schema,
    object_schema,
    or_null,
    with_optional,
)
from forge.server.messages_api.request import CountTokensRequest, MessagesRequest
from forge.server.messages_api.schemas import ERROR as MESSAGES_ERROR
from forge.server.messages_api.schemas import MESSAGE, TOKEN_COUNT
from forge.server.middleware import SAFE_METHODS
from forge.server.operations import ResizeRequest
from forge.server.protocol import SESSION_ID, RequestBody
from forge.server.request_head import SESSION_HEADER
from forge.server.responses_api.request import ResponsesRequest
from forge.server.responses_api.schemas import DELETED, INPUT_ITEMS, RESPONSE
from forge.server.routes import SCORE, APIRoute, RouteSpec
from forge.server.score import ScoreRequest
from forge.server.timings import METRICS, TIMINGS
from forge.server.tokenization import DetokenizeRequest, TokenizeRequest

REQUEST_MODELS: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/batch": BatchChatRequest,
    "/invocations": ChatRequest,  # or, without messages, a CompletionRequest
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/generate": GenerateRequest,
    SCORE.path: ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/resize_kv_cache": ResizeRequest,
}
"""Model of the body of each route that has one."""

SUMMARIES = {
    "/": "A page for people: what this server is",
    "/v1/completions": "A completion, or a stream of its chunks",
    "/v1/chat/completions": "The next message of a chat, or a stream of its chunks",
    "/v1/chat/completions/batch": "The next messages of several chats",
    "/invocations": "A chat or a completion, by the fields of the body, as SageMaker calls it",
    "/v1/responses": "A response, or a stream of its events",
    "/v1/responses/{id}": "A stored response, to read or to delete",
    "/v1/responses/{id}/cancel": "End a response that is in progress",
    "/v1/responses/{id}/input_items": "Items of the conversation that a response answers",
    "/v1/messages": "A message, or a stream of its events, in Anthropic's API",
    "/v1/messages/count_tokens": "Tokens of the prompt of a message",
    "/generate": "A completion with its token ids",
    SCORE.path: "How likely tokens are to follow texts",
    "/v1/models": "The model of this server, in a list",
    "/v1/models/{name}": "The model of this name",
    "/v1/sessions/{id}": "End a session of this key's tenant",
    "/healthz": "Figures of the engine; 503 once it has ended",
    "/livez": "503 once the engine has ended, or has work and makes no step",
    "/readyz": "503 once the server accepts no requests",
    "/health": "The status of /healthz, without a body",
    "/ping": "The status of /healthz, without a body",
    "/version": "Version of the server",
    "/load": "What the engine has to do, for routers and autoscalers",
    "/reset_prefix_cache": "Drop all cached prefixes, so that no later request shares them",
    "/resize_kv_cache": "Change the blocks of the cache and of the host pool",
    "/tokenize": "Token ids of a prompt",
    "/detokenize": "Text of token ids",
    "/tokenizer_info": "Properties of the tokenizer",
    "/metrics": "Figures for Prometheus",
    "/openapi.json": "This document",
}

REQUIRED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/chat/completions/batch": ("messages",),
    "/invocations": ("messages",),
    "/v1/responses": ("input",),
    "/v1/messages": ("max_tokens", "messages"),
    "/v1/messages/count_tokens": ("messages",),
    "/generate": ("prompt",),
    SCORE.path: ("query", "items", "label_token_ids"),
    "/tokenize": (),  # a prompt, or the messages of a chat
    "/detokenize": ("tokens",),
    "/resize_kv_cache": ("num_blocks",),
}
"""Fields without a default. The models accept null for them too; then an error names the field."""

NON_JSON_TYPES = {
    "/": ("text/html",),
    "/metrics": ("text/plain", "application/openmetrics-text"),
}
"""Content types of the routes whose response is not JSON."""

STREAMING_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/invocations"),
    *("/v1/responses", "/v1/messages"),
)
PROBE_PATHS = ("/health", "/ping")
EMPTY_RESPONSE_PATHS = (*PROBE_PATHS, "/reset_prefix_cache", "/resize_kv_cache")


SESSION_PARAMETER = {
    "name": SESSION_HEADER,
    "in": "header",
    "description": "The session, where the body has no session_id",
    "schema": {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"},
}
"""Header of the routes that generate."""


_LOGPROB = {"type": "number", "maximum": 0}
_FINISH_REASON = {"enum": ["stop", "length", "abort", "error"]}
_STOP = or_null({"type": ["integer", "string"]})
_STOPS = {"stop_reason": _STOP, "matched_stop": _STOP}
_ERROR = object_schema(
    message=STRING, type=STRING, param={"type": "null"}, code={"const": "schema_violation"}
)
_IDS = list_schema(COUNT)
_USAGE = with_optional(
    object_schema(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=with_optional(
            object_schema(cached_tokens=COUNT),
            cached_tokens_by_tier=object_schema(device=COUNT, host=COUNT, disk=COUNT),
        ),
    ),
    completion_tokens_details=object_schema(reasoning_tokens=COUNT),
)
_TOP_LOGPROBS = {"type": "object", "additionalProperties": _LOGPROB}
_LOGPROBS = object_schema(
    tokens=list_schema(STRING),
    token_logprobs=list_schema(or_null(_LOGPROB)),
    top_logprobs=list_schema(or_null(_TOP_LOGPROBS)),
    text_offset=list_schema(COUNT),
)
_BYTES = list_schema({**COUNT, "maximum": 255})
_TOKEN_LOGPROB = {"token": STRING, "logprob": _LOGPROB, "bytes": _BYTES}
_TOP_TOKEN_LOGPROBS = list_schema(object_schema(**_TOKEN_LOGPROB))
_CHAT_LOGPROBS = object_schema(
    content=list_schema(object_schema(**_TOKEN_LOGPROB, top_logprobs=_TOP_TOKEN_LOGPROBS)),
    refusal={"type": "null"},
)
_PROMPT_LOGPROB = object_schema(
    logprob=_LOGPROB, rank=or_null({"type": "integer", "minimum": 1}), decoded_token=STRING
)
_PROMPT_LOGPROBS = list_schema(
    or_null({"type": "object", "additionalProperties": _PROMPT_LOGPROB, "minProperties": 1})
)
_MODEL = object_schema(
    id=STRING,
    object={"const": "model"},
    created=COUNT,
    owned_by=STRING,
    root=STRING,
    max_model_len={"type": "integer", "minimum": 1},
)
_TOOL_CALL = object_schema(
    id=STRING,
    type={"const": "function"},
    function=object_schema(name=STRING, arguments=STRING),
)
_MESSAGE = with_optional(
    object_schema(role={"const": "assistant"}, content=or_null(STRING), refusal={"type": "null"}),
    tool_calls={**list_schema(_TOOL_CALL), "minItems": 1},
    reasoning_content=or_null(STRING),
    reasoning=or_null(STRING),
)


def _completion_schema(kind: str, **choice: Any) -> dict[str, Any]:
    """Return the schema of a response whose choices have these properties."""
    ids = or_null(_IDS)
    prompt = {"prompt_token_ids": ids, "prompt_logprobs": or_null(_PROMPT_LOGPROBS)}
    item = with_optional(
        object_schema(index=COUNT, **choice, **_STOPS), **prompt, token_ids=ids, error=_ERROR
    )
    schema = object_schema(
        id=STRING,
        object={"const": kind},
        created=COUNT,
        model=STRING,
        choices={**list_schema(with_optional(item, **WEIGHTS)), "minItems": 1},
        usage=_USAGE,
    )
    return with_optional(schema, **prompt, **TIMINGS, **METRICS)


_COMPLETION = _completion_schema(
    "text_completion", text=STRING, logprobs=or_null(_LOGPROBS), finish_reason=_FINISH_REASON
)
_CHAT_COMPLETION = _completion_schema(
    "chat.completion",
    message=_MESSAGE,
    logprobs=or_null(_CHAT_LOGPROBS),
    finish_reason={"enum": [*_FINISH_REASON["enum"], "tool_calls"]},
)

RESPONSE_SCHEMAS: dict[str, dict[str, Any]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT_COMPLETION,
    "/v1/chat/completions/batch": _CHAT_COMPLETION,
    "/invocations": {"anyOf": [_CHAT_COMPLETION, _COMPLETION]},
    "/generate": with_optional(
        object_schema(
            text=STRING,
            token_ids=_IDS,
            prompt_tokens=COUNT,
            completion_tokens=COUNT,
            finish_reason=_FINISH_REASON,
            **_STOPS,
        ),
        error=_ERROR,
        **WEIGHTS,
        **TIMINGS,
    ),
    SCORE.path: object_schema(
        object={"const": "scoring"},
        model=STRING,
        scores=list_schema(list_schema({"type": "number", "minimum": 0, "maximum": 1})),
        usage=_USAGE,
    ),
    "/v1/responses": RESPONSE,
    "/v1/responses/{id}": {"anyOf": [RESPONSE, DELETED]},
    "/v1/responses/{id}/cancel": RESPONSE,
    "/v1/responses/{id}/input_items": INPUT_ITEMS,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": TOKEN_COUNT,
    "/v1/models": object_schema(
        object={"const": "list"}, data={**list_schema(_MODEL), "minItems": 1}
    ),
    "/v1/models/{name}": _MODEL,
    "/v1/sessions/{id}": object_schema(
        id=STRING, object={"const": "session.deleted"}, deleted={"const": True}
    ),
    "/healthz": object_schema(
        status={"const": "ok"},
        steps=COUNT,
        running=COUNT,
        waiting=COUNT,
        kv_blocks_total=COUNT,
        kv_blocks_used=COUNT,
    ),
    "/livez": object_schema(status={"const": "ok"}, steps=COUNT),
    "/readyz": object_schema(status={"const": "ok"}),
    "/version": object_schema(version=STRING),
    "/load": object_schema(
        server_load=COUNT,
        running=COUNT,
        waiting=COUNT,
        kv_blocks_total=COUNT,
        kv_blocks_free=COUNT,
        queue_s={"type": "number", "minimum": 0},
    ),
    "/tokenize": object_schema(
        tokens=_IDS, count=COUNT, max_model_len=COUNT, token_strs=or_null(list_schema(STRING))
    ),
    "/detokenize": object_schema(prompt=STRING),
    "/tokenizer_info": object_schema(
        tokenizer_class=STRING,
        vocab_size=COUNT,
        eos_token_id=COUNT,
        eos_token=STRING,
        has_chat_template=BOOLEAN,
        max_model_len=COUNT,
    ),
    "/openapi.json": {"type": "object", "required": ["openapi", "info", "paths"]},
}
"""JSON schema of each route's success. A property that is not required may be missing."""

ERROR_DESCRIPTIONS = {
    "400": "A field or the request itself is wrong",
    "401": "The key is missing or wrong",
    "403": "A web page of another origin requests a change",
    "404": "There is no such model, session or response",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "415": "The content type is not JSON, or the body is encoded",
    "421": "The host header names another server",
    "429": "The queue is full",
    "431": "The head is too large",
    "500": "The request failed; others continue",
    "503": "The engine has ended or stalls, the server shuts down, or the wait was too long",
    "504": "The request took too long",
}
_ANY_REQUEST_ERRORS = {"400", "401", "408", "421", "431", "500", "503"}
_UNSAFE_METHOD_ERRORS = {"403", "415"}
_BODY_ERRORS = {"404", "413"}
_GENERATION_ERRORS = {"429", "504"}

ERROR_SCHEMA = {
    "type": "object",
    "description": "Body of every response that is not a success.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "maxLength": 512},
                "type": {
                    "enum": [
                        "invalid_request_error",
                        "authentication_error",
                        "rate_limit_error",
                        "server_error",
                    ]
                },
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}

SCORE_ERROR_SCHEMA = {
    **object_schema(
        object={"const": "error"},
        message={"type": "string", "maxLength": 512},
        type={"enum": ["BadRequestError", "InternalServerError"]},
        param=or_null(STRING),
        code=COUNT,
    ),
    "description": f"Body of every response of {SCORE.path} that is not a success.",
}


ERROR_SCHEMA_NAMES: dict[Envelope, str] = {
    openai_envelope: "Error",
    anthropic_envelope: "MessagesError",
    score_envelope: "ScoreError",
}
"""Schema of the errors of each shape."""


def build_document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    schemas: dict[str, Any] = {
        **{"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR, "ScoreError": SCORE_ERROR_SCHEMA}
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.spec.is_described:
            path = re.sub(r":\w+}", "}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation = _operation(path, route.spec, method, schemas)
                paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "forge", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _operation(path: str, spec: RouteSpec, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a method of a path, and add the schemas it uses to `schemas`."""
    operation: dict[str, Any] = {
        "summary": SUMMARIES.get(path, path),
        "responses": {"200": _success_response(path), **_error_responses(path, spec, method)},
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if spec.operation is not None:
        operation["parameters"] = [SESSION_PARAMETER]
    if path in REQUEST_MODELS:
        schema = {"$ref": f"#/components/schemas/{_register_schema(path, schemas)}"}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _success_response(path: str) -> dict[str, Any]:
    """Return the description of a success."""
    if path in EMPTY_RESPONSE_PATHS:
        return {"description": "Done"}
    types = NON_JSON_TYPES.get(path)
    if types is not None:
        return {"description": "Done", "content": {each: {"schema": STRING} for each in types}}
    content: dict[str, Any] = {"application/json": {"schema": RESPONSE_SCHEMAS.get(path, {})}}
    if path in STREAMING_PATHS:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe one event
    return {"description": "Done", "content": content}


def _error_responses(path: str, spec: RouteSpec, method: str) -> dict[str, Any]:
    """Return the description of each error status of a method of a path."""
    name = ERROR_SCHEMA_NAMES[spec.envelope]
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    statuses = _ANY_REQUEST_ERRORS | (_BODY_ERRORS if path in REQUEST_MODELS else set())
    if method not in SAFE_METHODS:
        statuses |= _UNSAFE_METHOD_ERRORS
    if spec.operation is not None:
        statuses |= _GENERATION_ERRORS
    if "{" in path:
        statuses.add("404")
    responses: dict[str, Any] = {
        status: {"description": ERROR_DESCRIPTIONS[status], "content": content}
        for status in sorted(statuses)
    }
    if path in PROBE_PATHS:  # their responses have no body
        responses["503"] = {"description": ERROR_DESCRIPTIONS["503"]}
    return responses


def _register_schema(path: str, schemas: dict[str, Any]) -> str:
    """Add the schema of the path's body, and those it refers to, to `schemas`; return its name."""
    model = REQUEST_MODELS[path]
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    for name in model.unsupported.keys() & model.model_fields.keys():
        del schema["properties"][name]
    schemas[model.__name__] = {**schema, "required": list(REQUIRED.get(path, ()))}
    return model.__name__


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(build_document(request.app.routes))
