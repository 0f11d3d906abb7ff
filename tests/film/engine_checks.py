"""What the engine was at frames of a film, for the page to compare itself with.

Owns the shape of the checks that `#selftest` reads. The states are read from the pool and the
queue, not from the film.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from forge.engine import Engine
from forge.film.state import Line
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sim.reports.film import WorldFilm
from forge.sim.scenario import Scenario
from forge.sim.world import World

Checks = dict[str, Any]


class CheckedFilm(NamedTuple):
    """A film, and what the engine was."""

    lines: list[Line]
    checks: Checks
    world: World


class _CheckingFilm(WorldFilm):
    """A film that keeps the state of the engine after every n-th plan."""

    def __init__(self, engine: Engine, every: int) -> None:
        super().__init__(engine, "checked", "fcfs")
        self.states: list[Checks] = []
        self._engine = engine
        self._every = every
        self._num_frames = 0

    def record_plan(self, plan: StepPlan | None) -> None:
        super().record_plan(plan)
        if plan is not None:
            if self._num_frames % self._every == 0:
                state = engine_state(self._engine.scheduler)
                self.states.append({"at": self._num_frames, "state": state})
            self._num_frames += 1


def engine_state(scheduler: Scheduler) -> Checks:
    """Return tables, blocks and queue as the page writes them."""
    pool = scheduler.pool
    used = [b for b in range(pool.num_blocks) if pool.ref_count(b)]
    cached = [b for b in range(pool.num_blocks) if not pool.ref_count(b) and pool.hash_of(b)]
    return {
        "tables": [[s, list(pool.tables[s].blocks)] for s in sorted(pool.tables)],
        "used": used,
        "cached": cached,
        "waiting": [sequence.id for sequence in scheduler.waiting],
        "next": next(iter(pool.free_blocks), None),
    }


def film_with_checks(scenario: Scenario, every: int = 1) -> CheckedFilm:
    """Run a scenario, and return its film with the states and figures of the engine."""
    films: list[_CheckingFilm] = []

    def create_observers(engine: Engine) -> list[_CheckingFilm]:
        films.append(_CheckingFilm(engine, every))
        return films

    world = scenario.run(create_observers=create_observers)
    film, scheduler, metrics = films[0], world.engine.scheduler, world.metrics
    num_frames = sum("plan" in line for line in film.lines)
    film.states.append({"at": num_frames, "state": engine_state(scheduler)})
    values = {
        "ttft_p50": metrics.ttft.quantile_ns(0.5) / 1000,
        "ttft_p99": metrics.ttft.quantile_ns(0.99) / 1000,
        "itl_p50": metrics.itl.quantile_ns(0.5) / 1000,
        "itl_p99": metrics.itl.quantile_ns(0.99) / 1000,
        "output": metrics.num_output_tokens,
        "preempted": scheduler.num_preemptions,
        "evicted": scheduler.pool.num_evictions,
        "copies": scheduler.pool.num_copies,
        "kept": scheduler.num_accepted_tokens,
    }
    figures = [{"at": num_frames, "name": name, "value": value} for name, value in values.items()]
    return CheckedFilm(film.lines, {"states": film.states, "figures": figures}, world)
