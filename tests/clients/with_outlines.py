"""outlines: models, types, patterns, choices and grammars; as OpenAI's and as vLLM's server."""

# /// script
# dependencies = ["outlines==1.3.3", "openai==3.57.0"]
# ///

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Literal

import outlines
import pydantic
from expected import KEY, MODEL, URL, chat, greedy
from openai import AsyncOpenAI, OpenAI

PROMPT = "Is it warm in Rome?"
PATTERN = r"[a-c]{2,5}-[0-9]{3}"
# A language that is not regular: as many brackets close as open.
BRACKETS = 'start: "x" | "(" start ")"'


class Report(pydantic.BaseModel):
    """What answers are parsed into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: list[int] = pydantic.Field(min_length=1, max_length=3)


def check_shapes(ask: Callable[..., str]) -> None:
    """Check structures that both protocols have."""
    known = greedy(chat(("user", PROMPT)), 24)
    assert ask(PROMPT, max_tokens=24, temperature=0) == known.text
    assert Report.model_validate_json(ask(PROMPT, Report)).days


def check_vllm_shapes(ask: Callable[..., str]) -> None:
    """Check structures that only vLLM's field `structured_outputs` has."""
    assert re.fullmatch(PATTERN, ask(PROMPT, outlines.regex(PATTERN)))
    assert ask(PROMPT, Literal["yes", "no"]) in ("yes", "no")
    assert int(ask(PROMPT, int, max_tokens=20)) is not None
    text = ask(PROMPT, outlines.cfg(BRACKETS), max_tokens=400)
    assert re.fullmatch(r"(\(*)x(\)*)", text) and text.count("(") == text.count(")"), text


def check_stream(model: Any) -> None:
    texts = list(model.stream(PROMPT, Report, seed=1))
    assert Report.model_validate_json("".join(texts)).days
    assert len(texts) > 2, f"not a stream: {texts}"


async def check_async() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        model = outlines.from_vllm(client, MODEL)
        answers = await asyncio.gather(*(model(PROMPT, Report, seed=seed) for seed in range(8)))
        assert all(Report.model_validate_json(answer) for answer in answers), answers


def main() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        for model in (outlines.from_openai(client, MODEL), outlines.from_vllm(client, MODEL)):
            check_shapes(model)
            check_stream(model)
        check_vllm_shapes(outlines.from_vllm(client, MODEL))
    asyncio.run(check_async())


if __name__ == "__main__":
    main()
