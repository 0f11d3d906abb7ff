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
from forge.engine_loop import Command, EngineLoop, EngineStatus, StepReport
from forge.engine_thread import CLOSE_REASON, LOG, STOP_TIMEOUT_S, EndCallback, ReportCallback
from forge.errors import EngineDead, ForgeError, InvalidConfig
from forge.llm import Options, open_engine
from forge.log import nonblocking_logging
from forge.models.loader import import_checkpoint_packages
from forge.policy import Policy
from forge.request import Delta, FinishReason
from forge.seam import StepPlan
from forge.tokenizer import Tokenizer

FAILED_STOP_TIMEOUT_S = 1.0
"""How long one may take whose engine has failed: nothing in it is worth waiting for."""
KILL_TIMEOUT_S = 5.0
"""How long one may take that was killed: a driver that hangs may keep it indefinitely."""

DELTA_DEFAULTS = tuple(Delta(0, 0))[3:]
"""What most deltas say beside their tokens: nothing."""


class _EngineOpened(NamedTuple):
    """The engine is open."""

    config: EngineConfig
    vocab_size: int
    eos_token: int
    tokenizer: Tokenizer


class _EngineEnded(NamedTuple):
    """The engine has ended. No message comes after this."""

    finish: FinishReason
    failure: str


class _RemoteModel(NamedTuple):
    """A model that another process has: enough of it to check a request."""

    vocabulary_size: int
    eos_token_id: int

    def vocab_size(self) -> int:
        """The model's."""
        return self.vocabulary_size

    def num_layers(self) -> int:
        """Nobody here knows."""
        return 0

    def eos_token(self) -> int:
        """The model's."""
        return self.eos_token_id

    def forward(self, plan: StepPlan) -> NoReturn:
        """Never."""
        raise AssertionError("the model is in another process")


class EngineProcess:
    """An open engine in another process.

    engine   checks requests as the other one does, and never steps
    status   of the other engine, when it last told
    """

    def __init__(
        self,
        model: str,
        policy: str | Policy,
        options: Options,
        on_report: ReportCallback,
        on_end: EndCallback,
    ) -> None:
        if isinstance(policy, Policy):
            raise InvalidConfig(
                "policy", "functions cannot go to another process", "Give a name or a FILE.py"
            )
        context = get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=_run_engine,
            args=(child_pipe, model, policy, options),
            name="forge-engine",
            daemon=True,
        )
        self._process.start()
        child_pipe.close()
        try:
            import_checkpoint_packages(model)  # while the other process does the same, and more
            opened = self._receive_opened()
        except BaseException:
            self._process.kill()
            raise
        self.tokenizer = opened.tokenizer
        remote_model = _RemoteModel(opened.vocab_size, opened.eos_token)
        self.engine = Engine(remote_model, opened.config, opened.tokenizer)
        self.status = EngineStatus.from_engine(self.engine)
        self._on_report, self._on_end = on_report, on_end
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._is_closing = False
        # Whoever posts never waits for the pipe: an engine that does not read fills it.
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        # Before the processes that nobody has closed are waited for when this one ends.
        Finalize(self, self._commands.put, (None,), exitpriority=0)
        threading.Thread(target=self._send_commands, name="forge-commands", daemon=True).start()
        self._reader = threading.Thread(
            target=self._read_reports, name="forge-reports", daemon=True
        )
        self._reader.start()

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step, if there is one."""
        self._commands.put(command)

    def close(self) -> None:
        """End the process, or kill it after `STOP_TIMEOUT_S`."""
        self._is_closing = True
        self._commands.put(None)
        self._process.join(self._stop_timeout_s)
        if self._process.is_alive():
            LOG.warning("the engine did not end within %g s and is killed", self._stop_timeout_s)
            self._process.kill()
            self._process.join(KILL_TIMEOUT_S)
        self._reader.join(KILL_TIMEOUT_S)

    def _receive_opened(self) -> _EngineOpened:
        """What the process says once its engine is open. Raises what it could not open for."""
        try:
            message = self._pipe.recv()
        except EOFError:
            raise EngineDead(f"the engine did not start: {self._describe_exit()}") from None
        if isinstance(message, ForgeError):
            raise message
        opened: _EngineOpened = message
        return opened

    def _send_commands(self) -> None:
        with suppress(OSError):  # one that is gone needs no telling
            while True:
                command = self._commands.get()
                self._pipe.send(command)
                if command is None:
                    return

    def _read_reports(self) -> None:
        try:
            while not isinstance(message := self._pipe.recv(), _EngineEnded):
                report = _unpack_report(*message)
                self.status = report.status
                self._on_report(report)
            end = message
        except (EOFError, OSError):
            end = _EngineEnded(FinishReason.ABORT, CLOSE_REASON)
            if not self._is_closing:
                end = _EngineEnded(FinishReason.ERROR, self._describe_exit())
        except BaseException as fault:  # whatever it is, open streams must hear of it
            LOG.exception("what the engine told was lost")
            end = _EngineEnded(FinishReason.ERROR, repr(fault))
        if end.finish is FinishReason.ERROR:
            self._stop_timeout_s = FAILED_STOP_TIMEOUT_S
        self._on_end(*end)

    def _describe_exit(self) -> str:
        self._process.join(STOP_TIMEOUT_S)
        return f"its process ended with exit code {self._process.exitcode}"


def _pack_report(report: StepReport) -> tuple[Any, ...]:
    """The report without names, which would be most of its bytes."""
    deltas = [delta[:3] if delta[3:] == DELTA_DEFAULTS else tuple(delta) for delta in report.deltas]
    return deltas, report.rejections, tuple(report.status), *report[3:]


def _unpack_report(deltas: Any, rejections: Any, status: Any, *figures: Any) -> StepReport:
    return StepReport(
        [Delta(*each) for each in deltas], rejections, EngineStatus(*status), *figures
    )


# The other process.


def _run_engine(pipe: Connection, model: str, policy: str, options: Options) -> None:
    """Open the engine, say so, and serve until told to end or nobody is there to tell."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # A terminal's go to all; who started it decides.
        signal.signal(signal_number, signal.SIG_IGN)
    with nonblocking_logging(), suppress(BrokenPipeError), ExitStack() as exit_stack:
        try:
            engine, tokenizer = open_engine(model, policy, options, exit_stack)
        except ForgeError as refused:
            pipe.send(refused)
            return
        engine_model = engine.model
        pipe.send(
            _EngineOpened(
                engine.config, engine_model.vocab_size(), engine_model.eos_token(), tokenizer
            )
        )
        loop = EngineLoop(engine, lambda report: pipe.send(_pack_report(report)))
        listener = threading.Thread(
            target=_receive_commands, args=(pipe, loop.post, loop.stop), daemon=True
        )
        listener.start()
        end = _EngineEnded(FinishReason.ABORT, CLOSE_REASON)
        try:
            loop.run()
        except BrokenPipeError:
            raise
        except BaseException as fault:
            LOG.exception("the engine has ended")
            end = _EngineEnded(FinishReason.ERROR, repr(fault))
        pipe.send(end)


def _receive_commands(
    pipe: Connection, post: Callable[[Command], None], stop: Callable[[], None]
) -> None:
    """Post what comes, until told to end or nobody is left to tell."""
    with suppress(EOFError, OSError):
        while (command := pipe.recv()) is not None:
            post(command)
    stop()
