"""The items of a conversation in /v1/responses: checked, given ids, and made messages of a chat.

Owns the types of items and their keys. Knows no template and no store. An item in its stored form
has an id, a type and a list of parts, so that a later request can use it and a client can list it.

    input                        stored form ──────────► messages of a chat
    "text"                       message                 user
    {"role", "content"}          message                 its role
    {"type": "reasoning"}        reasoning            ┐
    {"type": "message"}          message              ├► one message of the assistant
    {"type": "function_call"}    function_call        ┘
    {..."function_call_output"}  function_call_output    tool

Always true: the output of a call follows the call that it names.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.nested_fields import check_keys, parse_list, parse_object, parse_string
from forge.server.protocol import invalid_field_error, missing_field_error, unsupported_error

MAX_ITEMS = 8192
"""Items of one conversation: those of its input and of earlier turns."""
MAX_PARTS = 1024
"""Parts of one item's content."""
MAX_ID_CHARS = 128

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part with text -> key of its text."""
_PART_KEYS = {"type", "text", "refusal", "annotations", "logprobs"}
_COMMON_KEYS = {"type", "id", "status"}
_ANY_PHASE = ("commentary", "final_answer")
"""Values of `phase`, which says of a message whether it is the last: no template shows it."""
_ASSISTANT_TYPES = ("reasoning", "message", "function_call")
"""Types of the assistant's items, in the order of an output."""
_CALL_NEUTRAL: Mapping[str, tuple[object, ...]] = {"async": (False,), "caller": (), "namespace": ()}
ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
"""Type of an item -> beginning of its id."""


def create_id(prefix: str) -> str:
    """Return a new id, which cannot be guessed."""
    return prefix + secrets.token_hex(24)


def encode_object(value: Mapping[str, Any]) -> str:
    """Return the JSON of an object, on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_items(items: Sequence[Item]) -> bytes:
    """Return the items as JSON, each on a line. Other threads run between two of them."""
    return "".join([f"{encode_object(item)}\n" for item in items]).encode()


def decode_items(lines: bytes) -> list[Item]:
    """Return the items that `encode_items` has written. Other threads run between two of them."""
    return [json.loads(line) for line in lines.splitlines()]


def parse_input(value: object) -> list[Item]:
    """Return the items of a request's input in their stored form. Raises InvalidRequest."""
    if value is None:
        raise missing_field_error("input", "Give a text or a list of items")
    if isinstance(value, str):
        message = _build_message("user", [{"type": "input_text", "text": value}], None)
        return [{"id": create_id(ID_PREFIXES["message"]), **message}]
    if not isinstance(value, list):
        raise invalid_field_error("input", "it is neither text nor a list of items", "invalid_type")
    items = parse_list("input", value, MAX_ITEMS)
    if not items:
        raise InvalidRequest("input", "there is no item", "Give at least one", "empty_messages")
    return [_parse_item(f"input[{index}]", item) for index, item in enumerate(items)]


def _parse_item(param: str, value: object) -> Item:
    item = parse_object(param, value)
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ID_PREFIXES:
        name = f"'{excerpt(kind)}'" if isinstance(kind, str) else "it"
        raise unsupported_error(
            f"{param}.type",
            f"{name} is not one of {', '.join(ID_PREFIXES)}",
            "Send text, and calls of functions",
        )
    match kind:
        case "message":
            parsed = _parse_message(param, item)
        case "function_call":
            parsed = _parse_call(param, item)
        case "function_call_output":
            parsed = _parse_call_output(param, item)
        case _:
            parsed = _parse_reasoning(param, item)
    status = item.get("status")
    if status not in (None, "in_progress", "completed", "incomplete"):
        raise invalid_field_error(
            f"{param}.status", "it is not one of in_progress, completed, incomplete"
        )
    return {
        "id": _parse_item_id(f"{param}.id", item.get("id")) or create_id(ID_PREFIXES[kind]),
        **parsed,
    }


def _parse_item_id(param: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise invalid_field_error(param, f"it is not 1 to {MAX_ID_CHARS} characters")
    return value


def _parse_message(param: str, item: Mapping[str, Any]) -> Item:
    check_keys(param, item, {*_COMMON_KEYS, "role", "content"}, {"phase": _ANY_PHASE})
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_field_error(f"{param}.role", f"it is not one of {', '.join(ROLES)}")
    text_type = "output_text" if role == "assistant" else "input_text"
    texts = _parse_texts(f"{param}.content", item.get("content"))
    parts = [{"type": text_type, "text": text} for text in texts]
    return _build_message(role, parts, item.get("status"))


def _build_message(role: str, parts: list[dict[str, Any]], status: str | None) -> Item:
    if role == "assistant":
        parts = [{**part, "annotations": [], "logprobs": []} for part in parts]
    return {
        "type": "message",
        "role": role,
        "status": status or "completed",
        "content": parts,
    }


def _parse_texts(param: str, value: object) -> list[str]:
    """Return the texts of a content: a string, or a list of parts. Raises InvalidRequest."""
    if isinstance(value, str):
        return [value]
    if value is None:
        raise missing_field_error(param, "Give a text or a list of parts")
    if not isinstance(value, list):
        raise invalid_field_error(param, "it is neither text nor a list of parts", "invalid_type")
    parts = parse_list(param, value, MAX_PARTS)
    return [_parse_part(f"{param}[{index}]", part) for index, part in enumerate(parts)]


def _parse_part(param: str, value: object) -> str:
    part = parse_object(param, value)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        name = f"'{excerpt(kind)}'" if isinstance(kind, str) else "it"
        raise unsupported_error(
            f"{param}.type", f"{name} is not one of {', '.join(_TEXT_PARTS)}", "Send text"
        )
    check_keys(param, part, _PART_KEYS)
    key = _TEXT_PARTS[kind]
    return parse_string(f"{param}.{key}", part.get(key))


def _parse_call(param: str, item: Mapping[str, Any]) -> Item:
    check_keys(param, item, {*_COMMON_KEYS, "call_id", "name", "arguments"}, _CALL_NEUTRAL)
    return {
        "type": "function_call",
        "call_id": parse_string(f"{param}.call_id", item.get("call_id")),
        "name": parse_string(f"{param}.name", item.get("name")),
        "arguments": parse_string(f"{param}.arguments", item.get("arguments")),
        "status": item.get("status") or "completed",
    }


def _parse_call_output(param: str, item: Mapping[str, Any]) -> Item:
    check_keys(param, item, {*_COMMON_KEYS, "call_id", "output"}, {"caller": ()})
    output = item.get("output")
    texts = _parse_texts(f"{param}.output", output)
    return {
        "type": "function_call_output",
        "call_id": parse_string(f"{param}.call_id", item.get("call_id")),
        "output": output
        if isinstance(output, str)
        else [{"type": "input_text", "text": text} for text in texts],
        "status": item.get("status") or "completed",
    }


def _parse_reasoning(param: str, item: Mapping[str, Any]) -> Item:
    check_keys(param, item, {*_COMMON_KEYS, "summary", "content"}, {"encrypted_content": ("",)})
    return {
        "type": "reasoning",
        "summary": _parse_typed_texts(f"{param}.summary", item.get("summary"), "summary_text"),
        "content": _parse_typed_texts(f"{param}.content", item.get("content"), "reasoning_text"),
    }


def _parse_typed_texts(param: str, value: object, kind: str) -> list[dict[str, str]]:
    """Return the parts of a list that are all of this type. Raises InvalidRequest."""
    if value is None:
        return []
    parts = []
    for index, item in enumerate(parse_list(param, value, MAX_PARTS)):
        path = f"{param}[{index}]"
        part = parse_object(path, item)
        check_keys(path, part, {"type", "text"})
        if part.get("type") != kind:
            raise invalid_field_error(f"{path}.type", f"it is not {kind}")
        parts.append({"type": kind, "text": parse_string(f"{path}.text", part.get("text"))})
    return parts


class ChatMessages(NamedTuple):
    """Messages of a chat, and the client's names of their fields."""

    messages: list[dict[str, Any]]
    names: dict[str, str]


def build_messages(
    instructions: str | None, previous_items: Sequence[Item], items: Sequence[Item]
) -> ChatMessages:
    """Return the messages of a conversation. Raises InvalidRequest.

    instructions     text of a system message before all others, or None
    previous_items   items of an earlier response, which were checked
    items            items of the request's input
    """
    num_items = len(previous_items) + len(items)
    if num_items > MAX_ITEMS:
        raise InvalidRequest(
            "input",
            f"with earlier turns there are {num_items} items, at most {MAX_ITEMS}",
            "Send a shorter conversation as input, without previous_response_id",
            "too_many_items",
        )
    builder = _MessageBuilder()
    if instructions is not None:
        builder.add_instructions(instructions)
    for item in previous_items:
        builder.add_item("previous_response_id", item)
    for index, item in enumerate(items):
        builder.add_item(f"input[{index}]", item)
    builder.join_reasoning()
    return ChatMessages(builder.messages, builder.names)


class _MessageBuilder:
    """Makes messages of items. Items of the assistant that follow each other are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names = {"messages": "input"}
        self._call_ids: set[str] = set()
        self._reasoning_texts: dict[int, list[str]] = {}  # by the index of their message
        self._last_rank: int | None = None  # of the open message of the assistant, if there is one

    def add_instructions(self, text: str) -> None:
        """Add the system message of the instructions."""
        self._append({"role": "system", "content": text}, "instructions", content="instructions")

    def add_item(self, param: str, item: Item) -> None:
        """Add an item in its stored form. Raises InvalidRequest for an output without its call."""
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = self._open_assistant(param, "message")
                message["content"] = join_texts(item["content"])
                self.names[f"{self._last_path}.content"] = f"{param}.content"
            case "message":
                message = {"role": item["role"], "content": join_texts(item["content"])}
                self._append(message, param, content=f"{param}.content")
            case "function_call":
                self._add_call(param, item)
            case "function_call_output":
                self._add_call_output(param, item)
            case _:
                self._open_assistant(param, "reasoning")
                texts = self._reasoning_texts.setdefault(len(self.messages) - 1, [])
                texts += filter(None, _reasoning_texts(item))

    def join_reasoning(self) -> None:
        """Give messages the texts of their reasoning. Once, after all items: there may be many."""
        for index, texts in self._reasoning_texts.items():
            self.messages[index]["reasoning_content"] = "\n".join(texts)

    @property
    def _last_path(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _append(self, message: dict[str, Any], param: str, **names: str) -> None:
        self.messages.append(message)
        self.names[self._last_path] = param
        self.names |= {f"{self._last_path}.{field}": name for field, name in names.items()}
        self._last_rank = None

    def _open_assistant(self, param: str, kind: str) -> dict[str, Any]:
        """Return the open message of the assistant, or a new one where this item begins one."""
        rank, last_rank = _ASSISTANT_TYPES.index(kind), self._last_rank
        if last_rank is None or rank < last_rank or (rank == last_rank and kind == "message"):
            self._append({"role": "assistant", "content": ""}, param)
        self._last_rank = rank
        return self.messages[-1]

    def _add_call(self, param: str, item: Item) -> None:
        message = self._open_assistant(param, "function_call")
        if item["status"] == "incomplete":
            return  # Its arguments are cut: no template can write them, and it has no output.
        calls = message.setdefault("tool_calls", [])
        path = f"{self._last_path}.tool_calls"
        self.names[f"{path}[{len(calls)}]"] = param
        self.names[f"{path}[{len(calls)}].function"] = param
        self.names[f"{path}[{len(calls)}].id"] = f"{param}.call_id"
        self.names[path] = param  # of an error about all calls: the last one
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls.append({"id": item["call_id"], "type": "function", "function": function})
        self._call_ids.add(item["call_id"])

    def _add_call_output(self, param: str, item: Item) -> None:
        if item["call_id"] not in self._call_ids:
            raise InvalidRequest(
                f"{param}.call_id",
                "no function_call before it has this call_id",
                "Send the call as well, or previous_response_id",
            )
        output = item["output"]
        content = output if isinstance(output, str) else join_texts(output)
        message = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
        self._append(message, param, content=f"{param}.output", tool_call_id=f"{param}.call_id")


def _reasoning_texts(item: Item) -> list[str]:
    """Return the texts of a reasoning: its content, or else its summary."""
    return [part["text"] for part in item["content"] or item["summary"]]


def join_texts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of parts, with a line each, as in a chat."""
    return "\n".join(part["text"] for part in parts)
