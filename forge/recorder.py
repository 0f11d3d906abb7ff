"""Recorder: receives everything that the decisions of an engine depend on.

Owns the calls and their order. Knows no format: forge.recording writes a file for replays,
forge.film a page.

    submit, abort, pause, ... ─► Engine ─► record_submit, record_plan, ... ─► Recorder

Always true: a call comes after the change that it is about, and before the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge.pause import PauseMode
from forge.request import Delta, Request
from forge.seam import StepOutput, StepPlan
from forge.sessions import SessionKey


class Recorder(Protocol):
    """Receives, in order, everything that an engine's decisions depend on. See forge.recording.

    Every method does nothing here: a class that inherits defines those that it reads.
    """

    def record_submit(self, request: Request) -> None:
        """Record a request that was accepted."""
        return

    def record_abort(self, request_id: int) -> None:
        """Record that `abort` was called."""
        return

    def record_reset(self) -> None:
        """Record that the prefix cache was reset."""
        return

    def record_pause(self, mode: PauseMode) -> None:
        """Record that the engine was paused, before the steps in flight are committed."""
        return

    def record_resume(self) -> None:
        """Record the end of a pause, before the requests that came meanwhile."""
        return

    def record_weights(self, version: str, namespace: str) -> None:
        """Record an update of the weights, and the namespace of later blocks."""
        return

    def record_sleep(self, level: int) -> None:
        """Record that the content of all blocks was dropped, with the model's memory."""
        return

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Record the new sizes of the pools; None: unchanged."""
        return

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Record the keys of the files that are there at the start."""
        return

    def record_end_session(self, key: SessionKey) -> None:
        """Record that a client ended a session."""
        return

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Record that a timer closed a session after the turn of that number."""
        return

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record what `schedule()` returned."""
        return

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Record an output and the deltas of its commit."""
        return

    def record_void(self, why: str) -> None:
        """Record that the model failed, which voids every plan in flight."""
        return
