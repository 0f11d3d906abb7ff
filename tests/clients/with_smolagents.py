"""smolagents: texts, streams, an agent that calls tools up to its answer, a CodeAgent."""

# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///

from typing import ClassVar

from expected import KEY, MODEL, URL, chat, greedy, ids
from smolagents import ChatMessage, CodeAgent, OpenAIModel, Tool, ToolCallingAgent
from smolagents.monitoring import LogLevel

PROMPT = "Say more now"
MESSAGES = [ChatMessage("user", PROMPT)]
KNOWN = greedy(chat(("user", PROMPT)), 400)
# Its schemas allow further properties, of which the hash model would write one after the other.
CLOSE = {str(*ids("}")): 100}
TASKS = [f"Task {number}: is it warm?" for number in range(8)]


class Weather(Tool):
    """Returns the weather of a city, and counts its calls."""

    name = "weather"
    description = "Weather of a city"
    inputs: ClassVar = {
        "city": {"type": "string", "description": "A city", "enum": ["Rome", "Oslo"]}
    }
    output_type = "string"

    def setup(self) -> None:
        self.cities: list[str] = []
        super().setup()

    def forward(self, city: str) -> str:
        self.cities.append(city)
        return f"31 degrees in {city}"


class FinalAnswer(Tool):
    """Ends a task, as the tool of this name that each agent has. The answer is one of two words."""

    name = "final_answer"
    description = "Answers the task"
    inputs: ClassVar = {
        "answer": {"type": "string", "description": "Yes or no", "enum": ["yes", "no"]}
    }
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def create(**fields: object) -> OpenAIModel:
    return OpenAIModel(
        MODEL,
        f"{URL}/v1",
        KEY,
        client_kwargs={"max_retries": 0, "timeout": 60},
        temperature=0,
        max_tokens=400,
        **fields,
    )


def check_texts(model: OpenAIModel) -> None:
    whole = model.generate(MESSAGES)
    assert whole.content == KNOWN.text, whole
    usage = whole.token_usage
    assert (usage.input_tokens, usage.output_tokens) == (
        len(ids(chat(("user", PROMPT)))),
        KNOWN.tokens,
    ), usage
    deltas = [delta.content for delta in model.generate_stream(MESSAGES)]
    assert "".join(filter(None, deltas)) == KNOWN.text, deltas
    assert sum(map(bool, deltas)) > 2, f"not a stream: {deltas}"


def check_tool_calls(stream_outputs: bool) -> None:
    """Each step is a call: of the tool, whose result is in the next request, or of the answer."""
    weather = Weather()
    agent = ToolCallingAgent(
        [weather, FinalAnswer()],
        create(parallel_tool_calls=False, logit_bias=CLOSE),
        verbosity_level=LogLevel.ERROR,
        stream_outputs=stream_outputs,
    )
    answers = [agent.run(task) for task in TASKS]
    assert set(answers) <= {"yes", "no"}, answers
    assert weather.cities and set(weather.cities) <= {"Rome", "Oslo"}, weather.cities


def check_code_agent() -> None:
    """The model writes no Python, so the agent shows it the error, and then requests an answer."""
    agent = CodeAgent([], create(), max_steps=2, verbosity_level=LogLevel.OFF)
    answer = agent.run(PROMPT)
    assert isinstance(answer, str) and answer, answer
    errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    assert any("code" in str(error) for error in errors), errors


def main() -> None:
    check_texts(create())
    check_tool_calls(stream_outputs=False)
    check_tool_calls(stream_outputs=True)
    check_code_agent()


if __name__ == "__main__":
    main()
