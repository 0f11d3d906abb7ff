"""JSON schemas of what the routes of /v1/messages send.

Owns the descriptions. Knows no route's handler: tests compare what is sent with them.
"""

from __future__ import annotations

from forge.server.json_schema import (
    COUNT,
    OBJECT,
    STRING,
    WEIGHTS,
    list_schema,
    object_schema,
    or_null,
    with_optional,
)
from forge.server.timings import TIMINGS

_BLOCKS = (
    object_schema(type={"const": "text"}, text=STRING),
    object_schema(type={"const": "thinking"}, thinking=STRING, signature=STRING),
    object_schema(type={"const": "tool_use"}, id=STRING, name=STRING, input=OBJECT),
)
_MESSAGE = object_schema(
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=list_schema({"anyOf": list(_BLOCKS)}),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=or_null(STRING),
    usage=object_schema(
        input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
        output_tokens_details=object_schema(thinking_tokens=COUNT),
    ),
)
MESSAGE = with_optional(_MESSAGE, **WEIGHTS, **TIMINGS)
TOKEN_COUNT = object_schema(input_tokens=COUNT)
ERROR = {
    "type": "object",
    "description": "Body of every response under /v1/messages that is not a success.",
    "required": ["type", "error", "request_id"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": object_schema(
            type={
                "enum": [
                    "invalid_request_error",
                    "authentication_error",
                    "permission_error",
                    "not_found_error",
                    "rate_limit_error",
                    "api_error",
                    "overloaded_error",
                    "timeout_error",
                ]
            },
            message={"type": "string", "maxLength": 512},
        ),
        "request_id": or_null(STRING),
    },
}
