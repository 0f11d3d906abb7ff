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
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive

from forge.async_llm import AsyncLLM
from forge.errors import EngineClosed, EngineDead, InvalidRequest
from forge.llm import RequestOutput, TextDelta
from forge.request import Request, SamplingParams
from forge.sequence import BY_STRUCTURE
from forge.server.fields import Asked, NamedPrompt
from forge.server.line import Line
from forge.server.refusal import (
    ClientGone,
    Refused,
    engine_dead,
    engine_fault,
    shutting_down,
    structure_too_complex,
)
from forge.server.slices import TOKENS, Pace, PartsResponse, Slices, encoded, in_slices

ASIDE_LENGTH = 32768
"""Prompts longer than this, in all, are tokenized in a thread: the event loop serves others."""

LOG = logging.getLogger("forge.server")

T = TypeVar("T")


async def admit(
    line: Line, asked: Asked, prompts: Sequence[NamedPrompt], params: SamplingParams
) -> list[Request]:
    """One request per prompt, which the engine will take. Raises InvalidRequest, or Refused."""
    line.check(len(prompts))  # before they cost anything; `run` has the last word
    with asked.named():
        await line.prepare(params)
    arrival_s = asyncio.get_running_loop().time()

    def made() -> list[Request]:
        return [_request(line.llm, asked, prompt, params, arrival_s) for prompt in prompts]

    return await aside(prompts, made)


async def aside(prompts: Sequence[NamedPrompt], work: Callable[[], T]) -> T:
    """Return what the work on the prompts returns: in a thread where they are long."""
    if sum(len(prompt.content) for prompt in prompts) > ASIDE_LENGTH:
        return await asyncio.to_thread(work)
    return work()


def _request(
    llm: AsyncLLM, asked: Asked, prompt: NamedPrompt, params: SamplingParams, arrival_s: float
) -> Request:
    try:
        return llm.request(
            prompt.content,
            params,
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt or "",
            arrival_s=arrival_s,
        )
    except InvalidRequest as fault:
        if fault.field != "prompt":
            raise
        raise InvalidRequest(prompt.param, fault.problem, fault.remedy, fault.code) from None


async def run(
    line: Line,
    requests: Sequence[Request],
    take: Callable[[int, TextDelta], Awaitable[None]],
    label: str,
) -> None:
    """`take` has had every delta of every request, each with the request's place.

    Deltas of several requests come interleaved. Raises Refused where no more may wait, when one of
    them takes too long or when the engine gave up on one, and aborts the others, as does
    cancelling. `label` names the call in the log.
    """
    async with line.joined(len(requests)) as begun:

        async def read(place: int) -> None:
            waits = True
            async with aclosing(line.llm.deltas(requests[place])) as deltas:
                async for delta in deltas:
                    if delta.finish_reason in ("abort", "error"):
                        raise _failure(line.llm, delta, label)
                    if waits:
                        waits = False
                        begun()
                    await take(place, delta)

        try:
            if len(requests) == 1:
                await read(0)
                return
            async with asyncio.TaskGroup() as readers:
                for place in range(len(requests)):
                    readers.create_task(read(place))
        except EngineDead as dead:
            raise _dead(dead, label) from None
        except ExceptionGroup as faults:
            first = faults.exceptions[0]
            raise (_dead(first, label) if isinstance(first, EngineDead) else first) from None


def _dead(fault: EngineDead, label: str) -> Refused:
    if isinstance(fault, EngineClosed):
        return shutting_down()
    LOG.error("request %s failed: %s", label, fault)
    return engine_dead()


def _failure(llm: AsyncLLM, delta: TextDelta, label: str) -> Refused:
    if delta.finish_reason == "abort":
        return shutting_down()
    if (delta.error or "").startswith(f"{BY_STRUCTURE}: "):
        return structure_too_complex()
    LOG.error("request %s failed: %s", label, delta.error)
    return engine_fault() if llm.failure is None else engine_dead()


async def outputs_of(line: Line, requests: Sequence[Request], label: str) -> list[RequestOutput]:
    """The whole output of every request. Raises Refused."""
    outputs, pace = list[RequestOutput](), Pace()
    for request in requests:
        outputs.append(RequestOutput.begun(request))
        await pace.spend(len(request.prompt) // TOKENS)

    async def take(place: int, delta: TextDelta) -> None:
        outputs[place].gain(delta)

    await run(line, requests, take, label)
    return outputs


async def answer_of(
    line: Line,
    requests: Sequence[Request],
    label: str,
    body: Callable[[Sequence[RequestOutput]], Slices[dict[str, Any]]],
) -> Response:
    """The answer that `body` makes of the whole outputs. Raises Refused."""
    outputs = await outputs_of(line, requests, label)
    return PartsResponse(await in_slices(encoded(body(outputs))))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Raises ClientGone, with `work` ended, if the client leaves.

    The body has been read, so all that `receive` has left to say is the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        # The work has given back what it held before anyone goes on.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
