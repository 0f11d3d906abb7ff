"""Checksums of blocks on a device: what they find, and what a damaged host block leads to."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import forge.models  # noqa: E402
from forge.config import DeviceOptions, DiskTier, HostTier  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import DamagedBlocks  # noqa: E402
from forge.models.file_moves import FileMoves  # noqa: E402
from forge.models.hf.block_sums import BlockSums  # noqa: E402
from forge.models.hf.checked_moves import CheckedMoves  # noqa: E402
from forge.models.hf.host_pool import HostPool  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.models.hf.loading.kv_tiers import create_tier_setup  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.seam import HostFile, HostLoad, HostStore, StepPlan  # noqa: E402
from forge.tier_options import TierOptions  # noqa: E402
from tests.core.worlds import FaultyStore  # noqa: E402
from tests.hf.test_block_moves import (  # noqa: E402
    CPU,
    KEY,
    SMALL_TIER,
    TIER,
    bits_of,
    cache_of,
    engine_for,
    expected,
    plan_of,
    pool_of,
    serve,
    turns,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
SPECS = [
    KVCacheSpec(3, 2, 16, torch.bfloat16),
    KVCacheSpec(1, 1, 3, torch.float16),
    KVCacheSpec(2, 1, 8, torch.float64),
]
TINY = str(Path(forge.models.__file__).with_name("tiny"))
DEVICES = [CPU, pytest.param("cuda", marks=pytest.mark.gpu)]


def run(moves: CheckedMoves, plan: StepPlan) -> Any:
    """Execute a plan without rows, and return the answers of its output."""
    with torch.inference_mode():
        moves.begin(plan)
        moves.queue(plan)
        return moves.end(plan)


def content_of(cache: KVCache, block: int) -> bytes:
    return bytes(bits_of(cache, block).flatten().cpu().numpy())


# Sums.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_sum_of_a_block_is_that_of_its_bytes_on_the_host(
    spec: KVCacheSpec, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many blocks at a time as memory allows: one, some, all."""
    cache = cache_of(spec, 12, device)
    host = [BlockSums(cache).sum_content(content_of(cache, block)) for block in range(12)]
    assert len(set(host)) == 12
    order = [5, 0, 11, 3, 4]
    for num_bytes in (1, 2 * cache.block_bytes, 100 * cache.block_bytes):
        monkeypatch.setattr("forge.models.hf.block_sums.MAX_SUM_BYTES", num_bytes)
        assert BlockSums(cache).sum_blocks(order).tolist() == [host[block] for block in order]


@pytest.mark.parametrize("spec", SPECS)
def test_every_bit_of_a_block_changes_its_sum(spec: KVCacheSpec) -> None:
    """Also with the bit 32 places below it, which folding a word changes too."""
    cache = cache_of(spec, 1)
    sums, content = BlockSums(cache), content_of(cache, 0)
    before = sums.sum_content(content)
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        assert sums.sum_content(damaged) != before, bit
        damaged[(bit ^ 32) // 8] ^= 1 << bit % 8
        assert sums.sum_content(damaged) != before, bit


def test_words_that_change_places_change_the_sum() -> None:
    """Among them words that differ in one bit, the highest one too."""
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float64), 1)
    sums, rng = BlockSums(cache), Random(0)
    num_words = cache.block_bytes // 8
    for bit in range(64):
        words = [rng.getrandbits(64) for _ in range(num_words)]
        first, second = rng.sample(range(num_words), 2)
        words[second] = words[first] ^ 1 << bit
        before = b"".join(word.to_bytes(8, "little") for word in words)
        words[first], words[second] = words[second], words[first]
        after = b"".join(word.to_bytes(8, "little") for word in words)
        assert sums.sum_content(before) != sums.sum_content(after)


def test_equal_changes_of_two_words_do_not_cancel() -> None:
    """The highest bit alone changes a plain weighted sum by 2^63, twice that is nothing."""
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float64), 1)
    sums, content = BlockSums(cache), content_of(cache, 0)
    before = sums.sum_content(content)
    num_words = cache.block_bytes // 8
    for bit in (63, 62, 31, 0):
        for first in range(num_words):
            for second in range(first):
                damaged = bytearray(content)
                for word in (first, second):
                    damaged[8 * word + bit // 8] ^= 1 << bit % 8
                assert sums.sum_content(damaged) != before


# Moves.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_blocks_that_are_not_damaged_come_back(spec: KVCacheSpec, device: Any) -> None:
    cache = cache_of(spec, 12, device)
    moves = CheckedMoves(cache, pool_of(cache, 3, 3, 1, is_pinned=device != CPU))
    order = [6, 0, 3, 5, 1, 4, 2]
    before = [content_of(cache, block) for block in order]
    run(moves, plan_of(0, stores=tuple(map(HostStore, order, range(7)))))
    run(moves, plan_of(1, loads=tuple(HostLoad(0, 0, 11 - i, i) for i in range(7))))
    assert [content_of(cache, 11 - index) for index in range(7)] == before


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_of_a_damaged_host_block_raises_when_the_result_is_read(
    device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_of(SPECS[0], 12, device)
    pool = pool_of(cache, 7, is_pinned=device != CPU)
    moves = CheckedMoves(cache, pool)
    run(moves, plan_of(0, stores=(HostStore(0, 4), HostStore(1, 2), HostStore(2, 3))))
    pool.block(2)[-1] ^= 1
    loads = (HostLoad(0, 0, 8, 4), HostLoad(0, 0, 9, 2), HostLoad(0, 0, 10, 3))
    with pytest.raises(DamagedBlocks, match=r"step 1 .*: block 9 from host block 2\. Nothing"):
        run(moves, plan_of(1, loads=loads))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    run(moves, plan_of(2, loads=(HostLoad(0, 0, 8, 4),)))


def test_a_block_that_is_stored_again_has_its_own_sum() -> None:
    cache = cache_of(SPECS[0], 12)
    moves = CheckedMoves(cache, pool_of(cache, 7))
    for step, block in enumerate((1, 2)):
        run(moves, plan_of(2 * step, stores=(HostStore(block, 0),)))
        run(moves, plan_of(2 * step + 1, loads=(HostLoad(0, 0, 9, 0),)))
        assert content_of(cache, 9) == content_of(cache, block)


def test_a_result_that_is_never_read_keeps_no_comparison() -> None:
    """As after a failed step, whose plans in flight are void."""
    cache = cache_of(SPECS[0], 12)
    moves = CheckedMoves(cache, pool_of(cache, 7))
    run(moves, plan_of(0, stores=(HostStore(0, 0),)))
    for step in range(1, 9):
        moves.begin(plan_of(step, loads=(HostLoad(0, 0, 9, 0),)))
        moves.queue(plan_of(step, loads=(HostLoad(0, 0, 9, 0),)))
    assert len(moves._comparisons) <= 2


def test_a_damaged_host_block_is_written_to_no_file() -> None:
    cache, store = cache_of(SPECS[0], 12), FaultyStore(0)
    pool = pool_of(cache, 7)
    moves = CheckedMoves(cache, pool, FileMoves(store))
    run(moves, plan_of(0, stores=(HostStore(0, 0), HostStore(1, 1))))
    pool.block(0)[5] ^= 4
    answers = run(moves, plan_of(1, spills=(HostFile(0, KEY), HostFile(1, KEY[::-1]))))
    assert [(answer.host_block, answer.is_good) for answer in answers] == [(0, False), (1, True)]
    assert store.contents == {KEY[::-1]: content_of(cache, 1)}


def test_the_content_of_a_file_is_compared_when_it_is_loaded() -> None:
    """Another block was stored in the host block before it, and again after it."""
    cache, store = cache_of(SPECS[0], 12), FaultyStore(0)
    pool = pool_of(cache, 7)
    moves = CheckedMoves(cache, pool, FileMoves(store))
    store.contents[KEY] = content_of(cache, 5)
    run(moves, plan_of(0, stores=(HostStore(0, 0), HostStore(1, 1))))
    run(moves, plan_of(1, fetches=(HostFile(0, KEY),)))
    run(moves, plan_of(2, loads=(HostLoad(0, 0, 8, 1), HostLoad(0, 0, 9, 0))))
    assert content_of(cache, 9) == content_of(cache, 5)
    run(moves, plan_of(3, spills=(HostFile(0, KEY[::-1]),)))
    assert store.contents[KEY[::-1]] == store.contents[KEY]
    pool.block(0)[5] ^= 4
    with pytest.raises(DamagedBlocks, match="block 9 from host block 0"):
        run(moves, plan_of(4, loads=(HostLoad(0, 0, 9, 0),)))
    run(moves, plan_of(5, stores=(HostStore(2, 0),)))
    run(moves, plan_of(6, loads=(HostLoad(0, 0, 9, 0),)))


def test_a_file_of_the_wrong_length_is_a_miss() -> None:
    cache, store = cache_of(SPECS[0], 12), FaultyStore(0)
    moves = CheckedMoves(cache, pool_of(cache, 7), FileMoves(store))
    store.contents[KEY] = bytes(3)
    (answer,) = run(moves, plan_of(0, fetches=(HostFile(0, KEY),)))
    assert not answer.is_good


# Engines.


def pool_in(engine: Engine) -> HostPool:
    return engine.model._moves._moves._host_pool  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("drafts", [0, 2])
def test_damage_changes_no_token(drafts: int) -> None:
    """One host block in sixteen has a wrong bit whenever requests come. Others are loaded."""
    engine = engine_for("llama", SMALL_TIER, drafts=drafts, create_moves=CheckedMoves)
    pool, rng = pool_in(engine), Random(1)

    def damage(index: int) -> None:
        for host_block in range(SMALL_TIER.num_blocks):
            if rng.random() < 1 / 16:
                pool.block(host_block)[rng.randrange(100)] ^= 16

    served = serve(engine, turns(), at_once=3, before=damage)
    assert served.outputs == expected("llama")
    assert any("DamagedBlocks" in event.why for plan in served.plans for event in plan.preempted)
    assert engine.scheduler.num_loaded_tokens, "blocks that are not damaged are loaded"


def test_without_the_check_damage_changes_tokens() -> None:
    engine = engine_for("llama", TIER)
    pool = engine.model._moves._host_pool  # type: ignore[attr-defined]

    def damage(index: int) -> None:
        for host_block in range(TIER.num_blocks):
            pool.block(host_block)[7::8] ^= 0x80  # the signs of all numbers

    assert serve(engine, turns(), at_once=3, before=damage).outputs != expected("llama")


def test_outputs_with_the_check_and_files_are_those_without() -> None:
    store = FaultyStore(0)
    tier = HostTier(
        num_blocks=12, min_clean_percent=100, min_touches=1, disk=DiskTier(max_files=1000)
    )
    engine = engine_for("llama", tier, files=FileMoves(store), create_moves=CheckedMoves)
    served = serve(engine, turns(), at_once=3)
    assert served.outputs == expected("llama")
    assert served.count("loads") and served.count("fetches") and served.count("spills")
    assert engine.scheduler.num_preemptions == 0 or not any(
        "failed" in event.why for plan in served.plans for event in plan.preempted
    )


def test_the_option_chooses_the_moves() -> None:
    for check_kv in (False, True):
        options = TierOptions(kv_host_gib=0.01, check_kv=check_kv)
        setup = create_tier_setup(options, enable_prefix_caching=True)
        geometry = {"num_blocks": 8, "block_size": 8, "max_model_len": 64}
        with open_model(TINY, geometry, DeviceOptions(device="cpu"), tiers=setup) as loaded:
            assert isinstance(loaded.model._moves, CheckedMoves) == check_kv  # type: ignore[attr-defined]
