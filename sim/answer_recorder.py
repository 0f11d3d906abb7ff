"""AnswerRecorder: the answers of open requests, for agents that run on a model with real answers.

Owns the tokens of requests that have not ended. Knows no engine: it observes a World.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.request import Delta
from forge.sim.clock import VirtualClockStep
from forge.sim.workloads.workload import RequestArrival


class AnswerRecorder:
    """A WorldObserver that records answers, for models whose answers are not known in advance.

    `answer` is the `get_answer` of AgentSessions, and the recorder observes the World. An answer is
    kept until the step after its end.
    """

    def __init__(self) -> None:
        self._answers: dict[int, list[int]] = {}
        self._finished_ids: list[int] = []

    def answer(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Return the tokens of the first choice of the request so far."""
        return self._answers.get(request_id, ())

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Do nothing: there is no answer yet."""

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Do nothing: the next step reports the end of the request."""

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Append the tokens of the step to the answers."""
        for request_id in self._finished_ids:
            self._answers.pop(request_id, None)
        self._finished_ids = [delta.request_id for delta in deltas if delta.finish is not None]
        for delta in deltas:
            if delta.tokens and not delta.choice:
                self._answers.setdefault(delta.request_id, []).extend(delta.tokens)
