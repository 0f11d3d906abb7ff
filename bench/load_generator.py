"""Closed and open loops on a server, and their figures.

Owns the times at which requests are sent, and what latencies mean. Knows no byte of HTTP:
bench/http_client.py.

    closed   stream 1   POST ─► ... [DONE]  POST ─► ... [DONE]  POST ─►     N at any time
             stream 2   POST ─► ........ [DONE]  POST ─► ..                 one ends, one begins

    open     due        │   │ │      │  ││    │                             drawn before the run
             sent       POST POST... whether or not earlier ones have ended

A closed loop measures how fast N users are served that each wait for their answer. A slow server
receives less load, and at most N requests see its worst moments. An open loop measures a rate of
requests that does not depend on the server. Latency counts from the time at which a request was
due, not from when it was sent. If the server stalls, or the client is late, every request that was
due meanwhile is late. So coordinated omission cannot hide it (Tene, "How NOT to Measure Latency",
2013).

Goodput is that of DistServe (Zhong et al., OSDI 2024): requests that meet one objective for the
first token and one for the mean time between tokens. DistServe reports the highest rate, per GPU,
at which a share such as 90 % of requests is good. Here it is the number of good requests a second
at this load, with their share of all sent requests: the highest rate whose `good_share` is 0.9 is
the figure of DistServe.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from forge.bench.http_client import ConnectionPool, Endpoint
from forge.bench.workload import RequestTimes, level_figures, quantile
from forge.errors import RequestFailed

RETRY_DELAY_S = 1.0
"""Pause of a closed-loop stream after a rejection.

An immediate retry would be rejected again. The Retry-After of servers would load them differently.
"""

MAX_TRIES = 100
"""Consecutive rejections after which a closed-loop stream fails the run."""

LATENCY_KEYS = (
    *("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"),
    *("gap_p50", "gap_p99", "latency_p50", "latency_p99"),
)
"""Figures in ms of requests that were served."""

Figures = dict[str, float | None]


class LoadRun(NamedTuple):
    """The result of one load.

    completed      requests that were served to their end
    num_rejected   answers of 429 or 503
    wall_s         from the start to the end of the last request
    lateness_s     open loop: delay of each request between due and sent
    last_due_s     open loop: time at which the last request was due, after the start
    """

    completed: list[RequestTimes]
    num_rejected: int
    wall_s: float
    lateness_s: list[float]
    last_due_s: float = 0.0


class LatencySLO(NamedTuple):
    """Objectives of each request in ms; None: no objective.

    itl_ms is for the mean time between tokens after the first: one long gap does not fail a
    request. Gaps have their own figures.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_met(self, times: RequestTimes) -> bool:
        """Return True where the request meets both objectives. Equality meets them."""
        return (self.ttft_ms is None or ttft_ms(times) <= self.ttft_ms) and (
            self.itl_ms is None or itl_ms(times) <= self.itl_ms
        )


def ttft_ms(stream: RequestTimes) -> float:
    """Return the time from the start to the first piece of output."""
    return 1e3 * (stream.chunk_times_s[0] - stream.start_s)


def itl_ms(stream: RequestTimes) -> float:
    """Return the mean time between tokens after the first. Several tokens may arrive together."""
    return (
        1e3 * (stream.chunk_times_s[-1] - stream.chunk_times_s[0]) / max(1, stream.num_tokens - 1)
    )


async def run_closed_loop(
    server: Endpoint, requests: Sequence[bytes], concurrency: int, pause_s: float = RETRY_DELAY_S
) -> LoadRun:
    """Send the requests in order, with `concurrency` in flight until none is left.

    After a rejection a stream waits `pause_s` and sends the request again. Times are those of the
    try that was served, without the pauses. Raises RequestFailed where a request fails.
    """
    pending = deque(requests)
    streams: list[RequestTimes] = []
    rejected = 0
    pool = ConnectionPool(server)

    async def send_until_completed(message: bytes) -> RequestTimes:
        nonlocal rejected
        for _ in range(MAX_TRIES):
            connection = await pool.acquire()
            stream = await connection.exchange(message, time.perf_counter())
            pool.release(connection)
            if stream is not None:
                return stream
            rejected += 1
            await asyncio.sleep(pause_s)
        raise RequestFailed(f"one request was rejected {MAX_TRIES} times, every {pause_s:g} s")

    async def user() -> None:
        while pending:
            streams.append(await send_until_completed(pending.popleft()))

    try:
        await pool.open(min(concurrency, len(requests)))
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        pool.close()
    return LoadRun(streams, rejected, time.perf_counter() - start_s, [])


async def run_open_loop(server: Endpoint, work: Iterable[tuple[float, bytes]]) -> LoadRun:
    """Send each request when it is due, in seconds after the start, whatever the state of others.

    work   (due_s, request); drawn one at a time while requests are in flight; not empty
    Times count from when a request was due. Raises RequestFailed where a request fails.
    """
    streams: list[RequestTimes] = []
    late_s: list[float] = []
    rejected, due_s = 0, 0.0
    pool = ConnectionPool(server)

    async def send(message: bytes, at_s: float) -> None:
        nonlocal rejected
        connection = await pool.acquire()
        late_s.append(time.perf_counter() - at_s)
        times = await connection.exchange(message, at_s)
        pool.release(connection)
        if times is None:
            rejected += 1
        else:
            streams.append(times)

    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for due_s, message in work:
                # Yield even if it is late already: answers must be read on time.
                await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
                group.create_task(send(message, start_s + due_s))
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        pool.close()
    return LoadRun(streams, rejected, time.perf_counter() - start_s, late_s, due_s)


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Yield due times at random, `rate` a second on average, indefinitely.

    The first is due at once, so that there is one in the shortest load.
    """
    due_s = 0.0
    while True:
        yield due_s
        due_s += rng.expovariate(rate)


def latency_figures(streams: Sequence[RequestTimes], wall_s: float) -> Figures:
    """Return LATENCY_KEYS of the served requests, None where there are none, and tokens a second.

    ttft, itl and gap are those of forge.bench.workload.level_figures. latency is from the start of
    a request to its last piece of output.
    """
    if not streams:
        return {**dict.fromkeys(LATENCY_KEYS), "tok_s": 0}
    gaps = [1e3 * (b - a) for stream in streams for a, b in pairwise(stream.chunk_times_s)] or [0.0]
    latency = [1e3 * (stream.chunk_times_s[-1] - stream.start_s) for stream in streams]
    figures: Figures = {
        **level_figures(0, streams, wall_s),
        "gap_p50": round(statistics.median(gaps), 3),
        "latency_p50": round(statistics.median(latency), 2),
        "latency_p99": round(quantile(latency, 0.99), 2),
    }
    return {name: figures[name] for name in (*LATENCY_KEYS, "tok_s")}


def figures(run: LoadRun, objective: LatencySLO) -> Figures:
    """Return the figures of a load; goodput only where there is an objective.

    A rejected try counts as sent and as not good.
    """
    num_sent = len(run.completed) + run.num_rejected
    found: Figures = {
        **latency_figures(run.completed, run.wall_s),
        "seconds": round(run.wall_s, 2),
        "completed": len(run.completed),
        "rejected": run.num_rejected,
        "rejected_share": round(run.num_rejected / num_sent, 4),
        "req_s": round(len(run.completed) / run.wall_s, 3),
    }
    if objective != LatencySLO():
        good = sum(map(objective.is_met, run.completed))
        found["goodput"] = round(good / run.wall_s, 3)
        found["good_share"] = round(good / num_sent, 4)
    return found


def open_loop_figures(run: LoadRun, rate: float, objective: LatencySLO) -> Figures:
    """Return the figures of an open loop with a nominal rate.

    offered    actual rate of the draw; None for a single request
    late_p99   ms from due to sent. It is part of the latencies: where it is not small in
               comparison, they measure the client
    """
    num_after_first = len(run.completed) + run.num_rejected - 1
    return {
        "rate": rate,
        "offered": round(num_after_first / run.last_due_s, 3) if num_after_first else None,
        "late_p99": round(1e3 * quantile(run.lateness_s, 0.99), 2),
        **figures(run, objective),
    }
