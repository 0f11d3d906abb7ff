"""Priority with ageing: a class is worth ten seconds of waiting, so no class waits for ever.

Everybody ages at the same speed, so who goes before whom does not change while they wait: no clock
is needed, only when each came.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate

SECONDS_PER_CLASS = 10.0


def rank(candidate: Candidate) -> float:
    """When it came, put off by its class: lower goes first."""
    return candidate.request.arrival_s + SECONDS_PER_CLASS * candidate.request.priority


def admit_by_rank(waiting: Sequence[Candidate]) -> Candidate | None:
    """Who has been preempted goes on first, then by rank."""
    return min(waiting, key=lambda c: (c.num_preemptions == 0, rank(c), c.id))


policy = FCFS._replace(admit=admit_by_rank)
