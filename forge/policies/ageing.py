"""Priority with ageing: a class is worth ten seconds of waiting, so no class waits indefinitely.

All requests age at the same speed, so their order does not change while they wait. The rank needs
the arrival time and no clock.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext

SECONDS_PER_CLASS = 10.0


def rank(candidate: Candidate) -> float:
    """Return the arrival time, delayed by the class: lower goes first."""
    return candidate.request.arrival_s + SECONDS_PER_CLASS * candidate.request.priority


def admit_by_rank(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return a preempted sequence if there is one, else the one with the lowest rank."""
    return min(waiting, key=lambda c: (c.num_preemptions == 0, rank(c), c.id))


policy = FCFS._replace(admit=admit_by_rank)
