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
from forge.lanes import LANES, Lane
from forge.request import Delta, Request, Structure

NUM_COMPILERS = 4
"""Structures of a lane compiled at the same time. Compiling runs outside Python's lock."""


class Abort(NamedTuple):
    """Nobody reads this request any more. Unknown and ended ids change nothing."""

    request_id: int


class Accepted(NamedTuple):
    """A request to serve, whose structure another process compiled within the limits of a lane."""

    request: Request
    lane: Lane


class Reset(NamedTuple):
    """No request to come shares what was computed before. A report has the ticket once it is so."""

    ticket: int


Command: TypeAlias = Request | Accepted | Abort | Reset
"""A request is a command to serve it. Its structure may take as long as any."""


class _Ready(NamedTuple):
    """A request for the next step.

    compiled   keeps its structure compiled until then; None where there is nothing to compile
    """

    command: Request | Accepted
    request: Request
    compiled: object


class _Failed(NamedTuple):
    """A request whose structure could not be compiled."""

    request_id: int
    fault: str


class Status(NamedTuple):
    """An engine at a glance.

    num_steps        grows while it makes progress
    num_blocks       of the cache; blocks_used of them belong to open sequences, and blocks_cached
                     to nobody, but their content is kept

    Since the engine was made, so that none of these ever falls:

    preemptions      how often a sequence lost its blocks and had to wait again
    queried_tokens   of sequences when they were first admitted; cached_tokens of them were there
    planned_tokens   that steps computed or are computing
    drafted_tokens   proposed ones that the model has judged; it took accepted_tokens of them
    """

    num_steps: int
    running: int
    waiting: int
    num_blocks: int
    blocks_used: int
    has_work: bool
    blocks_cached: int
    preemptions: int
    queried_tokens: int
    cached_tokens: int
    planned_tokens: int
    drafted_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """The engine's. Read while it runs, the figures may be of two steps."""
        scheduler = engine.scheduler
        pool = scheduler.pool
        return cls(
            engine.num_steps,
            len(scheduler.running),
            len(scheduler.waiting),
            pool.num_blocks,
            pool.used,
            engine.has_work,
            pool.cached_count,
            scheduler.preemptions,
            scheduler.queried_tokens,
            scheduler.cached_tokens,
            scheduler.planned_tokens,
            scheduler.drafted_tokens,
            scheduler.accepted_tokens,
        )


class Report(NamedTuple):
    """What a step gave, and what became of the commands before it.

    refused   requests that were not taken, and why
    step_s    how long the step took: schedule, forward, commit
    waits_s   of each request that the step is the first to serve: from `post` to this step
    resets    tickets of the resets carried out
    """

    deltas: Sequence[Delta]
    refused: Sequence[tuple[int, str]]
    status: Status
    step_s: float
    waits_s: Sequence[float]
    resets: Sequence[int]


class EngineLoop:
    """Steps while there is work and waits where there is none, until `end`.

    tell   called with every report, on the thread of `run`
    """

    def __init__(self, engine: Engine, tell: Callable[[Report], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._wake = threading.Condition()
        self._inbox: deque[_Ready | _Failed | Abort | Reset] = deque()
        self._posted_s: dict[int, float] = {}  # of requests that no step has served yet
        self._ending = False
        self._compilers: dict[Lane, ThreadPoolExecutor] = {}
        self._unready: dict[int, Future[None]] = {}  # requests whose structure is being compiled

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step. Any thread may call this.

        A request whose structure is not compiled yet is posted once it is; others do not wait,
        but for structures of the same lane.
        """
        with self._wake:
            match command:
                case Abort(request_id) if request_id in self._unready:
                    self._unready.pop(request_id).cancel()
                case Request():
                    self._prepare(command, command, LANES[-1])
                case Accepted(request, lane):
                    self._prepare(command, request, lane)
                case _:
                    self._put(command)

    def _put(self, order: _Ready | _Failed | Abort | Reset) -> None:
        if isinstance(order, _Ready):
            self._posted_s.setdefault(order.request.id, time.monotonic())
        self._inbox.append(order)
        self._wake.notify()

    def _prepare(self, command: Request | Accepted, request: Request, lane: Lane) -> None:
        structure, compiled = request.params.structure, None
        if structure is not None and self._engine.tokenizer is not None:
            compiled = self._engine.structures.compiled(structure)
            if compiled is None:
                if not self._ending:
                    compiler = self._compilers.get(lane) or self._begun(lane)
                    work = compiler.submit(self._compile, command, request, structure, lane)
                    self._unready[request.id] = work
                return
        self._put(_Ready(command, request, compiled))

    def _begun(self, lane: Lane) -> ThreadPoolExecutor:
        """Threads of the lane's own: what takes long there does not stand before other lanes."""
        count = min(lane.slots, NUM_COMPILERS)
        pool = self._compilers[lane] = ThreadPoolExecutor(count, "forge-compiler")
        return pool

    def _compile(
        self, command: Request | Accepted, request: Request, structure: Structure, lane: Lane
    ) -> None:
        order: _Ready | _Failed
        try:
            order = _Ready(command, request, self._engine.structures.compile(structure, lane))
        except ForgeError as fault:
            order = _Failed(request.id, str(fault))
        except BaseException as fault:  # a panic of a library is no Exception
            order = _Failed(request.id, f"structure: it failed: {fault!r}. Mend it")
        with self._wake:
            if self._unready.pop(request.id, None) is not None:  # or its reader has left
                self._put(order)

    def end(self) -> None:
        """`run` returns after the step it is in. Any thread may call this."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        for compiler in self._compilers.values():
            compiler.shutdown(wait=False, cancel_futures=True)

    def run(self) -> None:
        """Obey, step and tell. Raises what the engine raises."""
        engine = self._engine
        while self._waited():
            refused, resets = self._obeyed()
            start_s = time.monotonic()
            deltas = engine.step()
            step_s = time.monotonic() - start_s
            waits_s = self._waits(engine.scheduler.begun, start_s)
            self._tell(Report(deltas, refused, Status.of(engine), step_s, waits_s, resets))

    def _waited(self) -> bool:
        """There is something to do; False: it is to end."""
        with self._wake:
            while not (self._inbox or self._ending or self._engine.has_work):
                self._wake.wait()
            return not self._ending

    def _obeyed(self) -> tuple[list[tuple[int, str]], list[int]]:
        """Commands posted so far are carried out: requests refused, and why; tickets of resets."""
        refused: list[tuple[int, str]] = []
        resets: list[int] = []
        again = set[int]()  # ids of requests posted again here: their aborts must follow them
        for _ in range(len(self._inbox)):
            match order := self._inbox.popleft():
                case Abort(request_id) if request_id in again:
                    self.post(order)
                case Abort():
                    self._engine.abort(order.request_id)
                    self._posted_s.pop(order.request_id, None)
                case Reset():
                    self._engine.reset_prefix_cache()
                    resets.append(order.ticket)
                case _Failed():
                    refused.append((order.request_id, order.fault))
                case _Ready(command, request) if self._must_compile_again(order):
                    self._posted_s.pop(request.id, None)
                    again.add(request.id)
                    self.post(command)
                case _Ready(_, request):
                    try:
                        self._engine.submit(request)
                    except ForgeError as fault:  # its id is live, or the pool shrank since then
                        self._posted_s.pop(request.id, None)
                        refused.append((request.id, str(fault)))
        return refused, resets

    def _must_compile_again(self, ready: _Ready) -> bool:
        """Return whether a guide failed since, which drops its structure from those compiled.

        `submit` would compile the structure on this thread.
        """
        structure = ready.request.params.structure
        if structure is None or ready.compiled is None:
            return False
        return self._engine.structures.compiled(structure) is None

    def _waits(self, begun: Sequence[int], now_s: float) -> list[float]:
        """For how long each of these requests has waited, if this is the first it gets."""
        found = [self._posted_s.pop(request_id, None) for request_id in begun]
        return [now_s - posted_s for posted_s in found if posted_s is not None]
