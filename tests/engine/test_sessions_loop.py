"""Sessions outside the core: timers of the engine loop, ends by command, and sessions in Python."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from forge.async_llm import AsyncLLM
from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_loop import EngineLoop
from forge.engine_messages import Abort, Command, EndSession, StepReport
from forge.errors import EngineDead, InvalidRequest
from forge.llm import LLM
from forge.models.hash import HashModel
from forge.policy import FCFS, Candidate, Policy, PolicyContext
from forge.request import Request, SamplingParams
from forge.sessions import SessionKey
from tests.virtual_time import VirtualTime

TIMEOUT_S = 60.0
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
PROMPT = "a context of more than one block"


def turn(id: int, session: str = "a", pause_s: float | None = None, tenant: str = "") -> Request:
    prompt = tuple(range(1, 10 + id))
    return Request(id, prompt, PARAMS, session_id=session, expected_pause_s=pause_s, tenant=tenant)


def admit_after_pause(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Admit the turns of sessions; all other requests wait while a session is paused."""
    turns = [each for each in waiting if each.session is not None]
    if turns or not any(session.is_paused for session in context.sessions.values()):
        return (turns or waiting)[0]
    return None


WAITS_FOR_PAUSED = FCFS._replace(admit=admit_after_pause)


def create_engine(policy: Policy = FCFS, ttl_s: float = 120.0) -> Engine:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256, session_ttl_s=ttl_s)
    return Engine(HashModel(num_blocks=64, block_size=4), config, policy=policy)


class Script:
    """A loop that runs on this thread, and what is done after which of its reports.

    reports   those so far; the loop ends after the last event
    """

    def __init__(self, engine: Engine) -> None:
        self.reports: list[StepReport] = []
        self._loop = EngineLoop(engine, self._on_report)
        self._events: list[tuple[Callable[[StepReport], bool], float, Sequence[Command]]] = []
        self._time: VirtualTime | None = None

    def when(
        self, condition: Callable[[StepReport], bool], *commands: Command, sleep_s: float = 0.0
    ) -> None:
        """After the next report that meets the condition, let time pass and post commands."""
        self._events.append((condition, sleep_s, commands))

    def run(self, virtual_time: VirtualTime, *commands: Command) -> StepReport:
        """Post commands, run until all events have happened, and return the last report."""
        self._time = virtual_time
        for command in commands:
            self._loop.post(command)
        self._loop.run()
        return self.reports[-1]

    def _on_report(self, report: StepReport) -> None:
        self.reports.append(report)
        assert len(self.reports) < 100, "the script does not go on"
        if self._events and self._events[0][0](report):
            _, sleep_s, commands = self._events.pop(0)
            assert self._time is not None
            self._time.sleep(sleep_s)
            for command in commands:
                self._loop.post(command)
        if not self._events:
            self._loop.stop()


def is_paused(report: StepReport) -> bool:
    return report.status.num_paused_sessions == 1 and not report.status.has_work


def has_no_session(report: StepReport) -> bool:
    return report.status.num_sessions == 0


def has_no_work(report: StepReport) -> bool:
    return not report.status.has_work


def waits_for_session(report: StepReport) -> bool:
    return report.status.has_work and not report.status.can_step


WAKE = Abort(99)
"""A command that changes nothing."""


# Timers.


@pytest.mark.parametrize(("pause_s", "ttl_s"), [(None, 120.0), (3.0, 11.0), (500.0, 120.0)])
def test_a_paused_session_expires_when_its_pause_is_over(
    virtual_time: VirtualTime, pause_s: float | None, ttl_s: float
) -> None:
    """The first timer is early, and a command wakes the loop. The second is due, without one."""
    script = Script(create_engine())
    script.when(is_paused, WAKE, sleep_s=ttl_s - 0.5)
    script.when(is_paused, sleep_s=1.0)
    script.when(has_no_session)
    report = script.run(virtual_time, turn(0, pause_s=pause_s))
    assert report.status.num_cached_blocks == 2, "the blocks of a session that expires stay"
    assert not report.deltas


def test_a_turn_in_time_keeps_its_session_and_a_late_timer_changes_nothing(
    virtual_time: VirtualTime,
) -> None:
    """The second turn arrives when the timer is due, and pauses with a timer of its own."""
    script = Script(create_engine())
    script.when(is_paused, turn(1), sleep_s=120.0)
    script.when(is_paused, WAKE, sleep_s=119.0)
    script.when(is_paused, sleep_s=1.0)
    script.when(has_no_session)
    report = script.run(virtual_time, turn(0))
    assert report.status.num_resumed_tokens == 8
    assert sum(bool(each.deltas) for each in script.reports) == 6


def test_an_idle_engine_ends_sessions_without_any_command() -> None:
    found = threading.Event()
    engine = create_engine(ttl_s=0.01)

    def on_report(report: StepReport) -> None:
        if not report.status.has_work and has_no_session(report):
            found.set()

    loop = EngineLoop(engine, on_report)
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.post(turn(0))
    assert found.wait(TIMEOUT_S)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and not engine.scheduler.sessions


def test_requests_that_wait_for_a_session_go_on_when_it_expires(virtual_time: VirtualTime) -> None:
    """Request 1 names no session and waits. The loop sleeps meanwhile, after one report."""
    script = Script(create_engine(WAITS_FOR_PAUSED))
    script.when(is_paused, turn(1, ""))
    script.when(waits_for_session, sleep_s=120.0)
    script.when(has_no_work)
    script.run(virtual_time, turn(0))
    (waiting,) = filter(waits_for_session, script.reports)
    assert waiting.status.num_waiting == 1
    ends = [delta.request_id for each in script.reports for delta in each.deltas if delta.finish]
    assert ends == [0, 1]


# Ends.


def test_an_end_says_whether_the_session_was_open(virtual_time: VirtualTime) -> None:
    ends = [(5, ("", "a")), (6, ("", "a")), (7, ("other", "a")), (8, ("", "b"))]
    script = Script(create_engine())
    script.when(is_paused, *(EndSession(ticket, key) for ticket, key in ends))
    script.when(has_no_session)
    report = script.run(virtual_time, turn(0))
    assert report.ended_sessions == [(5, True), (6, False), (7, False), (8, False)]


def test_the_end_of_a_session_frees_what_waits_for_it(virtual_time: VirtualTime) -> None:
    script = Script(create_engine(WAITS_FOR_PAUSED))
    script.when(is_paused, turn(1, ""))
    script.when(waits_for_session, EndSession(5, ("", "a")))
    script.when(has_no_work)
    report = script.run(virtual_time, turn(0))
    assert report.deltas and virtual_time.now_s == 1000.0


# Python.


def open_async(policy: Policy = FCFS) -> AsyncLLM:
    return AsyncLLM("hash", block_size=4, num_blocks=64, max_model_len=256, policy=policy)


@pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_an_async_session_shares_its_context_and_ends_with_its_block(
    kind: Callable[..., AsyncLLM],
) -> None:
    async def converse() -> None:
        async with kind("hash", block_size=4) as llm:
            async with llm.session() as session:
                first = await session.generate(PROMPT, PARAMS, expected_pause_s=1.0)
                context = first.prompt_token_ids + first.token_ids
                deltas = [each async for each in session.stream([*context, 9, 9, 9], PARAMS)]
                assert deltas[-1].finish_reason == "length"
                status = llm.status
                assert (status.num_sessions, status.num_resumed_tokens) == (1, 32)
                assert not await llm.end_session(session.session_id, tenant="other")
            assert not await llm.end_session(session.session_id)
            assert llm.status.num_sessions == 0

    asyncio.run(converse())


def test_sessions_without_a_name_are_separate() -> None:
    async def names() -> set[str]:
        async with open_async() as llm:
            sessions = [llm.session(), llm.session(), llm.session("mine")]
            for session in sessions:
                await session.generate(PROMPT, PARAMS)
            assert llm.status.num_sessions == 3
            assert [await session.end() for session in sessions] == [True] * 3
            return {session.session_id for session in sessions}

    assert len(asyncio.run(names())) == 3


def test_an_engine_that_has_ended_has_no_session_to_end() -> None:
    async def end() -> None:
        async with open_async() as llm:
            async with llm.session() as session:
                await asyncio.to_thread(llm.close)
            with pytest.raises(EngineDead):
                await session.end()

    asyncio.run(end())


class Waits:
    """An observer that counts the reports in which all requests wait for a session."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.count = 0

    def on_step(self, report: StepReport) -> None:
        if waits_for_session(report):
            self.count += 1
            self.started.set()

    def on_request(self, request: Request) -> Waits:
        return self

    def on_deltas(self, deltas: object) -> None:
        pass

    def on_close(self) -> None:
        pass


def test_an_engine_that_waits_for_a_session_has_not_stalled(virtual_time: VirtualTime) -> None:
    """It waits 100 s and steps again: this time does not count, before and after that step."""
    waits = Waits()

    async def wait() -> None:
        async with open_async(WAITS_FOR_PAUSED) as llm:
            llm.add_observer(waits)
            await llm.generate(PROMPT, PARAMS, session_id="a")
            waiting = asyncio.create_task(llm.generate("x", PARAMS))
            assert await asyncio.to_thread(waits.started.wait, TIMEOUT_S)
            virtual_time.sleep(100.0)
            assert llm.stalled_s == 0 and not waiting.done()
            assert not await llm.end_session("b")
            assert waits.count == 2, "the engine sleeps: a report for each request or command"
            assert await llm.end_session("a")
            assert llm.stalled_s == 0
            assert (await waiting).finish_reason == "length"

    asyncio.run(wait())


def test_a_session_of_llm_ends_with_its_block() -> None:
    with LLM("hash", block_size=4) as llm:
        with llm.session() as session:
            first = session.generate(PROMPT, PARAMS)
            text = "".join(each.text for each in session.stream(PROMPT + first.text, PARAMS))
            assert len(text) == 3
            (open_session,) = llm.engine.scheduler.sessions.values()
            assert open_session.key == ("", session.session_id) and open_session.num_turns == 2
        assert not llm.engine.scheduler.sessions
        assert not session.end()


def test_a_turn_of_llm_that_cannot_be_names_its_field() -> None:
    with LLM("hash") as llm, llm.session("a") as session:
        with pytest.raises(InvalidRequest, match=r"^prompt: it is empty"):
            session.generate("", PARAMS)
        with pytest.raises(InvalidRequest, match=r"^expected_pause_s: -1"):
            session.generate("a", PARAMS, expected_pause_s=-1.0)


def test_llm_does_not_wait_for_a_turn_that_cannot_come() -> None:
    """The policy waits for a pause to end, and the caller for `generate`."""
    with LLM("hash", policy=WAITS_FOR_PAUSED) as llm:
        for name in ("old", "new"):
            llm.session(name).generate(PROMPT, PARAMS)
        (output,) = llm.generate(["x"], replace(PARAMS, max_tokens=5))
        assert len(output.token_ids) == 5
        assert not llm.engine.scheduler.sessions


def test_llm_ends_the_session_that_has_paused_longest() -> None:
    def admit_beside_one(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        keys: list[SessionKey] = [key for key, each in context.sessions.items() if each.is_paused]
        return None if waiting[0].session is None and len(keys) > 1 else waiting[0]

    with LLM("hash", policy=FCFS._replace(admit=admit_beside_one)) as llm:
        for name in ("a", "b", "a"):
            llm.session(name).generate(PROMPT, PARAMS)
        llm.generate(["x"], PARAMS)
        assert list(llm.engine.scheduler.sessions) == [("", "a")]
