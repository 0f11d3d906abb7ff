"""The parameters of a tool, for formats that write arguments one by one.

Owns which schemas these formats can express, and how each value is written. Knows no grammar.

    {"type": "string"}                       the text itself           Rome
    {"enum": ["a", "b"]}                     one of the texts          a
    {"type": "boolean"}                      a word of the format      True
    anything else                            JSON                      ["a", 1]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from forge.server.tool_formats import ParameterSyntax

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_KNOWN_KEYS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"),
    *("title", "description", "default", "examples", "$comment", "$id", "x-guidance", "strict"),
}
_DEFINITION_KEYS = ("$defs", "definitions")
_PLAIN_KEYS = {"type", "title", "description", "default", "examples", "$comment"}
_MAX_CHOICES = 256


class ToolParameter(NamedTuple):
    """A parameter of a tool.

    schema        schema of its value, with the definitions that it may refer to
    is_required   every call has it
    is_text       its value is text without quotes
    choices       texts of which its value is one; (): it may be any text, or is no text
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool
    is_text: bool
    choices: tuple[str, ...] = ()


def parameter_problem(parameters: Mapping[str, Any], syntax: ParameterSyntax) -> str | None:
    """Return why the format cannot express the schema of a tool's parameters, or None."""
    extra = sorted(parameters.keys() - _KNOWN_KEYS)
    if extra:
        return f"the model's format of calls cannot express '{extra[0][:64]}'"
    pattern = _IDENTIFIER if syntax.quote else _NAME
    properties = parameters.get("properties")
    required = parameters.get("required")
    if not isinstance(properties, dict | None) or not isinstance(required, list | None):
        return "its properties are not an object, or required is not a list"
    for name in [*(properties or {}), *(required or [])]:
        if not isinstance(name, str) or not pattern.fullmatch(name):
            return f"the model's format of calls cannot express the name '{str(name)[:64]}'"
    return None


def list_parameters(
    parameters: Mapping[str, Any], syntax: ParameterSyntax
) -> tuple[ToolParameter, ...]:
    """Return the parameters in the order of the schema, which has no `parameter_problem`."""
    required = parameters.get("required") or []
    definitions = {key: parameters[key] for key in _DEFINITION_KEYS if key in parameters}
    schemas = {**dict.fromkeys(required, True), **(parameters.get("properties") or {})}
    ordered = [*(parameters.get("properties") or {}), *required]
    return tuple(
        _create_parameter(name, schemas[name], definitions, name in required, syntax)
        for name in dict.fromkeys(ordered)
    )


def _create_parameter(
    name: str,
    schema: Any,
    definitions: Mapping[str, Any],
    is_required: bool,
    syntax: ParameterSyntax,
) -> ToolParameter:
    if not isinstance(schema, dict):
        whole: dict[str, Any] = {} if schema is True else {"not": {}}
        return ToolParameter(name, whole, is_required, False)
    whole = {**definitions, **schema}
    if syntax.quote:
        return ToolParameter(name, whole, is_required, False)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and schema.keys() <= _PLAIN_KEYS | {"enum", "const"}:
        if 0 < len(choices) <= _MAX_CHOICES and all(
            isinstance(each, str) and each and syntax.end not in each + syntax.end[:-1]
            for each in choices
        ):
            return ToolParameter(name, whole, is_required, True, tuple(dict.fromkeys(choices)))
    is_text = schema.get("type") == "string" and schema.keys() <= _PLAIN_KEYS
    return ToolParameter(name, whole, is_required, is_text)
