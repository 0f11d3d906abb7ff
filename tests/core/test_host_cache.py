"""The host pool: what is stored, what comes back, and what happens when something else comes first.

Outputs of random worlds equal the sequential reference. The cases below them are one decision each,
on a real scheduler and a real hash model, which refuses a plan whose moves depend on their order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge.blocks import BlockPool
from forge.config import EngineConfig, HostTier, LoadCosts, MixedStepCosts
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.host_cache import HostCache
from forge.invariants import PlanAudit, audit, audit_drained, audit_pool
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.models.host_blocks import HostBlocks, check_moves
from forge.recording import RecordingWriter, build_header, parse_config, plan_digest
from forge.request import CachedTokens, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import Bind, BlockCopy, HostLoad, HostStore, Row, StepPlan, executes_moves
from forge.sim.replay import replay
from tests.core.builders import (
    EOS,
    VOCAB,
    ServedRequests,
    config,
    hash_model,
    next_plan,
    request,
)
from tests.core.file_worlds import DAMAGES, run_file_world
from tests.core.host_worlds import draw_host_world
from tests.core.reference import compute_expected
from tests.core.worlds import check_outcome, run_world

# Random worlds.

HOST_EVENTS = (
    "stores",
    "loads",
    "spills",
    "fetches",
    "good answers",
    "bad answers",
    "plans for files",
    "loads alongside rows",
    "loads of several plans",
    "resumed by loads",
    "preemptions",
    "forks",
    "accepted drafts",
    "voids",
    "resized",
    "host resized",
    "cache reset",
    "aborted loading",
)


def run_host_worlds(seeds: Iterable[int], audited_every: int) -> Counter[str]:
    """Check every world of `seeds` against the reference, and count what they reached."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = run_world(draw_host_world(seed), audited=seed % audited_every == 0)
            reached += outcome.event_counts + check_outcome(outcome)
        except BaseException as failure:
            failure.add_note(f"run_world(draw_host_world({seed}), audited=True)")
            raise
    print(dict(reached))
    return reached


@pytest.mark.long
def test_every_choice_of_a_random_world_with_a_host_pool_is_the_sequential_reference() -> None:
    reached = run_host_worlds(range(120), audited_every=2)
    assert not [name for name in HOST_EVENTS if not reached[name]]


@pytest.mark.long
def test_every_choice_of_a_random_world_with_files_in_a_folder_is_the_sequential_reference(
    tmp_path: Path,
) -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        outcome = run_file_world(seed, tmp_path / str(seed), audited=seed % 2 == 0)
        reached += outcome.event_counts + check_outcome(outcome)
    files = [f"files {each}" for each in (*DAMAGES, "read", "not read", "written")]
    assert not [name for name in files if not reached[name]], reached


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 11_000, 1_000))
def test_every_choice_of_many_more_worlds_with_a_host_pool_is_the_reference(first: int) -> None:
    reached = run_host_worlds(range(first, first + 1_000), audited_every=3)
    assert not [name for name in HOST_EVENTS if not reached[name]]


# One decision each.

ALWAYS = HostTier(num_blocks=16, max_moved_blocks=None, min_clean_percent=100, min_touches=1)
"""Stores every block that no sequence holds, at once, and loads whatever it finds."""

A, B = tuple(range(1, 10)), tuple(range(21, 34))


class Run:
    """A scheduler, its model and the plans so far, all of them audited.

    Blocks have 4 tokens. The prompt A has two blocks that can be shared, B has three.
    """

    def __init__(
        self,
        tier: HostTier = ALWAYS,
        *,
        blocks: int = 4,
        files: FileMoves | None = None,
        **options: object,
    ) -> None:
        self.config = config(blocks=blocks, host_tier=tier, **options)
        self.scheduler = Scheduler(self.config, VOCAB, (EOS,))
        self.model = hash_model(self.scheduler, files=files)
        self.served = ServedRequests()
        self.requests: dict[int, Request] = {}
        self._audit = PlanAudit(self.scheduler)

    def add(self, prompt: tuple[int, ...], **params: object) -> int:
        """Add a request for a prompt, of one token unless `params` say otherwise."""
        salt = str(params.pop("cache_salt", ""))
        params = {"max_tokens": 1, "ignore_eos": True, **params}
        new = request(len(self.requests), prompt, cache_salt=salt, **params)
        self.requests[new.id] = new
        self.scheduler.add(new)
        return new.id

    def plan(self) -> StepPlan:
        """Make the next plan, and let the model execute it."""
        plan = next_plan(self.scheduler)
        self._audit(plan)
        audit(self.scheduler)
        self.served.plans.append(plan)
        self.output = self.model.forward(plan).result()
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Commit the plan that was made last."""
        self.served.add(self.scheduler.commit(plan, self.output))
        audit(self.scheduler)

    def step(self) -> StepPlan:
        """Plan and commit one step."""
        plan = self.plan()
        self.commit(plan)
        return plan

    def serve(self, *prompts: tuple[int, ...], **params: object) -> list[StepPlan]:
        """Serve one request after the other to its end, and return their plans."""
        first = len(self.served.plans)
        for prompt in prompts:
            self.add(prompt, **params)
            self.drain()
        return self.served.plans[first:]

    def drain(self) -> None:
        """Step until every request has ended, and compare all outputs with the reference."""
        while self.scheduler.has_work:
            self.step()
        audit_drained(self.scheduler)
        for key, tokens in self.served.tokens.items():
            if self.served.finish[key].value in ("length", "stop"):
                expected = compute_expected(self.model, self.config, self.requests[key[0]])
                assert tuple(tokens) == expected.tokens

    def stores(self) -> int:
        """Return how many blocks all plans have stored."""
        return sum(len(plan.stores) for plan in self.served.plans)

    def leave_in_host(self, *prompts: tuple[int, ...]) -> None:
        """Serve the prompts, store their blocks with a further request, and evict all blocks."""
        num_blocks = self.scheduler.pool.num_blocks
        self.serve(*prompts, (50,), tuple(range(100, 100 + 4 * num_blocks)))
        assert not any(self.scheduler.pool.lookup(self.hashes(each)) for each in prompts)

    def start_loading(self) -> StepPlan:
        """Leave A in the host pool only, and plan the load of request 3 for it."""
        self.leave_in_host(A)
        self.add(A)
        plan = self.plan()
        assert plan.loads and not plan.rows
        return plan

    def hashes(self, prompt: tuple[int, ...], salt: str = "") -> list[bytes]:
        """Return the hashes of the prompt's full blocks."""
        probe = Scheduler(self.config, VOCAB, (EOS,))
        probe.add(request(0, prompt, cache_salt=salt, max_tokens=1))
        return probe.requests[0][0].hashes[1:]


def test_a_prefix_that_left_the_device_is_loaded_and_not_computed() -> None:
    run = Run()
    run.leave_in_host(A)
    host_blocks = run.scheduler.host_cache.lookup(run.hashes(A))
    load, rest = run.serve(A)
    assert [move.host_block for move in load.loads] == host_blocks
    assert not load.rows and [(row.start, row.end) for row in rest.rows] == [(8, 9)]
    assert rest.rows[0].new_blocks[:2] == tuple(move.block for move in load.loads)
    assert run.scheduler.num_loaded_tokens == 8
    assert run.scheduler.cached_tokens == CachedTokens(host=8)


def test_without_a_host_pool_plans_and_recordings_do_not_mention_one() -> None:
    s = Scheduler(config(), VOCAB, (EOS,))
    s.add(request(0, A))
    plan = next_plan(s)
    assert "host" not in repr(plan) and "stores" not in repr(plan) and "loads" not in repr(plan)
    assert "host_tier" not in build_header(s.config, VOCAB, EOS, "fcfs", "1")["config"]
    assert executes_moves(hash_model(s))


def test_a_pool_of_no_blocks_is_no_host_pool() -> None:
    empty, none = Run(replace(ALWAYS, num_blocks=0)), Run()
    empty.serve(A, B, B, A)
    none.scheduler = Scheduler(replace(none.config, host_tier=None), VOCAB, (EOS,))
    none._audit = PlanAudit(none.scheduler)
    none.serve(A, B, B, A)
    assert [plan_digest(plan) for plan in empty.served.plans] == [
        plan_digest(plan) for plan in none.served.plans
    ]


def test_two_salts_share_nothing_in_the_host_pool() -> None:
    for stored, other in (("one", "two"), ("one", ""), ("", "one")):
        run = Run()
        run.serve(A, cache_salt=stored)
        run.serve((50,), B)
        assert run.scheduler.host_cache.lookup(run.hashes(A, stored))
        assert not run.scheduler.host_cache.lookup(run.hashes(A, other))
        (plan,) = run.serve(A, cache_salt=other)
        assert not plan.loads and plan.num_tokens == len(A)


def test_nothing_is_stored_while_enough_is_free_without_a_loss() -> None:
    run = Run(replace(ALWAYS, min_clean_percent=50), blocks=16)
    run.serve(A, B)  # 5 cached blocks of 16
    assert run.stores() == 0
    run.serve(tuple(range(100, 121)))  # 10 of 16
    run.serve((1,))  # 1 more is in use, and 8 should be free without a loss
    assert run.stores() == 3


def test_a_plan_moves_no_more_blocks_than_its_budget() -> None:
    """`PlanAudit` counts them. While nothing else runs a plan loads all."""
    run = Run(replace(ALWAYS, max_moved_blocks=1), blocks=8)
    long = tuple(range(100, 117))
    run.serve(long, *[(200 + i,) for i in range(4)])
    assert [len(plan.stores) for plan in run.served.plans] == [0, 1, 1, 1, 1]
    run.serve(tuple(range(30, 59)))  # evicts them
    run.add((7,), max_tokens=9)
    run.step()
    run.add(long)
    assert [len(run.step().loads) for _ in range(5)] == [1, 1, 1, 1, 0]
    run.drain()
    run.serve(tuple(range(60, 89)))
    assert [len(plan.loads) for plan in run.serve(long)] == [4, 0]


def test_two_sequences_that_load_share_the_budget() -> None:
    run = Run(replace(ALWAYS, max_moved_blocks=4), blocks=9)
    run.leave_in_host(A, B)
    run.add((60,), max_tokens=6)
    run.step()
    run.add(A)
    run.add(B)
    assert [[load.seq_id for load in run.step().loads] for _ in range(2)] == [[5, 5, 6, 6], [6]]
    run.drain()


def test_blocks_to_load_take_nothing_from_the_budget_of_tokens() -> None:
    """Of 12 tokens a step, B computes 1: A is admitted with it. Alone A would wait."""
    run = Run(blocks=9, max_num_batched_tokens=12)
    run.leave_in_host(B)
    run.add(B)
    run.add(A)
    plan = run.step()
    assert len(plan.loads) == 3 and [row.seq_id for row in plan.rows] == [4]
    run.drain()


def test_a_prompt_beside_loads_alone_is_not_bounded() -> None:
    """`max_step_ms` is for decodes, and a sequence that loads has none."""
    costs = MixedStepCosts(((16, 3000), (17, 4000)))
    run = Run(blocks=16, max_num_batched_tokens=128, max_step_ms=3.0, mixed_costs=costs)
    run.leave_in_host(B)
    run.add(B)
    run.add(tuple(range(60, 90)))
    plan = run.step()
    assert len(plan.loads) == 3 and [(row.start, row.end) for row in plan.rows] == [(0, 30)]
    run.drain()


def test_a_block_is_stored_from_its_second_touch_on() -> None:
    run = Run(replace(ALWAYS, min_touches=2), blocks=8)
    run.serve(A, (50,))
    assert run.stores() == 0
    run.serve(A, (50,))
    assert run.stores() == 2
    run.serve(A, (50,))
    assert run.stores() == 2  # the host has them


def test_a_prefix_that_was_computed_twice_is_stored() -> None:
    """The second touch counts where the block was evicted in between."""
    run = Run(replace(ALWAYS, min_touches=2))
    run.serve(A, B, A, (50,))
    assert run.stores() == 2


def test_the_context_of_a_session_and_of_a_preempted_sequence_is_stored_at_once() -> None:
    run = Run(replace(ALWAYS, min_touches=2), blocks=8)
    run.scheduler.add(replace(request(0, A, max_tokens=1), session_id="s"))
    run.requests[0] = request(0, A, max_tokens=1)
    run.drain()
    run.serve((50,))
    assert run.stores() == 2
    other = Run(replace(ALWAYS, min_touches=2), blocks=8)
    other.add(A, max_tokens=4)
    other.step()
    other.scheduler.void("a test")
    assert other.scheduler.pool.num_dirty_cached_blocks == 2
    other.drain()


def host_cache_with(pool: BlockPool, tier: HostTier, hashes: Iterable[bytes]) -> HostCache:
    """Return a host cache that holds these hashes, the oldest first, and leave the pool empty."""
    host = HostCache(tier, pool)
    for step, block_hash in enumerate(hashes):
        cache_dirty_blocks(pool, host, [block_hash])
        stores = host.plan_stores(step)
        host.commit_stores(StepPlan(step, (), 8, 4, stores=tuple(stores)))
    pool.reset_cache()
    return host


def cache_dirty_blocks(pool: BlockPool, host: HostCache, hashes: Sequence[bytes]) -> None:
    """Leave cached blocks of these hashes in the pool, to be stored. The last is the oldest."""
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    host.expect_reuse(hashes)
    pool.free(blocks)


def test_blocks_are_evicted_clean_ones_first_then_dirty_then_protected() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(replace(ALWAYS, min_clean_percent=50), pool)
    hashes = [bytes([i]) for i in range(8)]
    pool.protect(hashes[6:])
    cache_dirty_blocks(pool, host, hashes[::-1])
    order = [pool.hash_of(block) for block in pool.free_blocks]
    assert order == hashes
    assert [pool.hash_of(store.block) for store in host.plan_stores(0)] == hashes[:4]
    host.touch([hashes[1]])  # it is being stored, so it is not dirty again
    assert [pool.hash_of(block) for block in pool.free_blocks] == hashes
    cache_again = pool.lookup(hashes[4:5])
    pool.share(cache_again)
    pool.free(cache_again)
    order = [pool.hash_of(block) for block in pool.free_blocks]
    assert order == [*hashes[:4], hashes[5], hashes[4], *hashes[6:]]
    pool.unprotect(hashes[6:], demote=True)
    assert [pool.hash_of(block) for block in pool.free_blocks[:2]] == hashes[:5:-1]
    assert pool.num_dirty_cached_blocks == 2
    audit_pool(pool)
    order = pool.free_blocks
    assert pool.allocate(8) == order


def test_the_context_of_an_ended_session_is_not_stored() -> None:
    run = Run(replace(ALWAYS, min_touches=2), blocks=8)
    run.scheduler.add(replace(request(0, A, max_tokens=1), session_id="s", session_end=True))
    run.requests[0] = request(0, A, max_tokens=1)
    run.drain()
    run.serve((50,))
    assert run.stores() == 0


def test_touches_of_long_ago_are_forgotten() -> None:
    """Four times the blocks of both pools are remembered."""
    pool = BlockPool(8, 4)
    host = HostCache(replace(ALWAYS, num_blocks=2, min_touches=2), pool)
    hashes = [bytes([i]) for i in range(41)]
    host.touch(hashes)
    (block,) = pool.allocate(1) or ()
    pool.publish(block, hashes[0])
    host.touch(hashes[:1])  # forgotten: its first touch again, which forgets hashes[1]
    pool.free([block])
    assert not pool.num_dirty_cached_blocks
    host.touch(hashes[:1])
    assert pool.num_dirty_cached_blocks == 1


def test_a_host_block_that_stays_empty_makes_a_block_dirty_from_its_second_touch_on() -> None:
    """A store was void, or a file could not be read, while the device had computed the block."""
    pool = BlockPool(8, 4)
    host = HostCache(replace(ALWAYS, min_touches=2), pool)
    (block,) = pool.allocate(1) or ()
    pool.publish(block, b"1")
    pool.free([block])
    for num_dirty in (0, 1):
        host_block = host.reserve(b"1")
        assert host_block is not None
        host.touch([b"1"])  # while it is reserved the device's block is not dirty
        assert pool.num_dirty_cached_blocks == 0
        host.end_reservation(host_block, b"1", is_good=False)
        assert pool.num_dirty_cached_blocks == num_dirty


def test_what_a_sequence_has_not_loaded_gives_way_from_its_end() -> None:
    """The first block of a prefix is the last one to go: without it no other can be found."""
    pool = BlockPool(8, 4)
    host = host_cache_with(pool, replace(ALWAYS, num_blocks=3), (b"1", b"2", b"3"))
    host.begin_load(7, host.lookup([b"1", b"2", b"3"]))
    host.cancel_load(7)
    for step, left in enumerate(([b"1", b"2"], [b"1"], [])):
        assert host.reserve(b"other %d" % step) is not None
        assert [each for each in (b"1", b"2", b"3") if host.lookup([each])] == left


def test_the_blocks_of_a_host_pool_are_reserved_in_order_those_of_a_larger_one_last() -> None:
    host = HostCache(replace(ALWAYS, num_blocks=3), BlockPool(8, 4))
    first = host.reserve(b"0")
    host.resize(6)
    later = [host.reserve(b"%d" % number) for number in range(1, 7)]
    assert (first, later) == (0, [1, 2, 3, 4, 5, None])


def test_a_dirty_block_that_is_evicted_is_lost() -> None:
    run = Run(replace(ALWAYS, min_clean_percent=0))
    run.leave_in_host(A)
    assert not run.scheduler.host_cache.num_held_blocks
    assert not run.serve(A)[0].loads


def test_the_least_recently_used_host_block_gives_way_and_a_pinned_one_never() -> None:
    pool = BlockPool(8, 4)
    host = host_cache_with(pool, replace(ALWAYS, num_blocks=3), (b"old", b"pinned", b"new"))
    host.begin_load(7, host.lookup([b"pinned"]))
    for num_stores, stored in enumerate((b"a", b"b")):
        assert host.lookup([b"pinned"]) and host.lookup([b"new"])
        assert bool(host.lookup([b"old"])) == (num_stores == 0)
        cache_dirty_blocks(pool, host, [stored])
        assert len(host.plan_stores(3)) == 1
    cache_dirty_blocks(pool, host, [b"c"])
    assert not host.plan_stores(3) and host.lookup([b"pinned"])
    host.cancel_load(7)
    assert len(host.plan_stores(4)) == 1 and not host.lookup([b"pinned"])


def test_a_host_block_that_two_sequences_load_stays_until_both_have_it() -> None:
    pool = BlockPool(8, 4)
    host = host_cache_with(pool, replace(ALWAYS, num_blocks=1), (b"common",))
    for seq_id in (1, 2):
        host.begin_load(seq_id, host.lookup([b"common"]))
    cache_dirty_blocks(pool, host, [b"other"])
    host.cancel_load(1)
    assert not host.plan_stores(1) and host.lookup([b"common"])
    host.cancel_load(2)
    host.cancel_load(2)
    assert host.plan_stores(2) and not host.lookup([b"common"])


def test_a_host_block_whose_load_is_committed_gives_way_first() -> None:
    pool = BlockPool(8, 4)
    host = host_cache_with(pool, replace(ALWAYS, num_blocks=3), (b"old", b"1", b"2"))
    s = Scheduler(config(), VOCAB, (EOS,))
    s.add(request(0, A))
    (sequence,) = s.waiting
    sequence.table = pool.open(sequence.id, 9)
    host.begin_load(sequence.id, host.lookup([b"1", b"2"]))
    for load, block_hash in zip(
        host.plan_loads([sequence], is_bounded=True), (b"1", b"2"), strict=True
    ):
        pool.publish(load.block, block_hash)
        host.commit_load(load)
    for gone, still in ((b"2", b"1"), (b"1", b"old")):
        cache_dirty_blocks(pool, host, [b"for " + gone])
        assert len(host.plan_stores(len(gone))) == 1
        assert not host.lookup([gone]) and host.lookup([still])
    # The device alone has them now, so they are to be stored again.
    assert not pool.num_dirty_cached_blocks
    pool.release(sequence.id)
    assert pool.num_dirty_cached_blocks == 2


def test_a_loaded_host_block_that_the_device_has_lost_counts_as_just_used() -> None:
    pool = BlockPool(8, 4)
    host = host_cache_with(pool, replace(ALWAYS, num_blocks=2), (b"loaded", b"other"))
    s = Scheduler(config(), VOCAB, (EOS,))
    s.add(request(0, A))
    (sequence,) = s.waiting
    sequence.table = pool.open(sequence.id, 9)
    host.begin_load(sequence.id, host.lookup([b"loaded"]))
    (load,) = host.plan_loads([sequence], is_bounded=True)
    host.commit_load(load)
    pool.release(sequence.id)  # nothing was published: the device has no such block
    cache_dirty_blocks(pool, host, [b"new"])
    assert len(host.plan_stores(9)) == 1
    assert host.lookup([b"loaded"]) and not host.lookup([b"other"])


@pytest.mark.parametrize(
    ("costs", "is_loaded"),
    [
        (None, True),
        (LoadCosts(0, 0, 1), True),
        (LoadCosts(8, 0, 1), False),
        (LoadCosts(7, 0, 1), True),
        (LoadCosts(43, 0, 1, 1000), True),
        (LoadCosts(44, 0, 1, 1000), False),
    ],
)
def test_an_idle_engine_loads_what_is_quicker_to_load(
    costs: LoadCosts | None, is_loaded: bool
) -> None:
    """Eight tokens take 8 ns to compute, and their 36 pairs of 1,000 ps take 36 ns more."""
    run = Run(replace(ALWAYS, costs=costs))
    run.leave_in_host(A)
    assert bool(run.serve(A)[0].loads) == is_loaded


def test_later_tokens_take_longer_to_compute() -> None:
    """Blocks of four: two of them have 8 tokens and 36 pairs, or 68 pairs after another block."""
    costs = LoadCosts(0, 0, 1, 1000)
    assert [costs.prefill_ns(0, 8), costs.prefill_ns(4, 12)] == [8 + 36, 8 + 68]
    assert costs.prefill_ns(0, 12) == costs.prefill_ns(0, 4) + costs.prefill_ns(4, 12)
    host_cache = Run(replace(ALWAYS, costs=costs._replace(load_ns=60))).scheduler.host_cache
    assert not host_cache.is_load_worthwhile(0, 2, is_idle=True)
    assert host_cache.is_load_worthwhile(1, 2, is_idle=True)
    assert host_cache.is_load_worthwhile(0, 2, is_idle=False)


def test_while_others_run_a_load_takes_no_time_from_them() -> None:
    run = Run(replace(ALWAYS, costs=LoadCosts(1000, 1000, 1)), blocks=6)
    run.leave_in_host(A)
    run.add((50,), max_tokens=6)
    run.step()
    run.add(A)
    assert run.step().loads
    run.drain()


def test_short_runs_are_computed() -> None:
    run = Run(replace(ALWAYS, min_loaded_blocks=3), blocks=8)
    run.leave_in_host(A, B)
    assert not any(plan.loads for plan in run.serve(A))
    assert any(plan.loads for plan in run.serve(B))


def test_a_second_request_waits_for_a_load_instead_of_loading_again() -> None:
    run = Run(blocks=8)
    run.leave_in_host(A)
    run.add(A)
    run.add((*A, 9))
    first = run.plan()
    assert {load.seq_id for load in first.loads} == {3} and len(run.scheduler.waiting) == 1
    run.commit(first)
    second = run.step()
    assert not second.loads and len(second.rows) == 2
    run.drain()


# Something else comes first.


def test_an_abort_during_a_load_publishes_nothing_and_frees_all() -> None:
    run = Run()
    plan = run.start_loading()
    run.scheduler.abort(3)
    run.commit(plan)
    audit_drained(run.scheduler)
    assert not run.scheduler.pool.lookup(run.hashes(A))
    assert len(run.scheduler.host_cache.lookup(run.hashes(A))) == 2
    run.serve(A)


def test_a_sequence_that_is_preempted_during_a_load_loads_again() -> None:
    run = Run()
    plan = run.start_loading()
    run.scheduler._preempt(run.scheduler.running[3], "a test")
    run.commit(plan)
    assert run.step().loads and run.step().rows
    run.drain()


def test_what_a_void_plan_loads_is_forgotten_and_computed() -> None:
    """Content in host memory that is damaged may be why the step has failed."""
    run = Run()
    plan = run.start_loading()
    run.scheduler.void("a test")
    assert run.scheduler.commit(plan, run.output) == []
    audit(run.scheduler)
    assert not run.scheduler.host_cache.lookup(run.hashes(A))
    again = run.step()
    assert not again.loads and again.num_tokens == len(A)
    run.drain()


def test_only_what_void_plans_load_is_forgotten() -> None:
    """One block of A is loaded a plan: the second is not in the void plan, and is kept."""
    run = Run(replace(ALWAYS, max_moved_blocks=1), blocks=8)
    run.serve(A)
    run.serve((51,), max_tokens=4)
    run.scheduler.pool.reset_cache()  # as if others had taken the blocks of the device
    run.add((50,), max_tokens=3)
    run.step()
    run.add(A)
    plan = run.plan()
    assert len(plan.loads) == 1
    run.scheduler.void("a test")
    audit(run.scheduler)
    first, second = run.hashes(A)[:2]
    assert not run.scheduler.host_cache.lookup([first])
    assert run.scheduler.host_cache.lookup([second])
    run.drain()


def test_a_sequence_of_a_failed_step_loads_nothing() -> None:
    """The step had no load. Its sequence is computed all the same, and the next one is loaded."""
    run = Run(blocks=8)
    run.leave_in_host(A)
    run.add(A, max_tokens=3)
    assert run.step().loads
    run.step()
    run.scheduler.void("a test")
    run.scheduler.pool.reset_cache()  # as if others had taken the blocks of the device
    assert len(run.scheduler.host_cache.lookup(run.hashes(A))) == 2
    again = run.step()
    assert not again.loads and again.num_tokens == len(A) + 1
    run.drain()
    run.scheduler.pool.reset_cache()
    assert any(plan.loads for plan in run.serve(A))


def test_a_void_load_of_an_ended_sequence_may_be_stored_over() -> None:
    """Its only host block is stored to by the next plan, which is void too."""
    run = Run(replace(ALWAYS, num_blocks=2), blocks=8, depth=2)
    run.leave_in_host(A)
    run.add(A)
    first = run.plan()
    assert len(first.loads) == 2
    run.scheduler.abort(max(run.requests))
    hashes = run.hashes(B)
    pool = run.scheduler.pool
    pool.open(99, 8)
    for block, block_hash in zip(pool.tables[99].blocks, hashes, strict=False):
        pool.publish(block, block_hash)
    run.scheduler.host_cache.expect_reuse(hashes[:2])
    pool.release(99)
    run.add((50,), max_tokens=9)
    second = next_plan(run.scheduler)
    assert {m.host_block for m in second.stores} == {m.host_block for m in first.loads}
    run.scheduler.void("a test")
    audit(run.scheduler)
    assert run.scheduler.host_cache.num_held_blocks == 0


def test_a_load_of_an_earlier_epoch_is_dropped() -> None:
    run = Run(blocks=5)
    plan = run.start_loading()
    held = max(run.scheduler.running[3].table.blocks)
    run.scheduler.resize(max(held, 3))  # preempts: the sequence holds block `held`
    assert not run.scheduler.running
    run.commit(plan)
    assert not run.scheduler.pool.lookup(run.hashes(A))
    run.drain()


def test_a_sequence_that_is_admitted_again_while_its_load_is_in_flight() -> None:
    """The load of the earlier epoch writes blocks that it no longer has."""
    run = Run(blocks=8)
    plan, output = run.start_loading(), run.output
    sequence = run.scheduler.running[3]
    run.scheduler._preempt(sequence, "a test")
    again = next_plan(run.scheduler)
    assert again.loads and again.loads[0].epoch == 1
    run.scheduler.commit(plan, output)
    assert sequence.num_committed == 0 and not run.scheduler.pool.lookup(run.hashes(A))
    audit(run.scheduler)
    run.model.forward(again)
    run.scheduler.commit(again, output._replace(step=again.step))
    run.drain()


def test_stores_of_a_void_plan_are_done_again() -> None:
    run = Run()
    run.serve(A)
    run.add((50,))
    plan = run.plan()
    assert len(plan.stores) == 2
    run.scheduler.void("a test")
    assert not run.scheduler.host_cache.lookup(run.hashes(A))
    again = run.step()
    assert {move.block for move in again.stores} == {move.block for move in plan.stores}
    run.drain()


def test_a_stored_block_is_found_only_when_its_plan_is_committed() -> None:
    run = Run()
    run.serve(A)
    run.add((50,))
    plan = run.plan()
    assert plan.stores and not run.scheduler.host_cache.lookup(run.hashes(A))
    run.commit(plan)
    assert len(run.scheduler.host_cache.lookup(run.hashes(A))) == 2


def test_a_reset_forgets_the_host_pool_and_what_is_being_stored() -> None:
    run = Run()
    run.serve(A)
    run.add((50,), max_tokens=9)
    plan = run.plan()
    assert plan.stores
    run.scheduler.reset_prefix_cache()
    run.commit(plan)
    assert run.scheduler.host_cache.num_held_blocks == 0
    run.drain()


def test_a_store_of_before_a_reset_is_not_found_under_a_later_hash() -> None:
    """Plan n stores to a host block, which plan n + 1 stores to again after the reset."""
    run = Run(replace(ALWAYS, num_blocks=2), blocks=12, depth=2)
    run.serve(A)
    run.add((50,), max_tokens=9)
    before = run.plan()
    output = run.output
    run.scheduler.reset_prefix_cache()
    pool = run.scheduler.pool
    hashes = run.hashes(B)
    pool.open(99, 8)
    for block, block_hash in zip(pool.tables[99].blocks, hashes, strict=False):
        pool.publish(block, block_hash)
    run.scheduler.host_cache.expect_reuse(hashes[:2])
    pool.release(99)
    after = next_plan(run.scheduler)
    assert {m.host_block for m in before.stores} == {m.host_block for m in after.stores}
    run.scheduler.commit(before, output)
    assert run.scheduler.host_cache.num_held_blocks == 0


def test_a_reset_during_a_load_shares_nothing_computed_before() -> None:
    run = Run()
    plan = run.start_loading()
    run.scheduler.reset_prefix_cache()
    assert not run.scheduler.running
    run.commit(plan)
    assert not run.scheduler.pool.num_published_blocks
    assert not any(each.loads for each in (run.step(),))
    run.drain()


def test_a_smaller_host_pool_preempts_only_sequences_that_load_from_its_end() -> None:
    run = Run()
    plan = run.start_loading()
    last = max(move.host_block for move in plan.loads)
    run.scheduler.resize_host(last + 1)
    assert run.scheduler.running
    run.scheduler.resize_host(last)
    assert not run.scheduler.running and run.scheduler.waiting
    run.commit(plan)
    run.drain()
    run.scheduler.resize_host(20)
    audit(run.scheduler)
    run.serve(A, B, A)


# The model refuses what a device would do wrong.

BIND = Bind(SamplingParams(), 0, 1)


def moves_plan(
    *,
    rows: tuple[Row, ...] = (),
    copies: tuple[BlockCopy, ...] = (),
    stores: tuple[HostStore, ...] = (),
    loads: tuple[HostLoad, ...] = (),
) -> StepPlan:
    return StepPlan(0, rows, 8, 4, copies, num_host_blocks=4, stores=stores, loads=loads)


ROW = Row(0, 0, 0, 4, (5,), new_blocks=(2, 3, 4), bind=BIND)
"""It reads block 2 and writes block 3. Block 4 is for later."""


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (moves_plan(stores=(HostStore(8, 0),)), "moves block 8 of 8"),
        (moves_plan(stores=(HostStore(1, 4),)), "moves host block 4 of 4"),
        (moves_plan(loads=(HostLoad(0, 0, 1, -1),)), "moves host block -1 of 4"),
        (moves_plan(stores=(HostStore(1, 0), HostStore(1, 1))), "a block in two moves"),
        (moves_plan(stores=(HostStore(1, 0), HostStore(2, 0))), "a host block in two moves"),
        (
            moves_plan(stores=(HostStore(1, 0),), loads=(HostLoad(0, 0, 2, 0),)),
            "a host block in two moves",
        ),
        (
            moves_plan(stores=(HostStore(1, 0),), loads=(HostLoad(0, 0, 1, 1),)),
            "a block in two moves",
        ),
        (moves_plan(rows=(ROW,), stores=(HostStore(2, 0),)), "the row of sequence 0 touches"),
        (moves_plan(rows=(ROW,), loads=(HostLoad(1, 0, 3, 0),)), "the row of sequence 0 touches"),
        (moves_plan(copies=(BlockCopy(1, 2),), stores=(HostStore(1, 0),)), "BlockCopy"),
        (moves_plan(copies=(BlockCopy(1, 2),), loads=(HostLoad(0, 0, 2, 0),)), "BlockCopy"),
    ],
)
def test_a_plan_that_depends_on_the_order_of_its_moves_is_refused(
    plan: StepPlan, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        check_moves(plan, {})
    with pytest.raises(ValueError, match=problem):
        HashModel(num_blocks=8, block_size=4).forward(plan)


def test_a_block_of_the_table_after_the_row_may_move() -> None:
    """Tables of admitted sequences have blocks for later chunks."""
    check_moves(moves_plan(rows=(ROW,), loads=(HostLoad(0, 0, 4, 0),)), {})
    later = ROW._replace(bind=None, keep=3, new_blocks=())
    with pytest.raises(ValueError, match="touches"):
        check_moves(moves_plan(rows=(later,), stores=(HostStore(2, 0),)), {0: [2, 3, 4]})


def test_a_load_of_what_was_never_stored_is_refused() -> None:
    model = HashModel(num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match="nothing was stored"):
        model.forward(moves_plan(loads=(HostLoad(0, 0, 1, 2),)))
    stored = moves_plan(stores=(HostStore(1, 2),))
    model.forward(stored)
    model.forward(stored._replace(step=1, stores=(), num_host_blocks=2))
    model.forward(stored._replace(step=2, stores=(), num_host_blocks=4))
    with pytest.raises(ValueError, match="nothing was stored"):
        model.forward(moves_plan(loads=(HostLoad(0, 0, 1, 2),))._replace(step=3))


def test_host_blocks_are_copies() -> None:
    from array import array

    host, pages = HostBlocks(block_bytes=8), [array("i", [1, 2]), array("i", [3, 4])]
    host.resize(1)
    host.run_moves(StepPlan(0, (), 2, 2, num_host_blocks=1, stores=(HostStore(0, 0),)), pages)
    pages[0][0] = 9
    host.run_moves(StepPlan(1, (), 2, 2, num_host_blocks=1, loads=(HostLoad(0, 0, 1, 0),)), pages)
    assert pages[1].tolist() == [1, 2]
    pages[1][0] = 7
    assert host.contents == [array("i", [1, 2]).tobytes()]


# Configuration, recording and replay.


class Unmoved:
    """A model without host memory."""

    def __init__(self, model: HashModel) -> None:
        self.vocab_size, self.num_layers = model.vocab_size, model.num_layers
        self.eos_token, self.forward = model.eos_token, model.forward


def test_a_model_that_executes_no_moves_is_refused_with_a_host_pool() -> None:
    engine_config = config(host_tier=ALWAYS)
    model = Unmoved(HashModel(num_blocks=64, block_size=4))
    with pytest.raises(InvalidConfig, match="host_tier: this model has no pool"):
        Engine(model, engine_config)
    Engine(model, replace(engine_config, host_tier=None))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_blocks": -1}, "num_blocks -1"),
        ({"num_blocks": True}, "num_blocks True"),
        ({"num_blocks": 1, "max_moved_blocks": 0}, "max_moved_blocks 0"),
        ({"num_blocks": 1, "min_clean_percent": 101}, "min_clean_percent 101"),
        ({"num_blocks": 1, "min_touches": 3}, "min_touches 3"),
        ({"num_blocks": 1, "min_loaded_blocks": 0}, "min_loaded_blocks 0"),
        ({"num_blocks": 1, "costs": LoadCosts(1, -1, 1)}, "nanoseconds"),
        ({"num_blocks": 1, "costs": LoadCosts(1, 0.5, 1)}, "nanoseconds"),  # type: ignore[arg-type]
    ],
)
def test_a_host_tier_out_of_range_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=f"host_tier: .*{problem}"):
        HostTier(**options)  # type: ignore[arg-type]


def test_a_host_pool_that_is_not_there_is_not_resized() -> None:
    s = Scheduler(config(blocks=4), VOCAB, (EOS,))
    with pytest.raises(InvalidConfig, match="host_tier: this engine has no host pool to resize"):
        s.resize_host(4)
    assert s.host_cache.num_blocks == 0


def test_a_host_tier_needs_the_prefix_cache() -> None:
    with pytest.raises(InvalidConfig, match=r"host_tier: .* enable_prefix_caching"):
        EngineConfig(host_tier=ALWAYS, enable_prefix_caching=False)


def record_host_world(seed: int) -> list[str]:
    """Return the lines of a recording of a world with a host pool, without resizes."""
    world = draw_host_world(seed)
    model = HashModel(
        vocab_size=world.vocab_size,
        num_blocks=world.config.num_blocks,
        block_size=world.config.block_size,
    )
    lines: list[str] = []
    header = build_header(world.config, model.vocab_size(), model.eos_token(), "fcfs", "1")
    writer = RecordingWriter(lines.append, lambda: 0, header)
    engine = Engine(model, world.config, recorder=writer)
    for index, each in enumerate(world.requests):
        engine.submit(each)
        for _ in range(6):
            engine.step()
        if index % 5 == 4:
            engine.abort(each.id)
        if index == 9:
            engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    writer.close()
    return lines


def host_seeds(count: int) -> list[int]:
    """Return seeds of worlds with a host pool and without a draft model."""
    worlds = map(draw_host_world, range(10 * count))
    found = [w.seed for w in worlds if w.config.speculation is None and w.config.host_tier]
    return found[:count]


@pytest.mark.long
def test_a_recording_replays_with_every_move() -> None:
    num_moving = 0
    for seed in host_seeds(30):
        lines = record_host_world(seed)
        assert parse_config(json.loads(lines[0].partition(" ")[2])) == draw_host_world(seed).config
        result = replay(lines)
        assert result.difference is None and result.is_complete, f"{seed=}"
        num_moving += '"loads' in "".join(lines) or result.steps > 0
    assert num_moving == 30


def test_the_digest_of_a_plan_includes_its_moves() -> None:
    plan = moves_plan(stores=(HostStore(1, 2),), loads=(HostLoad(0, 0, 3, 1),))
    others = [
        plan._replace(num_host_blocks=5),
        plan._replace(stores=()),
        plan._replace(stores=(HostStore(1, 3),)),
        plan._replace(stores=(HostStore(2, 2),)),
        plan._replace(loads=()),
        plan._replace(loads=(HostLoad(0, 0, 3, 0),)),
        plan._replace(loads=(HostLoad(0, 1, 3, 1),)),
        plan._replace(loads=(HostLoad(0, 0, 4, 1),)),
    ]
    assert len({plan_digest(each) for each in (plan, *others)}) == 1 + len(others)
