"""Reasoning in chats: its separation from the content, its counts, and structures after it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.reasoning_counter import ReasoningCounter
from forge.request import Reasoning
from forge.server.chat import ChatRequest, effort_variables
from forge.server.chat_formats import find_chat_formats
from forge.server.messages import REASONING_KEYS, parse_messages
from forge.server.output_events import OutputEvent, ReasoningPiece, TextPiece, merge_events
from forge.server.protocol import parse_request
from forge.server.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    THINK,
    ReasoningParser,
    find_reasoning,
    find_reasoning_format,
)
from forge.tokenizer import ByteTokenizer
from tests.server.test_server import ANSWER, RunningServer, open_server
from tests.server.test_tools import (
    ROME,
    ScriptedHashModel,
    calls_of,
    choices,
    message_of,
    set_script,
    stream_choices,
)

TOKENIZER = ByteTokenizer()
PATH = "/v1/chat/completions"
OPENED = Reasoning("", "</think>")
MAYBE = Reasoning("<think>", "</think>")


def parse(reasoning: Reasoning | None, parts: Sequence[str], dropped: str = "\n") -> list[str]:
    """Return the joined reasoning and the joined content; check that they come in this order."""
    parser = ReasoningParser(reasoning, dropped)
    events: list[OutputEvent] = [event for part in parts for event in parser.push(part)]
    merged = merge_events([*events, *parser.flush()])
    kinds = [type(event) for event in merged]
    assert kinds in ([], [ReasoningPiece], [TextPiece], [ReasoningPiece, TextPiece])
    return ["".join(e[0] for e in merged if isinstance(e, k)) for k in (ReasoningPiece, TextPiece)]


ANSWERS: list[tuple[Reasoning | None, str, str, str]] = [
    (MAYBE, "<think>\nWhy?\n</think>\n\nSo.", "Why?", "So."),
    (MAYBE, "\n<think>Why?</think>So.\n", "Why?", "So.\n"),
    (MAYBE, "So. <think>", "", "So. <think>"),
    (MAYBE, "<think>", "", ""),
    (MAYBE, "<thin", "", "<thin"),
    (MAYBE, "\n\nSo.", "", "\n\nSo."),
    (MAYBE, "<think>\n\n</think>\n\nSo.", "", "So."),
    (OPENED, "Why </thin\n k?\n</think>\n\nSo </think>", "Why </thin\n k?", "So </think>"),
    (OPENED, "Why?\n</thi", "Why?\n</thi", ""),
    (OPENED, "<think>Why?</think>", "<think>Why?", ""),
    (None, "\nWhy?</think>", "", "\nWhy?</think>"),
    (Reasoning("[THINK]", "[/THINK]"), "[THINK]a[/THINK]b", "a", "b"),
    (
        Reasoning("Here is my thought process:", "Here is my response:"),
        "Here is my thought process: a\nHere is my response: b",
        " a",
        " b",
    ),
]


@pytest.mark.parametrize(("reasoning", "text", "thought", "content"), ANSWERS)
def test_reasoning_is_separated_however_the_answer_is_cut(
    reasoning: Reasoning | None, text: str, thought: str, content: str
) -> None:
    assert parse(reasoning, [text]) == parse(reasoning, list(text)) == [thought, content]
    for at in range(len(text)):
        assert parse(reasoning, [text[:at], text[at:]]) == [thought, content]


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", "\n", "a", " "]), max_size=12
).map("".join)


@given(st.sampled_from([MAYBE, OPENED, None]), TEXTS, st.data())
def test_any_answer_is_separated_however_it_is_cut(
    reasoning: Reasoning | None, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(reasoning, parts) == parse(reasoning, [text])


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = ReasoningParser(MAYBE)
    assert parser.push("<thi") == []
    assert parser.push("nk>\nWhy <") == [ReasoningPiece("Why ")]
    assert parser.push("b>\n") == [ReasoningPiece("<b>")]
    assert parser.push("x</think>\n") == [ReasoningPiece("\nx")]
    assert parser.push("\nSo </think") == [TextPiece("So </think")]


def test_a_structure_keeps_its_line_breaks() -> None:
    assert parse(OPENED, ["a</think>\n1"], dropped="") == ["a", "\n1"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("user\nassistant\n", MAYBE),
        ("assistant\n<think>\n", OPENED),
        ("assistant\n<think>\n\n</think>\n\n", None),
        ("<think> a </think> assistant\n", MAYBE),
    ],
)
def test_the_end_of_the_prompt_decides_where_an_answer_begins(
    prompt: str, expected: Reasoning | None
) -> None:
    assert find_reasoning(THINK, TOKENIZER.encode(prompt), TOKENIZER) == expected
    assert find_reasoning(None, TOKENIZER.encode(prompt), TOKENIZER) is None


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{- '<think>\\n\\n</think>\\n\\n' }}", THINK),
        ("<|start|>assistant<|channel|>analysis</think>", HARMONY),
        ("[THINK]{{ x }}[/THINK]", REASONING_FORMATS["mistral"]),
        ("Here is my thought process: then Here is my response:", REASONING_FORMATS["granite"]),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_its_format(template: str, expected: object) -> None:
    assert find_reasoning_format(template) is expected


def test_formats_are_chosen_by_name_or_by_the_template() -> None:
    assert find_chat_formats(TOKENIZER).reasoning is None
    assert find_chat_formats(TOKENIZER, "deepseek_r1").reasoning is THINK
    assert find_chat_formats(TOKENIZER, "none", "none")[:2] == (None, None)
    for names in (("deepseek", None), (None, "hermes2")):
        with pytest.raises(InvalidConfig, match="Give one of"):
            find_chat_formats(TOKENIZER, *names)


@given(st.sampled_from([MAYBE, OPENED]), TEXTS, st.integers(1, 4))
def test_tokens_are_counted_up_to_the_end_marker(
    reasoning: Reasoning, text: str, size: int
) -> None:
    """A byte is a token, so the count is the length of what is before the content's bytes."""
    counter = ReasoningCounter(reasoning.begin, [reasoning.end], TOKENIZER.token_bytes)
    tokens = TOKENIZER.encode(text)
    for at in range(0, len(tokens), size):
        counter.add(tokens[at : at + size])
    start = text.lstrip("\n")
    has_begun = start.startswith(reasoning.begin) and (
        not reasoning.begin or len(text) - len(start) <= 2
    )
    body = (start if reasoning.begin else text).removeprefix(reasoning.begin)
    before, marker, _ = body.partition(reasoning.end)
    expected = len(text) - len(body) + len(before) + len(marker) if has_begun else 0
    assert counter.num_tokens == expected


def test_a_message_may_have_reasoning_for_the_template() -> None:
    for fields in ({"reasoning": "b"}, {"reasoning_content": "b"}):
        (message,) = parse_messages([{"role": "assistant", "content": None, **fields}])
        assert message["content"] == "" and message["reasoning"] == "b"
        assert message["reasoning_content"] == "b"


def test_an_effort_is_a_variable_of_the_template() -> None:
    assert effort_variables("low") == {"reasoning_effort": "low"}
    assert effort_variables("none") == {"enable_thinking": False, "thinking": False}
    body = {"reasoning_effort": "high", "chat_template_kwargs": {"a": 1}}
    assert parse_request(ChatRequest, body).template_variables() == {
        "a": 1,
        "reasoning_effort": "high",
    }


# Over HTTP.


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    with open_server(
        prepare=prepare, max_model_len=1024, num_blocks=256, reasoning_parser="qwen3"
    ) as running:
        yield running


def reasoning_of(parts: list[dict[str, Any]]) -> str:
    deltas = [part["delta"] for part in parts]
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    return "".join(delta.get("reasoning", "") for delta in deltas)


def test_a_chat_has_reasoning_apart_from_its_content(server: RunningServer) -> None:
    body = set_script(server, "<think>\nWhy é?\n</think>\n\nSo.", tools=None)
    answer = server.post(PATH, **body).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "So.",
        "refusal": None,
        "reasoning_content": "Why é?",
        "reasoning": "Why é?",
    }
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nWhy é?\n</think>".encode())}
    (parts,) = stream_choices(server, **body).values()
    assert (reasoning_of(parts), message_of(parts)["content"]) == ("Why é?", "So.")


def test_reasoning_is_left_out_where_that_is_requested(server: RunningServer) -> None:
    body = set_script(server, "<think>\nWhy é?\n</think>\n\nSo.", tools=None)
    body["include_reasoning"] = False
    answer = server.post(PATH, **body).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "So.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    (parts,) = stream_choices(server, **body).values()
    assert (reasoning_of(parts), message_of(parts)["content"]) == ("", "So.")
    deltas = [part["delta"] for part in parts]
    assert all(delta.keys().isdisjoint(REASONING_KEYS) for delta in deltas)


def test_the_reasoning_of_a_chat_without_any_is_null(server: RunningServer) -> None:
    body = set_script(server, "So.", tools=None)
    answer = server.post(PATH, **body).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {**ANSWER, "content": "So."}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("script", "thought"), [('<think>{"b"\n</think>{"a": 12}', '{"b"'), ('{"a": 12}', None)]
)
def test_a_structure_begins_after_the_reasoning(
    server: RunningServer, script: str, thought: str | None
) -> None:
    body = set_script(server, script, tools=None, response_format=FORMAT)
    (choice,) = choices(server, **body)
    assert choice["message"].get("reasoning") == thought
    assert json.loads(choice["message"]["content"]) == {"a": 12}
    (parts,) = stream_choices(server, **body).values()
    assert message_of(parts)["content"] == '{"a": 12}'


def test_calls_begin_after_the_reasoning(server: RunningServer) -> None:
    script = f"<think>Not {ROME}</think>{ROME}"
    for choice in ("auto", "required"):
        body = set_script(server, script, tool_choice=choice)
        (found,) = choices(server, **body)
        message = found["message"]
        assert message["reasoning"] == f"Not {ROME}" and message["content"] is None
        assert calls_of({k: v for k, v in message.items() if k != "reasoning"}) == [
            ("weather", {"city": "Rome"})
        ]
        assert found["finish_reason"] == "tool_calls"


def test_reasoning_that_is_cut_has_no_content(server: RunningServer) -> None:
    body = set_script(server, "<think>Why?</think>So.", tools=None, max_tokens=10)
    (choice,) = choices(server, **body)
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == (
        "",
        "Why",
        "length",
    )


@pytest.fixture(scope="module")
def channel_server() -> Iterator[RunningServer]:
    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    names = {"reasoning_parser": "openai_gptoss", "tool_call_parser": "openai"}
    with open_server(prepare=prepare, max_model_len=1024, num_blocks=256, **names) as running:
        yield running


ANALYSIS = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("script", "fields", "content"),
    [
        (f"{ANALYSIS}{FINAL}So.", {"tools": None}, "So."),
        (f'{ANALYSIS}{FINAL}{{"a": 12}}', {"tools": None, "response_format": FORMAT}, '{"a": 12}'),
        (f"{ANALYSIS}{FINAL}So.", {}, "So."),
        (f'{ANALYSIS}{FINAL}{{"a": 12}}', {"response_format": FORMAT}, '{"a": 12}'),
        (f'{ANALYSIS}{CALL}{{"city": "Rome"}}', {"response_format": FORMAT}, None),
        (f'{ANALYSIS}{CALL}{{"city": "Rome"}}', {"tool_choice": "required"}, None),
    ],
)
def test_an_answer_in_channels_has_reasoning_and_content_or_a_call(
    channel_server: RunningServer, script: str, fields: dict[str, Any], content: str | None
) -> None:
    body = set_script(channel_server, script, **fields)
    answer = channel_server.post(PATH, **body).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message.pop("reasoning")) == (content, "Why?")
    if content is None:
        assert calls_of(message) == [("weather", {"city": "Rome"})]
    assert choice["finish_reason"] == ("tool_calls" if content is None else "stop")
    end = f"{ANALYSIS}<|channel|>final" if content else f"{ANALYSIS}<|channel|>commentary to="
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(end)}
    (parts,) = stream_choices(channel_server, **body).values()
    assert reasoning_of(parts) == "Why?"
    assert (message_of(parts)["content"] or None) == content
