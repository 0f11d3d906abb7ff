"""Only keywords that allow every value are dropped, and only where they are keywords."""

from __future__ import annotations

from typing import Any

import pytest

from forge.schema_keywords import drop_neutral_keywords

EVERY_NAME: list[Any] = [True, {}, {"type": "string"}, {"type": "string", "title": "Key"}]
SOME_NAMES: list[Any] = [
    False,
    {"type": "integer"},
    {"enum": ["a"]},
    {"type": "string", "pattern": "^a"},
    "string",
    None,
]


def record(names: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": {}}


@pytest.mark.parametrize("names", EVERY_NAME)
def test_names_that_may_be_any_text_are_dropped_at_any_depth(names: Any) -> None:
    plain = {"type": "object", "additionalProperties": {}}
    assert drop_neutral_keywords(record(names)) == plain
    schema = {"anyOf": [{"properties": {"a": record(names)}}, {"items": record(names)}]}
    expected = {"anyOf": [{"properties": {"a": plain}}, {"items": plain}]}
    assert drop_neutral_keywords(schema) == expected


@pytest.mark.parametrize("names", SOME_NAMES)
def test_names_that_are_bounded_stay(names: Any) -> None:
    """A grammar then refuses the schema by name, instead of allowing too much."""
    assert drop_neutral_keywords(record(names)) == record(names)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"propertyNames": {"type": "string"}}},
        {"$defs": {"propertyNames": {"type": "string"}}},
        {"enum": [{"propertyNames": True}]},
        {"const": {"propertyNames": True}},
        True,
    ],
)
def test_a_name_or_a_value_is_not_a_keyword(schema: Any) -> None:
    assert drop_neutral_keywords(schema) == schema
