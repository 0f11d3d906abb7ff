"""Requests of one HTTP call on the engine: admitted together, read together, aborted together.

Owns what happens when the client leaves or the engine fails. Knows no JSON.

    receive() ─ disconnect ──┐
                             ├─ whichever is first ─► answered, or every request is aborted
    deltas of each prompt ───┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Receive

from forge.async_llm import AsyncLLM
from forge.errors import EngineDead, InvalidRequest
from forge.llm import ChoiceOutput, RequestOutput, TextDelta
from forge.request import Request
from forge.server.openai import Asked, NamedPrompt
from forge.server.refusal import (
    ClientGone,
    Refused,
    engine_dead,
    engine_fault,
    shutting_down,
)

ASIDE_LENGTH = 32768
"""Prompts longer than this, in all, are tokenized in a thread: the event loop serves others."""

LOG = logging.getLogger("forge.server")

T = TypeVar("T")
Take = Callable[[int, TextDelta], Awaitable[None]]


async def admit(llm: AsyncLLM, asked: Asked) -> list[Request]:
    """One request per prompt that the engine will take. Raises InvalidRequest."""
    prompts = asked.prompts()
    params = asked.sampling_params()
    arrival_s = asyncio.get_running_loop().time()

    def made() -> list[Request]:
        return [_request(llm, asked, params_of, prompt, arrival_s) for prompt in prompts]

    params_of = params
    if sum(len(prompt.content) for prompt in prompts) > ASIDE_LENGTH:
        return await asyncio.to_thread(made)
    return made()
