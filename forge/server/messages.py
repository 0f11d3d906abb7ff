"""The messages of a chat request: their roles and keys, checked one by one.

Owns the roles, the keys and the names of fields in errors. Knows no template: whether a model
accepts a role, or two messages of one role in a row, is decided by its template.

    messages[2].role      system, developer, user, assistant, tool, or another one of the template
    messages[2].content   text, or parts of text, which become one text with a line each
    messages[2].tool_calls   of an assistant, which may have no content then
    messages[2].reasoning_content, reasoning   of an assistant: the template keeps or drops it
    messages[2].task      and other keys: the template reads them or not

Always true: a key that the server has a meaning for is honoured or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.protocol import invalid_field_error, missing_field_error
from forge.server.tools import check_json_size, parse_tool_calls
from forge.tokenizer import ChatMessage

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every client has. A template may know others."""
MAX_TEMPLATE_ROLES = 4
"""Other roles of one request: to see that the template has them, it renders once more for each."""
MAX_TEMPLATE_KEYS = 32
"""Keys of one message that only a template may read."""

_TEMPLATE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_IDENTIFIER = re.compile(r"[^\s<|\\/>\x00-\x1f\x7f]{1,64}")
REASONING_KEYS = ("reasoning_content", "reasoning")
"""Keys of a message's reasoning: that of most clients, and vLLM's newer one."""
_MESSAGE_KEYS = {"role", "content", "name", "tool_call_id", "tool_calls", *REASONING_KEYS}

# Key that is refused by name -> values that have no effect, besides null.
_UNSUPPORTED_KEYS: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    # Of other servers: the answer continues this message. Here that is continue_final_message.
    "partial": (False,),
    "prefix": (False,),
}
_UNSUPPORTED_PART_TYPES = {
    *("audio_url", "file", "image", "image_embeds", "image_url", "input_audio", "input_image"),
    *("refusal", "thinking", "video", "video_url"),
}


def parse_messages(value: object) -> list[ChatMessage]:
    """Return the messages in `value`, at least one, with a role and text. Raises InvalidRequest."""
    if value is None:
        raise missing_field_error("messages", 'Give [{"role": "user", "content": "..."}]')
    if not isinstance(value, list):
        raise invalid_field_error("messages", "it is not a list", "invalid_type")
    if not value:
        raise InvalidRequest("messages", "there is none", "Give at least one", "empty_messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(
            "messages",
            f"{len(value)} messages, at most {MAX_MESSAGES}",
            "Leave out old ones",
            "too_many_messages",
        )
    return [_parse_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _parse_message(param: str, item: object) -> ChatMessage:
    if not isinstance(item, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    role, template_keys = _parse_role(f"{param}.role", item.get("role")), {}
    for key, value in item.items():
        if key in _MESSAGE_KEYS or value is None:
            continue
        if key not in _UNSUPPORTED_KEYS:
            template_keys[key] = _parse_template_key(param, key, value)
        elif value not in _UNSUPPORTED_KEYS[key]:
            raise InvalidRequest(
                f"{param}.{key}", "it is not supported", "Leave it out", "unsupported_parameter"
            )
    if len(template_keys) > MAX_TEMPLATE_KEYS:
        raise InvalidRequest(
            param,
            f"it has {len(template_keys)} keys that are no fields, at most {MAX_TEMPLATE_KEYS}",
            "Leave some out",
            "too_many_items",
        )
    tool_calls = _parse_tool_calls(f"{param}.tool_calls", role, item.get("tool_calls"))
    reasoning = _parse_reasoning(param, role, item)
    content = item.get("content")
    if content is None and (tool_calls or reasoning):
        content = ""
    content = _parse_content(f"{param}.content", content)
    message: dict[str, Any] = {**template_keys, "role": role, "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    if reasoning:
        message |= dict.fromkeys(REASONING_KEYS, reasoning)
    name, tool_call_id = item.get("name"), item.get("tool_call_id")
    if name is not None:
        message["name"] = _parse_identifier(f"{param}.name", name)
    if role == "tool":
        if tool_call_id is None:
            raise missing_field_error(
                f"{param}.tool_call_id", "Give the id of the call that it answers"
            )
        message["tool_call_id"] = _parse_identifier(f"{param}.tool_call_id", tool_call_id)
    elif tool_call_id is not None:
        raise invalid_field_error(
            f"{param}.tool_call_id", "only a message of a tool has it", "invalid_value"
        )
    return message


def _parse_role(param: str, value: object) -> str:
    """Return the role. Raises InvalidRequest for one that no template has, or that is misspelt."""
    if (
        not isinstance(value, str)
        or value == "function"
        or not _IDENTIFIER.fullmatch(value)
        or (value.lower() in ROLES and value not in ROLES)
    ):
        raise invalid_field_error(
            param,
            f"it is not one of {', '.join(ROLES)}, nor another role that the chat template has",
            "invalid_value",
        )
    return value


def _parse_template_key(param: str, key: str, value: object) -> object:
    """Return the value of a key that only a template may read. Raises InvalidRequest."""
    if not _TEMPLATE_KEY.fullmatch(key):
        raise InvalidRequest(
            f"{param}.{excerpt(key)}",
            "its name is not 1 to 64 letters, digits and _, or begins with a digit",
            "Leave it out",
            "unknown_parameter",
        )
    check_json_size(f"{param}.{key}", value)
    return value


def _parse_tool_calls(param: str, role: str, value: object) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    if role != "assistant":
        raise invalid_field_error(param, "only a message of the assistant has it", "invalid_value")
    calls = parse_tool_calls(param, value)
    for index, call in enumerate(calls):
        call["id"] = _parse_identifier(f"{param}[{index}].id", call["id"])
    return calls


def _parse_reasoning(param: str, role: str, item: Mapping[str, Any]) -> str:
    """Return the reasoning of a message, or "". Raises InvalidRequest."""
    texts = {key: item[key] for key in REASONING_KEYS if item.get(key) is not None}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise invalid_field_error(f"{param}.{key}", "it is not a string", "invalid_type")
        if text and role != "assistant":
            raise invalid_field_error(
                f"{param}.{key}", "only a message of the assistant has it", "invalid_value"
            )
    if len(set(texts.values())) > 1:
        raise InvalidRequest(
            f"{param}.reasoning",
            "reasoning_content has another value",
            "Give only one of them",
            "conflicting_parameters",
        )
    return next(iter(texts.values()), "")


def _parse_content(param: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_field_error(param, "it is neither text nor a list of parts", "invalid_type")
    if not content:
        raise invalid_field_error(param, "it is empty", "invalid_value")
    return "\n".join([_parse_part(param, index, part) for index, part in enumerate(content)])


def _parse_part(param: str, index: int, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid_field_error(param, f"part {index} is not an object", "invalid_type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _UNSUPPORTED_PART_TYPES:
        raise InvalidRequest(
            param,
            f"part {index} is of type {kind}, and only text is supported",
            "Send text",
            "unsupported_parameter",
        )
    text, keys = part.get("text"), part.keys() - {"type", "text"}
    # A hint where to cache: every prefix is cached.
    if keys == {"cache_control"} and isinstance(part["cache_control"], dict | None):
        keys = set()
    if kind != "text" or not isinstance(text, str) or keys:
        raise invalid_field_error(
            param, f'part {index} is not {{"type": "text", "text": "..."}}', "invalid_value"
        )
    return text


def _parse_identifier(param: str, value: object) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        problem = "it is not 1 to 64 characters without spaces, <, >, |, / and \\"
        raise invalid_field_error(param, problem, "invalid_value")
    return value
