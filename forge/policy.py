"""The scheduler's choices as small values: whom to admit, whom to preempt, how to split the budget.

Owns the shape of a policy and the ones that ship. Knows no queue, block or plan: a choice is a pure
function of what it is offered. The scheduler asks once per decision, never per decode row, and
refuses an answer that was not on offer.

    waiting ──admit──► running ──split──► tokens of the next plan
       ▲                  │
       └──────preempt─────┘  when blocks run out

A policy of your own is a file that defines `policy`:

    from forge.policy import FCFS
    policy = FCFS._replace(admit=lambda waiting: min(waiting, key=lambda c: len(c.request.prompt)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from forge.request import Request


class Candidate(Protocol):
    """What a policy may read of a sequence. It never sees which token will end it."""

    @property
    def id(self) -> int:
        """Grows with arrival; never reused."""
        ...

    @property
    def request(self) -> Request:
        """Prompt, parameters, priority, arrival time."""
        ...

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def num_pending(self) -> int:
        """Tokens known and not yet computed, given the blocks it holds now."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted; the scheduler never preempts it a ninth time."""
        ...


class Split(NamedTuple):
    """How one plan's token budget is spent.

    num_decodes   sequences that get one token each, in running order; the rest wait a step
    chunks        tokens for each filling sequence, in the order offered; 0 waits a step
    """

    num_decodes: int
    chunks: tuple[int, ...]


class Policy(NamedTuple):
    """Three choices. What is offered is the scheduler's own: a policy reads it and changes nothing.

    admit     (waiting) -> the one to admit next, or None to admit nobody now. `waiting` is ordered
              by priority class, resumed before new, then arrival. Asked again after each admission.
    preempt   (running) -> the one that gives up its blocks
    split     (budget, num_decodes, filling) -> Split. Asked only while a sequence is filling, that
              is, has a prompt or a recomputation of more than one token ahead of it.
    """

    admit: Callable[[Sequence[Candidate]], Candidate | None]
    preempt: Callable[[Sequence[Candidate]], Candidate]
    split: Callable[[int, int, Sequence[Candidate]], Split]


def first_in_queue(waiting: Sequence[Candidate]) -> Candidate | None:
    """The oldest of the most urgent class; resumed ones before newcomers."""
    return waiting[0]


def shortest_prompt(waiting: Sequence[Candidate]) -> Candidate | None:
    """The shortest prompt within the most urgent class. Long prompts can starve."""
    top_priority = waiting[0].request.priority
    return min(
        (c for c in waiting if c.request.priority == top_priority),
        key=lambda c: (len(c.request.prompt), c.id),
    )


def least_progress(running: Sequence[Candidate]) -> Candidate:
    """Lowest priority class, then fewest output tokens, then higher id.

    Fewest output tokens loses: it is the cheapest to recompute. Ties go to the higher id, or a
    replay could differ.
    """
    return min(running, key=lambda c: (-c.request.priority, c.num_output, -c.id))


def largest_table(running: Sequence[Candidate]) -> Candidate:
    """The sequence that frees the most blocks; ties go to the higher id."""
    return max(running, key=lambda c: (c.num_blocks, c.id))


def decodes_then_chunks(budget: int, num_decodes: int, prefilling: Sequence[Candidate]) -> Split:
    """Every decode runs; what is left goes to prompts in running order (Agrawal et al. 2023)."""
    budget_left = budget - num_decodes
    chunks = []
    for candidate in prefilling:
        chunk = min(budget_left, candidate.num_pending)
        chunks.append(chunk)
        budget_left -= chunk
    return Split(num_decodes, tuple(chunks))


def prefills_first(budget: int, num_decodes: int, prefilling: Sequence[Candidate]) -> Split:
    """Prompts first and alone: the shortest time to first token, and decodes stall meanwhile."""
    return Split(0, decodes_then_chunks(budget, 0, prefilling).chunks)


FCFS = Policy(first_in_queue, least_progress, decodes_then_chunks)
"""First come, first served within a priority class; prompts in chunks beside the decodes."""

POLICIES = {
    "fcfs": FCFS,
    "shortest-prompt": FCFS._replace(admit=shortest_prompt),
    "prefill-first": FCFS._replace(split=prefills_first),
    "largest-victim": FCFS._replace(preempt=largest_table),
}
