"""SessionTimers: when paused sessions expire.

Owns the deadlines. Knows no clock and no engine: the caller passes the time in seconds, and ends
what is due.

    paused ──► start(session, now) ──► heap of (deadline, session, turn) ──► pop_due(now)
                                            │
                                            └── its session has gone on or closed: of no effect

Always true: a session has one timer that counts, that of its latest turn. Others are left in the
heap until they are due or are more than half of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import count
from typing import NamedTuple

from forge.sessions import Session, SessionKey

MIN_PRUNE_LEN = 64
"""Timers from which those of no effect are removed."""


class SessionTimer(NamedTuple):
    """A session expires at a time, unless it has had another turn by then."""

    deadline_s: float
    order: int
    key: SessionKey
    last_turn: int


class SessionTimers:
    """Timers of paused sessions, soonest first.

    sessions   open sessions by key, as the scheduler keeps them
    ttl_s      longest pause
    """

    def __init__(self, sessions: Mapping[SessionKey, Session], ttl_s: float) -> None:
        self._sessions = sessions
        self._ttl_s = ttl_s
        self._timers: list[SessionTimer] = []
        self._order = count()  # keys cannot be compared: an id may be text or a number

    def __len__(self) -> int:
        return len(self._timers)

    @property
    def next_deadline_s(self) -> float | None:
        """Time at which the next timer is due; None without timers."""
        return self._timers[0].deadline_s if self._timers else None

    def start(self, paused: Iterable[Session], now_s: float) -> None:
        """Start a timer for each session that has just paused."""
        for session in paused:
            deadline_s = now_s + session.time_to_live_s(self._ttl_s)
            timer = SessionTimer(deadline_s, next(self._order), session.key, session.last_turn)
            heapq.heappush(self._timers, timer)
        if len(self._timers) > max(MIN_PRUNE_LEN, 2 * len(self._sessions)):
            self._timers = [timer for timer in self._timers if self._has_effect(timer)]
            heapq.heapify(self._timers)

    def pop_due(self, now_s: float) -> list[SessionTimer]:
        """Remove and return the timers that are due."""
        due = []
        while self._timers and self._timers[0].deadline_s <= now_s:
            due.append(heapq.heappop(self._timers))
        return due

    def _has_effect(self, timer: SessionTimer) -> bool:
        session = self._sessions.get(timer.key)
        return session is not None and session.is_paused_since(timer.last_turn)
