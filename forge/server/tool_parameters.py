"""The parameters of a tool, for formats that write arguments one by one.

Owns which schemas these formats can express, and how each value is written and read. Knows no
grammar.

    schema                                  written           read
    {"type": "string"}                      Rome              "Rome"
    {"enum": ["a", "b", null]}              a                 "a"
    {"anyOf": [string, null]}               Rome, null        "Rome", null
    {}                                      Rome, 3, [1]      "Rome", 3, [1]
    {"type": "array"}                       ["a", 1]          ["a", 1]

Always true: where a schema allows strings, a text that is JSON of one of its other values is that
value, and any other text is the string of it. A grammar allows no text that has neither form.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from forge.schema_check import SchemaCheck
from forge.schema_keywords import iterate_schemas
from forge.server.tool_formats import CallableTool, ParameterSyntax
from forge.server.tool_schema import JSON_TYPES, can_hold_pattern
from forge.strict_json import parse_json

MAX_TEXT_LENGTH = 64
"""Largest bound on a text's length that a mask enforces. Each length is a state of its own, and its
mask takes ten times as long as that of text without a bound."""
MAX_REPETITIONS = 128
"""Most characters that the counts of a pattern repeat, `{12}`, where a mask enforces it."""
MAX_CHOICES = 256
MAX_NUMBER_CHARS = 512
"""Longest text that is taken for a number where strings are allowed as well."""
MAX_OPTIONS = 64
"""Most options of a union, those within its options included, and most schemas that are combined to
a tool's: a reference may come many times."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_NAME = re.compile(r"[^\s<>\"'\\\x00-\x1f\x7f]{1,64}")
_JSON_BEGINNING = re.compile(r"[\[{]|-?[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]*)?\Z")
"""Beginning of JSON that is no string and no word, so far as its text shows that cheaply."""
_TOP_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("x-guidance", "strict"),
}
_STRING_KEYWORDS = {"minLength", "maxLength", "pattern", "format"}
_KEYWORDS = {
    *("$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "else", "enum"),
    *("exclusiveMaximum", "exclusiveMinimum", "if", "items", "maxContains", "maxItems"),
    *("maxProperties", "maximum", "minContains", "minItems", "minProperties", "minimum"),
    *("multipleOf", "not", "oneOf", "patternProperties", "prefixItems", "properties"),
    *("propertyNames", "required", "then", "type", "unevaluatedItems", "unevaluatedProperties"),
    *("uniqueItems", *_STRING_KEYWORDS),
}
"""Keywords that restrict a value. All others are annotations."""


class PlainText(NamedTuple):
    """Text that stands for a string, without quotes.

    choices    texts that it may be
    patterns   regexes, in groups: it may be a text that all of a group match. Without `choices` and
               `patterns` it may be any text
    """

    choices: tuple[str, ...] = ()
    patterns: tuple[tuple[str, ...], ...] = ()

    @property
    def is_free(self) -> bool:
        """Return whether any text may be written."""
        return not (self.choices or self.patterns)


class ToolParameter(NamedTuple):
    """A parameter of a tool.

    schema        schema of the values that a grammar allows, without the definitions it refers to
    is_required   every call has it
    text          how its strings are written; None: it has none, or they are JSON as other values
    words         words that it may be, and the JSON of each
    other         schema of other values, which are written as JSON; None: there are none
    other_check   check of objects that have such values, by the names of all parameters
    """

    name: str
    schema: Mapping[str, Any] | bool
    is_required: bool
    text: PlainText | None
    words: Mapping[str, str]
    other: Mapping[str, Any] | None
    other_check: SchemaCheck

    def read_text(self, text: str) -> str:
        """Return the JSON of a value that was written as this text, where it may be a string."""
        assert self.text is not None, "its values are JSON"
        if text not in self.text.choices:
            if text in self.words:
                return self.words[text]
            if self.may_be_json(text) and self._has_other(text):
                return text
        return json.dumps(text, ensure_ascii=False)

    def _has_other(self, text: str) -> bool:
        """Return whether the text is JSON of one of the values that are no strings."""
        try:
            value = {self.name: parse_json(text)}
            return self.other is not None and self.other_check.find_value_violation(value) is None
        except ValueError:
            return False

    def may_be_json(self, text: str) -> bool:
        """Return whether a value that begins with this text may be no string."""
        if any(word.startswith(text) for word in self.words):
            return True
        may_be_other = self.other is not None and _JSON_BEGINNING.match(text) is not None
        return may_be_other and (text[:1] in ("[", "{") or len(text) <= MAX_NUMBER_CHARS)


def parameter_problem(parameters: Mapping[str, Any], syntax: ParameterSyntax) -> str | None:
    """Return why the format cannot express the whole schema of a tool's parameters, or None."""
    extra = sorted((parameters.keys() & _KEYWORDS) - _TOP_KEYWORDS)
    if extra:
        return f"the model's format of calls cannot express '{extra[0][:64]}'"
    properties = parameters.get("properties")
    required = parameters.get("required")
    if not isinstance(properties, dict | None) or not isinstance(required, list | None):
        return "its properties are not an object, or required is not a list"
    for name in [*(properties or {}), *(required or [])]:
        if not isinstance(name, str) or not _can_write_name(name, syntax):
            return f"the model's format of calls cannot express the name '{str(name)[:64]}'"
    return None


class ToolArguments:
    """Arguments of a tool in one format.

    parameters   parameters that the format writes one by one; (): arguments are one JSON object
    schema       schema of all arguments that a call must have
    check        check of a call's arguments
    """

    def __init__(self, tool: CallableTool, syntax: ParameterSyntax | None) -> None:
        self.parameters = () if syntax is None else list_parameters(tool.parameters, syntax)
        self.schema = tool.parameters
        if syntax is not None and not tool.is_strict:
            self.schema = held_schema(tool.parameters, self.parameters)
        self.check = SchemaCheck(self.schema)


def arguments_of(tool: CallableTool, syntax: ParameterSyntax | None) -> ToolArguments:
    """Return the arguments of the tool: computed once, for all choices and calls of an answer.

    O(the tool's schema), which may be large: the first caller must be a thread.
    """
    arguments: ToolArguments
    for each_syntax, arguments in tool.derived:
        if each_syntax is syntax:
            return arguments
    arguments = ToolArguments(tool, syntax)
    tool.derived.append((syntax, arguments))
    return arguments


def held_schema(parameters: Mapping[str, Any], listed: Sequence[ToolParameter]) -> dict[str, Any]:
    """Return the schema of all arguments that a grammar of the listed parameters allows."""
    definitions = parameters.get("$defs")
    return {
        "type": "object",
        "properties": {each.name: each.schema for each in listed},
        "required": [each.name for each in listed if each.is_required],
        "additionalProperties": False,
        **({"$defs": definitions} if definitions else {}),
    }


def _can_write_name(name: str, syntax: ParameterSyntax) -> bool:
    return (_IDENTIFIER if syntax.quote else _NAME).fullmatch(name) is not None


def list_parameters(
    parameters: Mapping[str, Any], syntax: ParameterSyntax
) -> tuple[ToolParameter, ...]:
    """Return the parameters that the format can write, in the order of the schema.

    Those of a schema with a `parameter_problem` are what it can express: the properties of all
    schemas that are combined, optional where only an option of a union has them.
    """
    definitions = parameters.get("$defs", {})
    properties, required = _collect_properties(parameters, definitions)
    schemas = {**properties, **{name: True for name in required if name not in properties}}
    forms = {
        name: _divide_values(schema, definitions, syntax)
        for name, schema in schemas.items()
        if _can_write_name(name, syntax)
    }
    others = {name: form.other for name, form in forms.items() if form.other is not None}
    # One check for all parameters: each would visit all definitions.
    check = SchemaCheck({"properties": others, "$defs": definitions})
    known = _Definitions(definitions, {name: _names_in(each) for name, each in definitions.items()})
    return tuple(
        _create_parameter(name, form, known, name in required, syntax, check)
        for name, form in forms.items()
        if form.has_values or name in required
    )


_MAX_NESTING = 16


def _collect_properties(
    schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of an object and the names of those that are always there."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    parts, visited = deque[tuple[Any, bool]]([(schema, True)]), set[int]()
    while parts and len(visited) < MAX_OPTIONS:
        part, is_sure = parts.popleft()  # a schema, and whether it always applies
        if not isinstance(part, dict) or id(part) in visited:
            continue
        visited.add(id(part))
        for name, each in (part.get("properties") or {}).items():
            properties[name] = {"anyOf": [properties[name], each]} if name in properties else each
        if is_sure:
            required += [name for name in part.get("required") or () if isinstance(name, str)]
        if "$ref" in part:
            parts.append((definitions.get(_definition_name(part), True), is_sure))
        parts += [(each, is_sure) for each in _list_of(part.get("allOf"))]
        for key in ("anyOf", "oneOf"):
            parts += [(each, False) for each in _list_of(part.get(key))]
    return properties, list(dict.fromkeys(required))


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _definition_name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


class _ValueForms(NamedTuple):
    """Values of a parameter, divided by how they are written.

    schema        schema of all that a grammar allows
    text          how strings are written; None: there are none, or they are JSON
    other         schema of other values; None: there are none
    types         types of values that are no strings
    has_values    whether there is any value
    has_strings   whether there are strings that are JSON
    """

    schema: Any
    text: PlainText | None
    other: Any
    types: frozenset[str]
    has_values: bool
    has_strings: bool


def _divide_values(
    schema: Any, definitions: Mapping[str, Any], syntax: ParameterSyntax
) -> _ValueForms:
    options = list(islice(_iterate_options(schema, definitions, 0), MAX_OPTIONS + 1))
    strings = [each for option in options if (each := _string_part(option)) is not None]
    others = [each for option in options if (each := _other_part(option)) is not None]
    types = frozenset(kind for each in others for kind in _types_of(each))
    has_values = bool(strings or others)
    if not strings or syntax.quote or len(options) > MAX_OPTIONS:
        return _ValueForms(schema, None, schema, types, has_values, bool(strings))
    text, strings = _merge_strings(strings, others, syntax)
    other = {"anyOf": others} if others else None
    return _ValueForms({"anyOf": [*strings, *others]}, text, other, types, has_values, False)


class _Definitions(NamedTuple):
    """The definitions of a tool's schema, and the names of those to which each of them refers."""

    schemas: Mapping[str, Any]
    names: Mapping[str, list[str]]


def _create_parameter(
    name: str,
    form: _ValueForms,
    definitions: _Definitions,
    is_required: bool,
    syntax: ParameterSyntax,
    check: SchemaCheck,
) -> ToolParameter:
    words: dict[str, str] = {}
    if form.other is not None:
        words = {
            word: value
            for word, value in syntax.words.items()
            if check.find_value_violation({name: json.loads(value)}) is None
        }
    other = form.other
    if other is not None:
        other = _with_definitions(other, definitions)
    if words and form.types <= {"null", "boolean"} and not form.has_strings:
        other = None
    return ToolParameter(name, form.schema, is_required, form.text, words, other, check)


def _with_definitions(schema: Any, definitions: _Definitions) -> dict[str, Any]:
    """Return the schema with the definitions that it needs."""
    if not isinstance(schema, dict):
        return {} if schema is True else {"enum": []}
    needed, names = dict[str, Any](), _names_in(schema)
    while names:
        name = names.pop()
        if name in definitions.schemas and name not in needed:
            needed[name] = definitions.schemas[name]
            names += definitions.names[name]
    return {**schema, "$defs": needed} if needed else dict(schema)


def _names_in(schema: Any) -> list[str]:
    """Return the names of definitions to which the schema refers. O(the schema)."""
    return [_definition_name(each) for each in iterate_schemas(schema) if "$ref" in each]


def _iterate_options(schema: Any, definitions: Mapping[str, Any], depth: int) -> Iterator[Any]:
    """Yield the schemas of which a value has one, without annotations."""
    if schema is True or not isinstance(schema, dict):
        yield {} if schema is True else False
        return
    schema = {key: value for key, value in schema.items() if key in _KEYWORDS}
    inner: Sequence[Any] = ()
    match [*schema.items()] if depth < _MAX_NESTING else []:
        case [("$ref", _)] if _definition_name(schema) in definitions:
            inner = [definitions[_definition_name(schema)]]
        case [("anyOf" | "oneOf", [_, *_] as options)]:
            inner = options
        case [("allOf", [_] as only)]:
            inner = only
    if not inner:
        yield schema
    for each in inner:
        yield from _iterate_options(each, definitions, depth + 1)


def _types_of(option: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema without unions may have.

    A schema without a type may have all. With keywords of other types only it has no strings:
    these would hide a mistake in what its author takes for an object.
    """
    types = option.get("type", JSON_TYPES)
    if isinstance(types, str):
        return (types,)
    if "type" not in option and not option.keys() <= {"enum", "const", *_STRING_KEYWORDS}:
        return JSON_TYPES[:-1]
    return tuple(types)


def _string_part(option: Any) -> Mapping[str, Any] | None:
    """Return the schema of the option's strings; None: it has none, or they are JSON."""
    if option is False or "string" not in _types_of(option):
        return None
    if "enum" in option or "const" in option:
        values = [option["const"]] if "const" in option else option["enum"]
        texts = [each for each in values if isinstance(each, str)]
        return {"enum": list(dict.fromkeys(texts))} if texts else None
    return {"type": "string", **{key: option[key] for key in _STRING_KEYWORDS & option.keys()}}


def _other_part(option: Any) -> Mapping[str, Any] | None:
    """Return the schema of the option's values that are no strings; None: it has none."""
    if option is False:
        return None
    if "enum" in option or "const" in option:
        values = [option["const"]] if "const" in option else option["enum"]
        others = [each for each in values if not isinstance(each, str)]
        return {**option, "enum": others} if others else None
    types = [each for each in _types_of(option) if each != "string"]
    if not types:
        return None
    rest = {key: value for key, value in option.items() if key not in _STRING_KEYWORDS}
    return {**rest, "type": types if len(types) > 1 else types[0]}


def _merge_strings(
    strings: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    syntax: ParameterSyntax,
) -> tuple[PlainText, list[Mapping[str, Any]]]:
    """Return how strings of one of these schemas are written, and the schemas that this holds.

    Text that is restricted does not go with other values that may begin like it: a lexer would
    take one for the other. It is free then.
    """
    choices: list[str] = []
    patterns: list[tuple[str, ...]] = []
    kept: list[Mapping[str, Any]] = []
    for each in strings:
        held: Mapping[str, Any] = each
        if "enum" in each:
            choices += each["enum"]
        else:
            held, pattern = _write_patterns(each)
            patterns.append(pattern)
        kept.append(held)
    other_types = {kind for each in others for kind in _types_of(each)}
    is_free = len(choices) > MAX_CHOICES or () in patterns
    is_free |= any(syntax.end in each + syntax.end[:-1] for each in choices)
    if patterns and not other_types <= {"null", "boolean"}:
        is_free = True
    if other_types & {"array", "object"} and any(each[:1] in ("[", "{") for each in choices):
        is_free = True
    if is_free:
        return PlainText(), [{"type": "string"}]
    return PlainText(tuple(dict.fromkeys(choices)), tuple(patterns)), kept


def _write_patterns(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the keywords of a string that a mask of plain text holds, and regexes for them."""
    kept: dict[str, Any] = {"type": "string"}
    regexes = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(least, int) and 0 < least <= MAX_TEXT_LENGTH:
        kept["minLength"] = least
    if isinstance(most, int) and 0 <= most <= MAX_TEXT_LENGTH:
        kept["maxLength"] = most
    if len(kept) > 1:
        regexes.append(f"(?s:.){{{kept.get('minLength', 0)},{kept.get('maxLength', '')}}}")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (whole := _whole_pattern(pattern)) is not None:
        kept["pattern"] = pattern
        regexes.append(whole)
    return kept, tuple(regexes)


def _whole_pattern(pattern: str) -> str | None:
    """Return a regex for whole texts in which the pattern is found, or None.

    Where one option of the pattern alone has an anchor, it leaves some of these texts out.
    """
    body = pattern.removeprefix("^")
    is_open = len(body) == len(pattern)
    ends = re.search(r"(?:^|[^\\])(?:\\\\)*\$$", body) is not None
    body = body[:-1] if ends else body
    rest = re.sub(r"\[\^?\]?[^\]]*\]", "", re.sub(r"\\.", "", body))
    counts = re.findall(r"[{,](\d+)(?=[,}])", rest)
    if not can_hold_pattern(pattern) or "^" in rest or "$" in rest:
        return None
    if sum(int(count[:9]) for count in counts) > MAX_REPETITIONS:
        return None
    anything = "(?s:.*)"
    return f"{anything if is_open else ''}(?:{body}){'' if ends else anything}"
