"""JSON schemas as llguidance compiles them, and what is replaced before.

Owns the options of the compiler, and the keywords that are replaced for it. Knows no request.

    {"type": "string", "format": "password"}   ──►   {"type": "string"}           an annotation
    {"type": "string", "format": "date"}       ──►   {..., "pattern": DATE}       29 February too
    {"oneOf": [...]}                           ──►   anyOf; SchemaCheck counts the options
    names of open objects                      ──►   no \\u escape, so each name has one spelling

Always true: the prepared schema allows a text of each value that it must allow; what it allows in
addition, forge.schema_check refuses once the text is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from forge.schema_keywords import iterate_schemas, map_schemas

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
"""Formats of which llguidance allows dates that no calendar has, and the 60th second of any minute.
A leap second is left out: few parsers of dates read one."""

_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
"""Other formats that llguidance enforces."""

_ESCAPES = 'nrbtf\\"'
"""Characters that may follow a backslash in JSON, besides the u of `\\u`."""

_CONTROL_CHARACTER = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]|\x7f")
"""A character, in the JSON that json.dumps writes, that llguidance writes as `\\u`."""


def prepare_schema(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """Return the schema that llguidance compiles, with options, for JSON as json.dumps writes it.

    With free white space a model might write nothing else. Raises RecursionError where the schema
    is too deep.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    prepared = map_schemas(_replace_format, schema)
    options: dict[str, Any] = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "coerce_one_of": True,
    }
    schemas = list(iterate_schemas(schema))
    # An escape of a plain character would make another spelling of a declared name.
    if any(map(_is_open, schemas)) and not any(map(_needs_escape, schemas)):
        options["json_allowed_escapes"] = _ESCAPES
    return {**prepared, "x-guidance": options}


def _replace_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with a pattern instead of its format, or without one that is unknown."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    pattern = _FORMAT_PATTERNS.get(name)
    if pattern is None:
        return rest
    if "pattern" in rest:
        return {**rest, "allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}
    return {**rest, "pattern": pattern}


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return whether an object may have other names than those that the schema declares."""
    if "patternProperties" in schema:
        return True
    return bool(schema.keys() & {"properties", "required"}) and (
        schema.get("additionalProperties") is not False
    )


def _needs_escape(schema: Mapping[str, Any]) -> bool:
    """Return whether a value that the schema lists, or a pattern, has a control character."""
    texts = [schema.get(keyword) for keyword in ("const", "enum", "pattern")]
    return _CONTROL_CHARACTER.search(json.dumps(texts)) is not None
