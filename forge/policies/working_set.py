"""Working set: the oldest sessions whose blocks fit together go on; later ones wait for them.

Under first come, first served the blocks of a session are evicted while its tool runs, and each
turn computes its whole context again. Here a turn is admitted if its session is in the working set:
the sessions in order of age, for as long as their blocks and some growth fit in the cache. Tenants
have equal shares of it, and what a tenant leaves goes to the others. Requests that belong to no
session wait for none. The device never idles for a pause: where nothing runs, the oldest session is
admitted.

Blocks are kept through a pause only if that costs less than to compute them again: if during a
pause, by the pauses so far, the engine computes fewer tokens than the cache holds. A session that
pauses far longer than others is not waited for.

Denning 1968 (working sets). Whole programs that pause: ThunderAgent (arXiv 2602.13692). What a
pause costs in memory, and what in time: InferCept (Abhyankar et al. 2024).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from forge.policy import (
    FCFS,
    Candidate,
    PolicyContext,
    PolicyEvent,
    PolicyEventKind,
    oldest_overtaken,
)
from forge.sessions import Session, SessionKey

GROWTH = 1.15
"""Room for a session to grow, as a factor of its own tokens now."""

CACHE_SHARE = 0.95
"""Share of the cache that the working set may fill. The rest is for requests without a session."""

MAX_OVERTAKEN = 256
"""Admissions of later sequences after which a sequence is admitted in any case."""

MAX_PAUSES = 64
"""Pauses that the mean is about: each later one counts by this part."""

ABANDONED_AFTER = 4
"""Pause after which a session is not waited for, as a multiple of the mean."""


class Pauses(NamedTuple):
    """Pauses so far: how many, up to MAX_PAUSES, and their mean on the clock of work."""

    number: int = 0
    mean: float = 0.0


def learn_pause(pauses: Pauses, event: PolicyEvent) -> Pauses:
    """Return the pauses with that of a session which goes on, if the event is its next turn."""
    session = event.session
    if event.kind is not PolicyEventKind.ARRIVED or session is None:
        return pauses
    if not session.paused_at or session.num_live > 1:  # a recognised one has not paused before
        return pauses
    number = min(pauses.number + 1, MAX_PAUSES)
    pause = event.work - session.paused_at
    return Pauses(number, pauses.mean + (pause - pauses.mean) / number)


def is_kept(session: Session, context: PolicyContext) -> bool:
    """Return whether the session's blocks are worth keeping: it is not paused, or not for long."""
    pauses: Pauses = context.state  # type: ignore[assignment]
    if not session.is_paused or not pauses.number:
        return True
    if pauses.mean > context.num_blocks * context.block_size:
        return False
    return context.work - session.paused_at <= ABANDONED_AFTER * pauses.mean


def live_tokens(live: Collection[Candidate]) -> dict[SessionKey, int]:
    """Return the tokens of the longest of these sequences of each session."""
    lengths: dict[SessionKey, int] = {}
    for c in live:
        if c.session is not None:
            length = len(c.request.prompt) + c.num_output
            lengths[c.session.key] = max(length, lengths.get(c.session.key, 0))
    return lengths


def working_set(live: Collection[Candidate], context: PolicyContext) -> Collection[SessionKey]:
    """Return the kept sessions that fit in the cache together, the oldest of each tenant first.

    live   waiting and running sequences

    What the oldest session shares with others, such as a system prompt, counts once for all. The
    first turn of a session is taken to begin with it.
    """
    size, sessions = context.block_size, context.sessions
    left = CACHE_SHARE * context.num_blocks * size
    lengths = live_tokens(live)
    if GROWTH * (context.num_session_blocks * size + sum(lengths.values())) <= left:
        return sessions.keys()
    oldest = next((s for s in sessions.values() if s.chain), None)
    common = 0 if oldest is None else size * (len(oldest.chain) - context.num_own_blocks(oldest))
    left -= common
    share = left / len({tenant for tenant, _ in sessions})
    used: Counter[str] = Counter()
    found: set[SessionKey] = set()

    def need(session: Session) -> int:
        num_shared = size * (len(session.chain) - context.num_own_blocks(session))
        length = max(lengths.get(session.key, 0), session.num_tokens)
        return round(GROWTH * max(size, length - (num_shared if session.chain else common)))

    passed = [session for session in sessions.values() if is_kept(session, context)]
    for limit in (share, left):  # what the shares leave goes to the oldest
        candidates, passed, full = passed, [], set[str]()
        for session in candidates:
            tenant = session.key[0]
            num_tokens = 0 if tenant in full else need(session)
            if tenant in full or (found and num_tokens > min(left, limit - used[tenant])):
                full.add(tenant)  # its newer sessions do not pass this one
                passed.append(session)
                continue
            found.add(session.key)
            used[tenant] += num_tokens
            left -= num_tokens
    return found


def admit_by_age(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return a resumed sequence, one without a session, or the oldest session's in the set."""
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    urgent = [c for c in waiting if c.request.priority == waiting[0].request.priority]
    turns = []
    for c in urgent:
        if c.session is None or c.num_served:
            return c
        turns.append((c, c.session.key))
    inside = working_set((*context.running, *waiting), context)
    age = {key: number for number, key in enumerate(context.sessions)}
    allowed = [(c, key) for c, key in turns if key in inside]
    if not allowed and context.running:
        return None
    return min(allowed or turns, key=lambda turn: (age[turn[1]], turn[0].id))[0]


def evict_newest(sessions: Sequence[Session], context: PolicyContext) -> Session:
    """Return the newest session outside the working set, or the newest of all."""
    inside = working_set(context.running, context)
    return next((s for s in reversed(sessions) if s.key not in inside), sessions[-1])


policy = FCFS._replace(
    admit=admit_by_age, evict=evict_newest, update=learn_pause, initial_state=Pauses()
)
