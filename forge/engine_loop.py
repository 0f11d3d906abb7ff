"""EngineLoop: an engine and its inbox. Commands come from any thread; reports leave step by step.

Owns the order in which a busy engine obeys and steps. Knows no coroutine, and not whether those who
read its reports are threads of this process or another process.

    post(Request), post(Abort) ──► inbox ──► obey ──► Engine.step() ──► tell(Report)
                                               └──────── again ◄───────────┘
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeAlias

from forge.engine import Engine
from forge.errors import ForgeError
from forge.request import Delta, Request


class Abort(NamedTuple):
    """Nobody reads this request any more. Unknown and ended ids change nothing."""

    request_id: int


Command: TypeAlias = Request | Abort
"""A request is a command to serve it."""


class Status(NamedTuple):
    """An engine at a glance.

    num_steps       grows while it makes progress
    num_blocks      of the cache; blocks_used of them belong to open sequences
    """

    num_steps: int
    running: int
    waiting: int
    num_blocks: int
    blocks_used: int
    has_work: bool

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """The engine's. Read while it runs, the figures may be of two steps."""
        scheduler = engine.scheduler
        pool = scheduler.pool
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return cls(engine.num_steps, running, waiting, pool.num_blocks, pool.used, engine.has_work)


class Report(NamedTuple):
    """What a step gave, and what became of the commands before it.

    refused   requests that were not taken, and why
    """

    deltas: Sequence[Delta]
    refused: Sequence[tuple[int, str]]
    status: Status


class EngineLoop:
    """Steps while there is work and waits where there is none, until `end`.

    tell   called with every report, on the thread of `run`
    """

    def __init__(self, engine: Engine, tell: Callable[[Report], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._wake = threading.Condition()
        self._inbox: deque[Command] = deque()
        self._ending = False

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step. Any thread may call this."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def end(self) -> None:
        """`run` returns after the step it is in. Any thread may call this."""
        with self._wake:
            self._ending = True
            self._wake.notify()

    def run(self) -> None:
        """Obey, step and tell. Raises what the engine raises."""
        engine = self._engine
        while self._waited():
            refused = self._obeyed()
            self._tell(Report(engine.step(), refused, Status.of(engine)))

    def _waited(self) -> bool:
        """There is something to do; False: it is to end."""
        with self._wake:
            while not (self._inbox or self._ending or self._engine.has_work):
                self._wake.wait()
            return not self._ending

    def _obeyed(self) -> list[tuple[int, str]]:
        """Commands posted so far are carried out; those that could not be, and why."""
        refused = []
        for _ in range(len(self._inbox)):
            command = self._inbox.popleft()
            if isinstance(command, Abort):
                self._engine.abort(command.request_id)
                continue
            try:
                self._engine.submit(command)
            except ForgeError as fault:  # its id is live, or the pool shrank since it was checked
                refused.append((command.id, str(fault)))
        return refused
