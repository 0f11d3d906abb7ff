"""AsyncLLM: the engine under asyncio, in a thread or in a separate process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from forge.async_llm import AsyncLLM
from forge.engine_thread import EngineThread
from forge.errors import EngineDead, InvalidConfig, InvalidRequest
from forge.llm import LLM
from forge.outputs import RequestOutput, TextDelta
from forge.request import Request, SamplingParams
from tests.server.local_server import GatedModel

Result = TypeVar("Result")

TIMEOUT_S = 60.0
LONG = SamplingParams(max_tokens=8000, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
SLOW = "hash:step_ms=1"
"""Steps this long let the event loop run between them."""


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine on a new loop; fail if it takes too long."""
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def wait_until_async(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happens"
        await asyncio.sleep(0.002)


LLMFactory = Callable[..., AbstractContextManager[AsyncLLM]]


@pytest.fixture(
    params=[AsyncLLM, pytest.param(AsyncLLM.spawn, marks=pytest.mark.long)],
    ids=["thread", "process"],
)
def open_llm(request: pytest.FixtureRequest) -> LLMFactory:
    """Return a factory of AsyncLLMs, once with engines in a thread and once in a process."""

    @contextmanager
    def open_one(model: str = "hash", **options: Any) -> Iterator[AsyncLLM]:
        llm = request.param(model, **options)
        try:
            yield llm
        finally:
            llm.close()

    return open_one


def is_idle(llm: AsyncLLM) -> bool:
    """Return whether no sequence runs or waits, no block is held and no mailbox is open."""
    status = llm.status
    return not (status.has_work or status.num_running or status.num_used_blocks or llm._mailboxes)


def generate_sync(prompt: str, params: SamplingParams) -> RequestOutput:
    """Return the output of the same request without threads."""
    (output,) = LLM("hash").generate(prompt, params)
    return output


async def read_stream(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[TextDelta]:
    return [delta async for delta in llm.stream(prompt, params)]


BLOCKING_POLICY = """
import os, time
from forge.policy import FCFS, first_in_queue
def admit(waiting, context):
    open({file!r} + " is awaited", "w").close()
    limit_s = time.monotonic() + 90
    while not os.path.exists({file!r}):
        assert time.monotonic() < limit_s, "the test did not release it"
        time.sleep(0.005)
    return first_in_queue(waiting, context)
policy = FCFS._replace(admit=admit)
"""


class BlockingPolicy:
    """A policy that blocks the engine at its first request until `release`."""

    def __init__(self, folder: Path) -> None:
        self._sign = folder / "go"
        policy = folder / "held.py"
        policy.write_text(BLOCKING_POLICY.format(file=str(self._sign)))
        self.policy = str(policy)

    def is_blocked(self) -> bool:
        """Return whether the engine is blocked."""
        return Path(f"{self._sign} is awaited").exists()

    def release(self) -> None:
        """Let the engine continue."""
        self._sign.touch()


# Results.


def test_generate_gives_what_llm_gives(open_llm: LLMFactory) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=30, logprobs=1, prompt_logprobs=0)
    with open_llm() as llm:
        assert run(llm.generate("abc", params)) == generate_sync("abc", params)


def test_a_stream_joins_to_what_generate_gives(open_llm: LLMFactory) -> None:
    params = SamplingParams(seed=0, max_tokens=41, allowed_token_ids=[0xC4, 0xAA], stop="éé")
    with open_llm() as llm:
        deltas = run(read_stream(llm, "abc", params))
    whole = generate_sync("abc", params)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason]
    assert deltas[-1].finish_reason is not None


def test_many_streams_share_steps_and_each_gets_its_own_text(
    tmp_path: Path, open_llm: LLMFactory
) -> None:
    prompts = [f"prompt {i}" for i in range(32)]
    held = BlockingPolicy(tmp_path)

    async def all_of_them(llm: AsyncLLM) -> list[RequestOutput]:
        tasks = [asyncio.create_task(llm.generate(prompt, SHORT)) for prompt in prompts]
        await wait_until_async(lambda: len(llm._mailboxes) == len(prompts))
        held.release()
        return await asyncio.gather(*tasks)

    with open_llm(SLOW, policy=held.policy) as llm:
        outputs = run(all_of_them(llm))
        steps = llm.status.num_steps
    assert [output.text for output in outputs] == [generate_sync(p, SHORT).text for p in prompts]
    assert steps <= 32 * 12 / 4


def test_deltas_that_waited_for_their_reader_come_together(open_llm: LLMFactory) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)

    async def slow_reader(llm: AsyncLLM) -> list[TextDelta]:
        async with aclosing(llm.stream("abc", params)) as stream:
            deltas = [await anext(stream)]
            await wait_until_async(lambda: is_idle(llm))
            return deltas + [delta async for delta in stream]

    with open_llm() as llm:
        deltas = run(slow_reader(llm))
    assert len(deltas) <= 3, "one before the wait, what waited, and at most one that came late"
    assert "".join(delta.text for delta in deltas) == generate_sync("abc", params).text
    assert sum(len(delta.token_ids) for delta in deltas) == 200


def test_choices_that_end_in_one_step_each_get_their_end(open_llm: LLMFactory) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=30)
    sync = LLM("hash")
    sync.engine.submit(Request(0, (105, 102, 109, 109, 112), params))
    endings = []
    while sync.engine.has_work:
        endings.append(sum(delta.finish is not None for delta in sync.engine.step()))
    assert max(endings) > 1, "this seed shows nothing: take another"
    with open_llm() as llm:
        output = run(llm.generate("hello", params))
        assert None not in [choice.finish_reason for choice in output.choices]


def test_a_request_keeps_the_fields_that_a_server_sets(open_llm: LLMFactory) -> None:
    with open_llm() as llm:
        request = llm.create_request("ab", SHORT, priority=-2, cache_salt="mine", arrival_s=1.5)
        assert request == Request(0, (98, 99), SHORT, -2, "mine", 1.5)
        assert llm.create_request("ab").id == 1


def test_a_bad_request_is_refused_where_it_is_made(open_llm: LLMFactory) -> None:
    async def ask(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest, match=r"^prompt: it is empty"):
            llm.stream("")
        with pytest.raises(InvalidRequest, match=r"^prompt: "):
            llm.stream(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"^max_tokens: "):
            await llm.generate("abc", SamplingParams(max_tokens=9000))

    with open_llm() as llm:
        run(ask(llm))
        assert is_idle(llm) and llm.status.num_steps == 0


def test_a_bad_option_is_refused_before_a_thread_starts() -> None:
    with pytest.raises(InvalidConfig, match=r"^depth: "):
        AsyncLLM("hash", depth=3)


# Readers that leave.


@pytest.mark.parametrize("depth", [1, 2])
def test_closing_an_iterator_early_aborts_its_request(depth: int, open_llm: LLMFactory) -> None:
    async def leave(llm: AsyncLLM) -> None:
        async with aclosing(llm.stream("a long prompt " * 10, LONG)) as stream:
            assert (await anext(stream)).token_ids
            assert llm.status.num_used_blocks > 0
        await wait_until_async(lambda: is_idle(llm))
        assert llm.status.num_steps < 8000

    with open_llm(SLOW, depth=depth) as llm:
        run(leave(llm))


def test_an_aborted_request_ends_with_its_text_so_far(open_llm: LLMFactory) -> None:
    async def abort(llm: AsyncLLM) -> None:
        request = llm.create_request("abc", LONG)
        output = RequestOutput.empty(request)
        async for delta in llm.stream_request(request):
            output.append(delta)
            llm.abort(request)
        assert output.finish_reason == "abort" and output.token_ids
        await wait_until_async(lambda: is_idle(llm))
        assert llm.status.num_steps < 8000 and llm.num_open_requests == 0
        llm.abort(request)  # it has ended: nothing happens
        assert (await llm.generate("abc", SHORT)).finish_reason == "length"

    with open_llm(SLOW) as llm:
        run(abort(llm))


def test_an_iterator_that_is_never_read_takes_nothing(open_llm: LLMFactory) -> None:
    async def ask(llm: AsyncLLM) -> None:
        stream = llm.stream("abc", LONG)
        await stream.aclose()
        await llm.generate("abc", SHORT)

    with open_llm() as llm:
        run(ask(llm))
        assert llm.status.num_steps == 12
        assert is_idle(llm)


def test_cancelling_generate_aborts_its_request(open_llm: LLMFactory) -> None:
    async def cancel(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate("abc", LONG))
        await wait_until_async(lambda: llm.status.num_steps > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_async(lambda: is_idle(llm))
        assert llm.status.num_steps < 8000

    with open_llm(SLOW) as llm:
        run(cancel(llm))


def test_one_reader_that_leaves_does_not_disturb_another(open_llm: LLMFactory) -> None:
    async def both(llm: AsyncLLM) -> RequestOutput:
        stays = asyncio.create_task(llm.generate("stays", SHORT))
        async with aclosing(llm.stream("leaves", LONG)) as stream:
            await anext(stream)
        return await stays

    with open_llm(SLOW) as llm:
        assert run(both(llm)).text == generate_sync("stays", SHORT).text


# Event loops.


def test_one_engine_serves_one_event_loop_after_another(open_llm: LLMFactory) -> None:
    with open_llm() as llm:
        first = run(llm.generate("abc", SHORT))
        second = run(llm.generate("abc", SHORT))
    assert first == second == generate_sync("abc", SHORT)


def test_a_loop_closed_under_an_open_stream_does_not_end_the_engine(open_llm: LLMFactory) -> None:
    with open_llm(SLOW) as llm:
        loop = asyncio.new_event_loop()
        stream = llm.stream("abc", LONG)
        loop.run_until_complete(anext(stream))
        loop.close()

        async def after() -> str:
            await wait_until_async(lambda: is_idle(llm))
            return (await llm.generate("abc", SHORT)).text

        assert run(after()) == generate_sync("abc", SHORT).text
        assert llm.failure is None


# The end of the engine.

FAILING_POLICY = """
from forge.policy import FCFS
def admit(waiting, context):
    if any(len(candidate.request.prompt) == 13 for candidate in waiting):
        raise {fault}
    return waiting[0]
policy = FCFS._replace(admit=admit)
"""


@pytest.mark.parametrize("fault", ["RuntimeError('poison')", "SystemExit('poison')"])
def test_when_the_engine_dies_every_open_stream_gets_the_reason(
    tmp_path: Path, fault: str, open_llm: LLMFactory
) -> None:
    file = tmp_path / "poison.py"
    file.write_text(FAILING_POLICY.format(fault=fault))
    twice = SamplingParams(n=2, max_tokens=8000, ignore_eos=True)

    async def die(llm: AsyncLLM) -> list[list[TextDelta]]:
        tasks = [asyncio.create_task(read_stream(llm, "abc", params)) for params in (LONG, twice)]
        await wait_until_async(lambda: llm.status.num_running == 3)
        tasks.append(asyncio.create_task(read_stream(llm, "x" * 13, LONG)))
        streams = await asyncio.gather(*tasks)
        with pytest.raises(EngineDead, match=r"poison.*Start it again$"):
            await llm.generate("abc", SHORT)
        return streams

    with open_llm(SLOW, policy=str(file)) as llm:
        streams = run(die(llm))
        assert llm.failure is not None and "poison" in llm.failure
    endings = [Counter(d.finish_reason for d in deltas if d.finish_reason) for deltas in streams]
    assert endings == [{"error": 1}, {"error": 2}, {"error": 1}]
    for deltas in streams:
        assert deltas[-1].error is not None and deltas[-1].error.startswith("the engine has ended")


def test_an_output_that_ended_in_an_error_has_the_error(
    tmp_path: Path, open_llm: LLMFactory
) -> None:
    file = tmp_path / "poison.py"
    file.write_text(FAILING_POLICY.format(fault="RuntimeError('poison')"))
    with open_llm(policy=str(file)) as llm:
        output = run(llm.generate("x" * 13, SHORT))
    assert (output.finish_reason, output.text) == ("error", "")
    assert "poison" in (output.choices[0].error or "")


def test_close_ends_open_streams_as_aborted(open_llm: LLMFactory) -> None:
    async def close(llm: AsyncLLM) -> list[list[TextDelta]]:
        tasks = [asyncio.create_task(read_stream(llm, prompt, LONG)) for prompt in ("abc", "xyz")]
        await wait_until_async(lambda: llm.status.num_running == 2)
        steps = llm.status.num_steps
        await wait_until_async(lambda: llm.status.num_steps > steps + 4)
        await asyncio.to_thread(llm.close)
        return await asyncio.gather(*tasks)

    with open_llm(SLOW) as llm:
        streams = run(close(llm))
        assert llm.failure == "it was closed"
    for deltas in streams:
        assert sum(len(delta.token_ids) for delta in deltas) > 3
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("abort", None)
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_close_does_not_wait_for_a_model_that_hangs(tmp_path: Path, open_llm: LLMFactory) -> None:
    """Its streams end like all others, and a waiting reset gets the end of the engine."""
    held = BlockingPolicy(tmp_path)

    async def close(llm: AsyncLLM) -> list[list[TextDelta]]:
        tasks = [asyncio.create_task(read_stream(llm, prompt, LONG)) for prompt in ("abc", "xyz")]
        await wait_until_async(held.is_blocked)
        reset = asyncio.create_task(llm.reset_prefix_cache())
        await wait_until_async(lambda: len(llm._mailboxes) == 3)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead, match="it was closed"):
            await reset
        return await asyncio.gather(*tasks)

    with open_llm(policy=held.policy) as llm:
        llm._host._stop_timeout_s = 0.1  # type: ignore[attr-defined]
        try:
            streams = run(close(llm))
            llm.close()
            assert llm.failure == "it was closed"
        finally:
            held.release()
    for deltas in streams:
        assert [(d.token_ids, d.finish_reason, d.error) for d in deltas] == [((), "abort", None)]


def test_streams_of_an_engine_that_hangs_end_before_it_does(
    tmp_path: Path, open_llm: LLMFactory
) -> None:
    held = BlockingPolicy(tmp_path)

    async def end(llm: AsyncLLM) -> list[TextDelta]:
        reading = asyncio.create_task(read_stream(llm, "abc", LONG))
        await wait_until_async(held.is_blocked)
        llm.abort_all()
        with pytest.raises(EngineDead, match="the engine has ended: it was closed"):
            await llm.generate("abc", SHORT)
        return await reading

    with open_llm(policy=held.policy) as llm:
        try:
            (last,) = run(end(llm))
        finally:
            held.release()
    assert (last.token_ids, last.finish_reason, last.error) == ((), "abort", None)
    assert llm.failure == "it was closed"


def test_a_model_that_hung_is_closed_by_its_thread_once_it_returns(tmp_path: Path) -> None:
    held = BlockingPolicy(tmp_path)
    llm = AsyncLLM("hash", policy=held.policy)
    closed: list[str] = []

    async def close() -> None:
        reading = asyncio.create_task(read_stream(llm, "abc", LONG))
        await wait_until_async(held.is_blocked)
        await asyncio.to_thread(llm.close)
        assert closed == []
        held.release()
        await wait_until_async(lambda: bool(closed))
        await reading

    assert isinstance(llm._host, EngineThread)
    llm._host._exit_stack.callback(lambda: closed.append(threading.current_thread().name))
    llm._host._stop_timeout_s = 0.1
    run(close())
    llm.close()
    assert closed == ["forge-engine"] and llm.failure == "it was closed"


def test_leaving_a_stream_after_the_end_is_no_error(open_llm: LLMFactory) -> None:
    async def leave(llm: AsyncLLM) -> None:
        async with aclosing(llm.stream("abc", LONG)) as stream:
            await anext(stream)
            llm.close()

    with open_llm(SLOW) as llm:
        run(leave(llm))
        assert llm.failure == "it was closed" and not llm._mailboxes


def test_after_close_requests_are_refused_and_closing_again_changes_nothing() -> None:
    async def ask() -> None:
        async with AsyncLLM("hash") as llm:
            await llm.generate("abc", SHORT)
        with pytest.raises(EngineDead, match="the engine has ended: it was closed"):
            await llm.generate("abc", SHORT)
        llm.close()

    run(ask())


def test_a_second_reader_of_a_request_takes_nothing_from_the_first() -> None:
    """The second reader is refused; that it then leaves does not abort the first one's request."""

    async def read() -> tuple[str | None, str | None]:
        async with AsyncLLM("hash", num_blocks=64, block_size=4, max_model_len=128) as llm:
            llm.engine.model = model = GatedModel(num_blocks=64, block_size=4)
            with model.open_at_exit():
                request = llm.create_request("abc", SamplingParams(max_tokens=40, ignore_eos=True))
                first = llm.stream_request(request)
                model.permits.release()
                first_delta = await anext(first)
                second = llm.stream_request(request)
                refused_delta = await anext(second)
                await second.aclose()
            assert first_delta.finish_reason is None
            reasons = [delta.finish_reason async for delta in first]
            return refused_delta.finish_reason, reasons[-1]

    assert run(read()) == ("error", "length")
