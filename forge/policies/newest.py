"""Newest first: under overload, requests that are served at all are served at once.

The others wait, mostly indefinitely: their users have left. Below the capacity it differs little
from first come, first served.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext


def admit_newest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the newest of the most urgent class; preempted sequences of the class go first."""
    return min(waiting, key=lambda c: (c.request.priority, c.num_preemptions == 0, -c.id))


policy = FCFS._replace(admit=admit_newest)
