"""LLM.chat: messages become the prompt that the chat template writes of them."""

from __future__ import annotations

from typing import Any

import pytest

from forge.errors import InvalidRequest
from forge.llm import LLM
from forge.request import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = [{"role": "system", "content": "Be short"}, {"role": "user", "content": "Why?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read_prompt(llm: LLM, messages: Any, **options: Any) -> str:
    """Return the text of the only prompt of a chat."""
    (output,) = llm.chat(messages, PARAMS, **options)
    return llm.tokenizer.decode(output.prompt_token_ids)


def test_a_chat_is_generated_from_the_prompt_that_the_template_writes() -> None:
    with LLM("hash") as llm:
        assert read_prompt(llm, SHORT) == "system: Be short\nuser: Why?\nassistant:"
        (answer,) = llm.chat(SHORT, PARAMS)
        (expected,) = llm.generate("system: Be short\nuser: Why?\nassistant:", PARAMS)
        assert (answer.text, len(answer.token_ids)) == (expected.text, 4)


def test_several_chats_share_steps_and_may_have_params_of_their_own() -> None:
    with LLM("hash") as llm:
        outputs = llm.chat([HELLO, SHORT], [PARAMS, SamplingParams(max_tokens=1)])
        assert [len(output.token_ids) for output in outputs] == [4, 1]
        assert outputs[0].token_ids == llm.chat(HELLO, PARAMS)[0].token_ids
        assert llm.chat([], PARAMS) == []


def test_tools_and_a_message_to_continue_are_those_of_the_template() -> None:
    with LLM("hash") as llm:
        assert read_prompt(llm, HELLO, tools=[TOOL]).startswith('function: {"name": "add"')
        begun = [*HELLO, {"role": "assistant", "content": "Yes, "}]
        prompt = read_prompt(llm, begun, continue_final_message=True)
        assert prompt == "user: Hello\nassistant: Yes, "


@pytest.mark.parametrize(
    ("messages", "start"),
    [
        ("Hello", "messages: 'Hello' is no list of messages. Give one or more"),
        (["Hello"], "messages[0]: 'Hello' is no message. Give {\"role\""),
        ([HELLO, []], "messages[1]: '[]' is no list of messages"),
        ([HELLO, [{"role": 3, "content": "x"}]], "messages[1][0]: "),
        ([*HELLO, {"role": "user"}], "messages[1]: it has no content"),
        ([{"role": "user", "content": None}], "messages[0]: it has no content"),
        ([[3]], "messages[0][0]: '3' is no message"),
        ([*HELLO, HELLO], "messages[1]: "),
        ([{"role": "user", "content": "\ud800"}], "messages: it has half a surrogate pair"),
    ],
    ids=[
        *("text", "texts", "no messages", "no role", "no content", "null"),
        *("of several", "mixed", "surrogate"),
    ],
)
def test_what_is_no_chat_is_refused_by_name_and_nothing_runs(messages: Any, start: str) -> None:
    with LLM("hash") as llm:
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(messages, PARAMS)
        assert str(caught.value).startswith(start)
        assert not llm.engine.has_work


def test_a_call_of_a_tool_needs_no_content_and_a_tool_needs_its_function() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    asked = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with LLM("hash") as llm:
        assert 'call: {"id": "1", "name": "add"' in read_prompt(llm, asked)
        with pytest.raises(InvalidRequest, match="messages: the chat template cannot write them"):
            llm.chat(HELLO, PARAMS, tools=[{"name": "add"}])
