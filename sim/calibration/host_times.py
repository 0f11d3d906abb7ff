"""Host times: planning and commit of the real scheduler, timed over a model of lengths.

Owns the waves of requests. Knows no device. The clock is an argument.

    submit + schedule | forward |  result  | commit + deliver
    |---- planning ---|                    |-- committing --|
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.model_wrapper import ModelWrapper
from forge.request import Request, SamplingParams
from forge.seam import PendingStep, StepOutput, StepPlan
from forge.sim.calibration.profiling import (
    NUM_REPEATS,
    CacheCapacity,
    ReadClock,
    row_sizes,
    subsample,
)
from forge.sim.cost.table import StepFeatures, extract_features
from forge.sim.length_model import LengthModel


class HostSample(NamedTuple):
    """The time of planning or of committing one plan, and the features of the plan."""

    work: StepFeatures
    ns: int


class _TimestampedStep(NamedTuple):
    """A pending step that notes the time of its result."""

    pending: PendingStep
    model: _TimestampingModel

    def result(self) -> StepOutput:
        output = self.pending.result()
        self.model.ready_ns.append(self.model.clock())
        return output


class _TimestampingModel(ModelWrapper):
    """A model of lengths that notes the time of each launch and of each result."""

    def __init__(self, time: ReadClock) -> None:
        super().__init__(LengthModel())
        self.clock = time
        self.launches: list[tuple[StepPlan, int]] = []
        self.ready_ns: list[int] = []

    def forward(self, plan: StepPlan) -> _TimestampedStep:
        self.launches.append((plan, self.clock()))
        return _TimestampedStep(self._model.forward(plan), self)


def measure_host(
    config: EngineConfig, clock: ReadClock, budget_ns: int
) -> tuple[list[HostSample], list[HostSample]]:
    """Return samples of planning and of committing by the real scheduler.

    Requests come in waves, with prompts of several lengths. Outputs are long enough for uniform
    steps between the first and the last request that ends.
    """
    model = _TimestampingModel(clock)
    engine = Engine(model, config)
    plans: list[HostSample] = []
    commits: list[HostSample] = []
    capacity = CacheCapacity(config)
    begun_ns, request_id = clock(), 0
    for num_rows in subsample(row_sizes(config.max_num_seqs), 8) * NUM_REPEATS:
        if plans and clock() - begun_ns > budget_ns:
            break
        max_prompt_len = min(capacity.max_len(num_rows) // 2, 2048)
        if max_prompt_len < 1:
            continue
        waiting = []
        for i in range(num_rows):
            prompt = tuple(
                range(request_id * 4096, request_id * 4096 + max(1, max_prompt_len >> (i % 5)))
            )
            max_tokens = max(1, min(8 + 2 * (i % 16), max_prompt_len))
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            waiting.append(Request(request_id, prompt, params))
            request_id += 1
        _run_wave(engine, model, waiting, plans, commits)
    return plans, commits


def _run_wave(
    engine: Engine,
    model: _TimestampingModel,
    waiting: list[Request],
    plans: list[HostSample],
    commits: list[HostSample],
) -> None:
    in_flight: list[StepFeatures] = []
    time = model.clock
    while waiting or engine.has_work:
        model.launches.clear()
        model.ready_ns.clear()
        begun_ns = time()
        for request in waiting:
            engine.submit(request)
        waiting = []
        engine.step()
        ended_ns = time()
        for plan, called_ns in model.launches:
            in_flight.append(extract_features(plan))
            plans.append(HostSample(in_flight[-1], called_ns - begun_ns))
        for ready_ns in model.ready_ns:
            commits.append(HostSample(in_flight.pop(0), ended_ns - ready_ns))


def median_samples(samples: Iterable[HostSample]) -> list[HostSample]:
    """Return one sample for each set of features, with the median time. Spans are left out."""
    found: dict[StepFeatures, list[int]] = {}
    for work, ns in samples:
        found.setdefault(work._replace(spans=()), []).append(ns)
    return [HostSample(work, round(median(times))) for work, times in found.items()]
