"""RecorderChain: the recorders of one engine, which come and go between steps.

Owns which recorder the engine has, and the order of the calls. Knows no format. A recorder that the
engine had before stays, and gets each call first.

    nothing added      engine.recorder = that of --record, or None
    a film is open     engine.recorder = RecorderChain ─► that of --record, LiveFilm
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.engine import Engine
from forge.pause import PauseMode
from forge.recorder import Recorder
from forge.request import Delta, Request
from forge.seam import StepOutput, StepPlan
from forge.sessions import SessionKey


class RecorderChain:
    """A Recorder that passes each call to others, which are added and removed in any order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recorders: list[Recorder] = [] if engine.recorder is None else [engine.recorder]

    def add(self, recorder: Recorder) -> None:
        """Pass it each call from now on, after those before it."""
        self._recorders.append(recorder)
        self._engine.recorder = self

    def remove(self, recorder: Recorder) -> None:
        """Pass it no more calls."""
        self._recorders.remove(recorder)
        self._engine.recorder = self if self._recorders else None

    def record_submit(self, request: Request) -> None:
        """Record a request that was accepted."""
        for recorder in self._recorders:
            recorder.record_submit(request)

    def record_abort(self, request_id: int) -> None:
        """Record that `abort` was called."""
        for recorder in self._recorders:
            recorder.record_abort(request_id)

    def record_reset(self) -> None:
        """Record that the prefix cache was reset."""
        for recorder in self._recorders:
            recorder.record_reset()

    def record_pause(self, mode: PauseMode) -> None:
        """Record that the engine was paused."""
        for recorder in self._recorders:
            recorder.record_pause(mode)

    def record_resume(self) -> None:
        """Record the end of a pause."""
        for recorder in self._recorders:
            recorder.record_resume()

    def record_weights(self, version: str, namespace: str) -> None:
        """Record an update of the weights."""
        for recorder in self._recorders:
            recorder.record_weights(version, namespace)

    def record_sleep(self, level: int) -> None:
        """Record that the model has released its memory."""
        for recorder in self._recorders:
            recorder.record_sleep(level)

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Record the new sizes of the pools."""
        for recorder in self._recorders:
            recorder.record_resize(num_blocks, num_host_blocks)

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Record the keys of the files that are there at the start."""
        for recorder in self._recorders:
            recorder.record_disk_keys(keys)

    def record_end_session(self, key: SessionKey) -> None:
        """Record that a client ended a session."""
        for recorder in self._recorders:
            recorder.record_end_session(key)

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Record that a timer closed a session."""
        for recorder in self._recorders:
            recorder.record_expire_session(key, last_turn)

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record what `schedule()` returned."""
        for recorder in self._recorders:
            recorder.record_plan(plan)

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Record an output and the deltas of its commit."""
        for recorder in self._recorders:
            recorder.record_commit(output, deltas)

    def record_void(self, why: str) -> None:
        """Record that the model failed."""
        for recorder in self._recorders:
            recorder.record_void(why)
