"""SchemaCheck: whether a finished JSON text has its schema once a parser has read it.

Owns the rules of keywords, and how many comparisons one output may take. Knows no tokens and no
request.

    text ──parse_json──► value ──compare──► "/path: enum", or None
                                   │
                                   └──► each part of the value, once with each part of the schema

Always true: the cost is bounded for any schema. Comparisons are counted; regexes are llguidance's,
which never backtrack; no reference is fetched.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from fractions import Fraction
from functools import cache
from typing import Any

import llguidance

from forge.schema_grammar import prepare_schema
from forge.schema_references import find_references
from forge.strict_json import SchemaViolation, measure_json, parse_json

MIN_STEPS, STEPS_PER_VALUE, MAX_STEPS = 5_000, 512, 200_000
"""Comparisons of a value with a keyword: those that any output may take, more for each value in it,
and most for one output, besides one for each character of its strings. 1,000 take 1 to 2 ms: a text
takes less than its masks did."""

PATTERN_STEPS, TEXT_STEPS, MATCH_STEPS, CHARS_PER_STEP = 300, 6, 40, 2
"""Comparisons that a regex counts as, by its time: when it is compiled for a text, for each text,
for a text that it matches, and for its length."""

_PATTERN_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=20_000, max_lexer_states=2_000, verbose_errors=False
)

_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09")
"""Drafts without `prefixItems`."""

_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    **{type(None): ("null",), bool: ("boolean",), str: ("string",), list: ("array",)},
    **{dict: ("object",), float: ("number",), int: ("number", "integer")},
}


class _Comparison:
    """Comparison of a value with a schema: each part of it once with each part of the schema.

    compare and the rules return where the value differs, such as "/a/0: maximum", or None.
    """

    def __init__(self, rules: Mapping[int, list[_Rule]], max_steps: int) -> None:
        self._rules = rules
        self._num_left = self._max_steps = max_steps
        self._results: dict[tuple[int, int], str | None] = {}

    def spend(self, num_steps: int) -> None:
        """Raise ValueError where fewer steps are left."""
        self._num_left -= num_steps
        if self._num_left < 0:
            raise ValueError(f"comparing it with its schema takes {self._max_steps} steps or more")

    def compare(self, value: Any, schema: Any) -> str | None:
        if not isinstance(schema, dict):
            return ": false schema" if schema is False else None
        key = id(value), id(schema)  # both outlive the comparison
        if key in self._results:
            return self._results[key]
        rules = self._rules.get(id(schema), ())
        self.spend(1 + len(rules))
        problem = self._results[key] = None  # a schema that refers to itself adds nothing
        for rule in rules:
            problem = rule(value, self)
            if problem is not None:
                break
        self._results[key] = problem
        return problem


_Rule = Callable[[Any, _Comparison], str | None]


class SchemaCheck:
    """Check of values against a schema, which must be one that llguidance compiles.

    Its keywords are those that llguidance enforces; others are ignored. Any thread may call it.
    """

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        self._schema = schema
        root = schema if isinstance(schema, dict) else {}
        has_prefix_items = not any(draft in str(root.get("$schema")) for draft in _OLD_DRAFTS)
        self._patterns: _Patterns = {}
        schemas, references = find_references(schema)
        self._rules = {
            id(each): list(_create_rules(each, has_prefix_items, self._patterns))
            for each in schemas
        }
        for each, target in references:
            self._rules[id(each)].append(_reference_rule(target))

    def compile_patterns(self) -> list[tuple[str, str]]:
        """Compile all patterns, so that no value waits for that; return them and their keywords.

        0.2 ms for each: in a thread that others do not wait for.
        """
        for pattern in self._patterns.values():
            pattern.compile()
        return list(self._patterns)

    def find_violation(self, text: str) -> str | None:
        """Return why the JSON text does not have the schema, or None where it has.

        Raises ValueError where that takes too many steps.
        """
        try:
            return self.find_value_violation(parse_json(text))
        except SchemaViolation as violation:
            return str(violation)

    def find_value_violation(self, value: Any) -> str | None:
        """Return why a value of `parse_json` does not have the schema, or None where it has.

        Raises ValueError where that takes too many steps.
        """
        num_values, num_chars, _ = measure_json(value)
        max_steps = min(MIN_STEPS + STEPS_PER_VALUE * num_values, MAX_STEPS) + num_chars
        try:
            problem = _Comparison(self._rules, max_steps).compare(value, self._schema)
        except RecursionError:
            raise ValueError("comparing it with its schema nests too deep") from None
        if problem is None:
            return None
        pointer, _, keyword = problem.rpartition(": ")
        return f"{keyword!r} does not allow its value at {pointer[:128] or '/'!a}"


# Rules of keywords: functions of a value and its comparison. Each applies to its types only.


def _create_rules(
    schema: dict[str, Any], has_prefix_items: bool, patterns: _Patterns
) -> Iterator[_Rule]:
    """Yield the rules of a schema, except that of its reference; add its patterns to `patterns`."""
    for keyword, (kind, fits) in _FITS.items():
        if keyword in schema:
            yield from _simple_rules(keyword, schema, kind, fits)
    for keyword, literals in (("const", [schema.get("const")]), ("enum", schema.get("enum"))):
        if keyword in schema and isinstance(literals, list):
            yield _literal_rule(keyword, literals)
    for keyword in ("pattern", "format"):
        if isinstance(schema.get(keyword), str):
            yield _text_rule(keyword, _get_pattern(patterns, keyword, schema[keyword]))
    for keyword, create in _COMBINATIONS.items():
        if isinstance(schema.get(keyword), list):
            yield create(schema[keyword])
    if not schema.keys().isdisjoint(("properties", "patternProperties", "additionalProperties")):
        named = schema.get("patternProperties") or {}
        names = [(_get_pattern(patterns, "pattern", key), each) for key, each in named.items()]
        yield _object_rule(schema, names)
    if not schema.keys().isdisjoint(("items", "prefixItems", "additionalItems")):
        yield _array_rule(schema, has_prefix_items)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_type(value: Any, names: Any) -> bool:
    """Return whether the value has the type, or one of them. 1.0 is an integer."""
    own = _TYPE_NAMES[type(value)]
    if own == ("number",) and value.is_integer():
        own = _TYPE_NAMES[int]
    return any(name in own for name in ([names] if isinstance(names, str) else names))


def _is_multiple(value: float, step: float) -> bool:
    """Return whether the value is a multiple, as the decimal numbers that both are written as."""
    return not step or Fraction(str(value)) % Fraction(str(step)) == 0


def _has_all(value: dict[str, Any], names: list[str]) -> bool:
    return all(name in value for name in names)


def _is_at_least(value: Sized, size: int) -> bool:
    return len(value) >= size


def _is_at_most(value: Sized, size: int) -> bool:
    return len(value) <= size


_FITS: dict[str, tuple[type, Callable[[Any, Any], bool]]] = {
    "type": (object, _has_type),
    "minimum": (float, operator.ge),
    "maximum": (float, operator.le),
    "exclusiveMinimum": (float, operator.gt),
    "exclusiveMaximum": (float, operator.lt),
    "multipleOf": (float, _is_multiple),
    "minLength": (str, _is_at_least),
    "maxLength": (str, _is_at_most),
    "minItems": (list, _is_at_least),
    "maxItems": (list, _is_at_most),
    "minProperties": (dict, _is_at_least),
    "maxProperties": (dict, _is_at_most),
    "required": (dict, _has_all),
}
"""Keyword -> type of its values, of which `float` is any number, and whether one fits."""


def _simple_rules(
    keyword: str, schema: dict[str, Any], kind: type, fits: Callable[[Any, Any], bool]
) -> Iterator[_Rule]:
    argument = schema[keyword]
    if isinstance(argument, list):
        argument = tuple(dict.fromkeys(argument))
    if kind is float and isinstance(argument, bool):  # draft 4: whether the bound is excluded
        if not argument:
            return
        argument = schema.get(keyword.removeprefix("exclusive").lower())
        if argument is None:
            return

    def find(value: Any, comparison: _Comparison) -> str | None:
        applies = _is_number(value) if kind is float else isinstance(value, kind)
        return f": {keyword}" if applies and not fits(value, argument) else None

    yield find


def _literal_rule(keyword: str, literals: list[Any]) -> _Rule:
    scalars = {_key(each) for each in literals if not isinstance(each, dict | list)}
    others = [each for each in literals if isinstance(each, dict | list)]
    num_steps = measure_json(others)[0]

    def find(value: Any, comparison: _Comparison) -> str | None:
        if not isinstance(value, dict | list):
            return None if _key(value) in scalars else f": {keyword}"
        comparison.spend(num_steps)
        return None if any(_equals(value, each) for each in others) else f": {keyword}"

    return find


def _key(scalar: Any) -> Any:
    """Return a value that is equal for equal scalars of JSON: 1 and 1.0, but not 1 and true."""
    return (bool, scalar) if isinstance(scalar, bool) else scalar


def _equals(value: Any, literal: Any) -> bool:
    """Return whether two JSON values are equal. O(the literal)."""
    if isinstance(literal, dict):
        return (
            isinstance(value, dict)
            and value.keys() == literal.keys()
            and all(_equals(value[name], item) for name, item in literal.items())
        )
    if isinstance(literal, list):
        return (
            isinstance(value, list)
            and len(value) == len(literal)
            and all(map(_equals, value, literal))
        )
    return not isinstance(value, dict | list) and bool(_key(value) == _key(literal))


@cache
def _byte_tokens() -> llguidance.LLTokenizer:
    """Return a vocabulary with a token for each byte, whose id is the byte."""
    return llguidance.LLTokenizer("byte")


class _Pattern:
    """A pattern or a format, which is compiled when it is first used, or before."""

    def __init__(self, keyword: str, argument: str) -> None:
        self._schema = prepare_schema({"type": "string", keyword: argument})
        self._matcher: llguidance.LLMatcher | None = None

    def compile(self) -> llguidance.LLMatcher:
        """Return the matcher, before any text."""
        if self._matcher is None:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(self._schema)
            self._matcher = llguidance.LLMatcher(
                _byte_tokens(), grammar, log_level=0, limits=_PATTERN_LIMITS
            )
        return self._matcher

    def matches(self, text: str, comparison: _Comparison) -> bool:
        """Return whether the text matches.

        True where that cannot be decided within _PATTERN_LIMITS: the masks have held it.
        """
        comparison.spend(TEXT_STEPS + len(text) // CHARS_PER_STEP)
        if self._matcher is None:
            comparison.spend(PATTERN_STEPS)
        data = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()
        matcher = self.compile().deep_copy()
        num_read = matcher.try_consume_tokens(list(data))
        if matcher.is_error():
            return True
        comparison.spend(MATCH_STEPS if num_read == len(data) else 0)
        return num_read == len(data) and matcher.is_accepting()


_Patterns = dict[tuple[str, str], _Pattern]
"""Patterns and formats of a schema, each once: a matcher takes about 40 KiB."""


def _get_pattern(patterns: _Patterns, keyword: str, argument: str) -> _Pattern:
    key = keyword, argument
    if key not in patterns:
        patterns[key] = _Pattern(keyword, argument)
    return patterns[key]


def _text_rule(keyword: str, pattern: _Pattern) -> _Rule:
    def find(value: Any, comparison: _Comparison) -> str | None:
        fits = not isinstance(value, str) or pattern.matches(value, comparison)
        return None if fits else f": {keyword}"

    return find


def _all_of_rule(schemas: list[Any]) -> _Rule:
    def find(value: Any, comparison: _Comparison) -> str | None:
        for schema in schemas:
            problem = comparison.compare(value, schema)
            if problem is not None:
                return problem
        return None

    return find


def _any_of_rule(schemas: list[Any]) -> _Rule:
    def find(value: Any, comparison: _Comparison) -> str | None:
        for schema in schemas:
            if comparison.compare(value, schema) is None:
                return None
        return ": anyOf"

    return find


def _one_of_rule(schemas: list[Any]) -> _Rule:
    def find(value: Any, comparison: _Comparison) -> str | None:
        count = sum(comparison.compare(value, schema) is None for schema in schemas)
        return None if count == 1 else ": oneOf"

    return find


_COMBINATIONS: dict[str, Callable[[list[Any]], _Rule]] = {
    "allOf": _all_of_rule,
    "anyOf": _any_of_rule,
    "oneOf": _one_of_rule,
}


def _reference_rule(target: Any) -> _Rule:
    return lambda value, comparison: comparison.compare(value, target)


def _object_rule(schema: dict[str, Any], patterns: list[tuple[_Pattern, Any]]) -> _Rule:
    properties, further = schema.get("properties") or {}, schema.get("additionalProperties", True)

    def find(value: Any, comparison: _Comparison) -> str | None:
        if not isinstance(value, dict):
            return None
        for name, item in value.items():
            schemas = [properties[name]] if name in properties else []
            schemas += (each for pattern, each in patterns if pattern.matches(name, comparison))
            for each in schemas or (further,):
                problem = comparison.compare(item, each)
                if problem is not None:
                    return f"/{name[:32]}{problem}"
        return None

    return find


def _array_rule(schema: dict[str, Any], has_prefix_items: bool) -> _Rule:
    items = schema.get("items", True)
    prefix: Any = schema.get("prefixItems") if has_prefix_items else None
    if isinstance(items, list):
        prefix, items = items, schema.get("additionalItems", True)
    elif "additionalItems" in schema:
        prefix = None
    prefix = prefix or []

    def find(value: Any, comparison: _Comparison) -> str | None:
        if not isinstance(value, list):
            return None
        for index, item in enumerate(value):
            each = prefix[index] if index < len(prefix) else items
            problem = comparison.compare(item, each)
            if problem is not None:
                return f"/{index}{problem}"
        return None

    return find
