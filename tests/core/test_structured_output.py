"""Structured output: every mask compared with a spelt-out language, and whole outputs that fit."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import LLM, Engine, HashModel, Request, SamplingParams, Structure
from forge.config import Speculation
from forge.errors import InvalidRequest
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.mask_threads import MIN_MASKS
from forge.models.logits import FaultHooks
from forge.models.model_wrapper import ModelWrapper
from forge.policy import FCFS
from forge.recording import RecordingWriter, build_header, read_entries
from forge.replay_run import ReplayRun
from forge.request import (
    MAX_PATTERN_CHARS,
    MAX_STRUCTURE_CHARS,
    Delta,
    FinishReason,
    Reasoning,
    ThinkingBudget,
)
from forge.sequence import GrammarMatcher
from forge.strict_json import SchemaViolation
from forge.structured_output import (
    CACHE_MIB,
    MAX_CHECKED_STRUCTURES,
    MAX_SCHEMA_NUMBER,
    MAX_SCHEMA_PROPERTIES,
    LLGuidanceBackend,
    LLGuidanceMatcher,
)
from forge.tokenizer import ByteTokenizer
from tests.core.builders import config
from tests.core.reference import language
from tests.core.worlds import PATTERNS
from tests.texts import ANY_CHARACTER

END = 0
TOKENIZER = ByteTokenizer(("<|end|>", "<|pad|>", "ab"))
"""A byte tokenizer with special tokens; the name of one, "ab", is a plain text too."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def create_structures(end_ids: Iterable[int] = (END,)) -> LLGuidanceBackend:
    return LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, end_ids)


SHARED_STRUCTURES = create_structures()
"""A backend for tests that only read what a matcher returns."""


def ids_in(mask: bytes) -> set[int]:
    return {t for t in range(8 * len(mask)) if mask[t // 8] >> t % 8 & 1}


def feed_text(matcher: LLGuidanceMatcher, text: str) -> bool:
    """Feed the text and return the result of its last byte; no earlier byte ends the output."""
    *before, last = TOKENIZER.encode(text, parse_special_tokens=False)
    assert [token for token in before if matcher.feed(token)] == []
    return matcher.feed(last)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_has_every_token_that_may_come_next_and_no_other(pattern: str) -> None:
    texts = language(pattern)
    prefixes = {text[:end] for text in texts for end in range(len(text))}
    for prefix in sorted(prefixes):
        matcher = SHARED_STRUCTURES.create_matcher(Structure.regex(pattern), allow_end=True)
        assert [byte for byte in prefix if matcher.feed(byte + 1)] == [], prefix
        rest = {text[len(prefix) :] for text in texts if text.startswith(prefix)}
        expected = {END if not each else each[0] + 1 for each in rest}
        assert ids_in(matcher.mask) == expected, prefix


@pytest.mark.parametrize("num_special", [31, 32, 33])
def test_all_masks_of_a_vocabulary_have_as_many_bytes(num_special: int) -> None:
    """256 bytes and these special tokens: one less than whole words of 32, whole ones, one more."""
    tokenizer = ByteTokenizer(tuple(f"<|{number}|>" for number in range(num_special)))
    backend = LLGuidanceBackend(tokenizer, tokenizer.vocab_size, (END,))
    matcher = backend.create_matcher(Structure.regex("(ab)+"), allow_end=True)
    masks = [matcher.mask]
    for token in tokenizer.encode("abab"):
        matcher.feed(token)
        masks.append(matcher.mask)
    assert {len(mask) for mask in masks} == {-(-(256 + num_special) // 32) * 4}
    a, b = tokenizer.encode("ab")
    assert [ids_in(mask) for mask in masks] == [{a}, {b}, {a, END}, {b}, {a, END}]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_output_is_complete_when_nothing_can_follow(pattern: str) -> None:
    for text in language(pattern) - {b""}:
        matcher = SHARED_STRUCTURES.create_matcher(Structure.regex(pattern), allow_end=True)
        longer = any(each != text and each.startswith(text) for each in language(pattern))
        assert feed_text(matcher, text.decode()) is not longer, text


KHMER_5 = "\u17e5"


@pytest.mark.parametrize(
    ("pattern", "matched", "refused"),
    [
        (r"\d", "5", KHMER_5),
        (r"[\d.]", "5.", KHMER_5),
        (r"[\d-x]", "5-x", KHMER_5 + "y"),
        (r"[a\d&&[^6]]", "5a", KHMER_5 + "6"),
        (r"\D", "x" + KHMER_5, "5"),
        (r"[^\d]", "x" + KHMER_5, "5"),
        (r"[^\D]", "5", "x" + KHMER_5),
        (r"\\\d", "\\", "5"),
        (r"[\\d]", "\\d", "5"),
        (r"[\]\d]", "]5", KHMER_5),
        (r"\p{Nd}", "5" + KHMER_5, "x"),
        (r"\w", "5\u00e9" + KHMER_5, "-"),
    ],
)
def test_a_digit_of_a_regex_is_ascii(pattern: str, matched: str, refused: str) -> None:
    """Of the other classes \\w and \\s have all of Unicode. A backslash may itself be escaped."""
    for texts, is_matched in ((matched, True), (refused, False)):
        for char in texts:
            matcher = SHARED_STRUCTURES.create_matcher(Structure.regex(pattern), allow_end=True)
            is_allowed = True
            for byte in char.encode():
                is_allowed = byte + 1 in ids_in(matcher.mask)
                if not is_allowed:
                    break
                matcher.feed(byte + 1)
            assert is_allowed == is_matched, (pattern, char)


def test_every_end_id_is_allowed_when_the_text_is_complete() -> None:
    matcher = create_structures((END, 257)).create_matcher(Structure.regex("a+"), allow_end=True)
    assert ids_in(matcher.mask) == {98}
    assert matcher.feed(98) is False
    assert ids_in(matcher.mask) == {END, 98, 257}
    assert matcher.feed(257) is True


def test_no_end_id_is_allowed_when_ends_are_ignored() -> None:
    matcher = create_structures((END, 257)).create_matcher(
        Structure.regex("a{1,2}"), allow_end=False
    )
    assert (matcher.feed(98), ids_in(matcher.mask)) == (False, {98})
    assert matcher.feed(98) is True


def test_matchers_of_one_structure_are_independent() -> None:
    backend = create_structures()
    matchers = [backend.create_matcher(Structure.regex("ab|cd"), allow_end=True) for _ in range(3)]
    for matcher, byte in zip(matchers, (97, 99, 97), strict=True):
        assert matcher.feed(byte + 1) is False
    assert [ids_in(matcher.mask) for matcher in matchers] == [{99}, {101}, {99}]


def test_a_token_that_does_not_fit_is_an_error() -> None:
    matcher = create_structures().create_matcher(Structure.regex("a+"), allow_end=True)
    with pytest.raises(ValueError, match="token 99 does not fit"):
        matcher.feed(99)


@pytest.mark.parametrize("text", ['{"name": "x", "age": 7, "tags": ["a", "b"]}'])
def test_json_is_spaced_as_json_dumps_does_it(text: str) -> None:
    assert json.dumps(json.loads(text)) == text
    assert (
        feed_text(
            create_structures().create_matcher(Structure.json_schema(PERSON), allow_end=True), text
        )
        is True
    )


PAIR = {"minItems": 2, "maxItems": 2}
SCHEMAS: list[dict[str, Any] | bool] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"enum": ["é", 3, None, [1, {"a": "b"}]]},
    {"anyOf": [{"const": "x"}, {"type": "null"}]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "items": {"const": 1}, **PAIR}}},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
]


def matches_schema(value: Any, schema: Any) -> bool:
    """Return whether the value fits one of SCHEMAS, written in Python."""
    match SCHEMAS.index(schema):
        case 0:
            return (
                list(value) == ["name", "age", "tags"]
                and len(value["name"]) <= 4
                and type(value["age"]) is int
                and 0 <= value["age"] <= 150
                and len(value["tags"]) <= 3
                and set(value["tags"]) <= {"a", "b"}
            )
        case 1:
            return 1 <= len(value) <= 4 and all(type(item) is bool for item in value)
        case 2:
            return value in schema["enum"]
        case 3:
            return value in ("x", None)
        case 4:
            return bool(value == [1, 1])
        case _:
            return re.fullmatch("[a-c]{2,3}", value) is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_is_sampled_fits_its_schema(schema: dict[str, Any], depth: int) -> None:
    params = SamplingParams(max_tokens=400, n=4, seed=3, structure=Structure.json_schema(schema))
    with LLM("hash", depth=depth) as llm:
        outputs = llm.generate(["a", "b", "c"], params)
    choices = [choice for output in outputs for choice in output.choices]
    assert [choice.finish_reason for choice in choices] == ["stop"] * 12
    assert [c.text for c in choices if not matches_schema(json.loads(c.text), schema)] == []


def test_any_json_is_a_structure_too() -> None:
    matcher = create_structures().create_matcher(Structure.json_schema(True), allow_end=True)
    assert feed_text(matcher, '[null, {"a": -1.5e3}]') is True


def test_a_grammar_is_followed() -> None:
    matcher = create_structures().create_matcher(
        Structure.grammar('start: "a" start "b" | "c"'), allow_end=True
    )
    assert feed_text(matcher, "aacbb") is True


def test_a_structure_beats_min_tokens_and_max_tokens_beats_a_structure() -> None:
    short = SamplingParams(max_tokens=9, min_tokens=9, structure=Structure.regex("[a-z]{3}"))
    long = SamplingParams(max_tokens=9, structure=Structure.regex("[a-z]{30}"))
    with LLM("hash") as llm:
        outputs = llm.generate(["x", "x"], [short, long])
    assert [len(o.token_ids) for o in outputs] == [3, 9]
    assert [o.finish_reason for o in outputs] == ["stop", "length"]


def test_a_stop_string_ends_an_output_within_its_structure() -> None:
    params = SamplingParams(max_tokens=99, stop="b", structure=Structure.regex("[ab]{60}c"))
    with LLM("hash") as llm:
        (output,) = llm.generate("x", params)
    assert (output.finish_reason, set(output.text) <= {"a"}) == ("stop", True)


def test_a_mask_and_a_list_of_allowed_ids_are_drawn_from_alike() -> None:
    ascii_ids = list(range(1, 129))
    free = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, allowed_token_ids=ascii_ids)
    wide = SamplingParams(
        max_tokens=20, seed=5, ignore_eos=True, structure=Structure.regex(r"[\x00-\x7f]*")
    )
    with LLM("hash") as llm:
        outputs = llm.generate(["x", "x"], [free, wide])
    assert outputs[0].token_ids == outputs[1].token_ids


# Refusals.

ALL_OF_MANY = "start: T\nT: " + " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(3, 8))
REFUSED_STRUCTURES: list[tuple[Structure, str, str]] = [
    (Structure.regex("["), "invalid_regex", "unclosed character class"),
    (Structure.regex("(?<=a)b"), "invalid_regex", "look-around"),
    (Structure.grammar(ALL_OF_MANY), "invalid_grammar", "fuel exhausted"),
    (Structure.regex("[^\\x00-\\U0010ffff]"), "invalid_regex", "no text matches it"),
    (Structure.grammar(""), "invalid_grammar", "no start rule"),
    (Structure.grammar("start: start"), "invalid_grammar", "no text matches it"),
    (Structure.grammar("start: " + "(" * 6000 + '"a"' + ")" * 6000), "invalid_grammar", "nested"),
    (Structure.json_schema({"type": "foo"}), "invalid_schema", "Invalid type: foo"),
    (Structure.json_schema({"type": 5}), "invalid_schema", "type must be"),
    (Structure.json_schema({"$ref": "#"}), "invalid_schema", "no text matches it"),
    (Structure.json_schema({"$ref": "http://localhost/x"}), "invalid_schema", "not present"),
    (Structure.json_schema({"pattern": "[", "type": "string"}), "invalid_schema", "unclosed"),
    (Structure.json_schema({"enum": []}), "invalid_schema", "Unsatisfiable"),
    (Structure.json_schema({"not": {}}), "invalid_schema", "not"),
    (Structure.json_schema(False), "invalid_schema", "not an object"),
]


@pytest.mark.parametrize(("structure", "code", "problem"), REFUSED_STRUCTURES)
def test_a_structure_that_cannot_be_followed_is_refused(
    structure: Structure, code: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)) as refused:
        SHARED_STRUCTURES.check(structure)
    assert (refused.value.field, refused.value.code) == ("structure", code)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_a_schema_of_many_properties_is_refused() -> None:
    def schema(count: int) -> Structure:
        half = {f"p{i}": {} for i in range(count // 2)}
        return Structure.json_schema({"items": {"properties": half}, "properties": half})

    create_structures().check(schema(MAX_SCHEMA_PROPERTIES // 2))
    with pytest.raises(InvalidRequest, match="402 properties, at most 400"):
        create_structures().check(schema(MAX_SCHEMA_PROPERTIES + 2))


def test_an_object_of_as_many_optional_properties_as_a_schema_may_have_is_followed() -> None:
    names = [f"property_{number}" for number in range(MAX_SCHEMA_PROPERTIES)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    matcher = create_structures().create_matcher(Structure.json_schema(schema), allow_end=True)
    assert feed_text(matcher, json.dumps({names[index]: "a" for index in (0, 200, -1)}))


def test_a_grammar_with_schemas_of_many_properties_is_refused() -> None:
    def grammar(count: int) -> Structure:
        inner = ", ".join(f'"p{i}" : {{}}' for i in range(count - 1))
        return Structure.grammar(f'start: %json {{"properties": {{{inner}}}}}')

    create_structures().check(grammar(500))
    with pytest.raises(InvalidRequest, match="2001 keys in JSON, at most 2000"):
        create_structures().check(grammar(2001))


RANGE_MESSAGE = "number beyond 9007199254740992"
MIN_INT64 = -(2**63)


@pytest.mark.parametrize(
    "schema",
    [
        *(
            {"const": value}
            for value in (MIN_INT64, MIN_INT64 + 1, 10**400, -(10**400), MAX_SCHEMA_NUMBER + 1)
        ),
        {"enum": [1, {"a": [MIN_INT64]}]},
        {"type": "integer", "minimum": MIN_INT64, "maximum": MIN_INT64},
        {"type": "integer", "minimum": -1e19, "maximum": -1e19},
        {"allOf": [{"type": "integer", "const": -9.5e18}]},
        {"maxLength": 2**64, "type": "string"},
        {"minimum": MAX_SCHEMA_NUMBER + 1},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_number_that_no_float_has_is_refused_in_a_schema_and_in_a_grammar(
    schema: dict[str, Any],
) -> None:
    """-2**63 alone would overflow the compiler's stack, whatever the stack's size."""
    with pytest.raises(InvalidRequest, match=RANGE_MESSAGE) as refused:
        create_structures().check(Structure.json_schema(schema))
    assert refused.value.code == "invalid_schema"
    for space in (" ", "", "\n  "):
        with pytest.raises(InvalidRequest, match=RANGE_MESSAGE) as refused:
            create_structures().check(Structure.grammar(f"start: %json{space}{json.dumps(schema)}"))
        assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": MAX_SCHEMA_NUMBER}, "9007199254740992"),
        ({"const": -MAX_SCHEMA_NUMBER}, "-9007199254740992"),
        ({"type": "integer", "minimum": 7, "maximum": 2**63 - 1}, "7"),
        ({"type": "array", "maxItems": 2**63 - 1, "items": {"const": True}}, "[true]"),
    ],
)
def test_the_largest_numbers_are_followed_as_they_are(schema: dict[str, Any], text: str) -> None:
    matcher = create_structures().create_matcher(Structure.json_schema(schema), allow_end=True)
    for token in TOKENIZER.encode(text, parse_special_tokens=False):
        assert token in ids_in(matcher.mask), text
        matcher.feed(token)


def test_a_grammar_whose_schema_is_no_json_is_refused() -> None:
    for text in ("start: %json", "start: %json {", "start: %json " + "[" * 20_000):
        with pytest.raises(InvalidRequest, match="after %json there is no JSON"):
            create_structures().check(Structure.grammar(text))


@pytest.mark.parametrize(
    ("steps", "fits"),
    [
        ((0.25, 0.1, 60), True),
        ((10_000,), True),
        ((1e-20,), True),
        ((5, -5, 0), True),
        ((10_001,), False),
        ((0.01, 1001), False),
        ((7, 11, 13, 17, 19, 23), False),
        ((1e-300,), False),
    ],
)
def test_steps_of_numbers_have_a_small_common_multiple(
    steps: tuple[float, ...], fits: bool
) -> None:
    """Six primes in one schema took minutes."""
    schema = Structure.json_schema({"properties": {str(s): {"multipleOf": s} for s in steps}})
    try:
        create_structures().check(schema)
    except InvalidRequest as error:
        assert ("no common multiple" in error.problem) is not fits, error


def chain(link: str, last: str, count: int) -> str:
    """Return `count` rules, each of which contains the next one."""
    return "\n".join([*(link.format(i, i + 1) for i in range(count)), last.format(count)])


@pytest.mark.parametrize(
    "structure",
    [
        Structure.grammar(chain("r{}: r{}", 'r{}: "a"', 4000).replace("r0:", "start: r0\nr0:", 1)),
        Structure.grammar(chain("R{}: R{}", 'R{}: "a"', 4000).replace("R0:", "start: R0\nR0:", 1)),
        Structure.json_schema(
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    str(i): {"anyOf": [{"items": {"$ref": f"#/$defs/{i + 1}"}}]}
                    for i in range(1200)
                }
                | {"1200": {}},
            }
        ),
    ],
    ids=["rules", "terminals", "references"],
)
def test_a_chain_as_long_as_a_text_may_be_does_not_end_the_process(structure: Structure) -> None:
    """With the usual stack of a thread the process ended without a message."""
    assert len(structure.text) > MAX_STRUCTURE_CHARS // 2
    before = threading.stack_size()
    create_structures().check(structure)
    assert threading.stack_size() == before


def test_a_lone_surrogate_in_a_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="hex escape"):
        create_structures().check(Structure.json_schema({"const": "\ud800"}))


def test_a_property_may_be_called_properties() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    create_structures().check(Structure.json_schema(schema))


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(60_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="the schema is not JSON"):
        Structure.json_schema(deep)
    deep = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="recursion limit"):
        create_structures().check(Structure.json_schema(deep))


def test_a_schema_with_more_values_than_its_text_may_have_characters_is_not_written() -> None:
    with pytest.raises(InvalidRequest, match="more than 65536 values"):
        Structure.json_schema({"enum": [0] * MAX_STRUCTURE_CHARS})


@pytest.mark.parametrize(
    ("structure", "problem"),
    [
        ("[a-z]", "not a forge.Structure"),
        (("regex", "[a-z]"), "not a forge.Structure"),
        (Structure.regex(7), "not the text of a structure"),  # type: ignore[arg-type]
        (Structure("regex", "a"), "not the text of a structure"),  # type: ignore[arg-type]
        (Structure.regex("a" * (MAX_PATTERN_CHARS + 1)), "8193 characters, at most 8192"),
        (Structure.grammar("a" * (MAX_STRUCTURE_CHARS + 1)), "65537 characters, at most 65536"),
    ],
)
def test_a_value_that_is_no_structure_is_refused(structure: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        SamplingParams(structure=structure)


@pytest.mark.parametrize(
    "structure",
    [
        Structure.regex("((a{1000}){1000}){1001}"),
        Structure.json_schema({"type": "string", "pattern": "^((a{1000}){1000}){1001}$"}),
        Structure.grammar("start: A\nA: /((a{1000}){1000}){1001}/"),
        Structure.grammar(
            '%llguidance {"no_forcing": false}\nstart: A\nA: /((a{1000}){1000}){1001}/'
        ),
        Structure.grammar('start: %json {"minItems": 1000000000, "type": "array"}'),
    ],
    ids=["regex", "schema", "grammar", "option", "items"],
)
def test_a_text_that_can_only_go_on_is_not_written_out(structure: Structure) -> None:
    """A mask looks one token ahead, not to the end of a forced text."""
    matcher = SHARED_STRUCTURES.create_matcher(structure, allow_end=True)
    for text in ('"aaaaaaaaa', "aaaaaaaaaa", "[null, null"):
        if TOKENIZER.encode(text, parse_special_tokens=False)[0] in ids_in(matcher.mask):
            assert feed_text(matcher, text) is False
            return
    raise AssertionError(f"nothing begins: {ids_in(matcher.mask)}")


def test_a_structure_that_another_process_compiled_is_not_compiled_to_be_checked() -> None:
    backend, structure = create_structures(), Structure.regex("[ab]{4}")
    assert not backend.compilable_level(structure)
    backend.mark_compilable(structure, COMPILE_LEVELS[0])
    backend.check(structure)
    assert (backend.compilable_level(structure), backend.compiled_grammar(structure)) == (
        COMPILE_LEVELS[0],
        None,
    )
    assert backend.create_matcher(structure, allow_end=True).feed(98) is False
    assert backend.compiled_grammar(structure) is not None


def test_only_so_many_accepted_structures_are_remembered() -> None:
    backend = create_structures()
    first, second, *others, last = (
        Structure.regex(f"a{{{index}}}") for index in range(MAX_CHECKED_STRUCTURES + 1)
    )
    for each in (first, second, *others):
        backend.mark_compilable(each, COMPILE_LEVELS[0])
    # This read makes `first` the newest: `second` is the oldest now.
    assert backend.compilable_level(first) is COMPILE_LEVELS[0]
    backend.mark_compilable(last, COMPILE_LEVELS[-1])
    assert [backend.compilable_level(each) for each in (first, second, last)] == [
        COMPILE_LEVELS[0],
        None,
        COMPILE_LEVELS[-1],
    ]


def test_a_structure_and_allowed_ids_do_not_go_together() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids: the output has a structure"):
        SamplingParams(structure=Structure.regex("a"), allowed_token_ids=[5])


def test_an_engine_without_a_tokenizer_refuses_a_structure() -> None:
    engine = Engine(HashModel(num_blocks=64, block_size=4), config())
    with pytest.raises(InvalidRequest, match="structure: this engine has no tokenizer"):
        engine.submit(Request(0, (1,), SamplingParams(structure=Structure.regex("a"))))
    assert not engine.has_work


# On several threads.


def follow_at_random(num_threads: int) -> list[tuple[str | bool, bytes]]:
    """Return results and masks of 24 outputs, each step of all at once. Some tokens do not fit."""
    backend = LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, (END,), num_threads)
    structures = [*map(Structure.regex, PATTERNS), Structure.json_schema(PERSON)]
    matchers = [
        backend.create_matcher(structures[i % len(structures)], allow_end=i % 5 > 0)
        for i in range(24)
    ]
    rng, found = random.Random(1), []
    for _ in range(12):
        pairs = []
        for matcher in matchers:
            ids = sorted(ids_in(matcher.mask))
            pairs.append((matcher, rng.choice(ids) if rng.random() > 0.03 else 200))
        backend.advance_matchers(pairs)
        matchers = []
        for matcher, token in pairs:
            result: str | bool
            try:
                result = matcher.feed(token)
            except ValueError as error:
                result = str(error)
            found.append((result, matcher.mask))
            if result is False:
                matchers.append(matcher)
        if len(matchers) < MIN_MASKS:
            break
    return found


def test_masks_of_several_threads_are_those_of_feed_alone() -> None:
    expected = follow_at_random(1)
    assert {type(result) for result, _ in expected} == {bool, str}
    assert {result for result, _ in expected} >= {True, False}
    assert follow_at_random(3) == expected


def test_an_error_of_a_token_is_raised_when_it_is_fed() -> None:
    """A row whose sequence has ended is never fed: its structure stays compiled."""
    backend, structure = create_structures(), Structure.regex("[ab]*")
    matcher = backend.create_matcher(structure, allow_end=True)
    assert matcher.start_feed(50) is False
    assert backend.compiled_grammar(structure) is not None
    with pytest.raises(ValueError, match="does not fit"):
        matcher.feed(50)
    assert backend.compiled_grammar(structure) is None


def test_outputs_of_one_structure_have_its_lexers_in_turn() -> None:
    backend = LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, (END,), 3)
    known, slow = Structure.regex("a+"), Structure.regex("b+")
    backend.compile(known, COMPILE_LEVELS[0])
    backend.compile(slow, COMPILE_LEVELS[-1])
    for structure, count in ((known, 3), (slow, 1), (Structure.regex("c+"), 3)):
        matchers = [backend.create_matcher(structure, allow_end=True) for _ in range(6)]
        lexers = [id(matcher.lexer) for matcher in matchers]
        assert len(set(lexers)) == count and lexers == lexers[:count] * (6 // count)


def serve_structured(num_threads: int, depth: int) -> tuple[list[list[Delta]], int]:
    """Return the deltas of each step of 20 requests, and the tokens that matchers got ahead."""
    engine = Engine(
        HashModel(num_blocks=256, block_size=4),
        config(blocks=256, max_num_seqs=16, depth=depth),
        TOKENIZER,
    )
    backend = LLGuidanceBackend(TOKENIZER, engine.model.vocab_size(), (END,), num_threads)
    advance, count = backend.advance_matchers, 0

    def count_tokens(pairs: Sequence[tuple[object, int]]) -> None:
        nonlocal count
        count += len(pairs)
        advance(pairs)

    backend.advance_matchers = count_tokens  # type: ignore[method-assign]
    engine.grammar_backend = backend  # type: ignore[misc]
    for number in range(20):
        structure = Structure.regex("[a-f]{2,9}") if number % 6 else None
        params = SamplingParams(
            max_tokens=6 + number % 3,
            seed=number,
            structure=structure,
            stop_token_ids=(99,) if number % 4 == 1 else (),
            min_tokens=2 if number % 8 == 1 else 0,
        )
        engine.submit(Request(number, (7, number + 1), params))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    return steps, count


def test_a_row_that_fails_ends_its_structured_output_alone() -> None:
    """The first row of the third step fails: its result has no token for the matcher."""
    faults = FaultHooks(result=lambda plan: {0: "no number"} if plan.step == 2 else {})
    engine = Engine(HashModel(num_blocks=64, block_size=4, faults=faults), config(), TOKENIZER)
    for number in range(2):
        params = SamplingParams(max_tokens=9, seed=1, structure=Structure.regex("[a-f]{6}"))
        engine.submit(Request(number, (7, number + 1), params))
    ends = {}
    while engine.has_work:
        ends |= {d.request_id: (d.finish, d.error) for d in engine.step() if d.finish is not None}
    assert ends == {0: (FinishReason.ERROR, "no number"), 1: (FinishReason.STOP, None)}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_with_threads_gives_the_same_deltas_at_the_same_steps(depth: int) -> None:
    expected, _ = serve_structured(1, depth)
    steps, num_tokens = serve_structured(3, depth)
    assert steps == expected and num_tokens > 50
    assert {delta.finish for step in steps for delta in step} >= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


class PlainModel:
    """A model that ignores late rows: it has only the methods that every model has."""

    def __init__(self) -> None:
        model = HashModel(num_blocks=64, block_size=4)
        self.vocab_size, self.num_layers = model.vocab_size, model.num_layers
        self.eos_token, self.forward = model.eos_token, model.forward


def test_a_structure_needs_a_model_that_samples_late_rows_if_plans_are_made_ahead() -> None:
    params = SamplingParams(max_tokens=4, structure=Structure.regex("[ab]{3}"))
    for model in (PlainModel(), ModelWrapper(PlainModel())):  # type: ignore[arg-type]
        engine = Engine(model, config(depth=2), TOKENIZER)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"structure: .*late_rows.*start with depth 1"):
            engine.submit(Request(0, (1,), params))
        assert not engine.has_work
    engine = Engine(PlainModel(), config(depth=1), TOKENIZER)
    engine.submit(Request(0, (1,), params))
    tokens = [token for _ in range(8) for delta in engine.step() for token in delta.tokens]
    assert len(tokens) == 3 and set(tokens) <= {98, 99}


# Many at a time.


@pytest.mark.parametrize(("lane", "count"), [(COMPILE_LEVELS[0], 16), (COMPILE_LEVELS[-1], 8)])
def test_structures_are_kept_up_to_the_memory_that_their_lanes_allow(
    lane: QueueLevel, count: int
) -> None:
    backend = create_structures()
    structures = [Structure.regex(f"a{{{index}}}") for index in range(3 * count)]
    for each in structures:
        backend.compile(each, lane)
    assert count * lane.memory_mib == CACHE_MIB
    assert [each for each in structures if backend.compiled_grammar(each)] == structures[-count:]


def test_a_structure_in_use_stays_compiled_whatever_is_kept() -> None:
    backend, structure = create_structures(), Structure.regex("[ab]{3}")
    matcher, compiled = (
        backend.create_matcher(structure, allow_end=True),
        id(backend.compiled_grammar(structure)),
    )
    for index in range(20):
        backend.compile(Structure.regex(f"a{{{index}}}"))
    assert id(backend.compiled_grammar(structure)) == compiled
    del matcher
    assert backend.compiled_grammar(structure) is None


def test_a_structure_that_no_matcher_can_follow_any_more_is_compiled_again() -> None:
    """Copies of one matcher share a lexer: once one output has filled it, it is full for all."""
    backend, structure = create_structures(), Structure.regex("[ab]*")
    backend.check(structure)
    first = backend.create_matcher(structure, allow_end=True)
    assert backend.compiled_grammar(structure) is not None
    with pytest.raises(ValueError, match="does not fit"):
        first.feed(50)
    assert backend.compiled_grammar(structure) is None
    assert backend.create_matcher(structure, allow_end=True).feed(98) is False


def test_unicode_classes_within_longer_text_are_not_too_complex() -> None:
    text = '{\n   "name": "Pé語",\n   "population": 12\n}'
    pattern = r'\{\n   "name": "[\w]+",\n   "population": [\d]+\n\}'
    matcher = SHARED_STRUCTURES.create_matcher(Structure.regex(pattern), allow_end=True)
    assert feed_text(matcher, text) is True


def test_a_structure_that_gets_too_complex_to_follow_ends_its_output() -> None:
    """The first mask is within the limits, and the next one is not."""
    parts = " & ".join(f"/(.*[ab]){{{count}}}.*/" for count in (3, 5, 6))
    backend, structure = create_structures(), Structure.grammar(f"start: T\nT: {parts}")
    matcher = backend.create_matcher(structure, allow_end=True)
    assert backend.compiled_grammar(structure) is not None
    with pytest.raises(ValueError, match="too many expressions"):
        matcher.feed(98)
    assert backend.compiled_grammar(structure) is None


def test_the_first_mask_is_made_once_for_all_outputs() -> None:
    backend, structure = create_structures(), Structure.regex("[ab]{3}")
    backend.check(structure)
    compiled = backend._grammars[structure]
    assert {id(backend.create_matcher(structure, allow_end=True).mask) for _ in range(3)} == {
        id(compiled.first_mask)
    }


def test_two_threads_at_the_same_time_share_one_compilation() -> None:
    backend, structure = create_structures(), Structure.regex("(x+x+)+y{1,50}")
    start = threading.Barrier(8)
    found: list[object] = []

    def compile_structure() -> None:
        start.wait()
        found.append(backend.compile(structure))

    threads = [threading.Thread(target=compile_structure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_threads_may_use_the_same_structures() -> None:
    backend = create_structures()
    structures = [Structure.regex(f"a{{{1 + i % 3}}}") for i in range(12)]
    complete: list[bool] = []

    def follow(structure: Structure, count: int) -> None:
        matcher = backend.create_matcher(structure, allow_end=True)
        complete.append(feed_text(matcher, "a" * count))

    threads = [
        threading.Thread(target=follow, args=(structure, 1 + i % 3))
        for i, structure in enumerate(structures)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert complete == [True] * 12


@settings(max_examples=60, deadline=None)
@given(st.text(ANY_CHARACTER, max_size=30))
def test_any_text_as_a_regex_is_followed_or_refused(pattern: str) -> None:
    try:
        matcher = SHARED_STRUCTURES.create_matcher(Structure.regex(pattern), allow_end=True)
    except InvalidRequest as error:
        assert error.code == "invalid_regex" and str(error).isprintable()
    else:
        assert ids_in(matcher.mask)


def test_the_rest_of_a_batch_continues_while_one_sequence_waits() -> None:
    """Two plans in flight: the free output gets a token each step, and both are right."""
    free = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    bound = SamplingParams(max_tokens=30, seed=1, structure=Structure.regex("[a-f]{30}"))
    with LLM("hash", depth=2) as llm:
        together = llm.generate(["x", "y", "z", "w"], [free, free, free, bound])
        alone = [llm.generate(p, q)[0] for p, q in zip("xyzw", [free] * 3 + [bound], strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert {o.finish_reason for o in together} == {FinishReason.LENGTH.value, "stop"}


class FailingStructures:
    """A grammar backend that accepts structures and cannot create their matchers."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def check(self, structure: Structure) -> None:
        pass

    def compiled_grammar(self, structure: Structure) -> object | None:
        return self

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> LLGuidanceMatcher:
        raise self.error


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ValueError("full"), r"structure: it failed: ValueError\('full'\)"),
        (InvalidRequest("structure", "it is gone", "Ask again"), "structure: it is gone"),
    ],
)
def test_a_matcher_that_cannot_be_made_refuses_its_request_alone(
    error: Exception, problem: str
) -> None:
    engine = Engine(HashModel(num_blocks=64, block_size=4), config(), TOKENIZER)
    engine.grammar_backend = FailingStructures(error)  # type: ignore[misc]
    with pytest.raises(InvalidRequest, match=problem):
        engine.submit(Request(0, (1,), SamplingParams(structure=Structure.regex("a"), n=3)))
    assert not engine.has_work and not engine.scheduler.requests
    engine.submit(Request(0, (1,), SamplingParams(max_tokens=2)))
    assert engine.has_work


# What a parser reads differently than a grammar.

EVADED: list[tuple[Any, str]] = [
    (
        {"type": "object", "properties": {"path": {"enum": ["/tmp/a"]}}, "required": ["path"]},
        '{"path": "/tmp/a", "\\u0070ath": "/etc"}',
    ),
    ({"type": "object", "properties": {"a\nb": {"const": 1}}}, '{"a\\u000ab": 2}'),
    ({"type": "object", "properties": {'a"b': {"const": 1}}}, '{"a\\u0022b": 2}'),
    ({"type": "object", "properties": {"\u00e9": {"const": 1}}}, '{"\\u00e9": 2}'),
    ({"type": "object", "properties": {"\U0001f600": {"const": 1}}}, '{"\\ud83d\\ude00": 2}'),
    ({"type": "object", "patternProperties": {"^x": {"const": 1}}}, '{"\\u0078": 2}'),
    ({"items": {"properties": {"a": {"const": 1}}}}, '[{"\\u0061": 2}]'),
    ({"properties": {"a\u0001": {"const": 1}}}, '{"a\\u0001": 1, "\\u0061\\u0001": 2}'),
    (
        {
            "properties": {"a\nb": {"const": 1}},
            "patternProperties": {"^a": {}},
            "additionalProperties": False,
        },
        '{"a\\u000ab": 2}',
    ),
    ({"type": "string", "format": "date"}, '"2023-02-29"'),
    ({"type": "string", "format": "date"}, '"0000-01-01"'),
    ({"type": ["string", "null"], "format": "date-time", "pattern": "T"}, '"1900-02-29T00:00:00Z"'),
    ({"type": "string", "format": "time"}, '"12:00:60Z"'),
]
MERGED: list[tuple[Any, str]] = [
    ({"type": "object"}, '{"x": 1, "x": "y"}'),
    ({"additionalProperties": {"type": "integer"}}, '{"k": 1, "k": 2}'),
    (True, '[{"a": {"b": 1, "b": 1}}]'),
    ({"properties": {"a": {"const": "\u0001"}}}, '{"a": "\\u0001", "\\u0061": 2}'),
    ({"type": "number"}, "1e400"),
    ({"type": "number", "exclusiveMaximum": 5}, "4.999999999999999999"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    (True, "[" * 200 + "]" * 200),
]
ONCE_EACH = {
    "type": "object",
    "patternProperties": {"^k$": {"const": 1}},
    "additionalProperties": False,
    "minProperties": 2,
    "maxProperties": 2,
}
"""A schema whose masks allow one text only, in which a name comes twice."""
ONE_OF = {"oneOf": [{"enum": [1, 12]}, {"enum": [1, 12]}]}
"""A schema that both options of allow 1 and 12, after which an output may end or continue."""


def allowed_length(matcher: GrammarMatcher, text: str) -> int:
    """Feed the tokens of the text that masks allow, and return their number."""
    for count, token in enumerate(TOKENIZER.encode(text)):
        if token not in ids_in(matcher.mask):
            return count
        matcher.feed(token)
    return len(text)


@pytest.mark.parametrize(("schema", "text"), EVADED)
def test_a_mask_refuses_another_spelling_and_a_day_that_no_calendar_has(
    schema: Any, text: str
) -> None:
    structure = Structure.json_schema(schema)
    matcher = SHARED_STRUCTURES.create_matcher(structure, allow_end=True)
    assert allowed_length(matcher, text) < len(text.encode())


@pytest.mark.parametrize(("schema", "text"), MERGED)
def test_a_complete_text_that_parsers_read_differently_violates_its_schema(
    schema: Any, text: str
) -> None:
    matcher = SHARED_STRUCTURES.create_matcher(Structure.json_schema(schema), allow_end=True)
    with pytest.raises(SchemaViolation):
        assert allowed_length(matcher, text) == len(text)
        matcher.check_end()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "properties": {"a": {}}},
            '{"a": "\\n\\t\\"\\\\/\u00e9", "b": {"a": 1}}',
        ),
        ({"type": "object", "additionalProperties": False}, "{}"),
        ({"type": "string"}, '"\\u001b[0m"'),
        ({"properties": {"a": {"const": "\u001b"}}}, '{"a": "\\u001b"}'),
        ({"type": "string", "format": "date"}, '"2000-02-29"'),
        ({"type": "string", "format": "date-time"}, '"0001-12-31t23:59:59.5+23:59"'),
        ({"type": "string", "format": "password", "maxLength": 3}, '"a"'),
        ({"type": "integer", "format": "int64"}, "12"),
        ({"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 2}]}, "7"),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"const": 1}}}, "1"),
    ],
)
def test_what_parsers_read_alike_is_allowed(schema: Any, text: str) -> None:
    matcher = SHARED_STRUCTURES.create_matcher(Structure.json_schema(schema), allow_end=True)
    assert allowed_length(matcher, text) == len(text)
    matcher.check_end()


@pytest.mark.parametrize("reasoning", [None, Reasoning("", "k")])
@pytest.mark.parametrize("method", [None, "ngram"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_violation_ends_each_choice_with_an_error_and_is_replayed(
    depth: int, method: str | None, reasoning: Reasoning | None
) -> None:
    """Some outputs end with an end token, some where nothing can follow."""
    speculation = Speculation(num_tokens=3, method=method) if method else None
    options = config(blocks=256, depth=depth, seed=1, speculation=speculation)
    lines: list[str] = []
    header = build_header(options, 257, END, FCFS.__class__.__name__, "0")
    writer = RecordingWriter(lines.append, lambda: 0, header)
    engine = Engine(HashModel(num_blocks=256, block_size=4), options, TOKENIZER, recorder=writer)
    prompt = tuple(TOKENIZER.encode('{"k": 1, "k": 1}12k'))
    for number in range(8):
        structure = Structure.json_schema(ONE_OF if number % 2 else ONCE_EACH)
        budget = None
        if reasoning is not None:
            structure = structure._replace(reasoning=reasoning)
            budget = ThinkingBudget(3, reasoning, tuple(TOKENIZER.encode(reasoning.end)))
        params = SamplingParams(
            max_tokens=60, seed=number, n=2, structure=structure, thinking_budget=budget
        )
        engine.submit(Request(number, prompt, params))
    ends: dict[tuple[int, int], str | None] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.finish is not None:
                assert delta.finish is FinishReason.ERROR
                ends[delta.request_id, delta.choice] = delta.error
    twice = "structure: SchemaViolation(\"the name 'k' comes twice in an object\")"
    assert len(ends) == 16
    assert {ends[number, 0] for number in (0, 2, 4, 6)} == {twice}
    assert {ends[number, 1] for number in (1, 3, 5, 7)} == {
        "structure: SchemaViolation(\"'oneOf' does not allow its value at '/'\")"
    }
    writer.close()
    entries = [entry for _, entry in read_entries(lines)]
    replay = ReplayRun(entries[0], FCFS)
    assert [each for each in map(replay.apply, entries[1:-1]) if each is not None] == []
