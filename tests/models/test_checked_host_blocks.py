"""Checksums of host blocks: damaged content is computed again, and serves no request."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forge import LLM
from forge.errors import DamagedBlocks, InvalidConfig
from forge.models.block_files import BlockFiles
from forge.models.checked_host_blocks import CheckedHostBlocks
from forge.models.hash import HashModel
from forge.models.host_blocks import HostBlocks
from forge.request import CachedTokens
from forge.seam import HostLoad, HostStore, StepPlan
from forge.sim.replay import replay
from tests.core.host_worlds import draw_host_world
from tests.core.worlds import RandomWorld, build_engine, check_outcome, run_world
from tests.engine.test_tiers import FILLERS, GREEDY, HOST, PROMPT, expected_text, files


def host_blocks_of(llm: LLM) -> HostBlocks:
    model = llm.engine.model
    assert isinstance(model, HashModel)
    return model._host_blocks


def damage(blocks: HostBlocks) -> int:
    """Change one token of each host block that has content, and return how many there are."""
    contents = [content for content in blocks.contents if content is not None]
    for content in contents:
        content[1] ^= 1
    return len(contents)


def leave_in_host(llm: LLM) -> None:
    """Serve the prompt twice, then others, which take all blocks of the device."""
    for prompt in (PROMPT, PROMPT, *FILLERS):
        llm.generate(prompt, GREEDY)


def test_damaged_host_blocks_are_computed_again_and_found_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM("hash", **HOST, check_kv=True) as llm:
        leave_in_host(llm)
        assert damage(host_blocks_of(llm)) == 4
        with caplog.at_level(logging.ERROR):
            (output,) = llm.generate(PROMPT, GREEDY)
        assert output.text == expected_text()
        scheduler = llm.engine.scheduler
        assert (scheduler.num_preemptions, scheduler.num_loaded_tokens) == (1, 0)
        (again,) = llm.generate(PROMPT, GREEDY)
        assert again.text == expected_text() and again.cached_tokens == CachedTokens(device=12)
        assert scheduler.num_preemptions == 1
    (message,) = caplog.messages
    assert "has loaded content that was not stored: block" in message
    assert "from host block" in message and "test the memory of the machine" in message


def test_without_the_check_damaged_host_blocks_give_another_text() -> None:
    with LLM("hash", **HOST) as llm:
        leave_in_host(llm)
        damage(host_blocks_of(llm))
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.text != expected_text()


def test_a_recording_of_a_damaged_load_replays(tmp_path: Path) -> None:
    with LLM("hash", **HOST, check_kv=True, record=str(tmp_path / "recording")) as llm:
        leave_in_host(llm)
        damage(host_blocks_of(llm))
        llm.generate(PROMPT, GREEDY)
        llm.generate(PROMPT, GREEDY)
    lines = (tmp_path / "recording").read_text().splitlines(keepends=True)
    assert any('"void":"the model failed: DamagedBlocks' in line for line in lines)
    result = replay(lines)
    assert result.difference is None and result.is_complete


def test_blocks_that_are_not_damaged_are_loaded(tmp_path: Path) -> None:
    with LLM("hash", **files(tmp_path / "kv"), check_kv=True) as llm:
        leave_in_host(llm)
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.cached_tokens == CachedTokens(host=12) and output.text == expected_text()
    with LLM("hash", **files(tmp_path / "kv"), check_kv=True) as llm:
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.cached_tokens == CachedTokens(disk=12) and output.text == expected_text()
        assert llm.engine.scheduler.num_preemptions == 0
    with LLM("hash", **files(tmp_path / "kv")) as llm:
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.cached_tokens == CachedTokens(disk=12), "files are the same without it"


PAGES = [array("i", [block, block + 1]) for block in range(4)]


def plan_of(step: int, **moves: Any) -> StepPlan:
    return StepPlan(step, (), 4, 2, num_host_blocks=4, **moves)


def pool() -> CheckedHostBlocks:
    blocks = CheckedHostBlocks(8)
    blocks.resize(4)
    return blocks


def test_an_error_names_the_blocks_that_are_damaged() -> None:
    blocks, pages = pool(), [page[:] for page in PAGES]
    stores = tuple(HostStore(block, 3 - block) for block in range(3))
    blocks.run_moves(plan_of(0, stores=stores), pages)
    damaged = blocks.contents[2]
    assert damaged is not None
    damaged[0] += 1
    loads = (HostLoad(0, 0, 2, 1), HostLoad(0, 0, 3, 2))
    with pytest.raises(DamagedBlocks, match=r"step 7 .* block 3 from host block 2\. Nothing"):
        blocks.run_moves(plan_of(7, loads=loads), pages)


def test_a_damaged_host_block_is_written_to_no_file() -> None:
    blocks = pool()
    blocks.run_moves(plan_of(0, stores=(HostStore(1, 0), HostStore(2, 1))), PAGES)
    damaged = blocks.contents[0]
    assert damaged is not None
    damaged[0] += 1
    with pytest.raises(ValueError, match="host block 0 is damaged"):
        blocks.reader(0)()
    assert blocks.reader(1)() == PAGES[2].tobytes()


def test_what_a_file_had_is_what_is_loaded() -> None:
    """Another content was stored in the host block before, and a third one is stored after it."""
    blocks, pages = pool(), [page[:] for page in PAGES]
    blocks.run_moves(plan_of(0, stores=(HostStore(1, 0),)), pages)
    for content, fits in ((b"too short", False), (PAGES[2].tobytes(), True)):
        writer = blocks.writer(0)
        assert writer.write(memoryview(content)[:3]) and writer.write(memoryview(content)[3:])
        assert blocks.contents[0] is None and writer.complete() == fits
    blocks.run_moves(plan_of(1, loads=(HostLoad(0, 0, 3, 0),)), pages)
    assert pages[3] == PAGES[2]
    blocks.run_moves(plan_of(2, stores=(HostStore(1, 0),)), pages)
    blocks.run_moves(plan_of(3, loads=(HostLoad(0, 0, 3, 0),)), pages)
    assert pages[3] == PAGES[1]


# Random worlds.


def with_damage(
    create: Callable[[int], HostBlocks], damages: Counter[str]
) -> Callable[[RandomWorld], Any]:
    """Return a way to build engines whose host blocks are damaged in one of ten plans."""

    def build(world: RandomWorld) -> Any:
        model, recorder, engine = build_engine(world)
        blocks, rng = create(4 * world.config.block_size), Random(f"damage {world.seed}")
        run_moves = blocks.run_moves

        def damage_and_run(plan: StepPlan, pages: list[array[int]]) -> None:
            content = rng.choice(blocks.contents) if blocks.contents else None
            if content is not None and rng.random() < 0.1:
                content[rng.randrange(len(content))] ^= 1
            try:
                run_moves(plan, pages)
            except DamagedBlocks:
                damages["found"] += 1
                raise

        blocks.run_moves = damage_and_run  # type: ignore[method-assign]
        model._host_blocks = blocks
        return model, recorder, engine

    return build


@pytest.mark.long
def test_no_token_of_a_random_world_comes_from_a_damaged_host_block() -> None:
    reached: Counter[str] = Counter()
    for seed in range(25):
        create = with_damage(CheckedHostBlocks, reached)
        outcome = run_world(draw_host_world(seed), audited=True, create=create)
        reached += check_outcome(outcome)
    assert reached["found"] >= 5 and reached["length"] > 100


@pytest.mark.long
def test_without_the_check_some_tokens_of_random_worlds_do() -> None:
    num_wrong = 0
    for seed in range(25):
        outcome = run_world(draw_host_world(seed), create=with_damage(HostBlocks, Counter()))
        try:
            check_outcome(outcome)
        except AssertionError:
            num_wrong += 1
    assert num_wrong


# Options.


def test_a_check_without_host_memory_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"check_kv: .* kv_host_gib is 0\. Give kv_host_gib"):
        LLM("hash", check_kv=True)
    with pytest.raises(InvalidConfig, match="check_kv: 1 is no boolean"):
        LLM("hash", kv_host_gib=0.001, check_kv=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="kv_load_rule: 'never' is not known"):
        LLM("hash", kv_host_gib=0.001, kv_load_rule="never")


def test_a_damaged_block_is_in_no_file(tmp_path: Path) -> None:
    """Each host block is damaged as soon as it is stored, before it is written to a file."""
    with LLM("hash", **files(tmp_path / "kv"), check_kv=True) as llm:
        blocks = host_blocks_of(llm)
        run_moves = blocks.run_moves

        def run_and_damage(plan: StepPlan, pages: list[array[int]]) -> None:
            run_moves(plan, pages)
            for store in plan.stores:
                content = blocks.contents[store.host_block]
                assert content is not None
                content[0] ^= 1

        blocks.run_moves = run_and_damage  # type: ignore[method-assign]
        leave_in_host(llm)
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.text == expected_text()
        assert llm.engine.scheduler.disk_cache.num_failed_spills >= 3
    opened = BlockFiles(tmp_path / "kv", bytes(64), 10**6)
    assert opened.keys() == []
    opened.close()
