"""Builders of the JSON schemas that describe responses.

Owns the forms that schemas of several routes share. Knows no route.
"""

from __future__ import annotations

from typing import Any

STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
BOOLEAN = {"type": "boolean"}
NULL = {"type": "null"}
OBJECT = {"type": "object"}
WEIGHTS = {"weight_version": STRING, "num_stale_tokens": COUNT}
"""Optional properties of what the engine generates after an update of the weights."""


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


def with_optional(known: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these optional properties in addition."""
    return {**known, "properties": {**known["properties"], **properties}}


def list_schema(items: Any) -> dict[str, Any]:
    """Return the schema of a list of such items."""
    return {"type": "array", "items": items}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of such a value or null."""
    return {"anyOf": [schema, NULL]}
