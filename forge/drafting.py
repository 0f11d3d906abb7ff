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
from forge.lookahead import Lookahead, Moment
from forge.proposers import NGram, Proposer
from forge.seam import Bind, Draft, DraftRef, Row, StepPlan, TokenRef
from forge.sequence import Sequence

FAILED = 4
"""Looks until the draft model is asked again for a sequence that it failed or had no block for."""


def drafting_of(config: EngineConfig, proposer: Proposer | None) -> Drafting | None:
    """As the configuration asks; with a proposer, its guesses. None: nobody drafts."""
    if config.speculation is None:
        return None
    if proposer is None and config.speculation.method == "draft":
        return DraftModel(config, config.speculation)
    return Guessing(config, config.speculation, proposer or NGram())


class Drafting(Protocol):
    """What the scheduler asks, in the order of a step."""

    def begin(self, sequence: Sequence, now: Moment) -> None:
        """The sequence runs; `num_drafts` and `heed` say what its first rows may have."""
        ...

    def follow(self, sequence: Sequence, end: int) -> None:
        """A row of the plan computes the sequence's known tokens up to `end`."""
        ...

    def propose(self, sequence: Sequence, most: int) -> tuple[Draft, ...]:
        """Drafts of the sequence's row in the plan being made: at most `most`, maybe none."""
        ...

    def plans(self) -> tuple[StepPlan, ...]:
        """What the draft model does before the plan that is now complete."""
        ...

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """Of the sequence's drafts so many were judged and accepted; its tokens are confirmed."""
        ...

    def settle(self, sequence: Sequence, now: Moment) -> None:
        """`num_drafts` and `heed` are those for the sequence's next rows."""
        ...

    def lost(self, seq_id: int) -> None:
        """The draft model failed for the sequence: nothing that it has of it may be published."""
        ...

    def failed(self, sequence: Sequence, now: Moment) -> None:
        """The draft model failed for the sequence, which does without for a while."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has no block any more."""
        ...

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is shared with sequences to come."""
        ...


class Guessing:
    """Drafts of a proposer that knows tokens. They are guessed at commits: where it has no idea
    the sequence runs ahead as any other."""

    def __init__(self, config: EngineConfig, speculation: Speculation, proposer: Proposer) -> None:
        self._proposer = proposer
        self._lookahead = Lookahead(speculation, config.max_num_batched_tokens)
        self._guesses: dict[int, tuple[int, ...]] = {}

    def begin(self, sequence: Sequence, now: Moment) -> None:
        """A guess is due with the first commit."""
        self._lookahead.begin(sequence, 0, now)
        if sequence.num_drafts:  # one that rests is looked at when all try again
            sequence.num_drafts, sequence.heed = 0, len(sequence.tokens)

    def follow(self, sequence: Sequence, end: int) -> None:
        """Nothing to do."""

    def propose(self, sequence: Sequence, most: int) -> tuple[Draft, ...]:
        """What was guessed at the last commit."""
        return self._guesses.get(sequence.id, ())[:most]

    def plans(self) -> tuple[StepPlan, ...]:
        """No model drafts."""
        return ()

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """The lookahead learns."""
        self._lookahead.learn(sequence, judged, accepted, now)

    def settle(self, sequence: Sequence, now: Moment) -> None:
        """A guess for the next row, or none and another look at the next commit."""
        self._lookahead.settle(sequence, 0, now)
        if not sequence.num_drafts:
            self._guesses.pop(sequence.id, None)
            return
        guess = self._proposer.propose(
            sequence.request.id, sequence.tokens, sequence.bind.prompt_len, sequence.num_drafts
        )
        self._guesses[sequence.id] = guess
        sequence.num_drafts, sequence.heed = len(guess), len(sequence.tokens)

    def lost(self, seq_id: int) -> None:
        """No model drafts, so none fails."""

    def failed(self, sequence: Sequence, now: Moment) -> None:
        """No model drafts, so none fails."""

    def forget(self, sequence: Sequence) -> None:
        """Its guess is gone."""
        self._lookahead.forget(sequence)
        self._guesses.pop(sequence.id, None)

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""


@dataclass(slots=True, eq=False)
class _Follower:
    """A sequence as the draft model has it. Owned by DraftModel.

    told        blocks of the table that plans have told the draft model; 0 until its slot is bound
    published   blocks of the table that `learn` has looked at: full, and confirmed
    """

    table: BlockTable
    told: int = 0
    published: int = 0


class DraftModel:
    """Drafts of a second model, behind the same four methods: its blocks and its plans.

    pool   its blocks
    """

    def __init__(self, config: EngineConfig, speculation: Speculation) -> None:
        self.pool = BlockPool(speculation.num_blocks or config.num_blocks, config.block_size)
        self._config = config
        self._acceptance = speculation.acceptance
        self._lookahead = Lookahead(speculation, config.max_num_batched_tokens)
        self._followers: dict[int, _Follower] = {}
        self._short: set[int] = set()  # for whom there was no block
        self._rows: list[list[Row]] = []
        self._next_step = 0
        self._left = config.max_num_batched_tokens

    def begin(self, sequence: Sequence, now: Moment) -> None:
        """As the lookahead says. What follows a mask cannot be drafted before tokens are known."""
        if sequence.guide is None:
            self._lookahead.begin(sequence, self._missed(sequence), now)

    def follow(self, sequence: Sequence, end: int) -> None:
        """The draft model computes the known tokens up to `end` too, as far as its budget goes."""
        if sequence.num_drafts:
            self._catch_up(sequence, end)

    def propose(self, sequence: Sequence, most: int) -> tuple[Draft, ...]:
        """Names of the drafts; none while the draft model has to catch up first."""
        known = len(sequence.tokens)
        follower = self._opened(sequence)
        table = follower.table
        pending = known - table.num_tokens
        room = table.capacity + self.pool.available * self.pool.block_size
        most = min(most, room - known + 1)
        if most < 1:  # the next commit looks closer, and lets the sequence rest
            self._short.add(sequence.id)
            sequence.heed = 0
            return ()
        if pending > self._left:
            self._catch_up(sequence, known)
            return ()
        self._grow(sequence, follower, known + most - 1)
        self._left -= pending
        row = self._row(sequence, follower, pending, 1)
        seq_id, epoch, slot, *_ = row
        make, told, step = tuple.__new__, follower.told, self._next_step
        first, *others = self._planned(most)
        at = len(first)
        first.append(row)
        refs = [make(DraftRef, (0, at))]
        for plan, rows in enumerate(others, 1):  # by place: half the cost, for every draft
            ref, start = make(TokenRef, (step + plan - 1, at)), known + plan - 1
            at = len(rows)
            values = (seq_id, epoch, slot, start, (), (ref,), told, (), 1, None, (), ())
            rows.append(make(Row, values))
            refs.append(make(DraftRef, (plan, at)))
        table.num_tokens = known + most - 1
        return tuple(refs)

    def plans(self) -> tuple[StepPlan, ...]:
        """The draft model's plans since the last call."""
        made = tuple(
            StepPlan(self._next_step + i, tuple(rows), self.pool.num_blocks, self.pool.block_size)
            for i, rows in enumerate(self._rows)
        )
        self._next_step += len(made)
        self._rows = []
        self._left = self._config.max_num_batched_tokens
        return made

    def learn(self, sequence: Sequence, judged: int, accepted: int, now: Moment) -> None:
        """The table holds confirmed tokens; full blocks of them are published."""
        self._lookahead.learn(sequence, judged, accepted, now)
        follower = self._followers.get(sequence.id)
        if follower is None:
            return
        table, pool = follower.table, self.pool
        end = min(table.num_tokens, len(sequence.tokens) - 1)
        pool.shrink(sequence.id, end, pool.blocks_for(end))
        follower.told = min(follower.told, len(table.blocks))
        if self._config.enable_prefix_caching:
            first, full = follower.published, end // pool.block_size
            hashes = sequence.hashes[first + 1 : full + 1]
            for block, block_hash in zip(table.blocks[first:full], hashes, strict=False):
                pool.publish(block, block_hash)
            follower.published = full

    def settle(self, sequence: Sequence, now: Moment) -> None:
        """As the lookahead says, or for one that found no block a rest."""
        if sequence.id in self._short:
            self.failed(sequence, now)
        else:
            missed = 0 if sequence.num_drafts else self._missed(sequence)
            self._lookahead.settle(sequence, missed, now)

    def failed(self, sequence: Sequence, now: Moment) -> None:
        """What the draft model has of the sequence is gone, and it rests."""
        self.lost(sequence.id)
        self._lookahead.rest(sequence, now, looks=FAILED)

    def forget(self, sequence: Sequence) -> None:
        """It holds no block, and its drafts are nobody's concern."""
        self._lookahead.forget(sequence)
        self.lost(sequence.id)

    def lost(self, seq_id: int) -> None:
        """It holds no block. Twice changes nothing."""
        self._short.discard(seq_id)
        self._followers.pop(seq_id, None)
        self.pool.release(seq_id)

    def reset_prefix_cache(self) -> None:
        """No block is published."""
        self.pool.reset_cache()

    def _missed(self, sequence: Sequence) -> int:
        """Tokens of the sequence that the draft model has to be told before it can draft."""
        follower = self._followers.get(sequence.id)
        if follower is not None:
            return len(sequence.tokens) - follower.table.num_tokens
        return len(sequence.tokens) - len(self._cached(sequence)) * self.pool.block_size

    def _cached(self, sequence: Sequence) -> list[int]:
        if not self._config.enable_prefix_caching:
            return []
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(sequence.hashes[1 : usable + 1])

    def _opened(self, sequence: Sequence) -> _Follower:
        """The sequence's follower; a new one begins on cached blocks."""
        follower = self._followers.get(sequence.id)
        if follower is None:
            shared = self._cached(sequence)
            covered = len(shared) * self.pool.block_size
            table = self.pool.open(sequence.id, covered, shared)
            follower = _Follower(table, published=len(shared))
            self._followers[sequence.id] = follower
        return follower

    def _catch_up(self, sequence: Sequence, end: int) -> None:
        """A row computes known tokens up to `end`, or as far as blocks and budget go."""
        follower = self._opened(sequence)
        table = follower.table
        room = table.capacity + self.pool.available * self.pool.block_size
        count = min(end, room) - table.num_tokens
        count = min(count, self._left)
        if count > 0:
            self._grow(sequence, follower, table.num_tokens + count)
            self._left -= count
            self._planned(1)[0].append(self._row(sequence, follower, count, 0))

    def _grow(self, sequence: Sequence, follower: _Follower, end: int) -> None:
        grown = self.pool.grow(sequence.id, end - follower.table.num_tokens)
        follower.told = min(follower.told, grown.keep)

    def _row(self, sequence: Sequence, follower: _Follower, count: int, num_samples: int) -> Row:
        """The next `count` known tokens; the table is told up to its end."""
        table = follower.table
        start, told = table.num_tokens, follower.told
        assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
        bind = None if told else self._bind(sequence, start)
        table.num_tokens = start + count
        follower.told = len(table.blocks)
        return Row(
            sequence.id,
            sequence.epoch,
            sequence.slot,
            start,
            tuple(sequence.tokens[start : start + count]),
            keep=told,
            new_blocks=tuple(table.blocks[told:]),
            num_samples=num_samples,
            bind=bind,
        )

    def _bind(self, sequence: Sequence, start: int) -> Bind:
        """The target's, for drafts: nothing is reported of them."""
        params = replace(
            sequence.params, logprobs=None, prompt_logprobs=None, structure=None, stop=()
        )
        history = tuple(sequence.tokens[:start]) if params.penalises else ()
        return sequence.bind._replace(
            params=params, history=history, acceptance=self._acceptance, proposes=True
        )

    def _planned(self, count: int) -> list[list[Row]]:
        """Rows of the first `count` plans that are being made, to be added to."""
        while len(self._rows) < count:
            self._rows.append([])
        return self._rows[:count]
