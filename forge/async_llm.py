"""AsyncLLM: the same engine under asyncio, in a thread of its own.

Owns the thread, its inbox and the mailboxes of open streams. Knows no HTTP. Everything that touches
the engine runs on the engine thread; it hands over once per step, not once per token.

    event loop                                   engine thread
    stream() ── Submit, Abort ──► inbox ──────►  drain inbox, Engine.step()
       ▲                                             │
       └── mailbox ◄── one call_soon_threadsafe per step and loop

Whatever ends the thread, every open stream hears of it: no reader waits for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self, Unpack

from forge.errors import EngineDead, ForgeError
from forge.llm import (
    DEFAULT_PARAMS,
    Options,
    Prompt,
    RequestOutput,
    TextDelta,
    Transcript,
    merged,
    open_engine,
    tokenize,
)
from forge.policy import Policy
from forge.request import Delta, FinishReason, Request, SamplingParams

LOG = logging.getLogger("forge.engine")


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Deltas of one request on their way from the engine thread to a coroutine of `loop`.

    ending   (finish reason, error) once the engine will say no more
    """

    loop: asyncio.AbstractEventLoop
    deltas: deque[Delta] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ending: tuple[str, str | None] | None = None

    def end(self, finish_reason: str, error: str | None) -> None:
        self.ending = (finish_reason, error)
        self.arrived.set()


class _Submit(NamedTuple):
    request: Request
    mailbox: _Mailbox


class _Abort(NamedTuple):
    request_id: int
    mailbox: _Mailbox


def _put(letters: list[tuple[_Mailbox, Delta]]) -> None:
    for mailbox, delta in letters:
        mailbox.deltas.append(delta)
        mailbox.arrived.set()


class AsyncLLM:
    """Any number of concurrent streams on one engine.

    engine    its `num_steps` grows while it makes progress; only its thread may call it
    failure   None, or why the engine has ended
    """

    def __init__(
        self, model: str = "hash", *, policy: str | Policy = "fcfs", **options: Unpack[Options]
    ) -> None:
        self.model = model
        self._closing = ExitStack()
        self.engine, self.tokenizer = open_engine(model, policy, options, self._closing)
        self.failure: str | None = None
        self._ids = itertools.count()
        self._wake = threading.Condition()
        self._inbox: deque[_Submit | _Abort] = deque()
        self._ending = False
        self._mailboxes: dict[int, _Mailbox] = {}
        self._thread = threading.Thread(target=self._run, name="forge-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Open streams end as aborted, the thread is gone, the model is closed."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._thread.join()
        self._closing.close()

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

        Closing the iterator aborts the request. Raises EngineDead when the engine had ended before.
        """
        transcript = Transcript(request, self.tokenizer)
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._post(_Submit(request, mailbox))
        try:
            while not transcript.ended:
                await mailbox.arrived.wait()
                mailbox.arrived.clear()
                waiting = []
                while mailbox.deltas:
                    waiting.append(transcript.read(mailbox.deltas.popleft()))
                if mailbox.ending is not None:
                    waiting += transcript.end(*mailbox.ending)
                for delta in merged(waiting):
                    yield delta
        finally:
            if not transcript.ended:
                with suppress(EngineDead):  # it may end at any moment
                    self._post(_Abort(request.id, mailbox))

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

    def _post(self, command: _Submit | _Abort) -> None:
        with self._wake:
            if self.failure is not None:
                raise EngineDead(f"the engine has ended: {self.failure}. Start it again")
            self._inbox.append(command)
            self._wake.notify()

    # The engine thread.

    def _run(self) -> None:
        finish, failure = FinishReason.ABORT, "it was closed"
        try:
            while self._obey():
                self._deliver(self.engine.step())
        except BaseException as fault:  # the thread's last words: every open stream must hear them
            finish, failure = FinishReason.ERROR, repr(fault)
            LOG.exception("the engine has ended")
        with self._wake:
            self.failure = failure
            open_now = [*self._mailboxes.values()]
            open_now += [c.mailbox for c in self._inbox if isinstance(c, _Submit)]
        error = f"the engine has ended: {failure}" if finish is FinishReason.ERROR else None
        for mailbox in open_now:
            _call(mailbox.loop, mailbox.end, finish.value, error)

    def _obey(self) -> bool:
        """Commands posted since the step before are done; False to end. Waits while idle."""
        with self._wake:
            while not (self._inbox or self._ending or self.engine.has_work):
                self._wake.wait()
            if self._ending:
                return False
        for _ in range(len(self._inbox)):
            command = self._inbox[0]  # it leaves once obeyed: what ends the thread loses nobody
            if isinstance(command, _Submit):
                self._submit(command.request, command.mailbox)
            elif self._mailboxes.get(command.request_id) is command.mailbox:
                self._forget(command.request_id)
            self._inbox.popleft()
        return True

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        try:
            self.engine.submit(request)
        except ForgeError as refused:  # its id is live, or the pool shrank since it was checked
            _call(mailbox.loop, mailbox.end, FinishReason.ERROR.value, str(refused))
        else:
            self._mailboxes[request.id] = mailbox

    def _deliver(self, deltas: list[Delta]) -> None:
        letters: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Delta]]] = {}
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                letters.setdefault(mailbox.loop, []).append((mailbox, delta))
        for delta in deltas:  # after all of them, for several choices may end in one step
            if delta.finish and delta.request_id not in self.engine.scheduler.requests:
                self._mailboxes.pop(delta.request_id, None)
        for loop, batch in letters.items():
            if not _call(loop, _put, batch):
                for _, delta in batch:
                    self._forget(delta.request_id)

    def _forget(self, request_id: int) -> None:
        """Nobody reads this request any more."""
        self._mailboxes.pop(request_id, None)
        self.engine.abort(request_id)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> bool:
    """`function` will run on the loop; False when the loop is closed and nothing ever will."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
