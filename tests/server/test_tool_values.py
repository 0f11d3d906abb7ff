"""Values of arguments that are written one by one: what the grammar allows, and what is read back.

A value is rendered as the family's template does it: a string as it is, and anything else as JSON,
or as Python writes a scalar. The grammar must allow that, and the parser must return the value.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.server.tool_formats import (
    FORMATS,
    CallableTool,
    ParameterSyntax,
    ToolCallFormat,
)
from forge.server.tool_grammar import ToolGrammarBuilder
from forge.server.tool_parameters import MAX_TEXT_LENGTH, arguments_of
from forge.server.tool_parser import ToolCallParser
from forge.server.tool_schema import hoist_references, relax_schema
from tests.server.test_tool_formats import calls_in, first_misfit, parse

STRING = {"type": "string"}
NULL = {"type": "null"}
DEFINITIONS = {
    "text": STRING,
    "optional": {"anyOf": [{"$ref": "#/$defs/text"}, NULL]},
    "color": {"enum": ["red", "dark blue"], "type": "string"},
    "loop": {"$ref": "#/$defs/loop"},
    "json": {
        "anyOf": [
            *({"type": kind} for kind in ("string", "number", "boolean", "null")),
            {"type": "array", "items": {"$ref": "#/$defs/json"}},
            {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
        ]
    },
}
VALUES: list[tuple[Any, list[Any]]] = [
    (STRING, ["Rome", "", "null", "3", "True", '"quoted"', "a\nb", " {"]),
    ({**STRING, "title": "T", "x-order": 1}, ["Rome"]),
    ({"anyOf": [STRING, NULL]}, ["Rome", None, "nulls", " null", "n"]),  # pydantic's Optional
    ({"type": ["string", "null"]}, ["Rome", None]),
    ({"oneOf": [STRING, NULL]}, ["Rome", None]),
    ({}, ["Rome", 3, -1.5e-7, True, None, [1, "a"], {"a": [None]}, "{x", "tru", "1.2.3", "-"]),
    (True, ["Rome", 3]),
    ({"$ref": "#/$defs/text"}, ["Rome", "3"]),
    ({"allOf": [{"$ref": "#/$defs/text"}], "default": "a"}, ["Rome"]),
    ({"$ref": "#/$defs/optional"}, ["Rome", None]),
    ({"$ref": "#/$defs/color"}, ["red", "dark blue"]),
    ({"anyOf": [{"$ref": "#/$defs/color"}, NULL]}, ["dark blue", None]),
    ({"$ref": "#/$defs/json"}, ["Rome", 1, [{"a": "b"}, None], {"a": {"b": 1.5}}, False]),
    ({**STRING, "maxLength": 5}, ["", "abcde", "a\nb"]),
    ({**STRING, "minLength": 2}, ["ab", "a" * 40]),
    ({**STRING, "minLength": 2, "maxLength": 3}, ["ab", "abc", "éé"]),
    ({**STRING, "maxLength": MAX_TEXT_LENGTH + 1}, ["ab"]),
    ({**STRING, "format": "uri"}, ["https://a.b/c"]),
    ({**STRING, "format": "uuid4"}, ["d9428888-122b-11e1-b85c-61cd3cbb3210"]),
    ({**STRING, "pattern": "^[a-z]+$"}, ["abc"]),
    ({**STRING, "pattern": "x.z", "minLength": 4}, ["abxyz"]),
    ({**STRING, "pattern": "^(?!a)b"}, ["bc"]),
    ({**STRING, "pattern": "^[a-z]{1,2000}$"}, ["bc"]),
    ({**STRING, "pattern": "^[a-f0-9]{8}-[a-f0-9]{4}$"}, ["01234567-cdef"]),
    ({**STRING, "pattern": r"^\$\d+\$$"}, ["$12$"]),
    ({"minLength": 1}, ["Rome", 3]),
    ({"anyOf": [{**STRING, "maxLength": 3}, NULL]}, ["ab", None]),
    ({"anyOf": [{**STRING, "maxLength": 3}, {"type": "integer"}]}, ["ab", 12345]),
    ({"anyOf": [STRING, {"type": "integer"}]}, ["a", 3, -5, "3a", "03"]),
    ({"anyOf": [STRING, {"type": "integer", "minimum": 5}]}, ["a", 7, "3"]),
    ({"type": ["string", "number", "boolean"]}, ["a", 2.5, True, "yes"]),
    ({"anyOf": [STRING, {"type": "array", "items": STRING}]}, ["a", ["x", "y"], "[x", "[1]"]),
    (
        {"anyOf": [STRING, {"type": "object", "properties": {"k": {"type": "integer"}}}]},
        ["a", {"k": 1}, '{"k": "v"}', '{"k": 1, "k": 2}'],
    ),
    ({"enum": ["a", "b c", None, 1, True]}, ["a", "b c", None, 1, True]),
    ({"enum": ["", "a"]}, ["", "a"]),
    ({"enum": ["1", 1]}, ["1"]),
    ({"const": "x"}, ["x"]),
    ({"const": None}, [None]),
    ({"type": "string", "enum": ["a", "b"], "nullable": True}, ["b"]),
    ({"anyOf": [{"enum": ["auto"]}, {"type": "number"}]}, ["auto", 1.5]),
    ({"anyOf": [{"const": "auto"}, {"type": "object"}]}, ["auto", {"a": "b"}]),
    ({"type": "boolean"}, [True, False]),
    ({"type": ["boolean", "null"]}, [True, None]),
    ({"anyOf": [{"type": "integer"}, NULL]}, [3, None]),
    (NULL, [None]),
    ({"type": "integer", "minimum": 3}, [3]),
    ({"type": "array", "items": {}}, [[1, None, "a", {"b": True}]]),
    ({"type": "object"}, [{}, {"a": "b"}]),
    ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}]),
    ({"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}, ["a"]),
    ({"$ref": "#/properties/other"}, ["a", None]),
]
SYNTAXES = {
    name: form
    for name, form in FORMATS.items()
    if isinstance(form, ToolCallFormat) and form.parameters is not None
}
PYTHON_SCALARS = {"qwen3_coder", "llama4_pythonic"}
"""Formats whose templates write a scalar as Python does."""
SPECIAL_IDS = {"</arg_value>": 3, "</parameter>": 4}


def render_value(name: str, syntax: ParameterSyntax, value: Any) -> str:
    if isinstance(value, str) and not syntax.quote:
        return value
    if name in PYTHON_SCALARS and not isinstance(value, dict | list | str):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def render_call(name: str, form: ToolCallFormat, value: Any, tool: str = "t") -> str:
    """Return a call with this value, then another parameter, as the template writes it."""
    syntax = form.parameters
    assert syntax is not None
    written = {"v": render_value(name, syntax, value), "z": "7"}
    text = syntax.separator.join(syntax.key_text(k) + v + syntax.end for k, v in written.items())
    return form.begin + form.call_prefix(tool) + text + form.call_suffix + form.end


def create_tool(schema: Any, name: str = "t") -> CallableTool:
    properties = {"v": schema, "z": {"type": "integer"}, "other": {"type": ["string", "null"]}}
    whole = {"type": "object", "properties": properties, "required": ["v", "z"]}
    return CallableTool(name, relax_schema(hoist_references({**whole, "$defs": DEFINITIONS})))


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_grammar_allows_what_the_template_writes_and_the_parser_reads_it_back(
    name: str,
) -> None:
    form = SYNTAXES[name]
    assert form.parameters is not None
    tools = [create_tool(schema, f"t{index}") for index, (schema, _) in enumerate(VALUES)]
    grammar = ToolGrammarBuilder(form, {}).build_grammar(tools, 1, 1)
    for tool, (schema, values) in zip(tools, VALUES, strict=True):
        held = arguments_of(tool, form.parameters).check
        for value in values:
            text = render_call(name, form, value, tool.name)
            assert first_misfit(grammar, text) is None, (schema, value)
            events = parse(ToolCallParser(form, [tool]), [text])
            assert parse(ToolCallParser(form, [tool]), list(text)) == events
            assert calls_in(events) == [(tool.name, {"v": value, "z": 7})], (schema, value)
            assert type(calls_in(events)[0][1]["v"]) is type(value)
            assert held.find_value_violation({"v": value, "z": 7}) is None, (schema, value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**STRING, "maxLength": 3}, "abcd"),
        ({**STRING, "minLength": 3}, "ab"),
        ({**STRING, "pattern": "^[a-z]+$"}, "aB"),
        ({"enum": ["a", "b"]}, "c"),
        ({"enum": ["a", None]}, "true"),
        ({"type": "integer"}, "Rome"),
        ({"type": "boolean"}, "yes"),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "1.5"),
    ],
)
@pytest.mark.parametrize("name", [n for n in SYNTAXES if n != "llama4_pythonic"])
def test_the_grammar_refuses_what_the_schema_does(name: str, schema: Any, text: str) -> None:
    form = SYNTAXES[name]
    grammar = ToolGrammarBuilder(form, {}).build_grammar([create_tool(schema)], 1, 1)
    assert first_misfit(grammar, render_call(name, form, text)) is not None


@pytest.mark.parametrize("schema", [STRING, {**STRING, "minLength": 20}, {"enum": ["a", None]}])
@pytest.mark.parametrize("name", [n for n in SYNTAXES if n != "llama4_pythonic"])
def test_a_text_has_no_end_of_a_value_in_it(name: str, schema: Any) -> None:
    """A parser would end the value there, whether the end is a special token or not."""
    form = SYNTAXES[name]
    assert form.parameters is not None
    for special_ids in ({}, SPECIAL_IDS):
        builder = ToolGrammarBuilder(form, special_ids)
        grammar = builder.build_grammar([create_tool(schema)], 1, 1)
        text = render_call(name, form, f"a{form.parameters.end}b")
        misfit = first_misfit(grammar, text)
        after_end = text.partition(f"a{form.parameters.end}")[2]
        assert misfit is not None and len(misfit) >= len(after_end)


def test_text_is_streamed_as_soon_as_it_is_certain() -> None:
    form = SYNTAXES["glm45"]

    def pieces(schema: Any, *texts: str) -> list[list[Any]]:
        parser = ToolCallParser(form, [create_tool(schema)])
        parser.push("<tool_call>t\n<arg_key>v</arg_key>\n<arg_value>")
        return [[event[0] for event in parser.push(text)] for text in texts]

    optional = {"anyOf": [STRING, NULL]}
    assert pieces(optional, "nul", "lify", " x") == [[], ['"nullify'], [" x"]]
    assert pieces(optional, "null", "</arg_value>\n") == [[], ["null"]]
    assert pieces({}, "12", "3", "a", "b") == [[], [], ['"123a'], ["b"]]
    assert pieces({}, '{"a"', ": 1", "}</arg_value>\n") == [[], [], ['{"a": 1}']]
    assert pieces(STRING, "12", "</arg") == [['"12'], []]
