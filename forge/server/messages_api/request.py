"""The body of POST /v1/messages, and the chat request that it becomes.

Owns the fields and their translation. Knows no engine.

    system, messages    messages                  max_tokens       max_completion_tokens
    tools[0]            tools[0].function         stop_sequences   stop
    tool_choice         tool_choice,              output_config    response_format,
                        parallel_tool_calls                        reasoning_effort
    thinking            chat_template_kwargs

Always true: a field is honoured or refused by name, and errors have the names of this API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from forge.errors import InvalidRequest
from forge.server.chat import MAX_THINKING_TOKENS
from forge.server.chat_fields import ChatFields, TranslatedChat, build_chat
from forge.server.errors import excerpt
from forge.server.messages_api.content import MessageBuilder, check_cache_control
from forge.server.nested_fields import check_keys, parse_list, parse_object, parse_string
from forge.server.protocol import (
    IntegerField,
    invalid_field_error,
    missing_field_error,
    unsupported_error,
)
from forge.server.tools import MAX_TOOLS

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
"""Value of output_config.effort -> reasoning_effort of a chat."""
NO_THINKING = {"enable_thinking": False, "thinking": False}
"""Variables with which templates do not let a model think, where they can."""
THINKING_KEYS = {
    "adaptive": {"type", "display"},
    "disabled": {"type"},
    "enabled": {"type", "budget_tokens", "display"},
}
"""Type of thinking -> its keys. `display` has no effect."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Type of a choice -> tool_choice of a chat; `tool` names one."""

# Checked where they are read, which names the place of what is wrong.
MessagesField = Annotated[
    SkipValidation[list[dict[str, Any]] | None],
    Field(description="a list of messages, each with a role and a content"),
]
SystemField = Annotated[
    SkipValidation[str | list[dict[str, Any]] | None],
    Field(description="text, or a list of blocks of text"),
]
ToolsField = Annotated[
    SkipValidation[list[dict[str, Any]] | None], Field(description="a list of tools")
]
ObjectField = Annotated[SkipValidation[dict[str, Any] | None], Field(description="an object")]
StopField = Annotated[list[str] | None, Field(description="a list of strings")]

_TOOL_KEYS = {"name", "description", "input_schema", "strict"}
_UNUSED_TOOL_KEYS = {"type", "cache_control", "eager_input_streaming"}
_TOOL_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "structure": "output_config.format",
}


class MessagesRequest(ChatFields):
    """The body of POST /v1/messages, with the checks that need no engine."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    messages: MessagesField = None
    system: SystemField = None
    max_tokens: IntegerField = None
    stop_sequences: StopField = None
    tools: ToolsField = None
    tool_choice: ObjectField = None
    thinking: ObjectField = None
    output_config: ObjectField = None
    # Accepted without effect.
    cache_control: ObjectField = None
    context_management: ObjectField = None
    metadata: ObjectField = None

    def check_max_tokens(self) -> None:
        """Raise InvalidRequest without max_tokens, which an answer needs."""
        if self.max_tokens is None:
            raise missing_field_error("max_tokens", "Give the most tokens of the answer")

    def translate(self) -> TranslatedChat:
        """Return the chat request. Raises InvalidRequest. May be slow."""
        builder = MessageBuilder()
        if self.system is not None:
            builder.add_system(self.system)
        builder.add_messages(self.messages)
        self._check_unused()
        names = builder.names | _NAMES
        tools, response_format = self._chat_tools(names), self._response_format()
        fields: dict[str, Any] = {
            "messages": builder.messages,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": tools,
            "response_format": response_format,
            "reasoning_effort": EFFORTS.get((self.output_config or {}).get("effort") or ""),
            **self._chat_tool_choice(tools),
        }
        if self._allows_thinking():
            fields["thinking_token_budget"] = (self.thinking or {}).get("budget_tokens")
        else:
            fields["chat_template_kwargs"] = NO_THINKING | (self.chat_template_kwargs or {})
        if builder.ends_with_text:
            fields["continue_final_message"] = True
        return build_chat(self, fields, names)

    def _check_unused(self) -> None:
        """Raise InvalidRequest for fields of a wrong type that have no effect."""
        for name in ("cache_control", "context_management", "metadata"):
            value = getattr(self, name)
            if value is not None:
                parse_object(name, value)

    def _allows_thinking(self) -> bool:
        """Return whether the model may think before it answers. Raises InvalidRequest."""
        if self.thinking is None:
            return False
        thinking = parse_object("thinking", self.thinking)
        kind = thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKING_KEYS:
            raise invalid_field_error(
                "thinking.type", f"it is not one of {', '.join(THINKING_KEYS)}"
            )
        check_keys("thinking", thinking, THINKING_KEYS[kind])
        budget = thinking.get("budget_tokens", 1)
        if type(budget) is not int or not 1 <= budget <= MAX_THINKING_TOKENS:
            raise invalid_field_error(
                "thinking.budget_tokens", f"it is not an integer from 1 to {MAX_THINKING_TOKENS}"
            )
        if thinking.get("display") not in (None, "summarized", "omitted"):
            raise invalid_field_error("thinking.display", "it is neither summarized nor omitted")
        return kind != "disabled"

    def _chat_tools(self, names: dict[str, str]) -> list[dict[str, Any]] | None:
        """Return the tools of the chat, and add the names of their fields to `names`."""
        if self.tools is None:
            return None
        tools = []
        for index, value in enumerate(parse_list("tools", self.tools, MAX_TOOLS)):
            param = f"tools[{index}]"
            tool = parse_object(param, value)
            kind = tool.get("type")
            if kind not in (None, "custom"):
                name = f"'{excerpt(kind)}'" if isinstance(kind, str) else "it"
                raise unsupported_error(
                    f"{param}.type",
                    f"{name} is not custom, the only type here",
                    "Give a tool with an input_schema, and run it in your program",
                )
            check_keys(param, tool, _TOOL_KEYS | _UNUSED_TOOL_KEYS, _TOOL_NEUTRAL)
            check_cache_control(param, tool)
            if tool.get("input_schema") is None:
                raise missing_field_error(f"{param}.input_schema", "Give a JSON schema")
            names[f"{param}.function"] = param
            names[f"{param}.function.parameters"] = f"{param}.input_schema"
            function = {key: tool[key] for key in _TOOL_KEYS - {"input_schema"} if key in tool}
            function["parameters"] = tool["input_schema"]
            tools.append({"type": "function", "function": function})
        return tools

    def _chat_tool_choice(self, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the fields of a chat that say which tools the answer calls."""
        if self.tool_choice is None:
            return {}
        choice = parse_object("tool_choice", self.tool_choice)
        check_keys("tool_choice", choice, {"type", "name", "disable_parallel_tool_use"})
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in (*TOOL_CHOICES, "tool"):
            raise invalid_field_error(
                "tool_choice.type", f"it is not one of {', '.join(TOOL_CHOICES)}, tool"
            )
        is_single = choice.get("disable_parallel_tool_use")
        if not isinstance(is_single, bool | None):
            raise invalid_field_error(
                "tool_choice.disable_parallel_tool_use", "it is not true or false"
            )
        if not tools:
            if kind in ("any", "tool"):
                raise InvalidRequest(
                    "tool_choice", "there are no tools", "Leave it out, or give tools"
                )
            return {}
        if kind != "tool":
            return {
                "tool_choice": TOOL_CHOICES[kind],
                "parallel_tool_calls": False if is_single else None,
            }
        name = parse_string("tool_choice.name", choice.get("name"))
        if name not in [tool["function"].get("name") for tool in tools]:
            raise invalid_field_error("tool_choice.name", "there is no tool of this name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}}

    def _response_format(self) -> dict[str, Any] | None:
        """Return the response format of the chat; None for text. Raises InvalidRequest."""
        if self.output_config is None:
            return None
        config = parse_object("output_config", self.output_config)
        check_keys("output_config", config, {"effort", "format"})
        effort = config.get("effort")
        if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
            raise invalid_field_error(
                "output_config.effort", f"it is not one of {', '.join(EFFORTS)}"
            )
        if config.get("format") is None:
            return None
        param = "output_config.format"
        output_format = parse_object(param, config["format"])
        check_keys(param, output_format, {"type", "schema"})
        if output_format.get("type") != "json_schema":
            raise invalid_field_error(f"{param}.type", "it is not json_schema")
        if output_format.get("schema") is None:
            raise missing_field_error(f"{param}.schema", "Give a JSON schema")
        schema = parse_object(f"{param}.schema", output_format["schema"])
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


class CountTokensRequest(MessagesRequest):
    """The body of POST /v1/messages/count_tokens: that of /v1/messages, also without max_tokens."""
