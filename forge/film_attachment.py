"""FilmAttachment: attaches a film to an engine while a page reads, and detaches it.

Owns which recorder the engine has. Knows no page: lines are taken after each step. A recorder that
the engine had before goes on, and gets each call first.

    closed   engine.recorder = that of --record, or None
    open     engine.recorder = RecorderPair(that of --record, LiveFilm), or LiveFilm
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.engine import Engine
from forge.film.live import LiveFilm
from forge.film.state import Line
from forge.recorder_pair import RecorderPair


class FilmAttachment:
    """A film of this engine that can be opened and closed between steps."""

    def __init__(self, engine: Engine, clock: Callable[[], int]) -> None:
        self._engine = engine
        self._clock = clock
        self._recorder = engine.recorder
        self._film: LiveFilm | None = None

    def open(self) -> None:
        """Begin the film, if it is closed. A line with the whole state follows."""
        if self._film is None:
            self._film = LiveFilm(self._engine.scheduler, self._clock)
            self._recorder = recorder = self._engine.recorder
            pair = self._film if recorder is None else RecorderPair(recorder, self._film)
            self._engine.recorder = pair
        self._film.add_keyframe()

    def close(self) -> None:
        """End the film. The engine has its earlier recorder again."""
        if self._film is not None:
            self._film = None
            self._engine.recorder = self._recorder

    def take_lines(self) -> Sequence[Line]:
        """Return the lines since the last call; all of them, where no step follows now."""
        if self._film is None:
            return ()
        if not self._engine.can_step:
            self._film.finish_steps()
        return self._film.take_lines()
