"""Budgets of reasoning over HTTP: the fields of each API, and the text that ends the reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.request import Reasoning
from forge.server.chat_formats import find_chat_formats
from forge.server.forced_end import find_end_ids
from forge.server.reasoning import HARMONY, REASONING_FORMATS, THINK, num_open_tokens
from forge.tokenizer import ByteTokenizer
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.server.test_tools import (
    ScriptedHashModel,
    choices,
    message_of,
    set_script,
    stream_choices,
)

CHAT = "/v1/chat/completions"
TOKENIZER = ByteTokenizer()
CONFIG = '{"reasoning_start_str": "<think>", "reasoning_end_str": "!</think>"}'
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = ScriptedHashModel(0.0)

    names = {"reasoning_parser": "qwen3", "reasoning_config": CONFIG}
    with open_server(prepare=prepare, max_model_len=1024, num_blocks=256, **names) as running:
        yield running


def set_scripts(server: RunningServer, likely: str, otherwise: str, **fields: Any) -> Any:
    """Return a request that the model answers with `likely`, or goes on with `otherwise`."""
    body = set_script(server, otherwise, tools=None, **fields)
    model = server.llm.engine.model
    assert isinstance(model, ScriptedHashModel)
    script = model.script
    set_script(server, likely, tools=None, **fields)
    model.script = {**script, **model.script}
    return body


def test_reasoning_ends_after_its_budget_and_the_answer_follows(server: RunningServer) -> None:
    body = set_scripts(server, "<think>abcdefgh</think>No.", "<think>abcd!</think>So.")
    for budget, expected in ((4, ("abcd!", "So.")), (16, ("abcdefgh", "No."))):
        (choice,) = choices(server, **body, thinking_token_budget=budget)
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == expected
        fields = {**body, "thinking_token_budget": budget}
        (parts,) = stream_choices(server, **fields).values()
        reasoning = "".join(part["delta"].get("reasoning", "") for part in parts)
        assert (reasoning, message_of(parts)["content"]) == expected
    for fields in ({}, {"thinking_token_budget": None}, {"thinking_token_budget": -1}):
        (choice,) = choices(server, **body, **fields)
        assert choice["message"]["content"] == "No."


def test_a_structure_follows_the_end_of_the_budget(server: RunningServer) -> None:
    likely, otherwise = "<think>abcdefgh</think>12", "<think>ab!</think>1"
    body = set_scripts(server, likely, otherwise, regex="1|2")
    (choice,) = choices(server, **body, thinking_token_budget=2)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("ab!", "1")


def test_every_api_of_chats_has_a_budget(server: RunningServer) -> None:
    body = set_scripts(server, "<think>abcdefgh</think>No.", "<think>abcd!</think>So.")
    shared = {"model": "hash", "temperature": 0}
    fields = {**shared, "messages": [body["messages"]], "thinking_token_budget": 4}
    batch = server.post(f"{CHAT}/batch", **fields).json()
    assert batch["choices"][0]["message"]["content"] == "So."
    fields = {**shared, "input": body["messages"], "thinking_token_budget": 4}
    response = server.post("/v1/responses", **fields).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == "So."
    thinking = {"type": "enabled", "budget_tokens": 4}
    fields = {**shared, "messages": body["messages"], "max_tokens": 99, "thinking": thinking}
    message = server.post("/v1/messages", **fields).json()
    assert [block.get("text", block.get("thinking")) for block in message["content"]] == [
        *("abcd!", "So.")
    ]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget", "invalid_value"),
        (CHAT, {"thinking_token_budget": 2**31}, "thinking_token_budget", "invalid_value"),
        (CHAT, {"thinking_token_budget": 1.5}, "thinking_token_budget", "invalid_value"),
        (CHAT, {"thinking_token_budget": True}, "thinking_token_budget", "invalid_value"),
        (
            CHAT,
            {"thinking_token_budget": 5, "allowed_token_ids": [5]},
            *("allowed_token_ids", "invalid_value"),
        ),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 0}, "max_tokens": 5},
            *("thinking.budget_tokens", "invalid_value"),
        ),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 2**31}, "max_tokens": 5},
            *("thinking.budget_tokens", "invalid_value"),
        ),
        (
            "/v1/responses",
            {"input": "hi", "messages": None, "thinking_token_budget": -2},
            *("thinking_token_budget", "invalid_value"),
        ),
    ],
)
def test_a_budget_that_is_none_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    body = {"model": "hash", "messages": USER, **fields}
    answer = server.post(path, **{name: value for name, value in body.items() if value is not None})
    if path == "/v1/messages":
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and f"{param}: it is not an integer from 1 to" in message
    else:
        check_envelope(answer, 400, param, code)


def test_a_model_whose_reasoning_cannot_end_refuses_a_budget() -> None:
    with open_server() as plain:
        answer = plain.post(CHAT, model="hash", messages=USER, thinking_token_budget=5)
        check_envelope(answer, 400, "thinking_token_budget", "unsupported_parameter")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        fields = {"model": "hash", "messages": USER, "max_tokens": 3, "thinking": thinking}
        assert plain.post("/v1/messages", **fields).status_code == 200
        answer = plain.post("/v1/completions", model="hash", prompt="a", thinking_token_budget=5)
        check_envelope(answer, 400, "thinking_token_budget", "unsupported_parameter")


def test_a_prompt_without_reasoning_has_no_budget_and_one_inside_it_has_spent_some() -> None:
    formats = find_chat_formats(TOKENIZER, "qwen3")

    def budget_of(text: str, num_tokens: int) -> Any:
        return formats.thinking_budget_of(num_tokens, TOKENIZER.encode(text), TOKENIZER)

    assert budget_of("a<think>\n\n</think>\n\n", 5) is None
    for text, reasoning, num_left in (
        ("a", Reasoning("<think>", "</think>"), 5),
        ("a<think>", Reasoning("", "</think>"), 5),
        ("<think>a<think>\n", Reasoning("", "</think>"), 4),
        ("<think>" + "\n" * 9, Reasoning("", "</think>"), 0),
    ):
        budget = budget_of(text, 5)
        assert budget[:2] == (num_left, reasoning)
        assert budget.end_ids == tuple(TOKENIZER.encode("</think>"))
    opened = Reasoning("", HARMONY.end)
    assert num_open_tokens(opened, "", TOKENIZER.encode("a\n"), TOKENIZER) == 0


def test_a_marker_that_is_a_special_token_is_forced_as_that_token() -> None:
    tokenizer = ByteTokenizer(("<|end|>", "<think>", "</think>"))
    assert tokenizer.encode("a</think>") == [98, 258]
    assert find_end_ids(tokenizer, THINK, None) == (258,)
    text = '{"reasoning_end_str": "So.</think>"}'
    assert find_end_ids(tokenizer, THINK, text) == (*tokenizer.encode("So."), 258)
    for name, reasoning in REASONING_FORMATS.items():
        end_ids = find_end_ids(TOKENIZER, reasoning, None)
        expected = "" if name == "openai_gptoss" else reasoning.end
        assert end_ids == tuple(TOKENIZER.encode(expected))


class UpperCaseTokenizer(ByteTokenizer):
    """A tokenizer that does not keep the text of a marker."""

    def encode(self, text: str, **encoding: bool) -> list[int]:
        return super().encode(text.upper(), **encoding)


def test_a_marker_that_a_tokenizer_does_not_keep_ends_no_reasoning_and_no_start_of_a_server() -> (
    None
):
    tokenizer = UpperCaseTokenizer()
    assert find_end_ids(tokenizer, THINK, None) == find_end_ids(tokenizer, THINK, "{}") == ()
    with pytest.raises(InvalidConfig, match="does not keep its end"):
        find_end_ids(tokenizer, THINK, CONFIG)


@pytest.mark.parametrize(
    ("reasoning", "config", "problem"),
    [
        (THINK, "</think>", "no JSON object"),
        (THINK, '["</think>"]', "no JSON object"),
        (THINK, '{"reasoning_end_str": 5}', "no JSON object"),
        (THINK, '{"reasoning_end_str": "\\ud800</think>"}', "no JSON object"),
        (THINK, "[" * 100_000, "no JSON object"),
        (THINK, '{"end": "</think>"}', "no key 'end'"),
        (THINK, '{"reasoning_start_str": "[THINK]"}', "reasoning_start_str is not '<think>'"),
        (THINK, '{"reasoning_end_str": "Stop."}', "does not end with '</think>'"),
        (THINK, '{"reasoning_end_str": "Stop it"}', "does not end with '</think>'"),
        (THINK, '{"reasoning_end_str": "</think></think>"}', "has it twice"),
        (THINK, '{"reasoning_end_str": "<|end|></think>"}', "the token that ends an answer"),
        (THINK, f'{{"reasoning_end_str": "{"a" * 1024}</think>"}}', "at most 1024"),
        (None, '{"reasoning_end_str": "</think>"}', "no end that can be forced"),
        (HARMONY, '{"reasoning_end_str": "</think>"}', "no end that can be forced"),
    ],
)
def test_a_text_that_does_not_end_the_reasoning_is_refused(
    reasoning: Any, config: str, problem: str
) -> None:
    with pytest.raises(InvalidConfig, match="reasoning_config") as caught:
        find_end_ids(TOKENIZER, reasoning, config)
    assert problem in str(caught.value)
