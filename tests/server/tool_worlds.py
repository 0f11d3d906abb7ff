"""Random tools in every format of calls, and outputs that try to leave their schemas.

Owns how tools and a call are drawn, and how an output is checked. Knows no engine.

    seed ──► format, tools, strict or not ──► grammar ──► matcher ◄── adversarial text
                          │                                  └──► text ──► OutputParser
                          └──► the schema that each call must have ──► jsonschema  ◄── calls

Always true: an output that ends by itself has only calls with their schemas, or is a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

from forge.errors import InvalidRequest
from forge.outputs import TextDelta
from forge.schema_keywords import map_schemas
from forge.server.chat_formats import ChatFormats
from forge.server.output_events import ArgumentsPiece, CallStart, OutputEvent
from forge.server.tool_formats import (
    FORMATS,
    CallableTool,
    CallFormat,
    HarmonyFormat,
    ToolCallFormat,
)
from forge.server.tool_parameters import arguments_of
from forge.server.tools import ToolSet, parse_tools
from forge.structured_output import LLGuidanceBackend
from tests.core.schema_worlds import (
    NAMES,
    TOKENIZER,
    Pairs,
    draw_schema,
    draw_value,
    find_problem,
    follow_text,
    write_json,
)

TEXTS_PER_WORLD = 2
PLAIN_NAMES = ("a", "b", "ab", "path", "x1", "kind", "n1")
FOREIGN_KEYWORDS: tuple[tuple[str, Any], ...] = (
    *(("uniqueItems", True), ("not", {"const": 3}), ("x-order", 1), ("minProperties", 1)),
    *(("format", "password"), ("format", "file-path"), ("propertyNames", {"maxLength": 3})),
    *(("dependentRequired", {"a": ["b"]}), ("contains", {"const": 1}), ("pattern", "^(?!x)")),
    *(("if", {"const": 1}), ("then", False), ("unevaluatedProperties", False)),
    *(("patternProperties", {"^(?=a)": {"type": "integer"}}), ("$ref", "https://x/y")),
    *(("type", "file"), ("required", True), ("nullable", True), ("deprecated", True)),
)
TEXTS = ("", "So\n", "<tool", "Use `<tool_call>` now", "[", '{"name": ', "<|channel|>", "\n\n")


@cache
def _backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, (0,))


def draw_parameters(rng: Random, form: CallFormat, *, is_strict: bool) -> dict[str, Any]:
    """Draw the schema of a tool, without keywords that no grammar holds."""
    definitions = ["d0", "d1"] if rng.random() < 0.3 else []
    is_written_apart = isinstance(form, ToolCallFormat) and form.parameters is not None
    names = rng.sample(PLAIN_NAMES if is_written_apart or is_strict else NAMES, rng.randint(0, 3))
    if is_written_apart and not is_strict and rng.random() < 0.1:
        names.append(rng.choice(NAMES))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw_schema(rng, rng.randint(0, 2), definitions) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = rng.random() < 0.3
    if definitions:
        schema["$defs"] = {
            name: {"type": "object", "properties": {"n": draw_schema(rng, 1, definitions)}}
            for name in definitions
        }
    return schema


def add_foreign_keywords(rng: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with keywords that no grammar holds, or that are malformed."""

    def add(inner: dict[str, Any]) -> dict[str, Any]:
        keyword, value = rng.choice(FOREIGN_KEYWORDS)
        return {**inner, keyword: value} if rng.random() < 0.2 else inner

    added: dict[str, Any] = map_schemas(add, schema)
    return {**added, "type": "object"}


def draw_call(rng: Random, form: CallFormat, name: str, schema: Mapping[str, Any]) -> str:
    """Draw a call with arguments that nearly fit the schema, from its prefix to its suffix."""
    evasion = rng.choice((0.0, 0.1, 0.5, 1.0))
    value = draw_value(rng, schema, schema)
    pairs = value if isinstance(value, Pairs) else Pairs()
    if isinstance(form, HarmonyFormat):
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return header + write_json(rng, pairs, evasion)
    syntax = form.parameters
    if syntax is None:
        return form.call_prefix(name) + write_json(rng, pairs, evasion) + form.call_suffix
    parts = []
    for key, item in pairs:
        written = write_json(rng, item, evasion)
        if isinstance(item, str) and not syntax.quote:
            written = item + rng.choice(("", "", "", syntax.end, syntax.end[:-1], "</", " null"))
        parts.append(syntax.key_text(key) + written + syntax.end)
    return form.call_prefix(name) + syntax.separator.join(parts) + form.call_suffix


def draw_answer(rng: Random, form: CallFormat, tools: ToolSet, schemas: Mapping[str, Any]) -> str:
    """Draw an answer with calls, which may begin with text."""
    names = rng.choices([tool.name for tool in tools.callable_tools], k=rng.choice((1, 1, 2)))
    calls = [draw_call(rng, form, name, schemas[name]) for name in names]
    text = "" if tools.min_calls else rng.choice(TEXTS)
    if isinstance(form, HarmonyFormat):
        return calls[0]
    return text + form.begin + (form.separator or "").join(calls) + form.end


def checked_schema(form: CallFormat, tool: CallableTool, given: Mapping[str, Any]) -> Any:
    """Return the schema that a call of the tool must have; `given` is the client's."""
    if tool.is_strict:
        return given
    syntax = form.parameters if isinstance(form, ToolCallFormat) else None
    return arguments_of(tool, syntax).schema


def compile_tools(form: CallFormat, tools: ToolSet) -> tuple[ToolSet, Any] | None:
    """Return the tools, relaxed as far as they must be, and a structure; None: refused."""
    while True:
        try:
            structure = tools.structure(form, TOKENIZER, None)
            _backend().compile(structure)
            return tools, structure
        except InvalidRequest as error:
            relaxed = tools.relax_tools()
            if relaxed == tools:
                is_strict = any(tool.is_strict for tool in tools.callable_tools)
                assert is_strict, f"a tool that is not strict is refused: {error}"
                return None
            tools = relaxed


def run_world(seed: int) -> Counter[str]:
    """Draw tools, follow answers, and return how they ended by format. Raises AssertionError."""
    rng = Random(f"tools {seed}")
    name = list(FORMATS)[seed % len(FORMATS)]
    form, reached = FORMATS[name], Counter[str]()
    given, schemas, plain = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    for index in range(rng.choice((1, 1, 2))):
        is_strict = rng.random() < 0.5
        schema = plain[f"t{index}"] = draw_parameters(rng, form, is_strict=is_strict)
        if not is_strict:
            schema = add_foreign_keywords(rng, schema)
        schemas[f"t{index}"] = schema
        function = {"name": f"t{index}", "parameters": schema, "strict": is_strict}
        given.append({"type": "function", "function": function})
    tools = parse_tools(given, rng.choice(("auto", "required")), None)
    assert tools is not None
    compiled = compile_tools(form, tools)
    if compiled is None:
        return Counter({f"{name}: refused": 1})
    if compiled[0] != tools:
        reached[f"{name}: relaxed further"] += 1
    tools, structure = compiled
    checked = {
        tool.name: checked_schema(form, tool, schemas[tool.name]) for tool in tools.callable_tools
    }
    for tool in tools.callable_tools:
        _check_is_superset(rng, tool, schemas[tool.name], plain[tool.name])
    for _ in range(TEXTS_PER_WORLD):
        matcher = _backend().create_matcher(structure, allow_end=True)
        ending = follow_text(rng, matcher, draw_answer(rng, form, tools, plain))
        if ending.how == "stop":
            reached[f"{name}: {_check_answer(rng, form, tools, checked, ending.text)}"] += 1
        else:
            reached[f"{name}: {ending.how}"] += 1
    return reached


def _check_is_superset(
    rng: Random, tool: CallableTool, given: Mapping[str, Any], plain: Mapping[str, Any]
) -> None:
    """Check that a value of the client's schema has the tool's schema too."""
    text = write_json(rng, draw_value(rng, plain, plain), 0.0)
    try:
        fits = find_problem(text, given) is None
    except Exception:  # jsonschema's, about a malformed schema or another document
        return
    problem = find_problem(text, tool.parameters)
    assert not fits or problem is None, (problem, text, given, tool.parameters)


def _check_answer(
    rng: Random, form: CallFormat, tools: ToolSet, checked: Mapping[str, Any], text: str
) -> str:
    """Parse an answer that ended by itself, cut at random; return how it ended."""
    parser = ChatFormats(None, form, "").create_parser(None, tools, [], TOKENIZER)
    events: list[OutputEvent] = []
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 4)))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.push(text[start:end])
    events += parser.flush(TextDelta(0, "", (), "stop"))
    is_violation = parser.violation is not None
    assert not parser.is_open, f"the answer ended within a call: {text!r}"
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    problems = [(each, find_problem(each[1], checked[each[0]])) for each in calls]
    has_problem = any(problem is not None for _, problem in problems)
    assert has_problem == is_violation, (text, problems, checked)
    assert calls or not tools.min_calls, f"there is no call: {text!r}"
    if is_violation:
        return "violation"
    return "calls" if calls else "text"
