"""Shortest prompt first, with ageing: a thousand tokens are worth two seconds of waiting.

A short prompt passes a long one that came shortly before it, never one that came long before. The
order of two requests does not change while they wait, so the rank needs no clock.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext

SECONDS_PER_TOKEN = 0.002


def rank(candidate: Candidate) -> float:
    """Return the arrival time, delayed by the length of the prompt: lower goes first."""
    return candidate.request.arrival_s + SECONDS_PER_TOKEN * len(candidate.request.prompt)


def admit_by_rank(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the lowest rank within the most urgent class."""
    return min(waiting, key=lambda c: (c.request.priority, rank(c), c.id))


policy = FCFS._replace(admit=admit_by_rank)
