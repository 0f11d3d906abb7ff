"""EngineProcess: an engine in a separate process, which owns the device.

Owns the process and the pipe to it. Knows no coroutine and no HTTP. The pipe carries plain values:
requests one way, and all deltas of a step the other way. What needs no device stays here: the
tokenizer, and an engine without a model, which checks requests by the same rules.

    this process                                    the engine's process
    post(Request | Abort) ─────── pipe ──────────►  listener ─► EngineLoop.post
    on_report(report) ◄─ reader ◄─ pipe ──────────  EngineLoop ─► one message a step

Python runs one thread of a process at a time. An engine that shares its process with hundreds of
streams waits for its turn after every call into the device. Meanwhile the device waits too: see
wiki/decisions.md for the cost. Here the streams may lag, and deltas that wait leave together.
While the engine is open, garbage collections here leave out the objects of the start too: one that
visits them takes 0.3 s, in which no request is read and no token leaves.

A model that is divided over ranks has this process as rank 0. The others are started alongside, and
all are watched from here: see forge/ranks.

Always true: when one of the two processes ends, the other finds the pipe closed.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, NamedTuple

from forge.absent_model import AbsentModel
from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_loop import EngineLoop
from forge.engine_messages import Command, EngineStatus, StepReport
from forge.engine_options import Options, model_options, open_engine
from forge.engine_thread import CLOSE_REASON, LOG, STOP_TIMEOUT_S, EndCallback, ReportCallback
from forge.errors import EngineDead, ForgeError, InvalidConfig
from forge.log import nonblocking_logging
from forge.models.gc_control import freeze_objects
from forge.models.loader import import_checkpoint_packages
from forge.policy import Policy
from forge.policy_loader import load_policy
from forge.rank_start import start_ranks
from forge.ranks.process_end import collect_exit_code, has_ended
from forge.ranks.rank_context import LeaderContext
from forge.ranks.rank_process import end_with_parent, ignore_end_signals
from forge.request import Delta, FinishReason
from forge.sampling_defaults import SamplingDefaults
from forge.start_log import StartLog
from forge.tokenizer import Tokenizer

FAILED_STOP_TIMEOUT_S = 1.0
"""Seconds that a process may take to end after its engine failed: it has nothing left to save."""
KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed process: a driver that hangs may keep it indefinitely."""

DELTA_DEFAULTS = tuple(Delta(0, 0))[3:]
"""Fields of a Delta after its tokens, at their defaults: most deltas have only these."""


class _EngineOpened(NamedTuple):
    """Message of the engine's process: the engine is open."""

    config: EngineConfig
    model: AbsentModel
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults
    status: EngineStatus


class _EngineEnded(NamedTuple):
    """Message of the engine's process: the engine has ended. No message follows it."""

    finish: FinishReason
    failure: str


class EngineProcess:
    """An open engine in another process.

    engine   checks requests by the same rules as the other engine; it never steps
    status   the other engine's status in its latest report
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
                "policy", "functions cannot be sent to another process", "Give a name or a FILE.py"
            )
        context = get_context("spawn")
        self._ranks = start_ranks(model, model_options(options), policy, load_policy)
        rank_context = None if self._ranks is None else self._ranks.context_of_process()
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=_run_engine,
            # The clock is the same in every process of the machine.
            args=(child_pipe, model, policy, options, time.monotonic(), rank_context),
            name="forge-engine",
            daemon=True,
        )
        self._process.start()
        child_pipe.close()
        if self._ranks is not None and rank_context is not None:
            self._ranks.watch_process(self._process, rank_context)
        self._exit_stack = ExitStack()
        try:
            opened = self._receive_opened(model)
            if self._ranks is not None:
                self._ranks.wait_until_ready()
        except BaseException:
            self._exit_stack.close()
            self._process.kill()
            if self._ranks is not None:
                self._ranks.kill()
                self._ranks.close()
            raise
        self.tokenizer, self.sampling_defaults = opened.tokenizer, opened.sampling_defaults
        self.engine = Engine(opened.model, opened.config, opened.tokenizer)
        self.status = opened.status
        self._on_report, self._on_end = on_report, on_end
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._is_closing = False
        # `post` never waits for the pipe: an engine that does not read fills it.
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        # Runs at exit before multiprocessing waits for child processes that are still open.
        Finalize(self, self._commands.put, (None,), exitpriority=0)
        self._writer = threading.Thread(
            target=self._send_commands, name="forge-commands", daemon=True
        )
        self._writer.start()
        self._reader = threading.Thread(
            target=self._read_reports, name="forge-reports", daemon=True
        )
        self._reader.start()

    def post(self, command: Command) -> None:
        """Hand the command to the engine, which executes it before its next step."""
        self._commands.put(command)

    def close(self) -> None:
        """End the process, or kill it after `STOP_TIMEOUT_S`."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._ranks is not None:
            self._ranks.expect_end()
        self._commands.put(None)
        if not has_ended(self._process, self._stop_timeout_s):
            LOG.warning("the engine did not end within %g s and is killed", self._stop_timeout_s)
            self._process.kill()
            if self._ranks is not None:  # It may have waited for one of them.
                self._ranks.kill()
        exit_code = collect_exit_code(self._process, KILL_TIMEOUT_S)
        if self._ranks is not None:
            self._ranks.close()
        for thread in (self._reader, self._writer):
            thread.join(KILL_TIMEOUT_S)
        if exit_code is not None and not (self._reader.is_alive() or self._writer.is_alive()):
            self._pipe.close()
            self._process.close()
        self._exit_stack.close()

    def _receive_opened(self, model: str) -> _EngineOpened:
        """Return the first message of the process. Raises the error that kept the engine shut.

        While the process imports and loads, a thread imports what reads the tokenizer here. So an
        end of the process is seen at once.
        """
        importer = threading.Thread(
            target=_import_packages, args=(model,), name="forge-imports", daemon=True
        )
        importer.start()
        try:
            data = self._pipe.recv_bytes()
        except EOFError:
            raise EngineDead(f"the engine did not start: {self._describe_exit()}") from None
        importer.join()  # Two threads that import modules of a cycle can see one incomplete.
        self._exit_stack.enter_context(freeze_objects())
        message = ForkingPickler.loads(data)
        if isinstance(message, ForgeError):
            raise message
        opened: _EngineOpened = message
        return opened

    def _send_commands(self) -> None:
        try:
            while True:
                command = self._commands.get()
                self._pipe.send(command)
                if command is None:
                    return
        except OSError:
            return  # a process that is gone needs no command
        except BaseException as error:  # its caller would wait indefinitely
            LOG.exception("a command of the engine was lost")
            self._on_end(FinishReason.ERROR, repr(error))

    def _read_reports(self) -> None:
        try:
            while not isinstance(message := self._pipe.recv(), _EngineEnded):
                report = _unpack_report(*message)
                self.status = report.status
                if report.status.num_blocks != self.engine.scheduler.pool.num_blocks:
                    # What never fits is refused here too.
                    self.engine.resize(report.status.num_blocks)
                self._on_report(report)
            end = message
        except (EOFError, OSError):
            end = _EngineEnded(FinishReason.ABORT, CLOSE_REASON)
            if not self._is_closing:
                end = _EngineEnded(FinishReason.ERROR, self._describe_exit())
        except BaseException as error:  # open streams must end, whatever the error is
            LOG.exception("a report of the engine was lost")
            end = _EngineEnded(FinishReason.ERROR, repr(error))
        if end.finish is FinishReason.ERROR:
            self._stop_timeout_s = FAILED_STOP_TIMEOUT_S
            end = end._replace(failure=self._follower_failure() or end.failure)
        self._on_end(*end)

    def _follower_failure(self) -> str | None:
        """Return why a rank other than 0 ended, if one has: rank 0 then fails because of it."""
        return None if self._ranks is None else self._ranks.follower_failure(FAILED_STOP_TIMEOUT_S)

    def _describe_exit(self) -> str:
        exit_code = collect_exit_code(self._process, STOP_TIMEOUT_S)
        if (failure := self._follower_failure()) is not None:
            return failure
        return f"its process ended with exit code {exit_code}"


def _import_packages(model: str) -> None:
    """Import what reads the model's tokenizer, and collect what the imports leave."""
    import_checkpoint_packages(model)
    gc.collect()


def _pack_report(report: StepReport) -> tuple[Any, ...]:
    """Return the report as plain tuples: class names would be most of its bytes."""
    deltas = [delta[:3] if delta[3:] == DELTA_DEFAULTS else tuple(delta) for delta in report.deltas]
    return deltas, report.rejections, tuple(report.status), *report[3:]


def _unpack_report(deltas: Any, rejections: Any, status: Any, *figures: Any) -> StepReport:
    return StepReport(
        [Delta(*each) for each in deltas], rejections, EngineStatus(*status), *figures
    )


# The other process.


def _run_engine(
    pipe: Connection,
    model: str,
    policy: str,
    options: Options,
    began_s: float,
    rank_context: LeaderContext | None,
) -> None:
    """Open the engine, report that it is open, and serve until the parent ends it or dies.

    began_s        time.monotonic() when the parent began to start this process
    rank_context   context of rank 0, where the parent has started other ranks; None: there are none
    """
    start = StartLog(began_s, "process")
    ignore_end_signals()
    if rank_context is not None and rank_context.lifeline is not None:
        end_with_parent(rank_context.lifeline)
    with nonblocking_logging(), suppress(BrokenPipeError), ExitStack() as exit_stack:
        try:
            engine, loaded = open_engine(model, policy, options, exit_stack, start, rank_context)
        except ForgeError as error:
            pipe.send(error)
            return
        pipe.send(
            _EngineOpened(
                engine.config,
                AbsentModel.from_model(engine.model),
                loaded.tokenizer,
                loaded.sampling_defaults,
                EngineStatus.from_engine(engine),
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
        except BaseException as error:
            LOG.exception("the engine has ended")
            end = _EngineEnded(FinishReason.ERROR, repr(error))
        pipe.send(end)


def _receive_commands(
    pipe: Connection, post: Callable[[Command], None], stop: Callable[[], None]
) -> None:
    """Post the commands of the pipe until None arrives or the pipe closes; then stop the loop."""
    with suppress(EOFError, OSError):
        while (command := pipe.recv()) is not None:
            post(command)
    stop()
