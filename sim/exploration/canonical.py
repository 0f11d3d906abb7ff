"""Canonical states: states that differ only in names have one form, and one digest.

Owns the form. Knows no action and no search. Two states with equal forms have equal futures: the
same actions are possible, and each leads to states with equal forms again.

    sequences 4 and 9, blocks [5 1] and [1 0]       sequences 0 and 1, blocks [0 1] and [1 2]
    sequences 7 and 8, blocks [2 3] and [3 4]   ──► the same

What is renamed, and why nothing depends on the name:

    sequence, request   by age. The scheduler only compares ids, and an older one stays the lower
    block               by first use: tables in order of admission. No content depends on an id.
                        With sizes of the pool, a block keeps the sizes that it would survive
    slot                left out: each running sequence has one, and all are alike
    epoch               whether it is 0, and whether a row in flight is of the current one
    plan                by its index in the ledger
    hash                its first 8 bytes: it stands for all tokens before, and is no name

What keeps its order: waiting, running (tables, prefills and rows follow it), plans in flight, and
free blocks in the order of allocation: empty ones are all alike, cached ones have their hashes.

What is left out: statistics, events for the next plan, and the index of a sequence's last row. They
are written to plans and metrics, and the scheduler decides nothing by them. Sequences that have
ended are left out of plans: their results are dropped. What a sequence was served, and how often it
was overtaken, is in the form unless the policy is one of forge.policy, which do not read it.
"""

from __future__ import annotations

from hashlib import blake2b
from marshal import dumps
from typing import Any

from forge.policy import POLICIES
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sequence import Sequence
from forge.sim.exploration.world import TinyWorld

Form = tuple[Any, ...]

DIGEST_SIZE = 16


class Canonicaliser:
    """Computes canonical forms of the states of a world."""

    def __init__(self, world: TinyWorld) -> None:
        self._sizes = sorted(world.sizes)
        self._kinds = world.kinds

    def digest(self, scheduler: Scheduler) -> bytes:
        """Return the digest of the state's form, 16 bytes."""
        # Format 2 has no references, which would depend on which values are one object.
        return blake2b(dumps(self.form(scheduler), 2), digest_size=DIGEST_SIZE).digest()

    def form(self, scheduler: Scheduler) -> Form:
        """Return the form of the state: nested tuples of numbers and bytes."""
        pool, sequences = scheduler.pool, scheduler.sequences
        counts = scheduler.policy not in POLICIES.values()
        indices = {seq_id: index for index, seq_id in enumerate(sequences)}
        requests = {request_id: index for index, request_id in enumerate(scheduler.requests)}
        block_names: dict[int, int] = {}
        blocks: list[Any] = []
        tables = []
        for sequence in scheduler.running.values():
            for block in sequence.table.blocks:
                if block not in block_names:
                    block_names[block] = len(block_names)
                    blocks.append(self._block(scheduler, block))
            tables.append(
                (
                    indices[sequence.id],
                    sequence.table.num_tokens,
                    sequence.num_synced_blocks,
                    sequence.num_committed,
                    scheduler.is_prefilling(sequence),
                    tuple([block_names[block] for block in sequence.table.blocks]),
                )
            )
        in_progress = scheduler.prefix_cache.blocks_in_progress
        return (
            pool.num_blocks,
            scheduler.num_free_slots,
            tuple([self._kinds[request_id] for request_id in requests]),
            tuple(
                [_sequence(s, requests[s.request.id], counts=counts) for s in sequences.values()]
            ),
            tuple([indices[s.id] for s in scheduler.waiting]),
            tuple(tables),
            tuple([indices[seq_id] for seq_id in scheduler.gate.sequences]),
            tuple(sorted([(key[:8], indices.get(i)) for key, i in in_progress.items()])),
            tuple(blocks),
            tuple([self._block(scheduler, block) for block in pool.free_blocks]),
            tuple([_plan(plan, sequences, indices) for plan in scheduler.ledger]),
        )

    def _block(self, scheduler: Scheduler, block: int) -> tuple[int, bytes]:
        """Return by how many sizes the block is lost, and its hash."""
        block_hash = scheduler.pool.hash_of(block)
        num_lost = sum([block >= size for size in self._sizes]) if self._sizes else 0
        return (num_lost, b"" if block_hash is None else block_hash[:8])


def _sequence(sequence: Sequence, request: int, *, counts: bool) -> Form:
    """Return the form of a sequence, with what only a policy reads if it `counts`."""
    return (
        (sequence.num_overtaken, sequence.num_served) if counts else (),
        request,
        sequence.choice,
        bytes(sequence.tokens[sequence.bind.prompt_len :]),
        sequence.max_len,
        sequence.epoch > 0,
        sequence.num_preemptions,
        sequence.was_retried,
        sequence.next_prompt_logprob,
        len(sequence.hashes),
        sequence.num_drafts,
        sequence.inspect_from,
    )


def _plan(plan: StepPlan, sequences: dict[int, Sequence], indices: dict[int, int]) -> Form:
    return tuple(
        [
            (
                indices[row.seq_id],
                row.epoch == sequences[row.seq_id].epoch,
                row.start,
                row.end,
                row.num_samples,
                len(row.drafts),
            )
            for row in plan.rows
            if row.seq_id in sequences
        ]
    )
