"""Time of the engine's thread a step, without a page and with one: python -m tests.film.live_cost.

Owns the load: as many requests as rows, 50 to 350 output tokens each, and one that arrives for each
that ends. Engines with and without a page take turns, so that a busy machine slows both. Time in
the model is not counted. That of the page has what the engine's process does: lines, and pickling.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from itertools import count
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.film_attachment import FilmAttachment
from forge.models.hash import HashModel
from forge.recorder_chain import RecorderChain
from forge.request import Request, SamplingParams
from forge.seam import PendingStep, RowOutput, StepOutput, StepPlan

NUM_BLOCKS = 10_000
STEPS_PER_TURN = 20


class TimedModel(HashModel):
    """A HashModel whose steps wait for `step_ns` instead of hashing, and that counts its time."""

    def __init__(self, step_ns: int) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=16)
        self.ns = 0
        self._duration_ns = step_ns

    def forward(self, plan: StepPlan) -> PendingStep:
        """Wait, and return the same token for each row."""
        begin_ns = time.perf_counter_ns()
        rows = tuple(RowOutput((7,) if row.num_samples else ()) for row in plan.rows)
        time.sleep(self._duration_ns / 1e9)
        self.ns += time.perf_counter_ns() - begin_ns
        return FinishedStep(StepOutput(plan.step, rows))


class FinishedStep(NamedTuple):
    """A step whose result is there."""

    output: StepOutput

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def result(self) -> StepOutput:
        """Return the result."""
        return self.output


class Load:
    """An engine at a constant number of rows.

    num_bytes   of the lines that were pickled
    """

    def __init__(self, num_rows: int, step_ns: int, *, num_pages: int) -> None:
        config = EngineConfig(
            num_blocks=NUM_BLOCKS, max_num_seqs=num_rows, max_num_batched_tokens=8192
        )
        self.model = TimedModel(step_ns)
        self.engine = Engine(self.model, config)
        self.film = FilmAttachment(self.engine, RecorderChain(self.engine), time.perf_counter_ns)
        for _ in range(num_pages):
            self.film.open()
        self._random = random.Random(7)
        self._ids = count()
        self.num_bytes = self.num_lines = 0
        for _ in range(num_rows):
            self._submit()

    def _submit(self) -> None:
        prompt = tuple(self._random.choices(range(256), k=64))
        params = SamplingParams(max_tokens=self._random.randint(50, 350), ignore_eos=True)
        self.engine.submit(Request(next(self._ids), prompt, params))

    def run(self, num_steps: int) -> float:
        """Run steps, and return the host's microseconds of each on average."""
        before_ns, begin_ns = self.model.ns, time.perf_counter_ns()
        for _ in range(num_steps):
            deltas = self.engine.step()
            lines = self.film.take_lines()
            if lines:
                self.num_bytes += len(pickle.dumps(lines))
                self.num_lines += len(lines)
            for delta in deltas:
                if delta.finish is not None:
                    self._submit()
        host_ns = time.perf_counter_ns() - begin_ns - (self.model.ns - before_ns)
        return host_ns / num_steps / 1000


class Cost(NamedTuple):
    """Host microseconds a step without and with a page, the step's, and lines a step."""

    without_us: float
    with_us: float
    step_us: float
    lines: float

    @property
    def share(self) -> float:
        """What the page adds, as a share of the step."""
        return (self.with_us - self.without_us) / self.step_us


def measure(num_rows: int, step_ms: float, num_turns: int) -> Cost:
    """Return means over the middle half of the turns."""
    step_ns = int(step_ms * 1e6)
    loads = [Load(num_rows, step_ns, num_pages=pages) for pages in (0, 1)]
    times: list[list[float]] = [[], []]
    for load in loads:
        load.run(2 * STEPS_PER_TURN)
    begin_ns = time.perf_counter_ns()
    for _ in range(num_turns):
        for load, us in zip(loads, times, strict=True):
            us.append(load.run(STEPS_PER_TURN))
    without_us, with_us = (sum(us) / len(us) for us in map(_without_outliers, times))
    step_us = (time.perf_counter_ns() - begin_ns) / (2000 * STEPS_PER_TURN * num_turns)
    num_steps = STEPS_PER_TURN * (num_turns + 2)
    return Cost(without_us, with_us, step_us, loads[1].num_lines / num_steps)


def _without_outliers(values: list[float]) -> list[float]:
    """Return the middle half."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def main() -> None:
    """Print a row for each number of rows and time of a step."""
    num_turns = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for step_ms in (5.0, 20.0):
        for num_rows in (16, 64, 256):
            cost = measure(num_rows, step_ms, num_turns)
            print(
                f"{num_rows} rows: a step takes {cost.step_us:.0f} us, of which the host "
                f"{cost.without_us:.0f} without a page and {cost.with_us:.0f} with one, "
                f"{100 * cost.share:.1f} % more; {cost.lines:.2f} lines a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
