"""How fast the simulator is: requests a minute of CPU time, step by step and in leaps.

Owns the figures of `python -m bench.simulation`. Each run has a process to itself, so that its
memory is its own. Ways take turns, and of each the least time counts: others on the machine only
add to it. One more run of each is watched instead of timed, for its log and for what is at work.

    rate ──┬── caching ──┬── stepwise     requests a minute, growth of memory
           └── without ──┴── leaps        the same log; shares of the time by file
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

from bench.policy import yardstick_us
from bench.record import record, write
from forge.config import EngineConfig
from forge.errors import ForgeError
from sim.leap import run_leaping
from sim.log import Log
from sim.scenario import Scenario, summary
from sim.world import Watcher, World

ROOT = f"{Path(__file__).resolve().parent.parent}/"
OURS = (f"{ROOT}forge/", f"{ROOT}sim/")
WAYS = ("stepwise", "leaps")
TICK_S = 0.001
LEAST_SHARE = 0.02
"""Files at work for less of the time are not listed."""
LONGER = 4
"""A run of so many times the requests shows whether memory grows with them."""


class Case(NamedTuple):
    """`requests` of a workload come at `rate` a second."""

    workload: str
    rate: float
    requests: int
    caching: bool


def world_of(case: Case, *watchers: Watcher) -> World:
    """At time 0, with a cache for hundreds of the trace's requests at a time."""
    engine = EngineConfig(
        num_blocks=16_384,
        max_num_seqs=256,
        max_model_len=16_384,
        enable_prefix_caching=case.caching,
    )
    scenario = Scenario(
        workload=case.workload, rate=case.rate, requests=case.requests, engine=engine
    )
    return scenario.world(*scenario.timed_engine(), *watchers)


def finish(world: World, way: str, log: Log | None = None) -> None:
    """The world is at its end. `log` is its only watcher."""
    if way == "leaps":
        run_leaping(world, log)
    else:
        world.run()


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(case: Case, way: str) -> dict[str, Any]:
    """What came of the run, and what it took."""
    world = world_of(case)
    begin_mib, begin_s = peak_mib(), time.process_time()
    finish(world, way)
    cpu_s = time.process_time() - begin_s
    return {
        "cpu_s": cpu_s,
        "growth_mib": peak_mib() - begin_mib,
        "concurrency": world.measures.holding_ns / world.measures.end_ns,
        "steps_per_request": world.num_steps / case.requests,
        "summary": summary(world),
    }


def watched(case: Case, way: str) -> dict[str, Any]:
    """The hash of the run's log, and which share of the CPU's time each file was at work."""
    found: Counter[str] = Counter()

    def tick(number: int, frame: FrameType | None) -> None:
        # What a library does, it does for the file that called it.
        while frame is not None and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None:
            found[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    log = Log(lambda text: None, {})
    world = world_of(case, log)
    signal.signal(signal.SIGPROF, tick)
    signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
    finish(world, way, log)
    signal.setitimer(signal.ITIMER_PROF, 0)
    shares = {name: count / found.total() for name, count in found.most_common()}
    listed = {name: share for name, share in shares.items() if share >= LEAST_SHARE}
    return {"log": log.close(), "shares": listed}


def figures_of(case: Case, repeats: int) -> dict[str, Any]:
    """Of both ways, after as many runs of each. They have come to the same."""
    # Another process for each run.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        turns = [{way: processes.apply(timed, (case, way)) for way in WAYS} for _ in range(repeats)]
        seen = {way: processes.apply(watched, (case, way)) for way in WAYS}
        longer = processes.apply(timed, (case._replace(requests=LONGER * case.requests), "leaps"))
    results = [run.pop("summary") for turn in turns for run in turn.values()]
    logs = {watch.pop("log") for watch in seen.values()}
    assert len(logs) == 1 and all(result == results[0] for result in results), "leaps differ"
    told: dict[str, Any] = {"rate": case.rate, "prefix_caching": case.caching, "log": logs.pop()}
    for way in WAYS:
        best = min((turn[way] for turn in turns), key=lambda run: run["cpu_s"])
        told |= {name: best[name] for name in ("concurrency", "steps_per_request")}
        told[way] = {
            "requests_per_cpu_minute": 60 * case.requests / best["cpu_s"],
            "growth_mib": best["growth_mib"],
            **seen[way],
        }
    told["leaps"][f"growth_mib_{LONGER}_times_the_requests"] = longer["growth_mib"]
    stepwise, leaps = (told[way]["requests_per_cpu_minute"] for way in WAYS)
    return {**told, "speedup": leaps / stepwise}


def main(words: list[str] | None = None) -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser("bench.simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default="sample", help="sample, or the file of a trace")
    parser.add_argument("--rates", default="1,2.5,10,40", help="requests a second")
    parser.add_argument("--requests", type=int, default=1000, help="how many of each rate")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the best counts")
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args(words)
    print(f"{'rate':>6}{'cache':>7}{'concurrency':>13}{'steps':>7}{'stepwise':>10}{'leaps':>9}")
    found = []
    try:
        for rate in map(float, args.rates.split(",")):
            for caching in (True, False):
                case = Case(args.workload, rate, args.requests, caching)
                told = figures_of(case, args.repeats)
                stepwise, leaps = (told[way]["requests_per_cpu_minute"] for way in WAYS)
                print(
                    f"{rate:>6g}{'on' if caching else 'off':>7}{told['concurrency']:>13.2f}"
                    f"{told['steps_per_request']:>7.1f}{stepwise:>10,.0f}{leaps:>9,.0f}"
                )
                found.append(told)
    except ForgeError as refused:
        print(f"bench.simulation: {refused}", file=sys.stderr)
        return 1
    if args.json is not None:
        figures = {"yardstick_us": yardstick_us(), "requests": args.requests, "runs": found}
        write(args.json, record("simulation", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
