"""FilmAttachment: a film of an engine, which is among its recorders while a page reads.

Owns whether the film is open. Knows no page: lines are taken after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.engine import Engine
from forge.film.live import LiveFilm
from forge.film.state import Line
from forge.recorder_chain import RecorderChain


class FilmAttachment:
    """A film of this engine that can be opened and closed between steps."""

    def __init__(self, engine: Engine, recorders: RecorderChain, clock: Callable[[], int]) -> None:
        self._engine = engine
        self._recorders = recorders
        self._clock = clock
        self._film: LiveFilm | None = None

    def open(self) -> None:
        """Begin the film, if it is closed. A line with the whole state follows."""
        if self._film is None:
            self._film = LiveFilm(self._engine.scheduler, self._clock)
            self._recorders.add(self._film)
        self._film.add_keyframe()

    def close(self) -> None:
        """End the film."""
        if self._film is not None:
            self._recorders.remove(self._film)
            self._film = None

    def take_lines(self) -> Sequence[Line]:
        """Return the lines since the last call; all of them, where no step follows now."""
        if self._film is None:
            return ()
        if not self._engine.can_step:
            self._film.finish_steps()
        return self._film.take_lines()
