"""Random JSON schemas, and outputs that try to leave them by what parsers merge.

Owns how a schema and an adversarial text are drawn, how a matcher follows the text, and an
independent validator. Knows no engine and no format of tool calls.

    seed ──► draw_schema ──► draw_text: a value that fits, then escapes, repeated names, white space
                 │               │
                 └──► matcher ◄──┘  follow_text: the text's bytes where the mask allows them
                         └──► how it ended, and the text ──► find_problem: jsonschema

Always true: an output that ends by itself has no problem.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.request import Reasoning, Structure
from forge.sequence import GrammarMatcher
from forge.strict_json import SchemaViolation
from forge.structured_output import LLGuidanceBackend
from forge.tokenizer import ByteTokenizer

NAMES = (
    *("a", "b", "ab", "path", "x1", "x2", "kind", "0", "", "a b", 'q"t', "a\nb", "a\\b", "a/b"),
    *("é", "e\u0301", "😀", "\u2028", "A", "n1", "a\u0001", "\x7f"),
)
TEXTS = (
    *("", "a", "ab", "a'b", 'q"t', "a\nb", "\\u0061", "é", "😀", "\u2028", "x" * 30, "\u0001"),
    *("2024-02-29", "2023-02-29", "0000-01-01", "12:30:60Z", "2023-02-29T10:00:00Z", "</a>"),
    *("a@b.c", "1.2.3.4", "::1", "P1D", "http://a/b?c", "d9428888-122b-11e1-b85c-61cd3cbb3210"),
)
FORMATS = (*("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "password", "int64"),)
PATTERNS = ("^x", "^x[0-9]$", "[0-9]$", "^a", "^$", "b", "^[a-z]+$", "^[^a]*$", "é")
LITERALS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, 10**12, [], {}, [1, "a"], {"a": 1}, {"a": {"b": None}}),
    *TEXTS[:12],
)


def draw_schema(rng: Random, depth: int, definitions: Iterable[str] = ()) -> Any:
    """Draw a schema, nested up to `depth`, that may refer to the definitions."""
    kinds = ["string", "number", "enum", "any"] + 3 * ["object"] * (depth > 0)
    kinds += ["array", "anyOf", "oneOf", "allOf"] * (depth > 0) + ["ref"] * bool(definitions)

    def inner() -> Any:
        return draw_schema(rng, depth - 1, definitions)

    match rng.choice(kinds):
        case "string":
            return _draw_string(rng)
        case "number":
            return _draw_number(rng)
        case "enum":
            if rng.random() < 0.2:
                return {"const": rng.choice(LITERALS)}
            return {"enum": rng.sample(LITERALS, rng.randint(1, 4))}
        case "any":
            return rng.choice(
                (True, {}, {"type": "object"}, {"type": "boolean"}, {"type": ["null", "string"]})
            )
        case "object":
            return _draw_object(rng, inner)
        case "array":
            schema = {"type": "array", "items": inner(), "maxItems": rng.randint(0, 3)}
            if rng.random() < 0.3:
                schema["prefixItems"] = [inner() for _ in range(rng.randint(1, 2))]
            return schema
        case "ref":
            return {"$ref": f"#/$defs/{rng.choice(list(definitions))}"}
        case combination:
            schema = {combination: [inner() for _ in range(rng.randint(1, 3))]}
            if combination == "allOf" and rng.random() < 0.5:
                schema = {"allOf": [_draw_object(rng, inner) for _ in range(2)]}
            return schema


def draw_root(rng: Random) -> Any:
    """Draw a schema for an output, with definitions that may refer to each other.

    A definition is an object, so that no value is compared with itself without end.
    """
    if rng.random() < 0.7:
        return draw_schema(rng, rng.randint(0, 3))
    names = ["d0", "d1"]
    definitions = {name: _draw_object(rng, lambda: draw_schema(rng, 1, names)) for name in names}
    schema = draw_schema(rng, 2, names)
    return {**schema, "$defs": definitions} if isinstance(schema, dict) else schema


def _draw_string(rng: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    match rng.randrange(5):
        case 0:
            schema["format"] = rng.choice(FORMATS)
        case 1:
            schema["pattern"] = rng.choice(PATTERNS)
        case 2:
            schema["maxLength"] = rng.randint(0, 4)
            schema["minLength"] = rng.randint(0, schema["maxLength"])
    return schema


def _draw_number(rng: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
    if rng.random() < 0.5:
        schema["minimum"] = rng.choice((-7, 0, 0.5, 3))
    if rng.random() < 0.5:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = rng.choice((4, 7.25, 100, 1e6))
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice((1, 2, 3, 0.5, 0.1, 0.01))
    return schema


def _draw_object(rng: Random, inner: Callable[[], Any]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    schema: dict[str, Any] = {"type": "object"}
    if names or rng.random() < 0.5:
        schema["properties"] = {name: inner() for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.5]
    if rng.random() < 0.1:
        schema["required"] = [*schema.get("required", ()), rng.choice(NAMES)]
    if rng.random() < 0.25:
        schema["patternProperties"] = {rng.choice(PATTERNS): inner()}
    match rng.randrange(4):
        case 0:
            schema["additionalProperties"] = False
        case 1:
            schema["additionalProperties"] = inner()
        case 2:
            schema["additionalProperties"] = True
    if rng.random() < 0.1:
        schema["maxProperties"] = rng.randint(1, 4)
    return schema


def draw_value(rng: Random, schema: Any, root: Any, depth: int = 4) -> Any:
    """Draw a value that mostly fits. An object is a list of pairs, in which names may repeat."""
    if not isinstance(schema, dict) or depth == 0:
        return rng.choice(LITERALS)
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].rpartition("/")[2]]
        return draw_value(rng, target, root, depth - 1)
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    for combination in ("anyOf", "oneOf", "allOf"):
        if combination in schema:
            values = [draw_value(rng, each, root, depth - 1) for each in schema[combination]]
            if combination == "allOf" and all(isinstance(value, Pairs) for value in values):
                return Pairs(pair for value in values for pair in value)
            return rng.choice(values)
    match schema.get("type"):
        case "object":
            return _draw_pairs(rng, schema, root, depth)
        case "array":
            items = schema.get("prefixItems", []) + 3 * [schema.get("items", True)]
            count = rng.randint(0, min(len(items), schema.get("maxItems", 3)))
            return [draw_value(rng, each, root, depth - 1) for each in items[:count]]
        case "string":
            return rng.choice(TEXTS)
        case "integer":
            return rng.choice((0, 1, 3, 6, 12, -6, 2**60))
        case "number":
            return rng.choice((0, 0.5, 3, 7.25, -1.5, 1e-3, 1e30))
        case "boolean":
            return rng.random() < 0.5
    return rng.choice(LITERALS)


class Pairs(list[tuple[str, Any]]):
    """The members of an object, in which a name may come twice."""


def _draw_pairs(rng: Random, schema: dict[str, Any], root: Any, depth: int) -> Pairs:
    properties = schema.get("properties", {})
    further = schema.get("additionalProperties", True)
    pairs = Pairs()
    required = schema.get("required", [])
    for name in dict.fromkeys([*properties, *required]):
        if name in required or rng.random() < 0.7:
            each = properties.get(name, further)
            pairs.append((name, draw_value(rng, each, root, depth - 1)))
    for _ in range(rng.randint(0, 3)):
        name = rng.choice((*NAMES, *properties, *(name for name, _ in pairs)))
        patterns = schema.get("patternProperties", {}).values()
        each = rng.choice((True, further, *properties.values(), *patterns))
        pairs.append((name, draw_value(rng, each, root, depth - 1)))
    return pairs


def write_json(rng: Random, value: Any, evasion: float) -> str:
    """Return the value as JSON, with the share of its characters and spaces written unusually."""

    def space(text: str) -> str:
        return text if rng.random() > evasion / 4 else rng.choice(("", " ", "\n", "\t", "  ", "\r"))

    if isinstance(value, Pairs | dict):
        pairs = value.items() if isinstance(value, dict) else value
        members = (
            f"{_write_text(rng, name, evasion)}{space('')}:{space(' ')}"
            f"{write_json(rng, item, evasion)}"
            for name, item in pairs
        )
        return "{" + space("") + f",{space(' ')}".join(members) + "}"
    if isinstance(value, list):
        return "[" + f",{space(' ')}".join(write_json(rng, each, evasion) for each in value) + "]"
    if isinstance(value, str):
        return _write_text(rng, value, evasion)
    text = json.dumps(value)
    if isinstance(value, int) and type(value) is not bool and rng.random() < evasion / 3:
        text = rng.choice((f"{text}.0", f"{text}e0", f"-{text}", f"{text}E400", f"0{text}"))
    return text


def _write_text(rng: Random, text: str, evasion: float) -> str:
    characters = []
    for character in text:
        written = json.dumps(character, ensure_ascii=rng.random() < 0.2)[1:-1]
        if rng.random() < evasion:
            units = character.encode("utf-16-be")
            written = "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
            written = rng.choice((written, written.upper().replace("\\U", "\\u")))
        characters.append(written)
    return '"' + "".join(characters) + '"'


def draw_text(rng: Random, schema: Any) -> str:
    """Draw JSON that nearly fits the schema; most of it tries to leave it."""
    evasion = rng.choice((0.0, 0.1, 0.5, 1.0))
    return write_json(rng, draw_value(rng, schema, schema), evasion)


PIECES = (
    *("\\u00", '"\\u', '", "', '": ', '", "\\u00', "}}", "]}", '"}', '{"', "\\ud8", "3d\\ude00"),
    *('"a": ', '"path": ', "0061", "\\u0061", "\\\\", ', "', " \n", "true", "e400", '"x'),
)
"""Tokens that write escapes, names and ends at once."""


class EvasiveTokenizer(ByteTokenizer):
    """A tokenizer of bytes and PIECES. Token 0 ends an output."""

    @property
    def vocab_size(self) -> int:
        return super().vocab_size + len(PIECES)

    def token_bytes(self, token: int) -> bytes:
        first = super().vocab_size
        return PIECES[token - first].encode() if token >= first else super().token_bytes(token)

    def encode_at_random(self, rng: Random, data: bytes) -> int:
        """Return the id of a token that the bytes begin with."""
        pieces = [i for i, piece in enumerate(PIECES) if data.startswith(piece.encode())]
        if pieces and rng.random() < 0.5:
            return super().vocab_size + rng.choice(pieces)
        return data[0] + 1


TOKENIZER = EvasiveTokenizer()
MAX_TOKENS = 300


class Ending(NamedTuple):
    """How an output ended: "stop", "length", "violation" or "error", its text and the reason.

    num_draft_masks   masks of drafts, each of which was that of the committed tokens
    """

    how: str
    text: str
    reason: str = ""
    num_draft_masks: int = 0

    @property
    def kind(self) -> str:
        """Return how it ended, and by what where that is a violation."""
        if self.how != "violation":
            return self.how
        for sign, name in (
            (" twice ", "repeated name"),
            ("double", "number"),
            ("'oneOf'", "oneOf"),
        ):
            if sign in self.reason:
                return f"violation: {name}"
        return "violation: other"


def follow_text(rng: Random, matcher: GrammarMatcher, text: str) -> Ending:
    """Feed tokens that write the text where the mask allows it, and others where it does not.

    Now and then the next tokens are drafts: their masks must be those of the committed tokens.
    """
    wish, tokens = text.encode(), list[int]()
    draft_masks: list[bytes] = []
    drafts: list[int] = []
    num_masks = 0
    while len(tokens) < MAX_TOKENS:
        if draft_masks:
            num_masks += 1
            assert draft_masks.pop(0) == matcher.mask, "the mask of a draft differs"
        if not draft_masks and rng.random() < 0.1:
            drafts = _draw_drafts(rng, wish)
            draft_masks = matcher.draft_masks(drafts)
        token = drafts.pop(0) if draft_masks else _choose(rng, matcher.mask, wish)
        if not _allows(matcher.mask, token):
            wish = wish[1:]
            continue
        data = TOKENIZER.token_bytes(token)
        wish = wish.removeprefix(data)
        try:
            if token == 0:
                matcher.check_end()
                return Ending("stop", _join(tokens), "", num_masks)
            tokens.append(token)
            if matcher.feed(token):
                return Ending("stop", _join(tokens), "", num_masks)
        except SchemaViolation as violation:
            return Ending("violation", _join(tokens), str(violation), num_masks)
        except ValueError as error:
            return Ending("error", _join(tokens), str(error), num_masks)
    return Ending("length", _join(tokens), "", num_masks)


def _draw_drafts(rng: Random, wish: bytes) -> list[int]:
    drafts = []
    for _ in range(rng.randint(1, 6)):
        if not wish:
            break
        drafts.append(TOKENIZER.encode_at_random(rng, wish))
        wish = wish.removeprefix(TOKENIZER.token_bytes(drafts[-1]))
    return drafts


def _choose(rng: Random, mask: bytes, wish: bytes) -> int:
    """Return the next token: of the wish if possible, at its end the end, else any."""
    if wish:
        token = TOKENIZER.encode_at_random(rng, wish)
        if _allows(mask, token) or rng.random() < 0.5:
            return token  # one that is not allowed is left out
    elif _allows(mask, 0):
        return 0
    closing = [byte + 1 for byte in b'"}],' if _allows(mask, byte + 1)]
    if closing and rng.random() < 0.7:
        return rng.choice(closing)
    return rng.choice([t for t in range(TOKENIZER.vocab_size) if _allows(mask, t)])


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _join(tokens: Iterable[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode(errors="replace")


# The independent validator.


class RepeatedName(ValueError):
    """An object has a name twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise RepeatedName(str(pairs))
    return dict(pairs)


def _finite(text: str) -> float:
    if abs(float(text)) == float("inf"):
        raise ValueError(f"{text} is too large for a double")
    return int(text) if text.lstrip("-").isdecimal() else float(text)


@cache
def _validator_class() -> Any:
    """Return jsonschema's validator, with multiples of decimal numbers as they are written."""
    import jsonschema

    def is_multiple(validator: Any, step: float, value: Any, schema: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if Fraction(repr(value)) % Fraction(repr(step)):
                yield jsonschema.ValidationError("it is no multiple")

    return jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"multipleOf": is_multiple}
    )


@cache
def _format_checker() -> Any:
    import jsonschema

    checker = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])

    @checker.checks("date-time", ValueError)
    def is_date_time(value: object) -> bool:
        if isinstance(value, str):
            shape = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)"
            match = re.fullmatch(shape, value.upper(), re.ASCII)
            datetime.datetime.fromisoformat("".join(match.groups()) if match else "none")
        return True

    @checker.checks("time", ValueError)
    def is_time(value: object) -> bool:
        return not isinstance(value, str) or is_date_time(f"2000-01-01T{value}")

    return checker


def find_problem(text: str, schema: Any) -> str | None:
    """Return why the text does not have the schema by jsonschema and json, or None."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_int=_finite)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    validator = _validator_class()(schema, format_checker=_format_checker())
    error = next(validator.iter_errors(value), None)
    return None if error is None else f"{error.validator}: {error.message}"[:200]


# A world.

TEXTS_PER_SCHEMA = 2
REASONING = Reasoning("", ">")


@cache
def _backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, (0,))


def run_world(seed: int) -> Counter[str]:
    """Draw a schema, follow texts, and return how they ended. Raises AssertionError.

    An output that ends by itself must have its schema for jsonschema too. One that violates its
    schema must not.
    """
    rng, reached = Random(f"schema {seed}"), Counter[str]()
    schema = draw_root(rng)
    structure = Structure.json_schema(schema)
    if rng.random() < 0.15:
        structure = structure._replace(reasoning=REASONING)
    for _ in range(TEXTS_PER_SCHEMA):
        try:
            matcher = _backend().create_matcher(structure, allow_end=True)
        except InvalidRequest:
            return Counter(refused=1)
        text = draw_text(rng, schema)
        ending = follow_text(rng, matcher, text if structure.reasoning is None else f"ab>{text}")
        reached[ending.kind] += 1
        reached["masks of drafts"] += ending.num_draft_masks
        if ending.how in ("stop", "violation"):
            answer = ending.text
            if structure.reasoning is not None:
                answer = answer.partition(REASONING.end)[2]
            problem = find_problem(answer, schema)
            assert (problem is None) == (ending.how == "stop"), (ending, problem, schema)
    return reached
