"""Soak: many random requests on one engine, some aborted; no block is lost and no memory grows.

Owns the draw of requests and aborts, the counts of completions, and the figures of `forge bench
soak`. Knows the public interface of an Engine, and of its scheduler the pool alone.

    submit ──► open (256 at most) ──► a finish reason for each choice
                  │                                ▲
                  └── abort, at a random moment ───┘
    at the end   every choice has ended once, every block is free, memory is back to its start

At intervals the pool loses half of its blocks for some steps, so that sequences are preempted.
"""

from __future__ import annotations

import heapq
import os
import random
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from forge.bench.breakdown import cuda_torch
from forge.bench.engine_driver import defaults, open_llm
from forge.bench.pairs import PlanCounter
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, draw_prompts, print_result, prompt_id_range
from forge.engine import Engine
from forge.engine_options import Options
from forge.request import Delta, Request, SamplingParams

MAX_OPEN = 256
"""Most requests in the engine at a time."""

ABORT_FRACTION = 0.3
"""Share of requests whose submission schedules the abort of an open request, some steps later."""

PROMPT_TOKENS = (1, 300)
OUTPUT_TOKENS = (1, 60)
ABORT_DELAY_STEPS = (0, 40)
"""Bounds of prompt tokens, of output tokens, and of steps until an abort; both included."""

SHRINK_STEPS = (50, 10)
"""(period, duration) in steps: the pool has half of its blocks at the end of each period."""

SHARED_PREFIX_TOKENS = 64
"""Length of the beginnings that prompts share."""

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "seed": 7},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.9, "n": 2, "logprobs": 1, "frequency_penalty": 0.2},
    {"temperature": 0.0, "prompt_logprobs": 1},
)
"""Parameters of requests, besides their length; all are equally likely."""


def soak_options(model: str, options: Options) -> Options:
    """Return the options of a soak: by default the cache is too small for all open requests."""
    soak_defaults: Options = {
        "enable_prefix_caching": True,
        "max_model_len": 512,
        "max_num_seqs": MAX_OPEN,
        "num_blocks": 600,
        "depth": 2,
    }
    return {**defaults(model, Cells.read()), **soak_defaults, **options}


class RandomRequests:
    """Draws requests with ids 0, 1, 2, ..."""

    def __init__(self, rng: random.Random, ids: tuple[int, int]) -> None:
        self._rng = rng
        self._ids = ids
        self._shared = draw_prompts(rng, 4, (SHARED_PREFIX_TOKENS, SHARED_PREFIX_TOKENS), ids)
        self.num_drawn = 0

    def draw(self) -> Request:
        """Return the next request. A quarter of the prompts share a beginning with others."""
        rng = self._rng
        (prompt,) = draw_prompts(rng, 1, PROMPT_TOKENS, self._ids)
        if rng.random() < 0.25:
            prompt[:SHARED_PREFIX_TOKENS] = rng.choice(self._shared)
        params = SamplingParams(max_tokens=rng.randint(*OUTPUT_TOKENS), **rng.choice(KINDS))
        self.num_drawn += 1
        return Request(self.num_drawn - 1, tuple(prompt), params)


class MemoryByTenth:
    """Samples of memory by tenth of the run, in MiB."""

    def __init__(self) -> None:
        self._torch = cuda_torch()
        self._host: list[list[float]] = [[] for _ in range(10)]
        self._device: list[list[float]] = [[] for _ in range(10)]

    def sample(self, done: float) -> None:
        """Sample the memory when the share `done` of the run is complete."""
        tenth = min(9, int(10 * done))
        self._host[tenth].append(resident_memory_mib())
        if self._torch is not None:
            self._device[tenth].append(self._torch.cuda.memory_allocated() / 2**20)

    def figures(self) -> dict[str, Any]:
        """Return the mean of each tenth with samples, and the last mean minus the first."""
        found: dict[str, Any] = {}
        for name, tenths in (("host_mib", self._host), ("cuda_mib", self._device)):
            means = [round(statistics.fmean(tenth), 3) for tenth in tenths if tenth]
            if means:
                found[name] = means
                found[f"{name}_grown"] = round(means[-1] - means[0], 3)
        return found


def resident_memory_mib() -> float:
    """Return the resident memory of this process in MiB; its peak where the system has no more."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class CompletionCounts:
    """Open choices, and the finish reasons of the others."""

    def __init__(self) -> None:
        self.open_choices: dict[int, set[int]] = {}
        self.by_reason: Counter[str] = Counter()
        self.num_ended = 0
        self.num_tokens = 0
        self.num_surplus = 0

    def add_request(self, request: Request) -> None:
        """Open all choices of the request."""
        self.open_choices[request.id] = set(range(request.params.n))

    def add_delta(self, delta: Delta) -> None:
        """Count the delta. One for a choice that is not open is surplus."""
        choices = self.open_choices.get(delta.request_id, set())
        if delta.choice not in choices:
            self.num_surplus += 1
            return
        self.num_tokens += len(delta.tokens)
        if delta.finish is None:
            return
        self.by_reason[delta.finish.value] += 1
        choices.remove(delta.choice)
        if not choices:
            del self.open_choices[delta.request_id]
            self.num_ended += 1


def resize_pool(engine: Engine, step: int) -> None:
    """Give the pool the number of blocks for this step."""
    total_blocks = engine.config.num_blocks
    every, length = SHRINK_STEPS
    if step % every == every - length and total_blocks // 2 >= max_request_blocks(engine):
        engine.scheduler.resize(total_blocks // 2)
    elif step % every == 0 and engine.scheduler.pool.num_blocks < total_blocks:
        engine.scheduler.resize(total_blocks)


def max_request_blocks(engine: Engine) -> int:
    """Return the blocks of the longest request that can be drawn."""
    return -(-(PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]) // engine.config.block_size)


def run_soak(engine: Engine, requests: int, seed: int) -> dict[str, Any]:
    """Run the requests until the engine has no work. Returns the figures."""
    rng = random.Random(seed)
    source = RandomRequests(rng, prompt_id_range(engine.model.vocab_size()))
    ledger = CompletionCounts()
    memory = MemoryByTenth()
    engine.model = plan_counter = PlanCounter(engine.model)
    abort_steps: list[int] = []
    step = aborts = 0
    start = time.perf_counter()
    while source.num_drawn < requests or engine.has_work:
        while source.num_drawn < requests and len(ledger.open_choices) < MAX_OPEN:
            request = source.draw()
            engine.submit(request)
            ledger.add_request(request)
            if rng.random() < ABORT_FRACTION:
                heapq.heappush(abort_steps, step + rng.randint(*ABORT_DELAY_STEPS))
        while abort_steps and abort_steps[0] <= step:
            heapq.heappop(abort_steps)
            if ledger.open_choices:
                engine.abort(rng.choice(list(ledger.open_choices)))
                aborts += 1
        resize_pool(engine, step)
        for delta in engine.step():
            ledger.add_delta(delta)
        if step % 16 == 0:
            memory.sample(ledger.num_ended / requests)
        step += 1
    memory.sample(1.0)
    engine.scheduler.resize(engine.config.num_blocks)
    pool = engine.scheduler.pool
    return {
        "requests": source.num_drawn,
        "ended": ledger.num_ended,
        "unended": len(ledger.open_choices),
        "surplus_deltas": ledger.num_surplus,
        "aborts": aborts,
        "choices": dict(sorted(ledger.by_reason.items())),
        "tokens": ledger.num_tokens,
        "steps": engine.num_steps,
        "preemptions": plan_counter.preemptions,
        "cached_tokens": engine.scheduler.num_cached_tokens,
        "lost_blocks": engine.config.num_blocks - pool.num_free_blocks,
        "seconds": round(time.perf_counter() - start, 1),
        **memory.figures(),
    }


def find_faults(figures: dict[str, Any]) -> list[str]:
    """Return one line for each fault in the figures of a run."""
    counts = {
        "blocks are lost": figures["lost_blocks"],
        "requests did not end": figures["unended"],
        "deltas came for choices that had ended": figures["surplus_deltas"],
        "choices ended in an error": figures["choices"].get("error", 0),
    }
    return [f"{count} {problem}" for problem, count in counts.items() if count]


def main(
    model: str,
    json_path: str | None,
    requests: int = 10_000,
    options: Options | None = None,
) -> int:
    """Run, print, and write the record.

    Returns 1 where something was lost. Raises InvalidConfig.
    """
    seed = Cells.read().seed
    with open_llm(model, soak_options(model, options or Options())) as (llm, shape, _):
        figures = run_soak(llm.engine, requests, seed)
    for name, value in figures.items():
        print(f"{name:<24}{value}")
    result = {"engine": "forge", "shape": shape, **figures}
    print_result(result)
    if json_path is not None:
        write_json(json_path, create_result("soak", {"seed": seed, **result}))
    faults_found = find_faults(figures)
    for complaint in faults_found:
        print(f"forge bench soak: {complaint}", file=sys.stderr)
    return 1 if faults_found else 0
