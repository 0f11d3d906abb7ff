"""RecorderChain: the recorders of one engine, which come and go between steps.

Owns which recorder the engine has. Knows no format. A recorder that the engine had before stays,
and gets each call first.

    nothing added      engine.recorder = that of --record, or None
    a film is open     engine.recorder = RecorderPair(that of --record, LiveFilm), or LiveFilm
"""

from __future__ import annotations

from functools import reduce

from forge.engine import Engine
from forge.recorder import Recorder
from forge.recorder_pair import RecorderPair


class RecorderChain:
    """Recorders that are added to those of this engine, and removed, in any order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recorders: list[Recorder] = [] if engine.recorder is None else [engine.recorder]

    def add(self, recorder: Recorder) -> None:
        """Pass it each call from now on, after those before it."""
        self._recorders.append(recorder)
        self._update()

    def remove(self, recorder: Recorder) -> None:
        """Pass it no more calls."""
        self._recorders.remove(recorder)
        self._update()

    def _update(self) -> None:
        self._engine.recorder = reduce(RecorderPair, self._recorders) if self._recorders else None
