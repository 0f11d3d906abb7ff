"""Drafting: which drafts a sequence's next row has, and what the draft model computes for them.

Owns a proposer's guesses, or a draft model's blocks, tables and plans. Knows no queue and no
acceptance rule: the scheduler says which sequences may have drafts, and reports how many were
accepted.

    target        tokens  [ committed ............ | drafts ]
    draft model   table   [ computed ......... | catches up ][ d1 d2 .. ]
                                               └ first plan ┘└ one plan each

Always true: after the commit of a row with drafts the draft model's table holds committed tokens
only. Rejected positions are cut off before a block is published, and the draft model has its own
prefix cache. A sequence without a block, budget or guess for a draft decodes without drafts.

Speculative decoding: Leviathan et al. 2023; Chen et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from forge.blocks import BlockPool, BlockTable
from forge.config import EngineConfig, Speculation
from forge.draft_length import DraftLengthController, StepInfo
from forge.proposers import NGramProposer, Proposer
from forge.seam import Bind, Draft, DraftRef, Row, StepPlan, TokenRef
from forge.sequence import Sequence

FAILURE_PAUSE_CHECKS = 4
"""Checks for which a sequence is paused after its draft model failed or had no block for it."""


def create_drafter(config: EngineConfig, proposer: Proposer | None) -> Drafter:
    """Return the drafter that the configuration names: NO_DRAFTER without speculation.

    proposer   replaces the configured proposer or draft model
    """
    if config.speculation is None:
        return NO_DRAFTER
    if proposer is None and config.speculation.method == "draft":
        return ModelDrafter(config, config.speculation)
    return ProposerDrafter(config, config.speculation, proposer or NGramProposer())


class Drafter(Protocol):
    """Methods that the scheduler calls when it admits, plans, commits and stops a sequence."""

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Set `num_drafts` of a sequence that was admitted."""
        ...

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Plan known tokens up to `end` for the draft model.

        The plan being made has a chunk of them for the target.
        """
        ...

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Return at most `max_drafts` drafts for the sequence's row in the next plan, or ()."""
        ...

    def take_plans(self) -> tuple[StepPlan, ...]:
        """Return the draft model's plans for the plan being made, and begin the next with none."""
        ...

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Count the drafts of a committed row, and cut the draft model's table to committed tokens.

        num_verified   drafts up to the first rejected one
        num_accepted   accepted drafts
        """
        ...

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Set `num_drafts` for the sequence's next rows."""
        ...

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which `set_num_drafts` is due; `max_len` if it is not."""
        ...

    def discard(self, seq_id: int) -> None:
        """Free the draft model's blocks of a sequence for which it failed. Publish none of them.

        Called before the step's rows are committed, also for a sequence that has ended.
        """
        ...

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Let the sequence decode without drafts for a while: the draft model failed for it.

        Called after the step's rows are committed, if the sequence still runs.
        """
        ...

    def remove_sequence(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer runs."""
        ...

    def reset_prefix_cache(self) -> None:
        """Unpublish all blocks of the draft model, so that later sequences do not share them."""
        ...


class NoDrafter:
    """Drafter for `speculation=None`: no sequence has drafts."""

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Do nothing."""

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Return no draft."""
        return ()

    def take_plans(self) -> tuple[StepPlan, ...]:
        """Return no plan."""
        return ()

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Do nothing."""

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Do nothing."""

    def review_len(self, sequence: Sequence) -> int:
        """Return `max_len`."""
        return sequence.max_len

    def discard(self, seq_id: int) -> None:
        """Raise AssertionError: there is no draft model that could fail."""
        raise AssertionError(f"a draft model failed for sequence {seq_id}, and none is configured")

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Do nothing: `discard` is called before it and raises."""

    def remove_sequence(self, sequence: Sequence) -> None:
        """Do nothing."""

    def reset_prefix_cache(self) -> None:
        """Do nothing."""


NO_DRAFTER = NoDrafter()


class ProposerDrafter:
    """Drafter that takes drafts from a Proposer, such as n-gram lookup.

    The proposer runs when a row is committed. A sequence without a guess has no drafts, so it is
    planned ahead of its commits.
    """

    def __init__(self, config: EngineConfig, speculation: Speculation, proposer: Proposer) -> None:
        self._proposer = proposer
        self._length_controller = DraftLengthController(speculation, config.max_num_batched_tokens)
        self._proposals: dict[int, tuple[int, ...]] = {}

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Let the sequence start without drafts.

        The commit of its first token reviews it where drafts pay or it joins a trial. Otherwise it
        is reviewed when its pause ends, and never when its end is near.
        """
        self._length_controller.add_sequence(sequence, 0, step_info)
        if sequence.num_drafts:  # a paused one is reviewed when its pause ends
            sequence.num_drafts = 0
            self._length_controller.review_at(sequence, len(sequence.tokens))

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Do nothing: there is no draft model."""

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Return the proposer's guess from the last commit."""
        return self._proposals.get(sequence.id, ())[:max_drafts]

    def take_plans(self) -> tuple[StepPlan, ...]:
        """Return no plan: there is no draft model."""
        return ()

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Count the drafts of a committed row."""
        self._length_controller.update_acceptance(sequence, num_verified, num_accepted, step_info)

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Guess the next row's drafts, and set `num_drafts` to their number.

        The next commit then reviews the sequence again, also without a guess. Where drafts do not
        pay and it is in no trial, it is paused instead.
        """
        self._length_controller.set_num_drafts(sequence, 0, step_info)
        if not sequence.num_drafts:
            self._proposals.pop(sequence.id, None)
            return
        proposal = self._proposer.propose(
            sequence.request.id, sequence.tokens, sequence.bind.prompt_len, sequence.num_drafts
        )
        self._proposals[sequence.id] = proposal
        sequence.num_drafts = len(proposal)
        self._length_controller.review_at(sequence, len(sequence.tokens))

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which a guess is due."""
        return self._length_controller.review_len(sequence)

    def discard(self, seq_id: int) -> None:
        """Do nothing: there is no draft model."""

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Do nothing: there is no draft model."""

    def remove_sequence(self, sequence: Sequence) -> None:
        """Drop the sequence's guess, and its state in the draft length controller."""
        self._length_controller.remove_sequence(sequence)
        self._proposals.pop(sequence.id, None)

    def reset_prefix_cache(self) -> None:
        """Do nothing: guesses are not cached."""


@dataclass(slots=True, eq=False)
class _DraftState:
    """State of a sequence in the draft model. Owned by ModelDrafter.

    num_synced_blocks      blocks of the table that plans have named; 0 until its slot is bound
    num_published_blocks   first blocks of the table that hold committed tokens and were published
    """

    table: BlockTable
    num_synced_blocks: int = 0
    num_published_blocks: int = 0


class ModelDrafter:
    """Drafter with a second model: its blocks, tables and plans.

    pool   blocks of the draft model
    """

    def __init__(self, config: EngineConfig, speculation: Speculation) -> None:
        self.pool = BlockPool(speculation.num_blocks or config.num_blocks, config.block_size)
        self._config = config
        self._acceptance = speculation.acceptance
        self._length_controller = DraftLengthController(speculation, config.max_num_batched_tokens)
        self._states: dict[int, _DraftState] = {}
        self._out_of_blocks: set[int] = set()  # sequences without a block since their last review
        self._plan_rows: list[list[Row]] = []
        self._next_step = 0
        self._num_tokens_left = config.max_num_batched_tokens

    @property
    def seq_ids(self) -> set[int]:
        """Ids of the sequences with a table in the draft model."""
        return set(self._states)

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Set `num_drafts` of a sequence that was admitted.

        A sequence with a grammar has none: its masks are known only after each token.
        """
        if sequence.matcher is None:
            self._length_controller.add_sequence(
                sequence, self._num_catch_up_tokens(sequence), step_info
            )

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Plan known tokens up to `end` for the draft model, as far as blocks and budget allow.

        Does nothing for a sequence without drafts: it catches up when it gets some.
        """
        if sequence.num_drafts:
            self._catch_up(sequence, end)

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Plan the draft model's steps for the row, and return references to the drafts.

        () where the draft model must catch up with more tokens than are left of its budget: it
        computes a part of them in this step. () also where it has no block: the next commit pauses
        the sequence. Where blocks are few there are fewer drafts.
        """
        num_known = len(sequence.tokens)
        state = self._get_or_open(sequence)
        table = state.table
        num_pending = num_known - table.num_tokens
        num_positions = table.capacity + self.pool.num_free_blocks * self.pool.block_size
        max_drafts = min(max_drafts, num_positions - num_known + 1)
        if max_drafts < 1:  # the next commit reviews the sequence and pauses it
            self._out_of_blocks.add(sequence.id)
            self._length_controller.review_at(sequence, 0)
            return ()
        if num_pending > self._num_tokens_left:
            self._catch_up(sequence, num_known)
            return ()
        self._grow(sequence, state, num_known + max_drafts - 1)
        self._num_tokens_left -= num_pending
        row = self._create_row(sequence, state, num_pending, 1)
        seq_id, epoch, slot = row.seq_id, row.epoch, row.slot
        new, num_synced_blocks, step = tuple.__new__, state.num_synced_blocks, self._next_step
        first, *later = self._rows_of_plans(max_drafts)
        row_index = len(first)
        first.append(row)
        refs = [new(DraftRef, (0, row_index))]
        # A Row is built as a tuple: a third of the time of calling the class, for every draft.
        for plan, rows in enumerate(later, 1):
            ref, start = new(TokenRef, (step + plan - 1, row_index)), num_known + plan - 1
            row_index = len(rows)
            values = (
                seq_id,
                epoch,
                slot,
                start,
                (),
                (ref,),
                num_synced_blocks,
                (),
                1,
                None,
                (),
                (),
            )
            rows.append(new(Row, values))
            refs.append(new(DraftRef, (plan, row_index)))
        table.num_tokens = num_known + max_drafts - 1
        return tuple(refs)

    def take_plans(self) -> tuple[StepPlan, ...]:
        """Return the draft model's plans since the last call, and reset its token budget."""
        plans = tuple(
            StepPlan(self._next_step + i, tuple(rows), self.pool.num_blocks, self.pool.block_size)
            for i, rows in enumerate(self._plan_rows)
        )
        self._next_step += len(plans)
        self._plan_rows = []
        self._num_tokens_left = self._config.max_num_batched_tokens
        return plans

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Count the drafts; cut the table to committed tokens and publish its full blocks."""
        self._length_controller.update_acceptance(sequence, num_verified, num_accepted, step_info)
        state = self._states.get(sequence.id)
        if state is None:
            return
        table, pool = state.table, self.pool
        end = min(table.num_tokens, len(sequence.tokens) - 1)
        pool.shrink(sequence.id, end, pool.num_blocks_for(end))
        state.num_synced_blocks = min(state.num_synced_blocks, len(table.blocks))
        if self._config.enable_prefix_caching:
            first, num_full_blocks = state.num_published_blocks, end // pool.block_size
            hashes = sequence.hashes[first + 1 : num_full_blocks + 1]
            for block, block_hash in zip(table.blocks[first:num_full_blocks], hashes, strict=False):
                pool.publish(block, block_hash)
            state.num_published_blocks = num_full_blocks

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Set `num_drafts`, or free and pause a sequence for which `propose` had no block."""
        if sequence.id in self._out_of_blocks:
            self.handle_failure(sequence, step_info)
        else:
            num_catch_up_tokens = 0 if sequence.num_drafts else self._num_catch_up_tokens(sequence)
            self._length_controller.set_num_drafts(sequence, num_catch_up_tokens, step_info)

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which the number of drafts is decided again."""
        return self._length_controller.review_len(sequence)

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """Free the sequence's blocks in the draft model, and pause it."""
        self.discard(sequence.id)
        self._length_controller.pause(sequence, step_info, num_checks=FAILURE_PAUSE_CHECKS)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Free the sequence's blocks in the draft model, and drop its state."""
        self._length_controller.remove_sequence(sequence)
        self.discard(sequence.id)

    def discard(self, seq_id: int) -> None:
        """Free the sequence's blocks in the draft model. A second call changes nothing."""
        self._out_of_blocks.discard(seq_id)
        self._states.pop(seq_id, None)
        self.pool.release(seq_id)

    def reset_prefix_cache(self) -> None:
        """Unpublish all blocks of the draft model."""
        self.pool.reset_cache()

    def _num_catch_up_tokens(self, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens the draft model must compute before a draft."""
        state = self._states.get(sequence.id)
        if state is not None:
            return len(sequence.tokens) - state.table.num_tokens
        return len(sequence.tokens) - len(self._cached_blocks(sequence)) * self.pool.block_size

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the draft model's published blocks that a table of the sequence can start on."""
        if not self._config.enable_prefix_caching:
            return []
        num_shareable = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(sequence.hashes[1 : num_shareable + 1])

    def _get_or_open(self, sequence: Sequence) -> _DraftState:
        """Return the sequence's state in the draft model; a new table starts on cached blocks."""
        state = self._states.get(sequence.id)
        if state is None:
            shared = self._cached_blocks(sequence)
            num_cached_tokens = len(shared) * self.pool.block_size
            table = self.pool.open(sequence.id, num_cached_tokens, shared)
            state = _DraftState(table, num_published_blocks=len(shared))
            self._states[sequence.id] = state
        return state

    def _catch_up(self, sequence: Sequence, end: int) -> None:
        """Plan a row of known tokens up to `end`, or as far as blocks and budget allow."""
        state = self._get_or_open(sequence)
        table = state.table
        num_positions = table.capacity + self.pool.num_free_blocks * self.pool.block_size
        num_tokens = min(end, num_positions) - table.num_tokens
        num_tokens = min(num_tokens, self._num_tokens_left)
        if num_tokens > 0:
            self._grow(sequence, state, table.num_tokens + num_tokens)
            self._num_tokens_left -= num_tokens
            self._rows_of_plans(1)[0].append(self._create_row(sequence, state, num_tokens, 0))

    def _grow(self, sequence: Sequence, state: _DraftState, end: int) -> None:
        """Allocate blocks for positions up to `end`. The caller has checked that they are free."""
        growth = self.pool.grow(sequence.id, end - state.table.num_tokens)
        state.num_synced_blocks = min(state.num_synced_blocks, growth.keep)

    def _create_row(
        self, sequence: Sequence, state: _DraftState, num_tokens: int, num_samples: int
    ) -> Row:
        """Return a row of the next `num_tokens` known tokens. The table then ends after it."""
        table = state.table
        start, num_synced_blocks = table.num_tokens, state.num_synced_blocks
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        bind = None if num_synced_blocks else self._create_bind(sequence, start)
        table.num_tokens = start + num_tokens
        state.num_synced_blocks = len(table.blocks)
        return Row(
            sequence.id,
            sequence.epoch,
            sequence.slot,
            start,
            tuple(sequence.tokens[start : start + num_tokens]),
            keep=num_synced_blocks,
            new_blocks=tuple(table.blocks[num_synced_blocks:]),
            num_samples=num_samples,
            bind=bind,
        )

    def _create_bind(self, sequence: Sequence, start: int) -> Bind:
        """Return the target's Bind, changed for drafts: no logprobs, structure or stop strings."""
        params = replace(
            sequence.params,
            logprobs=None,
            logprob_token_ids=(),
            prompt_logprobs=None,
            structure=None,
            thinking_budget=None,
            stop=(),
        )
        history = tuple(sequence.tokens[:start]) if params.has_penalties else ()
        return sequence.bind._replace(
            params=params, history=history, acceptance=self._acceptance, proposes=True
        )

    def _rows_of_plans(self, num_plans: int) -> list[list[Row]]:
        """Return the row lists of the first `num_plans` plans in the making, to append to."""
        while len(self._plan_rows) < num_plans:
            self._plan_rows.append([])
        return self._plan_rows[:num_plans]
