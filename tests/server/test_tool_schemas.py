"""Schemas of tools: what of them a grammar holds, and what is checked once a call has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forge.async_llm import AsyncLLM
from forge.outputs import StopMatch, TextDelta
from forge.request import Structure
from forge.server.call_check import CallCheck
from forge.server.chat_formats import ChatFormats
from forge.server.output_events import ArgumentsPiece, CallStart
from forge.server.response_format import NamedStructure
from forge.server.tool_formats import FORMATS, CallableTool, ToolCallFormat
from forge.server.tool_schema import hoist_references, relax_further, relax_schema
from forge.server.tools import parse_tools
from tests.server.real_tools import REAL_SCHEMAS
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.server.test_tools import (
    PATH,
    STRUCTURES,
    VOCABULARY,
    ScriptedHashModel,
    choices,
    set_script,
    stream_choices,
    tool,
)

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        ({"type": "array", "uniqueItems": True, "maxItems": 2.0}, {"type": "array", "maxItems": 2}),
        ({"oneOf": [STRING, {"not": STRING}]}, {"anyOf": [STRING, {}]}),
        (
            {"oneOf": [STRING], "anyOf": [True], "allOf": [False]},
            {"anyOf": [True], "allOf": [False, {"anyOf": [STRING]}]},
        ),
        ({"not": {}}, {"enum": []}),
        ({"const": None, "x-a": 1}, {"enum": [None]}),
        ({"type": ["string", "file"], "pattern": "^(?=a)", "minLength": 1}, {"minLength": 1}),
        (
            {"items": [STRING], "additionalItems": False},
            {"prefixItems": [STRING], "items": False},
        ),
        (
            {"patternProperties": {"^a": {}, "(?!b)": {}}, "additionalProperties": False},
            {"patternProperties": {"^a": {}}},
        ),
        ({"minProperties": 1, "properties": {"a": {}}}, {"properties": {"a": {}}}),
        ({"minimum": 1, "exclusiveMinimum": True, "multipleOf": 0}, {"minimum": 1}),
        ({"anyOf": [], "enum": 5, "required": "a", "properties": []}, {}),
        ({"properties": {"not": 5, "if": STRING}}, {"properties": {"not": {}, "if": STRING}}),
        ({"$ref": "#/$defs/gone"}, {}),
        ({"$ref": ["#"]}, {}),
        ({"pattern": r"^\p{L}[\pN]$"}, {"pattern": r"^\p{L}[\pN]$"}),
    ],
)
def test_a_schema_is_relaxed_keyword_by_keyword(schema: Any, relaxed: Any) -> None:
    assert relax_schema(hoist_references(schema)) == relaxed
    assert relax_schema(relaxed) == relaxed


def test_references_become_definitions_so_that_a_part_stays_whole() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/definitions/c~1d%20"}},
        "definitions": {"c/d ": {"items": {"$ref": "#"}}, "unused": {}},
    }
    properties = {"a": {"$ref": "#/$defs/r0"}, "b": {"$ref": "#/$defs/r1"}}
    definitions = {
        "r0": {"$ref": "#/$defs/r1"},
        "r1": {"items": {"$ref": "#/$defs/r2"}},
        "r2": {"properties": properties},
    }
    assert hoist_references(schema) == {"properties": properties, "$defs": definitions}


def test_a_schema_that_cannot_be_compiled_is_relaxed_in_two_steps() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}}
    once = relax_further(schema)
    assert once == {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert relax_further(once) == {"type": "object"}
    schema = {"patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 1}
    assert relax_further(schema) == {}


def test_schemas_of_hostile_clients_cost_little() -> None:
    """References with many spellings to one schema, and schemas that combine it again and again."""
    spellings = ["properties", "%70roperties", "pr%6fperties"]
    options = [{"$ref": f"#/{spelling}/a"} for spelling in spellings] * 100
    schema = {"properties": {"a": {"items": STRING}, "b": {"anyOf": options}}}
    assert hoist_references(schema)["$defs"] == {"r0": {"items": STRING}}
    levels: dict[str, Any] = {
        f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 100}
        for i, kind in enumerate(["allOf", "anyOf"] * 10)
    }
    schema = {"$ref": "#/$defs/d0", "properties": {"v": {"$ref": "#/$defs/d1"}}, "$defs": levels}
    tools = parse_tools([tool("f", parameters=schema)], "required", None)
    assert tools is not None
    tools.structure(FORMATS["qwen3_coder"], VOCABULARY, None)


class CountedSchema(dict[str, Any]):
    """A schema that counts how often a keyword of it is read."""

    num_reads = 0

    def get(self, keyword: str, default: Any = None) -> Any:
        """Return the keyword's value."""
        self.num_reads += 1
        return super().get(keyword, default)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_schema_is_read_once_for_all_calls_and_choices(name: str) -> None:
    """The calls of an answer are read and compared on the thread that serves all clients."""
    counts = []
    for num_choices, num_calls in ((1, 1), (3, 10)):
        inner = CountedSchema(type="object", properties={"a": STRING})
        reference = {"anyOf": [STRING, {"$ref": "#/$defs/d"}]}
        schema = {"type": "object", "properties": {"p": reference}, "$defs": {"d": inner}}
        tools = [CallableTool("f", schema)]
        for _ in range(num_choices):
            check = CallCheck(tools, FORMATS[name])
            for _ in range(num_calls):
                check.add([CallStart("f"), ArgumentsPiece("{}")], is_in_call=False)
            check.end(ends_by_itself=True, stops=True, is_in_call=False)
            assert check.violation is None
        counts.append(inner.num_reads)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_takes_the_schemas_of_real_tools(name: str) -> None:
    """In auto mode, which is what agents use; all of them in one request."""
    given = [tool(f"t{index}", parameters=each) for index, each in enumerate(REAL_SCHEMAS)]
    tools = parse_tools(given, "auto", None)
    assert tools is not None and len(REAL_SCHEMAS) == 30
    tools = tools.relax_tools(28, 29)  # no value, a pattern that is none: the server finds these
    STRUCTURES.compile(tools.structure(FORMATS[name], VOCABULARY, None))


# Over HTTP.

OPEN = {"type": "object", "properties": {"path": {"enum": ["/tmp/a"]}}, "required": ["path"]}
READ = tool("read", parameters=OPEN)
UNION = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}
COUNT = {"type": "object", "properties": {"n": UNION}, "required": ["n"]}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    with open_server(prepare=prepare, max_model_len=2048, num_blocks=512) as running:
        yield running


def test_tools_that_no_grammar_holds_are_taken_unless_they_are_strict(
    server: RunningServer,
) -> None:
    names = [(f"t{index}", each) for index, each in enumerate(REAL_SCHEMAS)]
    given = [tool(name, parameters=each) for name, each in names[-6:]]
    body = set_script(server, call("t28", '{"min": 4}'), tools=given)
    (choice,) = choices(server, **body)
    assert choice["finish_reason"] == "tool_calls"
    for name, schema in names[-6:]:
        strict = tool(name, parameters=schema, strict=True)
        answer = server.post(PATH, **{**body, "tools": [*given[:1], {**strict}], "max_tokens": 1})
        if name not in ("t24", "t27"):
            check_envelope(answer, 400, "tools[1].function.parameters", "invalid_schema")


@pytest.mark.long
def test_a_schema_that_costs_too_much_is_relaxed_unless_it_is_strict(server: RunningServer) -> None:
    patterns = [{"type": "string", "pattern": f"[ab]{{{i}}}.*"} for i in range(3, 25)]
    costly = tool("f", parameters={"properties": {"a": {"allOf": patterns}}})
    body = set_script(server, call("f", '{"a": "c"}'), tools=[costly])
    (choice,) = choices(server, **body)
    assert choice["finish_reason"] == "tool_calls"
    costly["function"]["strict"] = True
    check_envelope(server.post(PATH, **body), 400, "tools", "structure_too_costly")


@pytest.mark.parametrize(
    ("given", "script", "problem"),
    [
        (
            tool("f", parameters={"type": "object"}),
            call("f", '{"x": 1, "x": "y"}'),
            "'x' comes twice",
        ),
        (
            tool("f", parameters={"type": "object"}),
            call("f", '{"o": [{"x": 1, "x": 2}]}'),
            "'x' comes twice",
        ),
        (tool("f", parameters=COUNT, strict=True), call("f", '{"n": 7}'), "'oneOf'"),
        (tool("f", parameters=COUNT), call("f", '{"n": 7}'), None),
        (tool("f", parameters=COUNT, strict=True), call("f", '{"n": 4}'), None),
    ],
)
def test_a_call_that_does_not_have_its_schema_is_an_error(
    server: RunningServer, given: Any, script: str, problem: str | None
) -> None:
    body = set_script(server, f"So {script}", tools=[given])
    if problem is None:
        (choice,) = choices(server, **body)
        (parts,) = stream_choices(server, **body).values()
        assert choice["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
        return
    (choice,) = choices(server, **body)
    (parts,) = stream_choices(server, **body).values()
    for end in (choice, parts[-1]):
        assert (end["finish_reason"], end["error"]["code"]) == ("error", "schema_violation")
        assert problem in end["error"]["message"]


def test_a_message_has_the_calls_before_one_that_violates_its_schema(
    server: RunningServer,
) -> None:
    """A client may run each call of a message, whatever its finish reason is."""
    first, *others = (call("f", text) for text in ('{"x": 1}', '{"x": 1, "x": 2}', '{"x": 3}'))
    script = "\n".join([first, *others])
    given = tool("f", parameters={"type": "object"})
    (choice,) = choices(server, **set_script(server, script, tools=[given]))
    assert choice["finish_reason"] == "error"
    (kept,) = choice["message"]["tool_calls"]
    assert kept["function"]["arguments"] == '{"x": 1}'
    (choice,) = choices(server, **set_script(server, others[0], tools=[given]))
    assert choice["finish_reason"] == "error" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if getattr(form, "separator", None) is not None]
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_has_no_end_of_a_call_that_violates_its_schema(name: str, size: int) -> None:
    """Clients gather the arguments of each call, and run it once they are JSON."""
    form = FORMATS[name]
    assert isinstance(form, ToolCallFormat)
    syntax, written = form.parameters, []
    for value in ('{"x": 1}', '{"x": 1, "x": 2}', '{"x": 3}'):
        arguments = f'{{"v": {value}}}'
        if syntax is not None:
            arguments = syntax.key_text("v") + value + syntax.end
        written.append(form.call_prefix("f") + arguments + form.call_suffix)
    text = form.begin + (form.separator or "").join(written) + form.end
    tools = parse_tools(
        [tool("f", parameters={"properties": {"v": {"type": "object"}}})], None, None
    )
    parser = ChatFormats(None, form, "").create_parser(None, tools, [], VOCABULARY)
    events = [
        event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])
    ]
    events += parser.flush(TextDelta(0, "", (), "stop"))
    assert parser.violation is not None
    calls = "".join("|" if isinstance(each, CallStart) else each.text for each in events)
    assert calls == '|{"v": {"x": 1}}|{"v": {"x": 1, "x": 2}'


def test_an_escape_cannot_name_a_declared_property_again(server: RunningServer) -> None:
    script = call("read", '{"path": "/tmp/a", "\\u0070ath": "/etc"}')
    (choice,) = choices(server, **set_script(server, script, tools=[READ]), max_tokens=300)
    for found in choice["message"].get("tool_calls", []):
        if choice["finish_reason"] == "tool_calls":
            assert json.loads(found["function"]["arguments"])["path"] == "/tmp/a"


def test_an_answer_alongside_tools_has_its_response_format(server: RunningServer) -> None:
    """The engine compares no answer that might have been calls."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    body = set_script(server, '{"x": 1, "x": 2}', tools=[READ], response_format=form)
    (choice,) = choices(server, **body)
    assert (choice["finish_reason"], choice["error"]["code"]) == ("error", "schema_violation")
    (choice,) = choices(
        server, **set_script(server, '{"x": 1}', tools=[READ], response_format=form)
    )
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "finish", "is_valid"),
    [
        ('{"x": 1, "x": 2}', TextDelta(0, "", (), "stop", stop_match=StopMatch(7)), False),
        ('{"x": 1, "y": 2}', TextDelta(0, "", (), "stop", stop_match=StopMatch(7)), True),
        ('{"x": 1, "x', TextDelta(0, "", (), "stop", stop_match=StopMatch("x")), True),
        ('{"x": 1, "x": 2}', TextDelta(0, "", (), "length"), True),
        ('{"x": 1, "x', TextDelta(0, "", (), "stop"), False),
    ],
)
def test_an_answer_that_a_stop_ends_is_compared_where_it_is_complete(
    text: str, finish: TextDelta, is_valid: bool
) -> None:
    """A model may have several end ids, of which one is that of its tokenizer."""
    schema = NamedStructure("response_format", Structure.json_schema({"type": "object"}))
    tools = parse_tools([READ], None, None)
    formats = ChatFormats(None, FORMATS["hermes"], "")
    parser = formats.create_parser(schema, tools, [], VOCABULARY)
    parser.push(text)
    parser.flush(finish)
    assert (parser.violation is None) == is_valid


def test_responses_and_messages_with_such_a_call_fail(server: RunningServer) -> None:
    given = tool("f", parameters={"type": "object"})
    script = call("f", '{"x": 1, "x": 2}')
    common = {"model": "hash", "temperature": 0}
    set_script(server, script, tools=[given])
    response = {**common, "input": "hi", "tools": [{"type": "function", **given["function"]}]}
    answer = server.post("/v1/responses", **response)
    check_envelope(answer, 400, None, "schema_violation")
    text = server.post("/v1/responses", **response, stream=True).text
    assert "event: response.failed" in text and "response.completed" not in text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["response"]["error"]["code"] == "schema_violation"
    assert last["response"]["output"][-1]["status"] == "incomplete"
    assert last["sequence_number"] == text.count("event: ") - 1
    message = {
        **common,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    answer = server.post("/v1/messages", **message)
    assert answer.status_code == 400 and "comes twice" in answer.json()["error"]["message"]
    text = server.post("/v1/messages", **message, stream=True).text
    assert "event: error" in text and "message_stop" not in text
