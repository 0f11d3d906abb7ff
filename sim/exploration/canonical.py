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
    plan                by its index in the ledger. A row that awaits its mask differs from others
    hash                its first 8 bytes: it stands for all tokens before, and is no name
    session             by age. One that the client names has its name: a later request may give it
    ended request       by its last block, where a request of the menu could continue it
    host block          by its hash, in the order in which host blocks are reused

What keeps its order: waiting, running (tables, prefills and rows follow it), plans in flight, and
free blocks in the order of allocation: empty ones are all alike, cached ones have their hashes.
Paused sessions have the order in which they paused, and whether that was before the last plan.

What is left out: statistics, events for the next plan, and the index of a sequence's last row. They
are written to plans and metrics, and the scheduler decides nothing by them. Sequences that have
ended are left out of plans: their results are dropped. Of numbers that grow without end the form
has as much as the policy's decisions depend on (see `Reads`).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from marshal import dumps
from typing import Any

from forge.blocks import BlockHash, chain_hashes, root_hash
from forge.host_cache import MAX_TOUCHED_RATIO
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sequence import Sequence
from forge.sessions import Session, SessionKey
from forge.sim.exploration.reads import NOTHING, Reads
from forge.sim.exploration.world import TinyWorld

Form = tuple[Any, ...]

DIGEST_SIZE = 16


class Canonicaliser:
    """Computes canonical forms of the states of a world, under a policy that reads `reads`."""

    def __init__(self, world: TinyWorld, reads: Reads = NOTHING) -> None:
        self._sizes = sorted(world.sizes)
        self._kinds = world.kinds
        self._reads = reads
        self._continued_tips = continued_tips(world)

    def digest(self, scheduler: Scheduler) -> bytes:
        """Return the digest of the state's form, 16 bytes."""
        # Format 2 has no references, which would depend on which values are one object.
        return blake2b(dumps(self.form(scheduler), 2), digest_size=DIGEST_SIZE).digest()

    def form(self, scheduler: Scheduler) -> Form:
        """Return the form of the state: nested tuples of numbers and bytes."""
        pool, sequences = scheduler.pool, scheduler.sequences
        indices = {seq_id: index for index, seq_id in enumerate(sequences)}
        requests = {request_id: index for index, request_id in enumerate(scheduler.requests)}
        tips, sessions = self._tips(scheduler), scheduler.sessions
        keys = {key: index for index, key in enumerate(sessions)}
        for _, key in tips:
            keys.setdefault(key, len(keys))
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
            tuple([self._kinds[i % len(self._kinds)] for i in requests]),
            tuple([self._sequence(s, requests[s.request.id], keys) for s in sequences.values()]),
            scheduler.can_plan,
            self._sessions(scheduler) if sessions else (),
            tuple([(tip, keys[key]) for tip, key in tips]),
            min(scheduler.work, self._reads.paused_at),
            self._policy_state(scheduler),
            tuple([indices[s.id] for s in scheduler.waiting]),
            tuple(tables),
            tuple([indices[seq_id] for seq_id in scheduler.gate.sequences]),
            tuple(sorted([(key[:8], indices.get(i)) for key, i in in_progress.items()])),
            () if scheduler.config.host_tier is None else _host(scheduler, indices),
            tuple(blocks),
            pool.num_disposable_blocks,
            tuple([self._block(scheduler, block) for block in pool.free_blocks]),
            tuple([_plan(plan, sequences, indices) for plan in scheduler.ledger]),
        )

    def _block(self, scheduler: Scheduler, block: int) -> tuple[int, bytes]:
        """Return by how many sizes the block is lost, and its hash."""
        block_hash = scheduler.pool.hash_of(block)
        num_lost = sum([block >= size for size in self._sizes]) if self._sizes else 0
        return (num_lost, b"" if block_hash is None else block_hash[:8])

    def _sequence(self, sequence: Sequence, request: int, keys: dict[SessionKey, int]) -> Form:
        reads, session = self._reads, sequence.session
        return (
            None if session is None else keys[session.key],
            min(sequence.num_overtaken, reads.num_overtaken),
            reads.num_served and min(sequence.num_served, reads.num_served),
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

    def _sessions(self, scheduler: Scheduler) -> Form:
        """Return the form of the open sessions."""
        work, used = scheduler.work, scheduler.blocks_used_by_others
        sessions = scheduler.sessions.values()
        # One that pauses now comes after all that have paused before the last plan.
        times = sorted({work, *[s.paused_at for s in sessions if s.is_paused]}, reverse=True)
        return tuple([self._session(s, work, times, used) for s in sessions])

    def _session(
        self, session: Session, work: int, times: list[int], used: Collection[BlockHash]
    ) -> Form:
        (tenant, name), reads = session.key, self._reads
        pause: tuple[float, ...] = ()
        if session.is_paused:
            pause = (times.index(session.paused_at), min(work - session.paused_at, reads.pause))
        return (
            tenant,
            name if isinstance(name, str) else None,
            session.num_live,
            session.has_ended,
            session.expected_pause_s,
            b"".join([block_hash[:8] for block_hash in session.chain]),
            bytes([block_hash in used for block_hash in session.chain]) if used else b"",
            session.num_foreign_blocks,
            pause,
            min(session.num_turns, reads.num_turns),
            min(session.paused_at, reads.paused_at),
            min(session.num_tokens, reads.num_tokens),
        )

    def _tips(self, scheduler: Scheduler) -> list[tuple[bytes, SessionKey]]:
        """Return the last blocks of ended requests that one of the menu continues, by hash."""
        tips = scheduler.session_tips
        return [(tip[1][:8], tips[tip]) for tip in self._continued_tips if tip in tips]

    def _policy_state(self, scheduler: Scheduler) -> Form:
        calls = scheduler.policy_calls
        if calls.policy.update is None:
            return ()
        return (self._reads.state(calls.state), calls.pending_error is not None)


def continued_tips(world: TinyWorld) -> list[tuple[str, BlockHash]]:
    """Return tenant and hash of each full block in the prompts of requests without a session id.

    They are in order of the hashes. No other tip of an ended request is ever looked up.
    """
    size = world.config.block_size
    found: set[tuple[str, BlockHash]] = set()
    for request in world.menu if world.config.max_sessions else ():
        if not request.session_id:
            root = root_hash(world.config.cache_namespace, request.cache_salt, size)
            prompt = request.prompt[: len(request.prompt) // size * size]
            found |= {(request.tenant, each) for each in chain_hashes(root, prompt, size)}
    return sorted(found)


def _host(scheduler: Scheduler, indices: dict[int, int]) -> Form:
    """Return the form of the host pool. No world has files.

    It reads private fields: only hashes, orders and counts of them decide anything.
    """
    host, pool = scheduler.host_cache, scheduler.pool
    held, touched = host._hash_by_block, (*host._touched_once, *host._reused_hashes)
    # Touches are forgotten only beyond a bound, which no world reaches.
    assert len(touched) < MAX_TOUCHED_RATIO * (pool.num_blocks + host.num_blocks)
    stores, loads = [], []
    for plan in scheduler.ledger:
        pending = [host._storing.get(move.host_block) for move in plan.stores]
        stores.append(tuple([x.block_hash[:8] for x in pending if x and x.step == plan.step]))
        running = scheduler.running
        loading = [running.get(load.seq_id) for load in plan.loads]
        loads.append(
            tuple(
                [
                    indices[s.id]
                    for s, load in zip(loading, plan.loads, strict=True)
                    if s is not None and s.epoch == load.epoch
                ]
            )
        )
    return (
        len(host._free_blocks),
        tuple([held[block][:8] for block in host._unpinned_blocks]),
        tuple([held[block][:8] for block in host._redundant_blocks]),
        tuple(stores),
        tuple(loads),
        tuple(
            [
                (indices[i], host._num_planned[i], tuple([held[b][:8] for b in blocks]))
                for i, blocks in host._to_load.items()
            ]
        ),
        tuple(sorted([block_hash[:8] for block_hash in host._touched_once])),
        tuple(sorted([block_hash[:8] for block_hash in host._reused_hashes])),
        tuple(sorted([pool._hash_by_block[block][:8] for block in pool._dirty])),
        pool.num_dirty_cached_blocks,
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
                index in plan.late_rows,
            )
            for index, row in enumerate(plan.rows)
            if row.seq_id in sequences
        ]
    )
