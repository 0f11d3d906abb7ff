"""A live film folds to the engine's state after each of its lines, whatever steps it merges.

Random worlds have all depths, forks, resizes, speculation, tiers and faults.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import count

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.film.difference import add_rows
from forge.film.live import MAX_PAUSE_NS, LiveFilm
from forge.film.state import FilmState, Line
from forge.models.hash import HashModel
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import Row, StepPlan
from tests.core.worlds import (
    RandomWorld,
    RecordingModel,
    build_displacing_engine,
    draw_world,
    run_world,
)


def assert_fold_is_the_engine(fold: FilmState, scheduler: Scheduler) -> None:
    """Compare tables, blocks, slots and queue."""
    pool = scheduler.pool
    assert fold.tables == {s: table.blocks for s, table in pool.tables.items()}
    assert fold.num_tokens == {s: table.num_tokens for s, table in pool.tables.items()}
    assert fold.published == set(pool.published_blocks)
    assert len(fold.cached) == pool.num_cached_blocks
    assert (fold.num_blocks, fold.next_block) == (pool.num_blocks, pool.next_free_block)
    assert fold.waiting == [sequence.id for sequence in scheduler.waiting]
    assert fold.live.keys() == scheduler.sequences.keys()
    assert all(fold.epochs[s.id] == s.epoch for s in scheduler.sequences.values())
    slots = {s.id: s.slot for s in scheduler.running.values()}
    assert fold.slots.items() <= slots.items()
    assert fold.num_host_blocks == scheduler.host_cache.num_held_blocks
    assert fold.num_files == scheduler.disk_cache.num_files


class FoldedFilm(LiveFilm):
    """A live film that two readers fold: one from the start, and one that joins at `join_step`."""

    def __init__(self, scheduler: Scheduler, share: float, join_step: int) -> None:
        clock = count(0, 1000)  # a line costs as many calls as it makes
        super().__init__(scheduler, lambda: next(clock), share)
        self.scheduler = scheduler
        self.folds: list[FilmState | None] = [None, None]
        self.lines: list[Line] = []
        self._join_step = join_step
        self.add_keyframe()

    def record_plan(self, plan: StepPlan | None) -> None:
        if plan is not None and plan.step == self._join_step:
            self.add_keyframe()
        super().record_plan(plan)
        self.fold_lines()

    def fold_lines(self) -> None:
        """Fold the lines as they are read back, and compare after each line of a plan."""
        lines = json.loads(json.dumps(self.take_lines()))
        has_changes = False
        for line in lines:
            self.lines.append(line)
            has_changes |= "totals" in line
            is_late = len(self.folds) and self.folds[0] is not None and "key" in line
            for index, fold in enumerate(self.folds):
                if fold is not None:
                    if "key" not in line:
                        fold.apply(line)
                elif "key" in line and (index == 0 or is_late):
                    self.folds[index] = fold = FilmState({"blocks": 0, "next": None})
                    fold.apply(line)
        if has_changes:
            for fold in self.folds:
                if fold is not None:
                    assert_fold_is_the_engine(fold, self.scheduler)


def film_world(world: RandomWorld, share: float, join_step: int) -> FoldedFilm:
    """Run a world with a live film."""
    films: list[FoldedFilm] = []

    def create(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, engine = build_displacing_engine(world)
        films.append(FoldedFilm(engine.scheduler, share, join_step))
        engine.recorder = films[0]
        return model, recorder, engine

    run_world(world, create=create)
    films[0].finish_steps()
    films[0].fold_lines()
    return films[0]


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, 100), marks=pytest.mark.long)],
    ids=["first", "further"],
)
@pytest.mark.parametrize("share", [1.0, 0.2], ids=["each step", "merged steps"])
def test_a_live_film_of_a_random_world_folds_to_the_engine(seeds: range, share: float) -> None:
    reached = Counter[str]()
    for seed in seeds:
        try:
            film = film_world(draw_world(seed), share, join_step=seed % 9)
        except BaseException as failure:
            failure.add_note(f"world {seed}: film_world(draw_world({seed}), {share}, {seed % 9})")
            raise
        reached.update(name for line in film.lines for name in line)
        reached["late fold"] += film.folds[1] is not None
    print(dict(reached))
    names = ("arrive", "left", "ended", "free", "open", "grow", "tokens", "evict", "publish")
    more = ("wait", "preempted", "copies", "resize", "reset", "void", "late fold")
    assert not [name for name in (*names, *more) if not reached[name]]
    assert bool(reached["steps"]) == (share < 1)


@pytest.mark.parametrize("seed", range(5))
def test_merged_steps_lose_no_event(seed: int) -> None:
    world = draw_world(seed)
    names = ("admitted", "preempted", "copies", "ended")
    each, merged = (film_world(world, share, join_step=-1).lines for share in (1.0, 0.2))
    for name in names:
        events = [event for line in each for event in line.get(name, ())]
        found = [event for line in merged for event in line.get(name, ())]
        assert sorted(found) == sorted(events) and (events or name in ("copies", "preempted"))


def test_a_row_of_one_token_after_a_preemption_names_its_slot() -> None:
    """A table that was freed and opened again at the same length: the reader has forgotten it."""
    state = FilmState({"blocks": 4, "next": 0})
    state.slots[7], state.num_tokens[7], state.plan_seq_ids = 0, 5, [7]
    row = Row(7, 0, 0, 5, (1,), num_samples=1)
    plan = StepPlan(3, (row,), 4, 4)
    for freed, rows in (({}, None), ({"free": [7]}, [[7, 0, 5, 1, 0, 1]])):
        line: Line = dict(freed)
        add_rows(line, state, plan)
        assert line.get("rows") == rows


def test_a_film_that_fails_ends_no_step_and_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its state is damaged twice, as by an error of the film: a later line has the whole state."""
    config = EngineConfig(num_blocks=16, block_size=2, max_num_seqs=2)
    engine = Engine(HashModel(vocab_size=9, num_blocks=16, block_size=2), config)
    film = LiveFilm(engine.scheduler, count(0, MAX_PAUSE_NS).__next__, share=1.0)
    engine.recorder = film
    film.add_keyframe()
    engine.submit(Request(0, (1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True)))
    for num_failures in (1, 2):
        engine.step()
        assert film._state is not None
        film._state.epochs.clear()
        film.take_lines()
        for _ in range(3):
            engine.step()
        lines = json.loads(json.dumps(film.take_lines()))
        fold = FilmState({"blocks": 0, "next": None})
        for line in lines[[("key" in line) for line in lines].index(True) :]:
            fold.apply(line)
        film.finish_steps()
        for line in film.take_lines():
            fold.apply(line)
        assert_fold_is_the_engine(fold, engine.scheduler)
        assert len(caplog.records) == num_failures and "the film" in caplog.text
