"""PauseState: whether an engine is paused, whether its model sleeps, and the requests that wait.

Owns the requests that come in a pause, and what must come before its end. Knows no scheduler: the
engine freezes it.

    mode None ──pause──► mode ──sleep──► sleep_level 1 or 2 ──wake──► mode ──resume──► mode None
                          │ hold(request)                              ▲        └─► held requests
                          │                     lacks_weights ──update─┘
                          └── update that failed halfway ──► lacks_weights

Always true: a model sleeps or lacks weights in a pause only, and no step runs until its end.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forge.errors import (
    DuplicateRequest,
    EngineDead,
    EnginePaused,
    InvalidConfig,
    InvalidWeights,
)
from forge.pause import PauseMode
from forge.request import Request
from forge.sessions import SessionKey


class HeldRequest(NamedTuple):
    """A request that waits for the end of a pause.

    grammar   reference that keeps its compiled structure alive until then; None without one
    """

    request: Request
    grammar: object


@dataclass(slots=True)
class PauseState:
    """State of the pauses of one engine, which owns it.

    mode            how the engine was paused; None: it is not
    sleep_level     level of the model's sleep; 0: it is awake
    lacks_weights   the model may not compute before all weights are updated
    held_requests   requests that wait for the end of the pause, by id, oldest first
    """

    mode: PauseMode | None = None
    sleep_level: int = 0
    lacks_weights: bool = False
    held_requests: dict[int, HeldRequest] = field(default_factory=dict)

    def hold(self, request: Request, live_ids: Container[int], grammar: object) -> None:
        """Keep the request and its compiled structure until `release`. Raises DuplicateRequest."""
        if request.id in self.held_requests or request.id in live_ids:
            raise DuplicateRequest("id", f"request {request.id} is live", "Use a new id")
        self.held_requests[request.id] = HeldRequest(request, grammar)

    def release(self, request_id: int) -> Request | None:
        """Let the request wait no longer, and return it. None where it did not wait."""
        held = self.held_requests.pop(request_id, None)
        return None if held is None else held.request

    def end_session(self, key: SessionKey) -> bool:
        """Let the last turn of the session that waits end it. Return whether one waits."""
        for request_id, (request, grammar) in reversed(self.held_requests.items()):
            if request.session_id and (request.tenant, request.session_id) == key:
                ending = replace(request, session_end=True)
                self.held_requests[request_id] = HeldRequest(ending, grammar)
                return True
        return False

    def check_awake(self) -> None:
        """Raise EnginePaused while the model sleeps."""
        if self.sleep_level:
            raise EnginePaused("the model sleeps. Wake it first")

    def check_can_end(self) -> None:
        """Raise EnginePaused while the model cannot compute."""
        self.check_awake()
        if self.lacks_weights:
            raise EnginePaused(
                "the model lacks weights, after a sleep or a failure. Update them all"
            )

    @contextmanager
    def changing_model(self, command: str) -> Iterator[None]:
        """Return a context for a command that changes weights or memory of the model.

        A refusal of the model changes nothing. Any other error may have left a mixture: the model
        lacks weights from then on, and EngineDead is raised.
        """
        lacked_weights, self.lacks_weights = self.lacks_weights, True
        try:
            yield
        except (EnginePaused, InvalidConfig, InvalidWeights):
            self.lacks_weights = lacked_weights
            raise
        except Exception as error:
            raise EngineDead(f"{command} failed halfway: {error!r}") from error
        self.lacks_weights = lacked_weights

    def end(self) -> list[Request]:
        """End the pause, and return the requests that waited: `release` each once it is queued."""
        self.mode = None
        return [held.request for held in self.held_requests.values()]

    def end_sleep(self) -> None:
        """Record that the model is awake; after level 2 it lacks weights."""
        self.lacks_weights = self.lacks_weights or self.sleep_level == 2
        self.sleep_level = 0
