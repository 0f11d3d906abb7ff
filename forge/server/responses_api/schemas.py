"""JSON schemas of what the routes of /v1/responses send.

Owns the descriptions. Knows no route's handler: tests compare what is sent with them.
"""

from __future__ import annotations

from typing import Any

from forge.server.json_schema import (
    BOOLEAN,
    COUNT,
    NULL,
    OBJECT,
    STRING,
    WEIGHTS,
    list_schema,
    object_schema,
    or_null,
    with_optional,
)
from forge.server.timings import TIMINGS

ITEM_STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
_NUMBER = {"type": "number"}
_OUTPUT_TEXT = object_schema(
    type={"const": "output_text"},
    text=STRING,
    annotations=list_schema(OBJECT),
    logprobs=list_schema(OBJECT),
)
_INPUT_TEXT = object_schema(type={"const": "input_text"}, text=STRING)


def _message(roles: list[str], part: dict[str, Any]) -> dict[str, Any]:
    return object_schema(
        id=STRING,
        type={"const": "message"},
        role={"enum": roles},
        status=ITEM_STATUS,
        content=list_schema(part),
    )


_OUTPUT_MESSAGE = _message(["assistant"], _OUTPUT_TEXT)
_INPUT_MESSAGE = _message(["user", "system", "developer"], _INPUT_TEXT)
_FUNCTION_CALL = object_schema(
    id=STRING,
    type={"const": "function_call"},
    status=ITEM_STATUS,
    call_id=STRING,
    name=STRING,
    arguments=STRING,
)
_FUNCTION_CALL_OUTPUT = object_schema(
    id=STRING,
    type={"const": "function_call_output"},
    status=ITEM_STATUS,
    call_id=STRING,
    output={"anyOf": [STRING, list_schema(_INPUT_TEXT)]},
)
_REASONING = object_schema(
    id=STRING,
    type={"const": "reasoning"},
    status=ITEM_STATUS,
    summary=list_schema(object_schema(type={"const": "summary_text"}, text=STRING)),
    content=list_schema(object_schema(type={"const": "reasoning_text"}, text=STRING)),
)
_OUTPUT_ITEM = {"anyOf": [_OUTPUT_MESSAGE, _FUNCTION_CALL, _REASONING]}
_INPUT_ITEM = {"anyOf": [_INPUT_MESSAGE, _FUNCTION_CALL_OUTPUT, *_OUTPUT_ITEM["anyOf"]]}

_RESPONSE = object_schema(
    id=STRING,
    object={"const": "response"},
    created_at=COUNT,
    completed_at=or_null(COUNT),
    status={"enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"]},
    error=or_null(object_schema(code=STRING, message=STRING)),
    incomplete_details=or_null(object_schema(reason={"const": "max_output_tokens"})),
    output=list_schema(_OUTPUT_ITEM),
    usage=or_null(
        object_schema(
            input_tokens=COUNT,
            input_tokens_details=object_schema(cached_tokens=COUNT, cache_write_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=object_schema(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        )
    ),
    background={"const": False},
    instructions=or_null(STRING),
    max_output_tokens=or_null(COUNT),
    max_tool_calls=or_null(COUNT),
    metadata={"type": "object", "additionalProperties": STRING},
    model=STRING,
    parallel_tool_calls=BOOLEAN,
    previous_response_id=or_null(STRING),
    prompt_cache_key=or_null(STRING),
    reasoning=object_schema(effort=or_null(STRING), summary=or_null(STRING)),
    safety_identifier=or_null(STRING),
    service_tier={"const": "default"},
    temperature=_NUMBER,
    text=object_schema(format=OBJECT),
    tool_choice={"anyOf": [STRING, OBJECT]},
    tools=list_schema(OBJECT),
    top_logprobs=COUNT,
    top_p=_NUMBER,
    truncation={"const": "disabled"},
    user=or_null(STRING),
)
RESPONSE = with_optional(_RESPONSE, **WEIGHTS, **TIMINGS)
DELETED = object_schema(id=STRING, object={"const": "response"}, deleted={"const": True})
INPUT_ITEMS = object_schema(
    object={"const": "list"},
    data=list_schema(_INPUT_ITEM),
    first_id={"anyOf": [STRING, NULL]},
    last_id={"anyOf": [STRING, NULL]},
    has_more=BOOLEAN,
)
