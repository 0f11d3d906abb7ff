"""langchain-openai: chats and completions, invoked, streamed, in a batch and async."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

from __future__ import annotations

import asyncio

import openai
from expected import KEY, MODEL, URL, chat, greedy, health, ids
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("Be brief"), HumanMessage("Say more now")]
TEXT = chat(("system", "Be brief"), ("user", "Say more now"))
KNOWN = greedy(TEXT, 24)


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


def check_first_chunk(model: ChatOpenAI) -> None:
    """The first chunk arrives while the rest is being generated."""
    left = model.stream(MESSAGES)
    next(left)
    assert health(URL)["running"] == 1, "the first chunk comes after the last token"
    left.close()


def check_errors(model: ChatOpenAI) -> None:
    for prompt, changed, code, overflow in (
        ("a" * 9000, {}, "context_length_exceeded", True),
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
        "timeout": 30,
        "max_retries": 0,
    }
    model = ChatOpenAI(**given, stream_usage=True)
    check_chat(model)
    check_errors(model)
    endless = {**given, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    check_first_chunk(ChatOpenAI(**endless))
    asyncio.run(check_async(model))
    check_completions(OpenAI(**given))
    print("ChatOpenAI: invoke, stream, batch, async, usage; OpenAI: invoke, stream")


if __name__ == "__main__":
    main()
