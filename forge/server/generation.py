"""Engine requests of one HTTP request: admitted, read and aborted together.

Owns what happens when the client leaves or the engine fails. Knows no JSON.

    receive() ─ disconnect ──┐
                             ├─ the first of them ─► a response, or every request is aborted
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
from forge.engine_checks import MAX_LOGPROB_ENTRIES, count_logprobs
from forge.errors import EngineClosed, EngineDead, InvalidRequest
from forge.llm import PromptFields
from forge.outputs import RequestOutput, TextDelta
from forge.request import Request, SamplingParams
from forge.sequence import STRUCTURE_ERROR_PREFIX
from forge.server.admission import AdmissionQueue
from forge.server.choice_end import find_violation
from forge.server.errors import (
    APIError,
    ClientDisconnected,
    engine_dead_error,
    request_failed_error,
    shutting_down_error,
    structure_too_complex_error,
)
from forge.server.protocol import NamedPrompt, SamplingRequest
from forge.server.request_head import RequestHead
from forge.server.tenants import tenant_salt
from forge.server.time_slicing import (
    TOKENS_PER_SLICE,
    JSONPartsResponse,
    SliceBudget,
    SlicedWork,
    encode_json,
    run_in_slices,
)

THREAD_MIN_LENGTH = 32768
"""Characters or ids of all prompts above which they are tokenized in a thread."""

LOG = logging.getLogger("forge.server")

T = TypeVar("T")


async def build_requests(
    queue: AdmissionQueue,
    request_body: SamplingRequest,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    head: RequestHead,
) -> list[Request]:
    """Return a request that the engine can serve for each prompt; all are turns of one session.

    Raises InvalidRequest or APIError.
    """
    # A cheap check before the costly ones; `run_requests` checks again.
    queue.check_capacity(len(prompts))
    with request_body.relabel_structure_error():
        await queue.check_structure(params)
    fields: PromptFields = {
        **request_body.encoding,
        "begins_text": request_body.begins_text,
        "priority": request_body.priority or 0,
        "cache_salt": tenant_salt(head.tenant, request_body.cache_salt or ""),
        "arrival_s": asyncio.get_running_loop().time(),
        "tenant": head.tenant,
        "session_id": head.session_id_with(request_body),
        "session_end": bool(request_body.session_end),
        "expected_pause_s": request_body.expected_pause_s,
        "return_timings": request_body.is_timed or head.is_traced,
        "external_id": head.request_id,
    }

    def build() -> list[Request]:
        return [_build_request(queue.llm, prompt, params, fields) for prompt in prompts]

    requests = await run_in_thread_if_long(prompts, build)
    check_logprobs(queue.llm, requests)
    return requests


def check_logprobs(llm: AsyncLLM, requests: Sequence[Request]) -> None:
    """Raise InvalidRequest where one response has too many log probabilities."""
    for name in ("logprobs", "prompt_logprobs"):
        total = _num_many_logprobs(llm, requests, name)
        if total > MAX_LOGPROB_ENTRIES:
            raise InvalidRequest(
                name,
                f"{total} for all prompts and choices are more than {MAX_LOGPROB_ENTRIES}",
                "Send fewer prompts at a time, or request fewer choices or log probabilities",
            )


def _num_many_logprobs(llm: AsyncLLM, requests: Sequence[Request], name: str) -> int:
    """Return how many log probabilities one response has where each token has many.

    It has those of a prompt in each choice.
    """
    engine = llm.engine
    max_model_len, vocab_size = engine.config.max_model_len, engine.model.vocab_size()
    total = 0
    for request in requests:
        num_many = count_logprobs(name, request, max_model_len, vocab_size).num_many
        total += num_many * (request.params.n if name == "prompt_logprobs" else 1)
    return total


async def run_in_thread_if_long(prompts: Sequence[NamedPrompt], work: Callable[[], T]) -> T:
    """Return the result of `work` on the prompts; run it in a thread where they are long."""
    if sum(len(prompt.content) for prompt in prompts) > THREAD_MIN_LENGTH:
        return await asyncio.to_thread(work)
    return work()


def _build_request(
    llm: AsyncLLM, prompt: NamedPrompt, params: SamplingParams, fields: PromptFields
) -> Request:
    try:
        return llm.create_request(prompt.content, params, **fields)
    except InvalidRequest as error:
        if error.field != "prompt":
            raise
        raise InvalidRequest(prompt.param, error.problem, error.remedy, error.code) from None


async def run_requests(
    queue: AdmissionQueue,
    requests: Sequence[Request],
    on_delta: Callable[[int, TextDelta], Awaitable[None]],
    http_request_id: str,
) -> None:
    """Await `on_delta` with each delta of every request, and with the index of the request.

    Deltas of several requests come interleaved. Raises APIError where no more requests may wait,
    when one takes too long and when the engine fails on one. An error or a cancellation aborts all
    requests. `http_request_id` identifies the HTTP request in the log.
    """
    async with queue.enter(len(requests)) as on_first_token:

        async def read_deltas(index: int) -> None:
            is_first = True
            async with aclosing(queue.llm.stream_request(requests[index])) as deltas:
                async for delta in deltas:
                    if _is_failure(queue.llm, delta):
                        raise _delta_error(queue.llm, delta, http_request_id)
                    if is_first:
                        is_first = False
                        on_first_token()
                    await on_delta(index, delta)

        try:
            if len(requests) == 1:
                await read_deltas(0)
                return
            async with asyncio.TaskGroup() as readers:
                for index in range(len(requests)):
                    readers.create_task(read_deltas(index))
        except EngineDead as error:
            raise _engine_error(error, http_request_id) from None
        except ExceptionGroup as group:
            first_error = group.exceptions[0]
            raise (
                _engine_error(first_error, http_request_id)
                if isinstance(first_error, EngineDead)
                else first_error
            ) from None


def _engine_error(exc: EngineDead, http_request_id: str) -> APIError:
    if isinstance(exc, EngineClosed):
        return shutting_down_error()
    LOG.error("request %s failed: %s", http_request_id, exc)
    return engine_dead_error()


def _is_failure(llm: AsyncLLM, delta: TextDelta) -> bool:
    """Return whether the delta ends its request without a result.

    An abort by a running engine is that of a pause, and the tokens so far are the result. A choice
    that violates its schema is complete, and ends alone.
    """
    if delta.finish_reason == "abort":
        return llm.failure is not None
    return delta.finish_reason == "error" and find_violation(delta) is None


def _delta_error(llm: AsyncLLM, delta: TextDelta, http_request_id: str) -> APIError:
    if delta.finish_reason == "abort":
        return shutting_down_error()
    if (delta.error or "").startswith(f"{STRUCTURE_ERROR_PREFIX}: "):
        return structure_too_complex_error()
    LOG.error("request %s failed: %s", http_request_id, delta.error)
    return request_failed_error() if llm.failure is None else engine_dead_error()


async def generate_outputs(
    queue: AdmissionQueue, requests: Sequence[Request], http_request_id: str
) -> list[RequestOutput]:
    """Return the whole output of every request. Raises APIError."""
    outputs, budget = list[RequestOutput](), SliceBudget()
    for request in requests:
        outputs.append(RequestOutput.empty(request))
        await budget.spend(len(request.prompt) // TOKENS_PER_SLICE)

    async def add_delta(index: int, delta: TextDelta) -> None:
        outputs[index].append(delta)

    await run_requests(queue, requests, add_delta, http_request_id)
    return outputs


def count_many_logprobs(llm: AsyncLLM, requests: Sequence[Request]) -> int:
    """Return how many log probabilities one response has, of prompts and choices.

    Only where each token has many.
    """
    return sum(_num_many_logprobs(llm, requests, name) for name in ("logprobs", "prompt_logprobs"))


async def create_response(
    queue: AdmissionQueue,
    requests: Sequence[Request],
    http_request_id: str,
    build_body: Callable[[Sequence[RequestOutput]], SlicedWork[dict[str, Any]]],
) -> Response:
    """Return the response whose body `build_body` makes of the outputs. Raises APIError.

    Also where the responses in progress have too many log probabilities.
    """
    count = count_many_logprobs(queue.llm, requests)
    with queue.admit_logprobs(count):
        outputs = await generate_outputs(queue, requests, http_request_id)
        parts = await run_in_slices(encode_json(build_body(outputs)))
        return JSONPartsResponse(parts, queue.count_logprobs_in_progress(count))


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnected if the client leaves.

    The body must have been read, so that `receive` can only report the disconnect.
    """
    work_task = asyncio.create_task(work)
    disconnect_task = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnected
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        # Wait until the work has released its resources.
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
