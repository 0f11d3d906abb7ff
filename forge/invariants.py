"""Checks: what must be true of an engine after every step, counted again from scratch.

Owns the audit of scheduler, pools and plans. It reads their private fields, for what they keep is
what is in question, and changes nothing. Knows no clock, workload or expected output.

    audit(engine)       queues, slots, tables, reference counts, lengths, what is published
    PlanAudit(plan)     limits; the fold of all diffs; nobody writes what somebody else reads
    audit_drained       nobody is left, and nothing is left behind

Everything here is an assert: under `python -O` nothing is checked, so callers refuse to run then.
"""

from __future__ import annotations

from collections import Counter

from forge.blocks import BlockPool, chain_hash, root_hash
from forge.drafting import ModelDrafter
from forge.engine import Engine
from forge.scheduler import Scheduler
from forge.seam import DraftRef, Row, StepPlan, TokenRef
from forge.sequence import Sequence

ALLOWED_PREEMPTIONS = 8
"""What the scheduler promises, in its own words elsewhere: no check takes the number from it."""


def audit(subject: Engine | Scheduler) -> None:
    """What the scheduler and its pool keep is what can be counted again from scratch."""
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    audit_pool(scheduler.pool)
    if isinstance(scheduler.drafter, ModelDrafter):
        audit_pool(scheduler.drafter.pool)
        assert scheduler.drafter.pool.tables.keys() == scheduler.drafter._states.keys()
        assert scheduler.drafter._states.keys() <= scheduler.running.keys()
    _audit_queues(scheduler)
    _audit_sequences(scheduler)
    _audit_published(scheduler)
    if isinstance(subject, Engine):
        assert [plan for plan, _ in subject._in_flight] == list(scheduler.ledger)


def audit_drained(subject: Engine | Scheduler) -> None:
    """Nobody is left, and nothing is left behind: every block and slot can be handed out."""
    audit(subject)
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    pool = scheduler.pool
    assert not scheduler.waiting and not scheduler.running and not scheduler.requests
    assert (
        not scheduler._sequences
        and not scheduler._prefilling
        and not scheduler.prefix_cache.blocks_in_progress
    )
    assert not scheduler.ledger
    assert not pool.tables and pool.num_used_blocks == 0 and pool.num_free_blocks == pool.num_blocks
    assert not any(pool._ref_counts) and pool.num_unused_positions == 0
    assert len(scheduler._free_slots) == scheduler.config.max_num_seqs
    if isinstance(scheduler.drafter, ModelDrafter):
        assert scheduler.drafter.pool.num_used_blocks == 0


def audit_pool(pool: BlockPool) -> None:
    """Blocks are partitioned, counted and named as the tables and the cache say (I1 to I3, I5)."""
    free, cached = pool._empty_blocks, list(pool._cached_blocks)
    references = Counter(block for table in pool.tables.values() for block in table.blocks)
    # Three lists without a repetition that together name every id once: a partition.
    assert sorted([*free, *cached, *references]) == list(range(pool.num_blocks))
    assert pool._ref_counts == [references[block] for block in range(pool.num_blocks)]
    assert {h: b for b, h in pool._hash_by_block.items()} == pool._block_by_hash
    assert len(pool._hash_by_block) == len(pool._block_by_hash)
    assert pool._hash_by_block.keys() >= set(cached) and not pool._hash_by_block.keys() & set(free)
    assert (
        pool.num_used_blocks
        == len(references)
        <= pool.peak_used_blocks
        <= max(pool.peak_used_blocks, pool.num_blocks)
    )
    assert pool.num_free_blocks == len(free) + len(cached) == pool.num_blocks - pool.num_used_blocks
    assert 0.0 <= pool.usage_ratio <= 1.0
    for table in pool.tables.values():
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.capacity == len(table.blocks) * pool.block_size >= table.num_tokens >= 0


def _audit_queues(scheduler: Scheduler) -> None:
    """Every sequence is in exactly one state, every slot with at most one (I18, I20, I23, I26)."""
    waiting, running, pool = scheduler.waiting, scheduler.running, scheduler.pool
    in_flight = tokens_in_flight(scheduler)
    live = sorted([s.id for s in waiting] + list(running))
    assert live == sorted(scheduler._sequences) and len(set(live)) == len(live)
    assert live == sorted(s.id for group in scheduler.requests.values() for s in group)
    assert all(scheduler.requests.values()), "a request without choices is over"
    assert waiting == sorted(waiting, key=lambda s: (s.request.priority, s.epoch == 0, s.id))
    for s in waiting:
        assert s.slot is None and s.num_blocks == s.num_committed == s.num_synced_blocks == 0
    slots = [s.slot for s in running.values() if s.slot is not None]
    assert len(slots) == len(running)
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))
    assert pool.tables.keys() == running.keys()
    assert all(pool.tables[i] is s.table and s.id == i for i, s in running.items())
    assert scheduler._prefilling.keys() <= running.keys()
    needs_commit = {i for i, s in running.items() if s.matcher is not None or s.num_drafts}
    assert scheduler._gate.sequences.keys() == needs_commit
    drafts = drafts_in_flight(scheduler)
    for i, s in running.items():
        num_in_flight = len(in_flight.get(i, ()))
        if i in scheduler._prefilling:
            assert s.num_pending >= 1 and not num_in_flight
            assert s.table.capacity >= len(s.tokens)
        else:  # it has one token to compute, or with max_tokens=0 none
            pending = s.num_pending + drafts[i, s.epoch]
            assert pending + num_in_flight == (s.max_len > s.bind.prompt_len)
    for block_hash, i in scheduler.prefix_cache.blocks_in_progress.items():
        assert i in running, f"sequence {i} computes a block that others wait for, and does not run"
        # That these are the right hashes is seen where what is published is.
        assert block_hash in running[i].hashes[1:], f"sequence {i} computes no such block"


def _audit_sequences(scheduler: Scheduler) -> None:
    """Lengths and computed positions are those of the plans in flight (I21, I22)."""
    assert len(scheduler.ledger) <= scheduler.config.depth
    in_flight, pool = tokens_in_flight(scheduler), scheduler.pool
    num_positions: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            num_positions[row.seq_id, row.epoch] += row.end - row.start
    for i, s in scheduler._sequences.items():
        assert s.bind.prompt_len <= len(s.tokens) + len(in_flight.get(i, ())) <= s.max_len
        assert s.num_output == 0 or len(s.tokens) < s.max_len, "an output that is complete goes on"
        assert s.num_preemptions <= min(ALLOWED_PREEMPTIONS, s.epoch)
        if s.slot is not None:
            max_blocks = pool.num_blocks_for(max(s.max_len - 1, len(s.tokens)))
            assert pool.num_blocks_for(s.table.num_tokens) <= s.num_blocks <= max_blocks
            assert s.num_committed == s.table.num_tokens - num_positions[i, s.epoch]
            assert 0 < s.num_blocks and s.num_synced_blocks <= s.num_blocks
            if s.num_preemptions < ALLOWED_PREEMPTIONS and i not in scheduler._prefilling:
                # What drafts took is back once they were judged.
                assert s.num_blocks <= pool.num_blocks_for(
                    max(s.table.num_tokens + 1, len(s.tokens))
                )
            if s.num_preemptions == ALLOWED_PREEMPTIONS:
                assert s.table.capacity >= s.max_len - 1, "one that is exempt could be stopped"


def tokens_in_flight(scheduler: Scheduler) -> dict[int, list[TokenRef]]:
    """Tokens that plans in flight sample, by sequence, oldest first."""
    found: dict[int, list[TokenRef]] = {}
    for plan in scheduler.ledger:
        for index, row in enumerate(plan.rows):
            if row.num_samples:
                found.setdefault(row.seq_id, []).append(TokenRef(plan.step, index))
    return found


def drafts_in_flight(scheduler: Scheduler) -> Counter[tuple[int, int]]:
    """How many drafts plans in flight verify, by sequence and epoch."""
    found: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            found[row.seq_id, row.epoch] += len(row.drafts)
    return found


def _audit_published(scheduler: Scheduler) -> None:
    """What is published or shared is full, committed, of its holders' chain (I4, I5, I10)."""
    pool = scheduler.pool
    for s in scheduler.running.values():
        hashes = chain_of(scheduler, s)
        assert s.hashes == hashes[: len(s.hashes)]
        for index, block in enumerate(s.table.blocks):
            if block in pool._hash_by_block or pool._ref_counts[block] > 1:
                end = (index + 1) * pool.block_size
                assert end <= s.num_committed, f"block {block} to {end}, {s.num_committed=}"
            if block in pool._hash_by_block:
                assert pool._hash_by_block[block] == hashes[index + 1]
    if not scheduler.config.enable_prefix_caching:
        assert not pool._hash_by_block


def chain_of(scheduler: Scheduler, sequence: Sequence) -> list[bytes]:
    """The hashes that the sequence's full blocks must have, root first."""
    size = scheduler.config.block_size
    salt = sequence.request.cache_salt
    hashes = [root_hash(scheduler.config.cache_namespace, salt, size)]
    for end in range(size, len(sequence.tokens) + 1, size):
        hashes.append(chain_hash(hashes[-1], sequence.tokens[end - size : end]))
    return hashes


def snapshot(subject: Scheduler | BlockPool) -> str:
    """Everything that it keeps, as text: equal when nothing has changed."""
    if isinstance(subject, Scheduler):
        return f"{vars(subject)} {subject.prefix_cache.blocks_in_progress} {snapshot(subject.pool)}"
    return str(vars(subject))


class PlanAudit:
    """Checks every plan as it is made, against the scheduler's state at that moment.

    tables   the fold of the plans' diffs so far, per slot: what a device knows
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.tables: dict[int, list[int]] = {}
        self._scheduler = scheduler
        self._owners: dict[int, tuple[int, int]] = {}
        self._next_starts: dict[int, range] = {}
        self._step = -1
        self._draft_tables: dict[int, list[int]] = {}
        self._draft_owners: dict[int, tuple[int, int]] = {}
        self._draft_step = -1

    def __call__(self, plan: StepPlan) -> None:
        """The plan is within the limits, and its diffs fold to the scheduler's tables."""
        scheduler, config = self._scheduler, self._scheduler.config
        assert self._step < plan.step == scheduler.ledger[-1].step
        self._step = plan.step
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert plan.rows or plan.copies
        assert len(plan.rows) <= config.max_num_seqs
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert plan.num_blocks == scheduler.pool.num_blocks
        for source, target in plan.copies:
            assert scheduler.pool._ref_counts[source] and scheduler.pool._ref_counts[target] == 1
            assert target not in scheduler.pool._hash_by_block
        self._check_drafts(plan)
        coming = tokens_in_flight(scheduler)
        for row in plan.rows:
            self._apply_row(row)
            self._check_row(row, coming.get(row.seq_id, []))
        for s in scheduler.running.values():
            if s.slot is not None and s.num_synced_blocks:
                assert (
                    self.tables[s.slot][: s.num_synced_blocks]
                    == s.table.blocks[: s.num_synced_blocks]
                )

    def _apply_row(self, row: Row) -> None:
        owner = (row.seq_id, row.epoch)
        if row.bind is None:
            assert self._owners[row.slot] == owner and row.start in self._next_starts[row.slot]
            assert row.keep <= len(self.tables[row.slot])
        else:
            assert row.keep == 0 and self._owners.get(row.slot) != owner
        # Behind drafts the next row begins where they were confirmed to.
        self._next_starts[row.slot] = range(row.end - len(row.drafts), row.end + 1)
        self._owners[row.slot] = owner
        self.tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks

    def _check_row(self, row: Row, in_flight: list[TokenRef]) -> None:
        """It reads what is known or coming, and writes where nobody else reads (I4)."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        s = scheduler.running[row.seq_id]
        assert (s.slot, s.epoch) == (row.slot, row.epoch)
        assert self.tables[row.slot] == s.table.blocks
        assert row.tokens == tuple(s.tokens[row.start : row.start + len(row.tokens)])
        assert row.start < row.end == s.table.num_tokens
        assert row.num_samples == 1 + len(row.drafts) or not (row.drafts or row.num_samples)
        if row.drafts:
            assert (row.start, len(row.tokens)) == (len(s.tokens) - 1, 1)
            assert row.end < s.max_len and len(row.masks) in (0, row.num_samples)
        assert list(row.refs) == in_flight[: len(in_flight) - row.num_samples]
        assert not row.tokens or not row.refs
        if row.refs:
            (ref,) = row.refs
            earlier = next(plan for plan in scheduler.ledger if plan.step == ref.step)
            assert earlier.rows[ref.row].end == row.start
        for block in s.table.blocks[row.start // pool.block_size : pool.num_blocks_for(row.end)]:
            assert pool._ref_counts[block] == 1, f"row {row} writes into shared block {block}"
            assert block not in pool._hash_by_block, (
                f"row {row} writes into published block {block}"
            )

    def _check_drafts(self, plan: StepPlan) -> None:
        """The draft model's tables are the fold of its rows, which write where nobody reads."""
        drafter = self._scheduler.drafter
        draft_refs = [d for row in plan.rows for d in row.drafts if isinstance(d, DraftRef)]
        assert len(set(draft_refs)) == len(draft_refs)
        for draft in draft_refs:
            row = plan.drafts[draft.plan].rows[draft.row]
            assert row.num_samples == 1
        for each in plan.drafts:
            assert isinstance(drafter, ModelDrafter)
            assert each.step == self._draft_step + 1 and each.rows and not each.drafts
            assert each.num_tokens <= self._scheduler.config.max_num_batched_tokens
            assert len({row.slot for row in each.rows}) == len(each.rows)
            for row in each.rows:
                self._check_draft_row(drafter, each, row)
            self._draft_step = each.step

    def _check_draft_row(self, drafter: ModelDrafter, plan: StepPlan, row: Row) -> None:
        owner, pool = (row.seq_id, row.epoch), drafter.pool
        s = self._scheduler.running[row.seq_id]
        assert (s.slot, s.epoch) == (row.slot, row.epoch)
        if row.bind is None:
            assert self._draft_owners[row.slot] == owner
        else:
            assert row.keep == 0 and row.bind.proposes
        self._draft_owners[row.slot] = owner
        self._draft_tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks
        table = drafter._states[row.seq_id].table
        assert self._draft_tables[row.slot] == table.blocks
        assert row.tokens == tuple(s.tokens[row.start : row.start + len(row.tokens)])
        assert row.start < row.end <= table.num_tokens and bool(row.tokens) != bool(row.refs)
        if row.refs:
            assert row.refs[0].step == plan.step - 1 and row.start >= len(s.tokens)
        for block in table.blocks[row.start // pool.block_size : pool.num_blocks_for(row.end)]:
            assert pool._ref_counts[block] == 1 and block not in pool._hash_by_block


def describe_states(scheduler: Scheduler, request_id: int) -> list[str]:
    """Where each open choice of a request is in its life; ["gone"] where there is none."""
    sequences = scheduler.requests.get(request_id)
    if sequences is None:
        return ["gone"]
    found, in_flight = [], tokens_in_flight(scheduler)
    drafts = drafts_in_flight(scheduler)
    for s in sequences:
        if s.slot is None:
            name = "preempted" if s.epoch else "waiting"
        else:
            name = "filling" if s.id in scheduler._prefilling else "decoding"
        if drafts[s.id, s.epoch]:
            name += ", drafts in flight"
        elif s.id in in_flight:
            last = s.slot is not None and s.is_ending
            name += ", last token in flight" if last else ", token in flight"
        found.append(name)
    return found
