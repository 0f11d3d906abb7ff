"""litellm: chats and completions, whole, streamed and async, and its names for what goes wrong."""

# /// script
# dependencies = ["litellm==1.106.2"]
# ///

from __future__ import annotations

import asyncio
import os

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
    "timeout": 30,
    "num_retries": 0,
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
    too_long = [{"role": "user", "content": "a" * 9000}]
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
    check_completions()
    asyncio.run(check_async())
    print("chats as openai/ and hosted_vllm/, completions; whole, streamed, async; errors")


if __name__ == "__main__":
    main()
