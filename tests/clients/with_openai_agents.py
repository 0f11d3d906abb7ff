"""openai-agents: agents over responses and chats: texts, streams, a tool call, structure."""

# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Literal

import agents
import pydantic
from agents import Agent, ModelSettings, Runner, function_tool
from expected import KEY, MODEL, URL, chat, greedy, ids
from openai import AsyncOpenAI

KNOWN = greedy(chat(("system", "Be brief"), ("user", "Hello")), 400)
SETTINGS = ModelSettings(temperature=0, max_tokens=400)
TOOL_SETTINGS = ModelSettings(
    temperature=0, max_tokens=400, tool_choice="required", parallel_tool_calls=False
)


class City(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    city: Literal["Rome", "Oslo"]
    warm: bool


async def check_text(model: agents.Model) -> None:
    agent = Agent(name="brief", instructions="Be brief", model=model, model_settings=SETTINGS)
    result = await Runner.run(agent, "Hello")
    assert result.final_output == KNOWN.text, result
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.output_tokens) == (1, KNOWN.tokens), usage
    assert usage.input_tokens == len(ids(chat(("system", "Be brief"), ("user", "Hello")))), usage

    streamed = Runner.run_streamed(agent, "Hello")
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == KNOWN.text == streamed.final_output, deltas
    assert len(deltas) > 2, f"not a stream: {deltas}"

    # The next turn has the conversation so far.
    history = [*result.to_input_list(), {"role": "user", "content": "And?"}]
    second = await Runner.run(agent, history)
    turns = (("system", "Be brief"), ("user", "Hello"), ("assistant", KNOWN.text), ("user", "And?"))
    assert second.final_output == greedy(chat(*turns), 400).text, second


async def check_tool(model: agents.Model) -> None:
    """The model must call the tool first; its result is in the request of the answer."""
    cities = []

    @function_tool
    def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return f"{days} days of sun"

    agent = Agent(name="agent", tools=[weather], model=model, model_settings=TOOL_SETTINGS)
    for result in (await Runner.run(agent, "Weather?"), Runner.run_streamed(agent, "Weather?")):
        if isinstance(result, agents.RunResultStreaming):
            async for _ in result.stream_events():
                pass
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        assert result.new_items[1].output.endswith("days of sun"), result.new_items
        assert isinstance(result.final_output, str) and result.final_output
    assert len(cities) == 2 and set(cities) <= {"Rome", "Oslo"}, cities


async def check_structure(model: agents.Model) -> None:
    agent = Agent(name="typed", output_type=City, model=model, model_settings=SETTINGS)
    result = await Runner.run(agent, "Hello")
    assert isinstance(result.final_output, City), result


async def main() -> None:
    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        for model in (
            agents.OpenAIResponsesModel(MODEL, client),
            agents.OpenAIChatCompletionsModel(MODEL, client),
        ):
            await check_text(model)
            await check_tool(model)
            await check_structure(model)


if __name__ == "__main__":
    asyncio.run(main())
