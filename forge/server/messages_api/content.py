"""The messages of /v1/messages: their blocks, checked and made messages of a chat.

Owns the types of blocks and their keys. Knows no template.

    system                 text, or blocks of text      system
    user                   text                         user
                           tool_result                  tool, a message each
    assistant              text, tool_use, thinking     assistant, with tool_calls and
                                                        reasoning_content

Always true: the result of a tool follows the call that it names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.messages import MAX_MESSAGES
from forge.server.nested_fields import check_keys, parse_list, parse_object, parse_string
from forge.server.protocol import invalid_field_error, missing_field_error, unsupported_error
from forge.server.tools import check_json_size

MAX_BLOCKS = 1024
"""Blocks of one message."""

ROLES = ("user", "assistant", "system")
_BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
_TEXT_NEUTRAL: Mapping[str, tuple[object, ...]] = {"citations": ([],)}
_TOOL_USE_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "caller": ({"type": "direct"},),
    "toolset_name": (),
}


class MessageBuilder:
    """Makes messages of a chat of a conversation, with the client's names of their fields.

    messages   messages so far
    names      names of fields of the chat -> names of the request
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self._call_ids: set[str] = set()

    def add_system(self, value: object) -> None:
        """Add the system prompt, text or blocks of text. Raises InvalidRequest."""
        texts = [value] if isinstance(value, str) else _parse_text_blocks("system", value)
        if texts:
            self._append("system", "system", texts)

    def add_messages(self, value: object) -> None:
        """Add the messages of a request. Raises InvalidRequest."""
        if value is None:
            raise missing_field_error("messages", 'Give [{"role": "user", "content": "..."}]')
        messages = parse_list("messages", value, MAX_MESSAGES)
        if not messages:
            raise InvalidRequest("messages", "there is none", "Give at least one", "empty_messages")
        for index, message in enumerate(messages):
            self._add_message(f"messages[{index}]", message)

    @property
    def ends_with_text(self) -> bool:
        """Return whether the last message is text of the assistant, which the answer continues."""
        last = self.messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def _add_message(self, param: str, value: object) -> None:
        message = parse_object(param, value)
        check_keys(param, message, {"role", "content"})
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid_field_error(f"{param}.role", f"it is not one of {', '.join(ROLES)}")
        content, path = message.get("content"), f"{param}.content"
        if content is None:
            raise missing_field_error(path, "Give a text or a list of blocks")
        if isinstance(content, str):
            self._append(role, param, [content])
            return
        if not isinstance(content, list):
            problem = "it is neither text nor a list of blocks"
            raise invalid_field_error(path, problem, "invalid_type")
        blocks = parse_list(path, content, MAX_BLOCKS)
        if not blocks:
            raise invalid_field_error(path, "it is empty")
        self._add_blocks(param, role, blocks)

    def _add_blocks(self, param: str, role: str, blocks: Sequence[Any]) -> None:
        """Add the messages of these blocks: texts that follow each other are one of them."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, item in enumerate(blocks):
            path = f"{param}.content[{index}]"
            block = parse_object(path, item)
            match parse_block_type(path, block, _BLOCK_TYPES[role]):
                case "text":
                    texts.append(_parse_text(path, block))
                case "thinking":
                    check_keys(path, block, {*_BLOCK_KEYS, "thinking", "signature"})
                    thoughts.append(parse_string(f"{path}.thinking", block.get("thinking")))
                case "tool_use":
                    self._name_call(len(calls), path)
                    calls.append(self._parse_tool_use(path, block))
                case _:
                    if texts:
                        self._append(role, param, texts)
                        texts = []
                    self._add_tool_result(path, block)
        if texts or calls or thoughts:
            self._append(role, param, texts)
        if thoughts:
            self.messages[-1]["reasoning_content"] = "\n".join(thoughts)
        if calls:
            self.messages[-1]["tool_calls"] = calls

    def _append(self, role: str, param: str, texts: Sequence[str]) -> None:
        path = f"messages[{len(self.messages)}]"
        self.names[path] = param
        if param == "system":
            self.names[f"{path}.content"] = "system"
        self.messages.append({"role": role, "content": "\n".join(texts)})

    def _name_call(self, index: int, param: str) -> None:
        """Add the names of the fields of a call of the message that is added next."""
        path = f"messages[{len(self.messages)}].tool_calls"
        self.names[path] = param
        self.names[f"{path}[{index}]"] = self.names[f"{path}[{index}].function"] = param
        self.names[f"{path}[{index}].function.arguments"] = f"{param}.input"

    def _parse_tool_use(self, param: str, block: Mapping[str, Any]) -> dict[str, Any]:
        check_keys(param, block, {*_BLOCK_KEYS, "id", "name", "input"}, _TOOL_USE_NEUTRAL)
        call_id = parse_string(f"{param}.id", block.get("id"))
        name = parse_string(f"{param}.name", block.get("name"))
        arguments = parse_object(f"{param}.input", block.get("input"))
        check_json_size(f"{param}.input", arguments)
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": call_id, "type": "function", "function": function}

    def _add_tool_result(self, param: str, block: Mapping[str, Any]) -> None:
        keys = {*_BLOCK_KEYS, "tool_use_id", "content", "is_error"}
        check_keys(param, block, keys, {"toolset_name": ()})
        call_id = parse_string(f"{param}.tool_use_id", block.get("tool_use_id"))
        if call_id not in self._call_ids:
            raise invalid_field_error(
                f"{param}.tool_use_id", "no tool_use before it has this id", "invalid_value"
            )
        if not isinstance(block.get("is_error"), bool | None):
            raise invalid_field_error(f"{param}.is_error", "it is not true or false")
        content = block.get("content")
        texts = [content] if isinstance(content, str) else []
        if content is not None and not texts:
            texts = _parse_text_blocks(f"{param}.content", content)
        path = f"messages[{len(self.messages)}]"
        self._append("tool", param, texts)
        self.messages[-1]["tool_call_id"] = call_id
        self.names[f"{path}.tool_call_id"] = f"{param}.tool_use_id"


_BLOCK_KEYS = {"type", "cache_control"}


def parse_block_type(param: str, block: Mapping[str, Any], types: Sequence[str]) -> str:
    """Return the type of a block, one of these. Raises InvalidRequest."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in types:
        name = f"'{excerpt(kind)}'" if isinstance(kind, str) else "it"
        raise unsupported_error(
            f"{param}.type", f"{name} is not one of {', '.join(types)} here", "Send text"
        )
    check_cache_control(param, block)
    return kind


def check_cache_control(param: str, block: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a `cache_control` that is no object. It has no effect."""
    if block.get("cache_control") is not None:
        parse_object(f"{param}.cache_control", block["cache_control"])


def _parse_text_blocks(param: str, value: object) -> list[str]:
    """Return the texts of a list of blocks that are all of text. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise invalid_field_error(param, "it is neither text nor a list of blocks", "invalid_type")
    texts = []
    for index, item in enumerate(parse_list(param, value, MAX_BLOCKS)):
        path = f"{param}[{index}]"
        block = parse_object(path, item)
        parse_block_type(path, block, ("text",))
        texts.append(_parse_text(path, block))
    return texts


def _parse_text(param: str, block: Mapping[str, Any]) -> str:
    check_keys(param, block, {*_BLOCK_KEYS, "text"}, _TEXT_NEUTRAL)
    return parse_string(f"{param}.text", block.get("text"))
