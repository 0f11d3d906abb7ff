"""SessionTimers: what is due and when, and that timers of no effect do not add up."""

from __future__ import annotations

from forge.session_timers import MIN_PRUNE_LEN, SessionTimers
from forge.sessions import Session, SessionKey


def paused(name: str | int, last_turn: int = 1, pause_s: float | None = None) -> Session:
    return Session(("", name), last_turn=last_turn, expected_pause_s=pause_s)


def due_keys(timers: SessionTimers, now_s: float) -> list[tuple[SessionKey, int]]:
    return [(timer.key, timer.last_turn) for timer in timers.pop_due(now_s)]


def test_timers_are_due_in_the_order_of_their_deadlines() -> None:
    """A hint of 1 s allows 7 s of pause, one of 100 s no more than the limit of 60 s."""
    timers = SessionTimers({}, 60.0)
    timers.start([paused("a"), paused("b", 2, pause_s=1.0), paused("c", 3, pause_s=100.0)], 10.0)
    assert timers.next_deadline_s == 17.0
    assert due_keys(timers, 16.9) == []
    assert due_keys(timers, 17.0) == [(("", "b"), 2)]
    assert due_keys(timers, 70.0) == [(("", "a"), 1), (("", "c"), 3)]
    assert timers.next_deadline_s is None


def test_a_named_and_a_recognised_session_may_be_due_at_one_time() -> None:
    timers = SessionTimers({}, 60.0)
    timers.start([paused("a"), paused(7)], 0.0)
    assert due_keys(timers, 60.0) == [(("", "a"), 1), (("", 7), 1)]


def test_timers_of_no_effect_do_not_add_up() -> None:
    """A session that goes on a thousand times keeps its last timer, and another session its own."""
    session, other = paused("a", 0), paused("b")
    sessions: dict[SessionKey, Session] = {session.key: session, other.key: other}
    timers = SessionTimers(sessions, 60.0)
    timers.start([other], 1000.0)
    for now_s in range(1000):
        session.last_turn += 1
        timers.start([session], float(now_s))
        assert len(timers) <= MIN_PRUNE_LEN
    assert due_keys(timers, 1058.9)[-1][1] < 1000
    assert due_keys(timers, 1059.0) == [(session.key, 1000)]
    assert due_keys(timers, 1060.0) == [(other.key, 1)]


def test_timers_of_closed_sessions_do_not_add_up() -> None:
    timers = SessionTimers({}, 60.0)
    for number in range(1000):
        timers.start([paused(f"session {number}")], 0.0)
        assert len(timers) <= MIN_PRUNE_LEN


def test_every_paused_session_keeps_its_timer() -> None:
    sessions = {session.key: session for session in (paused(n) for n in range(1000))}
    timers = SessionTimers(sessions, 60.0)
    for session in sessions.values():
        timers.start([session], 0.0)
    assert len(due_keys(timers, 60.0)) == 1000
