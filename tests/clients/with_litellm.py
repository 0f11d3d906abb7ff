"""litellm: chats, completions, responses, messages; whole, streamed, async; tools; errors."""

# /// script
# dependencies = ["litellm==1.110.2"]
# ///

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from expected import KEY, MODEL, URL, chat, greedy, ids

# Otherwise importing it downloads a list of prices from GitHub.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

PROMPT = "Say more now"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT = chat(("user", PROMPT))
GIVEN = {
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "max_tokens": 24,
    "temperature": 0,
    "timeout": 60,
    "num_retries": 0,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Two provider names for a server with OpenAI's API.
PROVIDERS = ("openai", "hosted_vllm")


def check_chats(provider: str) -> None:
    known = greedy(CHAT, 24)
    model = f"{provider}/{MODEL}"
    whole = litellm.completion(model=model, messages=MESSAGES, **GIVEN)
    (choice,) = whole.choices
    assert choice.message.content == known.text, whole
    assert choice.finish_reason == known.finish_reason, whole
    assert whole.usage.prompt_tokens == len(ids(CHAT)), whole.usage
    assert whole.usage.completion_tokens == known.tokens, whole.usage

    chunks = list(
        litellm.completion(
            model=model,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **GIVEN,
        )
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == known.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"
    assert chunks[-1].usage.completion_tokens == known.tokens, chunks[-1]
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == known.text, built


def check_completions() -> None:
    known = greedy(PROMPT, 24)
    model = f"text-completion-openai/{MODEL}"
    whole = litellm.text_completion(model=model, prompt=PROMPT, logprobs=2, **GIVEN)
    assert whole.choices[0].text == known.text, whole
    assert len(whole.choices[0].logprobs.token_logprobs) == known.tokens, whole
    chunks = list(litellm.text_completion(model=model, prompt=PROMPT, stream=True, **GIVEN))
    texts = [choice.text or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == known.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"


def check_responses() -> None:
    known = greedy(CHAT, 400)
    fields: dict[str, Any] = {**GIVEN, "max_output_tokens": 400}
    del fields["max_tokens"], fields["num_retries"]
    whole = litellm.responses(model=f"openai/{MODEL}", input=PROMPT, **fields)
    assert whole.output[0].content[0].text == known.text, whole
    events = litellm.responses(model=f"openai/{MODEL}", input=PROMPT, stream=True, **fields)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == known.text, deltas
    assert len(deltas) > 2, f"not a stream: {deltas}"


async def check_messages() -> None:
    """Check Anthropic's API, as a chat and passed through."""
    known = greedy(CHAT, 24)
    fields = {**GIVEN, "api_base": URL, "model": f"anthropic/{MODEL}", "messages": MESSAGES}
    whole = litellm.completion(**fields)
    assert whole.choices[0].message.content == known.text, whole
    del fields["num_retries"]
    passed = await litellm.anthropic.messages.acreate(**fields)
    assert passed["content"][0]["text"] == known.text, passed
    assert passed["usage"]["output_tokens"] == known.tokens, passed


def check_tools(provider: str) -> None:
    fields = {**GIVEN, "model": f"{provider}/{MODEL}", "max_tokens": 400}
    function = {"name": "weather", "description": "Of a city", "parameters": CITY}
    tools = [{"type": "function", "function": function}]
    first = litellm.completion(messages=MESSAGES, tools=tools, tool_choice="required", **fields)
    message = first.choices[0].message
    results = []
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call
        results.append({"role": "tool", "tool_call_id": call.id, "content": "31 degrees"})
    answer = litellm.completion(messages=[*MESSAGES, message, *results], tools=tools, **fields)
    assert answer.choices[0].message.content, answer


async def check_async() -> None:
    prompts = [f"{number} and" for number in range(8)]
    answers = await asyncio.gather(
        *(
            litellm.acompletion(
                model=f"openai/{MODEL}", messages=[{"role": "user", "content": each}], **GIVEN
            )
            for each in prompts
        )
    )
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [greedy(chat(("user", each)), 24).text for each in prompts], texts
    stream = await litellm.acompletion(
        model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **GIVEN
    )
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == greedy(CHAT, 24).text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"


def check_errors(provider: str) -> None:
    too_long = [{"role": "user", "content": "a" * 200_000}]
    for changed, expected in (
        ({"temperature": 9}, litellm.BadRequestError),
        ({"messages": too_long}, litellm.ContextWindowExceededError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
        ({"model": f"{provider}/none"}, litellm.NotFoundError),
    ):
        fields = {"model": f"{provider}/{MODEL}", "messages": MESSAGES, **GIVEN, **changed}
        try:
            litellm.completion(**fields)
        except expected as error:
            assert type(error) is expected, type(error)
            continue
        raise AssertionError(f"{changed} is taken")


def main() -> None:
    litellm.suppress_debug_info = True
    for provider in PROVIDERS:
        check_chats(provider)
        check_errors(provider)
        check_tools(provider)
    check_completions()
    check_responses()
    asyncio.run(check_messages())
    asyncio.run(check_async())
    print("chats as openai/ and hosted_vllm/, completions; whole, streamed, async; errors")


if __name__ == "__main__":
    main()
