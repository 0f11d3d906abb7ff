"""openai: completions, chats, responses; streams, async; logprobs, tools, structure; errors."""

# /// script
# dependencies = ["openai==3.57.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
from expected import (
    KEY,
    MODEL,
    NARROW_URL,
    URL,
    chat,
    greedy,
    health,
    ids,
    is_near,
    logprobs,
    score_of,
    wait_until,
)
from openai import AsyncOpenAI, OpenAI

PROMPT = "Once upon"
HELLO = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
HELLO_TEXT = chat(("system", "Be brief"), ("user", "Hello"))


def check_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def check_completions(client: OpenAI) -> None:
    known = greedy(PROMPT, 24)
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (known.text, known.finish_reason), choice
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids(PROMPT))
    assert whole.usage.completion_tokens == known.tokens
    assert whole.usage.total_tokens == len(ids(PROMPT)) + known.tokens

    prompts = ["Once upon", "a time", "ünï", "there was"]
    several = client.completions.create(
        model=MODEL, prompt=[ids(prompt) for prompt in prompts], max_tokens=9, temperature=0
    )
    texts = [choice.text for choice in sorted(several.choices, key=lambda each: each.index)]
    assert texts == [greedy(prompt, 9).text for prompt in prompts], texts

    # A character of the known text ends it, and is not part of it.
    stop = known.text[7]
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop, "\n\n"]
    )
    assert stopped.choices[0].text == known.text.split(stop)[0], stopped
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["stop_reason"] == stop, stopped

    # Fields that the client does not have go in extra_body.
    likely = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=2, extra_body={"top_k": 1}
    )
    assert likely.choices[0].text == known.text, likely


def check_choices_and_seeds(client: OpenAI) -> None:
    first, again, other = (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, n=3, seed=seed)
        for seed in (7, 7, 8)
    )
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3, texts
    assert [choice.text for choice in again.choices] == texts, "one seed, two outputs"
    assert [choice.text for choice in other.choices] != texts, "two seeds, one output"


def check_logprobs(client: OpenAI) -> None:
    known = greedy(PROMPT, 8)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT + known.text, choice.text
    shown = choice.logprobs
    assert shown is not None and shown.tokens and shown.token_logprobs and shown.top_logprobs
    assert "".join(shown.tokens) == PROMPT + known.text
    assert shown.text_offset == list(range(len(PROMPT) + 8))
    every = ids(PROMPT + known.text)
    assert shown.token_logprobs[0] is None
    for end in range(1, len(every)):
        scores = logprobs(every[:end])
        assert is_near(shown.token_logprobs[end], scores[every[end]]), (end, shown)
        top = sorted(shown.top_logprobs[end].values(), reverse=True)[:3]
        assert all(map(is_near, top, sorted(scores, reverse=True))), (end, top)

    # The prompt alone, as programs that score texts request it.
    scored = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True
    )
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.token_logprobs
    total = sum(scored.choices[0].logprobs.token_logprobs[1:])
    assert is_near(total, score_of(ids(PROMPT)[:1], ids(PROMPT)[1:])), total


def check_stream(client: OpenAI) -> None:
    known = greedy(PROMPT, 24)
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == known.text, texts
    assert sum(map(bool, texts)) > 2, f"not a stream: {texts}"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [known.finish_reason], reasons
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == known.tokens
    assert all(chunk.usage is None for chunk in chunks)

    # The first chunk comes while the rest is being generated. A client that leaves early ends its
    # request; the runner checks that.
    with client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as left:
        next(iter(left))
        assert health(URL)["running"] == 1, "the first chunk comes after the last token"


def check_chat(client: OpenAI) -> None:
    known = greedy(HELLO_TEXT, 20)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == known.text, choice.message
    assert choice.finish_reason == known.finish_reason
    assert whole.usage is not None and whole.usage.prompt_tokens == len(ids(HELLO_TEXT))
    assert choice.logprobs is not None and choice.logprobs.content is not None
    context = ids(HELLO_TEXT)
    for entry, character in zip(choice.logprobs.content, known.text, strict=False):
        scores = logprobs(context)
        context += ids(character)
        assert entry.token == character and entry.bytes == list(character.encode()), entry
        assert is_near(entry.logprob, max(scores)), entry
        top = [each.logprob for each in entry.top_logprobs]
        assert all(map(is_near, top, sorted(scores, reverse=True)[:2])), (top, entry)
    assert len(choice.logprobs.content) == known.tokens

    pair = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, n=2, seed=1, user="somebody"
    )
    assert [choice.index for choice in pair.choices] == [0, 1]
    assert pair.choices[0].message.content != pair.choices[1].message.content

    # The message of an answer can be sent back unchanged.
    following = [*HELLO, choice.message, {"role": "user", "content": "And?"}]
    more = client.chat.completions.create(
        model=MODEL, messages=following, max_tokens=8, temperature=0
    )
    rendered = chat(
        ("system", "Be brief"), ("user", "Hello"), ("assistant", known.text), ("user", "And?")
    )
    assert more.choices[0].message.content == greedy(rendered, 8).text, more


def check_chat_stream(client: OpenAI) -> None:
    known = greedy(HELLO_TEXT, 20)
    with client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        max_tokens=20,
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == known.text, deltas
    assert len(deltas) > 2, f"not a stream: {deltas}"
    assert final.choices[0].message.content == known.text
    assert final.choices[0].finish_reason == known.finish_reason
    assert final.usage is not None and final.usage.completion_tokens == known.tokens


def check_responses(client: OpenAI) -> None:
    known = greedy(HELLO_TEXT, 400)
    arguments: Any = {"model": MODEL, "instructions": "Be brief", "temperature": 0}
    whole = client.responses.create(input="Hello", max_output_tokens=400, **arguments)
    assert (whole.output_text, whole.status) == (known.text, "completed"), whole
    assert whole.usage is not None and whole.usage.output_tokens == known.tokens
    assert whole.usage.input_tokens == len(ids(HELLO_TEXT))
    with client.responses.stream(input="Hello", max_output_tokens=400, **arguments) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == known.text == final.output_text, deltas
    assert len(deltas) > 2, f"not a stream: {deltas}"

    # A stored response is continued, read and deleted. The output can be sent back as well.
    rendered = chat(
        ("system", "Be brief"), ("user", "Hello"), ("assistant", known.text), ("user", "And?")
    )
    expected = greedy(rendered, 8).text
    second = client.responses.create(
        input="And?", previous_response_id=whole.id, max_output_tokens=8, **arguments
    )
    history = [{"role": "user", "content": "Hello"}, *whole.output]
    history.append({"role": "user", "content": "And?"})
    sent = client.responses.create(input=history, store=False, max_output_tokens=8, **arguments)
    assert second.output_text == sent.output_text == expected, (second, sent)
    items = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(second.id)
    for missing in (second.id, sent.id):
        try:
            client.responses.retrieve(missing)
        except openai.NotFoundError as error:
            assert error.code == "response_not_found", error
        else:
            raise AssertionError("a response that is not stored is found")

    # A stream is cancelled by its id.
    with client.responses.create(
        model=MODEL,
        input="Hello",
        stream=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
    ) as events:
        first = next(iter(events))
        assert first.type == "response.created"
        assert client.responses.cancel(first.response.id).status == "cancelled"
        *_, last = events
    assert last.type == "response.incomplete" and last.response.status == "cancelled", last


class City(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    city: Literal["Rome", "Oslo"]


def check_response_tools(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(City, name="weather")["function"]
    tools: Any = [{"type": "function", **tool}]
    first = client.responses.create(
        model=MODEL, input="Hello", tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = first.output
    assert call.type == "function_call" and call.name == "weather", first
    City.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "31"}
    answer = client.responses.create(
        model=MODEL, previous_response_id=first.id, input=[result], max_output_tokens=8
    )
    assert answer.output_text, answer
    parsed = client.responses.parse(model=MODEL, input="Hello", text_format=City)
    assert parsed.output_parsed is not None and parsed.output_parsed.city in ("Rome", "Oslo")


def check_chat_tools(client: OpenAI) -> None:
    """Check that an answer is a call, and that with its result it has the requested format."""
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(City, name="weather")],
        tool_choice="required",
        response_format=City,
        parallel_tool_calls=False,
        reasoning_effort="low",
    )
    message = parsed.choices[0].message
    assert message.tool_calls and message.content is None, message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, City), call
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"},
    ]
    for each in history[-2]["tool_calls"]:
        del each["function"]["parsed_arguments"]
    answer = client.chat.completions.parse(model=MODEL, messages=history, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City), answer


def check_errors(client: OpenAI) -> None:
    try:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=9)
    except openai.BadRequestError as error:
        assert (error.code, error.param) == ("invalid_value", "temperature"), error
        assert error.type == "invalid_request_error" and error.request_id, error
    else:
        raise AssertionError("temperature 9 is taken")
    try:
        client.chat.completions.create(model="none", messages=HELLO)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("a model that is not there answers")
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error
    else:
        raise AssertionError("a wrong key is taken")


def check_full_queue() -> None:
    """One request runs and one waits: the third is refused, with the time to retry after."""

    def stream(client: OpenAI, max_tokens: int) -> openai.Stream[openai.types.Completion]:
        return client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    with OpenAI(base_url=f"{NARROW_URL}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        with stream(client, 4000) as running:
            next(iter(running))
            error = asyncio.run(third_request_error(client))
        assert error.code == "queue_full", error
        assert int(error.response.headers["retry-after"]) >= 0


async def third_request_error(client: OpenAI) -> openai.RateLimitError:
    """Return the error of a request that comes while another one waits."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=KEY, max_retries=0) as other:
        waiting = asyncio.create_task(
            other.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        )
        await asyncio.to_thread(wait_until, lambda: health(NARROW_URL)["waiting"] == 1)
        try:
            await asyncio.to_thread(
                client.completions.create, model=MODEL, prompt=PROMPT, max_tokens=1
            )
        except openai.RateLimitError as error:
            return error
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])
    raise AssertionError("the queue takes more than it has room for")


async def check_async() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60) as client:
        prompts = [f"{number} and" for number in range(16)]
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0)
                for prompt in prompts
            )
        )
        texts = [answer.choices[0].text for answer in answers]
        assert texts == [greedy(prompt, 16).text for prompt in prompts], texts

        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=20, temperature=0, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.content or "" for delta in deltas) == greedy(HELLO_TEXT, 20).text
        assert len(deltas) > 2, f"not a stream: {deltas}"


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        check_models(client)
        check_completions(client)
        check_choices_and_seeds(client)
        check_logprobs(client)
        check_stream(client)
        check_chat(client)
        check_chat_stream(client)
        check_responses(client)
        check_response_tools(client)
        check_chat_tools(client)
        check_errors(client)
    check_full_queue()
    asyncio.run(check_async())
    print("completions, chats, responses: whole, streamed, async; logprobs, stop, n, store, errors")


if __name__ == "__main__":
    main()
