"""Structured output over HTTP: what is asked for in three fields, and how each is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forge.compiler import StructureCompiler
from forge.request import SamplingParams, Structure
from forge.server.line import Line
from forge.server.refusal import Refused
from tests.bad_inputs import nested, schema
from tests.listening import LIMIT_S, withheld_vocabulary
from tests.test_compiler import COSTLY, LONG, SHORT
from tests.test_server import Served, check_envelope, chunks_of, good_answer, serving

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
WORDS = {"regex": "(red|green){2}( blue)?!"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as running:
        yield running
        good_answer(running)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "a"}
    )
    return {"model": "hash", "max_tokens": 100, **prompt, **fields}


def texts(path: str, answer: httpx.Response) -> list[tuple[str, str]]:
    """Text and finish reason of every choice."""
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
def test_an_answer_fits_the_schema(server: Served, path: str) -> None:
    for seed in range(8):
        answer = server.post(path, **body_of(path, response_format=FORMAT, seed=seed))
        ((text, finish),) = texts(path, answer)
        value = json.loads(text)
        assert (list(value), finish) == (["city", "sunny"], "stop")
        assert value["city"] in ("Oslo", "Rome") and type(value["sunny"]) is bool


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_matches_the_regex(server: Served, path: str) -> None:
    ((text, finish),) = texts(path, server.post(path, **body_of(path, **WORDS)))
    assert (re.fullmatch(WORDS["regex"], text) is not None, finish) == (True, "stop")


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_of_the_grammar(server: Served, path: str) -> None:
    grammar = 'start: "<" /[a-z]{1,5}/ ">"'
    ((text, finish),) = texts(path, server.post(path, **body_of(path, grammar=grammar)))
    assert (re.fullmatch("<[a-z]{1,5}>", text) is not None, finish) == (True, "stop")


@pytest.mark.parametrize("path", PATHS)
def test_a_json_object_may_be_any_object(server: Served, path: str) -> None:
    asked = body_of(path, response_format={"type": "json_object"}, seed=3, logit_bias={"126": 9})
    ((text, finish),) = texts(path, server.post(path, **asked))
    assert finish == "length" or type(json.loads(text)) is dict
    assert text.startswith("{")


@pytest.mark.parametrize("path", PATHS)
def test_a_format_of_text_asks_for_nothing(server: Served, path: str) -> None:
    plain = texts(path, server.post(path, **body_of(path, seed=1, max_tokens=9)))
    asked = body_of(path, seed=1, max_tokens=9, response_format={"type": "text"})
    assert texts(path, server.post(path, **asked)) == plain


@pytest.mark.parametrize("path", PATHS[:2])
def test_every_choice_of_a_stream_has_the_structure(server: Served, path: str) -> None:
    whole = texts(path, server.post(path, **body_of(path, seed=5, n=3, **WORDS)))
    answer = server.post(path, **body_of(path, seed=5, n=3, stream=True, **WORDS))
    streamed = ["", "", ""]
    for chunk in chunks_of(answer.text):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "chat" in path else choice["text"]
            streamed[choice["index"]] += piece
    assert streamed == [text for text, _ in whole]
    assert all(re.fullmatch(WORDS["regex"], text) for text in streamed)


def test_the_client_of_openai_parses_what_it_asked_for(server: Served, openai: Any) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="hash",
            messages=[{"role": "user", "content": "weather?"}],
            response_format=FORMAT,  # type: ignore[arg-type]
            max_completion_tokens=90,
        )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Oslo", "Rome")


PROPERTIES = {f"p{i}": {"type": "integer"} for i in range(10_000)}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
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
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=range(len(REFUSED)))
def test_a_structure_that_cannot_be_followed_is_refused(
    server: Served, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = server.post(path, **body_of(path, **fields))
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
    server: Served, fields: dict[str, Any]
) -> None:
    """An automaton is walked; nothing backtracks and nothing is spelt out."""
    path = "/v1/completions"
    ((text, finish),) = texts(path, server.post(path, **body_of(path, max_tokens=40, **fields)))
    assert finish in ("stop", "length") and text


def test_an_engine_compiles_a_structure_once_for_all_who_ask(server: Served) -> None:
    """And knows within which lane, so that it waits for none of a slower one."""
    structures, once = server.llm.engine.structures, Structure.regex("once{1,7}")
    compiled = []
    for _ in range(3):
        server.post("/generate", **body_of("/generate", regex=once.text))
        compiled.append(structures.compiled(once))
    assert compiled[0] is not None and compiled == compiled[:1] * 3
    assert structures._kept[once].lane == structures.accepted(once)  # type: ignore[attr-defined]


def test_others_are_served_while_the_first_structure_waits_for_its_compiler() -> None:
    with serving() as server, ThreadPoolExecutor(1) as pool:
        with withheld_vocabulary(server.llm) as begun:
            body = body_of("/generate", regex="a{9}")
            asked = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=LIMIT_S)
            assert begun.wait(LIMIT_S)
            other = server.post("/generate", **body_of("/generate", max_tokens=2))
            assert other.status_code == 200 and not asked.done()
        assert texts("/generate", asked.result()) == [("a" * 9, "stop")]


@pytest.mark.parametrize("path", PATHS)
def test_what_takes_more_memory_than_it_may_is_refused_and_others_are_not(
    server: Served, path: str
) -> None:
    """Without the limit, fifty of these took minutes and gigabytes."""
    answer = server.post(path, **body_of(path, grammar=COSTLY))
    check_envelope(answer, 400, "grammar", "structure_too_costly")
    assert "takes more than 16 MiB to compile" in answer.json()["error"]["message"]
    ((text, finish),) = texts(path, server.post(path, **body_of(path, regex="[0-9]{3}")))
    assert (len(text), finish) == (3, "stop")
    kept = server.llm.engine.structures._compiled  # type: ignore[attr-defined]
    assert Structure.grammar(COSTLY) not in kept


def test_tools_that_cost_too_much_together_are_not_compiled_one_by_one(server: Served) -> None:
    """A check of each would name the first of them."""
    cost = {"allOf": [{"type": "string", "pattern": f"[ab]{{{i}}}.*"} for i in range(3, 43)]}
    parameters = {"type": "object", "properties": {"a": cost}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    path = "/v1/chat/completions"
    answer = server.post(path, **body_of(path, tools=tools, tool_choice="required"))
    check_envelope(answer, 400, "tools", "structure_too_costly")


def test_a_structure_that_finds_no_room_in_the_slow_lane_may_be_sent_again(
    server: Served,
) -> None:
    line = Line(server.llm)
    line._compiler = StructureCompiler(server.llm.engine.structures.vocabulary, (SHORT, SHORT))
    try:
        with pytest.raises(Refused, match="too many that do are waiting") as refused:
            asyncio.run(line.prepare(SamplingParams(structure=LONG)))
    finally:
        line.close()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.headers == {"retry-after": "1"}
