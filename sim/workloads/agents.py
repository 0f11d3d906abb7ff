"""Agents: sessions that alternate requests and tool runs; each prompt is the whole context.

Owns the contexts of open sessions. Knows no engine. SessionShape says which turns a session has.
If nothing was evicted, nearly all of a prompt is in the prefix cache.

    turn 0   [ system | task ]                         ──► answer 0
    turn 1   [ system | task | answer 0 | result 0 ]   ──► answer 1      after the tool's time
    turn 2   [ system | task | answer 0 | result 0 | answer 1 | result 1 ] ──► ...

Closed loop: at most `max_open_sessions` sessions are open, their sub-agents not counted. All
sessions share the system prompt, and a sub-agent the context of its parent.

Always true: prompts and pauses do not depend on the order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from forge.request import Request
from forge.sim.length_model import FILLER_TOKEN
from forge.sim.workloads.session_shape import SessionShape, Turn
from forge.sim.workloads.workload import RequestArrival, fixed_output_params, unique_tokens

_SYSTEM_PROMPT_START = 1_500_000_000
"""First token id of the system prompt: above all ids of `unique_tokens`."""


def filler_answer(request_id: int, num_tokens: int) -> Sequence[int]:
    """Return the answer of a LengthModel."""
    return (FILLER_TOKEN,) * num_tokens


@dataclass(slots=True)
class _OpenSession:
    """A session that has not ended.

    turns                 its turns; the last element is the last one
    context               tokens of all turns so far, without those that were summarised
    num_open_subagents    sub-agents that the next turn waits for
    """

    turns: tuple[Turn, ...]
    context: list[int]
    num_open_subagents: int = 0


@dataclass
class AgentSessions:
    """A closed loop of `shape.num_sessions` sessions.

    max_open_sessions   sessions that are open at a time
    shape               turns of each session
    hints               what requests say of their session; see session_shape.HINTS
    get_answer          (request, tokens of the answer) -> the answer of the model

    The request of a turn has the id `session * shape.max_turns + turn`. A refused turn ends its
    session, and no other session starts in its place. The next session starts when one ends or is
    abandoned.
    """

    max_open_sessions: int
    shape: SessionShape
    hints: frozenset[str] = frozenset({"id", "end"})
    get_answer: Callable[[int, int], Sequence[int]] = filler_answer
    _open: dict[int, _OpenSession] = field(default_factory=dict, init=False)
    _num_started: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the first turn of the first sessions, each after a pause."""
        count = min(self.max_open_sessions, self.shape.num_sessions)
        first = [self._start_next_session(0) for _ in range(count)]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the next turn of the session, its sub-agents, or the first turn of another one.

        Returns nothing for the requests of other workloads.
        """
        session, index = divmod(request_id, self.shape.max_turns)
        state = self._open.get(session)
        if state is None:
            return ()
        turn = state.turns[index]
        state.context += self.get_answer(request_id, turn.num_output_tokens)
        if turn.subagents:
            state.num_open_subagents = len(turn.subagents)
            return tuple(self._start_session(s, state.context, now_ns) for s in turn.subagents)
        if index + 1 < len(state.turns):
            return (self._create_turn(session, index + 1, now_ns),)
        del self._open[session]
        if self.shape.is_subagent(session):
            return self._end_subagent(session, now_ns)
        has_next = self._num_started < self.shape.num_sessions
        return (self._start_next_session(now_ns),) if has_next else ()

    def _end_subagent(self, subagent: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the next turn of the parent where this was its last open sub-agent."""
        parent, index = self.shape.parent_turn(subagent)
        state = self._open[parent]
        state.num_open_subagents -= 1
        return () if state.num_open_subagents else (self._create_turn(parent, index + 1, now_ns),)

    def _start_next_session(self, now_ns: int) -> RequestArrival:
        session, self._num_started = self._num_started, self._num_started + 1
        return self._start_session(session, self._system_prompt(), now_ns)

    def _start_session(self, session: int, context: Sequence[int], now_ns: int) -> RequestArrival:
        turns = self.shape.plan_session(session, len(context))
        self._open[session] = _OpenSession(turns, list(context))
        return self._create_turn(session, 0, now_ns)

    def _create_turn(self, session: int, index: int, now_ns: int) -> RequestArrival:
        shape, state = self.shape, self._open[session]
        turn = state.turns[index]
        request_id = session * shape.max_turns + index
        if turn.is_compacted:
            state.context = list(self._system_prompt())
        state.context += unique_tokens(request_id, turn.num_new_tokens)
        request = Request(
            request_id,
            tuple(state.context),
            fixed_output_params(turn.num_output_tokens),
            session_id=shape.session_id(session) if "id" in self.hints else "",
            session_end=turn.is_end and "end" in self.hints,
            expected_pause_s=turn.next_pause_s if "pause" in self.hints else None,
        )
        root = shape.parent_turn(session)[0] if shape.is_subagent(session) else session
        return RequestArrival(now_ns + turn.pause_ns, request, session=root)

    def _system_prompt(self) -> Sequence[int]:
        return range(_SYSTEM_PROMPT_START, _SYSTEM_PROMPT_START + self.shape.num_system_tokens)
