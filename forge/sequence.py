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
from typing import NamedTuple, Protocol

from forge.blocks import BlockHash, BlockTable
from forge.request import FinishReason, Request, SamplingParams, TokenLogprob
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


class AppendResult(NamedTuple):
    """How many tokens of a result were appended, and what ended the sequence.

    num_taken   tokens of the result that the output has, the last of them `stop_token` if set
    """

    num_taken: int
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


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
    inspect_from          length from which a commit inspects each result. Below it a result is one
                          more token and nothing else. CommitGate writes it
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

    @property
    def is_ending(self) -> bool:
        """Whether its last token is in flight."""
        # While the prompt is prefilled known tokens are pending, and the end is not in flight.
        return self.table.num_tokens + 1 >= self.max_len and self.num_pending <= 0

    @property
    def can_fork(self) -> bool:
        """Whether it may begin on a sibling's blocks: no output yet, no prompt logprobs to report.

        With one output token a sibling ends with the step that computes the prompt, so there is no
        sibling to fork from.
        """
        return (
            self.num_output == 0
            and self.params.prompt_logprobs is None
            and self.max_len > self.bind.prompt_len + 1
        )

    def fork_source(self, siblings: Iterable[Sequence]) -> Sequence | None:
        """Return a running sibling whose blocks hold the whole prompt, committed, or None."""
        if self.can_fork:
            for sibling in siblings:
                if sibling.slot is not None and sibling.num_committed >= sibling.bind.prompt_len:
                    return sibling
        return None

    def append_tokens(self, tokens: tuple[int, ...], vocab_size: int) -> AppendResult:
        """Append committed tokens, up to the one that ends the sequence. Stop beats length."""
        min_tokens = self.params.min_tokens
        checkers = (STOP_ERROR_PREFIX, self.stop_checker), (STRUCTURE_ERROR_PREFIX, self.matcher)
        for count, token in enumerate(tokens, 1):
            if not 0 <= token < vocab_size:
                why = f"the model sampled token {token}, its vocabulary has {vocab_size}"
                return AppendResult(count - 1, FinishReason.ERROR, error=why)
            self.tokens.append(token)
            if token in self.stop_ids and self.num_output >= min_tokens:
                return AppendResult(count, FinishReason.STOP, token)
            is_complete = False
            for name, checker in checkers:  # both read every token
                try:
                    is_complete |= checker is not None and checker.feed(token)
                except Exception as fault:  # a fault in one request ends that request alone
                    return AppendResult(count, FinishReason.ERROR, error=f"{name}: {fault!r}")
            if is_complete:
                return AppendResult(count, FinishReason.STOP)
            if len(self.tokens) >= self.max_len:
                return AppendResult(count, FinishReason.LENGTH)
        return AppendResult(len(tokens))

    def take_prompt_logprobs(
        self, start: int, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Return those not reported before, of logprobs that begin behind position `start`.

        After a preemption the prompt is computed again, and its logprobs come again.
        """
        new_logprobs = logprobs[self.next_prompt_logprob - start - 1 :]
        self.next_prompt_logprob += len(new_logprobs)
        return new_logprobs
