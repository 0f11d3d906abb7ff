"""The soak itself: it finds lost requests, wrong answers, leaks and slow tails that are planted.

The last test runs all of it for seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from tests.server.good_bodies import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES
from tests.server.http_wire import KEY, Address
from tests.server.local_server import wait_until
from tests.server.test_server import RunningServer, open_server
from tests.soak.answers import READERS, WHOLE, Answer
from tests.soak.catalogue import SIZES, Conversation, Turn, build_catalogue
from tests.soak.connection import AnswerTimes, SoakConnection
from tests.soak.hostile import (
    LONG_BYTES,
    HostileClient,
    HostileRequest,
    has_status,
    table_rows,
)
from tests.soak.run import Plan, find_limit_faults, run_soak
from tests.soak.server_process import (
    MemorySample,
    find_counter_faults,
    find_idle_faults,
    memory_growth,
    memory_mib,
    parse_metrics,
    process_tree,
    serve_in_process,
)
from tests.soak.streams import Behaviour, GoodStreams, StreamCounts
from tests.soak.timings import Window, WindowTimings, plan_windows

STAYING = Behaviour(leave_share=0.0, token_s=0.0)

# Answers.

CHUNK = {"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
RESPONSE: dict[str, Any] = {
    "id": "r",
    "status": "completed",
    "incomplete_details": None,
    "output": [{"type": "message", "content": [{"text": "a"}]}],
    "usage": {"input_tokens": 3, "output_tokens": 1},
}
DELTA = {"type": "response.output_text.delta", "sequence_number": 0, "delta": "a"}
COMPLETED = {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}
MESSAGE_USAGE = {
    **{"input_tokens": 1, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 1},
    **{"output_tokens": 1},
}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m"}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE},
    {"type": "message_stop"},
]
STREAMS = [
    (CHAT, [json.dumps(CHUNK), json.dumps(USAGE), "[DONE]"], "stop"),
    (RESPONSES, [json.dumps(DELTA), json.dumps(COMPLETED)], "completed: stop"),
    (ANTHROPIC, [json.dumps(event) for event in MESSAGE_EVENTS], "end_turn"),
]


@pytest.mark.parametrize(("path", "events", "finish"), STREAMS)
def test_a_stream_without_any_one_of_its_events_is_no_answer(
    path: str, events: list[str], finish: str
) -> None:
    def read(given: list[str]) -> Answer:
        reader = READERS[path]()
        for event in given:
            reader.add(event)
        return reader.answer()

    assert read(events) == Answer(("a",), (), (finish,), 3, 1)
    for index in range(len(events)):
        try:
            found = read([*events[:index], *events[index + 1 :]])
        except (ValueError, KeyError, IndexError):
            continue
        assert found != read(events), events[index]


def test_a_whole_body_has_the_answer_of_its_stream() -> None:
    choice = {"text": "a", "finish_reason": "stop"}
    body = {"choices": [choice], "usage": USAGE["usage"]}
    assert WHOLE[COMPLETIONS](body) == Answer(("a",), (), ("stop",), 3, 1)
    assert WHOLE[RESPONSES](RESPONSE).texts == ("a",)


# Lost requests.


@pytest.fixture(scope="module")
def catalogue() -> list[Conversation]:
    return build_catalogue(3, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server(api_keys=(KEY,), **SIZES) as running:
        yield running


def address_of(server: RunningServer) -> Address:
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return host, int(port)


def play(
    address: Address, catalogue: list[Conversation], behaviour: Behaviour = STAYING
) -> StreamCounts:
    """Return the counts of clients that each play one of the conversations."""
    streams = GoodStreams(address, KEY, catalogue, behaviour, "test")

    async def play_one(index: int) -> None:
        connection = SoakConnection(address, KEY)
        fields = {"session_id": f"test-{index}"}
        await streams.play(connection, Random(index), catalogue[index], fields, float("inf"))
        await connection.close()

    async def play_all() -> None:
        await asyncio.gather(*map(play_one, range(len(catalogue))))

    asyncio.run(play_all())
    return streams.counts


@asynccontextmanager
async def cutting_proxy(address: Address, max_bytes: int) -> AsyncIterator[Address]:
    """Forward connections to the server, and cut each after so many bytes of responses."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*address)
        far_writer.write(await reader.read(2**20))
        num_bytes = 0
        while num_bytes < max_bytes and (data := await far_reader.read(64)):
            num_bytes += len(data)
            writer.write(data)
        far_writer.close()
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        host, port = proxy.sockets[0].getsockname()
        yield host, port


@pytest.mark.long
def test_every_answer_of_a_good_server_is_the_expected_one(
    server: RunningServer, catalogue: list[Conversation]
) -> None:
    """Each API has a conversation."""
    assert {turn.path for each in catalogue for turn in each} == set(WHOLE)
    counts = play(address_of(server), catalogue)
    assert counts.find_faults() == []
    assert counts.started == counts.completed and counts.finished >= sum(map(len, catalogue))


@pytest.mark.long
def test_a_client_that_leaves_loses_nothing(
    server: RunningServer, catalogue: list[Conversation]
) -> None:
    counts = play(address_of(server), catalogue, Behaviour(leave_share=1.0, token_s=0.0))
    assert counts.find_faults() == []
    assert counts.left == counts.started.total() == len(catalogue)


@pytest.mark.long
def test_a_response_that_is_cut_is_a_lost_request(
    server: RunningServer, catalogue: list[Conversation]
) -> None:
    async def run() -> StreamCounts:
        async with cutting_proxy(address_of(server), 200) as address:
            return await asyncio.to_thread(play, address, catalogue)

    counts = asyncio.run(run())
    assert counts.num_lost == len(catalogue)
    assert counts.find_faults()[-1] == f"{len(catalogue)} good requests were lost"


@pytest.mark.long
def test_an_answer_with_another_token_is_a_lost_request(
    server: RunningServer, catalogue: list[Conversation]
) -> None:
    def change(turn: Turn) -> Turn:
        return turn._replace(answer=turn.answer._replace(finish=("other",)))

    counts = play(address_of(server), [(change(each[0]),) for each in catalogue])
    assert counts.num_lost == len(catalogue)
    assert "instead of" in counts.lost[0]


def test_a_request_without_any_outcome_is_a_fault() -> None:
    counts = StreamCounts()
    counts.started[CHAT] += 1
    assert counts.find_faults() == ["1 good requests have neither ended nor been left"]


# Memory and counters.


def growing_samples(mib_per_minute: float) -> list[MemorySample]:
    """Return samples whose heap of 100 MiB grows, next to 100 MiB of files."""
    heaps = [100.0 + mib_per_minute * 5 * i / 60 for i in range(720)]
    return [MemorySample(5.0 * i, 100.0 + heap, heap) for i, heap in enumerate(heaps)]


@pytest.mark.parametrize(
    ("mib_per_minute", "is_fault"), [(0.0, False), (0.05, False), (0.2, True), (-0.2, True)]
)
def test_a_leak_is_found_in_the_samples_of_an_hour(mib_per_minute: float, is_fault: bool) -> None:
    growth = memory_growth(growing_samples(mib_per_minute), 600.0, 120.0)
    assert growth is not None
    assert bool(find_limit_faults(growth, {})) == is_fault


def test_files_that_are_read_again_are_no_leak() -> None:
    samples = [each._replace(rss=each.rss + each.at_s / 60) for each in growing_samples(0.0)]
    growth = memory_growth(samples, 600.0, 120.0)
    assert growth is not None
    assert growth["rss"] > 1.2
    assert not find_limit_faults(growth, {})


def test_a_short_run_has_no_growth() -> None:
    assert memory_growth(growing_samples(1.0)[:150], 600.0, 120.0) is None
    assert memory_growth([], 600.0, 120.0) is None


HOLDING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(50 << 20); input()"], stdin=-1)
print(flush=True); input(); child.communicate(b"\\n")
"""


@pytest.mark.long
def test_memory_of_a_process_includes_what_it_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: sum(memory_mib(pid)[1] for pid in process_tree(process.pid)) > 50)
        assert len(process_tree(process.pid)) == 2
        process.communicate("\n")
    assert memory_mib(process.pid) == (0, 0)


IDLE = """# HELP forge_requests_running Sequences in the batch
forge_requests_running 0.0
forge_requests_waiting 0.0
forge_kv_blocks_used 0.0
forge_requests_total{finish="error"} 0.0
"""


def test_a_lost_block_and_a_request_too_few_are_found_in_the_counters() -> None:
    idle = parse_metrics(IDLE)
    assert find_idle_faults(idle) == []
    lost = {**idle, "forge_kv_blocks_used": 1.0}
    assert find_idle_faults(lost) == ["forge_kv_blocks_used is 1 at the end"]
    before, after = {"finished": 3.0}, {"finished": 7.0}
    assert find_counter_faults(before, after, {"finished": 4}) == []
    (fault,) = find_counter_faults(before, after, {"finished": 5})
    assert fault == "finished grew by 4, and the clients have 5"


# Latencies.


def fill(timings: WindowTimings, windows: list[Window], hostile_s: float) -> None:
    for window in windows:
        token_s = hostile_s if window.is_hostile else 0.1
        for index in range(100):
            sent_s = window.start_s + 2 + index / 100
            output_s = [sent_s + token_s, sent_s + 2 * token_s]
            timings.add(AnswerTimes(sent_s, output_s[0], output_s, output_s[1]), 0.0)


@pytest.mark.parametrize(("hostile_s", "num_faults"), [(0.1, 0), (0.105, 0), (0.12, 3)])
def test_a_slower_tail_with_hostile_requests_is_found(hostile_s: float, num_faults: int) -> None:
    windows = plan_windows(125.0, 5.0, 10.0, seed=1)
    assert [each.is_hostile for each in windows].count(True) == 6 == len(windows) // 2
    timings = WindowTimings(windows, settle_s=1.0)
    fill(timings, windows, hostile_s)
    figures = timings.figures(seed=1)
    assert figures["ttft"]["p99_ratio"] == pytest.approx(hostile_s / 0.1, rel=0.002)
    low, high = figures["itl"]["p99_ratio_95"]
    assert low <= figures["itl"]["p99_ratio"] <= high
    assert len(find_limit_faults(None, figures)) == num_faults


def test_a_request_of_two_windows_counts_in_none() -> None:
    timings = WindowTimings([Window(0, 10, False), Window(10, 20, True)], settle_s=1.0)
    for sent_s, end_s in ((0.5, 2.0), (9.0, 11.0), (15.0, 21.0), (-1.0, 2.0)):
        timings.add(AnswerTimes(sent_s, None, [], end_s), 0.0)
    timings.add(AnswerTimes(102.0, None, [], 109.0), 100.0)
    assert timings.figures(seed=1)["total"]["samples"] == [0, 1]


# Hostile requests.


@pytest.mark.long
def test_every_table_and_fuzzer_is_drawn() -> None:
    client = HostileClient(("127.0.0.1", 1), 1, table_rows())
    drawn = [client.draw() for _ in range(400)]
    assert {request.source for request in drawn} == {
        *("bad inputs", "fields", "chats", "tools", "structures", "responses", "messages"),
        *("bodies", "framing"),
        *("fuzzed bodies", "fuzzed commands", "cut requests", "damaged requests"),
    }


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 a\r\ncontent-length: 2\r\n\r\n{}", None),
        (b"HTTP/1.1 500 a\r\ncontent-length: 2\r\n\r\n{}", "500 instead of"),
        (b"", "0 responses"),
    ],
)
def test_a_response_that_no_hostile_request_may_have_is_a_fault(
    answer: bytes, problem: str | None
) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run() -> list[str]:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as listening:
            client = HostileClient(listening.sockets[0].getsockname(), 1, ())
            head = b"GET / HTTP/1.1\r\n\r\n"
            request = HostileRequest("a", "b", lambda: head, fault=has_status(400))
            await client.send(request)
            return client.faults

    found = asyncio.run(run())
    assert len(found) == (problem is not None) and (problem or "") in "".join(found)


def test_long_rows_are_sent_once_before_the_first_window() -> None:
    async def run(until_s: float) -> Counter[str]:
        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 400 a\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        limit = 2 * LONG_BYTES
        async with await asyncio.start_server(respond, "127.0.0.1", 0, limit=limit) as listening:
            rows = [
                HostileRequest(f"{size}", "", lambda size=size: b"\r\n\r\n".rjust(size))  # type: ignore[misc]
                for size in (8, LONG_BYTES, LONG_BYTES + 1)
            ]
            client = HostileClient(listening.sockets[0].getsockname(), 1, rows)
            await client.send_long(until_s)
            return client.counts

    assert asyncio.run(run(math.inf)) == {f"{LONG_BYTES + 1}": 1}
    assert not asyncio.run(run(-math.inf))


# All of it.

SHORT = Plan(
    minutes=0.1,
    streams=10,
    hostile_share=0.1,
    step_ms=5.0,
    warm_up_s=1.0,
    window_s=2.0,
    settle_s=0.0,
    closing_s=1.0,
)


@pytest.mark.long
def test_a_soak_of_seconds_finds_nothing(catalogue: list[Conversation]) -> None:
    """The limits of latency are for longer runs, on a machine that does nothing else."""
    with serve_in_process(SHORT.step_ms) as process:
        figures, faults = asyncio.run(run_soak(SHORT, process, catalogue))
    assert [fault for fault in faults if not fault.startswith("p99 ")] == []
    assert figures["good"]["completed"] > 10 < figures["good_closing"]["completed"]
    assert (
        figures["good"]["left"] and figures["hostile"]["sent"] and figures["memory_mib_by_minute"]
    )


@pytest.mark.long
def test_a_server_that_ends_in_the_middle_is_found(catalogue: list[Conversation]) -> None:
    with serve_in_process(SHORT.step_ms) as process:

        async def run() -> list[str]:
            asyncio.get_running_loop().call_later(2.0, process.process.kill)
            _, faults = await run_soak(SHORT, process, catalogue)
            return faults

        faults = asyncio.run(run())
    assert any(fault.endswith("good requests were lost") for fault in faults)
    assert "the server does not answer after the load" in faults[-1]
