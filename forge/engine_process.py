"""EngineProcess: an engine in a process of its own, which owns the device.

Owns the process and the pipe to it. What crosses it is plain: requests and ids one way, the deltas
of a whole step the other way. Here remains what needs no device: the tokenizer, and an engine
without a model that checks requests as the other one will.

    this process                                    the engine's process
    post(Request | Abort) ─────── pipe ──────────►  listener ─► EngineLoop.post
    tell(Report) ◄── reader ◄──── pipe ───────────  EngineLoop ─► one message a step

Python runs one thread of a process at a time. Beside some hundred streams, an engine that waits for
its turn after every call into the device keeps the device waiting too: on an H200, 29 % of the
tokens of 256 streams were lost. Here streams may lag, and what waits leaves together.

Whichever process ends, the other notices by the pipe.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_loop import Command, EngineLoop, Report, Status
from forge.engine_thread import CLOSED, LOG, PATIENCE_S, Ended, Tell
from forge.errors import EngineDead, ForgeError, InvalidConfig
from forge.llm import Options, open_engine
from forge.log import write_plainly
from forge.models.load import prepare
from forge.policy import Policy
from forge.request import Delta, FinishReason
from forge.seam import StepPlan
from forge.tokenizer import Tokenizer

FAILED_PATIENCE_S = 1.0
"""How long one may take whose engine has failed: nothing in it is worth waiting for."""
KILLED_S = 5.0
"""How long one may take that was killed: a driver that hangs may keep it indefinitely."""

PLAIN = tuple(Delta(0, 0))[3:]
"""What most deltas say beside their tokens: nothing."""


class _Ready(NamedTuple):
    """The engine is open."""

    config: EngineConfig
    vocab_size: int
    eos_token: int
    tokenizer: Tokenizer


class _Last(NamedTuple):
    """The engine has ended. No message comes after this."""

    finish: FinishReason
    failure: str


class _Elsewhere(NamedTuple):
    """A model that another process has: enough of it to check a request."""

    vocabulary: int
    end: int

    def vocab_size(self) -> int:
        """The model's."""
        return self.vocabulary

    def num_layers(self) -> int:
        """Nobody here knows."""
        return 0

    def eos_token(self) -> int:
        """The model's."""
        return self.end

    def forward(self, plan: StepPlan) -> NoReturn:
        """Never."""
        raise AssertionError("the model is in another process")


class EngineProcess:
    """An open engine in another process.

    engine   checks requests as the other one does, and never steps
    status   of the other engine, when it last told
    """

    def __init__(
        self, model: str, policy: str | Policy, options: Options, tell: Tell, ended: Ended
    ) -> None:
        if isinstance(policy, Policy):
            raise InvalidConfig(
                "policy", "functions cannot go to another process", "Give a name or a FILE.py"
            )
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, model, policy, options), name="forge-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            prepare(model)  # while the other process does the same, and more
            ready = self._first()
        except BaseException:
            self._process.kill()
            raise
        self.tokenizer = ready.tokenizer
        elsewhere = _Elsewhere(ready.vocab_size, ready.eos_token)
        self.engine = Engine(elsewhere, ready.config, ready.tokenizer)
        self.status = Status.of(self.engine)
        self._tell, self._ended = tell, ended
        self._patience_s = PATIENCE_S
        self._closing = False
        # Whoever posts never waits for the pipe: an engine that does not read fills it.
        self._outgoing: SimpleQueue[Command | None] = SimpleQueue()
        # Before the processes that nobody has closed are waited for when this one ends.
        Finalize(self, self._outgoing.put, (None,), exitpriority=0)
        threading.Thread(target=self._send, name="forge-commands", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="forge-reports", daemon=True)
        self._reader.start()

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step, if there is one."""
        self._outgoing.put(command)

    def close(self) -> None:
        """End the process, or kill it after `PATIENCE_S`."""
        self._closing = True
        self._outgoing.put(None)
        self._process.join(self._patience_s)
        if self._process.is_alive():
            LOG.warning("the engine did not end within %g s and is killed", self._patience_s)
            self._process.kill()
            self._process.join(KILLED_S)
        self._reader.join(KILLED_S)

    def _first(self) -> _Ready:
        """What the process says once its engine is open. Raises what it could not open for."""
        try:
            said = self._pipe.recv()
        except EOFError:
            raise EngineDead(f"the engine did not start: {self._exit()}") from None
        if isinstance(said, ForgeError):
            raise said
        ready: _Ready = said
        return ready

    def _send(self) -> None:
        with suppress(OSError):  # one that is gone needs no telling
            while True:
                command = self._outgoing.get()
                self._pipe.send(command)
                if command is None:
                    return

    def _read(self) -> None:
        try:
            while not isinstance(said := self._pipe.recv(), _Last):
                report = _unpacked(*said)
                self.status = report.status
                self._tell(report)
            last = said
        except (EOFError, OSError):
            last = _Last(FinishReason.ABORT, CLOSED)
            if not self._closing:
                last = _Last(FinishReason.ERROR, self._exit())
        except BaseException as fault:  # whatever it is, open streams must hear of it
            LOG.exception("what the engine told was lost")
            last = _Last(FinishReason.ERROR, repr(fault))
        if last.finish is FinishReason.ERROR:
            self._patience_s = FAILED_PATIENCE_S
        self._ended(*last)

    def _exit(self) -> str:
        self._process.join(PATIENCE_S)
        return f"its process ended with exit code {self._process.exitcode}"


def _packed(report: Report) -> tuple[Any, ...]:
    """The report without names, which would be most of its bytes."""
    deltas = [delta[:3] if delta[3:] == PLAIN else tuple(delta) for delta in report.deltas]
    return deltas, report.refused, tuple(report.status), *report[3:]


def _unpacked(deltas: Any, refused: Any, status: Any, *figures: Any) -> Report:
    return Report([Delta(*each) for each in deltas], refused, Status(*status), *figures)


# The other process.


def _run(pipe: Connection, model: str, policy: str, options: Options) -> None:
    """Open the engine, say so, and serve until told to end or nobody is there to tell."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal's go to all; who started it decides
    with write_plainly(), suppress(BrokenPipeError), ExitStack() as closing:
        try:
            engine, tokenizer = open_engine(model, policy, options, closing)
        except ForgeError as refused:
            pipe.send(refused)
            return
        seen = engine.model
        pipe.send(_Ready(engine.config, seen.vocab_size(), seen.eos_token(), tokenizer))
        loop = EngineLoop(engine, lambda report: pipe.send(_packed(report)))
        listener = threading.Thread(target=_listen, args=(pipe, loop.post, loop.end), daemon=True)
        listener.start()
        last = _Last(FinishReason.ABORT, CLOSED)
        try:
            loop.run()
        except BrokenPipeError:
            raise
        except BaseException as fault:
            LOG.exception("the engine has ended")
            last = _Last(FinishReason.ERROR, repr(fault))
        pipe.send(last)


def _listen(pipe: Connection, post: Callable[[Command], None], end: Callable[[], None]) -> None:
    """Post what comes, until told to end or nobody is left to tell."""
    with suppress(EOFError, OSError):
        while (command := pipe.recv()) is not None:
            post(command)
    end()
