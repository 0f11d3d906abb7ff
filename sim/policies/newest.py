"""Newest first: under more load than can be served, those who are served are served at once.

The others wait, mostly for ever: their users have left. Within the load it differs little from
first come, first served.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate


def admit_newest(waiting: Sequence[Candidate]) -> Candidate | None:
    """Who has been preempted goes on first, then the newest of the most urgent class."""
    return min(waiting, key=lambda c: (c.request.priority, c.num_preemptions == 0, -c.id))


policy = FCFS._replace(admit=admit_newest)
