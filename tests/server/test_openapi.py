"""The responses that are sent match their descriptions in /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forge.server.openapi import (
    EMPTY_RESPONSE_PATHS,
    NON_JSON_TYPES,
    PROBE_PATHS,
    RESPONSE_SCHEMAS,
    STREAMING_PATHS,
)
from forge.server.routes import ROUTES
from tests.server.local_server import create_client
from tests.server.test_server import ANSWER, RunningServer, open_server
from tests.server.test_tools import NAMED, NOW, ROME, open_scripted_server, set_script

USER = [{"role": "user", "content": "a"}]
SCORED = {"n": 2, "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, "additionalProperties": False}}}
STRUCTURED: tuple[dict[str, Any], ...] = (
    {"response_format": JSON, "max_tokens": 20},
    {"regex": "(red|green)( blinking)?"},
    {"grammar": 'start: "a" | "b"'},
)
SESSION = "/v1/sessions/{id}"
RESPONSE = "/v1/responses/{id}"
REQUESTS: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/completions", {"model": "hash", "prompt": "a"}),
    ("/v1/completions", {"model": "hash", "prompt": ["a", "bc"], "logprobs": 2, **SCORED}),
    ("/v1/completions", {"model": "hash", "prompt": "ab", "logprobs": 0, "echo": True}),
    ("/v1/completions", {"model": "hash", "prompt": "ab", "stop_token_ids": [*range(257)]}),
    ("/v1/chat/completions", {"model": "hash", "messages": USER, "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {"model": "hash", "messages": USER, "logprobs": True, "top_logprobs": 2, **SCORED},
    ),
    (
        "/v1/chat/completions/batch",
        {"model": "hash", "messages": [USER, USER], "max_tokens": 2, "return_token_ids": True},
    ),
    ("/invocations", {"model": "hash", "messages": USER, "max_tokens": 2}),
    ("/invocations", {"model": "hash", "prompt": "a"}),
    ("/v1/responses", {"model": "hash", "input": "a", "max_output_tokens": 2}),
    (
        "/v1/responses",
        {
            "model": "hash",
            "input": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
            "instructions": "Be brief",
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/messages", {"model": "hash", "messages": USER, "max_tokens": 2}),
    ("/v1/messages", {"model": "hash", "messages": USER, "max_tokens": 200, "system": "b"}),
    ("/v1/messages/count_tokens", {"model": "hash", "messages": USER}),
    ("/generate", {"prompt": "a"}),
    *(("/v1/completions", {"model": "hash", "prompt": "a", **each}) for each in STRUCTURED),
    *(("/v1/chat/completions", {"model": "hash", "messages": USER, **e}) for e in STRUCTURED),
    *(("/generate", {"prompt": "a", **each}) for each in STRUCTURED),
    ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [98, 99]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [98]}),
    ("/v1/models", None),
    ("/v1/models/{name}", None),
    ("/healthz", None),
    ("/livez", None),
    ("/readyz", None),
    ("/version", None),
    ("/load", None),
    ("/tokenizer_info", None),
    ("/openapi.json", None),
]


@pytest.fixture(scope="module")
def running_server() -> Iterator[RunningServer]:
    with open_server() as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with open_scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def document(running_server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = running_server.client.get("/openapi.json").json()
    return found


def test_a_body_has_no_field_that_its_route_refuses(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["BatchChatRequest"]["properties"].keys()
    assert "messages" in fields and not fields & {"n", "stream", "tools"}


TYPES: dict[str, set[type]] = {
    "object": {dict},
    "array": {list},
    "string": {str},
    "integer": {int},
    "number": {int, float},
    "boolean": {bool},
    "null": {type(None)},
}


def find_faults(schema: dict[str, Any], value: Any, at: str = "") -> Iterator[str]:
    """Yield the places where the value does not match the schema."""
    for word, constraint in schema.items():
        match word:
            case "type":
                kinds = constraint if isinstance(constraint, list) else [constraint]
                if not any(type(value) in TYPES[kind] for kind in kinds):
                    yield f"{at} is {value!r}, no {' or '.join(kinds)}"
                    return
            case "required":
                yield from (f"{at}.{name} is not there" for name in constraint if name not in value)
            case "additionalProperties":
                for name in value.keys() - schema.get("properties", {}).keys():
                    if constraint is False:
                        yield f"{at}.{name} is not described"
                    else:
                        yield from find_faults(constraint, value[name], f"{at}.{name}")
            case "properties":
                for name in constraint.keys() & value.keys():
                    yield from find_faults(constraint[name], value[name], f"{at}.{name}")
            case "items":
                for index, item in enumerate(value):
                    yield from find_faults(constraint, item, f"{at}[{index}]")
            case "anyOf":
                if all(any(find_faults(each, value)) for each in constraint):
                    yield f"{at} is {value!r}, none of {constraint}"
            case "const" | "enum":
                if value not in (constraint if word == "enum" else [constraint]):
                    yield f"{at} is {value!r}, not {constraint!r}"
            case "minimum" | "maximum" | "minItems":
                size = len(value) if word == "minItems" else value
                if size > constraint if word == "maximum" else size < constraint:
                    yield f"{at} is {value!r}, {word} {constraint}"
            case "description" | "maxLength":
                pass
            case _:
                raise AssertionError(f"{word} is not known here")


def answer_schema(document: dict[str, Any], path: str, method: str) -> dict[str, Any]:
    content = document["paths"][path][method]["responses"]["200"]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]
    return found


@pytest.mark.parametrize(
    ("path", "body"), REQUESTS, ids=[f"{path}-{i}" for i, (path, _) in enumerate(REQUESTS)]
)
def test_an_answer_is_as_it_is_described(
    running_server: RunningServer, document: dict[str, Any], path: str, body: dict[str, Any] | None
) -> None:
    if body is None:
        answer = running_server.client.get(path.replace("{name}", "hash"))
        schema = answer_schema(document, path, "get")
    else:
        answer = running_server.client.post(path, json=body)
        schema = answer_schema(document, path, "post")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert list(find_faults(schema, answer.json())) == []


CALLS = [
    ({"tool_choice": "required", "n": 2}, NOW, "tool_calls", None),
    ({"tool_choice": "auto"}, f"See: {ROME}", "tool_calls", "See: "),
    ({"tool_choice": "auto", "logprobs": True, "top_logprobs": 1}, ROME, "tool_calls", None),
    ({"tool_choice": NAMED}, NOW, "stop", None),
    ({"tool_choice": "required", "max_tokens": len(ROME) - 16}, ROME, "length", None),
]


@pytest.mark.parametrize(
    ("body", "script", "finish", "content"),
    CALLS,
    ids=["required", "text and a call", "a call with scores", "a named one", "a cut one"],
)
def test_an_answer_with_calls_is_as_it_is_described(
    scripted_server: RunningServer,
    document: dict[str, Any],
    body: dict[str, Any],
    script: str,
    finish: str,
    content: str | None,
) -> None:
    answer = scripted_server.post(
        "/v1/chat/completions", **set_script(scripted_server, script, **body)
    )
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == finish
        assert choice["message"]["content"] == content
        assert len(choice["message"]["tool_calls"]) == 1
    schema = answer_schema(document, "/v1/chat/completions", "post")
    assert list(find_faults(schema, answer.json())) == []


def test_an_answer_that_could_call_and_does_not_is_as_it_is_described(
    scripted_server: RunningServer, document: dict[str, Any]
) -> None:
    answer = scripted_server.post(
        "/v1/chat/completions", **set_script(scripted_server, "No", tool_choice="auto")
    )
    (choice,) = answer.json()["choices"]
    assert choice["message"] == {**ANSWER, "content": "No"}
    schema = answer_schema(document, "/v1/chat/completions", "post")
    assert list(find_faults(schema, answer.json())) == []


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ({}, []),
        ({"type": "tool"}, [".tool_calls[0].type is 'tool', not 'function'"]),
        ({"id": 5}, [".tool_calls[0].id is 5, no string"]),
        ({"index": 0}, [".tool_calls[0].index is not described"]),
        (
            {"function": {"name": "now", "arguments": {}}},
            [".tool_calls[0].function.arguments is {}, no string"],
        ),
        (
            {"function": {"name": "now"}},
            [".tool_calls[0].function.arguments is not there"],
        ),
    ],
    ids=["good", "type", "id", "one more", "an object", "no arguments"],
)
def test_a_call_of_another_shape_does_not_fit(
    document: dict[str, Any], call: dict[str, Any], found: list[str]
) -> None:
    whole = answer_schema(document, "/v1/chat/completions", "post")
    schema = whole["properties"]["choices"]["items"]["properties"]["message"]
    good = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "refusal": None}
    assert list(find_faults(schema, {**message, "tool_calls": [{**good, **call}]})) == found
    assert list(find_faults(schema, {**message, "tool_calls": []})) == [
        ".tool_calls is [], minItems 1"
    ]


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    kinds = set(RESPONSE_SCHEMAS), set(NON_JSON_TYPES), set(EMPTY_RESPONSE_PATHS)
    assert set().union(*kinds) == set(document["paths"])
    assert sum(map(len, kinds)) == len(document["paths"])
    others = {SESSION, RESPONSE, f"{RESPONSE}/cancel", f"{RESPONSE}/input_items"}
    assert {path for path, _ in REQUESTS} | others == set(RESPONSE_SCHEMAS)


def test_the_end_of_a_session_is_as_it_is_described(
    running_server: RunningServer, document: dict[str, Any]
) -> None:
    running_server.post("/generate", prompt="a", session_id="a/b")
    answer = running_server.client.delete("/v1/sessions/a%2Fb")
    assert list(find_faults(answer_schema(document, SESSION, "delete"), answer.json())) == []
    assert answer.json()["id"] == "a/b"
    assert "404" in document["paths"][SESSION]["delete"]["responses"]
    for spec in (spec for spec in ROUTES if spec.operation is not None):
        (header,) = document["paths"][spec.path]["post"]["parameters"]
        assert (header["name"], header["in"]) == ("x-session-id", "header")


def test_a_description_without_a_field_or_with_one_more_does_not_fit(
    document: dict[str, Any],
) -> None:
    schema = answer_schema(document, "/generate", "post")
    good = {"text": "a", "token_ids": [98], "finish_reason": "stop"}
    good |= {"stop_reason": None, "matched_stop": 0}
    counts = {"prompt_tokens": 1, "completion_tokens": 1}
    assert list(find_faults(schema, good | counts)) == []
    assert list(find_faults(schema, good)) == [
        ".prompt_tokens is not there",
        ".completion_tokens is not there",
    ]
    assert list(find_faults(schema, good | counts | {"more": 1})) == [".more is not described"]
    assert list(find_faults(schema, good | counts | {"token_ids": ["98"]})) == [
        ".token_ids[0] is '98', no integer"
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("post", "/generate", b"{", {}, 400),
        ("post", "/v1/completions", b'{"model": "other"}', {}, 404),
        ("post", "/tokenize", b"{}", {"content-type": "text/plain"}, 415),
        ("post", "/detokenize", (b"x" * size for size in (2**23, 1)), {}, 413),
        ("get", "/v1/models/other", None, {}, 404),
        ("get", "/version", None, {"host": "a/b"}, 400),
        ("get", "/livez", None, {"x-long": "y" * 2**14}, 431),
    ],
    ids=["JSON", "no model", "no type", "too long", "another model", "host", "head"],
)
def test_a_refusal_has_a_status_that_is_described(
    running_server: RunningServer,
    document: dict[str, Any],
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None,
    headers: dict[str, str],
    status: int,
) -> None:
    with create_client(running_server.url) as client:
        headers = {"content-type": "application/json", **headers}
        answer = client.request(method, path, content=body, headers=headers)
    described = document["paths"][path.replace("other", "{name}")][method]["responses"]
    assert answer.status_code == status and str(status) in described
    content = described[str(status)]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/Error"}
    assert list(find_faults(document["components"]["schemas"]["Error"], answer.json())) == []


@pytest.mark.parametrize("path", PROBE_PATHS)
def test_a_probe_that_fails_is_described_without_content(
    document: dict[str, Any], path: str
) -> None:
    """Its status is the whole message: the response has no body."""
    responses = document["paths"][path]["get"]["responses"]
    assert set(responses["503"]) == {"description"}


@pytest.mark.parametrize("path", STREAMING_PATHS)
def test_a_route_that_streams_is_described_as_such(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


def test_a_key_may_be_needed(document: dict[str, Any]) -> None:
    assert document["security"] == [{}, {"key": []}, {"x-api-key": []}]
    schemes = document["components"]["securitySchemes"]
    assert schemes["key"]["scheme"] == "bearer"
    assert (schemes["x-api-key"]["in"], schemes["x-api-key"]["name"]) == ("header", "x-api-key")


def test_every_answer_has_a_description_in_words(document: dict[str, Any]) -> None:
    """OpenAPI requires a description, also where there is no content."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                assert answer["description"], (path, status)
