"""Attained service: sessions that have been served least go first, and preempt those served most.

Short sessions end soon, whatever came before them. Service is counted in tokens computed for all
turns of a session, in levels that double: within a level it is first come, first served, so that
two long sessions do not take turns at every token. PLAS in Autellix (arXiv 2502.13965).
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext, oldest_overtaken

FIRST_LEVEL_TOKENS = 4096
"""Tokens of service below which all sessions are equal."""

PREEMPTED_LEVELS = 3
"""A running sequence makes way for one that is so many levels below: an eighth of the service."""

MAX_OVERTAKEN = 256
"""Admissions of later sequences after which a sequence is admitted in any case."""


def level(candidate: Candidate) -> int:
    """Return how often the service of its session, or its own, has doubled."""
    num_tokens = candidate.num_served
    if candidate.session is not None:
        num_tokens += candidate.session.num_served_tokens
    return (num_tokens // FIRST_LEVEL_TOKENS).bit_length()


def admit_least_served(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the oldest sequence of the lowest level, in the most urgent class."""
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    return min(waiting, key=lambda c: (c.request.priority, level(c), c.id))


def displace_most_served(
    running: Sequence[Candidate], waiting: Sequence[Candidate], context: PolicyContext
) -> Candidate | None:
    """Return the running sequence of the highest level if a waiting one is far below, or None."""
    if len(context.running) < context.max_num_seqs:
        return None
    victim = max(running, key=lambda c: (c.request.priority, level(c), c.id), default=None)
    best = min(waiting, key=lambda c: (c.request.priority, level(c), c.id))
    if victim is None or best.request.priority > victim.request.priority:
        return None
    return victim if level(victim) - level(best) >= PREEMPTED_LEVELS else None


policy = FCFS._replace(admit=admit_least_served, displace=displace_most_served)
