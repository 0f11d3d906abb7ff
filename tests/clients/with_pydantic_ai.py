"""pydantic-ai: agents over chats, responses, messages: texts, streams, typed output, tool calls."""

# /// script
# dependencies = ["pydantic-ai-slim[openai,anthropic]==2.68.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from expected import KEY, MODEL, URL, chat, greedy, ids
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PROMPT = "Say more now"
TEXT = chat(("user", PROMPT))
KNOWN = greedy(TEXT, 400)
GREEDY = {"temperature": 0}
SETTINGS: Any = {"max_tokens": 400, "timeout": 60, "extra_body": GREEDY}
# Some schemas allow further properties, of which the hash model would write one after the other.
CLOSE = {str(*ids("}")): 100}
ONE_CALL: Any = {
    **SETTINGS,
    "parallel_tool_calls": False,
    "extra_body": {**GREEDY, "logit_bias": CLOSE},
}
TASKS = [f"Task {number}: is it warm?" for number in range(3)]


class Report(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    city: Literal["Rome", "Oslo"]
    warm: bool


async def check_text(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    result = await agent.run(PROMPT)
    assert result.output == KNOWN.text, result
    usage = result.usage
    assert (usage.requests, usage.output_tokens) == (1, KNOWN.tokens), usage
    assert usage.input_tokens == len(ids(TEXT)), usage

    async with agent.run_stream(PROMPT) as stream:
        deltas = [delta async for delta in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(deltas) == KNOWN.text, deltas
    assert len(deltas) > 2, f"not a stream: {deltas}"

    # The next turn has the conversation so far.
    second = await agent.run("And?", message_history=result.all_messages())
    turns = (("user", PROMPT), ("assistant", KNOWN.text), ("user", "And?"))
    assert second.output == greedy(chat(*turns), 400).text, second


async def check_structure(model: Model, output_type: Any) -> None:
    agent = Agent(model, output_type=output_type, model_settings=ONE_CALL, retries=0)
    result = await agent.run(PROMPT)
    assert isinstance(result.output, Report), result


async def check_tools(model: Model) -> None:
    """Each step is a call: of the tool, whose result is in the next request, or of the output."""
    cities: list[str] = []
    agent = Agent(model, output_type=Report, model_settings=ONE_CALL, retries=0)

    @agent.tool_plain
    def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return f"{days} days of sun"

    results = [await agent.run(task) for task in TASKS]
    assert all(isinstance(result.output, Report) for result in results), results
    assert cities and set(cities) <= {"Rome", "Oslo"}, cities


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    for model in (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
        messages,
    ):
        await check_text(model)
        await check_structure(model, Report)
        await check_tools(model)
        if model is not messages:
            await check_structure(model, NativeOutput(Report))


if __name__ == "__main__":
    asyncio.run(main())
