"""StartLog: where the seconds of a start went, as one line of the log.

Owns the clock of a start and its phases. Knows nothing of the work. Phases nest: an inner phase
stops the clock of the outer one, so every second belongs to one phase.

    began ──┬── imports ──┬── weights ──┬── kernels ──┬── ... ──┬── ready
            │             │             └── inner phase         │
            └── time outside of all phases is "other" ──────────┘

    INFO forge.start: model ready in 7.0 s: process 0.2, imports 5.5, ..., graphs 0.5, other 0.2

Always true: the phases, "other" included, add up to the time since the start began.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOG = logging.getLogger("forge.start")
# Shown wherever the process has a log handler, whatever the root logger's level. A level that the
# program has set for this logger stays.
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.INFO)

OTHER = "other"
"""Name of the time that no phase has."""


class StartLog:
    """Seconds of each phase of one start. One thread uses it.

    began_s       time of `clock` at which the start began; None: now
    first_phase   phase that has the time from `began_s` until now
    """

    def __init__(
        self,
        began_s: float | None = None,
        first_phase: str = OTHER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._charged_s = self._began_s = clock() if began_s is None else began_s
        self._open_phases = [first_phase]
        self._seconds: dict[str, float] = {}
        self._charge()
        self._open_phases = [OTHER]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time until the context ends to a phase, inner phases excluded."""
        self._charge()
        self._open_phases.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open_phases.pop()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now, in the order of their first seconds."""
        self._charge()
        found = dict(self._seconds)
        other_s = found.pop(OTHER, 0.0)
        return {**found, OTHER: other_s}

    def log_summary(self) -> None:
        """Log the total and each phase that took a twentieth of a second or more."""
        seconds = self.seconds()
        shown = {name: s for name, s in seconds.items() if s >= 0.05 or name == OTHER}
        # What is too short to be shown must still be in the sum.
        shown[OTHER] += sum(s for name, s in seconds.items() if name not in shown)
        parts = ", ".join(f"{name} {s:.1f}" for name, s in shown.items())
        LOG.info("model ready in %.1f s: %s", sum(seconds.values()), parts)

    def _charge(self) -> None:
        """Add the time since the last call to the innermost phase."""
        now_s, name = self._clock(), self._open_phases[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._charged_s
        self._charged_s = now_s


def process_age_s() -> float | None:
    """Return the seconds since this process started, or None where the system does not say."""
    try:
        # The second field is the program's name, which may have spaces. The 22nd is the start.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError):
        return None
