"""The two loads: the times of requests, where latencies count from, and the figures."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice, pairwise

import pytest

from forge.bench.http_client import Endpoint
from forge.bench.load_generator import (
    LATENCY_KEYS,
    LatencySLO,
    LoadRun,
    figures,
    latency_figures,
    open_loop_figures,
    poisson,
    run_closed_loop,
    run_open_loop,
)
from forge.bench.workload import RequestTimes
from forge.errors import RequestFailed
from tests.virtual_time import VirtualTime

TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
EVENTS = TOKEN + TOKEN + USAGE + b"data: [DONE]\n\n"
COMPLETE_RESPONSE = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(EVENTS)
    + EVENTS
    + b"\r\n0\r\n\r\n"
)
REJECTION = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull"
CLOSING_REJECTION = b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
SERVER_ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"


# Figures.


def test_an_objective_is_met_just_in_time_and_by_the_mean_time_between_tokens() -> None:
    """10 ms to the first token, then four more in 80 ms: 20 ms each, although one gap has 70."""
    stream = RequestTimes(1.0, (1.0625, 1.125, 1.3125), 5)
    assert LatencySLO().is_met(stream)
    assert LatencySLO(62.5, 62.5).is_met(stream)
    assert not LatencySLO(62.4, 62.5).is_met(stream)
    assert not LatencySLO(62.5, 62.4).is_met(stream)


def test_goodput_counts_requests_within_both_objectives_and_rejected_ones_against_their_share() -> (
    None
):
    """Of four, one has a late first token, one late others; one was rejected. They took 2 s."""
    good = RequestTimes(0.0, (0.1, 0.2), 2)
    late = RequestTimes(0.0, (0.3, 0.4), 2)
    slow = RequestTimes(0.0, (0.1, 0.9), 2)
    record = figures(LoadRun([good, late, slow], 1, 2.0, []), LatencySLO(200, 300))
    assert (record["goodput"], record["good_share"]) == (0.5, 0.25)
    assert (record["completed"], record["rejected"], record["rejected_share"]) == (3, 1, 0.25)
    assert (record["req_s"], record["tok_s"], record["seconds"]) == (1.5, 3, 2.0)


def test_without_objectives_there_is_no_goodput() -> None:
    record = figures(LoadRun([RequestTimes(0.0, (0.1,), 1)], 0, 1.0, []), LatencySLO())
    assert "goodput" not in record
    assert "good_share" not in record


def test_times_have_a_median_and_a_99th_percentile_of_requests_and_of_gaps() -> None:
    """Request n of 200 has its first token after n ms, its second 1 ms later; its third 2n ms."""
    streams = [
        RequestTimes(0.0, (n / 1e3, (n + 1) / 1e3, (3 * n + 1) / 1e3), 3) for n in range(1, 201)
    ]
    assert latency_figures(streams, 10.0) == {
        "ttft_p50": 100.5,
        "ttft_p99": 199.0,
        "itl_p50": 101.0,
        "itl_p99": 199.5,
        "gap_p50": 1.5,
        "gap_p99": 394.0,
        "latency_p50": 302.5,
        "latency_p99": 598.0,
        "tok_s": 60,
    }


def test_where_every_request_was_rejected_there_are_no_times() -> None:
    record = figures(LoadRun([], 3, 1.5, []), LatencySLO(100))
    assert {name: record[name] for name in LATENCY_KEYS} == dict.fromkeys(LATENCY_KEYS)
    assert (record["tok_s"], record["goodput"], record["rejected_share"]) == (0, 0.0, 1.0)


def test_an_open_loop_reports_the_offered_rate_and_the_delay_of_the_client() -> None:
    """Five requests in 2 s, the first at once: four intervals."""
    run = LoadRun(
        [RequestTimes(0.0, (0.1,), 1)] * 4, 1, 3.0, [0.001, 0.002, 0.003, 0.004, 0.5], 2.0
    )
    record = open_loop_figures(run, 2.5, LatencySLO())
    assert (record["rate"], record["offered"], record["late_p99"]) == (2.5, 2.0, 500.0)
    assert (record["req_s"], record["completed"], record["rejected"]) == (1.333, 4, 1)


def test_arrivals_are_poisson_and_the_same_for_the_same_seed() -> None:
    """Gaps of an exponential distribution deviate by their mean."""
    due_s = list(islice(poisson(random.Random(7), 50.0), 20_001))
    gaps = [b - a for a, b in pairwise(due_s)]
    assert due_s[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert list(islice(poisson(random.Random(7), 50.0), 3)) == due_s[:3]


# Loads on scripted servers.

TIMEOUT_S = 60.0


class ScriptedServer(asyncio.Protocol):
    """Answers each request with the result of `answer`, one request on a connection at a time.

    log   of all instances: 0 for each connection, 1 for each request
    """

    def __init__(self, answer: Callable[[asyncio.Transport], None], log: list[int]) -> None:
        self.answer, self.log, self.data = answer, log, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.log.append(0)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        if len(body) < int(head.lower().partition(b"content-length: ")[2].split()[0]):
            return
        self.data = b""
        self.log.append(1)
        self.answer(self.transport)


def run_load(
    answer: Callable[[asyncio.Transport], None],
    load: Callable[[Endpoint, bytes], Awaitable[LoadRun]],
    time: VirtualTime,
) -> tuple[LoadRun, list[int]]:
    """Return the result of the load on a server with this answer, and the server's log."""
    log: list[int] = []

    async def run() -> LoadRun:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ScriptedServer(answer, log), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Endpoint(f"http://127.0.0.1:{port}", "any", None)
            try:
                return await asyncio.wait_for(
                    load(target, target.build_request([1, 2], 2)), TIMEOUT_S
                )
            finally:
                await asyncio.sleep(0.01)  # both sides see that the connections are closed

    return time.run(run()), log


def respond_at_once(transport: asyncio.Transport) -> None:
    transport.write(COMPLETE_RESPONSE)


def respond_in_turn(*answers: bytes) -> Callable[[asyncio.Transport], None]:
    """Return an answer that uses these responses in turn."""
    pending = iter(answers)
    return lambda transport: transport.write(next(pending))


def test_a_server_that_stalls_shows_in_every_first_token_that_was_due_meanwhile(
    virtual_time: VirtualTime,
) -> None:
    """The first answer comes with the last request. Requests are still sent every 10 ms."""
    waiting: list[asyncio.Transport] = []

    def stalls(transport: asyncio.Transport) -> None:
        waiting.append(transport)
        if len(waiting) == 10:
            for each in waiting:
                respond_at_once(each)

    due_s = [n / 100 for n in range(10)]
    run, _ = run_load(
        stalls, lambda to, what: run_open_loop(to, [(at_s, what) for at_s in due_s]), virtual_time
    )
    ttft = [stream.chunk_times_s[0] - stream.start_s for stream in run.completed]
    assert ttft == pytest.approx([0.09 - at_s for at_s in due_s])


def test_a_request_that_the_client_sends_late_has_waited_since_it_was_due(
    virtual_time: VirtualTime,
) -> None:
    """The second is due after 10 ms; the client is busy for the first 100."""

    def work(message: bytes) -> Iterator[tuple[float, bytes]]:
        yield 0.0, message
        virtual_time.sleep(0.1)
        yield 0.01, message

    run, _ = run_load(respond_at_once, lambda to, what: run_open_loop(to, work(what)), virtual_time)
    assert run.lateness_s[-1] == pytest.approx(0.09)
    waited = max(stream.chunk_times_s[0] - stream.start_s for stream in run.completed)
    assert waited == pytest.approx(0.1), "the first was due before the client was busy"


def test_an_open_loop_uses_an_idle_connection_again_and_opens_one_where_none_is(
    virtual_time: VirtualTime,
) -> None:
    """Two at once need two; the third comes when both are idle."""
    work = (0.0, 0.0, 0.1)
    run, log = run_load(
        respond_at_once,
        lambda to, what: run_open_loop(to, [(at_s, what) for at_s in work]),
        virtual_time,
    )
    assert (len(run.completed), log.count(1), run.last_due_s) == (3, 3, 0.1)
    assert log.count(0) == 2


def test_rejections_are_counted_and_cost_no_connection_but_the_closed_one(
    virtual_time: VirtualTime,
) -> None:
    """Due one after another. 429 leaves the connection open, 503 closes it here."""
    answers = respond_in_turn(REJECTION, COMPLETE_RESPONSE, CLOSING_REJECTION, COMPLETE_RESPONSE)
    run, log = run_load(
        answers,
        lambda to, what: run_open_loop(to, [(n / 50, what) for n in range(4)]),
        virtual_time,
    )
    assert (len(run.completed), run.num_rejected, len(run.lateness_s)) == (2, 2, 4)
    assert log.count(0) == 2


def test_a_stream_of_a_closed_loop_that_is_rejected_waits_and_retries(
    virtual_time: VirtualTime,
) -> None:
    """Its first token counts from the retry: the pause before it is not included."""
    answers = respond_in_turn(REJECTION, CLOSING_REJECTION, COMPLETE_RESPONSE, COMPLETE_RESPONSE)
    run, log = run_load(
        answers, lambda to, what: run_closed_loop(to, [what] * 2, 1, pause_s=0.05), virtual_time
    )
    assert (len(run.completed), run.num_rejected) == (2, 2)
    assert log == [0, 1, 1, 0, 1, 1]
    assert run.wall_s == pytest.approx(0.1)
    assert all(stream.chunk_times_s[0] == stream.start_s for stream in run.completed)


def test_a_stream_of_a_closed_loop_that_is_always_rejected_gives_up(
    virtual_time: VirtualTime,
) -> None:
    with pytest.raises(RequestFailed, match="one request was rejected 100 times, every 0 s"):
        run_load(
            respond_in_turn(*[REJECTION] * 100),
            lambda to, what: run_closed_loop(to, [what], 1, pause_s=0),
            virtual_time,
        )


@pytest.mark.parametrize(
    "load",
    [
        lambda to, what: run_open_loop(to, [(0.0, what), (9.0, what)]),
        lambda to, what: run_closed_loop(to, [what] * 2, 1),
    ],
    ids=["open", "closed"],
)
def test_any_other_refusal_ends_the_run_at_once(
    load: Callable[[Endpoint, bytes], Awaitable[LoadRun]], virtual_time: VirtualTime
) -> None:
    with pytest.raises(RequestFailed, match="500 Internal Server Error"):
        run_load(respond_in_turn(SERVER_ERROR), load, virtual_time)


def test_a_server_that_takes_no_connection_ends_the_run() -> None:
    target = Endpoint("http://127.0.0.1:1", "any", None)
    with pytest.raises(RequestFailed, match=r"no connection to 127\.0\.0\.1:1 with 0 open ones"):
        asyncio.run(run_open_loop(target, [(0.0, b"")]))
