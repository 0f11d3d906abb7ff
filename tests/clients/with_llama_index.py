"""llama-index: chats, completions, streams, async, a tool call, structure, an agent with a tool."""

# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# ///

import asyncio
from typing import Literal

import pydantic
from expected import KEY, MODEL, URL, chat, greedy
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage("Be brief", role="system"), ChatMessage("Say more now", role="user")]
KNOWN = greedy(chat(("system", "Be brief"), ("user", "Say more now")), 400)


class City(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    city: Literal["Rome", "Oslo"]
    warm: bool


def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
    """Return the weather of a city."""
    return f"{days} days of sun in {city}"


WEATHER = FunctionTool.from_defaults(weather)


def create(**fields: object) -> OpenAILike:
    common = {"api_base": f"{URL}/v1", "api_key": KEY, "model": MODEL, "context_window": 8192}
    return OpenAILike(**common, temperature=0, max_tokens=400, max_retries=0, timeout=60, **fields)


def check_texts(model: OpenAILike) -> None:
    whole = model.chat(MESSAGES)
    assert whole.message.content == KNOWN.text, whole
    assert whole.raw.usage.completion_tokens == KNOWN.tokens, whole.raw
    deltas = [chunk.delta for chunk in model.stream_chat(MESSAGES)]
    assert "".join(map(str, filter(None, deltas))) == KNOWN.text, deltas
    assert sum(map(bool, deltas)) > 2, f"not a stream: {deltas}"

    plain = create(is_chat_model=False)
    known = greedy("Say more now", 400)
    assert plain.complete("Say more now").text == known.text
    deltas = [chunk.delta for chunk in plain.stream_complete("Say more now")]
    assert "".join(map(str, filter(None, deltas))) == known.text, deltas


def check_tools(model: OpenAILike) -> None:
    response = model.chat_with_tools([WEATHER], user_msg="Weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(response)
    assert call.tool_name == "weather", call
    assert WEATHER(**call.tool_kwargs).content.startswith(str(call.tool_kwargs["days"])), call
    assert isinstance(model.as_structured_llm(City).chat(MESSAGES).raw, City)


async def check_async(model: OpenAILike) -> None:
    assert (await model.achat(MESSAGES)).message.content == KNOWN.text
    stream = await model.astream_chat(MESSAGES)
    deltas = [chunk.delta async for chunk in stream]
    assert "".join(map(str, filter(None, deltas))) == KNOWN.text, deltas


async def check_agent(model: OpenAILike) -> None:
    """The model must call the tool first; its result is in the request of the answer."""
    agent = FunctionAgent(
        tools=[WEATHER],
        llm=model,
        initial_tool_choice="weather",
        allow_parallel_tool_calls=False,
    )
    handler = agent.run("Weather?")
    results = [
        event async for event in handler.stream_events() if isinstance(event, ToolCallResult)
    ]
    answer = await handler
    assert [result.tool_name for result in results] == ["weather"], results
    assert "days of sun" in str(results[0].tool_output), results
    assert answer.response.content, answer


def main() -> None:
    model = create(is_chat_model=True, is_function_calling_model=True)
    check_texts(model)
    check_tools(model)
    asyncio.run(check_async(model))
    asyncio.run(check_agent(model))


if __name__ == "__main__":
    main()
