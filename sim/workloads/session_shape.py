"""Session shape: how many turns a session has, how long they are, and what happens between them.

Owns the draws of a session and the named profiles. Knows no engine and no time: the turns of a
session follow from the seed alone, so they are equal under every policy.

    turn 0   [ system | task ]                        ──► answer 0     pause
    turn 1   [ system | task | answer 0 | result ]    ──► answer 1     1 to 3 sub-agents
               └── each: [ the context so far | task ] ──► ... ──► result
    turn 2   [ ... | answer 1 | results of sub-agents | new tokens ]   ──► answer 2
    turn 3   [ system | summary | new tokens ]        ──► answer 3     compacted: too long before

A sub-agent is a session as well: number k of turn t of session s has the index
num_sessions + (s * max_turns + t) * 3 + k.

Always true: two turns of a workload have different request ids, session * max_turns + turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.sim.draws import (
    ABANDON_DRAW,
    SUBAGENTS_DRAW,
    THINK_TIME_DRAW,
    TURNS_DRAW,
    draw_uniform,
    exponential_ns,
)
from forge.sim.units import NS_PER_S

MAX_SUBAGENTS = 3
"""Most sub-agents that a turn starts; their number is uniform from 1."""

SUBAGENT_TURNS = (2, 5)
"""Fewest and most turns of a sub-agent; their number is uniform."""

HINTS = ("id", "end", "pause")
"""Fields that a request may carry: session id, end of the session, expected pause."""

Profile = dict[str, int | float | str]

PROFILES: dict[str, Profile] = {
    # Public trace of coding agents: a median of 43 turns, 142 k tokens in the last prompt, 444
    # output tokens a turn, sub-agents in 44 % of sessions: 1 - (1 - 0.0137) ** 42. The pauses
    # and the shape of the distributions are not published.
    "coding": {
        **{"min_turns": 20, "turns": 66, "system": 20_000},
        **{"prompt": "exp:2400", "output": "exp:444", "subagents": 0.0137},
        **{"pause_mix": "0.7:0.5,0.25:5,0.05:60"},
        **{"block_size": 64, "max_model_len": 262_144, "oversubscription": 2.0},
    },
    "swe": {
        **{"turns": 20, "system": 8000, "prompt": "exp:2000", "output": "exp:300", "pause": 3.0},
        **{"block_size": 64, "max_model_len": 131_072, "oversubscription": 2.0},
    },
    "chat": {
        **{"turns": 8, "system": 512, "prompt": "exp:200", "output": "exp:300", "pause": 20.0},
        **{"block_size": 16, "max_model_len": 16_384, "oversubscription": 2.0},
    },
}
"""Name of a profile -> values of options that were not given."""


def find_profile(name: str) -> Profile:
    """Return the profile of that name. Raises InvalidConfig."""
    if name not in PROFILES:
        raise InvalidConfig(
            "profile", f"{name[:64]!r} is not known", f"Use {', '.join(PROFILES)}, or leave it out"
        )
    return PROFILES[name]


class Pause(NamedTuple):
    """Kind of a pause, such as that of one tool.

    share    share of the pauses that are of this kind
    mean_s   mean seconds, exponential; 0: none
    """

    share: float
    mean_s: float


def parse_pauses(text: str) -> tuple[Pause, ...]:
    """Return the kinds of pauses of `SHARE:SECONDS,...`. Raises InvalidConfig."""
    found = [re.fullmatch(r"(0?\.\d{1,9}|[01](?:\.0*)?):(\d{1,6}(?:\.\d{1,9})?)", part)
             for part in text.split(",")]  # fmt: skip
    pauses = tuple(Pause(float(each[1]), float(each[2])) for each in found if each is not None)
    if len(pauses) < len(found) or abs(sum(pause.share for pause in pauses) - 1) > 1e-6:
        raise InvalidConfig(
            "pause_mix",
            f"{text[:64]!r} is not a list of SHARE:SECONDS whose shares add up to 1",
            "Give 0.7:0.5,0.25:5,0.05:60, say",
        )
    return pauses


def parse_hints(text: str) -> frozenset[str]:
    """Return the hints of `id,end,pause`; "none" names none. Raises InvalidConfig."""
    hints = frozenset(text.split(",")) - {"none"}
    if not hints <= set(HINTS) or ("end" in hints and "id" not in hints):
        raise InvalidConfig(
            "hints",
            f"{text[:64]!r} is not a list of {', '.join(HINTS)}, of which end needs id",
            "Give id,end,pause, or none",
        )
    return hints


class Turn(NamedTuple):
    """Plan of one request of a session.

    is_compacted        its prompt is the system prompt and new tokens: the rest was summarised
    num_new_tokens      tokens of the prompt after the context that stays
    num_output_tokens   tokens of the answer
    pause_ns            nanoseconds before it; 0 after sub-agents
    next_pause_s        mean seconds of the kind of pause that is expected after it; None: none is
    subagents           sessions that start after it and end before the next turn
    is_end              the session is complete with its answer; False where it is abandoned
    """

    is_compacted: bool
    num_new_tokens: int
    num_output_tokens: int
    pause_ns: int
    next_pause_s: float | None = None
    subagents: tuple[int, ...] = ()
    is_end: bool = False


@dataclass(frozen=True)
class SessionShape:
    """Distributions of the sessions of a workload.

    max_turns            most turns of a session
    num_system_tokens    tokens of the system prompt, which all sessions share
    lengths              (session, turn) -> new tokens of the prompt, tokens of the answer
    pauses               kinds of pauses before a turn
    min_turns            fewest turns of a session: uniform from here; None: `max_turns`
    subagent_share       probability that a turn starts sub-agents
    compact_at           tokens above which a prompt is compacted; None: never
    num_summary_tokens   tokens of the summary that replaces the context
    abandon_share        probability after each turn that no other one follows
    max_len              a session ends early where prompt and answer would be longer
    num_sessions         sessions without sub-agents; the indices of sub-agents follow
    seed                 seed of all draws besides `lengths`
    """

    max_turns: int
    num_system_tokens: int
    lengths: Callable[[int, int], tuple[int, int]]
    pauses: tuple[Pause, ...] = (Pause(1.0, 0.0),)
    min_turns: int | None = None
    subagent_share: float = 0.0
    compact_at: int | None = None
    num_summary_tokens: int = 2000
    abandon_share: float = 0.0
    max_len: int | None = None
    num_sessions: int = 1
    seed: int = 0

    def plan_session(self, session: int, num_context_tokens: int) -> tuple[Turn, ...]:
        """Return the turns of a session whose first prompt begins with this many tokens.

        The first turn of a sub-agent must fit; that of another session is left to the engine.
        """
        turns: list[Turn] = []
        num_tokens, num_result_tokens, num_turns = num_context_tokens, 0, self.num_turns(session)
        pause_ns = 0 if self.is_subagent(session) else self._draw_pause(session, 0)[1]
        for index in range(num_turns):
            num_new, num_output = self.lengths(session, index)
            num_new += num_result_tokens
            is_compacted = bool(turns) and self._is_too_long(num_tokens + num_new)
            if is_compacted:
                num_tokens, num_new = self.num_system_tokens, num_new + self.num_summary_tokens
            num_tokens += num_new + num_output
            must_fit = bool(turns) or self.is_subagent(session)
            if must_fit and self.max_len is not None and num_tokens > self.max_len:
                break
            is_abandoned = self._is_abandoned(session, index)
            subagents = () if is_abandoned else self._subagents(session, index, num_tokens)
            next_pause, next_pause_ns = self._draw_pause(session, index + 1)
            next_pause_s = None if subagents else next_pause.mean_s
            turns.append(Turn(is_compacted, num_new, num_output, pause_ns, next_pause_s, subagents))
            if is_abandoned:
                return tuple(turns)  # its client expected to continue, so the hint stays
            pause_ns = 0 if subagents else next_pause_ns
            num_result_tokens = sum(map(self._num_result_tokens, subagents))
        if not turns:
            return ()
        return (*turns[:-1], turns[-1]._replace(next_pause_s=None, subagents=(), is_end=True))

    def longest_context(self, session: int) -> int:
        """Return the most tokens of prompt and answer of a turn, sub-agents not counted."""
        longest = num_tokens = self.num_system_tokens
        for turn in self.plan_session(session, num_tokens):
            num_kept = self.num_system_tokens if turn.is_compacted else num_tokens
            num_tokens = num_kept + turn.num_new_tokens + turn.num_output_tokens
            longest = max(longest, num_tokens)
        return longest

    def working_set_tokens(self, num_open_sessions: int) -> int:
        """Return the tokens that open sessions need at their longest, on the average of all.

        The system prompt, which they share, counts once.
        """
        own = [self.longest_context(s) - self.num_system_tokens for s in range(self.num_sessions)]
        num_open = min(num_open_sessions, self.num_sessions)
        return self.num_system_tokens + num_open * sum(own) // self.num_sessions

    def is_subagent(self, session: int) -> bool:
        """Return whether the session is one that a turn of another session starts."""
        return session >= self.num_sessions

    def parent_turn(self, subagent: int) -> tuple[int, int]:
        """Return session and turn that start this sub-agent."""
        return divmod((subagent - self.num_sessions) // MAX_SUBAGENTS, self.max_turns)

    def session_id(self, session: int) -> str:
        """Return the id that requests carry: `7`, and `7.12.0` for the first one of its turn 12."""
        if not self.is_subagent(session):
            return str(session)
        parent, turn = self.parent_turn(session)
        return f"{parent}.{turn}.{(session - self.num_sessions) % MAX_SUBAGENTS}"

    def num_turns(self, session: int) -> int:
        """Return the turns that the session has if it always fits and is not abandoned."""
        most = self.max_turns
        low, high = self.min_turns or most, most
        if self.is_subagent(session):
            low, high = min(SUBAGENT_TURNS[0], most), min(SUBAGENT_TURNS[1], most)
        return low + int(self._draw(TURNS_DRAW, session, 0) * (high - low + 1))

    def _draw(self, purpose: int, session: int, turn: int, index: int = 0) -> float:
        return draw_uniform(self.seed, purpose, session * self.max_turns + turn, index)

    def _draw_pause(self, session: int, turn: int) -> tuple[Pause, int]:
        """Return the kind of the pause before a turn, and its nanoseconds."""
        share = self._draw(THINK_TIME_DRAW, session, turn, 1)
        for pause in self.pauses:
            share -= pause.share
            if share < 0:
                break
        if not pause.mean_s:
            return pause, 0
        drawn = self._draw(THINK_TIME_DRAW, session, turn)
        return pause, exponential_ns(pause.mean_s * NS_PER_S, drawn)

    def _is_too_long(self, num_tokens: int) -> bool:
        return self.compact_at is not None and num_tokens > self.compact_at

    def _is_abandoned(self, session: int, turn: int) -> bool:
        # A parent waits for its sub-agents, so they do not stop on their own.
        return (
            not self.is_subagent(session)
            and self._draw(ABANDON_DRAW, session, turn) < self.abandon_share
        )

    def _subagents(self, session: int, turn: int, num_tokens: int) -> tuple[int, ...]:
        """Return the sub-agents that start after the turn and fit after `num_tokens`."""
        if (
            self.is_subagent(session)
            or self._draw(SUBAGENTS_DRAW, session, turn) >= self.subagent_share
        ):
            return ()
        count = 1 + int(self._draw(SUBAGENTS_DRAW, session, turn, 1) * MAX_SUBAGENTS)
        first = self.num_sessions + (session * self.max_turns + turn) * MAX_SUBAGENTS
        return tuple(s for s in range(first, first + count) if self.plan_session(s, num_tokens))

    def _num_result_tokens(self, subagent: int) -> int:
        """Return the tokens of a sub-agent's result: as many as its last answer is to have."""
        return self.lengths(subagent, self.num_turns(subagent) - 1)[1]
