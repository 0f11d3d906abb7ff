"""Invariants: what must be true of an engine after every step, counted again from scratch.

Owns the audit of scheduler, pools and plans, and the numbers by which tests cite an invariant. It
reads private fields where these are what is audited, and changes nothing. Knows no clock, workload
or expected output.

    audit(engine)       queues, slots, tables, reference counts, lengths, published blocks
    PlanAudit(plan)     limits; tables folded from the plans; no write to a shared block
    audit_drained       no request is left, and every block and slot is free

Everything here is an assert: under `python -O` nothing is checked, so callers refuse to run then.

Blocks
    I1   A block id is in exactly one place: empty, cached, or used by at least one table.
    I2   No block id is twice in a list or in one table.
    I3   A block's reference count is the number of tables that hold it.
    I4   A shared or published block is never written. A row writes only to blocks that its
         sequence alone holds.
    I5   Hash-to-block and block-to-hash are inverse. Every cached block is published, no free block
         is, and only full committed blocks are.
    I6   A published block holds the tokens of its hash: a prefix hit reads what a recompute would
         write.
    I7   A lookup returns a contiguous prefix: a block's hash includes those of all blocks before.
    I8   Empty blocks are allocated first, then the least recently used cached block, protected ones
         last. A held block is never evicted.
    I9   A prefix hit never covers the whole sequence: at least one token is computed.
    I10  A hash includes namespace, salt, block size and all tokens before: equal tokens under
         another salt share nothing.
    I11  Resetting the prefix cache frees no used block.
    I12  Releasing a table or aborting a request twice has the effect of once.
    I13  Reported figures equal the recount: used + free = num_blocks, 0 <= usage_ratio <= 1.
    I14  A host block is free, reserved for a store or a fetch, or held. A hash is in the host pool
         at most once, and is not dirty on the device then.
    I15  Moves keep content: a held host block has the tokens of its hash, and a loaded block what a
         recompute would write.
    I16  Pinned are the host blocks that running sequences have yet to load, and those of spills in
         flight. Storing are those that plans in flight store to, except what a reset or resize has
         dropped.
    I17  Moves stay within the budget of a plan and the sizes of both pools, and no row or copy
         touches a block that its own plan moves.
Sequences
    I18  A live sequence is either waiting or running, and belongs to one open request.
    I19  Every choice ends with exactly one finish reason, and no token follows it.
    I20  Queues, slots and tables name live sequences only. When all requests have ended everything
         is empty, and every block and slot is free.
    I21  A plan has at most max_num_batched_tokens tokens and max_num_seqs rows, each sequence and
         slot once. At most `depth` plans are in flight.
    I22  Committed positions plus positions in flight are the table's tokens, loaded ones included.
         They fall only by preemption or rejected drafts.
    I23  A waiting sequence has no slot and no block. A running one has blocks for its tokens, and
         no more than it can ever need.
    I24  A step that preempts admits nothing. Where something can be computed something is planned.
    I25  The victim is of the least urgent priority class, then has the fewest output tokens, then
         the higher id. A sequence that runs alone is never preempted.
    I26  Only running sequences hold blocks. One that is exempt from preemption holds every block it
         can need.
    I27  A sequence is admitted before an earlier one only where that one waits for a commit.
Results
    I28  Every output equals the sequential reference, whatever the batch, chunks, preemptions and
         prefix hits.
    I29  A result that was committed, voided or is of an older epoch changes nothing.
    I30  A refused request changes nothing.
    I31  The server's queue never exceeds its limit. Resumed requests do not count.
    I40  An output never passes max_tokens, the context or the pool. A stop before the limit wins.
    I46  A row that samples under a grammar has its masks, unless it is planned ahead of the token
         before. Then the next plan gives its mask, or the sequence has ended.
Speculation
    I32  Accepted drafts are a prefix of the drafts. A row emits them and one token more, fewer only
         where the output ends.
    I33  With rejection the first emitted token has exactly the target's distribution, whatever the
         draft.
    I34  The residual is max(0, p - q), normalised. q = 0 divides nothing.
    I35  What was rejected is never published, and its blocks are freed, in both pools.
    I36  A token id outside the vocabulary reaches no output. The request ends with an error.
    I37  Stops, penalties, grammar and seed act as if the tokens of a row were sampled one by one.
    I38  A draft model that fails, or has no block, costs drafts and no token.
    I39  Draws of different purposes have different keys, for each seed and position.
Sessions
    I41  A session is open while a request of it is live. Its live requests are counted once.
    I42  A tenant has at most max_sessions open sessions.
    I43  A session holds no block and no slot: chains are hashes, counted once per session.
    I44  A cached block is protected while its hash is in the chain of an open session.
    I45  Only while nothing runs and nothing is in flight do all requests wait for a session.
"""

from __future__ import annotations

from collections import Counter

from forge.blocks import BlockPool, chain_hash, root_hash
from forge.drafting import ModelDrafter
from forge.engine import Engine
from forge.host_cache import HostCache
from forge.scheduler import Scheduler
from forge.seam import DraftRef, HostLoad, HostStore, Row, StepPlan, TokenRef
from forge.sequence import Sequence
from forge.sessions import SessionKey

ALLOWED_PREEMPTIONS = 8
"""Preemptions of one sequence. Not the scheduler's constant, so that a change there is found."""


def audit(subject: Engine | Scheduler) -> None:
    """Assert that what scheduler and pools keep equals a count from scratch."""
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    audit_pool(scheduler.pool)
    _audit_host(scheduler)
    if isinstance(scheduler.drafter, ModelDrafter):
        audit_pool(scheduler.drafter.pool)
        assert scheduler.drafter.pool.tables.keys() == scheduler.drafter.seq_ids
        assert scheduler.drafter.seq_ids <= scheduler.running.keys()
    _audit_queues(scheduler)
    _audit_sequences(scheduler)
    _audit_published(scheduler)
    _audit_sessions(scheduler)
    if isinstance(subject, Engine):
        assert subject.plans_in_flight == list(scheduler.ledger)


def audit_drained(subject: Engine | Scheduler) -> None:
    """Assert that no request is left and that every block and slot is free (I20)."""
    audit(subject)
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    pool = scheduler.pool
    assert not scheduler.waiting and not scheduler.running and not scheduler.requests
    assert not scheduler.sequences and not scheduler._prefilling and not scheduler.ledger
    assert not scheduler.prefix_cache.blocks_in_progress
    assert not scheduler.host_cache._to_load and not scheduler.host_cache._storing
    assert not scheduler.disk_cache._requests and not scheduler.disk_cache._fetched_by
    assert not pool.tables and pool.num_used_blocks == 0 and pool.num_free_blocks == pool.num_blocks
    assert pool.num_unused_positions == 0
    assert scheduler.num_free_slots == scheduler.config.max_num_seqs
    if isinstance(scheduler.drafter, ModelDrafter):
        assert scheduler.drafter.pool.num_used_blocks == 0


def audit_pool(pool: BlockPool) -> None:
    """Assert that tables, cache and counts agree on every block (I1 to I3, I5, I13)."""
    clean = [*pool._cached_blocks, *pool._protected_blocks]
    dirty = [*pool._dirty_cached_blocks, *pool._dirty_protected_blocks]
    free, cached = pool._empty_blocks, clean + dirty
    # I44
    protected = [*pool._protected_blocks, *pool._dirty_protected_blocks]
    assert all(pool._hash_by_block[b] in pool._protected_hashes for b in protected)
    assert not any(
        pool._hash_by_block[b] in pool._protected_hashes
        for b in (*pool._cached_blocks, *pool._dirty_cached_blocks)
    )
    assert pool._dirty.issuperset(dirty) and pool._dirty.isdisjoint(clean)
    assert pool._hash_by_block.keys() >= pool._dirty
    references = Counter(block for table in pool.tables.values() for block in table.blocks)
    # Free, cached and held ids together name every id once: a partition.
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


def _audit_host(scheduler: Scheduler) -> None:
    """Assert that host blocks, pins and stores agree with sequences and the ledger (I14, I16)."""
    host, pool = scheduler.host_cache, scheduler.pool
    held, storing, size = host._hash_by_block, host._storing, pool.block_size
    disk = scheduler.disk_cache
    fetching = {b: x.block_hash for b, x in disk._moves.items() if x.is_fetch}
    spilling = {b: x.block_hash for b, x in disk._moves.items() if not x.is_fetch}
    reserved = [*storing, *fetching]
    assert sorted([*host._free_blocks, *held, *reserved]) == list(range(host.num_blocks))
    assert {h: b for b, h in held.items()} == host._block_by_hash
    unpinned = [*host._unpinned_blocks, *host._redundant_blocks]
    assert sorted([*unpinned, *host._pins]) == sorted(held)
    hashes = [*(each.block_hash for each in storing.values()), *fetching.values()]
    assert host._reserved_hashes == set(hashes) and len(host._reserved_hashes) == len(hashes)
    assert host._reserved_hashes.isdisjoint(host._block_by_hash)
    assert disk._fetching == set(fetching.values())
    assert all(held[block] == block_hash for block, block_hash in spilling.items())
    assert all(held[block] == block_hash for block, block_hash in host.unspilled_blocks.items())
    assert disk._fetched_by.keys() <= {s.id for s in scheduler.waiting}
    host_tier = scheduler.config.host_tier
    disk_tier = None if host_tier is None else host_tier.disk
    if disk_tier is None:
        assert not (disk._moves or disk._keys or host.unspilled_blocks)
    else:
        assert len(disk._moves) <= disk_tier.max_moves
        assert len(spilling) <= -(-disk_tier.max_moves // 2)
        assert len(disk._keys) <= disk_tier.max_files
    for block in pool._dirty:
        assert pool._hash_by_block[block] not in host._block_by_hash
        assert pool._hash_by_block[block] not in host._reserved_hashes
    stores = {(move.host_block, plan.step) for plan in scheduler.ledger for move in plan.stores}
    assert {(block, each.step) for block, each in storing.items()} <= stores
    assert host._to_load.keys() == host._num_planned.keys() <= scheduler.running.keys()
    pins = [*spilling, *(block for blocks in host._to_load.values() for block in blocks)]
    assert host._pins == Counter(pins)
    in_flight = [load for plan in scheduler.ledger for load in plan.loads]
    for i, host_blocks in host._to_load.items():
        s = scheduler.running[i]
        planned = [x for x in in_flight if (x.seq_id, x.epoch) == (i, s.epoch)]
        assert len(planned) == host._num_planned[i] <= len(host_blocks)
        assert [x.host_block for x in planned] == list(host_blocks)[: len(planned)]
        first = s.num_committed // size
        chain = chain_of(scheduler, s)[1 + first :][: len(host_blocks)]
        assert [held[block] for block in host_blocks] == chain
        blocks = s.table.blocks[first : first + len(host_blocks)]
        assert [x.block for x in planned] == blocks[: len(planned)]
        assert all(pool.ref_count(b) == 1 and pool.hash_of(b) is None for b in blocks)
        loaded_end = (first + len(planned)) * size
        assert loaded_end < len(s.tokens) and loaded_end <= s.table.num_tokens
        if len(planned) < len(host_blocks):  # then no row is planned
            assert s.table.num_tokens == loaded_end and s.num_synced_blocks == 0
            assert scheduler.is_prefilling(s)


def _audit_queues(scheduler: Scheduler) -> None:
    """Assert that each sequence is in one state, and each slot with one (I18, I20, I23, I26)."""
    waiting, running, pool = scheduler.waiting, scheduler.running, scheduler.pool
    in_flight = tokens_in_flight(scheduler)
    live = sorted([s.id for s in waiting] + list(running))
    assert live == sorted(scheduler.sequences) and len(set(live)) == len(live)
    assert live == sorted(s.id for group in scheduler.requests.values() for s in group)
    assert all(scheduler.requests.values()), "a request without choices has ended"
    assert waiting == sorted(waiting, key=lambda s: (s.request.priority, s.epoch == 0, s.id))
    for s in waiting:
        assert s.slot is None and s.num_blocks == s.num_committed == s.num_synced_blocks == 0
    slots = [s.slot for s in running.values() if s.slot is not None]
    assert len(slots) == len(running)
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))
    assert pool.tables.keys() == running.keys()
    assert all(pool.tables[i] is s.table and s.id == i for i, s in running.items())
    assert scheduler._prefilling.keys() <= running.keys()
    needs_commit = {i for i, s in running.items() if s.num_drafts}
    assert scheduler.gate.sequences.keys() == needs_commit
    drafts = drafts_in_flight(scheduler)
    for i, s in running.items():
        num_in_flight = len(in_flight.get(i, ()))
        if scheduler.is_prefilling(s):
            assert s.num_pending >= 1 and not num_in_flight
            assert s.table.capacity >= len(s.tokens)
        else:  # it has one token to compute, or with max_tokens=0 none
            pending = s.num_pending + drafts[i, s.epoch]
            assert pending + num_in_flight == (s.max_len > s.bind.prompt_len)
    for block_hash, i in scheduler.prefix_cache.blocks_in_progress.items():
        assert i in running, f"sequence {i} computes a block that others wait for, and does not run"
        # `_audit_published` checks the hashes themselves.
        assert block_hash in running[i].hashes[1:], f"sequence {i} computes no such block"


def _audit_sequences(scheduler: Scheduler) -> None:
    """Assert lengths and computed positions against the plans in flight (I21, I22)."""
    assert len(scheduler.ledger) <= scheduler.config.depth
    in_flight, pool = tokens_in_flight(scheduler), scheduler.pool
    num_positions: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            num_positions[row.seq_id, row.epoch] += row.end - row.start
        for load in plan.loads:
            num_positions[load.seq_id, load.epoch] += pool.block_size
    for i, s in scheduler.sequences.items():
        assert s.bind.prompt_len <= len(s.tokens) + len(in_flight.get(i, ())) <= s.max_len
        assert s.num_output == 0 or len(s.tokens) < s.max_len, "a complete output continues"
        assert s.num_preemptions <= min(ALLOWED_PREEMPTIONS, s.epoch)
        if s.slot is not None:
            max_blocks = pool.num_blocks_for(max(s.max_len - 1, len(s.tokens)))
            assert pool.num_blocks_for(s.table.num_tokens) <= s.num_blocks <= max_blocks
            assert s.num_committed == s.table.num_tokens - num_positions[i, s.epoch]
            assert 0 < s.num_blocks and s.num_synced_blocks <= s.num_blocks
            if s.num_preemptions < ALLOWED_PREEMPTIONS and not scheduler.is_prefilling(s):
                # Blocks of drafts are freed once the drafts are verified.
                assert s.num_blocks <= pool.num_blocks_for(
                    max(s.table.num_tokens + 1, len(s.tokens))
                )
            if s.num_preemptions == ALLOWED_PREEMPTIONS:
                assert s.table.capacity >= s.max_len - 1, "an exempt sequence lacks a block"


def _audit_sessions(scheduler: Scheduler) -> None:
    """Assert that sessions, their live requests and their chains agree (I41 to I43, I45)."""
    table, sessions = scheduler._session_table, scheduler.sessions
    num_live: Counter[SessionKey] = Counter()
    for choices in scheduler.requests.values():
        session = choices[0].session
        assert all(s.session is session for s in choices)
        if session is not None:
            assert sessions[session.key] is session
            assert session.key[0] == choices[0].request.tenant
            num_live[session.key] += 1
    num_chains = Counter(h for session in sessions.values() for h in session.chain)
    assert table._num_chains == num_chains
    assert table._num_hashes == num_chains.total()
    assert scheduler.pool._protected_hashes == num_chains.keys()
    assert table.used_by_others <= num_chains.keys()
    for key, session in sessions.items():
        assert session.key == key and session.num_live == num_live[key] <= session.num_turns
        assert len(set(session.chain)) == len(session.chain)
        assert session.num_live or not session.has_ended
    assert scheduler.num_paused_sessions == sum(each.is_paused for each in sessions.values())
    by_tenant = Counter(tenant for tenant, _ in sessions)
    assert max(by_tenant.values(), default=0) <= scheduler.config.max_sessions
    assert by_tenant == {tenant: len(each) for tenant, each in table._by_tenant.items()}
    if scheduler._is_stalled:
        assert scheduler.waiting and not scheduler.running and not scheduler.ledger


def tokens_in_flight(scheduler: Scheduler) -> dict[int, list[TokenRef]]:
    """Return the tokens that plans in flight sample, by sequence id, oldest first."""
    found: dict[int, list[TokenRef]] = {}
    for plan in scheduler.ledger:
        for index, row in enumerate(plan.rows):
            if row.num_samples:
                found.setdefault(row.seq_id, []).append(TokenRef(plan.step, index))
    return found


def drafts_in_flight(scheduler: Scheduler) -> Counter[tuple[int, int]]:
    """Return how many drafts plans in flight verify, by sequence id and epoch."""
    found: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            found[row.seq_id, row.epoch] += len(row.drafts)
    return found


def _audit_published(scheduler: Scheduler) -> None:
    """Assert that published and shared blocks are full, committed and rightly hashed.

    I4, I5, I10.
    """
    pool = scheduler.pool
    for s in scheduler.running.values():
        hashes = chain_of(scheduler, s)
        assert s.hashes == hashes[: len(s.hashes)]
        for index, block in enumerate(s.table.blocks):
            block_hash = pool.hash_of(block)
            if block_hash is not None or pool.ref_count(block) > 1:
                end = (index + 1) * pool.block_size
                assert end <= s.num_committed, f"block {block} to {end}, {s.num_committed=}"
            assert block_hash is None or block_hash == hashes[index + 1]
    assert scheduler.config.enable_prefix_caching or not pool.num_published_blocks


def chain_of(scheduler: Scheduler, sequence: Sequence) -> list[bytes]:
    """Return the hashes that the sequence's full blocks must have, root first."""
    size = scheduler.config.block_size
    salt = sequence.request.cache_salt
    hashes = [root_hash(scheduler.config.cache_namespace, salt, size)]
    for end in range(size, len(sequence.tokens) + 1, size):
        hashes.append(chain_hash(hashes[-1], sequence.tokens[end - size : end]))
    return hashes


def snapshot(subject: Scheduler | BlockPool | HostCache) -> str:
    """Return all state as text: equal texts when nothing has changed."""
    if isinstance(subject, Scheduler):
        parts = (subject.prefix_cache.blocks_in_progress, subject.gate.sequences.keys())
        pools = f"{snapshot(subject.pool)} {snapshot(subject.host_cache)}"
        return f"{vars(subject)} {parts} {pools}"
    return str({name: value for name, value in vars(subject).items() if name != "_pool"})


class PlanAudit:
    """Asserts that a plan is right. Call it with each plan as the scheduler makes it.

    tables   block table of each slot, folded from the plans so far: what a device has
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
        """Assert that the plan keeps the limits and folds to the scheduler's tables (I21)."""
        scheduler, config = self._scheduler, self._scheduler.config
        assert self._step < plan.step == scheduler.ledger[-1].step
        self._step = plan.step
        assert plan.num_tokens <= config.max_num_batched_tokens
        is_loading = plan.loads or scheduler.disk_cache.is_fetching
        assert plan.rows or plan.copies or is_loading or plan.late_masks
        assert len(plan.rows) <= config.max_num_seqs
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert plan.num_blocks == scheduler.pool.num_blocks
        for source, target in plan.copies:
            assert scheduler.pool.ref_count(source) and scheduler.pool.ref_count(target) == 1
            assert scheduler.pool.hash_of(target) is None
        self._check_moves(plan)
        self._check_drafts(plan)
        self._check_masks(plan)
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
        # After drafts the next row starts after the last accepted one.
        self._next_starts[row.slot] = range(row.end - len(row.drafts), row.end + 1)
        self._owners[row.slot] = owner
        self.tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks

    def _check_row(self, row: Row, in_flight: list[TokenRef]) -> None:
        """Assert that the row reads known or sampled tokens and writes to its own blocks (I4)."""
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
            assert pool.ref_count(block) == 1, f"row {row} writes into shared block {block}"
            assert pool.hash_of(block) is None, f"row {row} writes into published block {block}"

    def _check_masks(self, plan: StepPlan) -> None:
        """Assert that each row under a grammar has masks, now or from the next plan (I46)."""
        sequences, late_rows = self._scheduler.sequences, []
        for index, row in enumerate(plan.rows):
            if sequences[row.seq_id].matcher is None or not row.num_samples:
                assert not row.masks
            elif row.refs:
                late_rows.append(index)
                assert not row.masks and row.num_samples == 1
            else:
                assert len(row.masks) == row.num_samples
        assert plan.late_rows == tuple(late_rows)
        masks = {}
        for earlier in list(self._scheduler.ledger)[-2:-1]:
            for index in earlier.late_rows:
                s = sequences.get(earlier.rows[index].seq_id)
                if s is not None and s.matcher is not None:
                    assert len(s.tokens) == earlier.rows[index].end
                    masks[index] = s.matcher.mask
        assert dict(plan.late_masks) == masks and len(plan.late_masks) == len(masks)

    def _check_moves(self, plan: StepPlan) -> None:
        """Assert that moves keep the budget, and move what no row or copy touches (I15, I17)."""
        scheduler, pool, host = self._scheduler, self._scheduler.pool, self._scheduler.host_cache
        assert plan.num_host_blocks == host.num_blocks
        host_tier = scheduler.config.host_tier
        if host_tier is None:
            assert not (plan.stores or plan.loads or plan.num_host_blocks)
            return
        max_blocks = host_tier.max_moved_blocks or host.num_blocks + pool.num_blocks
        assert len(plan.stores) <= max_blocks
        loading = {load.seq_id for load in plan.loads}
        assert len(plan.loads) <= max_blocks or loading == scheduler.running.keys()
        moves: list[HostStore | HostLoad] = [*plan.stores, *plan.loads]
        for ids, num_ids in (
            ([move.block for move in moves], pool.num_blocks),
            ([move.host_block for move in moves], host.num_blocks),
        ):
            assert len(set(ids)) == len(ids) and all(0 <= each < num_ids for each in ids)
        moved = {move.block for move in moves}
        assert moved.isdisjoint(block for copy in plan.copies for block in copy)
        for row in plan.rows:
            blocks = scheduler.running[row.seq_id].table.blocks[: pool.num_blocks_for(row.end)]
            assert moved.isdisjoint(blocks), f"{row} touches a block that moves"
        for block, host_block in plan.stores:
            assert not pool.ref_count(block) and pool.hash_of(block) is not None
            assert host._storing[host_block] == (plan.step, pool.hash_of(block))
        files = [file.host_block for file in (*plan.spills, *plan.fetches)]
        assert len(set(files)) == len(files)
        written = {move.host_block for move in plan.stores} | {f.host_block for f in plan.fetches}
        assert len(written) == len(plan.stores) + len(plan.fetches)
        assert written.isdisjoint(move.host_block for move in plan.loads)
        assert written.isdisjoint(file.host_block for file in plan.spills)
        for block, move in scheduler.disk_cache._moves.items():
            assert move.step == plan.step or block not in written | {
                f.host_block for f in plan.spills
            }
            if move.is_fetch:
                assert block not in {load.host_block for load in plan.loads}
        assert plan.file_epoch == scheduler.disk_cache.epoch
        for load in plan.loads:  # `audit` checks blocks and hashes
            assert host._pins[load.host_block] and scheduler.running[load.seq_id].slot is not None

    def _check_drafts(self, plan: StepPlan) -> None:
        """Assert that the draft model's plans fold to its tables and write to own blocks (I4)."""
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
        table = pool.tables[row.seq_id]
        assert self._draft_tables[row.slot] == table.blocks
        assert row.tokens == tuple(s.tokens[row.start : row.start + len(row.tokens)])
        assert row.start < row.end <= table.num_tokens and bool(row.tokens) != bool(row.refs)
        if row.refs:
            assert row.refs[0].step == plan.step - 1 and row.start >= len(s.tokens)
        for block in table.blocks[row.start // pool.block_size : pool.num_blocks_for(row.end)]:
            assert pool.ref_count(block) == 1 and pool.hash_of(block) is None


def describe_states(scheduler: Scheduler, request_id: int) -> list[str]:
    """Return the state of each open choice of a request, or ["gone"] where it has none."""
    sequences = scheduler.requests.get(request_id)
    if sequences is None:
        return ["gone"]
    found, in_flight = [], tokens_in_flight(scheduler)
    drafts = drafts_in_flight(scheduler)
    for s in sequences:
        if s.slot is None:
            name = "preempted" if s.epoch else "waiting"
        else:
            name = "filling" if scheduler.is_prefilling(s) else "decoding"
            name = "loading" if s.id in scheduler.host_cache.loading_seq_ids else name
        if drafts[s.id, s.epoch]:
            name += ", drafts in flight"
        elif s.id in in_flight:
            last = s.slot is not None and s.is_ending
            name += ", last token in flight" if last else ", token in flight"
        found.append(name)
    return found
