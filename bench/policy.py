"""Scheduling cost on a CPU: schedule and commit per step, the prior workload, and memory.

Owns the figures of `forge bench policy`. Times vary with the machine, so the check compares the
scheduler with a fixed pure-Python yardstick in the same run: tuples built and a dictionary read,
256 times, which no change to forge can speed up or slow down.

    rows     plan us   commit us   both us   per row ns     depth 1 and 2
    64 requests x 16 prompt tokens x 64 new: one at a time, and sixteen in a batch
    bytes per queued request
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc
from collections import deque
from typing import Any

from forge.bench.result_file import create_result, write_json
from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import RowOutput, StepOutput, StepPlan

ROWS = (1, 8, 64, 256)
STEPS = 400
MAX_RATIO = {1: 0.36, 256: 26.0}
"""Limits of schedule and commit at this many rows, as a multiple of the yardstick."""


def yardstick_us() -> float:
    """Return median microseconds of fixed Python code: 256 tuples of ten, 256 dictionary reads."""
    table = dict.fromkeys(range(256), (1, 2))
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        rows = []
        for key in range(256):
            pair = table[key]
            rows.append((key, 0, key, 100, pair, (), 7, (), 1, None))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _create_output(plan: StepPlan) -> StepOutput:
    return StepOutput(plan.step, tuple(RowOutput((5,)) for _ in plan.rows))


def measure_step_cost(rows: int, depth: int) -> dict[str, float]:
    """Return microseconds to schedule and to commit a step of `rows` rows, median over STEPS.

    All rows are decode rows. Sequences differ by up to 15 tokens in length, so that new blocks
    spread over steps as in serving.
    """
    config = EngineConfig(
        num_blocks=rows * 64,
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows * 40),
        max_model_len=4096,
    )
    scheduler = Scheduler(config, vocab_size=1000, end_ids=(0,))
    for i in range(rows):
        prompt = (i, *range(15 + i % 16))  # unique: a shared prefix would delay admission
        scheduler.add(Request(i, prompt, SamplingParams(max_tokens=STEPS + 100)))
    in_flight: deque[StepPlan] = deque()
    plan_s, commit_s = [], []
    for step in range(STEPS + 10):
        start = time.perf_counter()
        plan = scheduler.schedule()
        plan_end = time.perf_counter()
        assert plan is not None and len(plan.rows) == rows, f"step {step} is not a full batch"
        in_flight.append(plan)
        if len(in_flight) < depth:
            continue
        oldest = in_flight.popleft()
        output = _create_output(oldest)
        commit_start = time.perf_counter()
        scheduler.commit(oldest, output)
        commit_end = time.perf_counter()
        if step >= 10:
            plan_s.append(plan_end - start)
            commit_s.append(commit_end - commit_start)
    total_s = sorted(a + b for a, b in zip(plan_s, commit_s, strict=True))
    return {
        "plan_us": statistics.median(plan_s) * 1e6,
        "commit_us": statistics.median(commit_s) * 1e6,
        "both_us": statistics.median(total_s) * 1e6,
        "mean_us": statistics.fmean(total_s) * 1e6,
        "p99_us": total_s[int(len(total_s) * 0.99)] * 1e6,
        "per_row_ns": statistics.median(total_s) * 1e9 / rows,
    }


def run_prior_workload(batch: int) -> dict[str, float]:
    """Run 64 requests x 16 prompt tokens x 64 new tokens, greedy, `batch` at a time."""
    model = HashModel(vocab_size=320, num_blocks=2048)
    config = EngineConfig(num_blocks=2048, max_num_seqs=batch)
    engine = Engine(model, config)
    tokens = 0
    start = time.perf_counter()
    for i in range(64):
        prompt = tuple((7 * i + 3 * j) % 200 + 1 for j in range(16))
        engine.submit(Request(i, prompt, SamplingParams(temperature=0.0, max_tokens=64)))
    while engine.has_work:
        tokens += sum(len(delta.tokens) for delta in engine.step())
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "steps": engine.num_steps,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ms_per_request": seconds * 1000 / 64,
        "peak_blocks": engine.scheduler.pool.peak_used_blocks,
    }


def measure_queued_bytes(prompt_len: int, count: int = 2000) -> float:
    """Return the bytes of a waiting request of `prompt_len` tokens, its prompt included."""
    scheduler = Scheduler(EngineConfig(num_blocks=4096), vocab_size=1000, end_ids=(0,))
    gc.collect()
    tracemalloc.start()
    for i in range(count):
        scheduler.add(Request(i, tuple(range(prompt_len))))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / count


def measure() -> dict[str, Any]:
    """Return all figures. The yardstick runs before and after; the slower one counts."""
    before = yardstick_us()
    steps = {f"{rows} rows, depth {d}": measure_step_cost(rows, d) for rows in ROWS for d in (1, 2)}
    yardstick = max(before, yardstick_us())
    return {
        "yardstick_us": yardstick,
        "steps": steps,
        "ratio_to_yardstick": {
            str(rows): steps[f"{rows} rows, depth 1"]["both_us"] / yardstick for rows in ROWS
        },
        "prior_workload": {"sequential": run_prior_workload(1), "batched": run_prior_workload(16)},
        "queued_request_bytes": {str(n): measure_queued_bytes(n) for n in (16, 1000)},
    }


def find_regressions(figures: dict[str, Any]) -> list[str]:
    """Return one line for each ratio above its limit."""
    ratios = figures["ratio_to_yardstick"]
    return [
        f"{rows} rows cost {ratios[str(rows)]:.2f} yardsticks, at most {limit} are allowed"
        for rows, limit in MAX_RATIO.items()
        if ratios[str(rows)] > limit
    ]


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"{'step of':<18}{'plan us':>9}{'commit us':>11}{'both us':>9}{'p99 us':>9}{'ns/row':>9}")
    for name, cost in figures["steps"].items():
        print(
            f"{name:<18}{cost['plan_us']:>9.1f}{cost['commit_us']:>11.1f}{cost['both_us']:>9.1f}"
            f"{cost['p99_us']:>9.1f}{cost['per_row_ns']:>9.0f}"
        )
    ratios = ", ".join(f"{n} rows {r:.2f}" for n, r in figures["ratio_to_yardstick"].items())
    print(f"yardstick {figures['yardstick_us']:.1f} us; step as a multiple of it: {ratios}\n")
    print("64 requests x 16 prompt tokens x 64 new, hash model, model time included")
    for name, run in figures["prior_workload"].items():
        print(
            f"{name:<12}{run['tokens']:>6} tokens {run['steps']:>5} steps "
            f"{run['tokens_per_s']:>9,.0f} tokens/s {run['ms_per_request']:>7.2f} ms/request"
        )
    for tokens, size in figures["queued_request_bytes"].items():
        print(f"a queued request of {tokens} tokens keeps {size:,.0f} bytes")


def main(json_path: str | None, check: bool) -> int:
    """Measure, print, and write the record. Returns 1 if `check` finds a limit exceeded."""
    figures = measure()
    show(figures)
    if json_path is not None:
        write_json(json_path, create_result("policy", figures))
    regressions = find_regressions(figures) if check else []
    for complaint in regressions:
        print(f"forge bench policy: {complaint}", file=sys.stderr)
    return 1 if regressions else 0
