"""Sequence: one choice of one request on its way through the engine.

Owns its tokens, blocks, slot and position in the queue. Knows no queue and no plan. The Scheduler
owns every Sequence and changes it, with plan_rows and uniform_steps. The Drafter sets `num_drafts`,
the CommitGate `inspect_from`, and the PrefixCache extends `hashes`.

    tokens     [ prompt ........ | output committed ... ]
    table      [ computed, or in a plan ............... ]
                 ^ committed: computed by steps whose results are known
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from forge.blocks import BlockHash, BlockTable
from forge.request import (
    NOTHING_CACHED,
    CachedTokens,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.sampling import choice_seed
from forge.seam import Bind, RowOutput
from forge.sessions import Session


class StopChecker(Protocol):
    """Finds, token by token, the end of a stop string in an output."""

    def feed(self, token: int) -> bool:
        """Append a token, and return whether the output must end with it."""
        ...


STOP_ERROR_PREFIX, STRUCTURE_ERROR_PREFIX = "stop strings", "structure"
"""First words of the error of a choice whose stop checker or matcher has failed."""


class GrammarMatcher(Protocol):
    """Follows an output token by token, and says which ids its structure allows next.

    mask   ids that may come next: id t is bit t % 8 of byte t // 8
    """

    mask: bytes

    @property
    def structure_matcher(self) -> GrammarMatcher | None:
        """Matcher that feeds the next token to a structure, or None where there is none yet.

        A matcher that contains no other returns itself.
        """
        return self

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Return a mask for each draft: of the ids that may follow it.

        They end before the first draft that does not fit or that completes the output.
        """
        ...

    def feed(self, token: int) -> bool:
        """Append a token, and return whether the output is complete.

        Raises when it cannot go on, and when the complete output does not have its structure.
        """
        ...

    def check_end(self) -> None:
        """Raise where the output ends here, before a token that is not fed, and must not."""
        ...


def no_stop_checker(request: Request) -> StopChecker | None:
    """Return None: no output has stop strings."""
    return None


def no_matcher(params: SamplingParams) -> GrammarMatcher | None:
    """Return None: no output has a structure."""
    return None


class AppendResult(NamedTuple):
    """Number of appended tokens, and the end of the sequence if it has ended.

    num_taken   tokens of the result that the output has, the last of them `stop_token` if set
    """

    num_taken: int
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one choice of a request. Owned by the Scheduler; a policy reads it as a Candidate.

    tokens                prompt and committed output
    max_len               length at which it ends, prompt included
    stop_ids              ids that end it
    row_index             index, in its plan, of its last row with one sample: for a TokenRef
    table                 its blocks; empty while it waits
    slot                  its row of the device's state; None while it waits
    num_synced_blocks     blocks of the table that plans have named; 0 until the slot is bound
    epoch                 how often it lost its blocks
    num_preemptions       preemptions that the policy chose
    was_retried           a failed step has preempted it once
    num_committed         first positions of its blocks that were shared at admission or computed by
                          committed steps
    next_prompt_logprob   first prompt position whose logprob is not reported; position 0 has none
    hashes                hashes of its full blocks, root first; extended on demand
    num_drafts            most drafts its next row may have. Above 0 that row waits for all commits
                          before. The Drafter sets it
    inspect_from          length from which `commit` inspects each result. Below it only stop ids
                          and failures are inspected. The CommitGate sets it
    session               session of which its request is a turn
    num_overtaken         admissions of sequences that were later in the queue
    num_shared_tokens     positions that it did not compute: shared or forked at its last admission
    num_served_before     positions computed for it in earlier epochs
    num_lost_positions    most positions that its blocks had when it lost them
    num_recomputed        positions below that computed since: what its preemptions cost
    cached_tokens         tokens of the prompt that no choice of the request computed, and those
                          that this one has `written`. Nothing in a choice that did not run first
    num_counted_blocks    first blocks of the prompt that `written` no longer counts: those that it
                          found, and all of them in a choice that did not run first
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
    session: Session | None = None
    num_overtaken: int = 0
    num_shared_tokens: int = 0
    num_served_before: int = 0
    num_lost_positions: int = 0
    num_recomputed: int = 0
    cached_tokens: CachedTokens = NOTHING_CACHED
    num_counted_blocks: int = 0

    @property
    def num_served(self) -> int:
        """Positions computed for it so far, recomputed ones included."""
        return self.num_served_before + self.table.num_tokens - self.num_shared_tokens

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.bind.prompt_len

    @property
    def num_pending(self) -> int:
        """Known tokens that no plan computes yet; below 0 where plans go past the known tokens."""
        return len(self.tokens) - self.table.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of its table."""
        return len(self.table.blocks)

    @property
    def queue_key(self) -> tuple[int, bool, int]:
        """Sort key of the queue: priority class, resumed before new, then arrival."""
        return (self.request.priority, self.epoch == 0, self.id)

    @property
    def is_ending(self) -> bool:
        """True while its last token may be in flight: drafts that reach the end may be rejected."""
        # During prefill known tokens are pending.
        return self.table.num_tokens + 1 >= self.max_len and self.num_pending <= 0

    @property
    def can_fork(self) -> bool:
        """True where it may start on a sibling's blocks: without output and prompt logprobs.

        False with max_tokens <= 1: each sibling ends with the step that computes its prompt.
        """
        return (
            self.num_output == 0
            and self.params.prompt_logprobs is None
            and self.max_len > self.bind.prompt_len + 1
        )

    def fork_source(self, siblings: Iterable[Sequence]) -> Sequence | None:
        """Return a running sibling whose blocks hold the whole committed prompt, or None."""
        if self.can_fork:
            for sibling in siblings:
                if sibling.slot is not None and sibling.num_committed >= sibling.bind.prompt_len:
                    return sibling
        return None

    def runs_first(self, siblings: Collection[Sequence]) -> bool:
        """Return whether no choice of the request has run.

        siblings   its open choices, this one included
        """
        if len(siblings) < self.request.params.n:
            return False
        return all(s.slot is None and not s.epoch for s in siblings)

    def waits_for_sibling(self, siblings: Iterable[Sequence]) -> bool:
        """Return whether a running sibling computes the prompt that this sequence can fork."""
        if not self.can_fork or self.fork_source(siblings) is not None:
            return False
        return any(sibling.slot is not None for sibling in siblings)

    def append_tokens(self, tokens: tuple[int, ...], vocab_size: int) -> AppendResult:
        """Append committed tokens, up to the one that ends the sequence.

        A stop id (from `min_tokens` on), stop string or structure that is complete comes before the
        length limit. An id outside the vocabulary ends it with an error, as does a checker that
        raises, also at a stop id.
        """
        min_tokens = self.params.min_tokens
        checkers = (STOP_ERROR_PREFIX, self.stop_checker), (STRUCTURE_ERROR_PREFIX, self.matcher)
        for count, token in enumerate(tokens, 1):
            if not 0 <= token < vocab_size:
                why = f"the model sampled token {token}, its vocabulary has {vocab_size}"
                return AppendResult(count - 1, FinishReason.ERROR, error=why)
            self.tokens.append(token)
            if token in self.stop_ids and self.num_output >= min_tokens:
                return self._end_with_stop_id(count, token)
            is_complete = False
            for name, checker in checkers:  # both read every token
                try:
                    is_complete |= checker is not None and checker.feed(token)
                except Exception as error:  # a fault in one request ends that request alone
                    return AppendResult(count, FinishReason.ERROR, error=f"{name}: {error!r}")
            if is_complete:
                return AppendResult(count, FinishReason.STOP)
            if len(self.tokens) >= self.max_len:
                return AppendResult(count, FinishReason.LENGTH)
        return AppendResult(len(tokens))

    def _end_with_stop_id(self, count: int, token: int) -> AppendResult:
        """Return the end of the sequence: an error where its matcher does not allow this output."""
        try:
            if self.matcher is not None:
                self.matcher.check_end()
        except Exception as error:  # a fault in one request ends that request alone
            return AppendResult(
                count, FinishReason.ERROR, error=f"{STRUCTURE_ERROR_PREFIX}: {error!r}"
            )
        return AppendResult(count, FinishReason.STOP, token)

    def take_prompt_logprobs(
        self, start: int, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Return the prompt logprobs that were not reported before, and count them as reported.

        start   position before the first of `logprobs`

        After a preemption the prompt is computed again, and its logprobs come again.
        """
        new_logprobs = logprobs[self.next_prompt_logprob - start - 1 :]
        self.next_prompt_logprob += len(new_logprobs)
        return new_logprobs

    def count_written(self, first_block: int, are_new: list[bool], block_size: int) -> None:
        """Count tokens of the prompt that the prefix cache has from this sequence.

        are_new   whether each block was new to the cache, from index `first_block` of the table on

        Each block counts once, also where the sequence loses it and computes it again.
        """
        num_new = sum(are_new[max(0, self.num_counted_blocks - first_block) :])
        if num_new:
            written = self.cached_tokens.written + num_new * block_size
            self.cached_tokens = self.cached_tokens._replace(written=written)
        self.num_counted_blocks = max(self.num_counted_blocks, first_block + len(are_new))

    def create_delta(self, start: int, result: RowOutput, appended: AppendResult) -> Delta:
        """Return what the choice gained from a result whose tokens were appended.

        start   first position of the row
        """
        taken, finish, stop_token, _ = appended
        return Delta(
            self.request.id,
            self.choice,
            result.tokens[:taken],
            finish,
            stop_token,
            result.logprobs[:taken],
            self.take_prompt_logprobs(start, result.prompt_logprobs),
            cached_tokens=NOTHING_CACHED if finish is None else self.cached_tokens,
        )


def create_sequence(
    seq_id: int,
    request: Request,
    choice: int,
    *,
    max_len: int,
    seed: int,
    end_ids: tuple[int, ...],
    acceptance: str,
    root: BlockHash,
    create_stop_checker: Callable[[Request], StopChecker | None],
    create_matcher: Callable[[SamplingParams], GrammarMatcher | None],
) -> Sequence:
    """Create the sequence of one choice of a request. Choice 0 alone has prompt logprobs.

    Raises what the two factories raise.

    seed      of the request; each choice has a seed that follows from it
    end_ids   tokens that end an output without `ignore_eos`, besides `stop_token_ids`
    root      hash of the block before the first
    """
    params = request.params
    if params.ignore_eos:
        end_ids = ()
    if choice > 0 and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)  # reported once for all choices
    bind_seed = choice_seed(seed, choice)
    return Sequence(
        id=seq_id,
        request=request,
        choice=choice,
        params=params,
        bind=Bind(params, bind_seed, len(request.prompt), end_ids, acceptance=acceptance),
        tokens=list(request.prompt),
        max_len=max_len,
        stop_ids=frozenset(end_ids + params.stop_token_ids),
        stop_checker=create_stop_checker(request),
        matcher=create_matcher(params),
        hashes=[root],
    )
