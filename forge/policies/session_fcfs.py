"""Session FCFS: turns in the order in which their sessions began, not in their own order.

Newer sessions do not hold up one that is about to end, so its blocks are free earlier. A request
without a session keeps its own place. Program FCFS in Continuum (arXiv 2511.02230).
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext, oldest_overtaken

MAX_OVERTAKEN = 256
"""Admissions of later sequences after which a sequence is admitted in any case."""


def admit_oldest_session(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return a resumed sequence, or the turn of the oldest session, of the most urgent class.

    A request without a session is admitted where it is the first in the queue.
    """
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    first = waiting[0]
    if first.session is None or first.num_served:
        return first
    urgent = [c for c in waiting if c.request.priority == first.request.priority and c.session]
    age = {key: number for number, key in enumerate(context.sessions)}
    return min(urgent, key=lambda c: (age[c.session.key] if c.session else 0, c.id))


policy = FCFS._replace(admit=admit_oldest_session)
