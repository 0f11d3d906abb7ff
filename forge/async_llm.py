"""AsyncLLM: one engine under asyncio, for any number of streams.

Owns the mailboxes of open streams. Knows no HTTP. Of the engine's thread or process it knows only
that it takes commands and sends one report a step.

    event loop                                             the engine's thread or process
    stream() ── Request, Abort ────────────────────────►   EngineLoop
       ▲                                                       │
       └── mailbox ◄── one call_soon_threadsafe per ◄── Report ┘
                       step and loop

Always true: when the engine ends, for any reason, every open stream ends too.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, Unpack

from forge.engine import Engine
from forge.engine_checks import check_pool_sizes, check_sleep_level
from forge.engine_messages import (
    Abort,
    CheckedRequest,
    CloseFilm,
    Command,
    EndSession,
    EngineStatus,
    OpenFilm,
    Pause,
    PauseCommand,
    PauseResult,
    ResetPrefixCache,
    Resize,
    Resume,
    Sleep,
    StepReport,
    UpdateWeights,
    Wake,
)
from forge.engine_options import DEFAULT_MODEL, Options
from forge.engine_process import EngineProcess
from forge.engine_thread import CLOSE_REASON, EngineThread
from forge.errors import (
    EngineClosed,
    EngineDead,
    ForgeError,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
)
from forge.llm import (
    Prompt,
    PromptFields,
    create_request,
    new_namespace,
    parse_pause_mode,
    session_key,
)
from forge.load_report import LoadReport
from forge.outputs import OutputProcessor, RequestOutput, TextDelta, merge_deltas
from forge.pause import PauseMode
from forge.policy import Policy
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.sampling_defaults import SamplingDefaults
from forge.tokenizer import Tokenizer
from forge.weight_versions import check_version
from forge.weights import NamedWeights, WeightSource, WeightUpdate, as_weight_source

RESET_DONE = ("reset", None)
RESIZE_ANSWERED = ("resize answered", None)
PAUSE_ANSWERED = ("pause answered", None)
SESSION_ENDED = ("session ended", None)
SESSION_UNKNOWN = ("no such session", None)
COMMAND_RESULTS = (RESET_DONE, RESIZE_ANSWERED, PAUSE_ANSWERED, SESSION_ENDED, SESSION_UNKNOWN)
"""End reasons of a mailbox whose command was carried out, or refused by the engine."""

MAX_DELTAS_PER_READ = 128
"""Deltas that a reader takes before other coroutines run. A slow reader's backlog has no bound."""
MAX_LOGPROBS_PER_READ = 4096
"""Log probabilities after which a reader takes no more deltas: they would be written at once."""


class EngineHost(Protocol):
    """The thread or process that an engine runs in: EngineThread or EngineProcess."""

    engine: Engine
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults

    @property
    def status(self) -> EngineStatus: ...

    def post(self, command: Command) -> None: ...

    def close(self) -> None: ...


class RequestObserver(Protocol):
    """Receives what the reader of one request does, on the reader's event loop."""

    def on_deltas(self, deltas: Sequence[TextDelta]) -> None:
        """Handle deltas that the reader is about to get."""

    def on_close(self) -> None:
        """Handle the end of reading: the output is complete, or the reader left."""


class EngineObserver(Protocol):
    """Receives the events of an AsyncLLM. Its methods must not raise: that would end their caller.

    on_step      called with every report, on a thread of the engine's host
    on_request   called with every request that is posted, on its reader's event loop
    """

    def on_step(self, report: StepReport) -> None: ...

    def on_request(self, request: Request) -> RequestObserver: ...


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Deltas of one request on their way from the engine to a coroutine of `loop`.

    num_open_choices   choices without a finish reason in the reports so far
    end_reason         (finish reason, error) once the engine sends no more; None before
    refusal            why the engine refused a command
    pause_result       result of a command of trainers
    """

    loop: asyncio.AbstractEventLoop
    num_open_choices: int
    deltas: deque[Delta] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    end_reason: tuple[str, str | None] | None = None
    refusal: ForgeError | None = None
    pause_result: PauseResult | None = None

    def close(
        self, finish_reason: str, error: str | None, refusal: ForgeError | None = None
    ) -> None:
        self.refusal = refusal
        self.end_reason = (finish_reason, error)
        self.ready.set()

    def answer(self, result: PauseResult) -> None:
        self.pause_result = result
        self.close(*PAUSE_ANSWERED, result.refusal)


def _deliver_batch(batch: list[tuple[_Mailbox, Delta]]) -> None:
    for mailbox, delta in batch:
        mailbox.deltas.append(delta)
        mailbox.ready.set()


class AsyncLLM:
    """Any number of concurrent streams on one engine, which runs in a thread of this process.

    engine    checks requests; its other methods belong to the engine's thread
    failure   None, or why the engine has ended
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        policy: str | Policy = "fcfs",
        **options: Unpack[Options],
    ) -> None:
        self._open(EngineThread, model, policy, options)

    @classmethod
    def spawn(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        policy: str | Policy = "fcfs",
        **options: Unpack[Options],
    ) -> Self:
        """Open an AsyncLLM whose engine has a separate process, so that streams do not slow it.

        The main module of this process must be importable (multiprocessing's rule).
        """
        llm = cls.__new__(cls)
        llm._open(EngineProcess, model, policy, options)
        return llm

    def _open(
        self,
        host_type: Callable[..., EngineHost],
        model: str,
        policy: str | Policy,
        options: Options,
    ) -> None:
        self.model = model
        self.failure: str | None = None
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._mailboxes: dict[int, _Mailbox] = {}
        self._observers: list[EngineObserver] = []
        self._num_steps, self._last_progress_s = 0, time.monotonic()
        self._has_work = False  # by the engine's latest report; readers that have left count too
        self._waits_for_session = False  # by the same: it has work, and nothing to do until then
        self._oldest_post_s: float | None = None  # by the same
        self._num_slow_commands = 0
        # The host's threads hold no reference to this object: dropped without `close`, it ends.
        on_report, on_end = _weak_method(self._on_report), _weak_method(self._on_engine_end)
        self._host = host_type(model, policy, options, on_report, on_end)
        self._finalizer = weakref.finalize(self, _close_in_thread, self._host)
        self._finalizer.atexit = False
        self.engine, self.tokenizer = self._host.engine, self._host.tokenizer
        self.sampling_defaults = self._host.sampling_defaults

    @property
    def status(self) -> EngineStatus:
        """Return the engine's status in its latest report."""
        return self._host.status

    @property
    def load(self) -> LoadReport:
        """Return the engine's load by its latest report, and the longest wait until now."""
        status, oldest_s = self.status, self._oldest_post_s
        return LoadReport(
            status.num_running,
            status.num_waiting,
            status.num_blocks - status.num_used_blocks,
            status.num_blocks,
            0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s),
        )

    @property
    def num_open_requests(self) -> int:
        """Return how many requests have not ended, those included that no step has seen."""
        return len(self._mailboxes)

    @property
    def stalled_s(self) -> float:
        """Return the seconds since the last step while there is work; 0 for an idle engine.

        0 as well while all requests wait for a paused session, as the policy decided, in a pause
        of the engine, and while a trainer's command takes its time.
        """
        return time.monotonic() - self._last_progress_s if self._is_busy else 0.0

    @property
    def _is_busy(self) -> bool:
        if self._num_slow_commands or self.status.is_paused:
            return False
        return bool(self._mailboxes or self._has_work) and not self._waits_for_session

    def add_observer(self, observer: EngineObserver) -> None:
        """Send the observer every event from now on. Raises InvalidConfig for what is none."""
        for name in ("on_step", "on_request"):
            if not callable(getattr(observer, name, None)):
                raise InvalidConfig(
                    "observer", f"it has no {name}", "Give an EngineObserver of forge.async_llm"
                )
        self._observers.append(observer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def abort_all(self) -> None:
        """End open streams as aborted and refuse new ones.

        Returns at once, even when the engine hangs. The engine runs on until `close`.
        """
        self._on_engine_end(FinishReason.ABORT, CLOSE_REASON)

    def close(self) -> None:
        """End open streams as aborted, end the engine and close the model.

        Returns within seconds. A process that hangs is killed. A thread that hangs is left running;
        it closes its model if it ever returns.
        """
        self._finalizer.detach()
        self.abort_all()
        self._host.close()

    # Callers on an event loop.

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without any: the checkpoint's defaults, else forge's."""
        return self.sampling_defaults.params()

    def create_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> Request:
        """Return a request that the engine can serve. Raises InvalidRequest.

        params   None: the defaults
        """
        if params is None:
            params = self.get_default_sampling_params()
        request = create_request(next(self._ids), self.tokenizer, prompt, params, **fields)
        self.engine.check(request)
        return request

    async def stream_request(self, request: Request) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas of a request made by `create_request`, merged where the reader is slow.

        A request can be read once. Closing the iterator aborts it. Raises EngineDead when the
        engine has already ended.
        """
        _check_is_request(request)
        processor = OutputProcessor(request, self.tokenizer)
        mailbox = _Mailbox(asyncio.get_running_loop(), request.params.n)
        self._submit(request, mailbox)
        request_observers = [observer.on_request(request) for observer in self._observers]
        try:
            while not processor.is_finished:
                await mailbox.ready.wait()
                pending, num_logprobs = list[TextDelta](), 0
                while (
                    mailbox.deltas
                    and len(pending) < MAX_DELTAS_PER_READ
                    and num_logprobs < MAX_LOGPROBS_PER_READ
                ):
                    delta = mailbox.deltas.popleft()
                    num_logprobs += _count_logprobs(delta)
                    pending.append(processor.process(delta))
                if mailbox.deltas:
                    await asyncio.sleep(0)  # other coroutines run first: the event stays set
                else:
                    mailbox.ready.clear()
                    if mailbox.end_reason is not None:
                        pending += processor.finish(*mailbox.end_reason)
                merged_deltas = merge_deltas(pending)
                for request_observer in request_observers:
                    request_observer.on_deltas(merged_deltas)
                for merged_delta in merged_deltas:
                    yield merged_delta
        finally:
            if not processor.is_finished:
                self._abandon(request.id, mailbox)
            for request_observer in request_observers:
                request_observer.on_close()

    def abort(self, request: Request) -> None:
        """Abort a request whose deltas are being read; its reader gets `abort`, without delay.

        To be called on the event loop of the reader. One that has ended stays as it is.
        """
        _check_is_request(request)
        mailbox = self._mailboxes.get(request.id)
        if mailbox is not None:
            self._abandon(request.id, mailbox)
            mailbox.close(FinishReason.ABORT.value, None)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield deltas as they come. Closing the iterator aborts the request.

        Raises InvalidRequest.
        """
        return self.stream_request(self.create_request(prompt, params, **fields))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> RequestOutput:
        """Return the whole output. Cancelling the coroutine aborts the request.

        Raises InvalidRequest.
        """
        request = self.create_request(prompt, params, **fields)
        output = RequestOutput.empty(request)
        async with aclosing(self.stream_request(request)) as deltas:
            async for delta in deltas:
                output.append(delta)
        return output

    def session(self, session_id: str | None = None, *, tenant: str = "") -> AsyncLLMSession:
        """Return a session: an `async with` block ends it. It opens with its first turn.

        session_id   a new one where it is left out
        """
        tenant, name = session_key(session_id or f"session-{next(self._ids)}", tenant)
        return AsyncLLMSession(self, name, tenant)

    async def end_session(self, session_id: str, *, tenant: str = "") -> bool:
        """End a session, and return whether it was open. With an open request, it ends after it.

        Raises EngineDead.
        """
        command = EndSession(next(self._ids), session_key(session_id, tenant))
        return await self._carry_out(command) == SESSION_ENDED

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, so that no later request shares them. Open ones keep theirs.

        On the device, in host memory and in files, which stay in their folder for a later start.
        Raises EngineDead.
        """
        await self._carry_out(ResetPrefixCache(next(self._ids)))

    async def resize(
        self, num_blocks: int | None = None, num_host_blocks: int | None = None
    ) -> None:
        """Resize the pool on the device, the host pool or both, to at most their first sizes.

        Open requests that hold a removed block are preempted. Raises EngineDead, NeverFits where a
        request needs more, or InvalidConfig.
        """
        check_pool_sizes(num_blocks, num_host_blocks, self.engine.config)
        await self._carry_out(Resize(next(self._ids), num_blocks, num_host_blocks))

    def open_film(self) -> None:
        """Add lines of the film to the reports of `on_step`, and soon one with the whole state.

        Each line is drawn up within a fixed share of the engine's time: see forge.film.live.
        """
        self._host.post(OpenFilm())

    def close_film(self) -> None:
        """Add no more lines of the film to reports."""
        self._host.post(CloseFilm())

    @property
    def weight_version(self) -> str:
        """Version of the weights in the engine's latest report."""
        return self.status.weight_version

    async def pause(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Hold new requests until `resume`; return once no step is in flight and none begins.

        mode   what open requests do: see PauseMode
        Raises InvalidConfig for an unknown mode, EnginePaused where `resume` came first, or
        EngineDead.
        """
        await self._execute(Pause(next(self._ids), parse_pause_mode(mode)))

    async def resume(self) -> None:
        """End a pause. Raises EnginePaused while the model sleeps or lacks weights."""
        await self._execute(Resume(next(self._ids)))

    async def update_weights(
        self,
        source: Mapping[str, object] | Iterable[tuple[str, object]] | WeightSource,
        version: str | None = None,
    ) -> WeightUpdate:
        """Replace weights between two steps, and return their version and the seconds.

        Without a pause, open requests go on with the new weights, as with `PauseMode.KEEP`.

        source    all tensors or some, by their names in the checkpoint; or files. With a spawned
                  engine, anything but tensors of this process
        version   name of the weights in later outputs; None: the next number
        Raises InvalidWeights for a source that does not match; nothing has changed then.
        """
        source = as_weight_source(source)
        if isinstance(source, NamedWeights) and isinstance(self._host, EngineProcess):
            raise InvalidWeights(
                "weights",
                "tensors of this process cannot be sent to that of the engine",
                "Give WeightFiles, or open AsyncLLM(...) instead of AsyncLLM.spawn(...)",
            )
        if version is not None:
            check_version(version)
        namespace = new_namespace()
        command = UpdateWeights(next(self._ids), source, version, namespace)
        result = await self._execute(command)
        assert result.weight_version is not None, f"{command.ticket} started a version"
        return WeightUpdate(result.weight_version, dict(result.times))

    async def sleep(self, level: int = 1) -> dict[str, float]:
        """Release the device's memory in a pause, and return the seconds of each part.

        level   1 moves the weights to host memory; 2 drops them: update all after `wake`
        Raises EnginePaused for an engine that is not paused.
        """
        check_sleep_level(level)
        return dict((await self._execute(Sleep(next(self._ids), level))).times)

    async def wake(self) -> dict[str, float]:
        """Allocate what `sleep` released, and return the seconds of each part.

        `resume` follows. Raises EnginePaused where the model does not sleep.
        """
        return dict((await self._execute(Wake(next(self._ids)))).times)

    async def _execute(self, command: PauseCommand) -> PauseResult:
        """Post a command of trainers, and return its result."""
        is_slow = not isinstance(command, Pause)
        self._num_slow_commands += is_slow
        try:
            mailbox = await self._wait_for_answer(command)
        finally:
            self._num_slow_commands -= is_slow
            self._last_progress_s = time.monotonic()
        assert mailbox.pause_result is not None, f"{command} has its answer"
        return mailbox.pause_result

    async def _carry_out(
        self, command: EndSession | ResetPrefixCache | Resize
    ) -> tuple[str, str | None]:
        """Post the command, and return its end reason once it was carried out."""
        mailbox = await self._wait_for_answer(command)
        assert mailbox.end_reason is not None, f"{command} has its answer"
        return mailbox.end_reason

    async def _wait_for_answer(
        self, command: EndSession | ResetPrefixCache | Resize | PauseCommand
    ) -> _Mailbox:
        """Post the command, and return its mailbox once it was carried out.

        Raises EngineDead, or why the engine refuses it. A caller that is cancelled meanwhile takes
        nothing back.
        """
        mailbox = _Mailbox(asyncio.get_running_loop(), 0)
        self._post(command.ticket, mailbox, command)
        await mailbox.ready.wait()
        if mailbox.end_reason not in COMMAND_RESULTS:
            raise self._engine_error()
        if mailbox.refusal is not None:
            raise mailbox.refusal
        return mailbox

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        if request.id in self._mailboxes:
            error = f"id: request {request.id} is still open. Use a new id"
            mailbox.close(FinishReason.ERROR.value, error)
            return
        structure, level = request.params.structure, None
        if structure is not None:
            level = self.engine.grammar_backend.compilable_level(structure)
        self._post(
            request.id, mailbox, request if level is None else CheckedRequest(request, level)
        )

    def _post(self, mailbox_id: int, mailbox: _Mailbox, command: Command) -> None:
        """Hand the command to the engine, and open the mailbox that its answer goes to."""
        with self._lock:
            if self.failure is not None:
                raise self._engine_error()
            if not self._is_busy:
                self._last_progress_s = time.monotonic()
            self._mailboxes[mailbox_id] = mailbox
            self._has_work, self._waits_for_session = True, False
        self._host.post(command)

    def _engine_error(self) -> EngineDead:
        error_type = EngineClosed if self.failure == CLOSE_REASON else EngineDead
        return error_type(f"the engine has ended: {self.failure}. Start it again")

    def _abandon(self, request_id: int, mailbox: _Mailbox) -> None:
        """Drop a mailbox whose reader has left, and abort its request if it is open."""
        with self._lock:
            if self._mailboxes.get(request_id) is not mailbox:
                return
            del self._mailboxes[request_id]
        self._host.post(Abort(request_id))

    # Called by the engine's host, on the host's thread.

    def _on_report(self, report: StepReport) -> None:
        status = report.status
        if status.num_steps != self._num_steps or self._waits_for_session:
            self._num_steps, self._last_progress_s = status.num_steps, time.monotonic()
        self._has_work = status.has_work
        self._waits_for_session = status.has_work and not status.can_step
        self._oldest_post_s = report.oldest_post_s
        for observer in self._observers:  # first, so that a reader finds its deltas counted
            observer.on_step(report)
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Delta]]] = {}
        for delta in report.deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            batches.setdefault(mailbox.loop, []).append((mailbox, delta))
            if delta.finish is not None:
                mailbox.num_open_choices -= 1
                if not mailbox.num_open_choices:
                    self._mailboxes.pop(delta.request_id, None)
        for loop, batch in batches.items():
            if not _call_threadsafe(loop, _deliver_batch, batch):
                for mailbox, delta in batch:
                    self._abandon(delta.request_id, mailbox)
        for request_id, error in report.rejections:
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                _call_threadsafe(mailbox.loop, mailbox.close, FinishReason.ERROR.value, error)
        results = [(ticket, RESET_DONE) for ticket in report.reset_tickets]
        for ticket, was_open in report.ended_sessions:
            results.append((ticket, SESSION_ENDED if was_open else SESSION_UNKNOWN))
        for ticket, result in results:
            mailbox = self._mailboxes.pop(ticket, None)
            if mailbox is not None:  # None: abort_all closed it
                _call_threadsafe(mailbox.loop, mailbox.close, *result)
        for pause_result in report.pause_results:
            mailbox = self._mailboxes.pop(pause_result.ticket, None)
            if mailbox is not None:
                _call_threadsafe(mailbox.loop, mailbox.answer, pause_result)
        for ticket, refusal in report.resizes:
            mailbox = self._mailboxes.pop(ticket, None)
            if mailbox is not None:
                _call_threadsafe(mailbox.loop, mailbox.close, *RESIZE_ANSWERED, refusal)

    def _on_engine_end(self, finish: FinishReason, failure: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            open_mailboxes = list(self._mailboxes.values())
            self._mailboxes.clear()
        error = f"the engine has ended: {failure}" if finish is FinishReason.ERROR else None
        for mailbox in open_mailboxes:
            _call_threadsafe(mailbox.loop, mailbox.close, finish.value, error)


def _check_is_request(request: object) -> None:
    """Raise InvalidRequest for what `create_request` does not return."""
    if not isinstance(request, Request):
        raise InvalidRequest(
            "request", f"{str(request)[:64]!r} is no Request", "Give one of create_request"
        )


def _weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Return a call of the method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _close_in_thread(host: EngineHost) -> None:
    """Close the host without waiting: the collector calls this on any thread, its own included."""
    threading.Thread(target=host.close, name="forge-closer", daemon=True).start()


def _count_logprobs(delta: Delta) -> int:
    """Return how many log probabilities the delta has, in O(1): each token has equally many."""
    lists = (delta.logprobs, delta.prompt_logprobs)
    return sum(len(scores) * (1 + len(scores[0].top)) for scores in lists if scores)


def _call_threadsafe(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> bool:
    """Schedule `function` on the loop; False when the loop is closed and never runs it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


class AsyncLLMSession:
    """Turns of one growing context. `end`, or the end of an `async with` block, ends it.

    Each turn's prompt is the whole context so far; its beginning is found in the prefix cache.
    """

    def __init__(self, llm: AsyncLLM, session_id: str, tenant: str) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self._llm = llm

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(EngineDead):  # its sessions have ended with it
            await self.end()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> RequestOutput:
        """Return the whole output of a turn. Raises InvalidRequest."""
        return await self._llm.generate(prompt, params, **self._fields_of_turn(fields))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield deltas of a turn as they come. Closing the iterator aborts the turn."""
        return self._llm.stream(prompt, params, **self._fields_of_turn(fields))

    async def end(self) -> bool:
        """End the session, and return whether it was open. A later turn would open it again.

        Raises EngineDead.
        """
        return await self._llm.end_session(self.session_id, tenant=self.tenant)

    def _fields_of_turn(self, fields: PromptFields) -> PromptFields:
        return {**fields, "session_id": self.session_id, "tenant": self.tenant}
