"""instructor: pydantic models by tools, schemas, responses, messages; streams, retries, async."""

# /// script
# dependencies = ["instructor[anthropic]==1.17.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Literal

import instructor
import pydantic
from anthropic import Anthropic
from expected import KEY, MODEL, URL
from instructor import Mode
from openai import AsyncOpenAI, OpenAI

MESSAGES = [{"role": "user", "content": "Is it warm in Rome?"}]
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


class Day(pydantic.BaseModel):
    """A part of a report."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "clouds"]
    degrees: int = pydantic.Field(ge=-40, le=60)


class Report(pydantic.BaseModel):
    """What answers are parsed into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: list[Day] = pydantic.Field(min_length=1, max_length=3)


class EvenReport(Report):
    """A report whose first day has an even number of degrees, which no schema says."""

    @pydantic.model_validator(mode="after")
    def check(self) -> EvenReport:
        if self.days[0].degrees % 2:
            raise ValueError("the degrees of the first day are odd")
        return self


def check_models(client: instructor.Instructor, **fields: object) -> None:
    common = {"model": MODEL, "messages": MESSAGES, **fields}
    report, answer = client.create_with_completion(response_model=Report, max_retries=0, **common)
    assert isinstance(report, Report) and report.days, report
    assert answer.usage is not None, answer

    # The server cannot know of the validator, so the client sends its error and tries again.
    even = client.create(response_model=EvenReport, max_retries=20, **common)
    assert even.days[0].degrees % 2 == 0, even


def check_streams(client: instructor.Instructor, **fields: object) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "max_retries": 0, **fields}
    partial = list(client.create_partial(response_model=Report, **common))
    assert len(partial) > 2, f"not a stream: {partial}"
    assert Report.model_validate(partial[-1].model_dump()), partial[-1]


async def check_async() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as own:
        client = instructor.from_openai(own, mode=Mode.JSON_SCHEMA)
        reports = await asyncio.gather(
            *(
                client.create(model=MODEL, messages=MESSAGES, response_model=Report, seed=seed)
                for seed in range(8)
            )
        )
        assert all(isinstance(report, Report) for report in reports), reports


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as own:
        for mode in MODES:
            check_models(instructor.from_openai(own, mode=mode))
        check_streams(instructor.from_openai(own, mode=Mode.TOOLS))
        check_streams(instructor.from_openai(own, mode=Mode.JSON_SCHEMA))
    with Anthropic(base_url=URL, api_key=KEY, timeout=60, max_retries=0) as own:
        check_models(instructor.from_anthropic(own, mode=Mode.ANTHROPIC_TOOLS), max_tokens=2000)
    asyncio.run(check_async())


if __name__ == "__main__":
    main()
