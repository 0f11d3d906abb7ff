"""EngineThread: an engine in a thread of this process.

Owns the thread and the engine's resources. Knows no coroutine. Use it to embed an engine: nothing
is copied and no process starts. For a process that serves many streams use engine_process.py:
Python runs one thread at a time, and an engine that waits for its turn keeps the device waiting.

    post ──► EngineLoop in "forge-engine" ──► on_report(report) ... on_end(finish, failure)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from forge.engine_loop import EngineLoop
from forge.engine_messages import Command, EngineStatus, StepReport
from forge.engine_options import Options, open_engine
from forge.policy import Policy
from forge.request import FinishReason

LOG = logging.getLogger("forge.engine")

CLOSE_REASON = "it was closed"
"""Failure text of an engine that ended because it was closed."""

STOP_TIMEOUT_S = 10.0
"""Seconds that an engine may take to end."""

ReportCallback = Callable[[StepReport], None]
EndCallback = Callable[[FinishReason, str], None]
"""Takes the finish reason of open streams and why the engine ended. Later calls change nothing."""


class EngineThread:
    """An open engine. Only its own thread may step it."""

    def __init__(
        self,
        model: str,
        policy: str | Policy,
        options: Options,
        on_report: ReportCallback,
        on_end: EndCallback,
    ) -> None:
        self._exit_stack = ExitStack()
        self.engine, loaded = open_engine(model, policy, options, self._exit_stack)
        self.tokenizer, self.sampling_defaults = loaded.tokenizer, loaded.sampling_defaults
        self._loop = EngineLoop(self.engine, on_report)
        self._on_end = on_end
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-engine", daemon=True)
        self._thread.start()

    @property
    def status(self) -> EngineStatus:
        """Return the engine's status now."""
        return EngineStatus.from_engine(self.engine)

    def post(self, command: Command) -> None:
        """Hand the command to the engine, which executes it before its next step."""
        self._loop.post(command)

    def close(self) -> None:
        """End the thread and close the model.

        A model that hangs cannot be interrupted. After `STOP_TIMEOUT_S` its thread is left running,
        and closes the model if it ever returns.
        """
        self._loop.stop()
        self._thread.join(self._stop_timeout_s)
        if self._thread.is_alive() and not self._abandoned.is_set():
            self._abandoned.set()
            LOG.warning(
                "the engine did not end within %g s and is left running", self._stop_timeout_s
            )
            self._stop_timeout_s = 0.0
        if not self._thread.is_alive():
            self._exit_stack.close()

    def _run(self) -> None:
        finish, failure = FinishReason.ABORT, CLOSE_REASON
        try:
            self._loop.run()
        except BaseException as error:  # every open stream must end with this error
            finish, failure = FinishReason.ERROR, repr(error)
            LOG.exception("the engine has ended")
        self._on_end(finish, failure)
        if self._abandoned.is_set():
            self._exit_stack.close()
