"""Keywords of a JSON schema that allow every value, and that a grammar does not need.

Owns which these are. Knows no grammar.

    {"type": "object", "propertyNames": {"type": "string"}}   ──►   {"type": "object"}

Always true: the new schema allows exactly what the old one does.
"""

from __future__ import annotations

from typing import Any

_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value has schemas by name: a name in it is not a keyword."""
_LITERALS = {"const", "enum", "default", "examples"}
_ANNOTATIONS = {"title", "description", "$comment"}


def drop_neutral_keywords(schema: Any) -> Any:
    """Return the schema without each `propertyNames` that allows every name.

    Zod writes that for a record. Recursive: raise RecursionError for a schema that is too deep.
    """
    if isinstance(schema, list):
        return [drop_neutral_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _drop_by_keyword(key, value)
        for key, value in schema.items()
        if key != "propertyNames" or not _allows_every_name(value)
    }


def _drop_by_keyword(keyword: str, value: Any) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: drop_neutral_keywords(schema) for name, schema in value.items()}
    return drop_neutral_keywords(value)


def _allows_every_name(schema: Any) -> bool:
    if isinstance(schema, dict):
        return schema.keys() - _ANNOTATIONS <= {"type"} and schema.get("type", "string") == "string"
    return schema is True
