"""EngineLoop: an engine and its inbox. Any thread posts commands; each step makes a report.

Owns the order in which commands are executed and steps run, and the clock of paused sessions. Knows
no coroutine, and not whether its reports go to a thread or to another process.

    post(Request), post(Abort) ──► inbox ──► execute ──► expire ──► Engine.step() ──► on_report
                                               └────────────── repeat ◄─────────────────┘
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from forge.engine import Engine
from forge.engine_messages import (
    Abort,
    CheckedRequest,
    CloseFilm,
    Command,
    ControlCommand,
    EndSession,
    EngineStatus,
    OpenFilm,
    Pause,
    PauseResult,
    ResetPrefixCache,
    Resize,
    Resume,
    Sleep,
    StepReport,
    UpdateWeights,
    Wake,
)
from forge.errors import EngineDead, EnginePaused, ForgeError, InvalidConfig
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.film_attachment import FilmAttachment
from forge.recorder_chain import RecorderChain
from forge.request import Request, Structure
from forge.session_timers import SessionTimers
from forge.timings_recorder import TimingsRecorder
from forge.weights import PartTimes

MAX_COMPILE_THREADS = 4
"""Structures of a level that compile at the same time. Compiling does not hold Python's lock."""


class _Submission(NamedTuple):
    """A request for the next step.

    grammar   reference that keeps its compiled structure alive until then; None without one
    """

    command: Request | CheckedRequest
    request: Request
    grammar: object


class _CompileFailure(NamedTuple):
    """A request whose structure could not be compiled."""

    request_id: int
    error: str


_InboxEntry: TypeAlias = _Submission | _CompileFailure | ControlCommand


class _CommandResults(NamedTuple):
    """Results of the commands before a step, as a StepReport has them."""

    rejections: list[tuple[int, str]]
    reset_tickets: list[int]
    ended_sessions: list[tuple[int, bool]]
    resizes: list[tuple[int, ForgeError | None]]
    pause_results: list[PauseResult]


class EngineLoop:
    """Runs steps while there is work and waits while there is none, until `stop`.

    on_report   called with every report, on the thread of `run`
    """

    def __init__(self, engine: Engine, on_report: Callable[[StepReport], None]) -> None:
        self._engine = engine
        self._on_report = on_report
        self._condition = threading.Condition()
        self._inbox: deque[_InboxEntry] = deque()
        self._post_times_s: dict[int, float] = {}  # of requests before their first step
        self._stopping = False
        self._executors: dict[QueueLevel, ThreadPoolExecutor] = {}
        self._compiling: dict[int, Future[None]] = {}  # requests whose structure is being compiled
        self._waiting_pauses: list[int] = []  # tickets of pauses that still wait
        recorders = RecorderChain(engine)
        self._film = FilmAttachment(engine, recorders, time.perf_counter_ns)
        self._timings = TimingsRecorder(engine.scheduler, recorders, time.monotonic)
        self._timers = SessionTimers(engine.scheduler.sessions, engine.config.session_ttl_s)

    def post(self, command: Command) -> None:
        """Hand over a command to execute before the next step. Any thread may call this.

        A request enters the inbox once its structure is compiled. Meanwhile only requests with
        structures of the same level wait.
        """
        with self._condition:
            match command:
                case Abort(request_id) if request_id in self._compiling:
                    self._compiling.pop(request_id).cancel()
                case Request():
                    self._submit_or_compile(command, command, None)
                case CheckedRequest(request, level):
                    self._submit_or_compile(command, request, level)
                case _:
                    self._enqueue(command)

    def _enqueue(self, entry: _InboxEntry) -> None:
        if isinstance(entry, _Submission):
            self._post_times_s.setdefault(entry.request.id, time.monotonic())
        self._inbox.append(entry)
        self._condition.notify()

    def _submit_or_compile(
        self, command: Request | CheckedRequest, request: Request, level: QueueLevel | None
    ) -> None:
        structure, grammar = request.params.structure, None
        if structure is not None and self._engine.tokenizer is not None:
            grammar = self._engine.grammar_backend.compiled_grammar(structure)
            if grammar is None:
                if not self._stopping:
                    queue_level = level or COMPILE_LEVELS[-1]
                    executor = self._executors.get(queue_level)
                    executor = executor or self._create_executor(queue_level)
                    future = executor.submit(self._compile, command, request, structure, level)
                    self._compiling[request.id] = future
                return
        self._enqueue(_Submission(command, request, grammar))

    def _create_executor(self, level: QueueLevel) -> ThreadPoolExecutor:
        """Start threads for one level, so that its slow compilations do not delay other levels."""
        num_threads = min(level.slots, MAX_COMPILE_THREADS)
        executor = self._executors[level] = ThreadPoolExecutor(num_threads, "forge-compiler")
        return executor

    def _compile(
        self,
        command: Request | CheckedRequest,
        request: Request,
        structure: Structure,
        level: QueueLevel | None,
    ) -> None:
        entry: _Submission | _CompileFailure
        try:
            entry = _Submission(
                command, request, self._engine.grammar_backend.compile(structure, level)
            )
        except ForgeError as error:
            entry = _CompileFailure(request.id, str(error))
        except BaseException as error:  # a panic of a Rust library is no Exception
            entry = _CompileFailure(request.id, f"structure: it failed: {error!r}. Simplify it")
        with self._condition:
            if self._compiling.pop(request.id, None) is not None:  # None: it was aborted
                self._enqueue(entry)

    def stop(self) -> None:
        """End `run` after its current step. Any thread may call this."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def run(self) -> None:
        """Execute commands, step and report until `stop`. Raises what the engine raises."""
        engine = self._engine
        while self._wait_for_work():
            results = self._execute_commands()
            self._expire_sessions()
            start_s = time.monotonic()
            deltas = self._timings.label(engine.step())
            step_s = time.monotonic() - start_s
            if engine.is_paused:
                results.pause_results.extend(map(PauseResult, self._waiting_pauses))
                self._waiting_pauses.clear()
            queue_times_s = self._queue_times(engine.scheduler.new_request_ids, start_s)
            if self._post_times_s:  # some end before their first step
                for delta in deltas:
                    if delta.finish is not None:
                        self._post_times_s.pop(delta.request_id, None)
            self._timers.start(engine.scheduler.take_paused_sessions(), start_s + step_s)
            self._on_report(
                StepReport(
                    deltas,
                    results.rejections,
                    EngineStatus.from_engine(engine),
                    step_s,
                    queue_times_s,
                    results.reset_tickets,
                    results.ended_sessions,
                    results.resizes,
                    results.pause_results,
                    self._oldest_post_s(),
                    self._film.take_lines(),
                )
            )

    def _wait_for_work(self) -> bool:
        """Wait until a command, a step or a timer is due. Return False once `stop` was called."""
        with self._condition:
            while not (self._inbox or self._stopping or self._engine.can_step):
                deadline_s = self._timers.next_deadline_s
                timeout_s = None if deadline_s is None else deadline_s - time.monotonic()
                if timeout_s is not None and timeout_s <= 0:
                    break
                self._condition.wait(timeout_s)
            return not self._stopping

    def _expire_sessions(self) -> None:
        """Close the sessions whose pause is over. Turns posted so far have started."""
        if self._timers.next_deadline_s is None:
            return
        for timer in self._timers.pop_due(time.monotonic()):
            self._engine.expire_session(timer.key, timer.last_turn)

    def _execute_commands(self) -> _CommandResults:
        """Execute the commands posted so far, and return their results."""
        results = _CommandResults([], [], [], [], [])
        reposted = set[int]()  # ids of requests posted again here: their aborts must come later
        for _ in range(len(self._inbox)):
            match entry := self._inbox.popleft():
                case Abort(request_id) if request_id in reposted:
                    self.post(entry)
                case Abort():
                    self._engine.abort(entry.request_id)
                case ResetPrefixCache():
                    self._engine.reset_prefix_cache()
                    results.reset_tickets.append(entry.ticket)
                case EndSession(ticket, key):
                    results.ended_sessions.append((ticket, self._engine.end_session(key)))
                case Resize():
                    results.resizes.append((entry.ticket, self._resize(entry)))
                case OpenFilm():
                    self._film.open()
                case CloseFilm():
                    self._film.close()
                case Pause(ticket, mode):
                    self._engine.pause(mode)
                    self._waiting_pauses.append(ticket)
                case Resume() | UpdateWeights() | Sleep() | Wake():
                    results.pause_results.extend(self._execute_pause_command(entry))
                case _CompileFailure():
                    results.rejections.append((entry.request_id, entry.error))
                case _Submission(command, request) if self._must_recompile(entry):
                    self._post_times_s.pop(request.id, None)
                    reposted.add(request.id)
                    self.post(command)
                case _Submission(_, request):
                    try:
                        self._engine.submit(request)
                        self._timings.add(request, self._post_times_s[request.id])
                    except ForgeError as error:  # its id is live, or the pool shrank meanwhile
                        self._post_times_s.pop(request.id, None)
                        results.rejections.append((request.id, str(error)))
        return results

    def _execute_pause_command(
        self, command: Resume | UpdateWeights | Sleep | Wake
    ) -> list[PauseResult]:
        """Execute the command; return its result, after those of pauses that it ends."""
        engine, start_s = self._engine, time.monotonic()
        times: PartTimes = ()
        weight_version: str | None = None
        results: list[PauseResult] = []
        try:
            match command:
                case UpdateWeights(_, source, version, namespace):
                    weight_version = engine.update_weights(source, version, namespace=namespace)
                    times = (("update", time.monotonic() - start_s),)
                case Sleep(_, level):
                    times = engine.sleep(level)
                case Wake():
                    times = engine.wake()
                case Resume():
                    engine.resume()
                    ended = EnginePaused("the pause was ended before it began. Pause again")
                    results += [PauseResult(ticket, ended) for ticket in self._waiting_pauses]
                    self._waiting_pauses.clear()
        except EngineDead:
            raise
        except ForgeError as error:
            return [PauseResult(command.ticket, error)]
        return [*results, PauseResult(command.ticket, None, times, weight_version)]

    def _resize(self, command: Resize) -> ForgeError | None:
        """Resize the pools, or return why that is refused. Memory was allocated at the start."""
        config = self._engine.config
        host_tier = config.host_tier
        try:
            for name, value, limit in (
                ("num_blocks", command.num_blocks, config.num_blocks),
                (
                    "num_host_blocks",
                    command.num_host_blocks,
                    None if host_tier is None else host_tier.num_blocks,
                ),
            ):
                if limit is not None and type(value) is int and value > limit:
                    raise InvalidConfig(
                        name,
                        f"{str(value)[:32]} blocks, and memory was allocated for {limit}",
                        "Give less",
                    )
            self._engine.resize(command.num_blocks, command.num_host_blocks)
        except ForgeError as error:
            return error
        return None

    def _must_recompile(self, submission: _Submission) -> bool:
        """Return whether a matcher failed since, which drops its structure from the compiled ones.

        `submit` would compile the structure on this thread.
        """
        structure = submission.request.params.structure
        if structure is None or submission.grammar is None:
            return False
        return self._engine.grammar_backend.compiled_grammar(structure) is None

    def _oldest_post_s(self) -> float | None:
        """Return when the request was posted that has waited longest for its first step."""
        with self._condition:  # the dict is in order of time
            return next(iter(self._post_times_s.values()), None)

    def _queue_times(self, request_ids: Sequence[int], now_s: float) -> list[float]:
        """Return how long each request that is served for the first time has waited, in seconds."""
        post_times_s = [self._post_times_s.pop(request_id, None) for request_id in request_ids]
        return [now_s - posted_s for posted_s in post_times_s if posted_s is not None]
