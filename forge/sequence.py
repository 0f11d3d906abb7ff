"""One choice of one request on its way through the engine.

Owns what is known of it: tokens, blocks, slot and place in line. Knows no queue or plan; the
Scheduler owns every Sequence and is the only one that changes it.

    tokens     [ prompt ........ | output committed ... ]
    table      [ computed, or in a plan ............... ]
                 ^ committed: computed by steps whose results are known
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from forge.blocks import BlockHash, BlockTable
from forge.request import Request, SamplingParams
from forge.seam import Bind


class StopChecker(Protocol):
    """Decides, token by token, whether an output has reached one of its stop strings."""

    def feed(self, token: int) -> bool:
        """True once the output must end with this token."""
        ...


STOP_ERROR_PREFIX, STRUCTURE_ERROR_PREFIX = "stop strings", "structure"
"""With which word the error of a choice begins whose watch or guide has failed."""


class GrammarMatcher(Protocol):
    """Says, token by token, which ids may come next, so that an output has its structure.

    mask   ids that may come next: id t is bit t % 8 of byte t // 8
    """

    @property
    def mask(self) -> bytes: ...

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Masks behind the first 1, 2, ... drafts, for as many as fit and complete nothing."""
        ...

    def feed(self, token: int) -> bool:
        """True once the output is complete. Raises what makes it impossible to go on."""
        ...


def no_stop_checker(params: SamplingParams) -> StopChecker | None:
    """No output is watched for stop strings."""
    return None


def no_matcher(params: SamplingParams) -> GrammarMatcher | None:
    """No output has a structure."""
    return None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. Owned by the Scheduler; a policy reads it as a Candidate.

    tokens                prompt and committed output
    max_len               length at which it ends, prompt included
    stop_ids              ids that end it
    row_index             index of its row in the last plan that had one: names the token sampled
                          there
    table                 its blocks; empty while it waits
    slot                  its row of the device's state; None while it waits
    num_synced_blocks     blocks of the table that plans have told the device; 0 until the slot is
                          bound
    epoch                 how often it lost its blocks
    num_committed         positions computed by committed steps since it got its blocks
    next_prompt_logprob   prompt positions reported with their log probability, and the first, which
                          has none
    hashes                hashes of its full blocks, root first; extended on demand
    num_drafts            most drafts its next row may have. Above 0 that row waits for all commits
                          before
    review_len            length from which a commit looks closer: the limit, or where drafts are
                          due again
    inspect_from          below this length a result is one more token and no more: nobody watches,
                          nothing is to heed
    """

    id: int
    request: Request
    choice: int
    params: SamplingParams
    bind: Bind
    tokens: list[int]
    max_len: int
    stop_ids: frozenset[int]
    stop_checker: StopChecker | None
    matcher: GrammarMatcher | None
    row_index: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    slot: int | None = None
    num_synced_blocks: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    was_retried: bool = False
    num_committed: int = 0
    next_prompt_logprob: int = 1
    hashes: list[BlockHash] = field(default_factory=list)
    num_drafts: int = 0
    review_len: int = 0
    inspect_from: int = 0

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.bind.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens known and in no plan yet; below 0 while drafts are in flight."""
        return len(self.tokens) - self.table.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self.table.blocks)

    @property
    def queue_key(self) -> tuple[int, bool, int]:
        """Place in the waiting line: priority class, resumed before new, then arrival."""
        return (self.request.priority, self.epoch == 0, self.id)
