"""FailureLog: failures of a part that only reports on the engine, or only saves it work.

Owns their number, and which of them are logged. Knows no file and no socket.

    write ──► raises ──► fail(error)     counted, and logged if it is the first in a row
          └─► done   ──► succeed()       the next failure is logged again

Always true: no call raises, so a full disk or a peer that has left ends nothing else.
"""

from __future__ import annotations

import logging
from threading import Lock

from forge.errors import one_line


class FailureLog:
    """Counts failures, and logs the first of those in a row. Any thread may call it.

    subject   what fails, as the log names it: "the recording has ended"
    remedy    what to do
    """

    def __init__(self, logger: logging.Logger, subject: str, remedy: str) -> None:
        self.num_failures = 0
        self._logger = logger
        self._subject = subject
        self._remedy = remedy
        self._lock = Lock()
        self._is_failing = False

    def fail(self, why: Exception | str) -> None:
        """Count a failure. The log has the traceback of what is no error of a disk or a peer."""
        with self._lock:
            self.num_failures += 1
            is_first, self._is_failing = not self._is_failing, True
        if is_first:
            text = why if isinstance(why, str) else one_line(why)
            traceback = None if isinstance(why, str | OSError) else why
            self._logger.warning(
                "%s: %s. %s", self._subject, text, self._remedy, exc_info=traceback
            )

    def succeed(self) -> None:
        """Let the next failure be logged: it is another one."""
        self._is_failing = False
