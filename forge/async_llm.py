"""AsyncLLM: the same engine under asyncio, for any number of streams.

Owns the mailboxes of open streams. Knows no HTTP, and of the engine's thread or process only that
it takes commands and tells one report a step.

    event loop                                             the engine's thread or process
    stream() ── Request, Abort ────────────────────────►   EngineLoop
       ▲                                                       │
       └── mailbox ◄── one call_soon_threadsafe per ◄── Report ┘
                       step and loop

Whatever ends the engine, every open stream hears of it: no reader waits for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, Unpack

from forge.engine import Engine
from forge.engine_loop import Abort, Accepted, Command, Report, Reset, Status
from forge.engine_process import EngineProcess
from forge.engine_thread import CLOSED, EngineThread
from forge.errors import EngineClosed, EngineDead
from forge.llm import (
    DEFAULT_PARAMS,
    Options,
    Prompt,
    RequestOutput,
    TextDelta,
    Transcript,
    merged,
    tokenize,
)
from forge.policy import Policy
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.tokenizer import Tokenizer

RESET = ("reset", None)
"""What the mailbox of a Reset ends with."""


READ_AT_ONCE = 128
"""Deltas that a reader takes before others run: those of a slow one have no bound."""


class Host(Protocol):
    """Where an engine runs: EngineThread or EngineProcess."""

    engine: Engine
    tokenizer: Tokenizer

    @property
    def status(self) -> Status: ...

    def post(self, command: Command) -> None: ...

    def close(self) -> None: ...


class Reading(Protocol):
    """Hears what the reader of one request does, on the reader's event loop."""

    def gained(self, deltas: Sequence[TextDelta]) -> None:
        """These are about to be read."""

    def left(self) -> None:
        """Nobody reads any more: all was read, or the reader left."""


class Observer(Protocol):
    """Hears what an AsyncLLM does. What it raises ends what it was told of, so it raises nothing.

    stepped   called with every report, on a thread of the engine's host
    opened    called with every request that is posted, on its reader's event loop
    """

    def stepped(self, report: Report) -> None: ...

    def opened(self, request: Request) -> Reading: ...


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Deltas of one request on their way from the engine to a coroutine of `loop`.

    choices   that have not ended, as far as the engine told
    ending    (finish reason, error) once the engine will say no more
    """

    loop: asyncio.AbstractEventLoop
    choices: int
    deltas: deque[Delta] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ending: tuple[str, str | None] | None = None

    def end(self, finish_reason: str, error: str | None) -> None:
        self.ending = (finish_reason, error)
        self.arrived.set()


def _put(letters: list[tuple[_Mailbox, Delta]]) -> None:
    for mailbox, delta in letters:
        mailbox.deltas.append(delta)
        mailbox.arrived.set()


class AsyncLLM:
    """Any number of concurrent streams on one engine, in a thread of this process.

    engine    checks requests; what else it does belongs to its own thread
    failure   None, or why the engine has ended
    """

    def __init__(
        self, model: str = "hash", *, policy: str | Policy = "fcfs", **options: Unpack[Options]
    ) -> None:
        self._open(EngineThread, model, policy, options)

    @classmethod
    def apart(
        cls, model: str = "hash", *, policy: str | Policy = "fcfs", **options: Unpack[Options]
    ) -> Self:
        """The same on an engine in a process of its own, which no work of this one slows down.

        The main module of this process must be one that can be imported (multiprocessing's rule).
        """
        llm = cls.__new__(cls)
        llm._open(EngineProcess, model, policy, options)
        return llm

    def _open(
        self,
        kind: Callable[..., Host],
        model: str,
        policy: str | Policy,
        options: Options,
    ) -> None:
        self.model = model
        self.failure: str | None = None
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._mailboxes: dict[int, _Mailbox] = {}
        self._observers: list[Observer] = []
        self._num_steps, self._moved_s = 0, time.monotonic()
        self._has_work = False  # the engine, as far as it told: also for readers that have left
        self._host = kind(model, policy, options, self._deliver, self._ended)
        self.engine, self.tokenizer = self._host.engine, self._host.tokenizer

    @property
    def status(self) -> Status:
        """The engine's, as it was when it last told."""
        return self._host.status

    @property
    def stalled_s(self) -> float:
        """For how long the engine has had something to do and made no step; 0 where it rests."""
        busy = self._mailboxes or self._has_work
        return time.monotonic() - self._moved_s if busy else 0.0

    def observe(self, observer: Observer) -> None:
        """The observer hears of what happens from now on."""
        self._observers.append(observer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def end(self) -> None:
        """End open streams as aborted and take no more. Returns at once, also if the engine hangs.

        The engine goes on until `close`.
        """
        self._ended(FinishReason.ABORT, CLOSED)

    def close(self) -> None:
        """End open streams as aborted, end the engine and close the model.

        Returns within seconds. A process that hangs is killed; a thread that hangs is left alone,
        and closes its model if it ever returns.
        """
        self.end()
        self._host.close()

    # Callers on an event loop.

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        priority: int = 0,
        cache_salt: str = "",
        arrival_s: float = 0.0,
    ) -> Request:
        """A request that the engine will take. Raises InvalidRequest."""
        ids = tokenize(self.tokenizer, prompt)
        request = Request(next(self._ids), ids, params, priority, cache_salt, arrival_s)
        self.engine.check(request)
        return request

    async def deltas(self, request: Request) -> AsyncGenerator[TextDelta, None]:
        """Deltas of a request made by `request`. Those that waited for the reader come merged.

        A request is read once. Closing the iterator aborts it. Raises EngineDead when the engine
        had ended before.
        """
        transcript = Transcript(request, self.tokenizer)
        mailbox = _Mailbox(asyncio.get_running_loop(), request.params.n)
        self._submit(request, mailbox)
        readings = [observer.opened(request) for observer in self._observers]
        try:
            while not transcript.ended:
                await mailbox.arrived.wait()
                waiting: list[TextDelta] = []
                while mailbox.deltas and len(waiting) < READ_AT_ONCE:
                    waiting.append(transcript.read(mailbox.deltas.popleft()))
                if mailbox.deltas:
                    await asyncio.sleep(0)  # others first: the event is still set
                else:
                    mailbox.arrived.clear()
                    if mailbox.ending is not None:
                        waiting += transcript.end(*mailbox.ending)
                gained = merged(waiting)
                for reading in readings:
                    reading.gained(gained)
                for delta in gained:
                    yield delta
        finally:
            if not transcript.ended:
                self._leave(request.id, mailbox)
            for reading in readings:
                reading.left()

    def stream(
        self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS
    ) -> AsyncGenerator[TextDelta, None]:
        """Deltas as they come. Closing the iterator aborts the request. Raises InvalidRequest."""
        return self.deltas(self.request(prompt, params))

    async def generate(
        self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS
    ) -> RequestOutput:
        """The whole output. Cancelling the coroutine aborts the request. Raises InvalidRequest."""
        request = self.request(prompt, params)
        output = RequestOutput.begun(request)
        async with aclosing(self.deltas(request)) as deltas:
            async for delta in deltas:
                output.gain(delta)
        return output

    async def reset_prefix_cache(self) -> None:
        """No request to come shares what was computed so far; open ones keep what they have.

        Raises EngineDead.
        """
        mailbox = _Mailbox(asyncio.get_running_loop(), 0)
        command = Reset(next(self._ids))
        self._post(command.ticket, mailbox, command)
        await mailbox.arrived.wait()
        if mailbox.ending != RESET:
            raise self._dead()

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        if request.id in self._mailboxes:
            taken = f"id: request {request.id} is still open. Use a new id"
            mailbox.end(FinishReason.ERROR.value, taken)
            return
        structure, lane = request.params.structure, None
        if structure is not None:
            lane = self.engine.structures.accepted(structure)
        self._post(request.id, mailbox, request if lane is None else Accepted(request, lane))

    def _post(self, name: int, mailbox: _Mailbox, command: Command) -> None:
        """The engine has the command and answers to the mailbox of that name."""
        with self._lock:
            if self.failure is not None:
                raise self._dead()
            if not (self._mailboxes or self._has_work):
                self._moved_s = time.monotonic()
            self._mailboxes[name] = mailbox
            self._has_work = True
        self._host.post(command)

    def _dead(self) -> EngineDead:
        kind = EngineClosed if self.failure == CLOSED else EngineDead
        return kind(f"the engine has ended: {self.failure}. Start it again")

    def _leave(self, request_id: int, mailbox: _Mailbox) -> None:
        """The mailbox is read no more, and its request is aborted if it is open."""
        with self._lock:
            if self._mailboxes.get(request_id) is not mailbox:
                return
            del self._mailboxes[request_id]
        self._host.post(Abort(request_id))

    # Called by the engine's host, on a thread of its own.

    def _deliver(self, report: Report) -> None:
        if report.status.num_steps != self._num_steps:
            self._num_steps, self._moved_s = report.status.num_steps, time.monotonic()
        self._has_work = report.status.has_work
        for observer in self._observers:  # first: who reads what the step gave finds it counted
            observer.stepped(report)
        letters: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Delta]]] = {}
        for delta in report.deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            letters.setdefault(mailbox.loop, []).append((mailbox, delta))
            if delta.finish is not None:
                mailbox.choices -= 1
                if not mailbox.choices:
                    self._mailboxes.pop(delta.request_id, None)
        for loop, batch in letters.items():
            if not _call(loop, _put, batch):
                for mailbox, delta in batch:
                    self._leave(delta.request_id, mailbox)
        for request_id, fault in report.refused:
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                _call(mailbox.loop, mailbox.end, FinishReason.ERROR.value, fault)
        for ticket in report.resets:
            mailbox = self._mailboxes.pop(ticket, None)
            if mailbox is not None:  # or the engine was given up before
                _call(mailbox.loop, mailbox.end, *RESET)

    def _ended(self, finish: FinishReason, failure: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            left = list(self._mailboxes.values())
            self._mailboxes.clear()
        error = f"the engine has ended: {failure}" if finish is FinishReason.ERROR else None
        for mailbox in left:
            _call(mailbox.loop, mailbox.end, finish.value, error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> bool:
    """`function` will run on the loop; False when the loop is closed and nothing ever will."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
