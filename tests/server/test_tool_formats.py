"""Formats of tool calls: for each family an answer in its format, its grammar and its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import InvalidRequest
from forge.request import Structure
from forge.server.chat import ChatRequest
from forge.server.harmony import HarmonyGrammarBuilder, HarmonyParser
from forge.server.output_events import (
    ArgumentsPiece,
    CallParser,
    CallStart,
    OutputEvent,
    ReasoningPiece,
    TextPiece,
    merge_events,
)
from forge.server.protocol import parse_request
from forge.server.response_format import NamedStructure
from forge.server.tool_formats import FORMATS, CallableTool, HarmonyFormat, ToolCallFormat
from forge.server.tool_grammar import ToolGrammarBuilder
from forge.server.tool_parameters import parameter_problem
from forge.server.tool_parser import LeadingCallParser, ToolCallParser
from forge.server.tools import parse_tools
from forge.tokenizer import ByteTokenizer
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.server.test_tools import (
    STRUCTURES,
    VOCABULARY,
    ScriptedHashModel,
    calls_of,
    choices,
    message_of,
    set_script,
    stream_choices,
    tool,
    without_ids,
)

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "wet": {"type": "boolean"},
    },
    "required": ["city"],
}
TOOLS = [
    CallableTool("weather", PARAMETERS),
    CallableTool("weathers", {"type": "object", "properties": {}}),
    CallableTool("now", {"type": "object", "properties": {"zone": {"type": "string"}, "x": {}}}),
]
BAR = "\uff5c"

ANSWERS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [("weather", {"city": "Rome"})],
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=weather>\n<parameter=city>\n"Ro\nme" </parameter\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        '<parameter=tags>\n["a", "\\n</parameter>\\n"]\n</parameter>\n'
        "<parameter=wet>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weathers>\n</function>\n</tool_call>",
        [
            (
                "weather",
                {
                    "city": '"Ro\nme" </parameter',
                    "days": 3,
                    "unit": "C",
                    "tags": ["a", "\n</parameter>\n"],
                    "wet": True,
                },
            ),
            ("weathers", {}),
        ],
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>\n"
        "<tool_call>weathers\n</tool_call>",
        [("weather", {"city": "Rome", "unit": "C"}), ("weathers", {})],
    ),
    "glm47": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value>12</arg_value></tool_call>"
        "<tool_call>weathers</tool_call>",
        [("weather", {"city": "Rome", "days": 12}), ("weathers", {})],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="weathers">\n</invoke>\n'
        "</minimax:tool_call>",
        [("weather", {"city": "Rome", "days": 2}), ("weathers", {})],
    ),
    "granite": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ro]}me"}}, '
        '{"name": "weathers", "arguments": {}}]',
        [("weather", {"city": "Ro]}me"}), ("weathers", {})],
    ),
    "internlm": (
        '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Rome", '
        '"days": 2}}<|action_end|>',
        [("weather", {"city": "Rome", "days": 2})],
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        [("weather", {"city": "Rome"})],
    ),
    "llama4_pythonic": (
        '[weather(city="Rome, (x)", tags=["a", "b)"], wet=True), weathers(), '
        'now(zone="U\\"TC", x=null)]',
        [
            ("weather", {"city": "Rome, (x)", "tags": ["a", "b)"], "wet": True}),
            ("weathers", {}),
            ("now", {"zone": 'U"TC', "x": None}),
        ],
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
        [("weather", {"city": "Rome"})],
    ),
    "mistral_compact": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
        [("weather", {"city": "Rome"})],
    ),
    "mistral_args": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weathers[ARGS]{}',
        [("weather", {"city": "Rome"}), ("weathers", {})],
    ),
    "deepseek_v3": (
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>"
        f'weather\n```json\n{{"city": "Rome"}}\n```<{BAR}tool▁call▁end{BAR}>\n'
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>weathers\n```json\n{{}}\n```"
        f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
        [("weather", {"city": "Rome"}), ("weathers", {})],
    ),
    "deepseek_v31": (
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>weather<{BAR}tool▁sep{BAR}>"
        f'{{"city": "Rome"}}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁call▁begin{BAR}>weathers'
        f"<{BAR}tool▁sep{BAR}>{{}}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
        [("weather", {"city": "Rome"}), ("weathers", {})],
    ),
    "openai": (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome"}',
        [("weather", {"city": "Rome"})],
    ),
}
"""An answer of each format, and its calls."""


def create_parser(name: str) -> CallParser:
    form = FORMATS[name]
    if isinstance(form, HarmonyFormat):
        return HarmonyParser([each.name for each in TOOLS])
    return ToolCallParser(form, TOOLS)


def build_grammar(name: str, min_calls: int, answer: str = "") -> str:
    form = FORMATS[name]
    builder = (
        HarmonyGrammarBuilder({})
        if isinstance(form, HarmonyFormat)
        else ToolGrammarBuilder(form, {})
    )
    return builder.build_grammar(TOOLS, min_calls, 9, answer)


def parse(parser: CallParser, parts: Sequence[str]) -> list[OutputEvent]:
    events = [event for part in parts for event in parser.push(part)]
    return merge_events([*events, *parser.flush()])


def calls_in(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def first_misfit(grammar: str, text: str) -> str | None:
    """Return the text from the first token that the grammar does not allow; None: all fits."""
    matcher = STRUCTURES.create_matcher(Structure.grammar(grammar), allow_end=True)
    tokens = VOCABULARY.encode(text, parse_special_tokens=False)
    for at, token in enumerate(tokens):
        if not matcher.mask[token >> 3] >> (token & 7) & 1:
            return VOCABULARY.decode(tokens[at:]) or "?"
        if matcher.feed(token):
            return VOCABULARY.decode(tokens[at + 1 :]) or None
    return None if matcher.mask[0] & 1 else "the end"


def test_every_format_has_an_answer() -> None:
    assert ANSWERS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_in_the_format_fits_its_grammar_and_has_its_calls(name: str) -> None:
    text, calls = ANSWERS[name]
    for min_calls in (0, 1):
        grammar = build_grammar(name, min_calls)
        assert first_misfit(grammar, text) is None
        for wrong in ('"Rome"', ">Rome<"):
            if wrong in text:  # not a string, and not the key of a parameter
                assert first_misfit(grammar, text.replace("city", "town")) is not None
        if min_calls:
            assert first_misfit(grammar, text.replace("weather", "wealth")) is not None
        assert first_misfit(grammar, text[:-1]) is not None
    parser = create_parser(name)
    assert calls_in(parse(parser, [text])) == calls
    assert (parser.num_calls, parser.is_open) == (len(calls), False)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_have_the_same_events_however_the_answer_is_cut(name: str) -> None:
    text, _ = ANSWERS[name]
    expected = parse(create_parser(name), [text])
    assert parse(create_parser(name), list(text)) == expected
    for at in range(1, len(text)):
        assert parse(create_parser(name), [text[:at], text[at:]]) == expected


SNIPPETS = st.sampled_from(
    [part for text, _ in ANSWERS.values() for part in (text, text[:40], text[:70], text[-30:])]
    + ["<", "weather", "\n", '"', "}", ")", "</", "<|", "x"]
)


@given(st.sampled_from([*FORMATS]), st.lists(SNIPPETS, max_size=6).map("".join), st.data())
def test_any_text_has_the_same_events_however_it_is_cut(
    name: str, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(create_parser(name), parts) == parse(create_parser(name), [text])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=weather>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=days>\n3"),
        ("qwen3_coder", ANSWERS["qwen3_coder"][0].replace("3", "21")),
        ("qwen3_coder", ANSWERS["qwen3_coder"][0].replace("\nC\n", "\nK\n")),
        ("glm45", ANSWERS["glm45"][0].replace("C<", "K<")),
        ("minimax_m2", ANSWERS["minimax_m2"][0].replace(">2<", ">two<")),
        ("llama4_pythonic", "[weather(city=Rome)]"),
        ("llama4_pythonic", '[weather(city="Rome", wet=true)]'),
        ("openai", ANSWERS["openai"][0] + "<|call|>"),
        ("openai", "Hello"),
    ],
)
def test_arguments_that_their_schema_does_not_allow_cannot_come(name: str, text: str) -> None:
    assert first_misfit(build_grammar(name, 1), text) not in (None, "the end")


def test_arguments_are_streamed_before_they_are_whole() -> None:
    parser = create_parser("qwen3_coder")
    assert parser.push("So <tool_call>\n<function=weather>\n<parameter=city>\nRo") == [
        TextPiece("So "),
        CallStart("weather"),
        ArgumentsPiece('{"city": "Ro'),
    ]
    assert parser.push("me\n</par") == [ArgumentsPiece("me")]
    assert parser.push('"x') == [ArgumentsPiece('\\n</par\\"x')]
    assert parser.is_open


def test_messages_before_the_final_one_are_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>One<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "two <| three<|end|><|start|>assistant<|channel|>final<|message|>Four<|return|>"
    )
    expected = [ReasoningPiece("One\ntwo <| three"), TextPiece("Four")]
    assert parse(HarmonyParser([]), [text]) == parse(HarmonyParser([]), list(text)) == expected
    assert parse(HarmonyParser([]), ["Plain"]) == [TextPiece("Plain")]
    assert parse(HarmonyParser([]), ["<|channel|>final"]) == []
    endless = "<|channel|>" + "final" * 300 + "<|message|>"
    for parts in ([endless], list(endless)):
        assert parse(HarmonyParser([]), parts) == [TextPiece(endless)]


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("llama3_json", "openai")])
def test_a_structured_answer_is_read_for_calls_at_its_beginning_only(name: str) -> None:
    text, calls = ANSWERS[name]
    form = FORMATS[name]
    assert isinstance(form, ToolCallFormat)
    grammar = build_grammar(name, 0, '%json {"type": "string"}')
    assert first_misfit(grammar, text) is None
    assert first_misfit(grammar, '"Hello"') is None
    assert first_misfit(grammar, "So") is not None
    for parts in ([text], list(text)):
        assert calls_in(parse(LeadingCallParser(ToolCallParser(form, TOOLS)), parts)) == calls
    quoted = json.dumps(text, ensure_ascii=False)
    for parts in ([quoted], list(quoted)):
        parser = LeadingCallParser(ToolCallParser(form, TOOLS))
        assert parse(parser, parts) == [TextPiece(quoted)]
        assert parser.num_calls == 0


def test_a_call_whose_first_word_the_model_leaves_out_is_a_call() -> None:
    """Qwen3-Coder does so after a sentence, and writes the word that ends the call."""
    grammar, call = build_grammar("qwen3_coder", 0), ("weather", {"city": "Rome"})
    whole = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    text = f"Let me look <function.\n\n{whole}"
    for answer, calls in ((text, [call]), (f"{text}\n<tool_call>\n{whole}", [call, call])):
        assert first_misfit(grammar, answer) is None
        for parts in ([answer], list(answer)):
            events = parse(create_parser("qwen3_coder"), parts)
            assert events[0] == TextPiece("Let me look <function.\n\n")
            assert calls_in(events) == calls
    assert first_misfit(grammar, "<function=other>") is not None
    assert first_misfit(build_grammar("qwen3_coder", 1), whole) is not None


def test_a_list_of_calls_of_granite_may_begin_with_the_word_of_version_3_1() -> None:
    """Granite 3.0 and 3.2 write the special token, and 3.1 also writes plain text."""
    grammar = build_grammar("granite", 0)
    calls = '[{"name": "weathers", "arguments": {}}, {"name": "now", "arguments": {"zone": "a"}}]'
    for begin in ("<|tool_call|>", "<tool_call>"):
        answer = f"I look: <{begin}{calls}"
        assert first_misfit(grammar, answer) is None
        assert first_misfit(grammar, answer.replace("weathers", "other")) is not None
        for parts in ([answer], list(answer)):
            events = parse(create_parser("granite"), parts)
            assert events[0] == TextPiece("I look: <")
            assert calls_in(events) == [("weathers", {}), ("now", {"zone": "a"})]
    assert first_misfit(build_grammar("granite", 1), f"<tool_call>{calls}") is not None


def test_an_answer_of_internlm_has_text_and_one_call() -> None:
    """Its documentation has no answer with two calls."""
    grammar, (call, _) = build_grammar("internlm", 0), ANSWERS["internlm"]
    answer = f"Sure.{call}"
    assert first_misfit(grammar, answer) is None
    assert first_misfit(grammar, call + call) is not None
    assert first_misfit(grammar, call.replace("plugin", "interpreter")) is not None
    parser = create_parser("internlm")
    head, tail = answer.split("Ro")
    assert parser.push(f"{head}Ro") == [
        TextPiece("Sure."),
        CallStart("weather"),
        ArgumentsPiece('{"city": "Ro'),
    ]
    assert parser.push(tail) == [ArgumentsPiece('me", "days": 2}')]
    assert parser.flush() == [] and not parser.is_open


@pytest.mark.parametrize("name", ["llama3_json", "llama4_pythonic"])
def test_a_structure_is_refused_only_where_an_answer_need_not_be_a_call(name: str) -> None:
    """Their calls look like other answers, and with `required` there is no other answer."""
    answer = NamedStructure("response_format", Structure.json_schema({}))
    tokenizer, form, tools = ByteTokenizer(), FORMATS[name], [tool(parameters=PARAMETERS)]
    required = parse_tools(tools, "required", None)
    auto = parse_tools(tools, "auto", None)
    assert required is not None and auto is not None
    structure = required.structure(form, tokenizer, answer)
    assert structure == required.structure(form, tokenizer, None)
    with pytest.raises(InvalidRequest, match="look like other structured answers"):
        auto.structure(form, tokenizer, answer)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"type": "object", "oneOf": []}, "'oneOf'"),
        ({"type": "object", "properties": {"a b": {}}}, "'a b'"),
        ({"type": "object", "properties": {}, "required": ["<"]}, "'<'"),
        ({"type": "object", "properties": []}, "properties"),
        (PARAMETERS, None),
    ],
)
def test_a_schema_that_parameters_cannot_express_is_named(
    parameters: dict[str, Any], problem: str | None
) -> None:
    form = FORMATS["qwen3_coder"]
    assert isinstance(form, ToolCallFormat) and form.parameters is not None
    found = parameter_problem(parameters, form.parameters)
    assert found is None if problem is None else problem in str(found)


# Over HTTP.


@pytest.fixture(scope="module")
def coder_server() -> Any:
    def prepare(llm: Any) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    with open_server(
        prepare=prepare, max_model_len=1024, num_blocks=256, tool_call_parser="qwen3_coder"
    ) as running:
        yield running


PATH = "/v1/chat/completions"
WEATHER = tool(parameters=PARAMETERS)
ROME = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>"
)


def test_a_server_with_a_named_format_returns_calls_in_it(coder_server: RunningServer) -> None:
    body = set_script(coder_server, f"So\n{ROME}", tools=[WEATHER])
    (choice,) = choices(coder_server, **body)
    (parts,) = stream_choices(coder_server, **body).values()
    assert choice["message"]["content"] == "So\n" and choice["finish_reason"] == "tool_calls"
    assert calls_of(choice["message"]) == [("weather", {"city": "Rome"})]
    assert without_ids(message_of(parts)) == without_ids(choice["message"])


def test_a_tool_that_the_format_cannot_express_is_refused(coder_server: RunningServer) -> None:
    body = {"model": "hash", "messages": [{"role": "user", "content": "a"}]}
    bad = tool(parameters={"type": "object", "anyOf": [{}]}, strict=True)
    answer = coder_server.post(PATH, **body, tools=[bad])
    check_envelope(answer, 400, "tools[0].function.parameters", "invalid_schema")


@pytest.mark.parametrize("script", ['{"city": "Oslo"}', ROME])
def test_an_answer_has_its_response_format_or_calls(
    coder_server: RunningServer, script: str
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    body = set_script(coder_server, script, tools=[WEATHER], response_format=response_format)
    (choice,) = choices(coder_server, **body)
    (parts,) = stream_choices(coder_server, **body).values()
    message = choice["message"]
    assert without_ids(message_of(parts)) == without_ids(message)
    if script == ROME:
        assert calls_of(message) == [("weather", {"city": "Rome"})]
        assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    else:
        assert (message["content"], choice["finish_reason"]) == (script, "stop")


def test_a_schema_that_is_true_allows_any_json_or_calls(coder_server: RunningServer) -> None:
    schema = {"name": "c", "schema": True}
    body = {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": schema}}
    (choice,) = choices(coder_server, **set_script(coder_server, "[1]", **body))
    assert choice["message"]["content"] == "[1]"
    schema["schema"] = False
    answer = coder_server.post(PATH, **set_script(coder_server, "", **body))
    check_envelope(answer, 400, "response_format", "invalid_schema")


def test_the_field_that_cannot_be_compiled_is_named(coder_server: RunningServer) -> None:
    body = {"model": "hash", "messages": [{"role": "user", "content": "a"}]}
    bad = tool(parameters={"type": "object", "properties": {"a": {"type": "foo"}}}, strict=True)
    answer = coder_server.post(PATH, **body, tools=[bad], regex="a")
    check_envelope(answer, 400, "tools[0].function.parameters", "invalid_schema")
    answer = coder_server.post(PATH, **body, tools=[WEATHER], regex="[")
    check_envelope(answer, 400, "regex", "invalid_regex")


def test_only_allowed_tools_are_called_and_all_are_in_the_prompt(
    coder_server: RunningServer,
) -> None:
    now = tool("now")
    tools = [WEATHER, now]
    named = [{"type": "function", "function": {"name": "now"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    body = set_script(coder_server, ROME, tools=tools, tool_choice=allowed)
    (choice,) = choices(coder_server, **body, max_tokens=200)
    assert {name for name, _ in calls_of(choice["message"])} == {"now"}
    assert choice["finish_reason"] == "tool_calls"
    prompts = [
        parse_request(ChatRequest, {**body, "tool_choice": each}).render_prompt(VOCABULARY)
        for each in (allowed, None)
    ]
    assert prompts[0] == prompts[1]
