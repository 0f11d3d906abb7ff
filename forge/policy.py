"""Policies: which sequence to admit, which to preempt, and how to split the token budget.

Owns the shape of a policy and the ones that ship. Knows no queue, block or plan: a decision is a
pure function of the candidates. The scheduler calls it once per decision, never per decode row, and
refuses an answer that is not among the candidates.

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
    """Fields of a sequence that a policy may read. The length of its output is not among them."""

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
        """Known tokens that are not computed, given the blocks it holds now."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of its table."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far. The scheduler never preempts a sequence a ninth time."""
        ...


class Split(NamedTuple):
    """Split of one plan's token budget.

    num_decodes   sequences that get one token each, in running order; the others wait a step
    chunks        tokens for each prefilling sequence, in the order given; 0 waits a step
    """

    num_decodes: int
    chunks: tuple[int, ...]


class Policy(NamedTuple):
    """Three decisions. The lists are the scheduler's own: a policy reads them and changes nothing.

    admit     (waiting) -> the sequence to admit next, or None. `waiting` is in order of
              priority class, resumed before new, then arrival. Called after each admission too.
    preempt   (running) -> the sequence that gives up its blocks
    split     (budget, num_decodes, prefilling) -> Split. Called only while a sequence is
              prefilling: it has a prompt, or more than one token to recompute, ahead of it.
    """

    admit: Callable[[Sequence[Candidate]], Candidate | None]
    preempt: Callable[[Sequence[Candidate]], Candidate]
    split: Callable[[int, int, Sequence[Candidate]], Split]


def first_in_queue(waiting: Sequence[Candidate]) -> Candidate | None:
    """Return the oldest sequence of the most urgent class, resumed ones before new ones."""
    return waiting[0]


def shortest_prompt(waiting: Sequence[Candidate]) -> Candidate | None:
    """Return the shortest prompt within the most urgent class. Long prompts can starve."""
    top_priority = waiting[0].request.priority
    return min(
        (c for c in waiting if c.request.priority == top_priority),
        key=lambda c: (len(c.request.prompt), c.id),
    )


def least_progress(running: Sequence[Candidate]) -> Candidate:
    """Return the sequence of the lowest priority class, then with the fewest output tokens.

    It is the cheapest to recompute. Ties go to the higher id, or a replay could differ.
    """
    return min(running, key=lambda c: (-c.request.priority, c.num_output, -c.id))


def largest_table(running: Sequence[Candidate]) -> Candidate:
    """Return the sequence that frees the most blocks. Ties go to the higher id."""
    return max(running, key=lambda c: (c.num_blocks, c.id))


def decodes_then_chunks(budget: int, num_decodes: int, prefilling: Sequence[Candidate]) -> Split:
    """Plan every decode, then prompts in running order (Agrawal et al. 2023)."""
    budget_left = budget - num_decodes
    chunks = []
    for candidate in prefilling:
        chunk = min(budget_left, candidate.num_pending)
        chunks.append(chunk)
        budget_left -= chunk
    return Split(num_decodes, tuple(chunks))


def prefills_first(budget: int, num_decodes: int, prefilling: Sequence[Candidate]) -> Split:
    """Plan prompts first and alone: the shortest time to first token. Decodes wait meanwhile."""
    return Split(0, decodes_then_chunks(budget, 0, prefilling).chunks)


FCFS = Policy(first_in_queue, least_progress, decodes_then_chunks)
"""First come, first served within a priority class; prompts in chunks alongside decodes."""

POLICIES = {
    "fcfs": FCFS,
    "shortest-prompt": FCFS._replace(admit=shortest_prompt),
    "prefill-first": FCFS._replace(split=prefills_first),
    "largest-victim": FCFS._replace(preempt=largest_table),
}
