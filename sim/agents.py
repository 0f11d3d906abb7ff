"""Agents: sessions that ask, run a tool on the answer, and ask again with all that was said.

Owns the contexts of open sessions. Knows no engine. Each turn's prompt is the one before, its
answer and what the tool gave, so nearly all of it is in the prefix cache if nothing was evicted.

    turn 0   [ system | task ]                         ──► answer 0
    turn 1   [ system | task | answer 0 | result 0 ]   ──► answer 1      after the tool's time
    turn 2   [ system | task | answer 0 | result 0 | answer 1 | result 1 ] ──► ...

Closed loop: `agents` sessions are open at any time. The system prompt is everybody's, the rest of a
session its own. Randomness hangs on session and turn, never on who was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from forge.request import Delta, Request
from sim.clock import TimedStep
from sim.lengths import TOKEN
from sim.workload import PAUSE, SECOND, Arrival, drawn, exactly, exponential_ns, named_tokens

_SYSTEM = 1_500_000_000
"""First id of the system prompt: above all that `named_tokens` gives."""


def plain_answer(request_id: int, output: int) -> Sequence[int]:
    """What a LengthModel answers."""
    return (TOKEN,) * output


class Transcript:
    """A Watcher that knows what was answered, for models whose answers are not known before.

    `transcript.answer` is what Agents asks, and the transcript is given to the World as well.
    Answers are kept until the step after their end.
    """

    def __init__(self) -> None:
        self._answers: dict[int, list[int]] = {}
        self._ended: list[int] = []

    def answer(self, request_id: int, output: int) -> Sequence[int]:
        """Tokens that the request's first choice gained."""
        return self._answers.get(request_id, ())

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """Nothing was answered yet."""

    def left(self, request_id: int, now_ns: int) -> None:
        """Its end is told by the next step."""

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The tokens are in the answers."""
        for request_id in self._ended:
            self._answers.pop(request_id, None)
        self._ended = [delta.request_id for delta in deltas if delta.finish is not None]
        for delta in deltas:
            if delta.tokens and not delta.choice:
                self._answers.setdefault(delta.request_id, []).extend(delta.tokens)


@dataclass
class Agents:
    """Sessions of at most `turns` turns. A turn's request has the id `session * turns + turn`.

    agents     sessions at a time
    sessions   in all
    system     tokens of the system prompt
    lengths    (session, turn) -> tokens that the user or the tool says, tokens of the answer
    tool_s     mean seconds from an answer to the next request, exponential; 0 is none
    longest    a session ends early where prompt and answer would be longer
    answers    (request, tokens asked) -> what the model answered
    A turn that is refused ends its session, and no other begins in its place.
    """

    agents: int
    sessions: int
    turns: int
    system: int
    lengths: Callable[[int, int], tuple[int, int]]
    tool_s: float = 0.0
    longest: int | None = None
    answers: Callable[[int, int], Sequence[int]] = plain_answer
    seed: int = 0
    _contexts: dict[int, list[int]] = field(default_factory=dict, init=False)
    _begun: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[Arrival]:
        """The first turn of the first sessions, each after a tool's time."""
        first = [self._begin(0) for _ in range(min(self.agents, self.sessions))]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """The session's next turn, or the next session's first. Nothing for others' requests."""
        session, turn = divmod(request_id, self.turns)
        context = self._contexts.get(session)
        if context is None:
            return ()
        context += self.answers(request_id, self.lengths(session, turn)[1])
        if turn + 1 < self.turns and self._fits(session, turn + 1, len(context)):
            return (self._turn(session, turn + 1, now_ns),)
        del self._contexts[session]
        return (self._begin(now_ns),) if self._begun < self.sessions else ()

    def _fits(self, session: int, turn: int, tokens: int) -> bool:
        return self.longest is None or tokens + sum(self.lengths(session, turn)) <= self.longest

    def _begin(self, now_ns: int) -> Arrival:
        session, self._begun = self._begun, self._begun + 1
        self._contexts[session] = list(range(_SYSTEM, _SYSTEM + self.system))
        return self._turn(session, 0, now_ns)

    def _turn(self, session: int, turn: int, now_ns: int) -> Arrival:
        request_id = session * self.turns + turn
        said, output = self.lengths(session, turn)
        context = self._contexts[session]
        context += named_tokens(request_id, said)
        pause_ns = 0
        if self.tool_s:
            pause_ns = exponential_ns(self.tool_s * SECOND, drawn(self.seed, PAUSE, request_id))
        return Arrival(now_ns + pause_ns, Request(request_id, tuple(context), exactly(output)))
