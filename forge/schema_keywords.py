"""The schemas within a JSON schema, and keywords that allow every value.

Owns which keywords have schemas and which have literal values. Knows no grammar.

    {"type": "object", "propertyNames": {"type": "string"}}   ──►   {"type": "object"}

Always true: without these keywords a schema allows exactly what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value has schemas by name: a name in it is not a keyword."""
_LITERALS = {"const", "enum", "default", "examples"}
_ANNOTATIONS = {"title", "description", "$comment"}


def map_schemas(change: Callable[[dict[str, Any]], dict[str, Any]], schema: Any) -> Any:
    """Return the schema with `change` applied to each object in it that is a schema.

    Recursive: raise RecursionError for a schema that is too deep.
    """
    if isinstance(schema, list):
        return [map_schemas(change, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _map_keyword(change, key, value) for key, value in change(schema).items()}


def _map_keyword(
    change: Callable[[dict[str, Any]], dict[str, Any]], keyword: str, value: Any
) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: map_schemas(change, schema) for name, schema in value.items()}
    return map_schemas(change, value)


def iterate_subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each object that is a schema directly within this one."""
    stack: list[Any] = []
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            stack += value.values()
        elif keyword not in _LITERALS:
            stack.append(value)
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            yield item


def iterate_schemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield each object in the schema that is a schema, itself included. Not recursive."""
    stack = [schema] if isinstance(schema, dict) else []
    while stack:
        item = stack.pop()
        yield item
        stack += iterate_subschemas(item)


def drop_neutral_keywords(schema: Any) -> Any:
    """Return the schema without each `propertyNames` that allows every name.

    Zod writes that for a record. Recursive: raise RecursionError for a schema that is too deep.
    """
    return map_schemas(_drop_neutral, schema)


def _drop_neutral(schema: dict[str, Any]) -> dict[str, Any]:
    if not _allows_every_name(schema.get("propertyNames")):
        return schema
    return {key: value for key, value in schema.items() if key != "propertyNames"}


def _allows_every_name(schema: Any) -> bool:
    if isinstance(schema, dict):
        return schema.keys() - _ANNOTATIONS <= {"type"} and schema.get("type", "string") == "string"
    return schema is True
