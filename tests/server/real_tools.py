"""Schemas of tools as MCP servers, pydantic and zod write them. None is strict.

Owns the list. Each has something that a grammar does not hold, or that was once refused.
"""

from __future__ import annotations

from typing import Any

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_STRING = {"type": "string"}
_FORMATS = (
    *("binary", "password", "path", "file-path", "uuid4", "base64", "byte", "uri-reference"),
    *("iri", "idn-email", "json-pointer", "regex", "url", "color", "phone", "enum"),
    *("ipv4network", "int64", "date-time", "email", "uri", "uuid", "hostname", "duration"),
)


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


REAL_SCHEMAS: list[dict[str, Any]] = [
    # Filesystem, Git and shell servers.
    {
        **_object("path", path=_STRING, head={"type": "number"}, tail={"type": "number"}),
        "additionalProperties": False,
        "$schema": _DRAFT_7,
    },
    _object(
        "path",
        "edits",
        path={**_STRING, "format": "file-path"},
        edits={"type": "array", "items": _object("oldText", "newText", oldText=_STRING)},
        dryRun={"type": "boolean", "default": False},
    ),
    _object("paths", paths={"type": "array", "items": _STRING, "uniqueItems": True, "minItems": 1}),
    _object(
        "repo_path",
        repo_path={"title": "Repo Path", "type": "string", "format": "path"},
        max_count={"title": "Max Count", "type": "integer", "default": 10},
        since={"anyOf": [{**_STRING, "format": "date-time"}, {"type": "null"}], "default": None},
    ),
    _object(
        "command",
        command={"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
        env={
            "type": "object",
            "additionalProperties": _STRING,
            "propertyNames": {"pattern": "^[A-Z]"},
        },
        timeout={"type": "integer", "exclusiveMinimum": True, "minimum": 0},
    ),
    # Formats of pydantic and others.
    _object(*_FORMATS, **{name: {**_STRING, "format": name} for name in _FORMATS}),
    _object(
        "secret",
        secret={**_STRING, "format": "password", "writeOnly": True},
        file={"anyOf": [{**_STRING, "format": "binary"}, {"type": "null"}]},
        network={**_STRING, "format": "ipv4network"},
        size={"type": "integer", "format": "int64", "maximum": 9223372036854775807},
    ),
    # pydantic: unions, enums, nested models, constraints.
    {
        **_object(
            "shape",
            shape={
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
            },
        ),
        "$defs": {
            "Circle": _object("kind", "r", kind={"const": "circle"}, r={"type": "number"}),
            "Square": _object("kind", "a", kind={"const": "square"}, a={"type": "number"}),
        },
    },
    {
        **_object("level", level={"allOf": [{"$ref": "#/definitions/Level"}], "default": "low"}),
        "definitions": {"Level": {"title": "Level", "enum": ["low", "high"], "type": "string"}},
    },
    {
        **_object("node", node={"$ref": "#/$defs/Node"}),
        "$defs": {
            "Node": _object(
                "name", name=_STRING, children={"type": "array", "items": {"$ref": "#/$defs/Node"}}
            ),
        },
    },
    _object(
        "pair",
        pair={
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "prefixItems": [_STRING, {"type": "integer"}],
        },
        price={
            "anyOf": [{"type": "number"}, {**_STRING, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]
        },
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    ),
    _object("data", data={}, more=True, any_of={"title": "Any"}),
    _object("amount", amount={"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0}),
    # zod and zod-to-json-schema.
    {
        "$ref": "#/definitions/Input",
        "$schema": _DRAFT_7,
        "definitions": {"Input": _object("query", query={**_STRING, "minLength": 1})},
    },
    _object("value", value=_STRING, never={"not": {}}),
    _object(
        "filters",
        filters={
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {},
        },
        first={"type": "array", "items": [_STRING, {"type": "number"}], "additionalItems": False},
        second={"$ref": "#/properties/first"},
    ),
    _object(
        "url",
        url={**_STRING, "format": "uri", "pattern": "^https?://"},
        id={**_STRING, "pattern": r"^\p{L}+$"},
    ),
    {"type": "object", "properties": {}, "additionalProperties": False, "$schema": _DRAFT_7},
    {
        "type": "object",
        "anyOf": [{"required": ["id"]}, {"required": ["name"]}],
        "properties": {"id": {"type": "integer"}, "name": _STRING},
    },
    {
        "type": "object",
        "oneOf": [_object("id", id={"type": "integer"}), _object("name", name=_STRING)],
    },
    # Database, search and web servers.
    _object(
        "collection",
        collection=_STRING,
        filter={"type": "object", "minProperties": 1, "maxProperties": 10},
        sort={"type": "object", "additionalProperties": {"enum": [1, -1]}},
        limit={"type": ["integer", "null"], "minimum": 1, "maximum": 1000},
    ),
    {
        **_object("credit_card", credit_card={"type": "number"}, billing_address=_STRING),
        "dependencies": {"credit_card": ["billing_address"]},
        "dependentRequired": {"credit_card": ["billing_address"]},
        "dependentSchemas": {"credit_card": {"required": ["billing_address"]}},
    },
    {
        **_object("country", country=_STRING, code=_STRING),
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"code": {"pattern": "[0-9]{5}"}}},
        "else": {"properties": {"code": {"pattern": "[A-Z]"}}},
    },
    _object(
        **{
            "$filter": _STRING,
            "@type": _STRING,
            "filter[status]": _STRING,
            "x-y.z": {"type": "integer"},
            "a b": _STRING,
            "q": {**_STRING, "maxLength": 100_000},
        },
    ),
    {
        "type": "object",
        "patternProperties": {"^x-": _STRING, "^(?!y)": {"type": "integer"}},
        "additionalProperties": False,
        "unevaluatedProperties": False,
    },
    _object(
        "list",
        list={
            "type": "array",
            "contains": {"const": 1},
            "minContains": 1,
            "items": {"type": "integer"},
        },
    ),
    # Written by hand.
    _object(
        "name",
        name={"type": "string", "required": True, "example": "a", "x-order": 1},
        when={"type": "date"},
        kind={"type": "any"},
        age={"type": "int"},
    ),
    _object(
        "blob",
        blob={**_STRING, "contentEncoding": "base64", "contentMediaType": "image/png"},
        mode={**_STRING, "enum": ["r", "w"], "enumNames": ["read", "write"], "nullable": True},
    ),
    _object("min", min={"type": "integer", "minimum": 5, "maximum": 3}),
    _object(
        "a",
        a={**_STRING, "minLength": 1.0, "maxLength": "9"},
        b={"type": "string", "pattern": "["},
        c={"$ref": "https://example.org/c.json"},
        d={"$ref": "#/$defs/gone"},
    ),
]
"""Thirty schemas of parameters."""
