"""Shortest prompt first, but nobody for ever: a thousand tokens are worth two seconds of waiting.

A short prompt passes a long one that came little before it, never one that came long before. No
clock is needed: the order of two requests does not change while they wait.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate

SECONDS_PER_TOKEN = 0.002


def rank(candidate: Candidate) -> float:
    """When it came, put off by its length: lower goes first."""
    return candidate.request.arrival_s + SECONDS_PER_TOKEN * len(candidate.request.prompt)


def admit_by_rank(waiting: Sequence[Candidate]) -> Candidate | None:
    """By rank within the most urgent class."""
    return min(waiting, key=lambda c: (c.request.priority, rank(c), c.id))


policy = FCFS._replace(admit=admit_by_rank)
