"""Predicted shortest: the sequence that is likely to need the fewest tokens goes first.

An output's length is predicted from those that ended: the mean over prompts of about this length.
So nothing is known before the first outputs end, and then it is first come, first served. Long
requests are overtaken a bounded number of times.

Shortest remaining time with predicted lengths: TRAIL (Shahout et al. 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

from forge.policy import (
    FCFS,
    Candidate,
    PolicyContext,
    PolicyEvent,
    PolicyEventKind,
    oldest_overtaken,
)

MAX_OVERTAKEN = 64
"""Admissions of later sequences after which a sequence is admitted in any case."""


class Lengths(NamedTuple):
    """Outputs of prompts whose length has `num_bits` bits: how many ended, and their tokens."""

    num_bits: int
    num_outputs: int = 0
    num_tokens: int = 0


History = tuple[Lengths, ...]


def learn_length(history: History, event: PolicyEvent) -> History:
    """Return the history with the length of an output that has ended."""
    candidate = event.candidate
    if event.kind is not PolicyEventKind.FINISHED or candidate is None:
        return history
    num_bits = len(candidate.request.prompt).bit_length()
    old = next((each for each in history if each.num_bits == num_bits), Lengths(num_bits))
    new = Lengths(num_bits, old.num_outputs + 1, old.num_tokens + candidate.num_output)
    return (*(each for each in history if each.num_bits != num_bits), new)


def predicted_tokens(candidate: Candidate, history: History) -> float:
    """Return the tokens that the sequence is likely to need still, those of its prompt included."""
    num_bits = len(candidate.request.prompt).bit_length()
    mean = next((e.num_tokens / e.num_outputs for e in history if e.num_bits == num_bits), 0.0)
    return candidate.num_pending + max(0.0, mean - candidate.num_output)


def admit_shortest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the sequence with the fewest predicted tokens, in the most urgent class."""
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    history: History = context.state  # type: ignore[assignment]
    if not history:
        return waiting[0]
    return min(waiting, key=lambda c: (c.request.priority, predicted_tokens(c, history), c.id))


policy = FCFS._replace(admit=admit_shortest, update=learn_length, initial_state=())
