"""EngineThread: an engine in a thread of this process.

Owns the thread and what the engine holds. The one to embed: nothing is copied and nothing is
started. A process that serves many streams wants engine_process.py: Python runs one thread at a
time, and an engine that waits for its turn keeps the device waiting.

    post ──► EngineLoop in "forge-engine" ──► tell(Report) ... ended(finish, failure)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from forge.engine_loop import Command, EngineLoop, Report, Status
from forge.llm import Options, open_engine
from forge.policy import Policy
from forge.request import FinishReason

LOG = logging.getLogger("forge.engine")

CLOSED = "it was closed"
"""Why an engine has ended that was told to."""

PATIENCE_S = 10.0
"""How long an engine that was told to end may take."""

Tell = Callable[[Report], None]
Ended = Callable[[FinishReason, str], None]
"""Called with what open streams end as and why the engine has ended. The first call counts."""


class EngineThread:
    """An open engine. Only its thread may call it."""

    def __init__(
        self, model: str, policy: str | Policy, options: Options, tell: Tell, ended: Ended
    ) -> None:
        self._closing = ExitStack()
        self.engine, self.tokenizer = open_engine(model, policy, options, self._closing)
        self._loop = EngineLoop(self.engine, tell)
        self._ended = ended
        self._patience_s = PATIENCE_S
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-engine", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        """The engine's, now."""
        return Status.of(self.engine)

    def post(self, command: Command) -> None:
        """The command is obeyed before the next step, if there is one."""
        self._loop.post(command)

    def close(self) -> None:
        """End the thread and close the model.

        A model that hangs cannot be interrupted: after `PATIENCE_S` it is left alone, and its
        thread closes it if it ever returns.
        """
        self._loop.end()
        self._thread.join(self._patience_s)
        if self._thread.is_alive() and not self._abandoned.is_set():
            self._abandoned.set()
            LOG.warning("the engine did not end within %g s and is left alone", self._patience_s)
            self._patience_s = 0.0
        if not self._thread.is_alive():
            self._closing.close()

    def _run(self) -> None:
        finish, failure = FinishReason.ABORT, CLOSED
        try:
            self._loop.run()
        except BaseException as fault:  # the thread's last words: every open stream must hear them
            finish, failure = FinishReason.ERROR, repr(fault)
            LOG.exception("the engine has ended")
        self._ended(finish, failure)
        if self._abandoned.is_set():
            self._closing.close()
