"""The part of a tool's schema that a grammar can hold.

Owns which keywords are kept. Knows no format of calls.

    {"$ref": "#/properties/a"}             ──►   {"$ref": "#/$defs/r0"}: any part of it stays whole
    {"not": {}}                            ──►   {"enum": []}
    not strict:
    {"type": "array", "uniqueItems": true} ──►   {"type": "array"}
    {"oneOf": [...], "if": ..., "x-a": 1}  ──►   {"anyOf": [...]}
    {"pattern": "^(?!a)", "minLength": 1}  ──►   {"minLength": 1}

Always true: the new schema allows all that the old one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from forge.schema_keywords import iterate_schemas, map_schemas
from forge.schema_references import find_pointer

JSON_TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")
MAX_HOISTED = 10_000
"""Most schemas within those that are referred to. One that holds others is copied with them."""
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
"""Schema that is left of one that no grammar holds a part of."""
LEAST_KEYWORDS = {
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties"),
    *("enum", "const", "anyOf", "$ref", "$defs"),
}
"""Keywords that are kept of a schema whose keywords together cannot be compiled."""
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[bB1-9k]")
"""Parts of a regex that no automaton holds: look-around, and references to groups."""
_UNICODE_CLASS = re.compile(r"\\[pP](?:\{\w+\}|\w)")
"""Classes that llguidance has and Python has not."""


def hoist_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with all that it refers to under `$defs`.

    A reference to another place, such as `#` or `#/properties/a`, gets a definition of its own. A
    reference outside of the schema, or to nothing, stays one. Recursive: the schema's depth
    must be bounded. O(schema + MAX_HOISTED).
    """
    names: dict[int, str] = {}  # by identity: a schema has many pointers, as #/%61 and #/a
    targets: list[Any] = []
    num_left = MAX_HOISTED

    def redirect(inner: dict[str, Any]) -> dict[str, Any]:
        if inner.get("not") == {} or inner.get("not") is True:
            return {"enum": []}
        inner = _without_definitions(inner)
        if "$ref" not in inner:
            return inner
        pointer = str(inner["$ref"])
        target = _find_target(schema, pointer)
        if id(target) not in names:
            nonlocal num_left
            if target is not None:
                num_left -= sum(1 for _ in islice(iterate_schemas(target), num_left + 1))
            if target is None or num_left < 0:
                # The new definitions have other names than those that are gone.
                return {**inner, "$ref": pointer.replace("#/$defs/", "#/definitions/")}
            names[id(target)] = f"r{len(names)}"
            targets.append(target)
        return {**inner, "$ref": f"#/$defs/{names[id(target)]}"}

    hoisted: dict[str, Any] = map_schemas(redirect, schema)
    definitions = {}
    for number, target in enumerate(targets):  # grows meanwhile
        definitions[f"r{number}"] = map_schemas(redirect, target)
    return {**hoisted, "$defs": definitions} if definitions else hoisted


def _without_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}


def _find_target(schema: Mapping[str, Any], pointer: str) -> Any:
    """Return the schema within `schema` that a reference points to, or None."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    found = find_pointer(schema, pointer[1:])
    return found if isinstance(found, dict | bool) else None


def relax_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest part of a schema of `hoist_references` that a grammar can hold."""
    relaxed: dict[str, Any] = map_schemas(_relax_keywords, schema)
    return relaxed


def relax_further(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a relaxed schema that cannot be compiled; in the end, any object."""
    if all(inner.keys() <= LEAST_KEYWORDS for inner in iterate_schemas(schema)):
        return dict(ANY_ARGUMENTS)
    relaxed: dict[str, Any] = map_schemas(_drop_keywords, schema)
    return relaxed


def _drop_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in schema.items() if key in LEAST_KEYWORDS}
    if "patternProperties" in schema:
        # A name that a lost pattern allowed is now a further one.
        kept.pop("additionalProperties", None)
    return kept


def find_unheld_keyword(schema: Mapping[str, Any]) -> str | None:
    """Return a keyword that a grammar holds otherwise, and whose value it cannot; None: all are."""
    for inner in iterate_schemas(schema):
        for keyword, value in inner.items():
            read = _READERS.get(keyword)
            if keyword != "const" and read is not None and read(value) is None:
                return keyword
    return None


def _relax_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of one schema that a grammar can hold."""
    schema = dict(schema)
    if isinstance(schema.get("items"), list):  # drafts up to 7
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = schema.pop("additionalItems", True)
    if "const" in schema and "enum" not in schema:
        schema["enum"] = [schema.pop("const")]
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        read = _READERS.get(keyword)
        part = None if read is None else read(value)
        if part is not None:
            kept[keyword] = part
    if "oneOf" in kept:
        options = kept.pop("oneOf")
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": options}]
        else:
            kept["anyOf"] = options
    if kept.get("patternProperties") != schema.get("patternProperties"):
        kept.pop("additionalProperties", None)  # as in _drop_keywords
    if kept.keys() & {"minProperties", "maxProperties"} and not _counts_properties(kept):
        kept.pop("minProperties", None)
        kept.pop("maxProperties", None)
    return kept


def _counts_properties(schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar can count the properties: those that it declares always come."""
    others = schema.keys() & {"$ref", "anyOf", "allOf", "patternProperties"}
    return not others and schema.get("properties", {}).keys() <= set(schema.get("required", ()))


def _read_schema(value: object) -> object:
    return value if isinstance(value, dict | bool) else None


def _read_schemas(value: object) -> object:
    """Return a list of schemas; what is none allows everything."""
    if not isinstance(value, list) or not value:
        return None
    return [each if isinstance(each, dict | bool) else {} for each in value]


def _read_named_schemas(value: object) -> object:
    if not isinstance(value, dict):
        return None
    return {name: each if isinstance(each, dict | bool) else {} for name, each in value.items()}


def _read_patterns(value: object) -> object:
    named = _read_named_schemas(value)
    if not isinstance(named, dict):
        return None
    return {name: each for name, each in named.items() if can_hold_pattern(name)} or None


def _read_type(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(each not in JSON_TYPES for each in names):
        return None
    return value


def _read_count(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and value == int(value) else None


def _read_number(value: object) -> object:
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def _read_step(value: object) -> object:
    number = _read_number(value)
    return number if isinstance(number, int | float) and number > 0 else None


def can_hold_pattern(pattern: str) -> bool:
    """Return whether an automaton may match the pattern, so far as its text shows."""
    try:
        re.compile(_UNICODE_CLASS.sub(r"\\w", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return not _LOOK_AROUND.search(pattern)


_READERS: Mapping[str, Callable[[Any], object]] = {
    "$defs": _read_named_schemas,
    "$ref": lambda value: value if str(value).startswith("#/$defs/") else None,
    "additionalProperties": _read_schema,
    "allOf": _read_schemas,
    "anyOf": _read_schemas,
    "const": lambda value: value,  # alongside an enum
    "enum": lambda value: value if isinstance(value, list) else None,
    "exclusiveMaximum": _read_number,
    "exclusiveMinimum": _read_number,
    "format": lambda value: value if isinstance(value, str) else None,
    "items": _read_schema,
    "maxItems": _read_count,
    "maxLength": _read_count,
    "maxProperties": _read_count,
    "maximum": _read_number,
    "minItems": _read_count,
    "minLength": _read_count,
    "minProperties": _read_count,
    "minimum": _read_number,
    "multipleOf": _read_step,
    "oneOf": _read_schemas,
    "pattern": lambda v: v if isinstance(v, str) and can_hold_pattern(v) else None,
    "patternProperties": _read_patterns,
    "prefixItems": _read_schemas,
    "properties": _read_named_schemas,
    "required": lambda v: [n for n in v if isinstance(n, str)] if isinstance(v, list) else None,
    "type": _read_type,
}
"""Keyword that a grammar holds -> the value that it has there, or None to leave it out."""
