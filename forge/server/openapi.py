"""The description of this server that programs read: /openapi.json.

Owns what each route is said to do. The routes are those of the application and the bodies those
that are parsed, so neither can be forgotten here or differ: a route without a row has no
description, and a body is its model.

    Starlette's routes ──┐
    BODIES, TEXTS ───────┼──► {"openapi": "3.1.0", "paths": {...}, "components": {...}}
    the error envelope ──┘
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
from forge.server.fields import Body
from forge.server.openai import CompletionRequest, GenerateRequest
from forge.server.tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What a route takes. The routes of other paths take no body."""

TEXTS = {
    "/v1/completions": "A completion, or a stream of its chunks",
    "/v1/chat/completions": "The next message of a chat, or a stream of its chunks",
    "/generate": "A completion with its token ids",
    "/v1/models": "The model that is served",
    "/v1/models/{name}": "The same model alone",
    "/healthz": "Figures of the engine; 503 once it has ended",
    "/livez": "503 once the engine has work and makes no step, or has ended",
    "/readyz": "503 once the server takes no requests",
    "/health": "The status of /healthz, without a body",
    "/ping": "The same",
    "/version": "The server's version",
    "/reset_prefix_cache": "No request to come shares what was computed before",
    "/tokenize": "Token ids of a prompt",
    "/detokenize": "Text of token ids",
    "/tokenizer_info": "What the tokenizer is",
    "/metrics": "Figures for Prometheus",
    "/openapi.json": "This",
}

REQUIRED = {
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "messages"),
    "/generate": ("prompt",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
"""Fields without a default. The models take null for them too, and then name what is missing."""

PLAIN = {"/metrics": "text/plain"}
"""Routes that answer anything but JSON."""

STREAMED = ("/v1/completions", "/v1/chat/completions")
WITHOUT_CONTENT = ("/health", "/ping", "/reset_prefix_cache")

ERROR = {
    "type": "object",
    "description": "Every answer that is not a success.",
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


def description(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = re.sub(r":\w+}", "}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(path, schemas)
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


def _operation(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """What is said of one path. The schemas it names are among `schemas` afterwards."""
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    served: dict[str, Any] = {"description": "Done"}
    if path not in WITHOUT_CONTENT:
        served["content"] = {PLAIN.get(path, "application/json"): {}}
    if path in STREAMED:
        served["content"]["text/event-stream"] = {}
    found: dict[str, Any] = {
        "summary": TEXTS.get(path, path),
        "responses": {"200": served, "default": {"description": "Refused", "content": refused}},
    }
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if path in BODIES:
        schema = {"$ref": f"#/components/schemas/{_put(path, schemas)}"}
        content = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _put(path: str, schemas: dict[str, Any]) -> str:
    """The name of the body's schema, which is among `schemas` with all that it refers to."""
    model = BODIES[path]
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    schemas[model.__name__] = {**schema, "required": list(REQUIRED.get(path, ()))}
    return model.__name__


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(description(request.app.routes))
