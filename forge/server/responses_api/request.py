"""The body of POST /v1/responses, and the chat request that it becomes.

Owns the fields and their translation. Knows no engine and no store.

    instructions, input      messages             max_output_tokens   max_completion_tokens
    tools[0]                 tools[0].function    text.format         response_format
    tool_choice              tool_choice          reasoning.effort    reasoning_effort

Always true: a field is honoured or refused by name, and errors have the names of this API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from forge.errors import InvalidRequest
from forge.request import SamplingParams
from forge.server.chat import REASONING_EFFORTS
from forge.server.chat_fields import ChatFields, TranslatedChat, build_chat
from forge.server.errors import excerpt
from forge.server.nested_fields import check_keys, parse_list, parse_object, parse_string
from forge.server.protocol import (
    MAX_USER_CHARS,
    BooleanField,
    IntegerField,
    MetadataField,
    ShortTextField,
    StringField,
    invalid_field_error,
    missing_field_error,
    unsupported_error,
)
from forge.server.responses_api.items import Item, build_messages
from forge.server.tools import MAX_TOOLS

MAX_INCLUDES = 16
INCLUDES = ("reasoning.encrypted_content",)
"""Values of `include` without effect: the content of reasoning is in its item, in clear text."""
SUMMARIES = ("auto", "concise", "detailed")

# Checked where they are read, which names the place of what is wrong.
InputField = Annotated[
    SkipValidation[str | list[dict[str, Any]] | None],
    Field(description="text, or a list of items"),
]
ToolsField = Annotated[
    SkipValidation[list[dict[str, Any]] | None], Field(description="a list of functions")
]
ToolChoiceField = Annotated[
    SkipValidation[str | dict[str, Any] | None],
    Field(description="none, auto, required, or an object that names a function"),
]
ObjectField = Annotated[SkipValidation[dict[str, Any] | None], Field(description="an object")]
IncludeField = Annotated[
    SkipValidation[list[str] | None], Field(description="a list of names of output")
]

_TOOL_KEYS = {"type", "name", "description", "parameters", "strict"}
_TOOL_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structure": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.function": "tool_choice",
}
_FORMAT_KEYS = {"type", "name", "schema", "description", "strict"}


class ResponsesRequest(ChatFields):
    """The body of POST /v1/responses, with the checks that need no engine."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: InputField = None
    instructions: StringField = None
    previous_response_id: StringField = None
    store: BooleanField = None
    max_output_tokens: IntegerField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: BooleanField = None
    text: ObjectField = None
    reasoning: ObjectField = None
    include: IncludeField = None
    stream_options: ObjectField = None
    thinking_token_budget: IntegerField = None
    metadata: MetadataField = None
    # Accepted without effect.
    client_metadata: MetadataField = None
    max_tool_calls: IntegerField = None
    prompt_cache_retention: ShortTextField = None
    safety_identifier: ShortTextField = None
    service_tier: ShortTextField = None
    user: ShortTextField = None

    def translate(self, previous_items: Sequence[Item], items: Sequence[Item]) -> TranslatedChat:
        """Return the chat request of a conversation. Raises InvalidRequest. May be slow.

        previous_items   items of the response that this one continues
        items            items of `input`
        """
        self._check_options()
        self._check_metadata()
        messages, names = build_messages(self.instructions, previous_items, items)
        names |= _NAMES
        tools = self._chat_tools(names)
        fields = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools,
            "response_format": self._response_format(),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "thinking_token_budget": self.thinking_token_budget,
            **(self._chat_tool_choice(names) if tools else self._check_no_tool_choice()),
        }
        return build_chat(self, fields, names)

    def _check_metadata(self) -> None:
        for key, value in (self.metadata or {}).items():
            if max(len(key), len(value)) > MAX_USER_CHARS:
                raise InvalidRequest(
                    "metadata",
                    f"'{excerpt(key)}' or its value has over {MAX_USER_CHARS} characters",
                    "Shorten it",
                    "string_too_long",
                )

    def _check_options(self) -> None:
        for index, name in enumerate(parse_list("include", self.include or [], MAX_INCLUDES)):
            if name not in INCLUDES:
                raise unsupported_error(
                    f"include[{index}]", f"it is not {', '.join(INCLUDES)}", "Leave it out"
                )
        if self.stream_options is not None:
            options = parse_object("stream_options", self.stream_options)
            check_keys("stream_options", options, (), {"include_obfuscation": (False,)})
        if self.reasoning is not None:
            self._check_reasoning(parse_object("reasoning", self.reasoning))

    def _check_reasoning(self, reasoning: dict[str, Any]) -> None:
        check_keys("reasoning", reasoning, {"effort", "summary", "generate_summary"})
        for key, values in (
            ("effort", REASONING_EFFORTS),
            ("summary", SUMMARIES),
            ("generate_summary", SUMMARIES),
        ):
            value = reasoning.get(key)
            if value is not None and value not in values:
                raise invalid_field_error(
                    f"reasoning.{key}", f"it is not one of {', '.join(values)}"
                )

    def _chat_tools(self, names: dict[str, str]) -> list[dict[str, Any]] | None:
        """Return the tools of the chat, and add the names of their fields to `names`."""
        if self.tools is None:
            return None
        tools = []
        for index, value in enumerate(parse_list("tools", self.tools, MAX_TOOLS)):
            param = f"tools[{index}]"
            tool = parse_object(param, value)
            kind = tool.get("type")
            if kind != "function":
                name = f"'{excerpt(kind)}'" if isinstance(kind, str) else "it"
                raise unsupported_error(
                    f"{param}.type",
                    f"{name} is not function, the only type here",
                    "Give a function, and run it in your program",
                )
            check_keys(param, tool, _TOOL_KEYS, _TOOL_NEUTRAL)
            names[f"{param}.function"] = param
            function = {key: tool[key] for key in _TOOL_KEYS - {"type"} if key in tool}
            tools.append({"type": "function", "function": function})
        return tools

    def _chat_tool_choice(self, names: dict[str, str]) -> dict[str, Any]:
        """Return the fields of a chat that say which tools the answer calls."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            match choice.get("type"):
                case "function":
                    choice = _named_tool("tool_choice", choice)
                case "allowed_tools":
                    choice = self._allowed_tools(choice, names)
                case _:
                    raise unsupported_error(
                        "tool_choice.type",
                        "it is neither function nor allowed_tools",
                        "Name a function",
                    )
        return {"tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}

    def _allowed_tools(self, choice: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        """Return the choice of a chat among these tools."""
        check_keys("tool_choice", choice, {"type", "mode", "tools"})
        tools = []
        for index, value in enumerate(
            parse_list("tool_choice.tools", choice.get("tools"), MAX_TOOLS)
        ):
            param = f"tool_choice.tools[{index}]"
            tools.append(_named_tool(param, parse_object(param, value)))
            names[f"tool_choice.allowed_tools.tools[{index}].function"] = param
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def _check_no_tool_choice(self) -> dict[str, Any]:
        """Return no field; raise InvalidRequest for a choice that needs tools."""
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "there are no tools", "Leave it out, or give tools")
        return {}

    def _response_format(self) -> dict[str, Any] | None:
        """Return the response format of the chat; None for text. Raises InvalidRequest."""
        if self.text is None:
            return None
        text = parse_object("text", self.text)
        check_keys("text", text, {"format", "verbosity"})
        if text.get("verbosity") not in (None, "low", "medium", "high"):
            raise invalid_field_error("text.verbosity", "it is not one of low, medium, high")
        if text.get("format") is None:
            return None
        text_format = parse_object("text.format", text["format"])
        kind = text_format.get("type")
        if kind in ("text", "json_object"):
            check_keys("text.format", text_format, {"type"})
            return None if kind == "text" else {"type": "json_object"}
        if kind != "json_schema":
            raise invalid_field_error(
                "text.format.type", "it is not one of text, json_object, json_schema"
            )
        check_keys("text.format", text_format, _FORMAT_KEYS)
        if text_format.get("schema") is None:
            raise missing_field_error("text.format.schema", "Give a JSON schema")
        for key in ("name", "description"):
            if text_format.get(key) is not None:
                parse_string(f"text.format.{key}", text_format[key])
        parse_object("text.format.schema", text_format["schema"])
        if text_format.get("strict") is not None and not isinstance(text_format["strict"], bool):
            raise invalid_field_error("text.format.strict", "it is not true or false")
        json_schema = {key: text_format[key] for key in text_format.keys() - {"type"}}
        return {"type": "json_schema", "json_schema": json_schema}

    def echo(self, defaults: SamplingParams) -> dict[str, Any]:
        """Return the fields of the response that repeat those of the request.

        defaults   parameters of requests that leave them out
        """
        text: Mapping[str, Any] = self.text or {}
        reasoning: Mapping[str, Any] = self.reasoning or {}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": defaults.temperature if self.temperature is None else self.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [_echo_tool(tool) for tool in self.tools or ()],
            "top_logprobs": 0,
            "top_p": defaults.top_p if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def _named_tool(param: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's form of a function that is named. Raises InvalidRequest."""
    check_keys(param, value, {"type", "name"})
    name = parse_string(f"{param}.name", value.get("name"))
    return {"type": value.get("type"), "function": {"name": name}}


def _echo_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the keys that OpenAI's type requires."""
    return {"parameters": None, "strict": False, **{key: tool[key] for key in tool}}
