"""A film's lines fold to the pool: tables, cached blocks, used blocks and queue, after every line.

Random worlds have all depths, forks, resizes, speculation, tiers and faults, and policies that
displace running sequences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.film.recorder import FilmRecorder, film_header
from forge.film.state import FilmState, Line
from forge.models.hash import HashModel
from forge.pause import PauseMode
from forge.request import Request, SamplingParams
from forge.scheduler import DISPLACED
from forge.weights import NamedWeights
from tests.core.worlds import (
    RandomWorld,
    RecordingModel,
    build_displacing_engine,
    draw_world,
    run_world,
)
from tests.film.engine_checks import Checks, engine_state

REACHED = (
    *("copies", "preempted", "resize", "reset", "void", "kept", "gained", "grow", "publish"),
    *("evict", "free", "wait", "loads", "left", "key", DISPLACED),
)


class FoldCheck:
    """Folds the lines of an engine's film, and compares the state with the engine's.

    states   what the engine was after each plan
    """

    def __init__(self, engine: Engine) -> None:
        self.lines: list[Line] = []
        self.states: list[Checks] = []
        self.engine = engine
        clock = count(0, 1000)
        header = film_header(engine.scheduler, "a world", "fcfs", "host")
        self.fold = FilmState(header)
        self.recorder = FilmRecorder(self.add, engine.scheduler, lambda: next(clock), header)
        engine.recorder = self.recorder

    def add(self, line: Line) -> None:
        """Keep a line as it is read back, fold it, and compare the fold with the engine."""
        copy = json.loads(json.dumps(line))
        self.lines.append(copy)
        if "film" not in copy:
            self.fold.apply(copy)
        if not copy.keys() & {"film", "key"}:  # the state before the next line
            self.check()
        if "plan" in copy:
            self.states.append(engine_state(self.engine.scheduler))

    def check(self) -> None:
        """Assert that the fold is the state of the engine."""
        scheduler, fold = self.engine.scheduler, self.fold
        pool = scheduler.pool
        assert fold.tables == {s: table.blocks for s, table in pool.tables.items()}
        assert fold.num_tokens == {s: table.num_tokens for s, table in pool.tables.items()}
        assert fold.used == {b for b in range(pool.num_blocks) if pool.ref_count(b)}
        published = {b for b in range(pool.num_blocks) if pool.hash_of(b) is not None}
        assert (fold.published, len(fold.cached)) == (published, pool.num_cached_blocks)
        assert fold.num_blocks == pool.num_blocks
        assert fold.next_block == next(iter(pool.free_blocks), None)
        assert fold.waiting == [sequence.id for sequence in scheduler.waiting]
        slots = {s.id: s.slot for s in scheduler.running.values()}
        assert fold.slots.items() <= slots.items()
        assert fold.num_host_blocks == scheduler.host_cache.num_held_blocks
        assert fold.num_files == scheduler.disk_cache.num_files


def film_world(world: RandomWorld) -> FoldCheck:
    """Run a world with a film that is compared with the engine after every line."""
    checks: list[FoldCheck] = []

    def create(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, engine = build_displacing_engine(world)
        checks.append(FoldCheck(engine))
        return model, recorder, engine

    run_world(world, create=create)
    return checks[0]


def reached_by(seeds: Iterable[int]) -> Counter[str]:
    """Return how often each name occurs in the lines of these worlds."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        try:
            for line in film_world(draw_world(seed)).lines:
                reached.update(line.keys())
                reached.update(why for _, why in line.get("preempted", ()))
        except BaseException as failure:
            failure.add_note(f"world {seed}: film_world(draw_world({seed}))")
            raise
    return reached


@pytest.mark.parametrize(
    "seeds",
    [(*range(13), 88, 258), pytest.param(range(15, 95), marks=pytest.mark.long)],
    ids=["first", "further"],
)
def test_the_folded_film_of_a_random_world_is_the_pool_after_every_line(
    seeds: Sequence[int],
) -> None:
    """In 88 a call without a plan evicts a block; in 258 a sequence loads alongside decode rows."""
    reached = reached_by(seeds)
    print(dict(reached))
    assert not [name for name in REACHED if name != "key" and not reached[name]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_pauses_new_weights_and_sleep_are_filmed(mode: PauseMode, depth: int) -> None:
    """The fold is compared after each call: the content of all blocks is dropped within one."""
    config = EngineConfig(num_blocks=16, block_size=2, max_num_seqs=4, depth=depth)
    engine = Engine(HashModel(vocab_size=9, num_blocks=16, block_size=2), config)
    check = FoldCheck(engine)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.submit(Request(0, (1, 2, 3, 4, 5), params))
    for _ in range(3):
        engine.step()
        check.check()
    engine.submit(Request(1, (1, 2, 3, 4), params))
    for act in (
        lambda: engine.pause(mode),
        lambda: engine.update_weights(NamedWeights({"seed": 7}), "v2", namespace="v2"),
        lambda: engine.sleep(1),
        engine.wake,
        engine.resume,
    ):
        act()
        check.check()
    while engine.can_step:
        engine.step()
        check.check()
    names = {name for line in check.lines for name in line}
    assert names >= {"pause", "resume", "weights", "sleep", "reset", "publish"}
