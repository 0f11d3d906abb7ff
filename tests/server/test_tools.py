"""Tools over HTTP: requests with tools, the model's calls, and how a client gets them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.async_llm import AsyncLLM
from forge.errors import InvalidRequest
from forge.models.hash import HashModel
from forge.request import Structure
from forge.server.body import MAX_JSON_ITEMS
from forge.server.chat import ChatRequest
from forge.server.output_events import ArgumentsPiece, CallStart, OutputEvent, TextPiece
from forge.server.protocol import parse_request
from forge.server.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    CallableTool,
    CallFormat,
    ToolCallFormat,
    find_format,
)
from forge.server.tool_grammar import ToolGrammarBuilder
from forge.server.tool_parser import ToolCallParser
from forge.server.tools import (
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_TOOL_CALLS,
    MAX_TOOL_PROPERTIES,
    MAX_TOOLS,
    parse_tool_calls,
    parse_tools,
)
from forge.structured_output import LLGuidanceBackend
from forge.tokenizer import ByteTokenizer
from tests.server.test_server import (
    ANSWER,
    RunningServer,
    assert_no_step,
    check_envelope,
    check_serves,
    open_server,
    parse_chunks,
    row_id,
)

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER = tool(description="Of a city", parameters=CITY)
TOOLS = [WEATHER, tool("now")]
NAMED = {"type": "function", "function": {"name": "now"}}


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    """Return the fields of a request with TOOLS of which these may be called."""
    named = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return {"tools": TOOLS, "tool_choice": choice}


ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server(max_model_len=2048, num_blocks=1024) as running:
        yield running
        check_serves(running)


class ScriptedHashModel(HashModel):
    """A model that continues with a given script where it may, and is a hash model elsewhere."""

    def __init__(self, step_s: float) -> None:
        super().__init__(num_blocks=256, block_size=4, step_s=step_s)
        self.script: dict[tuple[int, ...], int] = {}

    def context_logits(self, context: Sequence[int]) -> list[float]:
        logits = super().context_logits(context)
        token = self.script.get(tuple(context))
        if token is not None:
            logits[token] = 100.0
        return logits


@contextmanager
def open_scripted_server(step_s: float = 0.0) -> Iterator[RunningServer]:
    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(step_s)

    with open_server(prepare=prepare, max_model_len=1024, num_blocks=256) as running:
        yield running


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with open_scripted_server() as running:
        yield running


def set_script(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    """Return a request that the model answers with the script."""
    body = {"model": "hash", "messages": USER, "tools": TOOLS, "temperature": 0, **fields}
    tokenizer, model = ByteTokenizer(), server.llm.engine.model
    prompt = parse_request(ChatRequest, body).render_prompt(tokenizer)
    tokens = [*tokenizer.encode(script, parse_special_tokens=False), tokenizer.eos_token]
    assert isinstance(model, ScriptedHashModel)
    model.script = {(*prompt, *tokens[:i]): token for i, token in enumerate(tokens)}
    return body


def choices(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, **{"model": "hash", "messages": USER, "tools": TOOLS, **body})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def stream_choices(server: RunningServer, **body: Any) -> dict[int, list[dict[str, Any]]]:
    """Return the parts of a stream's chunks that belong to each choice."""
    body = {"model": "hash", "messages": USER, "tools": TOOLS, "stream": True, **body}
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in parse_chunks(server.post(PATH, **body).text):
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def message_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message that the deltas of a stream form, as clients join them."""
    content, calls = None, []
    for part in parts:
        delta = part["delta"]
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["function"]["arguments"]) == (len(calls), "")
                assert list(call) == ["index", "id", "type", "function"]
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message = {**ANSWER, "content": content}
    return {**message, "tool_calls": calls} if calls else message


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without the ids of its calls; check that they look like ids."""
    calls = message.get("tool_calls", [])
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call["id"]) for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return {**message, "tool_calls": [call["function"] for call in calls]}


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = without_ids(message)["tool_calls"]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


# Answers.


@pytest.mark.parametrize(
    ("script", "content", "calls", "finish"),
    [
        ("No.", "No.", [], "stop"),
        (ROME, None, [("weather", {"city": "Rome"})], "tool_calls"),
        (f"So\n{ROME}", "So\n", [("weather", {"city": "Rome"})], "tool_calls"),
        (f"{ROME}\n{NOW}", None, [("weather", {"city": "Rome"}), ("now", {})], "tool_calls"),
        ("if a < b <tool_cal", "if a < b <tool_cal", [], "stop"),
        # Only calls of these tools can come: the mask leads the model back.
        (f"{ROME} more", None, None, "tool_calls"),
        (ROME.replace("\n{", " {"), None, None, "tool_calls"),
        (ROME.replace("weather", "wealth"), None, None, "tool_calls"),
        (ROME.replace("Rome", "Paris"), None, None, "tool_calls"),
    ],
    ids=row_id,
)
def test_an_answer_is_text_and_calls_and_a_stream_has_the_same(
    scripted_server: RunningServer,
    script: str,
    content: str | None,
    calls: list[tuple[str, Any]] | None,
    finish: str,
) -> None:
    body = set_script(scripted_server, script)
    (choice,) = choices(scripted_server, **body)
    (parts,) = stream_choices(scripted_server, **body).values()
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (content, finish)
    assert without_ids(message_of(parts)) == without_ids(message)
    assert all(part["delta"]["reasoning_content"] is None for part in parts)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [finish]
    found = calls_of(message)
    if calls is not None:
        assert found == calls
    else:
        assert found and all(call in POSSIBLE for call in found)
    assert ("tool_calls" in message) == (calls != [])


POSSIBLE = [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), ("now", {})]


@pytest.mark.parametrize(
    ("fields", "most", "finish"),
    [
        ({"tool_choice": "required"}, MAX_TOOL_CALLS, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tool_choice": NAMED}, 1, "stop"),
        ({"tool_choice": "required", "temperature": 2.0, "n": 5}, MAX_TOOL_CALLS, "tool_calls"),
    ],
    ids=row_id,
)
def test_a_model_that_must_call_calls_and_nothing_else(
    server: RunningServer, fields: dict[str, Any], most: int, finish: str
) -> None:
    body = {"max_tokens": 1500, "seed": 3, **fields}
    parts = stream_choices(server, **body)
    for choice in choices(server, **body):
        message = choice["message"]
        calls = calls_of(message)
        assert message["content"] is None and calls
        assert len(calls) <= most
        assert all(call in ([("now", {})] if finish == "stop" else POSSIBLE) for call in calls)
        assert choice["finish_reason"] == finish
        assert without_ids(message_of(parts[choice["index"]])) == without_ids(message)


def test_a_tool_of_the_list_as_the_choice_stands_for_its_name() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert parse_tools(TOOLS, tool(description="Of a city", parameters=CITY), None) == parse_tools(
        TOOLS, named, None
    )
    with pytest.raises(InvalidRequest, match=r"tool_choice\.function\.description"):
        parse_tools(TOOLS, tool(description="Of a town", parameters=CITY), None)


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_parallel_tool_calls_decides_whether_a_second_call_may_come(
    scripted_server: RunningServer, parallel: bool | None, count: int
) -> None:
    body = set_script(scripted_server, f"{ROME}\n{NOW}", parallel_tool_calls=parallel)
    for choice in ("auto", "required"):
        (found,) = choices(scripted_server, **body, tool_choice=choice)
        assert len(calls_of(found["message"])) == count


def test_a_tool_that_is_named_is_called_once(scripted_server: RunningServer) -> None:
    body = set_script(scripted_server, f"{NOW}\n{NOW}", tool_choice=NAMED, parallel_tool_calls=True)
    (found,) = choices(scripted_server, **body)
    assert calls_of(found["message"]) == [("now", {})]
    (found,) = choices(scripted_server, **set_script(scripted_server, ROME, tool_choice=NAMED))
    assert calls_of(found["message"]) == [("now", {})]


@pytest.mark.parametrize("cut", ["now", '{"city": "Ro', 'Rome"}', "</tool", "<tool_call>\n{"])
def test_a_call_that_is_cut_is_given_as_far_as_it_came(
    scripted_server: RunningServer, cut: str
) -> None:
    script = f"{ROME}\n{NOW}" if cut in ("now", "<tool_call>\n{") else ROME
    limit = script.rindex(cut) + len(cut)
    body = set_script(scripted_server, script, max_tokens=limit)
    (choice,) = choices(scripted_server, **body)
    (parts,) = stream_choices(scripted_server, **body).values()
    (call,) = without_ids(choice["message"])["tool_calls"]
    whole = '{"city": "Rome"}'
    assert call["name"] == "weather"
    assert call["arguments"] == ('{"city": "Ro' if cut == '{"city": "Ro' else whole)
    assert choice["finish_reason"] == parts[-1]["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert without_ids(message_of(parts)) == without_ids(choice["message"])


def test_what_is_cut_before_the_first_arguments_is_text(scripted_server: RunningServer) -> None:
    limit = ROME.index("weather") + 3
    body = set_script(scripted_server, ROME, max_tokens=limit)
    (choice,) = choices(scripted_server, **body)
    assert choice["message"] == {**ANSWER, "content": ROME[:limit]}
    assert choice["finish_reason"] == "length"


def test_a_stop_string_in_a_call_leaves_an_incomplete_call_that_ends_with_stop(
    scripted_server: RunningServer,
) -> None:
    body = set_script(scripted_server, ROME, stop=["om"])
    (choice,) = choices(scripted_server, **body)
    (call,) = without_ids(choice["message"])["tool_calls"]
    assert (call["arguments"], choice["finish_reason"]) == ('{"city": "R', "stop")


def test_arguments_grow_in_a_stream() -> None:
    with open_scripted_server(step_s=0.002) as slow:
        (parts,) = stream_choices(slow, **set_script(slow, ROME)).values()
    pieces = [
        call["function"]["arguments"]
        for part in parts
        for call in part["delta"].get("tool_calls", ())
    ]
    assert pieces[0] == "" and len(pieces) > 6 and "".join(pieces) == '{"city": "Rome"}'
    first = {"role": "assistant", "content": None, "reasoning_content": None}
    assert parts[0]["delta"] == first


def test_logprobs_of_calls_have_an_entry_for_each_token(scripted_server: RunningServer) -> None:
    body = set_script(scripted_server, f"So {ROME}", logprobs=True)
    (choice,) = choices(scripted_server, **body)
    (parts,) = stream_choices(scripted_server, **body).values()
    whole = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole[:-1]) in f"So {ROME}"
    scored = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
    assert [entry for entries in scored for entry in entries] == whole


def test_tools_that_may_not_be_called_are_not_mentioned(server: RunningServer) -> None:
    body = {"seed": 5, "max_tokens": 30}
    assert choices(server, **body, tool_choice="none", response_format={"type": "text"}) == choices(
        server, **body, tools=None
    )


def test_an_answer_of_a_chat_without_tools_is_not_read_for_calls(
    scripted_server: RunningServer,
) -> None:
    body = set_script(scripted_server, f"So {ROME}", tools=None)
    (choice,) = choices(scripted_server, **body)
    assert choice["message"]["content"] == f"So {ROME}"


def test_a_chat_with_calls_is_rendered_line_by_line() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Rome", "naïve": []}'},
    }
    body = {
        "messages": [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
            {"role": "assistant", "tool_calls": [call, call], "content": "So"},
        ],
        "tools": [tool(strict=True), tool("now", parameters={"properties": {}})],
    }
    ids = parse_request(ChatRequest, body).render_prompt(ByteTokenizer())
    line = 'call: {"id": "call_1", "name": "weather", "arguments": {"city": "Rome", "naïve": []}}'
    nothing = '{"type": "object", "properties": {}, "additionalProperties": false}'
    anything = '{"type": "object", "properties": {}}'
    assert ByteTokenizer().decode(ids).splitlines() == [
        f'function: {{"name": "weather", "parameters": {nothing}}}',
        f'function: {{"name": "now", "parameters": {anything}}}',
        "user: hi",
        "assistant: ",
        line,
        "tool: sunny",
        "assistant: So",
        line,
        line,
        "assistant:",
    ]


# The official client.


def test_the_official_client_calls_tools_and_answers_them(
    scripted_server: RunningServer, openai: Any
) -> None:
    body = set_script(scripted_server, f"So {ROME}")
    url = f"{scripted_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        given: Any = {"model": "hash", "tools": TOOLS, "temperature": 0, "max_tokens": 99}
        whole = client.chat.completions.create(messages=body["messages"], **given).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "So "
        assert whole.message.tool_calls is not None
        (call,) = whole.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        with client.chat.completions.stream(messages=body["messages"], **given) as events:
            kinds = {event.type for event in events}
            final = events.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.tool_calls is not None and final.content == "So "
        assert final.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        back: Any = [*body["messages"], whole.message, result]
        more = client.chat.completions.create(messages=back, **given)
        assert more.usage is not None and more.usage.prompt_tokens > 300
        back[1] = whole.message.model_dump()
        given.update(parallel_tool_calls=False)
        forced = client.chat.completions.create(messages=back, tool_choice="required", **given)
        assert forced.choices[0].finish_reason == "tool_calls"
        named: Any = NAMED
        one = client.chat.completions.create(messages=back, tool_choice=named, **given)
        assert one.choices[0].finish_reason == "stop"
        assert one.choices[0].message.tool_calls is not None
        assert one.choices[0].message.tool_calls[0].function.name == "now"  # type: ignore[union-attr]


# Refusals.


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {"type": "function", "function": fields}]}


def strict_parameters(schema: Any) -> dict[str, Any]:
    return function(name="f", parameters=schema, strict=True)


def parameters(schema: Any) -> dict[str, Any]:
    return function(name="f", parameters=schema)


def chat_with_call(**fields: Any) -> dict[str, Any]:
    """Return a chat with this call; fields that are None are omitted."""
    whole = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    call = {key: value for key, value in whole.items() if value is not None}
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def arguments(text: Any) -> dict[str, Any]:
    return chat_with_call(function={"name": "f", "arguments": text})


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"not": value}
    return value


PLACE = "tools[1].function"
CALL = "messages[1].tool_calls[0]"
ARGUMENTS_PATH = f"{CALL}.function.arguments"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "f"}, "tools", "invalid_type"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools", "too_many_items"),
    ({"tools": [None]}, "tools[0]", "invalid_type"),
    ({"tools": [{}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": 5}]}, "tools[0].function", "invalid_type"),
    ({"tools": [{**WEATHER, "more": 1}]}, "tools[0].more", "unknown_parameter"),
    ({"tools": [WEATHER, WEATHER]}, f"{PLACE}.name", "invalid_value"),
    (function(), f"{PLACE}.name", "missing_required_parameter"),
    (function(name=5), f"{PLACE}.name", "invalid_value"),
    (function(name=""), f"{PLACE}.name", "invalid_value"),
    (function(name="x" * 65), f"{PLACE}.name", "invalid_value"),
    (function(name='a"b'), f"{PLACE}.name", "invalid_value"),
    (function(name="a\n"), f"{PLACE}.name", "invalid_value"),
    (function(name="é"), f"{PLACE}.name", "invalid_value"),
    (function(name="f", more=1), f"{PLACE}.more", "unknown_parameter"),
    (function(name="f", description=5), f"{PLACE}.description", "invalid_type"),
    (function(name="f", description="\ud800"), "tools", "invalid_unicode"),
    (function(name="f", description="x" * 3000), "messages", "context_length_exceeded"),
    (function(name="f", strict="yes"), f"{PLACE}.strict", "invalid_type"),
    (function(name="f", strict=1), f"{PLACE}.strict", "invalid_type"),
    (parameters([]), f"{PLACE}.parameters", "invalid_type"),
    (parameters("{}"), f"{PLACE}.parameters", "invalid_type"),
    (parameters({"type": 5}), f"{PLACE}.parameters.type", "invalid_schema"),
    (parameters({"type": "array"}), f"{PLACE}.parameters.type", "invalid_schema"),
    *(
        (strict_parameters(schema), f"{PLACE}.parameters", "invalid_schema")
        for schema in (
            {"properties": {"a": {"type": 5}}},
            {"properties": {"a": {"type": "string", "pattern": "["}}},
            {"$ref": "https://x/y"},
            {"properties": {"a": {"pattern": "(?=a)b", "type": "string"}}},
            {"properties": {"a": {"uniqueItems": True}}},
        )
    ),
    (parameters(nested(MAX_JSON_DEPTH)), f"{PLACE}.parameters", "invalid_value"),
    (parameters(nested(400)), f"{PLACE}.parameters", "invalid_value"),
    (
        parameters({"properties": {str(i): {} for i in range(MAX_TOOL_PROPERTIES)}}),
        "tools",
        "invalid_schema",
    ),
    (
        {"max_tokens": 1, "tool_choice": "none", **parameters({"type": "string"})},
        f"{PLACE}.parameters.type",
        "invalid_schema",
    ),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": ["auto"]}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.type", "unsupported_parameter"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.allowed_tools",
        "invalid_type",
    ),
    (allowed_tools("none", "now"), "tool_choice.allowed_tools.mode", "invalid_value"),
    (allowed_tools("auto"), "tool_choice.allowed_tools.tools", "invalid_type"),
    (
        allowed_tools("auto", "other"),
        "tool_choice.allowed_tools.tools[0].function.name",
        "invalid_value",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        "tool_choice.function",
        "invalid_type",
    ),
    (
        {"tools": TOOLS, "tool_choice": {**NAMED, "more": 1}},
        "tool_choice.more",
        "unknown_parameter",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {**NAMED, "function": {**NAMED["function"], "more": 1}},
        },
        "tool_choice.function.more",
        "unknown_parameter",
    ),
    (
        {"tools": TOOLS, "tool_choice": tool("other")},
        "tool_choice.function.name",
        "invalid_value",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": ["now"]}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "invalid_value"),
    ({"tools": None, "parallel_tool_calls": False}, "parallel_tool_calls", "invalid_value"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    (
        {"tools": TOOLS, "grammar": 'start: "a"'},
        "grammar",
        "conflicting_parameters",
    ),
    (
        {"tools": TOOLS, "regex": "a", "response_format": {"type": "json_object"}},
        "regex",
        "conflicting_parameters",
    ),
    ({"tools": TOOLS, "allowed_token_ids": [98]}, "allowed_token_ids", "invalid_value"),
    ({"tools": TOOLS, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "un"),
    (chat_with_call(type="custom"), f"{CALL}.type", "unsupported_parameter"),
    (chat_with_call(id=None), f"{CALL}.id", "missing_required_parameter"),
    (chat_with_call(id="a b"), f"{CALL}.id", "invalid_value"),
    (chat_with_call(id=5), f"{CALL}.id", "invalid_value"),
    (chat_with_call(index=0), f"{CALL}.index", "unknown_parameter"),
    (chat_with_call(function="f"), f"{CALL}.function", "invalid_type"),
    (
        chat_with_call(function={"arguments": "{}"}),
        f"{CALL}.function.name",
        "missing_required_parameter",
    ),
    (
        chat_with_call(function={"name": "a b", "arguments": "{}"}),
        f"{CALL}.function.name",
        "invalid_value",
    ),
    (
        chat_with_call(function={"name": "f", "arguments": "{}", "parsed": {}}),
        f"{CALL}.function.parsed",
        "unknown_parameter",
    ),
    (arguments(None), ARGUMENTS_PATH, "invalid_type"),
    (arguments({}), ARGUMENTS_PATH, "invalid_type"),
    (arguments(""), ARGUMENTS_PATH, "invalid_value"),
    (arguments("[]"), ARGUMENTS_PATH, "invalid_value"),
    (arguments('{"a": 1'), ARGUMENTS_PATH, "invalid_value"),
    (arguments('{"a": NaN}'), ARGUMENTS_PATH, "invalid_value"),
    (arguments('{"a": Infinity}'), ARGUMENTS_PATH, "invalid_value"),
    (arguments('{"a": "\\ud800"}'), ARGUMENTS_PATH, "invalid_unicode"),
    (arguments(json.dumps(nested(MAX_JSON_DEPTH))), ARGUMENTS_PATH, "invalid_value"),
    (arguments('{"a": ' + "[" * 100_000), ARGUMENTS_PATH, "invalid_value"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        "messages[0].content",
        "invalid_type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": {}}]},
        "messages[0].tool_calls",
        "invalid_type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [5]}]},
        "messages[0].tool_calls[0]",
        "invalid_type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}] * 129}]},
        "messages[0].tool_calls",
        "too_many_items",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=row_id)
def test_bad_tools_and_calls_are_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str, code: str
) -> None:
    body = json.dumps({"model": "hash", "messages": USER, **fields})
    with assert_no_step(server):
        headers = {"content-type": "application/json"}
        answer = server.client.post(PATH, content=body, headers=headers)
        check_envelope(answer, 400, param, "unsupported_parameter" if code == "un" else code)


@pytest.mark.parametrize(
    ("number", "nearest"),
    [
        ("4e744", sys.float_info.max),
        ("-4e744", -sys.float_info.max),
        ("9" * 5000, sys.float_info.max),
        ("-" + "9" * 5000, -sys.float_info.max),
        ("9" * 400, int("9" * 400)),
        ("-1e-999", 0),
    ],
    ids=["float", "negative", "integer", "negative integer", "large integer", "small"],
)
def test_a_template_gets_the_nearest_number_in_arguments(number: str, nearest: float) -> None:
    messages = arguments(f'{{"a": {number}}}')["messages"]
    (call,) = parse_tool_calls("tool_calls", messages[-1]["tool_calls"])
    assert call["function"]["arguments"] == {"a": nearest}


@pytest.mark.parametrize(
    "template",
    [None, '{{ messages }} <tool_call> "arguments"', "{{ tools }} <tool_call><function="],
)
def test_a_model_without_a_known_format_of_calls_refuses_tools(template: str | None) -> None:
    class Templated(ByteTokenizer):
        chat_template = template  # type: ignore[assignment]

    def prepare(llm: AsyncLLM) -> None:
        llm.tokenizer = Templated()

    with open_server(prepare=prepare) as running:
        response = running.post(PATH, model="hash", messages=USER, tools=TOOLS)
        check_envelope(response, 400, "tools", "unsupported_parameter")
        assert choices(running, tools=None, max_tokens=1)
        if template is not None:
            response = running.post(PATH, model="hash", **chat_with_call())
            check_envelope(response, 400, "messages[1].tool_calls", "unsupported_parameter")


# Grammars.

FUNCTIONS = [
    CallableTool("weather", CITY),
    CallableTool("weathers", {"type": "object", "properties": {"x": {"type": "integer"}}}),
]
VOCABULARY = ByteTokenizer(("<|end|>",))
STRUCTURES = LLGuidanceBackend(VOCABULARY, 257, [0])


def grammar_allows(text: str, form: ToolCallFormat, fewest: int, max_calls: int = 9) -> bool:
    """Return whether the grammar of these tools allows the text as a whole answer."""
    structure = Structure.grammar(
        ToolGrammarBuilder(form, {}).build_grammar(FUNCTIONS, fewest, max_calls)
    )
    matcher = STRUCTURES.create_matcher(structure, allow_end=True)
    tokens = [*VOCABULARY.encode(text, parse_special_tokens=False), 0]
    for index, token in enumerate(tokens):
        if not matcher.mask[token >> 3] >> (token & 7) & 1:
            return False
        if matcher.feed(token):
            return index >= len(tokens) - 2
    return False


JSON_FORMATS = {
    name: form
    for name, form in FORMATS.items()
    if isinstance(form, ToolCallFormat) and form.parameters is None
}
"""Formats whose arguments are a JSON object."""


def format_calls(form: ToolCallFormat, *calls: tuple[str, str]) -> str:
    between = form.separator or ""
    whole = [f"{form.call_prefix(name)}{arguments}{form.call_suffix}" for name, arguments in calls]
    return form.begin + between.join(whole) + form.end


@pytest.mark.parametrize("form", JSON_FORMATS.values(), ids=JSON_FORMATS)
def test_a_grammar_allows_calls_that_fit_and_nothing_else(form: ToolCallFormat) -> None:
    one = format_calls(form, ("weather", '{"city": "Oslo"}'))
    rome = ("weather", '{"city": "Rome"}')
    two = format_calls(form, ("weathers", '{"x": 5, "more": {"}": ["\\"{"]}}'), rome)
    several = form.separator is not None
    for fewest in (0, 1):
        assert grammar_allows(one, form, fewest) and grammar_allows(one, form, fewest, 1)
        assert grammar_allows(two, form, fewest) == several and not grammar_allows(
            two, form, fewest, 1
        )
        assert not grammar_allows(
            format_calls(form, ("weather", '{"city": "Paris"}')), form, fewest
        )
        assert not grammar_allows(format_calls(form, ("weather", '{"city":"Oslo"}')), form, fewest)
        assert not grammar_allows(format_calls(form, ("weathers", "[]")), form, fewest)
        three = format_calls(form, *[("weather", '{"city": "Rome"}')] * 3)
        assert grammar_allows(three, form, fewest, 3) == several and not grammar_allows(
            three, form, fewest, 2
        )
        assert not grammar_allows(one + "x", form, fewest)
        assert not grammar_allows(one[:-1], form, fewest)
    for text in ("", "no {call} <tool> [T]", '{"name": "x", "a": 1}', "\n"):
        assert grammar_allows(text, form, 0) and not grammar_allows(text, form, 1)
        assert grammar_allows(text + one, form, 0)
        assert grammar_allows(text + one, form, 1) == (text == "")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "So\n<tool_call>x"),
        (HERMES, "So <tool_call>\nx"),
        (MISTRAL, "[TOOL_CALLS]x"),
        (LLAMA, 'So {"name": "weather", "x'),
        (LLAMA, '{"name": "weather"}'),
    ],
)
def test_a_call_that_has_started_continues_as_one(form: ToolCallFormat, text: str) -> None:
    assert not grammar_allows(text, form, 0)


@pytest.mark.parametrize("text", ["Use `<tool_call>` now", "a\n <tool_call>", "<tool_call", "\n"])
@pytest.mark.parametrize("form", [HERMES, QWEN3_CODER])
def test_a_sentence_may_mention_the_word_that_begins_a_call(
    form: ToolCallFormat, text: str
) -> None:
    """A template writes it at the beginning of a line, and a line break after it."""
    assert grammar_allows(text, form, 0)
    assert parse_text(form, [text]) == [TextPiece(text)]


def test_remarks_of_a_schema_are_for_the_model_alone(server: RunningServer) -> None:
    """The template gets them. The grammar, whose length is limited, does not."""
    remarks = {"description": "d" * 40_000, "title": "T"}
    named = {"description": {"type": "string", **remarks}, "title": {"const": {"title": "t"}}}
    given = tool(parameters={"properties": named, **remarks})
    parsed = parse_request(ChatRequest, {"messages": USER, "tools": [given]})
    assert parsed.callable_tools is not None
    assert parsed.callable_tools.callable_tools[0].parameters == {
        "type": "object",
        "properties": {"description": {"type": "string"}, "title": {"enum": [{"title": "t"}]}},
    }
    assert len(parsed.render_prompt(ByteTokenizer())) > 80_000


def test_arguments_may_be_a_record_with_any_names(server: RunningServer) -> None:
    """Zod writes a record with `propertyNames`, which llguidance refuses."""
    record = {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    given = [tool(parameters={"type": "object", "maxProperties": 2, **record})]
    body = {"tools": given, "tool_choice": "required", "parallel_tool_calls": False}
    (found,) = choices(server, **body, max_tokens=400, seed=1)
    (call,) = found["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert {type(value) for value in arguments.values()} <= {bool}


def test_the_white_space_options_of_a_schema_are_ignored() -> None:
    schema = {"properties": {"x": {"const": 1}}, "x-guidance": {"whitespace_flexible": True}}
    text = ToolGrammarBuilder(HERMES, {}).build_grammar([CallableTool("f", schema)], 1, 1)
    assert text.count("x-guidance") == 1 and '"whitespace_flexible": false' in text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', HERMES),
        ('{{- "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{- "[TOOL_CALLS][" }}', FORMATS["mistral_compact"]),
        ('\'Respond in the format {"name": function name, "parameters": dictionary\'', LLAMA),
        ('<tool_call>\\n<function=f>"arguments"', None),
        ("<tool_call>\n<function=f>\n<parameter=x>", QWEN3_CODER),
        ('"[TOOL_CALLS]" + name + "[ARGS]"', MISTRAL_ARGS),
        ('"[TOOL_CALLS]" + name + "[CALL_ID]" + id + "[ARGS]"', None),
        ("{{ '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}", FORMATS["granite"]),
        ('<|start_of_role|> <|tool_call|> <tool_call>\n{\\"arguments\\": <args>}', HERMES),
        ("<|tool_call|>", None),
        ('{{- "<|action_start|><|plugin|>\\n" }}{{- \'{"name": "\' }}', FORMATS["internlm"]),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_a_template_decides_the_format(template: str, form: CallFormat | None) -> None:
    assert find_format(template) == form


# The parser.

LETTERS = st.sampled_from('<tool_call>\n</[TOOL_CALLS] {"name": "f", "arguments"\\}x')
SNIPPETS = st.sampled_from(
    [
        *("<tool_call>", "<tool_call>\n", "\n</tool_call>", "[TOOL_CALLS] [", ", ", "]", "}}"),
        *('{"name": "f", "arguments": {', '{"name": "ff", "parameters": {', '{"name": "', "}"),
        *(
            '"\\"}{"',
            '{"a": [{}]}',
            format_calls(HERMES, ("f", "{}")),
            format_calls(MISTRAL, ("ff", "{}")),
        ),
    ]
)
TEXTS = st.lists(LETTERS | SNIPPETS, max_size=30).map("".join)
FORMS = st.sampled_from([*JSON_FORMATS.values()])


def parse_text(
    form: ToolCallFormat, parts: Sequence[str], names: Sequence[str] = ("f", "ff")
) -> list[OutputEvent]:
    """Return the events of a text that comes in these parts, equal neighbours merged."""
    reader = ToolCallParser(form, [CallableTool(name, {}) for name in names])
    events = [event for part in parts for event in reader.push(part)] + reader.flush()
    joined: list[OutputEvent] = []
    for event in events:
        assert event[0], "an event is empty"
        if joined and type(event) is type(joined[-1]) and not isinstance(event, CallStart):
            joined[-1] = type(event)(joined[-1][0] + event[0])
        else:
            joined.append(event)
    return joined


@given(FORMS, TEXTS, st.data())
def test_a_text_has_the_same_events_however_it_is_cut(
    form: ToolCallFormat, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_text(form, parts) == parse_text(form, [text]) == parse_text(form, list(text))


@given(FORMS, TEXTS)
def test_a_text_without_calls_passes_as_it_is(form: ToolCallFormat, text: str) -> None:
    events = parse_text(form, [text])
    if not any(isinstance(event, CallStart) for event in events):
        assert "".join(event[0] for event in events) == text
    assert parse_text(form, [text], names=()) == ([TextPiece(text)] if text else [])


@given(FORMS, TEXTS)
def test_what_is_read_is_in_the_text_and_in_its_order(form: ToolCallFormat, text: str) -> None:
    at = 0
    for event in parse_text(form, [text]):
        found = text.find(event[0], at)
        assert found >= at
        at = found + len(event[0])


KEYS = st.text(st.sampled_from('{}"\\x'), max_size=3)
JSON = st.recursive(
    st.none() | st.integers(-9, 99) | st.text(st.sampled_from('{}[]"\\ax<é\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=2)


@given(FORMS, st.text(st.sampled_from("ab< {")), st.lists(OBJECTS, min_size=1, max_size=3))
def test_calls_are_read_whole_whatever_their_arguments(
    form: ToolCallFormat, before: str, objects: list[Any]
) -> None:
    arguments_texts = [json.dumps(value) for value in objects[: None if form.separator else 1]]
    text = before + format_calls(form, *(("ff", value) for value in arguments_texts))
    expected: list[OutputEvent] = [TextPiece(before)] if before else []
    for value in arguments_texts:
        expected += [CallStart("ff"), ArgumentsPiece(value)]
    assert parse_text(form, [text]) == expected
    reader = ToolCallParser(form, [CallableTool("ff", {})])
    reader.push(text)
    assert not reader.is_open and reader.num_calls == len(arguments_texts)


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    reader = ToolCallParser(HERMES, [CallableTool("f", {})])
    assert reader.push("a <") == [TextPiece("a ")]
    assert reader.push("t") == []
    assert reader.push("x<tool_call>\n{") == [TextPiece("<tx")]
    assert reader.push('"name": "g') == [TextPiece('<tool_call>\n{"name": "g')]
    assert reader.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert reader.push('{"a') == [CallStart("f"), ArgumentsPiece('{"a')]
    assert reader.is_open
    assert reader.push('": 1}}\n</tool_call>') == [ArgumentsPiece('": 1}')]
    assert not reader.is_open and reader.flush() == []


def test_text_after_a_call_is_text_without_the_end_of_the_call() -> None:
    one = [CallStart("f"), ArgumentsPiece("{}")]
    assert parse_text(HERMES, [NOW.replace("now", "f"), " so"]) == [*one, TextPiece(" so")]
    assert parse_text(HERMES, [NOW.replace("now", "f") * 2]) == [*one, *one]
    assert parse_text(LLAMA, ['{"name": "f", "parameters": {}}}']) == [*one, TextPiece("}")]
    assert parse_text(MISTRAL, ['[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"x']) == [
        *one,
        TextPiece('}, {"x'),
    ]


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    """Near misses one after the other, and one long string of quotes and braces."""
    near = ToolCallParser(HERMES, [CallableTool(f"{'f' * 63}{i}", {}) for i in range(10)])
    text = ('<tool_call>\n{"name": "' + "f" * 63) * 300
    assert "".join(event[0] for event in near.push(text) + near.flush()) == text
    inside = ToolCallParser(HERMES, [CallableTool("f", {})])
    long = '{"a": "' + '\\"{' * 200_000
    assert inside.push(f"{HERMES.begin}{HERMES.call_prefix('f')}{long}")[1:] == [
        ArgumentsPiece(long)
    ]


@pytest.mark.long
def test_arguments_that_are_nested_too_deep_are_refused_for_their_depth(
    server: RunningServer,
) -> None:
    body = {"model": "hash", "messages": USER, **arguments(json.dumps(nested(MAX_JSON_DEPTH)))}
    error = server.post(PATH, **body).json()["error"]
    assert error["param"] == ARGUMENTS_PATH
    assert error["message"].startswith(
        f"{ARGUMENTS_PATH}: it is nested deeper than {MAX_JSON_DEPTH}"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": [' + "0," * MAX_JSON_VALUES + "0]}", f"more than {MAX_JSON_VALUES} values"),
        pytest.param(
            '{"a": [' + "[]," * MAX_JSON_ITEMS + "0]}",
            f"more than {MAX_JSON_ITEMS} objects",
            marks=pytest.mark.long,
        ),
    ],
    ids=["values", "items"],
)
def test_arguments_whose_reading_would_delay_others_are_refused(text: str, problem: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    with pytest.raises(InvalidRequest, match=problem):
        parse_tool_calls("calls", [call])
