"""Drafting: where a sequence's drafts come from, plan by plan.

Owns what proposing takes beside the target: a proposer's guesses, or a draft model's blocks, tables
and plans. Knows no queue, and nothing of acceptance: the scheduler says which sequences may have
drafts and how many tokens they have after a commit.

    target        tokens  [ confirmed ............ | drafts ]
    draft model   table   [ computed ......... | catches up ][ d1 d2 .. ]
                                               └ first plan ┘└ one plan each

Always true: a draft model's table holds confirmed tokens after each commit of a row with drafts;
what was rejected is cut off before anything is published, in a prefix cache of its own. A sequence
for which there is no block, no budget or no idea has no drafts, and that is all.

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
"""Looks until the draft model is asked again for a sequence that it failed or had no block for."""


def create_drafter(config: EngineConfig, proposer: Proposer | None) -> Drafter:
    """Return the drafter that the configuration names; `proposer` replaces the configured one."""
    if config.speculation is None:
        return NO_DRAFTER
    if proposer is None and config.speculation.method == "draft":
        return ModelDrafter(config, config.speculation)
    return ProposerDrafter(config, config.speculation, proposer or NGramProposer())


class Drafter(Protocol):
    """What the scheduler asks, in the order of a step."""

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """The sequence runs; `num_drafts` and `review_len` say what its first rows may have."""
        ...

    def prefill(self, sequence: Sequence, end: int) -> None:
        """A row of the plan computes the sequence's known tokens up to `end`."""
        ...

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Drafts of the sequence's row in the plan being made: at most `max_drafts`, maybe none."""
        ...

    def take_plans(self) -> tuple[StepPlan, ...]:
        """What the draft model does before the plan that is now complete."""
        ...

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """Of the sequence's drafts so many were judged and accepted; its tokens are confirmed."""
        ...

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """`num_drafts` and `review_len` are those for the sequence's next rows."""
        ...

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which `set_num_drafts` decides again; `max_len`: it does not."""
        ...

    def discard(self, seq_id: int) -> None:
        """The draft model failed for the sequence: nothing that it has of it may be published."""
        ...

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """The draft model failed for the sequence, which does without for a while."""
        ...

    def remove_sequence(self, sequence: Sequence) -> None:
        """The sequence has no block any more."""
        ...

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is shared with sequences to come."""
        ...


class NoDrafter:
    """The drafter without speculation: no sequence has drafts."""

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
        """Do nothing: `discard` has raised."""

    def remove_sequence(self, sequence: Sequence) -> None:
        """Do nothing."""

    def reset_prefix_cache(self) -> None:
        """Do nothing."""


NO_DRAFTER = NoDrafter()


class ProposerDrafter:
    """Drafts of a proposer that knows tokens. They are guessed at commits: where it has no idea
    the sequence runs ahead as any other."""

    def __init__(self, config: EngineConfig, speculation: Speculation, proposer: Proposer) -> None:
        self._proposer = proposer
        self._length_controller = DraftLengthController(speculation, config.max_num_batched_tokens)
        self._proposals: dict[int, tuple[int, ...]] = {}

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """A guess is due with the first commit."""
        self._length_controller.add_sequence(sequence, 0, step_info)
        if sequence.num_drafts:  # one that rests is looked at when all try again
            sequence.num_drafts = 0
            self._length_controller.review_at(sequence, len(sequence.tokens))

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Nothing to do."""

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """What was guessed at the last commit."""
        return self._proposals.get(sequence.id, ())[:max_drafts]

    def take_plans(self) -> tuple[StepPlan, ...]:
        """No model drafts."""
        return ()

    def update_acceptance(
        self, sequence: Sequence, num_verified: int, num_accepted: int, step_info: StepInfo
    ) -> None:
        """The lookahead learns."""
        self._length_controller.update_acceptance(sequence, num_verified, num_accepted, step_info)

    def set_num_drafts(self, sequence: Sequence, step_info: StepInfo) -> None:
        """A guess for the next row, or none and another look at the next commit."""
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
        """No model drafts, so none fails."""

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """No model drafts, so none fails."""

    def remove_sequence(self, sequence: Sequence) -> None:
        """Its guess is gone."""
        self._length_controller.remove_sequence(sequence)
        self._proposals.pop(sequence.id, None)

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""


@dataclass(slots=True, eq=False)
class _DraftState:
    """A sequence as the draft model has it. Owned by ModelDrafter.

    num_synced_blocks      blocks of the table that plans have told the draft model; 0 until its
                           slot is bound
    num_published_blocks   blocks of the table that `update_acceptance` has looked at: full,
                           and confirmed
    """

    table: BlockTable
    num_synced_blocks: int = 0
    num_published_blocks: int = 0


class ModelDrafter:
    """Drafts of a second model, behind the same four methods: its blocks and its plans.

    pool   its blocks
    """

    def __init__(self, config: EngineConfig, speculation: Speculation) -> None:
        self.pool = BlockPool(speculation.num_blocks or config.num_blocks, config.block_size)
        self._config = config
        self._acceptance = speculation.acceptance
        self._length_controller = DraftLengthController(speculation, config.max_num_batched_tokens)
        self._states: dict[int, _DraftState] = {}
        self._out_of_blocks: set[int] = set()  # for whom there was no block
        self._plan_rows: list[list[Row]] = []
        self._next_step = 0
        self._num_tokens_left = config.max_num_batched_tokens

    @property
    def seq_ids(self) -> set[int]:
        """Ids of the sequences that the draft model has a table of."""
        return set(self._states)

    def add_sequence(self, sequence: Sequence, step_info: StepInfo) -> None:
        """As the lookahead says. What follows a mask cannot be drafted before tokens are known."""
        if sequence.matcher is None:
            self._length_controller.add_sequence(
                sequence, self._num_catch_up_tokens(sequence), step_info
            )

    def prefill(self, sequence: Sequence, end: int) -> None:
        """The draft model computes the known tokens up to `end` too, as far as its budget goes."""
        if sequence.num_drafts:
            self._catch_up(sequence, end)

    def propose(self, sequence: Sequence, max_drafts: int) -> tuple[Draft, ...]:
        """Names of the drafts; none while the draft model has to catch up first."""
        num_known = len(sequence.tokens)
        state = self._get_or_open(sequence)
        table = state.table
        num_pending = num_known - table.num_tokens
        num_positions = table.capacity + self.pool.num_free_blocks * self.pool.block_size
        max_drafts = min(max_drafts, num_positions - num_known + 1)
        if max_drafts < 1:  # the next commit looks closer, and lets the sequence rest
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
        """The draft model's plans since the last call."""
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
        """The table holds confirmed tokens; full blocks of them are published."""
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
        """As the lookahead says, or for one that found no block a rest."""
        if sequence.id in self._out_of_blocks:
            self.handle_failure(sequence, step_info)
        else:
            num_catch_up_tokens = 0 if sequence.num_drafts else self._num_catch_up_tokens(sequence)
            self._length_controller.set_num_drafts(sequence, num_catch_up_tokens, step_info)

    def review_len(self, sequence: Sequence) -> int:
        """Return the length from which the number of drafts is decided again."""
        return self._length_controller.review_len(sequence)

    def handle_failure(self, sequence: Sequence, step_info: StepInfo) -> None:
        """What the draft model has of the sequence is gone, and it rests."""
        self.discard(sequence.id)
        self._length_controller.pause(sequence, step_info, num_checks=FAILURE_PAUSE_CHECKS)

    def remove_sequence(self, sequence: Sequence) -> None:
        """It holds no block, and its drafts are nobody's concern."""
        self._length_controller.remove_sequence(sequence)
        self.discard(sequence.id)

    def discard(self, seq_id: int) -> None:
        """It holds no block. Twice changes nothing."""
        self._out_of_blocks.discard(seq_id)
        self._states.pop(seq_id, None)
        self.pool.release(seq_id)

    def reset_prefix_cache(self) -> None:
        """No block is published."""
        self.pool.reset_cache()

    def _num_catch_up_tokens(self, sequence: Sequence) -> int:
        """Tokens of the sequence that the draft model has to be told before it can draft."""
        state = self._states.get(sequence.id)
        if state is not None:
            return len(sequence.tokens) - state.table.num_tokens
        return len(sequence.tokens) - len(self._cached_blocks(sequence)) * self.pool.block_size

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        if not self._config.enable_prefix_caching:
            return []
        num_shareable = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(sequence.hashes[1 : num_shareable + 1])

    def _get_or_open(self, sequence: Sequence) -> _DraftState:
        """The sequence's follower; a new one begins on cached blocks."""
        state = self._states.get(sequence.id)
        if state is None:
            shared = self._cached_blocks(sequence)
            num_cached_tokens = len(shared) * self.pool.block_size
            table = self.pool.open(sequence.id, num_cached_tokens, shared)
            state = _DraftState(table, num_published_blocks=len(shared))
            self._states[sequence.id] = state
        return state

    def _catch_up(self, sequence: Sequence, end: int) -> None:
        """A row computes known tokens up to `end`, or as far as blocks and budget go."""
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
        growth = self.pool.grow(sequence.id, end - state.table.num_tokens)
        state.num_synced_blocks = min(state.num_synced_blocks, growth.keep)

    def _create_row(
        self, sequence: Sequence, state: _DraftState, num_tokens: int, num_samples: int
    ) -> Row:
        """The next `num_tokens` known tokens; the table is told up to its end."""
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
        """The target's, for drafts: nothing is reported of them."""
        params = replace(
            sequence.params, logprobs=None, prompt_logprobs=None, structure=None, stop=()
        )
        history = tuple(sequence.tokens[:start]) if params.has_penalties else ()
        return sequence.bind._replace(
            params=params, history=history, acceptance=self._acceptance, proposes=True
        )

    def _rows_of_plans(self, num_plans: int) -> list[list[Row]]:
        """Rows of the first `num_plans` plans that are being made, to be added to."""
        while len(self._plan_rows) < num_plans:
            self._plan_rows.append([])
        return self._plan_rows[:num_plans]
