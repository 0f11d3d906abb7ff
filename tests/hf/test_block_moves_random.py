"""Random runs of HFModel with every tier: whatever happens to a run, no token is another one.

Pools are small, files fail or are late and are read by real threads. Requests are aborted, pools
resized, the cache reset, and steps fail. A request that ends has the tokens it would have alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.config import HostTier  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import NeverFits  # noqa: E402
from forge.invariants import PlanAudit, audit, audit_drained  # noqa: E402
from forge.models.file_moves import FileMoves  # noqa: E402
from forge.models.hf.decoders.module_decoder import register_attention  # noqa: E402
from forge.seam import StepPlan  # noqa: E402
from tests.core.worlds import FaultyStore, RecordingModel  # noqa: E402
from tests.hf.test_block_moves import DISK, TIER, engine_for, expected, turns  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    torch.set_num_threads(1)
    register_attention()
    with ThreadPoolExecutor(2) as threads:
        yield threads


def draw_tier(rng: Random) -> HostTier:
    """Draw a tier of a few or many blocks, with files in two of three cases."""
    files = replace(DISK, max_moves=rng.choice((2, 8, 64)), max_wait_plans=rng.choice((3, 20)))
    return replace(
        TIER,
        num_blocks=rng.choice((1, 5, 14, 28, 60)),
        max_moved_blocks=rng.choice((1, 4, None)),
        min_touches=rng.choice((1, 2)),
        min_loaded_blocks=rng.choice((1, 3)),
        disk=rng.choice((None, files, files)),
    )


def draw_engine(rng: Random, files: FileMoves) -> Engine:
    """Draw an engine of those pools, with a draft model in one of four cases."""
    return engine_for(
        "llama",
        draw_tier(rng),
        depth=rng.choice((1, 2)),
        blocks=rng.choice((18, 22, 30)),
        files=files,
        drafts=rng.choice((0, 0, 0, 2)),
        fails=tuple(rng.sample(range(2, 120), rng.choice((0, 0, 1, 2)))),
    )


def disturb(engine: Engine, rng: Random) -> set[int]:
    """Now and then abort, reset or resize. Return ids that were aborted."""
    scheduler, config = engine.scheduler, engine.config
    assert config.host_tier is not None
    if rng.random() < 0.01:
        engine.reset_prefix_cache()
    if rng.random() < 0.02:
        with suppress(NeverFits):
            scheduler.resize(rng.randint(14, config.num_blocks))
    if rng.random() < 0.02:
        scheduler.resize_host(rng.randint(0, config.host_tier.num_blocks))
    if rng.random() < 0.02:
        aborted = rng.randrange(12)
        engine.abort(aborted)
        return {aborted}
    return set()


def run_random(seed: int, store: FaultyStore, executor: ThreadPoolExecutor) -> list[StepPlan]:
    """Run all turns, compare each with what it would be alone, and return the plans."""
    rng = Random(f"block moves {seed}")
    lateness: Callable[..., int] = rng.choice((store.lateness, lambda step, file: 0))
    engine = draw_engine(rng, FileMoves(store, rng.choice((None, executor)), lateness))
    assert engine.config.host_tier is not None
    if engine.config.host_tier.disk is not None:
        engine.add_disk_keys(list(store.contents))
    recording = engine.model = RecordingModel(engine.model, PlanAudit(engine.scheduler))
    waiting, outputs = turns(), {i: list[Any]() for i in range(12)}
    incomplete: set[int] = set()
    while waiting or engine.has_work:
        while waiting and (rng.random() < 0.3 or not engine.has_work):
            engine.submit(waiting.pop(0))
        incomplete |= disturb(engine, rng)
        for delta in engine.step():
            outputs[delta.request_id] += [(token, None) for token in delta.tokens]
            if delta.error is not None:
                incomplete.add(delta.request_id)
        assert recording.failure is None
        audit(engine)
    audit_drained(engine)
    for id, output in outputs.items():
        complete = expected("llama")[id]
        assert output == (complete[: len(output)] if id in incomplete else complete), id
    return [entry for entry in recording.log if isinstance(entry, StepPlan)]


@pytest.mark.parametrize(
    "first",
    [
        0,
        pytest.param(10, marks=pytest.mark.long),
        *(pytest.param(10 * i, marks=pytest.mark.soak) for i in range(2, 6)),
    ],
)
def test_no_token_depends_on_tiers_whatever_happens(
    first: int, executor: ThreadPoolExecutor
) -> None:
    """Ten runs, each with the files that the ones before have written."""
    contents: dict[bytes, bytes] = {}
    plans = []
    for seed in range(first, first + 10):
        store = FaultyStore(seed)
        store.contents = contents
        plans += run_random(seed, store, executor)
        executor.submit(int).result()
    for kind in ("stores", "loads", "spills", "fetches"):
        assert sum(len(getattr(plan, kind)) for plan in plans) > 20, kind
