"""AnswerRecorder: the answers of open requests, for agents that run on a model with real answers.

Owns the tokens of requests that have not ended. Knows no engine: it observes a World.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.request import Delta
from forge.sim.clock import VirtualClockStep
from forge.sim.workloads.workload import RequestArrival


class AnswerRecorder:
    """A Watcher that knows what was answered, for models whose answers are not known before.

    `transcript.answer` is what Agents asks, and the transcript is given to the World as well.
    Answers are kept until the step after their end.
    """

    def __init__(self) -> None:
        self._answers: dict[int, list[int]] = {}
        self._finished_ids: list[int] = []

    def answer(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Tokens that the request's first choice gained."""
        return self._answers.get(request_id, ())

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Nothing was answered yet."""

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Its end is told by the next step."""

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The tokens are in the answers."""
        for request_id in self._finished_ids:
            self._answers.pop(request_id, None)
        self._finished_ids = [delta.request_id for delta in deltas if delta.finish is not None]
        for delta in deltas:
            if delta.tokens and not delta.choice:
                self._answers.setdefault(delta.request_id, []).extend(delta.tokens)
