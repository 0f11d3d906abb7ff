"""Simulator speed: requests a minute of CPU time, step by step and with fast-forward.

Owns the figures of `python -m forge.bench.simulator_speed`. Each run has its own process, so that
its memory can be measured. Modes alternate, and the minimum time of each counts, because other
processes only add to it. One more run of each mode is profiled, for its log and its hot files.

    rate ──┬── caching ──┬── stepwise     requests a minute, growth of memory
           └── without ──┴── leaps        the same log; shares of the time by file

The mode `leaps` fast-forwards; records have this name.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import forge
from forge.bench.policy import yardstick_us
from forge.bench.result_file import create_result, write_json
from forge.config import EngineConfig
from forge.errors import ForgeError
from forge.sim.decision_log import DecisionLog
from forge.sim.fast_forward import run_fast_forward
from forge.sim.scenario import Scenario, summary
from forge.sim.world import World, WorldObserver

ROOT = f"{Path(forge.__file__).parent.parent}/"
SOURCE_PREFIX = f"{ROOT}forge/"
MODES = ("stepwise", "leaps")
TICK_S = 0.001
MIN_FRACTION = 0.02
"""Files below this share of the time are not listed."""
LONG_RUN_FACTOR = 4
"""Factor of the requests of a longer run, which shows whether memory grows with them."""


class SpeedCase(NamedTuple):
    """`requests` of a workload at `rate` a second."""

    workload: str
    rate: float
    requests: int
    caching: bool


def build_world(case: SpeedCase, *watchers: WorldObserver) -> World:
    """Return a world at time 0, with a cache for hundreds of the trace's requests at a time."""
    engine = EngineConfig(
        num_blocks=16_384,
        max_num_seqs=256,
        max_model_len=16_384,
        enable_prefix_caching=case.caching,
    )
    scenario = Scenario(
        workload=case.workload, rate=case.rate, requests=case.requests, engine=engine
    )
    return scenario.create_world(*scenario.create_engine(), *watchers)


def run_world(world: World, mode: str, log: DecisionLog | None = None) -> None:
    """Run the world to its end. `log` is its only observer."""
    if mode == "leaps":
        run_fast_forward(world, log)
    else:
        world.run()


def peak_memory_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_run(case: SpeedCase, mode: str) -> dict[str, Any]:
    """Return the figures of a run, and its CPU time and memory."""
    world = build_world(case)
    begin_mib, begin_s = peak_memory_mib(), time.process_time()
    run_world(world, mode)
    cpu_s = time.process_time() - begin_s
    return {
        "cpu_s": cpu_s,
        "growth_mib": peak_memory_mib() - begin_mib,
        "concurrency": world.metrics.in_system_ns / world.metrics.end_ns,
        "steps_per_request": world.num_steps / case.requests,
        "summary": summary(world),
    }


def profile_run(case: SpeedCase, mode: str) -> dict[str, Any]:
    """Return the hash of the run's log, and the share of the CPU time of each file."""
    samples: Counter[str] = Counter()

    def sample(number: int, frame: FrameType | None) -> None:
        # The time of a library counts for the file that called it.
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE_PREFIX):
            frame = frame.f_back
        if frame is not None:
            samples[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    log = DecisionLog(lambda text: None, {})
    world = build_world(case, log)
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
    run_world(world, mode, log)
    signal.setitimer(signal.ITIMER_PROF, 0)
    shares = {name: count / samples.total() for name, count in samples.most_common()}
    main_fractions = {name: share for name, share in shares.items() if share >= MIN_FRACTION}
    return {"log": log.close(), "shares": main_fractions}


def measure_case(case: SpeedCase, repeats: int) -> dict[str, Any]:
    """Return the figures of both modes, after `repeats` runs of each. Their results are equal."""
    # A new process for each run.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        repetitions = [
            {mode: processes.apply(measure_run, (case, mode)) for mode in MODES}
            for _ in range(repeats)
        ]
        profiles = {mode: processes.apply(profile_run, (case, mode)) for mode in MODES}
        long_run = processes.apply(
            measure_run, (case._replace(requests=LONG_RUN_FACTOR * case.requests), "leaps")
        )
    results = [run.pop("summary") for turn in repetitions for run in turn.values()]
    logs = {watch.pop("log") for watch in profiles.values()}
    assert len(logs) == 1 and all(result == results[0] for result in results), "modes differ"
    figures: dict[str, Any] = {"rate": case.rate, "prefix_caching": case.caching, "log": logs.pop()}
    for mode in MODES:
        best = min((turn[mode] for turn in repetitions), key=lambda run: run["cpu_s"])
        figures |= {name: best[name] for name in ("concurrency", "steps_per_request")}
        figures[mode] = {
            "requests_per_cpu_minute": 60 * case.requests / best["cpu_s"],
            "growth_mib": best["growth_mib"],
            **profiles[mode],
        }
    figures["leaps"][f"growth_mib_{LONG_RUN_FACTOR}_times_the_requests"] = long_run["growth_mib"]
    stepwise, leaps = (figures[mode]["requests_per_cpu_minute"] for mode in MODES)
    return {**figures, "speedup": leaps / stepwise}


def main(words: list[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "forge.bench.simulator_speed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workload", default="sample", help="sample, or the file of a trace")
    parser.add_argument("--rates", default="1,2.5,10,40", help="requests a second")
    parser.add_argument("--requests", type=int, default=1000, help="requests of each rate")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode; the best counts")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(words)
    print(f"{'rate':>6}{'cache':>7}{'concurrency':>13}{'steps':>7}{'stepwise':>10}{'leaps':>9}")
    found = []
    try:
        for rate in map(float, args.rates.split(",")):
            for caching in (True, False):
                case = SpeedCase(args.workload, rate, args.requests, caching)
                case_figures = measure_case(case, args.repeats)
                stepwise, leaps = (case_figures[mode]["requests_per_cpu_minute"] for mode in MODES)
                print(
                    f"{rate:>6g}{'on' if caching else 'off':>7}{case_figures['concurrency']:>13.2f}"
                    f"{case_figures['steps_per_request']:>7.1f}{stepwise:>10,.0f}{leaps:>9,.0f}"
                )
                found.append(case_figures)
    except ForgeError as error:
        print(f"forge.bench.simulator_speed: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        figures = {"yardstick_us": yardstick_us(), "requests": args.requests, "runs": found}
        write_json(args.json, create_result("simulation", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
