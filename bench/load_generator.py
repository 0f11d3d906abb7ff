"""Two loads on a server, and the figures of what came of them.

Owns when requests are sent and what their times mean. Knows no byte of HTTP: bench/http_client.py.

    closed   stream 1   POST ─► ... [DONE]  POST ─► ... [DONE]  POST ─►     N at any time
             stream 2   POST ─► ........ [DONE]  POST ─► ..                 one ends, one begins

    open     due        │   │ │      │  ││    │                             drawn before the run
             sent       POST POST... whether or not earlier ones have ended

A closed loop asks how fast N users are served who wait for each other's place: a slow server gets
less to do, and its worst moments are seen by N requests at most. An open loop asks how a rate of
requests is served that does not depend on the server. Its latency is counted from the moment at
which a request was due, not from when it was sent. So a server that stalls, or a client that falls
behind, is late for every request that was due meanwhile: coordinated omission cannot hide it (Tene,
"How NOT to Measure Latency", 2013).

Goodput is that of DistServe (Zhong et al., OSDI 2024): requests that are served within an objective
for the first token and one for the mean time between tokens. There it is the highest rate, for each
GPU, at which a share such as 90 % of them is. Here it is how many were at this load, in requests a
second, and their share of all that were sent: the highest rate whose `good_share` is 0.9 is theirs.
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
"""How long a stream of a closed loop waits after a rejection. At once, it would only be rejected
again; as long as the server says, servers would be asked in different ways."""

MAX_TRIES = 100
"""Rejections in a row after which a stream of a closed loop gives up, and with it the run."""

LATENCY_KEYS = (
    *("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"),
    *("gap_p50", "gap_p99", "latency_p50", "latency_p99"),
)
"""Figures in ms, of requests that were served."""

Figures = dict[str, float | None]


class LoadRun(NamedTuple):
    """What came of one load.

    completed      the requests that were served to their end
    num_rejected   how often the answer was 429 or 503
    wall_s         from the start to the end of the last one
    lateness_s     of each request of an open loop, how long after it was due it was sent
    last_due_s     when the last one of an open loop was due, after the start
    """

    completed: list[RequestTimes]
    num_rejected: int
    wall_s: float
    lateness_s: list[float]
    last_due_s: float = 0.0


class LatencySLO(NamedTuple):
    """What is promised of each request, in ms; None promises nothing.

    itl_ms is for the mean time between tokens after the first, so that one gap between two events
    does not fail a request. Gaps have figures of their own.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_met(self, times: RequestTimes) -> bool:
        """The request was served within both. Just in time is in time."""
        return (self.ttft_ms is None or ttft_ms(times) <= self.ttft_ms) and (
            self.itl_ms is None or itl_ms(times) <= self.itl_ms
        )


def ttft_ms(stream: RequestTimes) -> float:
    """From the start to the first piece of output."""
    return 1e3 * (stream.chunk_times_s[0] - stream.start_s)


def itl_ms(stream: RequestTimes) -> float:
    """The mean time between tokens after the first, several of which may arrive together."""
    return (
        1e3 * (stream.chunk_times_s[-1] - stream.chunk_times_s[0]) / max(1, stream.num_tokens - 1)
    )


async def run_closed_loop(
    server: Endpoint, requests: Sequence[bytes], concurrency: int, pause_s: float = RETRY_DELAY_S
) -> LoadRun:
    """The requests in order, `concurrency` at any time until none is left.

    A stream that is rejected waits `pause_s` and asks again. Times are those of the try that was
    served, the pauses before it are in none. Raises RequestFailed where a request fails.
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
    """Each request is sent when it is due, in seconds after the start, whatever became of others.

    work   drawn one by one while requests are in flight; not empty
    Times are counted from when a request was due. Raises RequestFailed where a request fails.
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
                # Also where it is late already: answers must be read on time.
                await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
                group.create_task(send(message, start_s + due_s))
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        pool.close()
    return LoadRun(streams, rejected, time.perf_counter() - start_s, late_s, due_s)


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """When requests are due that come at random, `rate` of them a second. It does not end.

    The first is due at once, so that there is one however short the load is.
    """
    due_s = 0.0
    while True:
        yield due_s
        due_s += rng.expovariate(rate)


def latency_figures(streams: Sequence[RequestTimes], wall_s: float) -> Figures:
    """TIMES of the requests that were served, None where none was, and output tokens a second.

    ttft, itl and gap are those of forge.bench.workload.level; latency is from a request's start to
    its last piece of output.
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
    """Figures of one load. Goodput is there where something is promised.

    A try that was rejected was sent, and is not good.
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
    """Figures of an open loop that was to bring `rate` requests a second.

    offered    requests a second that chance made of it; None for a single one
    late_p99   ms after it was due that the client sent a request. It is part of the latencies:
               where it is not small beside them, they are the client's
    """
    num_after_first = len(run.completed) + run.num_rejected - 1
    return {
        "rate": rate,
        "offered": round(num_after_first / run.last_due_s, 3) if num_after_first else None,
        "late_p99": round(1e3 * quantile(run.lateness_s, 0.99), 2),
        **figures(run, objective),
    }
