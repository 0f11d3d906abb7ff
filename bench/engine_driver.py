"""Engine driver: runs batches, closed loops and single steps in steady decode on an engine.

Owns the clock around an Engine and its requests. Knows no cell and no text: throughput and steps
are those of the engine, and no id is detokenized.

    batch     all are sent, until all have ended            seconds, tokens
    closed    a stream that ends is replaced at once        RequestTimes each
    steps     B sequences, one row each in every step       StepTime each

              |---------------- step_s ----------------|
              |schedule|forward|      wait      |commit|    of one Engine.step
              |------- host_s -|                |------|
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from forge.bench.shapes import SHAPES, has_no_weights, write_shape
from forge.bench.workload import Cells, RequestTimes, run_engine_closed_loop
from forge.engine import Engine
from forge.engine_options import Options
from forge.errors import InvalidConfig, RequestFailed
from forge.llm import LLM
from forge.models.embedded import EMBEDDED_CHECKPOINTS, MAX_POSITIONS
from forge.models.model_wrapper import ModelWrapper
from forge.request import Delta, Request, SamplingParams
from forge.seam import Model, PendingStep, StepOutput, StepPlan

NUM_SETTLE_STEPS = 16
"""Steps in steady decode before the first one that counts."""


def greedy(output: int) -> SamplingParams:
    """Return parameters for exactly `output` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


def defaults(model: str, cells: Cells) -> Options:
    """Return the default options of this model for the cells.

    Options that peers receive too are written the same in bench/peers.py.
    """
    options: Options = {
        "enable_prefix_caching": False,
        "max_model_len": 8192,
        "max_num_seqs": 256,
    }
    if model.partition(":")[0] == "hash":
        options["max_num_batched_tokens"] = 8192
        batches = (*cells.warm_up, *cells.throughput, *cells.mixed)
        steady = cells.steady
        # Blocks for all sequences at once: otherwise decode would not be steady.
        tokens = (
            *(batch.requests * (batch.input[1] + batch.output[1] + 64) for batch in batches),
            *(size * (steady.context + steady.steps + 64) for size in steady.batches),
        )
        options["num_blocks"] = max(16_384, *tokens) // 16 + 16
        return options
    if model in EMBEDDED_CHECKPOINTS:
        options["max_model_len"] = MAX_POSITIONS
        return options
    options["gpu_memory_utilization"] = 0.85
    if model in SHAPES or has_no_weights(model):
        options["load_format"] = "dummy"
    return options


class OpenLLM(NamedTuple):
    """An LLM, the shape's name for results, and the seconds of its start, imports included."""

    llm: LLM
    shape: str
    start_s: float


@contextmanager
def open_llm(model: str, options: Options) -> Iterator[OpenLLM]:
    """Open a shape, a folder, an id or an embedded model. Raises InvalidConfig.

    A shape is written to a temporary folder.
    """
    with ExitStack() as stack:
        name = model
        if model in SHAPES:
            root = stack.enter_context(tempfile.TemporaryDirectory())
            name = str(write_shape(model, root))
        start = time.perf_counter()
        llm = stack.enter_context(LLM(name, **options))
        seconds = time.perf_counter() - start
        yield OpenLLM(llm, os.path.basename(model.rstrip("/")), round(seconds, 1))


class StepTimer(NamedTuple):
    """A pending step whose wait is timed."""

    pending: PendingStep
    timer: ModelTimer

    def result(self) -> StepOutput:
        """Return the output, and add the wait to the timer."""
        start = time.perf_counter()
        output = self.pending.result()
        self.timer.wait_s += time.perf_counter() - start
        return output


class ModelTimer(ModelWrapper):
    """A model, with the time of its launches and of the waits for its results.

    forward_s, wait_s   seconds so far
    num_rows            rows of the last plan
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.forward_s = 0.0
        self.wait_s = 0.0
        self.num_rows = 0

    def forward(self, plan: StepPlan) -> PendingStep:
        """Launch the plan, timed."""
        self.num_rows = len(plan.rows)
        start = time.perf_counter()
        pending = self._model.forward(plan)
        self.forward_s += time.perf_counter() - start
        return StepTimer(pending, self)


class StepTime(NamedTuple):
    """Times of a step in steady decode, in seconds.

    step_s      from the end of the previous step to its own end
    host_s      inside Engine.step, without the wait for the device
    forward_s   the part of host_s inside Model.forward
    """

    step_s: float
    host_s: float
    forward_s: float


class EngineDriver:
    """Runs requests on one engine, in the caller's thread. Its ids are above those of an LLM."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next_id = 2**40

    def submit(
        self, prompt: Sequence[int], output: int, params: SamplingParams | None = None
    ) -> int:
        """Submit a request for exactly `output` tokens. Returns its id.

        params   how tokens are sampled; None: greedily
        """
        self._next_id += 1
        if params is None:
            params = greedy(output)
        else:
            params = replace(params, max_tokens=output, ignore_eos=True)
        self.engine.submit(Request(self._next_id, tuple(prompt), params))
        return self._next_id

    def step(self) -> dict[int, int]:
        """Run one step. Returns the new tokens of each request. Raises RequestFailed."""
        num_tokens_by_request: dict[int, int] = {}
        for delta in self.engine.step():
            if delta.error is not None:
                raise RequestFailed(delta.error)
            num_tokens_by_request[delta.request_id] = num_tokens_by_request.get(
                delta.request_id, 0
            ) + len(delta.tokens)
        return num_tokens_by_request

    def run_batch(self, work: Sequence[tuple[Sequence[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once.

        Returns seconds until the end, and tokens.
        """
        start = time.perf_counter()
        for prompt, output in work:
            self.submit(prompt, output)
        tokens = 0
        while self.engine.has_work:
            tokens += sum(self.step().values())
        seconds = time.perf_counter() - start
        assert tokens == sum(output for _, output in work), f"{tokens} tokens came"
        return seconds, tokens

    def run_closed_loop(
        self, prompts: Sequence[Sequence[int]], output: int, concurrency: int
    ) -> tuple[list[RequestTimes], float]:
        """Run the prompts in order, `concurrency` at a time.

        Returns request times and wall seconds.
        """
        return run_engine_closed_loop(self.submit, self.step, prompts, output, concurrency)

    @contextmanager
    def steady_decode(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Iterator[ModelTimer]:
        """Bring every prompt into decode, one row each, for as long as the longest sequence allows.

        Yields a timer of the model. All requests are aborted at the end.
        """
        config, inner = self.engine.config, self.engine.model
        max_len = min(config.max_model_len, config.num_blocks * config.block_size)
        timer = ModelTimer(inner)
        self.engine.model = timer
        ids = [self.submit(prompt, max_len - len(prompt), params) for prompt in prompts]
        try:
            waiting = set(ids)
            while waiting:
                waiting -= self.step().keys()
            for _ in range(NUM_SETTLE_STEPS):
                self.step()
            yield timer
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
            while self.engine.has_work:
                self.engine.step()
            self.engine.model = inner

    def time_steps(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        params: SamplingParams | None = None,
    ) -> list[StepTime]:
        """Return times of `count` steps in steady decode of these prompts. Raises InvalidConfig.

        params   how tokens are sampled; None: greedily

        Deltas are checked after the last step, so that nothing else runs between two steps.
        """
        clock, step = time.perf_counter, self.engine.step
        times: list[StepTime] = []
        rows: list[int] = []
        deltas_by_step: list[list[Delta]] = []
        with self.steady_decode(prompts, params) as timer:
            end = clock()
            for _ in range(count):
                forward_s, wait_s = timer.forward_s, timer.wait_s
                start = clock()
                deltas_by_step.append(step())
                before, end = end, clock()
                forward_s, wait_s = timer.forward_s - forward_s, timer.wait_s - wait_s
                times.append(StepTime(end - before, end - start - wait_s, forward_s))
                rows.append(timer.num_rows)
        for delta in chain.from_iterable(deltas_by_step):
            if delta.error is not None:
                raise RequestFailed(delta.error)
        check_num_rows(rows, len(prompts))
        return times


def check_num_rows(rows: Sequence[int], num_sequences: int) -> None:
    """Raise InvalidConfig unless every plan had a row for each of the `num_sequences` sequences."""
    if min(rows) < num_sequences:
        raise InvalidConfig(
            "num_blocks",
            f"a step of {num_sequences} sequences held {min(rows)}: the cache is too small for "
            "them",
            "Give more blocks, or measure a smaller batch",
        )
