"""An hour of a loaded server: streams, clients that leave, and hostile requests now and then.

    python -m tests.soak.run --minutes 60 --streams 200 --json bench/results/server-soak.json

    start ──► catalogue ──► windows with and without hostile requests ──► drain ──► a round that
    `forge serve hash`      memory every 5 s                                 every counter must fit
                                                                        ──► SIGTERM, exit status 0

Exits with 1 where a request is lost or wrong, a counter does not fit, memory has grown, a hostile
request had a response that none may have, or the 99th percentile of the good ones is more than a
tenth longer with the hostile ones.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NamedTuple

import httpx

from forge.bench.result_file import create_result, write_json
from tests.soak.catalogue import Conversation, build_catalogue
from tests.soak.hostile import HostileClient, table_rows
from tests.soak.server_process import (
    GOOD_KEY,
    MemorySample,
    ServerProcess,
    find_counter_faults,
    find_idle_faults,
    memory_by_minute,
    memory_growth,
    serve_in_process,
)
from tests.soak.streams import Behaviour, GoodStreams, StreamCounts
from tests.soak.timings import WindowTimings, plan_windows

MAX_P99_RATIO = 1.10
MAX_MEMORY_GROWTH = 1.05
MEMORY_FROM_S, MEMORY_SPAN_S = 600.0, 120.0
SAMPLE_S = 5.0
IDLE_TIMEOUT_S = 60.0
NUM_THREADS = 32
"""Hostile requests in flight at most."""


class Plan(NamedTuple):
    """What a run does.

    hostile_share   hostile requests for each good one, over windows with and without them
    warm_up_s       seconds before the first window, in which the longest hostile requests are sent
    step_ms         time of a step of the model, so that the engine sleeps for most of it
    """

    minutes: float = 60.0
    streams: int = 200
    leave_share: float = 0.2
    hostile_share: float = 0.01
    step_ms: float = 150.0
    warm_up_s: float = 120.0
    window_s: float = 120.0
    settle_s: float = 15.0
    closing_s: float = 30.0
    conversations: int = 120
    seed: int = 1


class SoakRun:
    """One run against a server."""

    def __init__(self, plan: Plan, server: ServerProcess, catalogue: list[Conversation]) -> None:
        self._plan = plan
        self._server = server
        self._catalogue = catalogue
        self.windows = plan_windows(plan.minutes * 60, plan.warm_up_s, plan.window_s, plan.seed)
        self.timings = WindowTimings(self.windows, plan.settle_s)
        self.hostile = HostileClient(server.address, plan.seed, table_rows())
        self.memory: list[MemorySample] = []
        self._rng = Random(f"{plan.seed} run")
        self._start_s = 0.0
        self._hostile_tasks: set[asyncio.Task[None]] = set()

    async def run_load(self) -> StreamCounts:
        """Run the streams and the hostile requests for the time of the plan."""
        plan = self._plan
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(NUM_THREADS))
        self._start_s = time.monotonic()
        sampling = asyncio.create_task(self._sample_memory())
        streams = GoodStreams(
            self._server.address,
            GOOD_KEY,
            self._catalogue,
            Behaviour(plan.leave_share, plan.step_ms / 1e3),
            f"{plan.seed} load",
            on_start=self._start_hostile,
            on_answer=lambda times: self.timings.add(times, self._start_s),
        )
        until_s = self._start_s + plan.minutes * 60
        long_rows = self.hostile.send_long(self._start_s + plan.warm_up_s)
        load = streams.run(plan.streams, until_s, min(plan.warm_up_s / 2, 10.0))
        await asyncio.gather(load, long_rows)
        sampling.cancel()
        await asyncio.gather(*self._hostile_tasks)
        return streams.counts

    def _start_hostile(self) -> None:
        """Send a hostile request with the probability of the window that it is now."""
        index = self.timings.find(time.monotonic() - self._start_s)
        if index is None or not self.windows[index].is_hostile:
            return
        if self._rng.random() < 2 * self._plan.hostile_share:
            task = asyncio.create_task(self.hostile.send(self.hostile.draw()))
            self._hostile_tasks.add(task)
            task.add_done_callback(self._hostile_tasks.discard)

    async def _sample_memory(self) -> None:
        while True:
            at_s = time.monotonic() - self._start_s
            self.memory.append(await asyncio.to_thread(self._server.sample_memory, at_s))
            await asyncio.sleep(SAMPLE_S)

    async def run_closing_round(self) -> tuple[StreamCounts, list[str]]:
        """Run good requests alone, none of which is left; every counter must fit."""
        plan, server = self._plan, self._server
        await self._wait_until_idle()
        before = await asyncio.to_thread(server.counters)
        behaviour = Behaviour(leave_share=0.0, token_s=0.0)
        name = f"{plan.seed} closing"
        streams = GoodStreams(server.address, GOOD_KEY, self._catalogue, behaviour, name)
        await streams.run(plan.streams, time.monotonic() + plan.closing_s, plan.closing_s / 4)
        num_probes = await self._wait_until_idle()
        after = await asyncio.to_thread(server.counters)
        counts = streams.counts
        for counters in (before, after):
            counters["finished"] = sum(counters[finish_name(each)] for each in ("stop", "length"))
        expected = {
            "finished": counts.finished,
            finish_name("abort"): 0,
            finish_name("error"): 0,
            # The first scrape is a response that it does not have itself.
            'forge_http_responses_total{status="200"}': counts.completed.total() + num_probes + 1,
            "forge_prompt_tokens_total": counts.prompt_tokens,
            "forge_generation_tokens_total": counts.output_tokens,
        }
        faults = find_counter_faults(before, after, expected)
        return counts, [*faults, *find_idle_faults(after)]

    async def _wait_until_idle(self) -> int:
        """Wait until the server has no open request; return the number of requests that this took.

        Raises TimeoutError.
        """
        num_probes = 1
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            while await asyncio.to_thread(self._server.num_open_requests):
                num_probes += 1
                await asyncio.sleep(0.5)
        return num_probes


def finish_name(reason: str) -> str:
    """Return the name of the counter of choices with this finish reason."""
    return f'forge_requests_total{{finish="{reason}"}}'


async def run_soak(
    plan: Plan, server: ServerProcess, catalogue: list[Conversation]
) -> tuple[dict[str, Any], list[str]]:
    """Run all of a plan. Return the figures, and what is wrong."""
    run = SoakRun(plan, server, catalogue)
    before_s, started_s = _cpu_s(server), time.monotonic()
    counts = await run.run_load()
    took_s = time.monotonic() - started_s
    cores = [
        round((after - at) / took_s, 3) for after, at in zip(_cpu_s(server), before_s, strict=True)
    ]
    growth = memory_growth(run.memory, MEMORY_FROM_S, MEMORY_SPAN_S)
    timings = run.timings.figures(plan.seed)
    figures: dict[str, Any] = {
        "plan": plan._asdict(),
        "good": counts.figures(),
        "hostile": {
            "sent": run.hostile.counts.total(),
            "by_source": dict(sorted(run.hostile.counts.items())),
            "statuses": {
                str(key): run.hostile.statuses[key] for key in sorted(run.hostile.statuses)
            },
            "faults": len(run.hostile.faults),
        },
        "latency": timings,
        "memory_mib_by_minute": memory_by_minute(run.memory),
        "memory_growth": growth,
        "cores": {"server": cores[0], "client": cores[1]},
    }
    faults = [*counts.find_faults(), *run.hostile.faults, *find_limit_faults(growth, timings)]
    try:
        loaded = await asyncio.to_thread(server.counters)
        closing, counter_faults = await run.run_closing_round()
        status, log, num_warnings = await asyncio.to_thread(server.stop)
    except (TimeoutError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        ended = server.process.poll()
        problem = f"{error!r}, exit status {ended}, log {server.read_log()[-2000:]!r}"
        return figures, [*faults, f"the server does not answer after the load: {problem}"]
    figures |= {
        "good_closing": closing.figures(),
        "finished": {
            reason: loaded[finish_name(reason)] for reason in ("stop", "length", "abort", "error")
        },
        "exit_status": status,
        "writes_to_clients_that_left": num_warnings,
    }
    faults += [*closing.find_faults(), *counter_faults, *find_load_faults(counts, loaded)]
    if status or log:
        faults.append(f"the server ended with {status} and wrote {log[:2000]!r}")
    return figures, faults


def _cpu_s(server: ServerProcess) -> tuple[float, float]:
    return server.cpu_s(), time.process_time()


def find_load_faults(counts: StreamCounts, loaded: dict[str, float]) -> list[str]:
    """Return what the counters after the load contradict: hostile requests end too."""
    ended = sum(loaded[finish_name(each)] for each in ("stop", "length"))
    faults = []
    if ended < counts.finished:
        faults.append(f"{ended:g} choices have ended, and the clients have {counts.finished}")
    for status in ("500", "503", "504"):
        number = loaded[f'forge_http_responses_total{{status="{status}"}}']
        if number:
            faults.append(f"{number:g} responses had the status {status}")
    return faults


def find_limit_faults(growth: dict[str, float] | None, timings: dict[str, Any]) -> list[str]:
    """Return the limits that the figures exceed."""
    faults = []
    found = 1.0 if growth is None else growth["anon"]
    if not 1 / MAX_MEMORY_GROWTH <= found <= MAX_MEMORY_GROWTH:
        faults.append(f"memory without files is {found} of its level after ten minutes")
    for name, timing in timings.items():
        if timing["p99_ratio"] > MAX_P99_RATIO:
            faults.append(
                f"p99 of {name} is {timing['p99_ratio']} of that without hostile requests"
            )
    return faults


def parse_plan(words: Sequence[str]) -> tuple[Plan, str | None]:
    """Return the plan of a command line, and the file of the record."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, value in Plan()._asdict().items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, metavar="N"
        )
    parser.add_argument("--json", metavar="FILE")
    given = vars(parser.parse_args(words))
    path = given.pop("json")
    return Plan(**given), path


def main(words: Sequence[str]) -> int:
    """Run, print and write the record."""
    plan, path = parse_plan(words)
    catalogue = build_catalogue(plan.seed, plan.conversations)
    with serve_in_process(plan.step_ms) as server:
        figures, faults = asyncio.run(run_soak(plan, server, catalogue))
    for name, value in figures.items():
        print(f"{name:<16}{value}")
    if path is not None:
        result = create_result("server-soak", {**figures, "faults": faults})
        write_json(path, {**result, "command": f"python -m tests.soak.run {' '.join(words)}"})
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
