"""Finished JSON is compared with its schema as a parser reads it, at a bounded cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.request import Structure
from forge.schema_check import SchemaCheck
from forge.schema_grammar import prepare_schema
from forge.strict_json import MAX_NESTING, SchemaViolation, parse_json
from forge.structured_output import LLGuidanceBackend
from forge.tokenizer import ByteTokenizer

PATH: dict[str, Any] = {"properties": {"path": {"enum": ["/tmp/a"]}}, "required": ["path"]}
EXPRESSION: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, *({"$ref": f"#/$defs/{name}"} for name in ("add", "multiply"))],
    "$defs": {
        name: {
            "type": "object",
            "properties": {
                **{"left": {"$ref": "#"}, "right": {"$ref": "#"}, "kind": {"const": name}},
            },
            "required": ["left", "right", "kind"],
        }
        for name in ("add", "multiply")
    },
}


@pytest.mark.parametrize(
    "text",
    [
        '{"path": "/tmp/a", "\\u0070ath": "/etc"}',
        '{"k": 1, "k": 1}',
        '[{"a": {"k": 1, "\\u006b": 2}}]',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        "1e400",
        "-1e400",
        "1" * 400,
        "NaN",
        "-Infinity",
        '{"a": 1',
        "1 2",
        "[" * 129 + "]" * 129,
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_json_that_parsers_read_in_different_ways_is_refused(text: str) -> None:
    with pytest.raises(SchemaViolation):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"k": {"k": 1}, "K": 1, "\\u006b\\u006b": 1}',
        '"\\ud83d\\ude00 \\\\ud800"',
        "[" * MAX_NESTING + "]" * MAX_NESTING,
        "1" * 308,
        "1e308",
    ],
)
def test_other_json_is_read(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("schema", "fitting", "other"),
    [
        (PATH, ['{"path": "/tmp/a", "b": 1}', "[]"], ['{"path": "/etc"}', "{}"]),
        (True, ["1"], []),
        (False, [], ["1"]),
        ({"type": "integer"}, ["1", "1.0", "-3"], ["1.5", "true", '"1"', "null"]),
        ({"type": ["null", "boolean"]}, ["null", "true"], ["0", "{}"]),
        ({"enum": [1, [True], {"a": 1}]}, ["1.0", "[true]", '{"a": 1}'], ["true", "[1]"]),
        ({"const": True}, ["true"], ["1", "1.0"]),
        ({"multipleOf": 0.1}, ["0.3", "1.1", "7"], ["0.35"]),
        ({"minimum": 0, "exclusiveMinimum": True}, ["1", "true"], ["0", "-0.0", "-1", "1e-400"]),
        ({"exclusiveMaximum": 5}, ["4.9"], ["5", "4.99999999999999999999"]),
        ({"maxLength": 1}, ['"\\ud83d\\ude00"', "12"], ['"ab"']),
        ({"pattern": "^a+$"}, ['"aa"', "1"], ['"ab"', '"aa\\n"']),
        ({"format": "date"}, ['"2024-02-29"', '"1900-02-28"'], ['"2023-02-29"', '"0000-01-01"']),
        ({"format": "date"}, ['"2000-02-29"'], ['"1900-02-29"', '"2024-02-30"']),
        ({"format": "password"}, ['"x"'], []),
        (
            {"patternProperties": {"^x": {"type": "null"}}},
            ['{"x": null, "y": 1}'],
            ['{"\\u0078": 1}'],
        ),
        ({"additionalProperties": {"type": "null"}}, ['{"x": null}'], ['{"x": 1}']),
        ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]", "[null, 1]"]),
        ({"prefixItems": [{"type": "null"}], "items": {"type": "integer"}}, ["[null, 1]"], ["[1]"]),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["1", "9"], ["4", "true"]),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}]}, ["4"], ["1", "9"]),
        ({"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"}, ["null"], ["1"]),
        ({"$defs": {"a": {"$anchor": "b", "type": "null"}}, "$ref": "#b"}, ["null"], ["1"]),
        (
            {
                "$id": "http://h/r",
                "$defs": {"a": {"$id": "s", "type": "null"}},
                "items": {"$ref": "s"},
            },
            ["[null]"],
            ["[1]"],
        ),
        (
            {
                "$ref": "#/default",
                "default": {"items": {"$ref": "#/enum/0"}},
                "enum": [{"const": 1}, [1], [2]],
            },
            ["[1]"],
            ["[2]"],
        ),
        ({"$ref": "#"}, ["1"], []),
        ({"$ref": "http://127.0.0.1:9/x"}, ["1"], []),
    ],
)
def test_a_value_is_compared_as_the_standard_says(
    schema: Any, fitting: list[str], other: list[str]
) -> None:
    check = SchemaCheck(schema)
    assert [text for text in fitting if check.find_violation(text)] == []
    assert [text for text in other if not check.find_violation(text)] == []


def test_a_violation_names_the_keyword_and_the_place() -> None:
    check = SchemaCheck({"properties": {"a": {"items": {"maximum": 5}}}})
    assert check.find_violation('{"a": [1, 7]}') == "'maximum' does not allow its value at '/a/1'"


def nest(depth: int, innermost: Any) -> Any:
    value = innermost
    for _ in range(depth):
        value = {"left": 1, "right": value, "kind": "multiply"}
    return value


def test_a_schema_that_refers_to_itself_twice_costs_no_more_with_each_level() -> None:
    """Without the table of results 60 levels would take 2**60 comparisons."""
    check = SchemaCheck(EXPRESSION)
    assert check.find_value_violation(nest(60, 1)) is None
    assert check.find_value_violation(nest(60, "1")) is not None


def test_a_regex_does_not_backtrack() -> None:
    check = SchemaCheck({"pattern": "^(a|a|aa)*$"})
    assert check.find_violation(json.dumps("a" * 5000 + "b")) is not None


def test_no_output_waits_for_patterns_or_pays_for_them() -> None:
    """Compiled with the structure: the first output that needs them would have had too many."""
    schema = {"anyOf": [{"type": "string", "pattern": f"^a{index}$"} for index in range(40)]}
    tokenizer = ByteTokenizer()
    backend = LLGuidanceBackend(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token])
    matcher = backend.create_matcher(Structure.json_schema(schema), allow_end=True)
    assert [matcher.feed(token) for token in tokenizer.encode('"a39"')][-1]


def test_a_pattern_that_comes_often_is_compiled_once() -> None:
    """A matcher takes 40 KiB, and a schema has the same formats again and again."""
    text = {"type": "string", "format": "date-time", "pattern": "^2"}
    names = [f"p{index}" for index in range(100)]
    schema = {"properties": {name: dict(text) for name in names}, "patternProperties": {"^2": text}}
    patterns = SchemaCheck(schema).compile_patterns()
    assert sorted(patterns) == [("format", "date-time"), ("pattern", "^2")]


def test_a_match_costs_as_much_as_many_other_comparisons() -> None:
    """A short text takes 33 us, so the thread of the steps matched for seconds."""
    patterns = [{"pattern": f"^[a-z0-9]{{0,{index}}}$"} for index in range(50, 60)]
    check = SchemaCheck({"items": {"allOf": patterns}})
    check.compile_patterns()
    assert check.find_value_violation([f"a{index}" for index in range(100)]) is None
    with pytest.raises(ValueError, match="steps or more"):
        check.find_value_violation([f"a{index}" for index in range(500)])


def test_too_many_steps_end_the_comparison() -> None:
    check = SchemaCheck({"items": {"anyOf": [*({"maximum": -n} for n in range(1000)), True]}})
    with pytest.raises(ValueError, match="steps or more"):
        check.find_value_violation(list(range(1, 301)))


def test_a_prepared_schema_has_no_unknown_format_and_one_spelling_of_each_name() -> None:
    schema = {"properties": {"a": {"type": "string", "format": "password"}}}
    prepared = prepare_schema(schema)
    assert prepared["properties"] == {"a": {"type": "string"}}
    assert prepared["x-guidance"]["json_allowed_escapes"] == 'nrbtf\\"'
    for closed in ({"additionalProperties": False}, {"const": ["\u001f"]}):
        assert "json_allowed_escapes" not in prepare_schema({**schema, **closed})["x-guidance"]


def test_a_literal_may_be_deeper_than_an_output() -> None:
    value: Any = 1
    for _ in range(500):
        value = [value]
    check = SchemaCheck({"enum": [value, [[1]]]})
    assert check.find_violation("[[1]]") is None
    assert check.find_violation("[[[1]]]") is not None
