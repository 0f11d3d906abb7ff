"""Agents: sessions that alternate requests and tool runs; each prompt is the whole context.

Owns the contexts of open sessions. Knows no engine. The prompt of a turn is the previous prompt,
its answer and the result of the tool. If nothing was evicted, nearly all of it is in the prefix
cache.

    turn 0   [ system | task ]                         ──► answer 0
    turn 1   [ system | task | answer 0 | result 0 ]   ──► answer 1      after the tool's time
    turn 2   [ system | task | answer 0 | result 0 | answer 1 | result 1 ] ──► ...

Closed loop: at most `max_open_sessions` sessions are open. All sessions share the system prompt and
nothing else. Draws depend on session and turn, not on the order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from forge.request import Request
from forge.sim.draws import THINK_TIME_DRAW, draw_uniform, exponential_ns
from forge.sim.length_model import FILLER_TOKEN
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import RequestArrival, fixed_output_params, unique_tokens

_SYSTEM_PROMPT_START = 1_500_000_000
"""First token id of the system prompt: above all ids of `unique_tokens`."""


def filler_answer(request_id: int, num_tokens: int) -> Sequence[int]:
    """Return the answer of a LengthModel."""
    return (FILLER_TOKEN,) * num_tokens


@dataclass
class AgentSessions:
    """Sessions of at most `max_turns` turns.

    max_open_sessions   sessions that are open at a time
    num_sessions        sessions in all
    num_system_tokens   tokens of the system prompt
    lengths             (session, turn) -> new tokens of the prompt, tokens of the answer
    mean_tool_s         mean seconds from an answer to the next request, exponential; 0: none
    max_len             a session ends early where prompt and answer would be longer
    get_answer          (request, tokens of the answer) -> the answer of the model

    The request of a turn has the id `session * max_turns + turn`. A refused turn ends its session,
    and no other session starts in its place.
    """

    max_open_sessions: int
    num_sessions: int
    max_turns: int
    num_system_tokens: int
    lengths: Callable[[int, int], tuple[int, int]]
    mean_tool_s: float = 0.0
    max_len: int | None = None
    get_answer: Callable[[int, int], Sequence[int]] = filler_answer
    seed: int = 0
    _contexts: dict[int, list[int]] = field(default_factory=dict, init=False)
    _num_started: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the first turn of the first sessions, each after the time of a tool."""
        first = [
            self._start_session(0) for _ in range(min(self.max_open_sessions, self.num_sessions))
        ]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the next turn of the session, or the first turn of the next session.

        Returns nothing for the requests of other workloads.
        """
        session, turn = divmod(request_id, self.max_turns)
        context = self._contexts.get(session)
        if context is None:
            return ()
        context += self.get_answer(request_id, self.lengths(session, turn)[1])
        if turn + 1 < self.max_turns and self._fits(session, turn + 1, len(context)):
            return (self._start_turn(session, turn + 1, now_ns),)
        del self._contexts[session]
        return (self._start_session(now_ns),) if self._num_started < self.num_sessions else ()

    def _fits(self, session: int, turn: int, num_tokens: int) -> bool:
        return self.max_len is None or num_tokens + sum(self.lengths(session, turn)) <= self.max_len

    def _start_session(self, now_ns: int) -> RequestArrival:
        session, self._num_started = self._num_started, self._num_started + 1
        self._contexts[session] = list(
            range(_SYSTEM_PROMPT_START, _SYSTEM_PROMPT_START + self.num_system_tokens)
        )
        return self._start_turn(session, 0, now_ns)

    def _start_turn(self, session: int, turn: int, now_ns: int) -> RequestArrival:
        request_id = session * self.max_turns + turn
        num_new_tokens, num_output_tokens = self.lengths(session, turn)
        context = self._contexts[session]
        context += unique_tokens(request_id, num_new_tokens)
        tool_ns = 0
        if self.mean_tool_s:
            tool_ns = exponential_ns(
                self.mean_tool_s * NS_PER_S, draw_uniform(self.seed, THINK_TIME_DRAW, request_id)
            )
        return RequestArrival(
            now_ns + tool_ns,
            Request(request_id, tuple(context), fixed_output_params(num_output_tokens)),
        )
