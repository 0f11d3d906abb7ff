"""Uniform steps: how long nothing is decided, and what that many steps change. For simulation.

Owns the arithmetic of a stretch of plans that each give every running sequence one more token.
Knows no clock. `schedule()` makes the first plan and `write_decodes` the rows of the last one, as
in a run step by step.

    plan        |P1|P2|P3|P4|       each row is one token; same sequences, same order
    blocks       b     b            a table gets its next block when its last one is full
    commit         |C1|C2|C3|C4|    a block is published when the step that filled it is committed

Always true: blocks are allocated, evicted and published in the order of the steps, so a run that is
fast-forwarded reaches the state of the run step by step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from forge.blocks import BlockPool
from forge.plan_rows import write_decodes
from forge.prefix_cache import PrefixCache
from forge.request import Delta
from forge.seam import Row, StepPlan
from forge.sequence import Sequence


class BlockAllocation(NamedTuple):
    """A block that a row of a stretch gets.

    step   plan of the row, counted from the first plan of the stretch, which is 0
    row    index of the row in that plan
    """

    step: int
    row: int
    block: int


class FastForward(NamedTuple):
    """Changes that a stretch of uniform steps made.

    allocations   blocks allocated after the first plan, in order of steps and rows
    deltas        a Delta without tokens for each sequence that ended with the last step
    """

    allocations: list[BlockAllocation]
    deltas: list[Delta]


def num_uniform_steps(
    sequences: list[Sequence],
    token: int,
    in_flight: Collection[StepPlan],
    pool: BlockPool,
    num_blocks: int,
) -> int:
    """Return for how many steps each sequence gains one `token`, has a block for it and runs on.

    in_flight   plans in flight. With none a sequence may end with the last step. With one the next
                plan is made ahead of the commit, so the steps end before any sequence does
    num_blocks  blocks that the steps may allocate

    The steps end before a result that `commit` inspects, such as one due for a review. 0 where
    `token` is a stop id, or a plan in flight is not uniform or has other sequences. Where there are
    too few blocks the number is halved until there are enough, so it may be lower than possible.
    O(sequences log steps).
    """
    num_in_flight = len(in_flight)
    steps_left = []
    for s in sequences:
        if s.num_pending != 1 - num_in_flight or token in s.stop_ids:
            return 0
        inspect_from = s.inspect_from
        if inspect_from == s.max_len - 1 and not num_in_flight:
            inspect_from = s.max_len  # no plan was made past the end
        steps_left.append(inspect_from - len(s.tokens))
    steps = min(steps_left)
    # Blocks are counted only where there may be too few.
    while steps > 0 and num_blocks < len(sequences) * pool.num_blocks_for(steps):
        if _num_new_blocks(sequences, steps, pool) <= num_blocks:
            break
        steps //= 2
    if steps <= 0:
        return 0
    ids = [s.id for s in sequences]
    is_same = all(p.is_uniform and [row.seq_id for row in p.rows] == ids for p in in_flight)
    return steps if is_same else 0


def _num_new_blocks(sequences: list[Sequence], steps: int, pool: BlockPool) -> int:
    """Return how many blocks the sequences' tables need for `steps` more tokens each."""
    # A sequence that was preempted often holds more blocks than it needs; others cannot use them.
    ends = ((s.table.num_tokens + steps, len(s.table.blocks)) for s in sequences)
    return sum(max(0, pool.num_blocks_for(end) - num_blocks) for end, num_blocks in ends)


def repeat_decodes(
    sequences: list[Sequence], steps: int, token: int, pool: BlockPool, prefix_cache: PrefixCache
) -> list[BlockAllocation]:
    """Advance sequences and pool as `steps` plans of one token a row and `steps` commits would.

    The first of the plans is made already. Return the blocks that rows of the other plans get.
    `sequences` are in order of rows, which is the order of the pool's tables.
    """
    # Tables get blocks in the pool's order of tables, results come in the order of rows.
    assert list(pool.tables) == [s.id for s in sequences], "tables are not in order of rows"
    size = pool.block_size
    events: list[tuple[int, bool, int]] = []  # step from 1, whether it is its commit, row
    for row, s in enumerate(sequences):
        first = s.table.capacity - s.table.num_tokens + 2
        events += [(step, False, row) for step in range(first, steps + 1, size)]
        if prefix_cache.is_enabled:
            first = size - s.num_committed % size
            events += [(step, True, row) for step in range(first, steps + 1, size)]
        s.tokens += [token] * steps
        s.table.num_tokens += steps - 1
        s.num_committed += steps
        if prefix_cache.is_enabled:  # all at once: half the time of one by one
            prefix_cache.extend_hashes(s, s.num_committed // size)
    events.sort()
    if prefix_cache.is_enabled:
        allocations = _replay_block_events(sequences, steps, events, pool, prefix_cache)
    else:
        # No block is found again, so all are allocated before any is filled.
        blocks = pool.grow_full_tables([sequences[row].id for _, _, row in events])
        allocations = [
            BlockAllocation(step - 1, row, block)
            for (step, _, row), block in zip(events, blocks, strict=True)
        ]
    for s in sequences:
        s.num_synced_blocks = len(s.table.blocks)
    return allocations


def _replay_block_events(
    sequences: list[Sequence],
    steps: int,
    events: list[tuple[int, bool, int]],
    pool: BlockPool,
    prefix_cache: PrefixCache,
) -> list[BlockAllocation]:
    """Allocate and publish blocks one after the other: an allocation may evict a cached block.

    events   (step, counted from 1; True to publish, False to allocate; index of the row), sorted
    """
    allocations = []
    for step, is_commit, row in events:
        s = sequences[row]
        if is_commit:
            end = s.num_committed - steps + step
            prefix_cache.publish(s, end - 1, end)
        else:
            (block,) = pool.grow_full_tables((s.id,))
            allocations.append(BlockAllocation(step - 1, row, block))
    return allocations


def create_last_plan(
    first_plan: StepPlan, sequences: list[Sequence], allocations: list[BlockAllocation], steps: int
) -> StepPlan:
    """Return the last plan of a stretch of `steps` plans that begins with `first_plan`.

    `repeat_decodes` has advanced the sequences past it. They are set back by one step here, and
    `write_decodes` advances them again as it writes the rows.
    """
    for s in sequences:
        s.table.num_tokens -= 1
    for allocation in allocations:
        if allocation.step == steps - 1:
            sequences[allocation.row].num_synced_blocks -= 1
    rows: list[Row] = []
    step = first_plan.step + steps - 1
    write_decodes(rows, [], sequences, step)
    return first_plan._replace(step=step, rows=tuple(rows))
