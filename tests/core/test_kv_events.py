"""KV events: folded in order, they are the content of the prefix cache, in every medium."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from forge.blocks import BlockPool, chain_hashes, root_hash
from forge.config import DiskTier, EngineConfig, HostTier
from forge.disk_cache import DiskCache
from forge.engine import Engine
from forge.host_cache import HostCache
from forge.kv_events import (
    DEVICE,
    DISK,
    HOST,
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventLog,
)
from forge.models.hash import HashModel
from forge.models.paged import FaultHooks
from forge.policy import POLICIES
from forge.request import Delta
from forge.routing.prefix_index import PrefixIndex
from forge.seam import FileAnswer, StepPlan
from forge.sim.fast_forward import run_fast_forward
from forge.sim.scenario import Scenario
from tests.core.builders import config, request
from tests.core.host_worlds import draw_host_world
from tests.core.worlds import (
    RandomWorld,
    RecordingModel,
    arbitrary_policy,
    build_engine,
    draw_world,
    run_world,
)


class Fold:
    """The events of an engine, folded over empty sets. An event that changes nothing fails."""

    def __init__(self) -> None:
        self.hashes: dict[str, set[bytes]] = {medium: set() for medium in MEDIA}
        self.parents: dict[bytes, bytes | None] = {}
        self.counts: Counter[str] = Counter()
        self.index = PrefixIndex()
        self.index.add_replica(0, 10**9)

    def receive(self, events: Sequence[KVEvent]) -> None:
        """Apply the events of a step."""
        assert events, "a sink is called with events only"
        self.index.apply(0, events)
        for event in events:
            match event:
                case BlockStored(hashes, parent, tokens, size, medium):
                    assert not self.hashes[medium] & set(hashes), "stored twice"
                    self.hashes[medium] |= set(hashes)
                    if medium == DEVICE:
                        self._check_chain(hashes, parent, tokens, size)
                    else:
                        assert (parent, tokens) == (None, ())
                    self.counts[f"stored {medium}"] += len(hashes)
                case BlockRemoved(hashes, medium):
                    assert self.hashes[medium] >= set(hashes), "removed and not there"
                    self.hashes[medium] -= set(hashes)
                    self.counts[f"removed {medium}"] += len(hashes)
                case AllBlocksCleared():
                    self.hashes = {medium: set() for medium in MEDIA}
                    self.counts["cleared"] += 1

    def _check_chain(
        self, hashes: tuple[bytes, ...], parent: bytes | None, tokens: tuple[int, ...], size: int
    ) -> None:
        assert len(tokens) == size * len(hashes)
        roots = [root_hash("", salt, size) for salt in ("", "salt")]
        starts = roots if parent is None else [parent]
        assert list(hashes) in [chain_hashes(start, tokens, size) for start in starts]


class CheckedEngine(Engine):
    """An engine that compares the fold with its caches after each call that may change them."""

    def step(self) -> list[Delta]:
        deltas = super().step()
        self._check()
        return deltas

    def resize(self, num_blocks: int | None = None, num_host_blocks: int | None = None) -> None:
        super().resize(num_blocks, num_host_blocks)
        self._check()

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._check()

    def _check(self) -> None:
        fold, scheduler = self.fold, self.scheduler
        pool = scheduler.pool
        expected = {
            DEVICE: {pool.hash_of(block) for block in range(pool.num_blocks)} - {None},
            HOST: set(scheduler.host_cache._block_by_hash),
            DISK: set(scheduler.disk_cache._keys),
        }
        assert fold.hashes == expected
        for medium, hashes in expected.items():
            assert set(fold.index.hashes(0, medium)) == hashes

    fold: Fold


def fold_world(world: RandomWorld) -> Fold:
    """Run the world, check the fold after each step, and return it."""
    fold = Fold()

    def create(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, plain = build_engine(world)
        policy = POLICIES.get(world.policy) or arbitrary_policy(Random(world.seed))
        engine = CheckedEngine(
            recorder, world.config, plain.tokenizer, policy, kv_events=fold.receive
        )
        engine.fold = fold
        return model, recorder, engine

    run_world(world, create=create)
    return fold


def check_folds(seeds: range) -> Counter[str]:
    """Check worlds of both kinds, and return what they reached."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        for draw in (draw_world, draw_host_world):
            reached += fold_world(draw(seed)).counts
    return reached


EVENTS = ["cleared", *(f"{what} {medium}" for medium in MEDIA for what in ("stored", "removed"))]


@pytest.mark.long
def test_the_fold_of_the_events_is_the_content_of_every_medium_after_each_step() -> None:
    """In worlds with resets, resizes, failed steps, tiers, sessions, salts and drafts."""
    reached = check_folds(range(40))
    assert [name for name in EVENTS if not reached[name]] == []


@pytest.mark.long
def test_the_fold_of_the_events_is_the_content_of_every_medium_in_many_worlds() -> None:
    reached = check_folds(range(40, 80))
    assert [name for name in EVENTS if not reached[name]] == []


# Literal events.


def create_engine(
    sink: list[list[KVEvent]], blocks: int = 8, faults: FaultHooks | None = None
) -> Engine:
    """Return an engine with blocks of 4 tokens that appends the events of each call to `sink`."""
    hooks = {} if faults is None else {"faults": faults}
    model = HashModel(vocab_size=257, num_blocks=blocks, block_size=4, **hooks)
    return Engine(model, config(blocks=blocks), kv_events=lambda events: sink.append(list(events)))


def serve(engine: Engine, id: int, prompt: Sequence[int], output: int, salt: str = "") -> None:
    """Run one request to its end."""
    engine.submit(request(id, prompt, cache_salt=salt, max_tokens=output, ignore_eos=True))
    while engine.has_work:
        engine.step()


def hashes_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    return chain_hashes(root_hash("", salt, 4), tokens, 4)


def test_a_prompt_is_one_event_with_its_tokens_and_a_later_block_names_its_parent() -> None:
    """Nine tokens of prompt fill two blocks. The third is full with its fourth token."""
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink)
    engine.submit(request(0, range(1, 10), max_tokens=5, ignore_eos=True, temperature=0.0))
    tokens = list(range(1, 10))
    while engine.has_work:
        for delta in engine.step():
            tokens += delta.tokens
    hashes = hashes_of(tokens[:12])
    prompt = BlockStored(tuple(hashes[:2]), None, tuple(tokens[:8]), 4, DEVICE)
    assert sink == [
        [prompt],
        [BlockStored((hashes[2],), hashes[1], tuple(tokens[8:12]), 4, DEVICE)],
    ]


def test_only_new_blocks_are_stored_and_their_parent_is_the_shared_block() -> None:
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink)
    serve(engine, 0, range(1, 9), 1)
    sink.clear()
    prompt = (1, 2, 3, 4, 50, 51, 52, 53, 54)
    serve(engine, 1, prompt, 1)
    first, second = hashes_of(prompt[:8])
    assert sink == [[BlockStored((second,), first, prompt[4:8], 4, DEVICE)]]


def test_a_prompt_that_is_computed_again_stores_its_new_blocks_only() -> None:
    """Prompt logprobs need every position, so the request shares nothing that is published."""
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink)
    serve(engine, 0, range(1, 9), 1)
    sink.clear()
    prompt = tuple(range(1, 14))
    engine.submit(request(1, prompt, max_tokens=1, prompt_logprobs=0))
    while engine.has_work:
        engine.step()
    hashes = hashes_of(prompt[:12])
    assert sink == [[BlockStored((hashes[2],), hashes[1], prompt[8:12], 4, DEVICE)]]


def test_salts_have_other_hashes_for_the_same_tokens() -> None:
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink)
    serve(engine, 0, range(1, 6), 1)
    serve(engine, 1, range(1, 6), 1, salt="a")
    found = [event.block_hashes for (event,) in sink if isinstance(event, BlockStored)]
    assert found == [tuple(hashes_of((1, 2, 3, 4), salt)) for salt in ("", "a")]


def test_evicted_blocks_are_removed_in_one_event_before_the_next_are_stored() -> None:
    """Four blocks: the second prompt of four evicts the two that the first one left."""
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink, blocks=4)
    serve(engine, 0, range(1, 9), 1)
    sink.clear()
    prompt = tuple(range(21, 36))
    serve(engine, 1, prompt, 1)
    hashes = hashes_of(range(1, 9))
    removed = BlockRemoved((hashes[1], hashes[0]), DEVICE)
    stored = BlockStored(tuple(hashes_of(prompt[:12])), None, prompt[:12], 4, DEVICE)
    assert sink == [[removed, stored]]


def test_a_reset_and_a_resize_are_delivered_at_once() -> None:
    sink: list[list[KVEvent]] = []
    engine = create_engine(sink)
    serve(engine, 0, range(1, 9), 1)
    sink.clear()
    engine.resize(num_blocks=1)
    (second,) = hashes_of(range(1, 9))[1:]
    assert sink == [[BlockRemoved((second,), DEVICE)]]
    engine.reset_prefix_cache()
    assert sink[1:] == [[AllBlocksCleared()]]


def test_removals_of_a_step_that_fails_are_delivered_with_it() -> None:
    sink: list[list[KVEvent]] = []
    steps: list[int] = []

    def fail_late(plan: StepPlan) -> None:
        steps.append(plan.step)
        if len(steps) == 2:
            raise RuntimeError("no memory")

    engine = create_engine(sink, blocks=4, faults=FaultHooks(fail_late))
    serve(engine, 0, range(1, 9), 1)
    sink.clear()
    engine.submit(request(1, range(21, 36), max_tokens=1))
    engine.step()
    hashes = hashes_of(range(1, 9))
    assert sink == [[BlockRemoved((hashes[1], hashes[0]), DEVICE)]]


def test_a_host_block_is_stored_with_its_commit_and_removed_when_another_takes_its_place() -> None:
    log = KVEventLog(4)
    pool = BlockPool(4, 4, log)
    host_cache = HostCache(HostTier(num_blocks=1), pool, log)
    for block_hash in (b"a", b"b"):
        host_block = host_cache.reserve(block_hash)
        assert host_block == 0
        host_cache.end_reservation(host_block, block_hash, is_good=True)
    assert log.take() == [
        BlockStored((b"a",), None, (), 4, HOST),
        BlockRemoved((b"a",), HOST),
        BlockStored((b"b",), None, (), 4, HOST),
    ]


def test_keys_of_files_are_stored_on_disk() -> None:
    sink: list[list[KVEvent]] = []
    world = next(
        w
        for w in map(draw_host_world, range(100))
        if w.config.host_tier is not None and w.config.host_tier.disk is not None
    )
    model, _, _ = build_engine(world)
    engine = Engine(model, world.config, kv_events=lambda events: sink.append(list(events)))
    engine.add_disk_keys([b"a", b"b", b"a"])
    size = world.config.block_size
    assert sink == [[BlockStored((key,), None, (), size, DISK) for key in (b"a", b"b")]]


def test_a_file_that_is_missed_after_its_key_gave_way_is_removed_once() -> None:
    """One file is known at a time: while the first is fetched, another one takes its place."""
    log, tier = KVEventLog(4), DiskTier(max_files=1)
    host_tier = HostTier(num_blocks=2, disk=tier)
    disk = DiskCache(tier, HostCache(host_tier, BlockPool(4, 4, log), log), log)
    disk.add_keys([b"a"])
    assert disk.request_fetches(0, 0, [b"a"], is_idle=False)
    _, (fetch,) = disk.plan_moves(0)
    disk.add_keys([b"b"])
    disk.commit_answers([FileAnswer(0, fetch.host_block, False)])
    assert log.take() == [
        BlockStored((b"a",), None, (), 4, DISK),
        BlockStored((b"b",), None, (), 4, DISK),
        BlockRemoved((b"a",), DISK),
    ]


def test_an_engine_without_a_sink_builds_no_event() -> None:
    """Neither its log nor those of its caches exist, so nothing could collect one."""
    engine = Engine(
        HashModel(num_blocks=8), EngineConfig(num_blocks=8, host_tier=HostTier(num_blocks=8))
    )
    scheduler = engine.scheduler
    parts = (scheduler, scheduler.pool, scheduler.host_cache, scheduler.disk_cache)
    assert [part._kv_events for part in (*parts, scheduler.prefix_cache)] == [None] * 5


def test_removals_that_follow_each_other_in_one_medium_are_one_event() -> None:
    log = KVEventLog(4)
    for block_hash, medium in ((b"a", DEVICE), (b"b", DEVICE), (b"c", HOST)):
        log.record_removed(block_hash, medium)
    log.record_stored(b"d", HOST)
    log.record_removed(b"e", HOST)
    assert log.take() == [
        BlockRemoved((b"a", b"b"), DEVICE),
        BlockRemoved((b"c",), HOST),
        BlockStored((b"d",), None, (), 4, HOST),
        BlockRemoved((b"e",), HOST),
    ]
    assert log.take() == []


def test_a_fast_forward_has_the_events_of_the_run_step_by_step() -> None:
    scenario = Scenario(
        workload="closed", clients=3, requests=12, prompt="20-60", output="40-90", cost="unit",
        engine=EngineConfig(num_blocks=20, block_size=8),
    )  # fmt: skip
    runs: list[list[KVEvent]] = [[], []]
    for events, run in zip(runs, (lambda world: world.run(), run_fast_forward), strict=True):
        run(scenario.create_world(*scenario.create_engine(events.extend)))
    stepwise, fast = (flatten(events) for events in runs)
    assert stepwise == fast
    assert {name for name, _ in stepwise} == {"BlockStored", "BlockRemoved"}


def flatten(events: Sequence[KVEvent]) -> list[tuple[str, bytes]]:
    """Return kind and hash of each block, in order, however the events are grouped."""
    return [
        (type(event).__name__, each)
        for event in events
        if not isinstance(event, AllBlocksCleared)
        for each in event.block_hashes
    ]
