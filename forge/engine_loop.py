"""EngineLoop: an engine and its inbox. Commands come from any thread; reports leave step by step.

Owns the order in which a busy engine obeys and steps. Knows no coroutine, and not whether those who
read its reports are threads of this process or another process.

    post(Request), post(Abort) ──► inbox ──► obey ──► Engine.step() ──► tell(Report)
                                               └──────── again ◄───────────┘
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self, TypeAlias

from forge.engine import Engine
from forge.errors import ForgeError
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.request import Delta, Request, Structure

MAX_COMPILE_THREADS = 4
"""Structures of a lane compiled at the same time. Compiling runs outside Python's lock."""


class Abort(NamedTuple):
    """Nobody reads this request any more. Unknown and ended ids change nothing."""

    request_id: int


class CheckedRequest(NamedTuple):
    """A request to serve, whose structure another process compiled within the limits of a lane."""

    request: Request
    level: QueueLevel


class ResetPrefixCache(NamedTuple):
    """No request to come shares what was computed before. A report has the ticket once it is so."""

    ticket: int


Command: TypeAlias = Request | CheckedRequest | Abort | ResetPrefixCache
"""A request is a command to serve it. Its structure may take as long as any."""


class _Submission(NamedTuple):
    """A request for the next step.

    grammar   keeps its structure compiled until then; None where there is nothing to compile
    """

    command: Request | CheckedRequest
    request: Request
    grammar: object


class _CompileFailure(NamedTuple):
    """A request whose structure could not be compiled."""

    request_id: int
    error: str


class EngineStatus(NamedTuple):
    """An engine at a glance.

    num_steps    grows while it makes progress
    num_blocks   of the cache; blocks_used of them belong to open sequences, and blocks_cached to
                 nobody, but their content is kept

    Since the engine was made, so that none of these ever falls:

    num_preemptions      how often a sequence lost its blocks and had to wait again
    num_queried_tokens   of sequences when they were first admitted; cached_tokens of them were
                         there
    num_planned_tokens   that steps computed or are computing
    num_draft_tokens     proposed ones that the model has judged; it took accepted_tokens of them
    """

    num_steps: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    has_work: bool
    num_cached_blocks: int
    num_preemptions: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_planned_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """The engine's. Read while it runs, the figures may be of two steps."""
        scheduler = engine.scheduler
        pool = scheduler.pool
        return cls(
            engine.num_steps,
            len(scheduler.running),
            len(scheduler.waiting),
            pool.num_blocks,
            pool.num_used_blocks,
            engine.has_work,
            pool.num_cached_blocks,
            scheduler.num_preemptions,
            scheduler.num_queried_tokens,
            scheduler.num_cached_tokens,
            scheduler.num_planned_tokens,
            scheduler.num_draft_tokens,
            scheduler.num_accepted_tokens,
        )


class StepReport(NamedTuple):
    """What a step gave, and what became of the commands before it.

    rejections      requests that were not taken, and why
    step_s          how long the step took: schedule, forward, commit
    queue_times_s   of each request that the step is the first to serve: from `post` to this step
    reset_tickets   tickets of the resets carried out
    """

    deltas: Sequence[Delta]
    rejections: Sequence[tuple[int, str]]
    status: EngineStatus
    step_s: float
    queue_times_s: Sequence[float]
    reset_tickets: Sequence[int]


class EngineLoop:
    """Steps while there is work and waits where there is none, until `stop`.

    on_report   called with every report, on the thread of `run`
    """

    def __init__(self, engine: Engine, on_report: Callable[[StepReport], None]) -> None:
        self._engine = engine
        self._on_report = on_report
        self._condition = threading.Condition()
        self._inbox: deque[_Submission | _CompileFailure | Abort | ResetPrefixCache] = deque()
        self._post_times_s: dict[int, float] = {}  # of requests that no step has served yet
        self._stopping = False
        self._executors: dict[QueueLevel, ThreadPoolExecutor] = {}
        self._compiling: dict[int, Future[None]] = {}  # requests whose structure is being compiled

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step. Any thread may call this.

        A request whose structure is not compiled yet is posted once it is; others do not wait,
        but for structures of the same lane.
        """
        with self._condition:
            match command:
                case Abort(request_id) if request_id in self._compiling:
                    self._compiling.pop(request_id).cancel()
                case Request():
                    self._submit_or_compile(command, command, COMPILE_LEVELS[-1])
                case CheckedRequest(request, lane):
                    self._submit_or_compile(command, request, lane)
                case _:
                    self._enqueue(command)

    def _enqueue(self, entry: _Submission | _CompileFailure | Abort | ResetPrefixCache) -> None:
        if isinstance(entry, _Submission):
            self._post_times_s.setdefault(entry.request.id, time.monotonic())
        self._inbox.append(entry)
        self._condition.notify()

    def _submit_or_compile(
        self, command: Request | CheckedRequest, request: Request, level: QueueLevel
    ) -> None:
        structure, grammar = request.params.structure, None
        if structure is not None and self._engine.tokenizer is not None:
            grammar = self._engine.grammar_backend.compiled_grammar(structure)
            if grammar is None:
                if not self._stopping:
                    executor = self._executors.get(level) or self._create_executor(level)
                    future = executor.submit(self._compile, command, request, structure, level)
                    self._compiling[request.id] = future
                return
        self._enqueue(_Submission(command, request, grammar))

    def _create_executor(self, level: QueueLevel) -> ThreadPoolExecutor:
        """Threads of the lane's own: what takes long there does not stand before other lanes."""
        num_threads = min(level.slots, MAX_COMPILE_THREADS)
        executor = self._executors[level] = ThreadPoolExecutor(num_threads, "forge-compiler")
        return executor

    def _compile(
        self,
        command: Request | CheckedRequest,
        request: Request,
        structure: Structure,
        level: QueueLevel,
    ) -> None:
        entry: _Submission | _CompileFailure
        try:
            entry = _Submission(
                command, request, self._engine.grammar_backend.compile(structure, level)
            )
        except ForgeError as fault:
            entry = _CompileFailure(request.id, str(fault))
        except BaseException as fault:  # a panic of a library is no Exception
            entry = _CompileFailure(request.id, f"structure: it failed: {fault!r}. Mend it")
        with self._condition:
            if self._compiling.pop(request.id, None) is not None:  # or its reader has left
                self._enqueue(entry)

    def stop(self) -> None:
        """`run` returns after the step it is in. Any thread may call this."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def run(self) -> None:
        """Obey, step and tell. Raises what the engine raises."""
        engine = self._engine
        while self._wait_for_work():
            rejections, reset_tickets = self._execute_commands()
            start_s = time.monotonic()
            deltas = engine.step()
            step_s = time.monotonic() - start_s
            queue_times_s = self._queue_times(engine.scheduler.new_request_ids, start_s)
            self._on_report(
                StepReport(
                    deltas,
                    rejections,
                    EngineStatus.from_engine(engine),
                    step_s,
                    queue_times_s,
                    reset_tickets,
                )
            )

    def _wait_for_work(self) -> bool:
        """There is something to do; False: it is to end."""
        with self._condition:
            while not (self._inbox or self._stopping or self._engine.has_work):
                self._condition.wait()
            return not self._stopping

    def _execute_commands(self) -> tuple[list[tuple[int, str]], list[int]]:
        """Commands posted so far are carried out: requests refused, and why; tickets of resets."""
        rejections: list[tuple[int, str]] = []
        reset_tickets: list[int] = []
        reposted = set[int]()  # ids of requests posted again here: their aborts must follow them
        for _ in range(len(self._inbox)):
            match entry := self._inbox.popleft():
                case Abort(request_id) if request_id in reposted:
                    self.post(entry)
                case Abort():
                    self._engine.abort(entry.request_id)
                    self._post_times_s.pop(entry.request_id, None)
                case ResetPrefixCache():
                    self._engine.reset_prefix_cache()
                    reset_tickets.append(entry.ticket)
                case _CompileFailure():
                    rejections.append((entry.request_id, entry.error))
                case _Submission(command, request) if self._must_recompile(entry):
                    self._post_times_s.pop(request.id, None)
                    reposted.add(request.id)
                    self.post(command)
                case _Submission(_, request):
                    try:
                        self._engine.submit(request)
                    except ForgeError as fault:  # its id is live, or the pool shrank since then
                        self._post_times_s.pop(request.id, None)
                        rejections.append((request.id, str(fault)))
        return rejections, reset_tickets

    def _must_recompile(self, submission: _Submission) -> bool:
        """Return whether a guide failed since, which drops its structure from those compiled.

        `submit` would compile the structure on this thread.
        """
        structure = submission.request.params.structure
        if structure is None or submission.grammar is None:
            return False
        return self._engine.grammar_backend.compiled_grammar(structure) is None

    def _queue_times(self, request_ids: Sequence[int], now_s: float) -> list[float]:
        """For how long each of these requests has waited, if this is the first it gets."""
        post_times_s = [self._post_times_s.pop(request_id, None) for request_id in request_ids]
        return [now_s - posted_s for posted_s in post_times_s if posted_s is not None]
