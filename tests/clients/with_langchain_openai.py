"""langchain-openai: chats, responses, completions; streams, batches, async; tools, structure."""

# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pydantic
from expected import KEY, MODEL, URL, chat, greedy, health, ids
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("Be brief"), HumanMessage("Say more now")]
TEXT = chat(("system", "Be brief"), ("user", "Say more now"))
KNOWN = greedy(TEXT, 24)


class City(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    warm: bool


@tool(args_schema=City)
def weather(city: str, warm: bool) -> str:
    """Return the weather of a city."""
    return f"31 degrees in {city}"


def check_usage(message: AIMessage) -> None:
    usage = message.usage_metadata
    assert usage is not None, message
    assert usage["input_tokens"] == len(ids(TEXT)), usage
    assert usage["output_tokens"] == KNOWN.tokens, usage


def check_chat(model: ChatOpenAI) -> None:
    whole = model.invoke(MESSAGES)
    assert whole.content == KNOWN.text, whole
    assert whole.response_metadata["finish_reason"] == KNOWN.finish_reason, whole
    check_usage(whole)

    chunks = list(model.stream(MESSAGES))
    texts = [chunk.content for chunk in chunks]
    assert "".join(texts) == KNOWN.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    check_usage(total)

    prompts = [f"{number} and" for number in range(8)]
    answers = model.batch(prompts)
    expected = [greedy(chat(("user", prompt)), 24).text for prompt in prompts]
    assert [answer.content for answer in answers] == expected, answers

    stopped = model.invoke(MESSAGES, stop=[KNOWN.text[5]])
    assert stopped.content == KNOWN.text.split(KNOWN.text[5])[0], stopped


async def check_async(model: ChatOpenAI) -> None:
    assert (await model.ainvoke(MESSAGES)).content == KNOWN.text
    texts = [chunk.content async for chunk in model.astream(MESSAGES)]
    assert "".join(texts) == KNOWN.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"


def check_completions(model: OpenAI) -> None:
    known = greedy("Say more now", 24)
    assert model.invoke("Say more now") == known.text
    texts = list(model.stream("Say more now"))
    assert "".join(texts) == known.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"


def check_responses(model: ChatOpenAI) -> None:
    whole = model.invoke(MESSAGES)
    assert whole.text == KNOWN.text, whole
    check_usage(whole)
    texts = [chunk.text for chunk in model.stream(MESSAGES)]
    assert "".join(texts) == KNOWN.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"


def check_tools(model: ChatOpenAI) -> None:
    # Strict: otherwise the schema allows further properties, which the hash model would write.
    bound = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    message = bound.invoke(MESSAGES)
    (call,) = message.tool_calls
    result = weather.invoke(call)
    assert result.content == f"31 degrees in {call['args']['city']}", result
    answer = model.bind_tools([weather]).invoke([*MESSAGES, message, result])
    assert answer.text and not answer.tool_calls, answer
    assert isinstance(model.with_structured_output(City).invoke(MESSAGES), City)


def check_first_chunk(model: ChatOpenAI) -> None:
    """The first chunk arrives while the rest is being generated."""
    left = model.stream(MESSAGES)
    next(left)
    assert health(URL)["running"] == 1, "the first chunk comes after the last token"
    left.close()


def check_errors(model: ChatOpenAI) -> None:
    for prompt, changed, code, overflow in (
        ("a" * 200_000, {}, "context_length_exceeded", True),
        ("a", {"temperature": 9}, "invalid_value", False),
    ):
        try:
            model.invoke(prompt, **changed)
        except openai.BadRequestError as error:
            assert error.code == code, error
            assert isinstance(error, ContextOverflowError) == overflow, type(error)
        else:
            raise AssertionError(f"{prompt[:8]!r} with {changed} is taken")


def main() -> None:
    given = {
        "base_url": f"{URL}/v1",
        "api_key": KEY,
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 24,
        "timeout": 60,
        "max_retries": 0,
    }
    model = ChatOpenAI(**given, stream_usage=True)
    check_chat(model)
    check_errors(model)
    endless = {**given, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    check_first_chunk(ChatOpenAI(**endless))
    asyncio.run(check_async(model))
    check_completions(OpenAI(**given))
    responses = ChatOpenAI(**given, use_responses_api=True)
    check_responses(responses)
    for each in (model, responses):
        check_tools(each.model_copy(update={"max_tokens": 400}))
    print("ChatOpenAI: invoke, stream, batch, async, usage; OpenAI: invoke, stream")


if __name__ == "__main__":
    main()
