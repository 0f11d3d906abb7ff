"""The fields that request structured output, and the Structure that they form.

Owns `response_format`, `regex`, `grammar` and `ebnf` of a request. Knows no vocabulary:
forge.structured_output decides whether a schema can be compiled.

    response_format {"type": "text"}                                         no structure
                    {"type": "json_object"}                                  any JSON object
                    {"type": "json_schema", "json_schema": {"schema": ...}}  what the schema allows
    regex           "[a-z]+"                                                 text that it matches
    grammar         "start: ..."                                             text that it derives
    ebnf            "root ::= ..."                                           the same, as in SGLang
    structured_outputs   vLLM's object with one of json, json_object, regex, choice and grammar
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.request import MAX_PATTERN_CHARS, MAX_STRUCTURE_CHARS, Structure
from forge.server.errors import excerpt
from forge.structured_output import convert_ebnf

MAX_SCHEMA_TEXT_CHARS = 4 * MAX_STRUCTURE_CHARS
"""Longest schema that is written as text, which may have spaces and line breaks."""

_FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
_OUTPUT_KINDS = {
    "json": "a JSON schema",
    "json_object": "true",
    "regex": "a string",
    "choice": "a list of texts",
    "grammar": "a string",
}
"""Kind of structured_outputs -> what its value must be."""
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}


class NamedStructure(NamedTuple):
    """A structure and the field of the request that requested it."""

    field: str
    structure: Structure


def parse_structure(
    response_format: Mapping[str, Any] | None,
    regex: str | None,
    grammar: str | None,
    structured_outputs: Mapping[str, Any] | None = None,
    ebnf: str | None = None,
) -> NamedStructure | None:
    """Return the structure that the fields request, or None. Raises InvalidRequest."""
    structures = []
    if response_format is not None:
        structure = _parse_response_format(response_format)
        if structure is not None:
            structures.append(NamedStructure("response_format", structure))
    if structured_outputs is not None:
        structure = _parse_structured_outputs(structured_outputs)
        structures.append(NamedStructure("structured_outputs", structure))
    texts: tuple[tuple[str, str | None, Callable[[str], Structure]], ...] = (
        ("regex", regex, Structure.regex),
        ("grammar", grammar, Structure.grammar),
        ("ebnf", ebnf, _parse_ebnf),
    )
    for name, text, build in texts:
        if text is not None:
            _check_pattern(name, "grammar" if name == "ebnf" else name, text)
            structures.append(NamedStructure(name, build(text)))
    if len(structures) > 1:
        raise InvalidRequest(
            structures[1].field,
            f"{structures[0].field} requests a structure as well",
            "Give only one of them",
            "conflicting_parameters",
        )
    return structures[0] if structures else None


def _parse_response_format(response_format: Mapping[str, Any]) -> Structure | None:
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        kinds = ", ".join(_FORMAT_KEYS)
        raise _format_error("type", f"it is not one of {kinds}", "Give one of these")
    extra = sorted(response_format.keys() - _FORMAT_KEYS[kind])
    if extra:
        raise _format_error(
            excerpt(extra[0]), f"a format of type {kind} has no such key", "Leave it out"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.json_schema({"type": "object"})
    json_schema = response_format.get("json_schema")
    if not isinstance(json_schema, dict):
        raise _format_error(
            "json_schema", "it is not an object", 'Give {"name": ..., "schema": {...}}'
        )
    extra = sorted(json_schema.keys() - _SCHEMA_KEYS)
    if extra:
        raise _format_error(
            f"json_schema.{excerpt(extra[0])}", "there is no such key", "Leave it out"
        )
    if not isinstance(json_schema.get("strict"), bool | None):
        raise _format_error("json_schema.strict", "it is not true or false", "Leave it out")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict | bool):
        raise _format_error("json_schema.schema", "it is not a schema", "Give an object")
    return _build_json_structure("response_format", schema)


def _build_json_structure(field: str, schema: Mapping[str, Any] | bool) -> Structure:
    """Return the structure of a schema. Raises InvalidRequest of this field."""
    try:
        return Structure.json_schema(schema)
    except InvalidRequest as error:  # too large, or deeper than json.dumps can write
        raise InvalidRequest(field, error.problem, error.remedy, error.code) from None


def _parse_ebnf(text: str) -> Structure:
    """Return the structure of a grammar in the notation of SGLang, in which `root` is the start."""
    try:
        return Structure.grammar(convert_ebnf(text))
    except ValueError as error:
        raise InvalidRequest("ebnf", str(error), "Fix the grammar", "invalid_grammar") from None


def _check_pattern(field: str, kind: str, text: str) -> None:
    """Raise InvalidRequest for a regex or a grammar that is too long."""
    if len(text) > MAX_PATTERN_CHARS:
        raise InvalidRequest(
            field,
            f"it has {len(text)} characters, at most {MAX_PATTERN_CHARS}",
            "Simplify it",
            f"invalid_{kind}",
        )


def _parse_structured_outputs(value: Mapping[str, Any]) -> Structure:
    """Return the structure that vLLM's field requests. Raises InvalidRequest."""
    field = "structured_outputs"
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    unknown = sorted(given.keys() - set(_OUTPUT_KINDS))
    if unknown or len(given) != 1:
        problem = (
            f"{excerpt(unknown[0])}: there is no such kind"
            if unknown
            else f"it has {len(given)} kinds, and takes one"
        )
        raise InvalidRequest(
            field, problem, f"Give one of {', '.join(_OUTPUT_KINDS)}", "invalid_value"
        )
    ((kind, item),) = given.items()
    match kind, item:
        case "json_object", True:
            return Structure.json_schema({"type": "object"})
        case "regex" | "grammar", str():
            _check_pattern(field, kind, item)
            return Structure.regex(item) if kind == "regex" else Structure.grammar(item)
        case "choice", [_, *_] if all(isinstance(each, str) and each for each in item):
            choices = " | ".join(json.dumps(each) for each in item)
            _check_pattern(field, "grammar", choices)
            return Structure.grammar(f"start: {choices}")
        case "json", str():
            if len(item) > MAX_SCHEMA_TEXT_CHARS:
                raise InvalidRequest(
                    field,
                    f"json: it has {len(item)} characters, at most {MAX_SCHEMA_TEXT_CHARS}",
                    "Simplify it",
                    "invalid_schema",
                )
            schema = None
            with suppress(ValueError, RecursionError):
                schema = json.loads(item)
            if isinstance(schema, dict | bool):
                return _build_json_structure(field, schema)
        case "json", dict() | bool():
            return _build_json_structure(field, item)
    raise InvalidRequest(
        field, f"{kind}: it is not {_OUTPUT_KINDS[kind]}", "Fix it", "invalid_value"
    )


def _format_error(key: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest("response_format", f"{key}: {problem}", remedy, "invalid_value")
