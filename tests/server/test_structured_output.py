"""Structured output over HTTP: the three fields that request it, and the errors of each."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forge.grammar_sandbox import GrammarSandbox
from forge.request import SamplingParams, Structure
from forge.server.admission import AdmissionQueue
from forge.server.errors import APIError
from tests.engine.test_grammar_sandbox import COSTLY, LONG_GRAMMAR, SHORT
from tests.server.bad_inputs import nested, schema
from tests.server.local_server import TIMEOUT_S, block_compilation
from tests.server.test_server import (
    RunningServer,
    check_envelope,
    check_serves,
    open_server,
    parse_chunks,
)

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
REGEX = {"regex": "(red|green){2}( blue)?!"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server() as running:
        yield running
        check_serves(running)


def build_body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "a"}
    )
    return {"model": "hash", "max_tokens": 100, **prompt, **fields}


def choice_texts(path: str, answer: httpx.Response) -> list[tuple[str, str]]:
    """Return the text and finish reason of every choice."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == "/generate":
        return [(found["text"], found["finish_reason"])]
    return [
        (
            choice["message"]["content"] if "chat" in path else choice["text"],
            choice["finish_reason"],
        )
        for choice in found["choices"]
    ]


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_fits_the_schema(server: RunningServer, path: str) -> None:
    for seed in range(8):
        answer = server.post(path, **build_body(path, response_format=FORMAT, seed=seed))
        ((text, finish),) = choice_texts(path, answer)
        value = json.loads(text)
        assert (list(value), finish) == (["city", "sunny"], "stop")
        assert value["city"] in ("Oslo", "Rome") and type(value["sunny"]) is bool


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_matches_the_regex(server: RunningServer, path: str) -> None:
    ((text, finish),) = choice_texts(path, server.post(path, **build_body(path, **REGEX)))
    assert (re.fullmatch(REGEX["regex"], text) is not None, finish) == (True, "stop")


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_of_the_grammar(server: RunningServer, path: str) -> None:
    grammar = 'start: "<" /[a-z]{1,5}/ ">"'
    ((text, finish),) = choice_texts(path, server.post(path, **build_body(path, grammar=grammar)))
    assert (re.fullmatch("<[a-z]{1,5}>", text) is not None, finish) == (True, "stop")


@pytest.mark.parametrize("path", PATHS)
def test_a_json_object_may_be_any_object(server: RunningServer, path: str) -> None:
    body = build_body(path, response_format={"type": "json_object"}, seed=3, logit_bias={"126": 9})
    ((text, finish),) = choice_texts(path, server.post(path, **body))
    assert finish == "length" or type(json.loads(text)) is dict
    assert text.startswith("{")


@pytest.mark.parametrize("path", PATHS)
def test_a_format_of_text_has_no_effect(server: RunningServer, path: str) -> None:
    plain = choice_texts(path, server.post(path, **build_body(path, seed=1, max_tokens=9)))
    body = build_body(path, seed=1, max_tokens=9, response_format={"type": "text"})
    assert choice_texts(path, server.post(path, **body)) == plain


@pytest.mark.parametrize("path", PATHS[:2])
def test_every_choice_of_a_stream_has_the_structure(server: RunningServer, path: str) -> None:
    whole = choice_texts(path, server.post(path, **build_body(path, seed=5, n=3, **REGEX)))
    answer = server.post(path, **build_body(path, seed=5, n=3, stream=True, **REGEX))
    streamed = ["", "", ""]
    for chunk in parse_chunks(answer.text):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "chat" in path else choice["text"]
            streamed[choice["index"]] += piece
    assert streamed == [text for text, _ in whole]
    assert all(re.fullmatch(REGEX["regex"], text) for text in streamed)


def test_the_client_of_openai_parses_the_structure_it_requested(
    server: RunningServer, openai: Any
) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="hash",
            messages=[{"role": "user", "content": "weather?"}],
            response_format=FORMAT,  # type: ignore[arg-type]
            max_completion_tokens=90,
        )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Oslo", "Rome")


PROPERTIES = {f"p{i}": {"type": "integer"} for i in range(10_000)}
REFUSED_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    (schema({"type": "foo"}), "response_format", "invalid_schema"),
    (schema({"$ref": "#"}), "response_format", "invalid_schema"),
    (schema({"$ref": "http://localhost:1/x.json"}), "response_format", "invalid_schema"),
    (schema({"$ref": "file:///etc/passwd"}), "response_format", "invalid_schema"),
    (schema(nested(200)), "response_format", "invalid_schema"),
    (schema({"type": "object", "properties": PROPERTIES}), "response_format", "invalid_schema"),
    (schema({"type": "string", "pattern": "["}), "response_format", "invalid_schema"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "response_format", "invalid_schema"),
    (schema(False), "response_format", "invalid_schema"),
    (schema([]), "response_format", "invalid_value"),
    (schema(None), "response_format", "invalid_value"),
    ({"response_format": "json_object"}, "response_format", "invalid_type"),
    ({"response_format": []}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": ["text"]}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "text", "a": 1}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {**FORMAT, "json_schema": {"a": 1}}}, "response_format", "invalid_value"),
    ({"response_format": {**FORMAT, "json_schema": {"schema": {}, "strict": 1}}},
     "response_format", "invalid_value"),
    ({"structured_outputs": {"json": nested(450)}}, "structured_outputs", "invalid_schema"),
    ({"structured_outputs": {"json": " " * 300_000}}, "structured_outputs", "invalid_schema"),
    ({"regex": "["}, "regex", "invalid_regex"),
    ({"regex": "(?<=a)b"}, "regex", "invalid_regex"),
    ({"regex": 5}, "regex", "invalid_value"),
    ({"regex": ["a"]}, "regex", "invalid_value"),
    ({"regex": "a" * 8_193}, "regex", "invalid_regex"),
    ({"grammar": ""}, "grammar", "invalid_grammar"),
    ({"grammar": "start: start"}, "grammar", "invalid_grammar"),
    ({"grammar": "start: " + "(" * 6000 + '"a"' + ")" * 6000}, "grammar", "invalid_grammar"),
    ({"regex": "a", "grammar": 'start: "a"'}, "grammar", "conflicting_parameters"),
    ({"regex": "a", "response_format": FORMAT}, "regex", "conflicting_parameters"),
    ({"regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "code"), REFUSED_FIELDS, ids=range(len(REFUSED_FIELDS))
)
def test_a_structure_that_cannot_be_followed_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = server.post(path, **build_body(path, **fields))
    check_envelope(answer, 400, param, code)
    assert server.is_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a+)+b"},
        {"regex": "a{1,100000}{1,100000}"},
        {"regex": "(.*a){25}"},
        {"regex": "(x+x+)+y"},
        schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
        schema({"type": "string", "maxLength": 10**9}),
        schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}),
    ],
    ids=range(7),
)
def test_what_is_costly_elsewhere_is_followed_like_any_other(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    """An automaton reads the text; nothing backtracks and nothing is expanded."""
    path = "/v1/completions"
    ((text, finish),) = choice_texts(
        path, server.post(path, **build_body(path, max_tokens=40, **fields))
    )
    assert finish in ("stop", "length") and text


def test_an_engine_compiles_a_structure_once_for_all_requests(server: RunningServer) -> None:
    """The engine also has its level, so that it waits for no structure of a slower one."""
    structures, once = server.llm.engine.grammar_backend, Structure.regex("once{1,7}")
    compiled = []
    for _ in range(3):
        server.post("/generate", **build_body("/generate", regex=once.text))
        compiled.append(structures.compiled_grammar(once))
    assert compiled[0] is not None and compiled == compiled[:1] * 3
    assert structures._recent[once].level == structures.compilable_level(once)  # type: ignore[attr-defined]


def test_others_are_served_while_the_first_structure_waits_for_its_compiler() -> None:
    with open_server() as server, ThreadPoolExecutor(1) as pool:
        with block_compilation(server.llm) as waiting:
            body = build_body("/generate", regex="a{9}")
            future = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=TIMEOUT_S)
            assert waiting.wait(TIMEOUT_S)
            other = server.post("/generate", **build_body("/generate", max_tokens=2))
            assert other.status_code == 200 and not future.done()
        assert choice_texts("/generate", future.result()) == [("a" * 9, "stop")]


@pytest.mark.parametrize("path", PATHS)
def test_what_takes_more_memory_than_it_may_is_refused_and_others_are_not(
    server: RunningServer, path: str
) -> None:
    """Without the limit, fifty of these took minutes and gigabytes."""
    answer = server.post(path, **build_body(path, grammar=COSTLY))
    check_envelope(answer, 400, "grammar", "structure_too_costly")
    assert "takes more than 16 MiB to compile" in answer.json()["error"]["message"]
    ((text, finish),) = choice_texts(path, server.post(path, **build_body(path, regex="[0-9]{3}")))
    assert (len(text), finish) == (3, "stop")
    kept = server.llm.engine.grammar_backend._grammars  # type: ignore[attr-defined]
    assert Structure.grammar(COSTLY) not in kept


@pytest.mark.long
def test_tools_that_cost_too_much_together_are_not_compiled_one_by_one(
    server: RunningServer,
) -> None:
    """A check of each tool would name the first of them."""
    cost = {"allOf": [{"type": "string", "pattern": f"[ab]{{{i}}}.*"} for i in range(3, 43)]}
    parameters = {"type": "object", "properties": {"a": cost}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    tools = [{"type": "function", "function": function}]
    path = "/v1/chat/completions"
    answer = server.post(path, **build_body(path, tools=tools, tool_choice="required"))
    check_envelope(answer, 400, "tools", "structure_too_costly")


@pytest.mark.long
def test_a_structure_that_finds_no_room_in_the_slow_level_may_be_sent_again(
    server: RunningServer,
) -> None:
    line = AdmissionQueue(server.llm)
    line._sandbox = GrammarSandbox(server.llm.engine.grammar_backend.vocabulary, (SHORT, SHORT))
    try:
        with pytest.raises(APIError, match="the queue of such structures is full") as error:
            asyncio.run(line.check_structure(SamplingParams(structure=LONG_GRAMMAR)))
    finally:
        line.close()
    assert (error.value.status, error.value.code) == (429, "queue_full")
    assert error.value.headers == {"retry-after": "1"}


TWICE = {
    "type": "object",
    "patternProperties": {"^k$": {"const": 1}},
    "additionalProperties": False,
    "minProperties": 2,
    "maxProperties": 2,
}
"""A schema whose masks allow one text only, in which a name comes twice."""
TWICE_FORMAT = {"type": "json_schema", "json_schema": {"name": "twice", "schema": TWICE}}
TWICE_BODIES: list[tuple[str, dict[str, Any]]] = [
    *((path, build_body(path, response_format=TWICE_FORMAT)) for path in PATHS),
    ("/v1/completions", build_body("", response_format=TWICE_FORMAT, n=3)),
    ("/v1/completions", build_body("", prompt=["a", "b"], structured_outputs={"json": TWICE})),
    (
        "/v1/chat/completions/batch",
        {
            **{"model": "hash", "max_tokens": 100, "response_format": TWICE_FORMAT},
            "messages": 2 * [[{"role": "user", "content": "hi"}]],
        },
    ),
    (
        "/v1/responses",
        {
            "model": "hash",
            "input": "hi",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": TWICE}},
        },
    ),
    (
        "/v1/messages",
        {
            **build_body("chat"),
            "output_config": {"format": {"type": "json_schema", "schema": TWICE}},
        },
    ),
]


def count_errors(server: RunningServer) -> float:
    """Return how many choices have ended with an error."""
    text = server.client.get("/metrics").text
    return sum(map(float, re.findall(r'^forge_requests_total\{finish="error"\} (.*)$', text, re.M)))


@pytest.mark.parametrize(("path", "body"), TWICE_BODIES)
def test_an_output_that_parsers_read_in_different_ways_is_an_error(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    num_errors = count_errors(server)
    has_choices = not path.endswith(("responses", "messages"))
    answer = server.post(path, **body)
    assert answer.status_code == (200 if has_choices else 400)
    assert count_errors(server) > num_errors
    for part in answer.json().get("choices", [answer.json()]):
        assert "the name 'k' comes twice in an object" in part["error"]["message"]
        assert path.endswith("messages") or part["error"]["code"] == "schema_violation"
        assert not has_choices or part["finish_reason"] == "error"
    if path.endswith(("batch", "generate")):
        return
    text = server.post(path, **body, stream=True).text
    assert "the name 'k' comes twice in an object" in text
    assert ("data: [DONE]" in text) == has_choices
    assert ('"finish_reason":"error"' in text) == has_choices
    assert not any(end in text for end in ('"stop"', "response.completed", "end_turn"))


def test_a_violation_ends_its_choice_alone(server: RunningServer) -> None:
    """Each choice draws two of two names, which are the same for about half of them."""
    form = {**TWICE, "patternProperties": {"^[km]$": {"const": 1}}}
    body = {**build_body("", structured_outputs={"json": form}), "n": 16, "seed": 1}
    answer = server.post("/v1/completions", **body)
    ends = {"stop": 0, "error": 0}
    for choice in answer.json()["choices"]:
        ends[choice["finish_reason"]] += 1
        names = [name for name in choice["text"] if name in "km"]
        assert choice["finish_reason"] == ("stop" if len(set(names)) == 2 else "error")
        assert ("error" in choice) == (choice["finish_reason"] == "error")
    assert all(ends.values()), ends
    chunks = parse_chunks(server.post("/v1/completions", **body, stream=True).text)
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert Counter(each["finish_reason"] for each in parts) == ends
