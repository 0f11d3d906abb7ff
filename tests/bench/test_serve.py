"""The HTTP client of the benchmarks: it parses streams with any cuts, and keeps every time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge import AsyncLLM
from forge.bench import serve
from forge.bench.http_client import Endpoint, StreamedResponse
from forge.bench.load_generator import LatencySLO, run_closed_loop
from forge.bench.serve_plot import draw_levels, write_serve_plot
from forge.bench.workload import Cells, SweepCell
from forge.cli.main import main
from forge.errors import InvalidConfig, RequestFailed
from forge.limits import DEFAULT_LIMITS, Limits
from forge.server.app import create_app
from forge.server.http_server import create_listener
from tests.server.local_server import serve_app

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """Return the data as one chunk of the transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


WHOLE_RESPONSE = HEAD + b"".join(map(chunk, (TOKEN, TOKEN, USAGE, DONE, b"")))


@pytest.mark.parametrize("size", range(1, 80))
def test_a_reply_reads_the_same_however_it_is_cut(size: int) -> None:
    reply = StreamedResponse()
    for start in range(0, len(WHOLE_RESPONSE), size):
        reply.feed(WHOLE_RESPONSE[start : start + size], float(start))
    assert (len(reply.chunk_times_s), reply.num_tokens, reply.is_complete) == (2, 2, True)


def test_events_of_one_chunk_arrive_together() -> None:
    reply = StreamedResponse()
    reply.feed(HEAD + chunk(TOKEN + TOKEN[:9]), 1.0)
    reply.feed(chunk(TOKEN[9:] + USAGE + DONE) + chunk(b""), 2.0)
    assert reply.chunk_times_s == [1.0, 2.0]
    assert reply.is_complete


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 7\r\n\r\nno such", "404 Not Found: no such"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "does not stream its response"),
        (HEAD + chunk(b'data: {"error":{"message":"broken"}}\n\n'), "broken"),
    ],
)
def test_a_reply_that_is_no_stream_is_a_failure(data: bytes, problem: str) -> None:
    with pytest.raises(RequestFailed, match=problem):
        StreamedResponse().feed(data, 0.0)


REJECTED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"


@pytest.mark.parametrize("size", range(1, len(REJECTED) + 1))
def test_a_rejection_is_read_to_its_end_however_it_is_cut(size: int) -> None:
    """Its body must not be taken for the next response of the connection."""
    reply = StreamedResponse()
    for start in range(0, len(REJECTED), size):
        assert not reply.is_complete
        reply.feed(REJECTED[start : start + size], 0.0)
    assert (reply.is_rejected, reply.keep_alive, reply.is_complete) == (True, True, True)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
    ],
)
def test_a_connection_that_ends_with_the_rejection_is_not_kept(head: bytes) -> None:
    reply = StreamedResponse()
    reply.feed(head, 0.0)
    assert (reply.is_rejected, reply.keep_alive, reply.is_complete) == (True, False, True)


@contextmanager
def open_forge_server(limits: Limits = DEFAULT_LIMITS, **options: Any) -> Iterator[str]:
    """Yield the address of forge's server on the deterministic model."""
    llm = AsyncLLM("hash", enable_prefix_caching=False, **options)
    app = create_app(llm, limits=limits)
    with (
        create_listener("127.0.0.1", 0, ()) as socket_,
        serve_app(llm, app, socket_, limits) as (url, _),
    ):
        yield url


def parse_results(printed: str) -> list[dict[str, Any]]:
    """Return the results of the lines for programs."""
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_a_sweep_over_http_prints_a_result_for_each_concurrency(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells = Cells.read()._replace(sweep=SweepCell((1, 3), 10, 6, 2))
    path = tmp_path / "serve.json"
    with open_forge_server() as url:
        assert serve.main(url, str(path), label="mine", vocab_size=200, cells=cells) == 0
    results = parse_results(capsys.readouterr().out)
    assert [(each["engine"], each["shape"], each["path"], each["c"]) for each in results] == [
        ("mine", "hash", "http", 1),
        ("mine", "hash", "http", 3),
    ]
    assert json.loads(path.read_text())["figures"] == {"levels": results}


def test_a_server_that_refuses_ends_the_measurement() -> None:
    """Ids reach up to 100,000 here, and the model has a few hundred."""
    cells = Cells.read()._replace(sweep=SweepCell((1,), 10, 6, 2))
    with (
        open_forge_server() as url,
        pytest.raises(RequestFailed, match=r"400 Bad Request.* --vocab-size"),
    ):
        serve.main(url, None, cells=cells)


def test_without_a_server_the_address_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"url: no server at 127\.0\.0\.1:1:"):
        serve.main("http://127.0.0.1:1", None)


class BatchingServer(asyncio.Protocol):
    """Answers three requests at once, a while after the third came.

    waiting   connections of all instances with a request that has no answer yet
    counts    number of waiting requests each time that answers were sent
    """

    def __init__(self, waiting: list[asyncio.Transport], counts: list[int]) -> None:
        self.waiting, self.counts = waiting, counts
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        if len(body) < int(head.lower().partition(b"content-length: ")[2].split()[0]):
            return
        self.data = b""
        self.waiting.append(self.transport)
        if len(self.waiting) == 3:
            asyncio.get_running_loop().call_later(0.01, self.answer)

    def answer(self) -> None:
        self.counts.append(len(self.waiting))
        for transport in self.waiting:
            transport.write(WHOLE_RESPONSE)
        self.waiting.clear()


class ClosingServer(asyncio.Protocol):
    """Closes the connection when a request arrives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.close()


def count_completed(kind: Callable[[], asyncio.Protocol], requests: int, concurrency: int) -> int:
    """Return how many streams of a closed loop a server of this protocol completes."""

    async def run() -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(kind, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Endpoint(f"http://127.0.0.1:{port}", "any", None)
            message = target.build_request([1, 2], 2)
            try:
                run = await run_closed_loop(target, [message] * requests, concurrency)
            finally:
                await asyncio.sleep(0.01)  # both sides see that the connections are closed
        return len(run.completed)

    return asyncio.run(run())


def test_a_closed_loop_over_http_keeps_its_concurrency() -> None:
    waiting: list[asyncio.Transport] = []
    counts: list[int] = []
    assert count_completed(lambda: BatchingServer(waiting, counts), 9, 3) == 9
    assert counts == [3, 3, 3]


def test_a_lost_connection_ends_the_measurement() -> None:
    with pytest.raises(RequestFailed, match="the connection was lost"):
        count_completed(ClosingServer, 1, 1)


# Loads.


def test_both_loads_of_one_command_are_in_one_record_and_one_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One sequence runs and one may wait, so of twelve at once some are rejected."""
    path = tmp_path / "serve.json"
    words = "--concurrency 1 --rate 2000 --requests 12 --vocab-size 200 --slo-ttft-ms 60000"
    with open_forge_server(Limits(max_queue=1), max_num_seqs=1) as url:
        command = ["bench", "serve", url, *words.split(), "--json", str(path)]
        assert main(command) == 0
    closed, open_ = results = parse_results(capsys.readouterr().out)
    assert (closed["c"], closed["completed"], closed["rejected"]) == (1, 2, 0)
    assert open_["rate"] == 2000
    assert open_["completed"] + open_["rejected"] == 12
    assert 1 <= open_["completed"] < 12
    assert open_["good_share"] == pytest.approx(open_["completed"] / 12, abs=1e-4)
    assert json.loads(path.read_text())["figures"] == {
        "objective": {"ttft_ms": 60000, "itl_ms": None},
        "levels": results,
    }


CELL = SweepCell((1, 8), 10, 100, 2)


def test_without_streams_and_rates_the_streams_are_the_cells() -> None:
    nothing = LatencySLO()
    assert serve.build_load(CELL, (), (), None, None, nothing).concurrency == (1, 8)
    assert serve.build_load(CELL, (), (3,), None, None, nothing).concurrency == ()
    assert serve.build_load(CELL, (2,), (3,), None, None, nothing).concurrency == (2,)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"requests": 3}, "requests: it is how much of each --rate. Give --rate too"),
        ({"seconds": 3.0}, "seconds: it is how much of each --rate. Give --rate too"),
        ({"rates": (1.0,), "requests": 0}, "requests: 0 is not a positive integer. Give 1 or more"),
        ({"rates": (1.0,), "seconds": 0.0}, "seconds: 0 is not a number above 0"),
        ({"rates": (float("inf"),)}, "rate: inf is not a number above 0"),
        ({"rates": (1.0,), "requests": 2, "seconds": 2.0}, "seconds: requests has said how many"),
        ({"objective": LatencySLO(ttft_ms=float("nan"))}, "slo_ttft_ms: nan is not a number above"),
        ({"objective": LatencySLO(itl_ms=-1.0)}, "slo_itl_ms: -1 is not a number above 0"),
        ({"concurrency": (50_001,)}, "concurrency: 100002 requests of 100 tokens are more than"),
        ({"rates": (1.0,), "requests": 100_001}, "requests: 100001 requests of 100 tokens are mor"),
        ({"rates": (1.0, 5001.0)}, "rate: 100020 requests of 100 tokens are more than the 1000000"),
    ],
)
def test_an_invalid_load_is_refused_before_it_begins(given: dict[str, Any], line: str) -> None:
    arguments: dict[str, Any] = {
        **{"concurrency": (), "rates": (), "requests": None, "seconds": None},
        "objective": LatencySLO(),
        **given,
    }
    with pytest.raises(InvalidConfig) as refused:
        serve.build_load(CELL, **arguments)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rate 2,x", "--rate: '2,x' is not a list of numbers above 0. Give 0.5,8, say"),
        ("--rate 2,0", "--rate: '2,0' is not a list of numbers above 0. Give 0.5,8, say"),
        ("--requests 5", "--requests: it is how much of each --rate. Give --rate too"),
        ("--slo-ttft-ms=-5", "--slo-ttft-ms: -5 is not a number above 0. Give 10, say"),
        ("--plot /dev/null/x.png", "--plot: '/dev/null/x.png' cannot be written: "),
    ],
)
def test_a_refusal_names_the_flag(
    capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:1", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"forge bench serve: {line}")


# The picture.


def test_without_matplotlib_the_plot_is_refused_before_the_load_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(InvalidConfig, match=r"plot: matplotlib is not installed\. pip install"):
        serve.main("http://127.0.0.1:1", None, plot="load.png")


CLOSED = {
    **{"engine": "mine", "shape": "small", "rejected_share": 0.25, "req_s": 3},
    **{"ttft_p50": 4, "ttft_p99": 5, "gap_p50": 1, "gap_p99": 2},
}
LOADED = {**CLOSED, "rate": 9, "offered": 8.5, "goodput": 2}


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")  # matplotlib's own, which change with its version
def test_the_plot_has_a_row_for_each_load_with_the_outcomes_of_requests() -> None:
    figure = draw_levels([{**CLOSED, "c": 8}, {**CLOSED, "c": 2, "ttft_p50": 3}, LOADED])
    lines = [
        {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        for part in figure.subfigs
        for axes in part.axes
    ]
    legend = {"share rejected": []}
    assert lines == [
        {"p50": [[2, 3], [8, 4]], "p99": [[2, 5], [8, 5]]},
        {"p50": [[2, 1], [8, 1]], "p99": [[2, 2], [8, 2]]},
        {"completed": [[2, 3], [8, 3]], **legend},
        {"rejected": [[2, 0.25], [8, 0.25]]},
        {"p50": [[9, 4]], "p99": [[9, 5]]},
        {"p50": [[9, 1]], "p99": [[9, 2]]},
        {"offered": [[9, 8.5]], "completed": [[9, 3]], "good": [[9, 2]], **legend},
        {"rejected": [[9, 0.25]]},
    ]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_that_is_no_picture_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"plot: 'load\.txt' does not end in .png"):
        serve.main("http://127.0.0.1:1", None, plot="load.txt")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "load.png"
    write_serve_plot(str(path), [{**LOADED, "ttft_p50": None, "ttft_p99": None}])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_the_record_as_it_was_printed() -> None:
    root = Path(__file__).resolve().parents[2]
    record = json.loads((root / "bench" / "results" / "serve-hash.json").read_text())
    page = (root / "docs" / "Benchmarks.md").read_text().splitlines()
    assert len(record["figures"]["levels"]) == 8
    assert [
        row for level in record["figures"]["levels"] if (row := serve.format_row(level)) not in page
    ] == []
