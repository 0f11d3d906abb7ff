"""/v1/responses: what openai's client sends and gets, and what is stored, for which key."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.errors import InvalidRequest
from forge.limits import Limits
from forge.outputs import TextDelta
from forge.server.chat_formats import ChatFormats
from forge.server.field_names import FieldNames
from forge.server.output_items import OutputItems
from forge.server.protocol import parse_request
from forge.server.responses_api.items import MAX_ITEMS, build_messages, parse_input
from forge.server.responses_api.output import ResponseOutput
from forge.server.responses_api.request import ResponsesRequest
from forge.server.responses_api.store import ResponseStore, StoredResponse
from forge.server.responses_api.stream import ResponseEvents, ResponseRecorder
from forge.server.streaming import StreamEnded
from forge.tokenizer import ByteTokenizer
from tests.server.local_server import GatedModel, ManualClockLoop, wait_until
from tests.server.test_promises_http import check_type
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.server.test_tools import CITY, NOW, ROME, ScriptedHashModel

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY}
TOOLS = [{**WEATHER, "strict": True}, {"type": "function", "name": "now"}]
EVENT_TYPES = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
}
"""Type of an event -> its name in `openai.types.responses`."""

Event = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server(max_model_len=1024, num_blocks=512) as running:
        yield running
        wait_until(running.is_idle)


@contextmanager
def open_thinking_server() -> Iterator[RunningServer]:
    """Serve a model that follows scripts, whose answers may have reasoning."""

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    with open_server(
        prepare=prepare, max_model_len=1024, num_blocks=256, reasoning_parser="qwen3"
    ) as running:
        yield running
        wait_until(running.is_idle)


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with open_thinking_server() as running:
        yield running


@contextmanager
def open_gated_server(**options: Any) -> Iterator[tuple[RunningServer, GatedModel]]:
    """Serve a model that takes a step when the test permits it."""
    model = GatedModel(num_blocks=64, block_size=4)

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    with (
        open_server(prepare=prepare, depth=1, **options) as running,
        model.open_at_exit(),
    ):
        yield running, model


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    """Return a response, which must succeed."""
    answer = server.post(PATH, **{"model": "hash", "max_output_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def parse_events(text: str) -> list[Event]:
    """Return the events of a whole stream; check their names and numbers."""
    events = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def stream(server: RunningServer, **body: Any) -> list[Event]:
    answer = server.post(PATH, **{"model": "hash", "max_output_tokens": 8, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse_events(answer.text)


def set_script(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    """Return a request that the model answers with the script."""
    body = {"model": "hash", "input": "hi", "tools": TOOLS, "temperature": 0, **fields}
    tokenizer, model = ByteTokenizer(), server.llm.engine.model
    request_body = parse_request(ResponsesRequest, body)
    chat_body = request_body.translate([], parse_input(body["input"])).request_body
    prompt = chat_body.render_prompt(tokenizer)
    tokens = [*tokenizer.encode(script, parse_special_tokens=False), tokenizer.eos_token]
    assert isinstance(model, ScriptedHashModel)
    model.script = {(*prompt, *tokens[:i]): token for i, token in enumerate(tokens)}
    return body


def without_ids(value: Any) -> Any:
    """Return the value without what differs between two equal responses."""
    random_keys = ("id", "item_id", "call_id", "created_at", "completed_at", "usage")
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in random_keys}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def kinds(events: list[Event]) -> list[str]:
    """Return the types of events, equal neighbours once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


# The response and its stream.


def test_a_response_has_the_text_that_a_chat_of_the_same_messages_has(
    server: RunningServer,
) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a"}]
    answer = server.post(
        "/v1/chat/completions", model="hash", messages=messages, max_tokens=8, temperature=0
    ).json()
    response = create(server, input="a", instructions="Be brief", temperature=0)
    (message,) = response["output"]
    assert message["content"][0]["text"] == answer["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert response["instructions"] == "Be brief" and response["temperature"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 500},
        {"metadata": {"a": "b"}, "user": "u", "reasoning": {"effort": "low"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": CITY}}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}},
    ],
    ids=["short", "whole", "echoed", "schema", "tools"],
)
def test_a_response_and_its_events_are_of_the_official_types(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    body = {"input": "a", "max_output_tokens": 60, "temperature": 0, **fields}
    whole, events = create(server, **body), stream(server, **body)
    check_type("responses.Response", whole)
    for event in events:
        check_type(f"responses.{EVENT_TYPES[event['type']]}", event)
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_the_events_of_a_text_have_their_order(server: RunningServer) -> None:
    events = stream(server, input="a", temperature=0)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    done = next(e for e in events if e["type"] == "response.output_text.done")
    assert text == done["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def test_a_character_that_some_readers_take_for_a_line_end_does_not_cut_an_event(
    server: RunningServer,
) -> None:
    """httpx splits lines at every line boundary of Unicode."""
    text = "a\u0085b\u2028c\u2029dé"
    body = {"model": "hash", "input": "a", "instructions": text, "stream": True}
    answer = server.post(PATH, **body, max_output_tokens=1)
    assert {line.partition(":")[0] for line in answer.iter_lines()} == {"event", "data", ""}
    assert parse_events(answer.text)[0]["response"]["instructions"] == text


@pytest.mark.parametrize("is_stream", [False, True])
def test_text_and_calls_are_items(scripted_server: RunningServer, is_stream: bool) -> None:
    body = set_script(scripted_server, f"See: {ROME}", max_output_tokens=200)
    response = create(scripted_server, **body)
    if is_stream:
        events = stream(scripted_server, **body)
        response = events[-1]["response"]
        assert kinds(events)[2:] == [
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
    text, call = response["output"]
    assert (text["type"], text["content"][0]["text"], text["status"]) == (
        "message",
        "See: ",
        "completed",
    )
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert call["id"] != call["call_id"] and response["status"] == "completed"


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_an_item_before_the_others(
    scripted_server: RunningServer, is_stream: bool
) -> None:
    thought = "<think>\nWhy?\n</think>\n\n"
    body = set_script(scripted_server, f"{thought}See: {ROME}", max_output_tokens=200)
    response = create(scripted_server, **body)
    if is_stream:
        events = stream(scripted_server, **body)
        response = events[-1]["response"]
        assert kinds(events)[2:8] == [
            *("output_item.added", "content_part.added", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
        ]
        for event in events:
            check_type(f"responses.{EVENT_TYPES[event['type']]}", event)
    check_type("responses.Response", response)
    reasoning, text, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Why?"}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert (text["content"][0]["text"], call["name"]) == ("See: ", "weather")
    details = response["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": len(thought) - 2}


def test_a_call_that_is_cut_is_incomplete(scripted_server: RunningServer) -> None:
    body = set_script(scripted_server, ROME, tool_choice="required")
    response = create(scripted_server, **{**body, "max_output_tokens": len(ROME) - 20})
    (call,) = response["output"]
    assert (call["status"], response["status"]) == ("incomplete", "incomplete")
    # With the tokens of the format after it missing, the call itself is whole.
    response = create(scripted_server, **{**body, "max_output_tokens": len(ROME) - 3})
    (call,) = response["output"]
    assert (call["status"], response["status"]) == ("completed", "incomplete")
    assert json.loads(call["arguments"]) == {"city": "Rome"}


def test_a_response_that_was_cut_within_a_call_is_continued(
    scripted_server: RunningServer,
) -> None:
    """The chat has a message of the assistant without the call."""
    body = set_script(scripted_server, ROME, tool_choice="required")
    cut = create(scripted_server, **{**body, "max_output_tokens": len(ROME) - 20})
    assert cut["output"][0]["status"] == "incomplete"
    follow = create(scripted_server, input="b", previous_response_id=cut["id"])
    user = {"role": "user", "content": "hi"}
    whole = create(scripted_server, input=[user, *cut["output"], {**user, "content": "b"}])
    empty = {"role": "assistant", "content": ""}
    without = create(scripted_server, input=[user, empty, {**user, "content": "b"}])
    num_tokens = [each["usage"]["input_tokens"] for each in (follow, whole, without)]
    assert num_tokens[0] == num_tokens[1] == num_tokens[2]
    output = {"type": "function_call_output", "call_id": cut["output"][0]["call_id"]}
    answer = scripted_server.post(
        PATH, model="hash", input=[{**output, "output": "a"}], previous_response_id=cut["id"]
    )
    check_envelope(answer, 400, "input[0].call_id", "invalid_value")


def test_a_call_with_a_number_beyond_doubles_fails(scripted_server: RunningServer) -> None:
    """Some parsers read infinity, and others nothing."""
    parameters = {"type": "object", "properties": {"a": {"type": "number"}}}
    script = ROME.replace("weather", "f").replace('{"city": "Rome"}', '{"a": -4e744}')
    body = set_script(
        scripted_server,
        script,
        tools=[{"type": "function", "name": "f", "parameters": parameters}],
        tool_choice="required",
        max_output_tokens=200,
    )
    answer = scripted_server.post(PATH, **body)
    check_envelope(answer, 400, None, "schema_violation")


def test_structured_text_matches_its_schema(server: RunningServer) -> None:
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    response = create(server, input="a", text=text, max_output_tokens=200)
    assert response["status"] == "completed" and response["text"] == text
    found = json.loads(response["output"][0]["content"][0]["text"])
    assert found["city"] in ("Rome", "Oslo")


@pytest.mark.long
def test_the_official_client_creates_streams_and_continues(
    scripted_server: RunningServer, openai: Any
) -> None:
    body = set_script(scripted_server, NOW, tool_choice="required", max_output_tokens=200)
    url = f"{scripted_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with client.responses.stream(**body) as events:
            names = [event.type for event in events]
            final = events.get_final_response()
        assert names[-1] == "response.completed"
        (call,) = final.output
        assert (call.type, call.name, call.arguments) == ("function_call", "now", "{}")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        answer = client.responses.create(
            model="hash", previous_response_id=final.id, input=[output], max_output_tokens=4
        )
        items = list(client.responses.input_items.list(answer.id, order="asc", limit=2))
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            client.responses.cancel(answer.id)
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError, match=r"Response with id '.*' not found\."):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model="hash", input="a", tools=[{"type": "web_search"}])
        assert error.value.param == "tools[0].type"


# Conversations.


def texts_of(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_a_response_that_continues_another_has_the_prompt_of_the_whole_conversation(
    server: RunningServer,
) -> None:
    first = create(server, input="a", instructions="Be brief", temperature=0)
    second = create(server, input="b", previous_response_id=first["id"], temperature=0)
    third = create(server, input="c", previous_response_id=second["id"], temperature=0)
    history = [
        {"role": "user", "content": "a"},
        *first["output"],
        {"role": "user", "content": "b"},
        *second["output"],
        {"role": "user", "content": "c"},
    ]
    whole = create(server, input=history, store=False, temperature=0)
    # Instructions are of one request: a conversation does not keep them.
    assert whole["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    assert texts_of(whole) == texts_of(third)
    assert third["previous_response_id"] == second["id"]
    # One answer may be continued twice.
    again = create(server, input="b", previous_response_id=first["id"], temperature=0)
    assert texts_of(again) == texts_of(second)


def test_items_of_the_assistant_are_one_message_of_the_chat() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "noon"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "one"}],
        },
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    body = parse_request(ResponsesRequest, {"model": "m", "input": items})
    chat = body.translate([], parse_input(items)).request_body
    assert chat.messages is not None
    shape = [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in chat.messages]
    assert shape == [
        ("user", "a", 0),
        ("assistant", "b", 2),
        ("tool", "noon", 0),
        ("tool", "one", 0),
        ("assistant", "c", 0),
        ("assistant", "d", 0),
    ]
    assert [m.get("tool_call_id") for m in chat.messages[2:4]] == ["2", "1"]
    assert [m.get("reasoning_content") for m in chat.messages] == [None, "r\ns", *[None] * 4]


def num_joins(num_items: int) -> int:
    """Return how often texts are joined for a message of this many items of reasoning."""
    content = [{"type": "reasoning_text", "text": "r"}]
    items = [{"type": "reasoning", "summary": [], "content": content}] * num_items
    joins = list[str]()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ == "join":
            joins.append(event)

    sys.setprofile(note)
    try:
        (message,) = build_messages(None, items[:1], items[1:]).messages
    finally:
        sys.setprofile(None)
    assert message["reasoning_content"] == "\n".join("r" * num_items)
    return len(joins)


def test_texts_of_reasoning_are_joined_once_however_many_there_are() -> None:
    assert num_joins(2) == num_joins(500) > 0


def test_the_items_of_all_turns_are_bounded_together() -> None:
    items = parse_input([{"role": "user", "content": "a"}])
    with pytest.raises(InvalidRequest) as error:
        build_messages(None, items * MAX_ITEMS, items)
    assert (error.value.field, error.value.code) == ("input", "too_many_items")
    assert str(MAX_ITEMS) in error.value.problem
    assert "previous_response_id" in error.value.remedy
    assert len(build_messages(None, items * (MAX_ITEMS - 1), items).messages) == MAX_ITEMS


def test_options_of_a_request_are_those_of_its_chat() -> None:
    allowed = [{"type": "function", "name": "now"}]
    body = {
        "model": "m",
        "input": "a",
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_output_tokens": 5,
        "top_k": 3,
        "session_id": "s",
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"turn": "t" * 600},
    }
    chat = parse_request(ResponsesRequest, body).translate([], parse_input("a")).request_body
    assert (chat.reasoning_effort, chat.max_completion_tokens, chat.top_k) == ("low", 5, 3)
    assert (chat.session_id, chat.stream) == ("s", None)
    tools = chat.callable_tools
    assert tools is not None and [tool.name for tool in tools.callable_tools] == ["now"]
    assert (tools.min_calls, tools.max_calls, len(tools.definitions)) == (1, 1, 2)


# The store.


def get(server: RunningServer, path: str, key: str = "none", method: str = "GET") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return server.client.request(method, f"{PATH}/{path}", headers=headers)


def test_a_stored_response_is_read_listed_and_deleted(server: RunningServer) -> None:
    user = [{"role": "user", "content": text} for text in "ab"]
    response = create(server, input=user)
    response_id = response["id"]
    assert get(server, response_id).json() == response
    listed = get(server, f"{response_id}/input_items").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["b", "a"]
    first = listed["data"][0]["id"]
    assert (listed["first_id"], listed["has_more"]) == (first, False)
    part = get(server, f"{response_id}/input_items?order=asc&limit=1").json()
    assert [item["content"][0]["text"] for item in part["data"]] == ["a"] and part["has_more"]
    part = get(server, f"{response_id}/input_items?after={first}").json()
    assert [item["content"][0]["text"] for item in part["data"]] == ["a"]
    deleted = get(server, response_id, method="DELETE").json()
    assert deleted == {"id": response_id, "object": "response", "deleted": True}
    check_envelope(get(server, response_id), 404, "id", "response_not_found")
    check_envelope(get(server, response_id, method="DELETE"), 404, "id", "response_not_found")


def test_a_response_that_is_not_to_be_stored_is_not(server: RunningServer) -> None:
    for body in ({"store": False}, {"store": False, "stream": True}):
        answer = server.post(PATH, model="hash", input="a", max_output_tokens=2, **body)
        found = parse_events(answer.text)[-1]["response"] if "stream" in body else answer.json()
        check_envelope(get(server, found["id"]), 404, "id", "response_not_found")
        check_envelope(
            server.post(PATH, model="hash", input="b", previous_response_id=found["id"]),
            400,
            "previous_response_id",
            "response_not_found",
        )


def test_a_response_of_another_key_is_as_unknown_as_one_that_never_was() -> None:
    with open_server(api_keys=("sesame", "poppy")) as server:
        headers = {"authorization": "Bearer sesame"}
        body = {"model": "hash", "input": "a", "max_output_tokens": 2}
        found = server.client.post(PATH, json=body, headers=headers).json()["id"]
        unknown = "resp_" + "0" * (len(found) - 5)
        for suffix, method in (
            ("", "GET"),
            ("", "DELETE"),
            ("/cancel", "POST"),
            ("/input_items", "GET"),
        ):
            answers = [get(server, each + suffix, "poppy", method) for each in (found, unknown)]
            assert [each.status_code for each in answers] == [404, 404]
            assert answers[0].text.replace(found, unknown) == answers[1].text
        body |= {"previous_response_id": found}
        headers = {"authorization": "Bearer poppy"}
        assert server.client.post(PATH, json=body, headers=headers).status_code == 400
        assert get(server, found, "sesame").status_code == 200
        assert get(server, found, "poppy").status_code == 404


def test_a_tenant_that_fills_its_store_drops_its_own_responses_only() -> None:
    limits = Limits(response_store_mib=1)
    with open_server(api_keys=("sesame", "poppy"), limits=limits) as server:

        def post(key: str, **fields: Any) -> httpx.Response:
            body = {"model": "hash", "input": "a", "max_output_tokens": 1, **fields}
            headers = {"authorization": f"Bearer {key}"}
            return server.client.post(PATH, json=body, headers=headers)

        kept = post("poppy").json()["id"]
        tool = {**WEATHER, "description": "x" * 200_000}
        big = {"tools": [tool], "tool_choice": "none"}
        ids = [post("sesame", **big).json()["id"] for _ in range(4)]
        # Half of the MiB is one tenant's: two responses of 200 kB.
        statuses = [get(server, each, "sesame").status_code for each in ids]
        assert statuses == [404, 404, 200, 200]
        assert get(server, kept, "poppy").status_code == 200
        answer = post("sesame", previous_response_id=ids[0])
        check_envelope(answer, 400, "previous_response_id", "response_not_found")
        items = [{"role": "user", "content": "a"}] * 4000
        check_envelope(post("sesame", input=items), 400, "input", "string_too_long")
        # Not stored, it is refused for another reason: it is too long for the model.
        answer = post("sesame", input=items, store=False)
        check_envelope(answer, 400, "input", "context_length_exceeded")


def test_responses_of_all_tenants_expire_without_a_further_request() -> None:
    clock, limits = ManualClockLoop(), Limits(response_ttl=100.0)
    with open_server(api_keys=("sesame", "poppy"), limits=limits, clock=clock) as server:

        def post(key: str) -> str:
            body = {"model": "hash", "input": "a", "max_output_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            found: str = server.client.post(PATH, json=body, headers=headers).json()["id"]
            return found

        ids = [post("sesame")]
        clock.advance_and_wait(60.0)
        ids += [post("poppy"), post("sesame")]
        assert in_memory(ids) == set(ids)
        clock.advance_and_wait(39.0)
        assert in_memory(ids) == set(ids)
        clock.advance_and_wait(1.0)
        assert in_memory(ids) == set(ids[1:])
        clock.advance_and_wait(60.0)
        assert in_memory(ids) == set()


def in_memory(ids: list[str]) -> set[str]:
    """Return those of the ids whose stored response the process still has."""
    found = (each.response for each in gc.get_objects() if type(each) is StoredResponse)
    return {json.loads(response)["id"] for response in found} & set(ids)


def test_a_server_without_a_store_says_so() -> None:
    with open_server(limits=Limits(response_store_mib=0)) as server:
        response = create(server, input="a")
        check_envelope(get(server, response["id"]), 404, "id", "response_not_found")
        answer = server.post(PATH, model="hash", input="a", store=True)
        check_envelope(answer, 400, "store", "unsupported_parameter")


# Streams that end early.


def read_until(lines: Iterator[str], kind: str) -> Event:
    """Return the next event of this type."""
    for line in lines:
        if line.startswith("data: "):
            event: Event = json.loads(line.removeprefix("data: "))
            if event["type"] == kind:
                return event
    raise AssertionError(f"no {kind}")


LONG = {"model": "hash", "input": "a", "stream": True, "max_output_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_has_ended_cannot_be_cancelled(server: RunningServer, stream: bool) -> None:
    """OpenAI cancels responses in the background only, and refuses any other with these words."""
    body = {"model": "hash", "input": "a", "max_output_tokens": 2, "stream": stream}
    answer = server.post(PATH, **body)
    found = parse_events(answer.text)[-1]["response"] if stream else answer.json()
    refused = get(server, f"{found['id']}/cancel", method="POST")
    check_envelope(refused, 400, "id", "invalid_value")
    message = refused.json()["error"]["message"]
    assert "Cannot cancel a synchronous response. This one has ended" in message
    assert f"'{found['status']}'" in message
    assert get(server, found["id"]).json() == found


def test_a_stream_is_cancelled_by_its_id() -> None:
    with open_gated_server() as (server, model):
        model.permits.release(8)
        with server.client.stream("POST", PATH, json=LONG) as answer:
            lines = answer.iter_lines()
            response_id = read_until(lines, "response.created")["response"]["id"]
            assert get(server, response_id).json()["status"] == "in_progress"
            check_envelope(
                server.post(PATH, model="hash", input="b", previous_response_id=response_id),
                400,
                "previous_response_id",
                "invalid_value",
            )
            cancelled = get(server, f"{response_id}/cancel", method="POST").json()
            assert cancelled["status"] == "cancelled" and cancelled["usage"] is not None
            model.permits.release(8)
            last = read_until(lines, "response.incomplete")["response"]
            assert list(lines)[-1:] in ([], [""])
        assert last == cancelled == get(server, response_id).json()
        check_type("responses.Response", last)
        again = get(server, f"{response_id}/cancel", method="POST")
        assert (again.status_code, again.json()) == (200, cancelled)
        model.permits.release(64)
        wait_until(server.is_idle)
        follow = create(server, input="b", previous_response_id=response_id, max_output_tokens=1)
        assert follow["usage"]["input_tokens"] > 17


def test_a_cancel_between_the_events_of_a_delta_comes_after_them() -> None:
    async def cancel() -> None:
        now_s, store = asyncio.get_running_loop().time(), ResponseStore(10**6, 60.0)
        body = parse_request(ResponsesRequest, {"model": "m", "input": "a"})
        chat = body.translate([], parse_input("a")).request_body
        items = OutputItems.of_chat(chat, [1], ByteTokenizer(), ChatFormats(None, None, ""))
        output = ResponseOutput("resp_1", '{"model":"m"}', 1, items, lambda: 0)
        events = ResponseEvents(output, ResponseRecorder(output, b"", store), lambda: None)
        unsent = iter(events.encode_delta(0, TextDelta(0, "text", (1,), None)))
        sent = [next(unsent) for _ in range(3)]
        stored = store.get("resp_1", now_s)
        assert stored is not None and stored.cancel is not None
        stored.cancel()
        with pytest.raises(StreamEnded):
            list(events.encode_delta(0, TextDelta(0, " more", (2,), None)))
        sent += [*unsent, *events.encode_end()]
        found = parse_events("".join(sent))  # it checks the numbers
        assert kinds(found)[-4:] == [
            *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
        ]
        stored = store.get("resp_1", now_s)
        assert stored is not None and found[-1]["response"] == json.loads(stored.response)
        assert texts_of(found[-1]["response"]) == ["text"]

    asyncio.run(cancel())


def test_a_cancel_frees_the_blocks_of_a_paused_engine() -> None:
    with open_gated_server() as (server, model):

        async def pause() -> None:
            pausing = asyncio.create_task(server.llm.pause("keep"))
            await asyncio.sleep(0)  # it is posted before the step in flight may end
            model.permits.release(1)
            await pausing

        model.permits.release(4)
        with server.client.stream("POST", PATH, json=LONG) as answer:
            lines = answer.iter_lines()
            response_id = read_until(lines, "response.created")["response"]["id"]
            asyncio.run(pause())
            assert not server.is_idle()
            cancelled = get(server, f"{response_id}/cancel", method="POST").json()
            assert cancelled["status"] == "cancelled"
            assert read_until(lines, "response.incomplete")["response"] == cancelled
        wait_until(server.is_idle)
        assert server.llm.status.is_paused
        asyncio.run(server.llm.resume())


def test_a_client_that_leaves_ends_its_response_and_frees_its_blocks() -> None:
    with open_gated_server() as (server, model):
        model.permits.release(8)
        with server.client.stream("POST", PATH, json=LONG) as answer:
            found = read_until(answer.iter_lines(), "response.created")["response"]
        model.permits.release(200)
        wait_until(server.is_idle)
        wait_until(lambda: get(server, found["id"]).json()["status"] == "cancelled")


def test_a_deleted_stream_continues_and_is_not_stored_again() -> None:
    with open_gated_server() as (server, model):
        model.permits.release(1)
        with server.client.stream("POST", PATH, json={**LONG, "max_output_tokens": 4}) as answer:
            lines = answer.iter_lines()
            response_id = read_until(lines, "response.created")["response"]["id"]
            assert get(server, response_id, method="DELETE").status_code == 200
            model.permits.release(64)
            assert read_until(lines, "response.incomplete")["response"]["status"] == "incomplete"
        assert get(server, response_id).status_code == 404


def test_a_stream_whose_engine_dies_ends_as_failed() -> None:
    with open_gated_server() as (server, model):
        model.permits.release(4)
        with server.client.stream("POST", PATH, json=LONG) as answer:
            lines = answer.iter_lines()
            read_until(lines, "response.created")
            closing = threading.Thread(target=server.llm.close)
            closing.start()
            model.permits.release(200)
            failed = read_until(lines, "response.failed")
        closing.join()
    check_type("responses.ResponseFailedEvent", failed)
    response = failed["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert response["output"][0]["status"] == "incomplete"


# Refusals.

CALL = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
SYSTEM = {"role": "system", "content": "a"}


def function_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


def text_format(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_messages"),
    ({"input": ["a"]}, "input[0]", "invalid_type"),
    ({"input": [SYSTEM] * (MAX_ITEMS + 1)}, "input", "too_many_items"),
    ({"input": [SYSTEM] * 5000}, "input", "too_many_messages"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
    ({"input": [SYSTEM, {**SYSTEM, "x": 1}]}, "input[1].x", "unknown_parameter"),
    ({"input": [{**SYSTEM, "status": "done"}]}, "input[0].status", "invalid_value"),
    ({"input": [{**SYSTEM, "id": ["a"]}]}, "input[0].id", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"type": []}]}, "input[0].type", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text",
        "invalid_type",
    ),
    ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments", "invalid_value"),
    ({"input": [SYSTEM, {**CALL, "arguments": "[]"}]}, "input[1].arguments", "invalid_value"),
    ({"input": [{**CALL, "name": "a b"}]}, "input[0].name", "invalid_value"),
    ({"input": [{**CALL, "call_id": "a b"}]}, "input[0].call_id", "invalid_value"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "missing_required_parameter"),
    (
        {"input": [CALL, {"type": "function_call_output", "call_id": "d", "output": "a"}]},
        "input[1].call_id",
        "invalid_value",
    ),
    (
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": {}}]},
        "input[1].output",
        "invalid_type",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
        "unsupported_parameter",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "x", "text": "a"}]}]},
        "input[0].summary[0].type",
        "invalid_value",
    ),
    ({"input": "a" * 2000}, "input", "context_length_exceeded"),
    ({"instructions": 5}, "instructions", "invalid_value"),
    ({"previous_response_id": 5}, "previous_response_id", "invalid_value"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ({"temperature": 9}, "temperature", "invalid_value"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]", "unsupported_parameter"),
    ({"include": "a"}, "include", "invalid_type"),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "unknown_parameter",
    ),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"effort": ["low"]}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": "low"}, "reasoning", "invalid_type"),
    ({"metadata": {"a": 5}}, "metadata", "invalid_type"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "string_too_long"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
    (function_tool(name="a b"), "tools[0].name", "invalid_value"),
    (function_tool(x=1), "tools[0].x", "unknown_parameter"),
    (function_tool(parameters={"type": "string"}), "tools[0].parameters.type", "invalid_schema"),
    (
        function_tool(
            parameters={"type": "object", "properties": {"a": {"type": "x"}}}, strict=True
        ),
        "tools[0].parameters",
        "invalid_schema",
    ),
    (function_tool(parameters=nested(70)), "tools[0].parameters", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {**function_tool(), "tool_choice": {"type": "mcp"}},
        "tool_choice.type",
        "unsupported_parameter",
    ),
    (
        {**function_tool(), "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {**function_tool(), "tool_choice": {"type": "allowed_tools", "tools": [{}]}},
        "tool_choice.tools[0].name",
        "missing_required_parameter",
    ),
    (
        {
            **function_tool(),
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "g"}],
            },
        },
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    (
        {
            **function_tool(),
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
        },
        "tool_choice.mode",
        "invalid_value",
    ),
    ({"text": "a"}, "text", "invalid_type"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity", "invalid_value"),
    (text_format(type="xml"), "text.format.type", "invalid_value"),
    (text_format(type="json_schema", name="a"), "text.format.schema", "missing_required_parameter"),
    (
        text_format(type="json_schema", name="a", schema={"type": "x"}),
        "text.format",
        "invalid_schema",
    ),
    (text_format(type="json_schema", schema=nested(200)), "text.format", "invalid_schema"),
    (text_format(type="json_schema", name=5, schema={}), "text.format.name", "invalid_type"),
    (
        text_format(type="json_schema", name="a", description=[], schema={}),
        "text.format.description",
        "invalid_type",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), REFUSALS, ids=[f"{i}-{row[1]}" for i, row in enumerate(REFUSALS)]
)
def test_a_refusal_names_the_field_of_the_client(
    server: RunningServer, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = server.post(PATH, **{"model": "hash", "input": "a", **fields})
    check_envelope(answer, 400, param, code)


def test_bodies_that_are_damaged_are_refused(server: RunningServer) -> None:
    for body, code in (
        (b'{"model": "hash", "input": "a", "input": "b"}', "duplicate_key"),
        (b'{"input": [{"role": "user", "content": "a", "role": "system"}]}', "duplicate_key"),
        (b'{"input": ' + b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b'{"input": "\\ud800"}', "invalid_unicode"),
    ):
        answer = server.client.post(
            PATH, content=body, headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=1e3", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
        ("/input_items?include=a", "include"),
    ],
)
def test_a_query_that_is_not_supported_is_refused(
    server: RunningServer, query: str, param: str
) -> None:
    response_id = create(server, input="a", max_output_tokens=1)["id"]
    answer = get(server, f"{response_id}{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["%c2%85", "..%2f..", "x" * 5000, "resp_%ff"])
def test_an_id_that_is_none_is_unknown(server: RunningServer, name: str) -> None:
    answer = get(server, name)
    assert answer.status_code == 404 and answer.json()["error"]["message"].isprintable()


def test_the_longest_name_that_a_field_begins_with_is_replaced() -> None:
    names = FieldNames({"messages": "input", "messages[1]": "input[5]", "max_tokens": "limit"})
    assert names.client_name("messages[1].content") == "input[5].content"
    assert names.client_name("messages[10].content") == "input[10].content"
    assert names.client_name("messages") == "input"
    assert names.client_name("max_tokens_more") == "max_tokens_more"
    assert names.client_name("temperature") == "temperature"
