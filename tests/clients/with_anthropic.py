"""anthropic: messages, streams, async; tools, structure, stop sequences, counts; errors."""

# /// script
# dependencies = ["anthropic==2.14.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from expected import KEY, MODEL, URL, chat, greedy, health, ids

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SYSTEM: list[Any] = [
    {"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}},
]
HELLO_TEXT = chat(("system", "Be brief"), ("user", "Hello"))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "Of a city", "input_schema": CITY}
GREEDY = {"temperature": 0}


def check_messages(client: Anthropic) -> None:
    known = greedy(HELLO_TEXT, 20)
    whole = client.messages.create(
        model=MODEL, max_tokens=20, system=SYSTEM, messages=HELLO, extra_body=GREEDY
    )
    (block,) = whole.content
    assert block.type == "text" and block.text == known.text, whole
    assert whole.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[known.finish_reason]
    usage = whole.usage
    num_cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert usage.input_tokens + num_cached == len(ids(HELLO_TEXT))
    assert usage.output_tokens == known.tokens

    counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=HELLO)
    assert counted.input_tokens == len(ids(HELLO_TEXT))

    stop = known.text[7]
    stopped = client.messages.create(
        model=MODEL,
        max_tokens=20,
        system=SYSTEM,
        messages=HELLO,
        stop_sequences=["\x00", stop],
        extra_body=GREEDY,
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), stopped
    assert stopped.content[0].text == known.text.split(stop)[0], stopped

    # The message of an answer can be sent back unchanged.
    following: list[Any] = [*HELLO, whole.to_param(), {"role": "user", "content": "And?"}]
    more = client.messages.create(
        model=MODEL, max_tokens=8, system=SYSTEM, messages=following, extra_body=GREEDY
    )
    rendered = chat(
        ("system", "Be brief"), ("user", "Hello"), ("assistant", known.text), ("user", "And?")
    )
    assert more.content[0].text == greedy(rendered, 8).text, more


def check_stream(client: Anthropic) -> None:
    known = greedy(HELLO_TEXT, 20)
    with client.messages.stream(
        model=MODEL, max_tokens=20, system=SYSTEM, messages=HELLO, extra_body=GREEDY
    ) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == known.text == final.content[0].text, texts
    assert len(texts) > 2, f"not a stream: {texts}"
    assert final.usage.output_tokens == known.tokens and final.stop_reason is not None

    # A client that leaves early ends its request; the runner checks that.
    with client.messages.stream(
        model=MODEL, max_tokens=4000, messages=HELLO, extra_body={"ignore_eos": True}
    ) as left:
        next(left.text_stream)
        assert health(URL)["running"] == 1, "the first event comes after the last token"


def check_tools(client: Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(
        model=MODEL, max_tokens=200, messages=HELLO, tools=[WEATHER], tool_choice=choice
    )
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use", message
    assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31 degrees"}
    history: list[Any] = [*HELLO, message.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=[WEATHER])
    assert answer.usage.output_tokens > 0

    named: Any = {"type": "tool", "name": "weather"}
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=HELLO, tools=[WEATHER], tool_choice=named
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 2 and final.stop_reason == "tool_use", pieces
    assert final.content[0].input["city"] in ("Rome", "Oslo"), final

    structured = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": CITY}},
    )
    assert structured.content[0].text.startswith('{"city": '), structured


def check_errors(client: Anthropic) -> None:
    try:
        client.messages.create(model=MODEL, max_tokens=5, messages=HELLO, stop_sequences=[""])
    except anthropic.BadRequestError as error:
        assert error.type == "invalid_request_error" and "stop_sequences: " in str(error), error
    else:
        raise AssertionError("an empty stop sequence is taken")
    try:
        client.messages.create(model="none", max_tokens=5, messages=HELLO)
    except anthropic.NotFoundError as error:
        assert error.type == "not_found_error", error
    else:
        raise AssertionError("a model that is not there answers")
    try:
        client.with_options(api_key="wrong").messages.create(
            model=MODEL, max_tokens=5, messages=HELLO
        )
    except anthropic.AuthenticationError as error:
        assert error.type == "authentication_error", error
    else:
        raise AssertionError("a wrong key is taken")


async def check_async() -> None:
    async with AsyncAnthropic(base_url=URL, auth_token=KEY, timeout=60) as client:
        texts = [f"{number} and" for number in range(16)]
        answers = await asyncio.gather(
            *(
                client.messages.create(
                    model=MODEL,
                    max_tokens=16,
                    messages=[{"role": "user", "content": text}],
                    extra_body=GREEDY,
                )
                for text in texts
            )
        )
        expected = [greedy(chat(("user", text)), 16).text for text in texts]
        assert [answer.content[0].text for answer in answers] == expected


def main() -> None:
    with Anthropic(base_url=URL, api_key=KEY, timeout=60, max_retries=0) as client:
        check_messages(client)
        check_stream(client)
        check_tools(client)
        check_errors(client)
    asyncio.run(check_async())
    print("messages: whole, streamed, async; tools, structure, stop sequences, counts, errors")


if __name__ == "__main__":
    main()
