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
from starlette.routing import BaseRoute, Route

from forge import __version__
from forge.server.chat import ChatRequest
from forge.server.completions import CompletionRequest, GenerateRequest
from forge.server.middleware import SAFE_METHODS
from forge.server.operations import ResizeRequest
from forge.server.protocol import SESSION_ID, RequestBody
from forge.server.request_head import SESSION_HEADER
from forge.server.tokenization import DetokenizeRequest, TokenizeRequest

REQUEST_MODELS: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/resize_kv_cache": ResizeRequest,
}
"""Model of the body of each route that has one."""

SUMMARIES = {
    "/": "A page for people: what this server is",
    "/v1/completions": "A completion, or a stream of its chunks",
    "/v1/chat/completions": "The next message of a chat, or a stream of its chunks",
    "/generate": "A completion with its token ids",
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
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "messages"),
    "/generate": ("prompt",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
    "/resize_kv_cache": ("num_blocks",),
}
"""Fields without a default. The models accept null for them too; then an error names the field."""

NON_JSON_TYPES = {
    "/": ("text/html",),
    "/metrics": ("text/plain", "application/openmetrics-text"),
}
"""Content types of the routes whose response is not JSON."""

STREAMING_PATHS = ("/v1/completions", "/v1/chat/completions")
GENERATION_PATHS = (*STREAMING_PATHS, "/generate")
PROBE_PATHS = ("/health", "/ping")
EMPTY_RESPONSE_PATHS = (*PROBE_PATHS, "/reset_prefix_cache", "/resize_kv_cache")


SESSION_PARAMETER = {
    "name": SESSION_HEADER,
    "in": "header",
    "description": "The session, where the body has no session_id",
    "schema": {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"},
}
"""Header of the routes that generate."""


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


def _with_optional(known: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these optional properties in addition."""
    return {**known, "properties": {**known["properties"], **properties}}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_BOOLEAN = {"type": "boolean"}
_LOGPROB = {"type": "number", "maximum": 0}
_FINISH_REASON = {"enum": ["stop", "length", "abort"]}
_WEIGHTS = {"weight_version": _STRING, "num_stale_tokens": _COUNT}
_IDS = _list(_COUNT)
_USAGE = _with_optional(
    _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_with_optional(
            _object(cached_tokens=_COUNT),
            cached_tokens_by_tier=_object(device=_COUNT, host=_COUNT, disk=_COUNT),
        ),
    ),
    completion_tokens_details=_object(reasoning_tokens=_COUNT),
)
_TOP_LOGPROBS = {"type": "object", "additionalProperties": _LOGPROB}
_LOGPROBS = _object(
    tokens=_list(_STRING),
    token_logprobs=_list(_or_null(_LOGPROB)),
    top_logprobs=_list(_or_null(_TOP_LOGPROBS)),
    text_offset=_list(_COUNT),
)
_TOKEN_LOGPROB = {"token": _STRING, "logprob": _LOGPROB, "bytes": _list({**_COUNT, "maximum": 255})}
_CHAT_LOGPROBS = _object(
    content=_list(_object(**_TOKEN_LOGPROB, top_logprobs=_list(_object(**_TOKEN_LOGPROB)))),
    refusal={"type": "null"},
)
_PROMPT_LOGPROB = _object(
    logprob=_LOGPROB, rank=_or_null({"type": "integer", "minimum": 1}), decoded_token=_STRING
)
_PROMPT_LOGPROBS = _list(
    _or_null({"type": "object", "additionalProperties": _PROMPT_LOGPROB, "minProperties": 1})
)
_MODEL = _object(
    id=_STRING,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_STRING,
    max_model_len={"type": "integer", "minimum": 1},
)
_TOOL_CALL = _object(
    id=_STRING,
    type={"const": "function"},
    function=_object(name=_STRING, arguments=_STRING),
)
_MESSAGE = _with_optional(
    _object(role={"const": "assistant"}, content=_or_null(_STRING), refusal={"type": "null"}),
    tool_calls={**_list(_TOOL_CALL), "minItems": 1},
    reasoning_content=_STRING,
    reasoning=_STRING,
)


def _completion_schema(kind: str, **choice: Any) -> dict[str, Any]:
    """Return the schema of a response whose choices have these properties."""
    prompt = {"prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS}
    item = _with_optional(_object(index=_COUNT, **choice), **prompt, token_ids=_IDS)
    schema = _object(
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        choices={**_list(_with_optional(item, **_WEIGHTS)), "minItems": 1},
        usage=_USAGE,
    )
    return _with_optional(schema, **prompt)


RESPONSE_SCHEMAS: dict[str, dict[str, Any]] = {
    "/v1/completions": _completion_schema(
        "text_completion", text=_STRING, logprobs=_or_null(_LOGPROBS), finish_reason=_FINISH_REASON
    ),
    "/v1/chat/completions": _completion_schema(
        "chat.completion",
        message=_MESSAGE,
        logprobs=_or_null(_CHAT_LOGPROBS),
        finish_reason={"enum": [*_FINISH_REASON["enum"], "tool_calls"]},
    ),
    "/generate": _with_optional(
        _object(
            text=_STRING,
            token_ids=_IDS,
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            finish_reason=_FINISH_REASON,
        ),
        **_WEIGHTS,
    ),
    "/v1/models": _object(object={"const": "list"}, data={**_list(_MODEL), "minItems": 1}),
    "/v1/models/{name}": _MODEL,
    "/v1/sessions/{id}": _object(
        id=_STRING, object={"const": "session.deleted"}, deleted={"const": True}
    ),
    "/healthz": _object(
        status={"const": "ok"},
        steps=_COUNT,
        running=_COUNT,
        waiting=_COUNT,
        kv_blocks_total=_COUNT,
        kv_blocks_used=_COUNT,
    ),
    "/livez": _object(status={"const": "ok"}, steps=_COUNT),
    "/readyz": _object(status={"const": "ok"}),
    "/version": _object(version=_STRING),
    "/load": _object(
        server_load=_COUNT,
        running=_COUNT,
        waiting=_COUNT,
        kv_blocks_total=_COUNT,
        kv_blocks_free=_COUNT,
        queue_s={"type": "number", "minimum": 0},
    ),
    "/tokenize": _object(tokens=_IDS, count=_COUNT, max_model_len=_COUNT),
    "/detokenize": _object(prompt=_STRING),
    "/tokenizer_info": _object(
        tokenizer_class=_STRING,
        vocab_size=_COUNT,
        eos_token_id=_COUNT,
        eos_token=_STRING,
        has_chat_template=_BOOLEAN,
        max_model_len=_COUNT,
    ),
    "/openapi.json": {"type": "object", "required": ["openapi", "info", "paths"]},
}
"""JSON schema of each route's success. A property that is not required may be missing."""

ERROR_DESCRIPTIONS = {
    "400": "A field or the request itself is wrong",
    "401": "The key is missing or wrong",
    "403": "A web page of another origin requests a change",
    "404": "There is no such model or session",
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


def build_document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = re.sub(r":\w+}", "}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation = _operation(path, method, schemas)
                paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "forge", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a method of a path, and add the schemas it uses to `schemas`."""
    operation: dict[str, Any] = {
        "summary": SUMMARIES.get(path, path),
        "responses": {"200": _success_response(path), **_error_responses(path, method)},
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if path in GENERATION_PATHS:
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
        return {"description": "Done", "content": {each: {"schema": _STRING} for each in types}}
    content: dict[str, Any] = {"application/json": {"schema": RESPONSE_SCHEMAS.get(path, {})}}
    if path in STREAMING_PATHS:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe one event
    return {"description": "Done", "content": content}


def _error_responses(path: str, method: str) -> dict[str, Any]:
    """Return the description of each error status of a method of a path."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    statuses = _ANY_REQUEST_ERRORS | (_BODY_ERRORS if path in REQUEST_MODELS else set())
    if method not in SAFE_METHODS:
        statuses |= _UNSAFE_METHOD_ERRORS
    if path in GENERATION_PATHS:
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
    schemas[model.__name__] = {**schema, "required": list(REQUIRED.get(path, ()))}
    return model.__name__


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(build_document(request.app.routes))
