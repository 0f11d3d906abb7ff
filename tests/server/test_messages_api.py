"""/v1/messages: what Anthropic's client sends and gets, its events, stop reasons and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from forge.server.messages_api.content import MAX_BLOCKS
from forge.server.messages_api.request import MessagesRequest
from forge.server.protocol import parse_request
from forge.tokenizer import ByteTokenizer
from tests.server.local_server import wait_until
from tests.server.test_openapi import find_faults
from tests.server.test_responses import open_gated_server, open_thinking_server
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.server.test_tools import CITY, NOW, ROME, ScriptedHashModel

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": CITY}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object", "properties": {}}}]
ANY = {"type": "any"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server(max_model_len=1024, num_blocks=512) as running:
        yield running
        wait_until(running.is_idle)


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with open_thinking_server() as running:
        yield running


def build_body(**fields: Any) -> dict[str, Any]:
    return {"model": "hash", "max_tokens": 8, "messages": USER, "temperature": 0, **fields}


def create(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """Return a message, which must succeed."""
    answer = server.post(PATH, **build_body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream; check their names."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def join_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream. Checks the order of the events."""
    start, ping, *inner, delta, stop = events
    assert (start["type"], ping, stop) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    is_open = False
    for event in inner:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "pieces": []})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                message["content"][-1]["pieces"].append(event["delta"])
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    for block in message["content"]:
        pieces = block.pop("pieces")
        match block["type"]:
            case "text":
                assert {piece["type"] for piece in pieces} <= {"text_delta"}
                block["text"] += "".join(piece["text"] for piece in pieces)
            case "thinking":
                assert {piece["type"] for piece in pieces} <= {"thinking_delta"}
                block["thinking"] += "".join(piece["thinking"] for piece in pieces)
            case _:
                assert {piece["type"] for piece in pieces} <= {"input_json_delta"}
                block["input"] = json.loads("".join(piece["partial_json"] for piece in pieces))
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, **build_body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def num_prompt_tokens(usage: Mapping[str, int]) -> int:
    """Return the tokens of the prompt: each is computed, computed and kept, or found."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in names)


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what differs between two equal ones."""
    blocks = [
        {key: value for key, value in block.items() if key != "id"} for block in message["content"]
    ]
    usage = message["usage"]
    counts = (num_prompt_tokens(usage), usage["output_tokens"])
    return {**message, "id": "", "content": blocks, "usage": counts}


def set_script(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a request that the model answers with the script."""
    fields = {"tools": TOOLS, "max_tokens": 200, **fields}
    tokenizer, model = ByteTokenizer(), server.llm.engine.model
    request_body = parse_request(MessagesRequest, build_body(**fields))
    prompt = request_body.translate().request_body.render_prompt(tokenizer)
    tokens = [*tokenizer.encode(script, parse_special_tokens=False), tokenizer.eos_token]
    assert isinstance(model, ScriptedHashModel)
    model.script = {(*prompt, *tokens[:i]): token for i, token in enumerate(tokens)}
    return fields


# Messages and their streams.


def test_a_message_has_the_text_that_a_chat_of_the_same_messages_has(
    server: RunningServer,
) -> None:
    messages = [{"role": "system", "content": "Be\nbrief"}, *USER]
    answer = server.post(
        "/v1/chat/completions", model="hash", messages=messages, max_tokens=8, temperature=0
    ).json()
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be", **cached}, {"type": "text", "text": "brief"}]
    message = create(server, system=system)
    assert message["content"] == [
        {"type": "text", "text": answer["choices"][0]["message"]["content"]}
    ]
    assert (message["type"], message["role"], message["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    usage = message["usage"]
    assert num_prompt_tokens(usage) == answer["usage"]["prompt_tokens"]
    assert usage["cache_read_input_tokens"] >= 16  # the chat has just computed them


@pytest.mark.parametrize("num_more", [0, 3], ids=["a full last block", "a rest"])
def test_tokens_of_a_prompt_are_read_from_the_cache_written_to_it_or_neither(
    server: RunningServer, num_more: int
) -> None:
    """A block has four tokens, and a prompt computes one token at least."""
    num_written = 48
    fixed = len("user: \nassistant:")
    text = "w" * (num_written + num_more - fixed)
    fields = {"messages": [{"role": "user", "content": text}], "cache_salt": f"w{num_more}"}
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    first, again = (create(server, **fields)["usage"] for _ in range(2))
    assert [first[kind] for kind in kinds] == [num_more, num_written, 0]
    num_read = num_written if num_more else num_written - 4
    assert [again[kind] for kind in kinds] == [num_written + num_more - num_read, 0, num_read]
    start, *_, delta, _ = stream(server, **fields)
    assert num_prompt_tokens(start["message"]["usage"]) == start["message"]["usage"]["input_tokens"]
    assert num_prompt_tokens(delta["usage"]) == num_written + num_more


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 500},
        {"stop_sequences": ["e", "t"], "max_tokens": 100},
        {"system": "Be brief", "metadata": {"user_id": "u"}, "top_k": 3, "seed": 1},
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}, "max_tokens": 100},
    ],
    ids=["short", "whole", "stop", "fields", "schema"],
)
def test_a_stream_has_the_events_of_the_whole_message(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    whole, events = create(server, **fields), stream(server, **fields)
    assert without_ids(join_events(events)) == without_ids(whole)
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_is_named(server: RunningServer) -> None:
    text = create(server, max_tokens=40)["content"][0]["text"]
    stop = text[5:8]
    message = create(server, max_tokens=40, stop_sequences=["\x00", stop, stop + "\x00"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    whole = create(server, max_tokens=900, stop_sequences=["\x00"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_text_and_calls_are_blocks(scripted_server: RunningServer, is_stream: bool) -> None:
    fields = set_script(scripted_server, f"See: {ROME}")
    message = create(scripted_server, **fields)
    if is_stream:
        message = join_events(stream(scripted_server, **fields))
    text, call = message["content"]
    assert text == {"type": "text", "text": "See: "}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("is_stream", [False, True])
def test_thinking_is_a_block_before_the_others(
    scripted_server: RunningServer, is_stream: bool
) -> None:
    thought = "<think>\nWhy?\n</think>\n\n"
    fields = set_script(
        scripted_server,
        f"{thought}See: {ROME}",
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    message = create(scripted_server, **fields)
    if is_stream:
        message = join_events(stream(scripted_server, **fields))
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Why?", "signature": ""}
    assert (text["text"], call["name"]) == ("See: ", "weather")
    details = message["usage"]["output_tokens_details"]
    assert details == {"thinking_tokens": len(thought) - 2}
    # The blocks can be sent back unchanged.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "31"}
    history = [
        *USER,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    create(scripted_server, messages=history, tools=TOOLS)
    body = parse_request(MessagesRequest, build_body(messages=history))
    chat = body.translate().request_body
    assert chat.messages is not None
    assert chat.messages[1]["reasoning_content"] == "Why?"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {
                "thinking": {"type": "enabled", "budget_tokens": 9},
                "output_config": {"effort": "max"},
            },
            {"reasoning_effort": "xhigh"},
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": False},
        ),
    ],
    ids=["none", "disabled", "adaptive", "enabled", "by the template's name"],
)
def test_a_model_thinks_where_the_request_says_so(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    chat = parse_request(MessagesRequest, build_body(**fields)).translate().request_body
    assert chat.template_variables() == variables


@pytest.mark.parametrize(
    ("choice", "script", "names"),
    [
        (ANY, NOW, ["now"]),
        ({"type": "tool", "name": "now"}, NOW, ["now"]),
        ({"type": "auto"}, f"{ROME}\n{NOW}", ["weather", "now"]),
        ({"type": "none"}, "No", []),
    ],
    ids=["any", "tool", "auto", "none"],
)
def test_a_choice_of_tools_is_that_of_a_chat(
    scripted_server: RunningServer, choice: dict[str, Any], script: str, names: list[str]
) -> None:
    fields = set_script(scripted_server, script, tool_choice=choice)
    message = create(scripted_server, **fields)
    assert [block["name"] for block in message["content"] if "name" in block] == names
    assert message["stop_reason"] == ("tool_use" if names else "end_turn")


def test_one_call_at_most_where_parallel_calls_are_disabled(
    scripted_server: RunningServer,
) -> None:
    choice = {**ANY, "disable_parallel_tool_use": True}
    fields = set_script(scripted_server, f"{ROME}\n{NOW}", tool_choice=choice)
    assert len(create(scripted_server, **fields)["content"]) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": len(ROME) - 20}, "max_tokens"),
        ({"stop_sequences": ["Ro"]}, "stop_sequence"),
    ],
    ids=["length", "text"],
)
def test_a_call_that_is_cut_is_not_one_to_run(
    scripted_server: RunningServer, fields: dict[str, Any], reason: str
) -> None:
    alone = set_script(scripted_server, ROME, tool_choice=ANY)
    message = create(scripted_server, **{**alone, **fields})
    assert (message["stop_reason"], message["content"]) == (reason, [{"type": "text", "text": ""}])
    last = stream(scripted_server, **{**alone, **fields})[-2]
    assert last["delta"]["stop_reason"] == reason
    if "max_tokens" not in fields:
        after_text = set_script(scripted_server, f"See: {ROME}")
        message = create(scripted_server, **{**after_text, **fields})
        assert (message["stop_reason"], message["content"]) == (
            reason,
            [{"type": "text", "text": "See: "}],
        )


def test_the_input_of_a_call_is_the_text_of_the_model(scripted_server: RunningServer) -> None:
    """No float of Python has as many digits as this number."""
    number = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}
    script = ROME.replace("weather", "f").replace(
        '{"city": "Rome"}', '{"a": [0.12345678901234567890, "\u00e9"]}'
    )
    fields = set_script(scripted_server, script, tools=[number], tool_choice=ANY)
    answer = scripted_server.post(PATH, **build_body(**fields))
    assert answer.status_code == 200, answer.text
    assert '"input":{"a": [0.12345678901234567890, "\u00e9"]}}]' in answer.text
    assert answer.json()["stop_reason"] == "tool_use"


def test_blocks_become_messages_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "c", "citations": None},
                {"type": "tool_use", "id": "1", "name": "now", "input": {}},
                {"type": "tool_use", "id": "2", "name": "now", "input": {"x": [1, "\u00e9"]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "noon", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "one"}],
                },
                {"type": "tool_result", "tool_use_id": "1"},
                {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    body = parse_request(MessagesRequest, build_body(messages=messages, system="s"))
    chat = body.translate().request_body
    assert chat.messages is not None and chat.max_completion_tokens == 8
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("system", "s"),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", "noon"),
        ("tool", "one"),
        ("tool", ""),
        ("user", "d"),
    ]
    calls = chat.messages[2]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {},
        {"x": [1, "\u00e9"]},
    ]
    assert [m["tool_call_id"] for m in chat.messages[3:6]] == ["2", "1", "1"]


def test_an_answer_continues_a_last_message_of_the_assistant(server: RunningServer) -> None:
    begun = [*USER, {"role": "assistant", "content": "Well"}]
    answer = server.post(
        "/v1/chat/completions",
        model="hash",
        messages=begun,
        continue_final_message=True,
        max_tokens=8,
        temperature=0,
    ).json()
    text = create(server, messages=begun)["content"][0]["text"]
    assert text == answer["choices"][0]["message"]["content"]


def test_the_count_of_tokens_is_that_of_the_message(scripted_server: RunningServer) -> None:
    for fields in ({}, {"tools": TOOLS}, {"system": "s", "tools": TOOLS, "tool_choice": ANY}):
        body = {"model": "hash", "messages": USER, **fields}
        counted = scripted_server.post(COUNT_PATH, **body).json()
        usage = create(scripted_server, **fields)["usage"]
        assert counted == {"input_tokens": num_prompt_tokens(usage)}


# Keys and errors.


def test_a_key_is_sent_in_either_header() -> None:
    with open_server(api_keys=("sesame", "poppy")) as server:

        def status(**headers: str) -> int:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return server.client.post(PATH, json=build_body(), headers=names).status_code

        assert status(x_api_key="sesame", anthropic_version="2023-06-01") == 200
        assert status(authorization="Bearer poppy") == 200
        assert status(authorization="Bearer poppy", x_api_key="no") == 200
        for headers in (
            {},
            {"x_api_key": "no"},
            {"x_api_key": ""},
            {"authorization": "Bearer no", "x_api_key": "sesame"},
            {"authorization": "", "x_api_key": "sesame"},
        ):
            assert status(**headers) == 401, headers
        twice = [("x-api-key", "sesame"), ("x-api-key", "sesame")]
        answer = server.client.post(PATH, json=build_body(), headers=twice)
        check_envelope(answer, 401, None, "invalid_api_key")
        assert answer.json()["error"]["type"] == "authentication_error"
        # Every route accepts both.
        headers = {"x-api-key": "sesame"}
        assert server.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (PATH, b"{", 400, "invalid_request_error"),
        (PATH, b'{"model": "hash", "model": "hash"}', 400, "invalid_request_error"),
        (PATH, b'{"model": "no", "max_tokens": 1}', 404, "not_found_error"),
        (f"{PATH}/batches", b"{}", 404, "not_found_error"),
        (PATH, b'{"messages": ' + b"[" * 100_000, 400, "invalid_request_error"),
    ],
    ids=["JSON", "key", "model", "path", "deep"],
)
def test_errors_have_the_shape_of_the_api(
    server: RunningServer, path: str, body: bytes, status: int, kind: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=body, headers=headers)
    assert answer.status_code == status
    check_envelope(answer, status, None, "")
    assert answer.json()["error"]["type"] == kind
    schema = server.client.get("/openapi.json").json()["components"]["schemas"]["MessagesError"]
    assert list(find_faults(schema, answer.json())) == []
    # Other paths that begin like it are of another API.
    assert "type" not in server.client.get("/v1/messagesx").json()


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    with open_gated_server() as (server, model):
        body = build_body(stream=True, max_tokens=200, ignore_eos=True)
        model.permits.release(4)
        with server.client.stream("POST", PATH, json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: message_start"
            server.llm.engine.model = None  # type: ignore[assignment]
            model.permits.release(64)
            rest = list(lines)
    data = json.loads(rest[rest.index("event: error") + 1].removeprefix("data: "))
    assert data["type"] == "error" and data["error"]["type"] in ("api_error", "overloaded_error")
    assert "event: message_stop" not in rest


USE = {"type": "tool_use", "id": "1", "name": "now", "input": {}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", "content": list(blocks)}]}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}, **fields}]}


def output_format(**fields: Any) -> dict[str, Any]:
    return {"output_config": {"format": fields}}


TEXT = {"type": "text", "text": "a"}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": USER * 5000}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{**USER[0], "x": 1}]}, "messages[0].x"),
    ({"messages": [{"role": "user", "content": "a" * 2000}]}, "messages"),
    (user(*[TEXT] * (MAX_BLOCKS + 1)), "messages[0].content"),
    (user(5), "messages[0].content[0]"),
    (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (user({"type": ["text"]}), "messages[0].content[0].type"),
    (user(USE), "messages[0].content[0].type"),
    (user({**TEXT, "text": None}), "messages[0].content[0].text"),
    (user({**TEXT, "x": 1}), "messages[0].content[0].x"),
    (user({**TEXT, "citations": [{}]}), "messages[0].content[0].citations"),
    (user({**TEXT, "cache_control": 5}), "messages[0].content[0].cache_control"),
    (user({"type": "tool_result", "tool_use_id": "1"}), "messages[0].content[0].tool_use_id"),
    (assistant({"type": "tool_result", "tool_use_id": "1"}), "messages[1].content[0].type"),
    (assistant(TEXT, {**USE, "input": []}), "messages[1].content[1].input"),
    (assistant({**USE, "input": nested(70)}), "messages[1].content[0].input"),
    (assistant({**USE, "name": "a b"}), "messages[1].content[0].name"),
    (assistant({**USE, "id": "a b"}), "messages[1].content[0].id"),
    (assistant({**USE, "id": None}), "messages[1].content[0].id"),
    (assistant(*[USE] * 129), "messages[1].content[128]"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"temperature": 9}, "temperature"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"metadata": "a"}, "metadata"),
    ({"thinking": "on"}, "thinking"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "display": "no"}}, "thinking.display"),
    (user({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type"),
    (assistant({"type": "thinking", "thinking": 5}), "messages[1].content[0].thinking"),
    (assistant({"type": "redacted_thinking", "data": "x"}), "messages[1].content[0].type"),
    ({"max_output_tokens": 5}, "max_output_tokens"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    (tool(input_schema=None), "tools[0].input_schema"),
    (tool(input_schema={"type": "string"}), "tools[0].input_schema.type"),
    (
        tool(input_schema={"properties": {"a": {"type": "x"}}}, strict=True),
        "tools[0].input_schema",
    ),
    (tool(name="a b"), "tools[0].name"),
    (tool(x=1), "tools[0].x"),
    (tool(defer_loading=True), "tools[0].defer_loading"),
    ({"tool_choice": ANY}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({**tool(), "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({**tool(), "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({**tool(), "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (
        {**tool(), "tool_choice": {**ANY, "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"effort": []}}, "output_config.effort"),
    (output_format(type="xml"), "output_config.format.type"),
    (output_format(type="json_schema"), "output_config.format.schema"),
    (output_format(type="json_schema", schema={"type": "x"}), "output_config.format"),
]


@pytest.mark.parametrize(
    ("fields", "param"), REFUSALS, ids=[f"{i}-{row[1]}" for i, row in enumerate(REFUSALS)]
)
def test_a_refusal_names_the_field_of_the_client(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    check_envelope(server.post(PATH, **build_body(**fields)), 400, param, "")


def test_fields_of_claude_code_are_accepted(server: RunningServer) -> None:
    """Its tools have a `$schema`, and it sends more that has no effect here."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **CITY}
    body = build_body(
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tools=[{**WEATHER, "input_schema": schema, "eager_input_streaming": True}],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        stream=True,
    )
    answer = server.client.post(
        f"{PATH}?beta=true", json=body, headers={"anthropic-beta": "a,b", "x-app": "cli"}
    )
    assert answer.status_code == 200, answer.text
    join_events(parse_events(answer.text))
