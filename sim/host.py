"""Host: what the real scheduler takes to plan and to commit, timed over a model of lengths.

Owns the waves of requests that it is given. Knows no device. The clock is an argument.

    submit + schedule | forward |  result  | commit + tell
    |---- planning ---|                    |-- committing --|
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.around import Around
from forge.request import Request, SamplingParams
from forge.seam import PendingStep, StepOutput, StepPlan
from sim.lengths import LengthModel
from sim.profiling import REPEATS, Room, Time, few, row_sizes
from sim.table import Work, work_of


class HostSample(NamedTuple):
    """One thing that the host has done for a plan, and what it took."""

    work: Work
    ns: int


class _Stopped(NamedTuple):
    """A step whose wait does not count."""

    pending: PendingStep
    watch: _Watch

    def result(self) -> StepOutput:
        output = self.pending.result()
        self.watch.ready_ns.append(self.watch.time())
        return output


class _Watch(Around):
    """A model of lengths that notes the plans it is given, when, and when each result was there."""

    def __init__(self, time: Time) -> None:
        super().__init__(LengthModel())
        self.time = time
        self.plans: list[tuple[StepPlan, int]] = []
        self.ready_ns: list[int] = []

    def forward(self, plan: StepPlan) -> _Stopped:
        self.plans.append((plan, self.time()))
        return _Stopped(self._model.forward(plan), self)


def host_samples(
    config: EngineConfig, time: Time, budget_ns: int
) -> tuple[list[HostSample], list[HostSample]]:
    """What planning took and what committing took, by the real scheduler over no model.

    Waves of requests, each of so many at once: prompts of several lengths, outputs long enough for
    quiet steps between the first and the last that ends.
    """
    watch = _Watch(time)
    engine = Engine(watch, config)
    plans: list[HostSample] = []
    commits: list[HostSample] = []
    room = Room(config)
    begun_ns, number = time(), 0
    for rows in few(row_sizes(config.max_num_seqs), 8) * REPEATS:
        if plans and time() - begun_ns > budget_ns:
            break
        longest = min(room.longest(rows) // 2, 2048)
        if longest < 1:
            continue
        waiting = []
        for i in range(rows):
            prompt = tuple(range(number * 4096, number * 4096 + max(1, longest >> (i % 5))))
            most = max(1, min(8 + 2 * (i % 16), longest))
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            waiting.append(Request(number, prompt, params))
            number += 1
        _wave(engine, watch, waiting, plans, commits)
    return plans, commits


def _wave(
    engine: Engine,
    watch: _Watch,
    waiting: list[Request],
    plans: list[HostSample],
    commits: list[HostSample],
) -> None:
    flying: list[Work] = []
    time = watch.time
    while waiting or engine.has_work:
        watch.plans.clear()
        watch.ready_ns.clear()
        begun_ns = time()
        for request in waiting:
            engine.submit(request)
        waiting = []
        engine.step()
        ended_ns = time()
        for plan, called_ns in watch.plans:
            flying.append(work_of(plan))
            plans.append(HostSample(flying[-1], called_ns - begun_ns))
        for ready_ns in watch.ready_ns:
            commits.append(HostSample(flying.pop(0), ended_ns - ready_ns))


def middles(samples: Iterable[HostSample]) -> list[HostSample]:
    """One for each work, whichever rows have its positions: the median of what it took."""
    found: dict[Work, list[int]] = {}
    for work, ns in samples:
        found.setdefault(work._replace(spans=()), []).append(ns)
    return [HostSample(work, round(median(times))) for work, times in found.items()]
