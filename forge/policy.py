"""Policies: which sequence to admit, which to preempt, how to split the budget, what to evict.

Owns the shape of a policy and the ones that ship. Knows no queue, block or plan: a decision is a
pure function of the candidates and the context. The scheduler calls it once per decision, never per
decode row, and refuses an answer that is not among the candidates.

    waiting ──admit──► running ──split──► tokens of the next plan
       ▲                  │
       └─preempt, displace┘                 paused sessions ──evict──► blocks that go first

A policy of your own is a file that defines `policy`:

    from forge.policy import FCFS
    policy = FCFS._replace(admit=lambda waiting, context: min(waiting, key=lambda c: c.num_pending))

A policy that learns returns a new state from each event; `context.state` is the latest one. The
scheduler keeps it, so the same requests give the same decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from forge.request import Request
from forge.sessions import Session, SessionKey

STEP_WORK = 256
"""Tokens whose computation takes about as long as a step without them, on a GPU."""


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
    def session(self) -> Session | None:
        """The session of which its request is a turn."""
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

    @property
    def num_served(self) -> int:
        """Positions computed for it so far, recomputed ones included, cached ones not."""
        ...

    @property
    def num_overtaken(self) -> int:
        """Admissions of sequences that were later in the queue, while it could be admitted."""
        ...


class PolicyContext(NamedTuple):
    """Values that a decision may depend on besides the candidates. They are read, never changed.

    work                clock of the device's work: tokens of all plans so far, and STEP_WORK for
                        each plan. It stands still while nothing is planned
    num_blocks          blocks of the cache
    block_size          tokens per block
    num_free_blocks     blocks in no table: empty and cached ones
    max_num_seqs        most sequences that run
    running             sequences that run, in order of admission
    sessions            open sessions by key, oldest first
    state               the policy's state, as `update` last returned it
    num_cached_tokens   of a waiting sequence: tokens in blocks that it could start on now. The time
                        grows with its length
    num_own_blocks      of an open session: blocks of its chain that no other session's chain has
    num_session_blocks  blocks in the chains of all open sessions, each counted once
    """

    work: int
    num_blocks: int
    block_size: int
    num_free_blocks: int
    max_num_seqs: int
    running: Collection[Candidate]
    sessions: Mapping[SessionKey, Session]
    state: Hashable
    num_cached_tokens: Callable[[Candidate], int]
    num_own_blocks: Callable[[Session], int]
    num_session_blocks: int


class PolicyEventKind(Enum):
    """Changes that a policy may learn from: of a sequence, or the close of a session."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    SESSION_CLOSED = "session closed"


class PolicyEvent(NamedTuple):
    """A change that a policy may learn from.

    work        clock of the device's work, as in PolicyContext
    candidate   the sequence as it is right after the change; None where a session has closed
    session     the session that has closed, otherwise that of the candidate
    """

    kind: PolicyEventKind
    work: int
    candidate: Candidate | None
    session: Session | None


class Split(NamedTuple):
    """Split of one plan's token budget.

    num_decodes   sequences that get one token each, in running order; the others wait a step
    chunks        tokens for each prefilling sequence, in the order given; 0 waits a step
    """

    num_decodes: int
    chunks: tuple[int, ...]


class Policy(NamedTuple):
    """Decisions, each a pure function. The lists are the scheduler's own: a policy only reads them.

    admit           (waiting, context) -> the sequence to admit next, or None. `waiting` is in order
                    of priority class, resumed before new, then arrival. Called after each admission
                    too. None while nothing runs is allowed where a session is paused
    preempt         (running, context) -> the sequence that gives up its blocks
    split           (budget, num_decodes, prefilling, context) -> Split. Called only while a
                    sequence is prefilling: it has a prompt, or more than one token to recompute,
                    ahead of it
    displace        (running, waiting, context) -> a running sequence to preempt for a waiting one,
                    or None. Called once before admission; no field: no sequence is displaced
    evict           (sessions, context) -> the session whose cached blocks go next, from the end of
                    its chain, where all other cached blocks have gone. No request of it runs.
                    No field: the least recently used block goes
    update          (state, event) -> the next state, an immutable value that can be hashed
    initial_state   the state before the first event
    """

    admit: Callable[[Sequence[Candidate], PolicyContext], Candidate | None]
    preempt: Callable[[Sequence[Candidate], PolicyContext], Candidate]
    split: Callable[[int, int, Sequence[Candidate], PolicyContext], Split]
    displace: (
        Callable[[Sequence[Candidate], Sequence[Candidate], PolicyContext], Candidate | None] | None
    ) = None
    evict: Callable[[Sequence[Session], PolicyContext], Session] | None = None
    update: Callable[..., Hashable] | None = None
    initial_state: Hashable = None

    @property
    def is_complete(self) -> bool:
        """True where every required choice is a function, and every optional one that is given."""
        optional = self.displace, self.evict, self.update
        return all(map(callable, (self.admit, self.preempt, self.split))) and all(
            each is None or callable(each) for each in optional
        )


def first_in_queue(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the oldest sequence of the most urgent class, resumed ones before new ones."""
    return waiting[0]


def shortest_prompt(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the shortest prompt within the most urgent class. Long prompts can starve."""
    top_priority = waiting[0].request.priority
    return min(
        (c for c in waiting if c.request.priority == top_priority),
        key=lambda c: (len(c.request.prompt), c.id),
    )


def least_progress(running: Sequence[Candidate], context: PolicyContext) -> Candidate:
    """Return the sequence of the least urgent class, then with the fewest output tokens.

    Its user has seen the least. Ties go to the higher id, or a replay could differ.
    """
    return min(running, key=lambda c: (-c.request.priority, c.num_output, -c.id))


def largest_table(running: Sequence[Candidate], context: PolicyContext) -> Candidate:
    """Return the sequence that frees the most blocks. Ties go to the higher id."""
    return max(running, key=lambda c: (c.num_blocks, c.id))


def decodes_then_chunks(
    budget: int, num_decodes: int, prefilling: Sequence[Candidate], context: PolicyContext
) -> Split:
    """Plan every decode, then prompts in running order (Agrawal et al. 2023)."""
    budget_left = budget - num_decodes
    chunks = []
    for candidate in prefilling:
        chunk = min(budget_left, candidate.num_pending)
        chunks.append(chunk)
        budget_left -= chunk
    return Split(num_decodes, tuple(chunks))


def prefills_first(
    budget: int, num_decodes: int, prefilling: Sequence[Candidate], context: PolicyContext
) -> Split:
    """Plan prompts first and alone: the shortest time to first token. Decodes wait meanwhile."""
    return Split(0, decodes_then_chunks(budget, 0, prefilling, context).chunks)


def oldest_overtaken(waiting: Sequence[Candidate], max_overtaken: int) -> Candidate | None:
    """Return the oldest sequence of the most urgent class that has waited too long, or None.

    max_overtaken   admissions of later sequences after which a sequence has

    A policy that admits this sequence before all others overtakes none more often.
    """
    top_priority = waiting[0].request.priority
    return next(
        (
            c
            for c in waiting
            if c.request.priority == top_priority and c.num_overtaken >= max_overtaken
        ),
        None,
    )


FCFS = Policy(first_in_queue, least_progress, decodes_then_chunks)
"""First come, first served within a priority class; prompts in chunks alongside decodes."""

POLICIES = {
    "fcfs": FCFS,
    "shortest-prompt": FCFS._replace(admit=shortest_prompt),
    "prefill-first": FCFS._replace(split=prefills_first),
    "largest-victim": FCFS._replace(preempt=largest_table),
}
