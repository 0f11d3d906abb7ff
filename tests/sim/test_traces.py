"""Traces: arrivals are those of the file, and scaling and cutting are exact.

The log of a run and the recording of an engine are traces too: served again, requests end as they
did.

Whole traces are not shipped. Where FORGE_TRACES names a folder with them, `make test-soak` reads
them too.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from forge import LLM, __version__
from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.policy import POLICIES
from forge.recording import RecordingWriter, build_header
from forge.request import Delta, Request, SamplingParams
from forge.sim.clock import Clock, VirtualClockModel, VirtualClockStep
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.length_model import LengthModel
from forge.sim.scenario import Scenario, summary
from forge.sim.workloads.recordings import RecordedRequest
from forge.sim.workloads.request_labels import LabeledWorkload
from forge.sim.workloads.traces import (
    SAMPLE_TRACE,
    TraceFile,
    TraceRequest,
    TraceWorkload,
    open_trace,
    read_trace_requests,
)
from forge.sim.workloads.workload import (
    FixedArrivals,
    PoissonWorkload,
    RequestArrival,
    Workload,
    create_request,
)
from forge.sim.world import World

SECOND = 1_000_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
CHAT = [
    {"timestamp": 100, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 100, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 350, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 900, "input_length": 513, "output_length": 9, "hash_ids": [4, 5]},
]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def chat_trace(tmp_path: Path) -> TraceFile:
    """Write four requests; the first two share 1024 tokens, the third only the first block."""
    return open_trace(write_lines(tmp_path / "chat.jsonl", *map(json.dumps, CHAT)))


def prompts(trace: TraceWorkload) -> list[tuple[int, ...]]:
    return [arrival.request.prompt for arrival in trace.arrivals()]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of equal tokens at the beginning."""
    for count, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return count
    return min(len(first), len(second))


def test_the_sample_is_read_as_another_reader_reads_it() -> None:
    with SAMPLE_TRACE.open() as file:
        rows = list(csv.DictReader(file))
    times = []
    for row in rows:
        whole, _, part = row["TIMESTAMP"].partition(".")
        seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
        times.append(seconds * SECOND + int(part) * 100)
    expected = [
        (time - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]
    assert len(expected) == 300
    arrivals = list(TraceWorkload(open_trace(SAMPLE_TRACE)).arrivals())
    assert expected == [
        (a.at_ns, len(a.request.prompt), a.request.params.max_tokens) for a in arrivals
    ]
    assert [a.request.id for a in arrivals] == list(range(300))
    assert len({a.request.prompt[0] for a in arrivals}) == 300


def test_the_sample_names_its_source_and_licence() -> None:
    readme = (SAMPLE_TRACE.parent / "README.md").read_text(encoding="utf-8")
    assert "CC-BY-4.0" in readme and "github.com/Azure/AzurePublicDataset" in readme


def test_times_go_on_over_days_months_and_leap_years(tmp_path: Path) -> None:
    """By the hour, from the end of February in a leap year until March, and over New Year."""
    times = [
        datetime(year, month, day, hour, 59, 59, 123_456, tzinfo=UTC)
        for year in (1999, 2000, 2023, 2024, 2100)
        for month, day in ((1, 1), (2, 28), (3, 1), (4, 30), (12, 31))
        for hour in (0, 23)
    ]
    lines = [f"{time:%Y-%m-%d %H:%M:%S.%f}0,1,1" for time in times]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    trace = open_trace(write_lines(tmp_path / "a.csv", header, *lines))
    since = [(time - times[0]).total_seconds() for time in times]
    assert [request.at_ns for request in trace] == [round(s) * SECOND for s in since]


def test_a_time_may_have_fewer_digits_and_a_zone(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines = ("2024-05-10 00:00:00+00:00,5,6", "2024-05-10 00:00:01.25+00:00,7,0")
    trace = open_trace(write_lines(tmp_path / "a.csv", header, *lines))
    assert list(trace) == [TraceRequest(0, 5, 6), TraceRequest(SECOND * 5 // 4, 7, 0)]
    outputs = [arrival.request.params.max_tokens for arrival in TraceWorkload(trace).arrivals()]
    assert outputs == [6, 1]


def test_every_output_has_its_length_whatever_its_tokens_are() -> None:
    (arrival,) = TraceWorkload([TraceRequest(0, 3, 8)]).arrivals()
    assert arrival.request.params == SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_prompts_share_their_tokens_as_far_as_they_share_hash_ids(chat_trace: TraceFile) -> None:
    first, second, third, fourth = prompts(TraceWorkload(chat_trace))
    assert [len(p) for p in (first, second, third, fourth)] == [1300, 1536, 512, 513]
    assert common_prefix(first, second) == 1024
    assert common_prefix(first, third) == common_prefix(second, third) == 512
    assert (
        common_prefix(first, fourth)
        == common_prefix(second, fourth)
        == common_prefix(third, fourth)
        == 0
    )


def test_times_of_milliseconds_count_from_the_first(chat_trace: TraceFile) -> None:
    assert [a.at_ns for a in TraceWorkload(chat_trace).arrivals()] == [
        0,
        0,
        250_000_000,
        800_000_000,
    ]


def test_scaled_prompts_share_as_many_blocks_as_before(chat_trace: TraceFile) -> None:
    """A block of 512 becomes one of 16, and a partial block stays partial."""
    first, second, third, fourth = prompts(TraceWorkload(chat_trace, scale=1 / 32))
    assert [len(p) for p in (first, second, third, fourth)] == [32 + 276 // 32, 48, 16, 16]
    assert common_prefix(first, second) == 32
    assert common_prefix(first, third) == 16
    assert common_prefix(first, fourth) == 0


def test_lengths_are_scaled_then_cut_and_at_least_1() -> None:
    requests = [TraceRequest(0, 100, 40), TraceRequest(1, 1, 1), TraceRequest(2, 300, 7)]
    trace = TraceWorkload(requests, scale=0.3, max_prompt_tokens=60, max_output_tokens=5)
    lengths = [(len(a.request.prompt), a.request.params.max_tokens) for a in trace.arrivals()]
    assert lengths == [(30, 5), (1, 1), (60, 2)]


def test_cut_prompts_keep_their_shared_beginnings(chat_trace: TraceFile) -> None:
    whole, cut = (
        prompts(TraceWorkload(chat_trace)),
        prompts(TraceWorkload(chat_trace, max_prompt_tokens=1100)),
    )
    assert [len(p) for p in cut] == [1100, 1100, 512, 513]
    assert [p[:1100] for p in whole] == cut


def test_a_trace_twice_as_fast_takes_half_the_time(chat_trace: TraceFile) -> None:
    plain = [a.at_ns for a in TraceWorkload(chat_trace).arrivals()]
    assert [2 * a.at_ns for a in TraceWorkload(chat_trace, speed=2.0).arrivals()] == plain


def test_a_lap_begins_a_mean_gap_after_the_one_before_and_shares_nothing_with_it(
    chat_trace: TraceFile,
) -> None:
    arrivals = list(TraceWorkload(chat_trace, num_requests=10).arrivals())
    assert [a.request.id for a in arrivals] == list(range(10))
    lap_ns = 800_000_000 + 800_000_000 // 3
    first = [a.at_ns for a in arrivals[:4]]
    assert [a.at_ns - lap_ns for a in arrivals[4:8]] == first
    assert [a.at_ns - 2 * lap_ns for a in arrivals[8:]] == first[:2]
    lap_prompts = [a.request.prompt for a in arrivals]
    assert common_prefix(lap_prompts[4], lap_prompts[5]) == 1024
    assert {common_prefix(p, q) for p in lap_prompts[:4] for q in lap_prompts[4:]} == {0}


def test_a_long_run_has_the_rate_of_its_trace() -> None:
    *_, last = TraceWorkload(open_trace(SAMPLE_TRACE), num_requests=1500).arrivals()
    rows = list(open_trace(SAMPLE_TRACE))
    assert 1499 / last.at_ns == pytest.approx(299 / rows[-1].at_ns, rel=1e-6)


def test_a_trace_ends_early_where_fewer_requests_are_given(chat_trace: TraceFile) -> None:
    assert len(list(TraceWorkload(chat_trace, num_requests=3).arrivals())) == 3
    assert list(TraceWorkload(chat_trace, num_requests=0).arrivals()) == []
    assert list(TraceWorkload([], num_requests=5).arrivals()) == []


def test_one_request_alone_comes_every_second() -> None:
    assert [a.at_ns for a in TraceWorkload([TraceRequest(0, 1, 1)], num_requests=3).arrivals()] == [
        0,
        SECOND,
        2 * SECOND,
    ]


def test_requests_are_read_one_at_a_time() -> None:
    """Memory is bounded: of an endless trace only the given requests are read."""
    read = 0

    def endless() -> Iterator[TraceRequest]:
        nonlocal read
        while True:
            read += 1
            yield TraceRequest(read, 4, 4, (read,))

    class Endless:
        def __iter__(self) -> Iterator[TraceRequest]:
            return endless()

    assert len(list(islice(TraceWorkload(Endless()).arrivals(), 50))) == 50
    assert read == 50


def test_a_run_of_the_sample_serves_all_requests() -> None:
    config = EngineConfig(num_blocks=3000, max_num_seqs=64, max_model_len=16384)
    model = VirtualClockModel(LengthModel(), Clock(), ConstantCost(20_000_000))
    trace = TraceWorkload(open_trace(SAMPLE_TRACE), speed=4.0, num_requests=60)
    measures = World(Engine(model, config), model, trace).run()
    assert dict(measures.finish_counts) == {"length": 60}
    assert measures.num_output_tokens == sum(row.output for row in islice(trace.requests, 60))


# Logs and recordings.


class ClientView(NamedTuple):
    """A request as its client saw it."""

    prompt: int
    first_ns: int | None
    end_ns: int
    how: str


class ClientWatcher:
    """A WorldObserver: what each client saw, in the order of arrival."""

    def __init__(self) -> None:
        self._arrivals: dict[int, RequestArrival] = {}
        self._first_ns: dict[int, int] = {}
        self._ends: dict[int, tuple[int, str]] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        assert refusal is None
        self._arrivals[arrival.request.id] = arrival

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Do nothing: the next step reports the end of the request."""

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            since_ns = now_ns - self._arrivals[delta.request_id].at_ns
            if delta.tokens:
                self._first_ns.setdefault(delta.request_id, since_ns)
            if delta.finish is not None:
                self._ends[delta.request_id] = (since_ns, delta.finish.value)

    @property
    def views(self) -> list[ClientView]:
        return [
            ClientView(
                len(arrival.request.prompt), self._first_ns.get(request_id), *self._ends[request_id]
            )
            for request_id, arrival in self._arrivals.items()
        ]


SMALL = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)


class TraceRun(NamedTuple):
    """The result of a run, its log and its recording."""

    clients: list[ClientView]
    preemptions: int
    log: str
    recording: str


def run_workload(workload: Workload) -> TraceRun:
    """Run with shortest prompts first, in a cache that is too small, on a model that takes time."""
    model = VirtualClockModel(LengthModel(), Clock(), AffineCost(2_000_000, 100_000, 30_000))
    log: list[str] = []
    recording: list[str] = []
    name = "shortest-prompt"
    header = build_header(SMALL, model.vocab_size(), model.eos_token(), name, __version__)
    recorder = RecordingWriter(recording.append, lambda: model.clock.now_ns, header)
    engine = Engine(model, SMALL, policy=POLICIES[name], recorder=recorder)
    clients, written_log = ClientWatcher(), DecisionLog(log.append, {"forge": __version__})
    World(engine, model, workload, clients, written_log).run()
    recorder.close()
    written_log.close()
    return TraceRun(
        clients.views, engine.scheduler.num_preemptions, "".join(log), "".join(recording)
    )


def crowded_workload() -> FixedArrivals:
    """Return forty requests above the capacity, every fifth with little patience."""
    poisson = PoissonWorkload(90.0, 40, lambda i: (3 + 7 * i % 50, 5 + 3 * i % 40), seed=3)
    return FixedArrivals(
        tuple(
            arrival._replace(disconnect_ns=arrival.at_ns + 90_000_000 if i % 5 == 0 else None)
            for i, arrival in enumerate(LabeledWorkload(poisson, 1, 1, 0).arrivals())
        )
    )


@pytest.fixture(scope="module")
def uneven_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one trace of each kind whose rate differs between beginning and end."""
    folder, run = tmp_path_factory.mktemp("traces"), run_workload(crowded_workload())
    seconds = [*range(20), *range(30, 60, 3)]
    chats = [CHAT[1] | {"timestamp": 1000 * second} for second in seconds]
    rows = [f"2024-05-10 00:00:{second:02},9,4" for second in seconds]
    return {
        "azure": write_lines(folder / "azure.csv", AZURE, *rows),
        "mooncake": write_lines(folder / "mooncake.jsonl", *map(json.dumps, chats)),
        "log": write_lines(folder / "log", *run.log.splitlines()),
        "recording": write_lines(folder / "recording", *run.recording.splitlines()),
        "sample": Path("sample"),
    }


@pytest.mark.parametrize("kind", ["azure", "mooncake", "log", "recording", "sample"])
def test_requests_of_a_trace_come_at_the_given_rate(
    uneven_traces: dict[str, Path], kind: str
) -> None:
    """The whole trace, its beginning, or laps: exact to the nanosecond in the last arrival."""
    scenario = Scenario(workload=str(uneven_traces[kind]), rate=8.0)
    for requests, scale in ((None, 1.0), (2, 1.0), (17, 0.125), (30, 1.0), (700, 0.125)):
        workload, _ = replace(scenario, requests=requests, scale=scale).create_workload()
        first, *_, last = times = [arrival.at_ns for arrival in workload.arrivals()]
        assert requests in (None, len(times))
        assert abs(8 * (last - first) - (len(times) - 1) * SECOND) <= 8


def test_requests_that_all_come_at_once_cannot_be_given_a_rate(
    uneven_traces: dict[str, Path],
) -> None:
    at_once = TraceWorkload([TraceRequest(0, 4, 4)] * 3 + [TraceRequest(SECOND, 4, 4)])
    with pytest.raises(InvalidConfig, match=r"^rate: the first 3 requests come at the same time"):
        replace(at_once, num_requests=3).at_rate(2.0)
    assert [a.at_ns for a in at_once.at_rate(2.0).arrivals()] == [0, 0, 0, 3 * SECOND // 2]
    # One request, or none, has no rate.
    assert [a.at_ns for a in replace(at_once, num_requests=1).at_rate(2.0).arrivals()] == [0]
    assert list(TraceWorkload([]).at_rate(2.0).arrivals()) == []


def test_the_rate_that_was_offered_is_that_of_all_arrivals(tmp_path: Path) -> None:
    """Refused requests count: five in four seconds, of which the first and last are too long."""
    lengths = (9999, 5, 5, 5, 9999)
    rows = [f"2024-05-10 00:00:0{second},{n},2" for second, n in enumerate(lengths)]
    path = write_lines(tmp_path / "trace.csv", AZURE, *rows)
    figures = summary(Scenario(workload=str(path), rate=None).run())
    assert (figures["requests"], figures["refused"]) == (5, 2)
    assert figures["offered_per_s"] == 1.0
    assert summary(Scenario(workload=str(path), rate=2.0).run())["offered_per_s"] == 2.0
    assert summary(Scenario(workload=str(path), requests=1).run())["offered_per_s"] is None


@pytest.mark.parametrize("kind", ["log", "recording"])
def test_a_log_or_a_recording_is_a_workload_with_the_same_endings(
    tmp_path: Path, kind: str
) -> None:
    """The same first token and the same end of every request, with aborts and preemptions."""
    run = run_workload(crowded_workload())
    ends = Counter(client.how for client in run.clients)
    assert run.preemptions > 3 and ends["length"] > 20 and ends["abort"] > 3
    assert len({client.first_ns for client in run.clients}) > 20
    path = tmp_path / kind
    path.write_text(getattr(run, kind), encoding="utf-8")
    again = run_workload(LabeledWorkload(TraceWorkload(open_trace(path)), 1, 1, 0))
    assert again.clients == run.clients
    assert again.preemptions == run.preemptions


def test_a_recording_has_the_prompts_and_the_lengths_of_the_answers(
    tmp_path: Path,
) -> None:
    """Two choices are two requests; an answer that ended early is as long as it was."""
    path = tmp_path / "run.jsonl"
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=1, stop=("e",), n=2),
        SamplingParams(max_tokens=7),
    ]
    with LLM("hash", record=str(path)) as llm:
        outputs = llm.generate(["one, two", "three"], params)
    arrivals = list(TraceWorkload(open_trace(path)).arrivals())
    prompts = [tuple(output.prompt_token_ids) for output in outputs]
    assert [a.request.prompt for a in arrivals] == [prompts[0], prompts[0], prompts[1]]
    lengths = [len(choice.token_ids) for output in outputs for choice in output.choices]
    assert lengths[0] != lengths[1] and max(lengths[:2]) < 30
    assert [a.request.params.max_tokens for a in arrivals] == lengths
    assert [(a.at_ns, a.disconnect_ns) for a in arrivals] == [(0, None)] * 3


def test_a_recorded_request_keeps_its_class_and_its_salt_and_comes_when_it_says() -> None:
    """The order of submission differs from that of arrival; the first came to an idle engine."""
    params, ms = SamplingParams(max_tokens=9), 1_000_000
    late = Request(4, (5, 6), params, priority=2, cache_salt="a", arrival_s=7.5)
    early = Request(9, (5,), params, arrival_s=7.0)
    requests = read_trace_requests(
        [
            RecordedRequest(late, 1800 * ms, None, (9,)),
            RecordedRequest(early, 1000 * ms, 1700 * ms, (3,)),
        ]
    )
    first, second = requests
    assert first == TraceRequest(0, 1, 9, tokens=(5,), patience_ns=700 * ms)
    assert second == TraceRequest(500 * ms, 2, 9, tokens=(5, 6), priority=2, cache_salt="a")
    (request,) = [a.request for a in TraceWorkload([second]).arrivals()]
    assert (request.priority, request.cache_salt) == (2, "a")


def test_a_request_without_an_arrival_time_comes_with_the_next_plan() -> None:
    plain = Request(0, (5, 6), SamplingParams(max_tokens=9))
    timed = Request(1, (7,), SamplingParams(max_tokens=9), arrival_s=3.0)
    first, second = read_trace_requests(
        [RecordedRequest(plain, 1_000, 1_400, (2,)), RecordedRequest(timed, 1_600, None, (9,))]
    )
    assert first == TraceRequest(0, 2, 9, tokens=(5, 6), patience_ns=400)
    assert second == TraceRequest(600, 1, 9, tokens=(7,))


def test_scaled_prompts_of_a_recording_keep_their_shared_beginnings() -> None:
    """Half as long, twice as long, and in another lap, which shares nothing."""
    one, other = (*range(20), 50, 51), (*range(20), 60, 61, 62)
    requests = [TraceRequest(0, 22, 1, tokens=one), TraceRequest(1, 23, 1, tokens=other)]
    for scale, lengths, shared in ((1.0, (22, 23), 20), (0.5, (11, 12), 10), (2.0, (44, 46), 40)):
        first, second = prompts(TraceWorkload(requests, scale=scale))
        assert (len(first), len(second), common_prefix(first, second)) == (*lengths, shared)
    assert prompts(TraceWorkload(requests)) == [one, other]
    assert prompts(TraceWorkload(requests, max_prompt_tokens=21)) == [one[:21], other[:21]]
    laps = prompts(TraceWorkload(requests, num_requests=4))
    assert common_prefix(laps[2], laps[3]) == 20 and not set(laps[0] + laps[1]) & set(
        laps[2] + laps[3]
    )


def test_a_client_stays_as_long_on_a_faster_trace() -> None:
    requests = [TraceRequest(0, 4, 4), TraceRequest(1000, 4, 4, patience_ns=70)]
    arrivals = list(TraceWorkload(requests, speed=2.0).arrivals())
    assert [(a.at_ns, a.disconnect_ns) for a in arrivals] == [(0, None), (500, 570)]


def test_a_damaged_or_cut_run_is_refused(tmp_path: Path) -> None:
    run = run_workload(FixedArrivals((RequestArrival(5, create_request(0, 9, 4)),)))
    log, recording = run.log.splitlines(), run.recording.splitlines()
    other = [log[0], log[1].replace('"prompt":9', '"prompt":8'), *log[2:]]
    for lines in (log[:-1], [*log[:2], *log[3:]], other):
        with pytest.raises(InvalidConfig, match="does not end with the hash of its lines"):
            open_trace(write_lines(tmp_path / "log", *lines))
    with pytest.raises(InvalidConfig, match="recording: its end is missing"):
        open_trace(write_lines(tmp_path / "recording", *recording[:-1]))
    with pytest.raises(InvalidConfig, match="recording: line 3 is not as it was written"):
        open_trace(write_lines(tmp_path / "recording", *recording[:2], *recording[3:]))


ROW = "2023-11-16 18:17:03.9799600,10,2"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((AZURE, ROW, "2023-11-16 18:17:04,10"), "line 3: not enough values"),
        ((AZURE, ROW, "yesterday,10,2"), "line 3: "),
        ((AZURE, ROW, "2023-11-16 18:17:02,10,2"), "line 3: it is earlier than the line before"),
        ((AZURE, "2023-11-16 18:17:03,-10,2"), "line 2: a length is negative"),
        (('{"timestamp": 0}',), "line 1: not a request: KeyError('input_length')"),
        (("{", ROW), "line 1: "),
        ((json.dumps(CHAT[0]), "[1]"), "line 2: not a request: TypeError"),
        (
            (json.dumps(CHAT[0] | {"hash_ids": [1]}),),
            "line 1: 1 hash_ids for 1300 tokens, 512 each",
        ),
    ],
)
def test_a_line_that_is_no_request_is_named(
    lines: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    trace = open_trace(write_lines(tmp_path / "broken.txt", *lines))
    with pytest.raises(InvalidConfig) as refusal:
        list(trace)
    assert f"broken.txt, {problem}" in str(refusal.value)
    assert str(refusal.value).startswith("workload: ") and "\n" not in str(refusal.value)


def test_empty_lines_and_a_byte_order_mark_are_no_requests(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", f"\ufeff{AZURE}", ROW, "", ROW, "")
    assert len(list(open_trace(path))) == 2
    path = write_lines(
        tmp_path / "b.jsonl", f"\ufeff{json.dumps(CHAT[0])}", " ", json.dumps(CHAT[1])
    )
    assert len(list(open_trace(path))) == 2


def test_a_file_that_is_no_trace_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"begins with 'a,b,c', which is no known trace format"):
        open_trace(write_lines(tmp_path / "other.csv", "a,b,c"))
    with pytest.raises(InvalidConfig, match=r"absent\.csv cannot be read"):
        open_trace(tmp_path / "absent.csv")
    with pytest.raises(InvalidConfig, match=r"cannot be read"):
        open_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9f" * 9)
    with pytest.raises(InvalidConfig, match=r"binary cannot be read"):
        open_trace(tmp_path / "binary")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_or_scale_must_be_positive(value: float) -> None:
    with pytest.raises(InvalidConfig, match=r"speed: .* is not above 0"):
        TraceWorkload([], speed=value)
    with pytest.raises(InvalidConfig, match=r"scale: .* is not above 0"):
        TraceWorkload([], scale=value)


def whole_trace(name: str) -> Path:
    folder = os.environ.get("FORGE_TRACES")
    if folder is None or not (Path(folder) / name).is_file():
        pytest.skip(f"FORGE_TRACES names no folder with {name}")
    return Path(folder) / name


MOONCAKE = [
    # Hits of an infinite cache, as a share of the blocks of the trace.
    ("mooncake_conversation.public.jsonl", 0.3456),
    ("mooncake_synthetic.public.jsonl", 0.3293),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stated"), MOONCAKE)
def test_a_real_trace_has_the_hit_rate_that_is_stated_for_it(name: str, stated: float) -> None:
    cached, hits, blocks = set[int](), 0, 0
    for request in open_trace(whole_trace(name)):
        blocks += len(request.blocks)
        hits += sum(block in cached for block in request.blocks)
        cached.update(request.blocks)
    assert hits / blocks == pytest.approx(stated, abs=0.00005)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stated"), MOONCAKE)
def test_an_engine_with_blocks_for_all_finds_what_a_real_trace_shares(
    name: str, stated: float
) -> None:
    """Blocks of 16 instead of 512.

    The stated figure of the trace includes blocks that no engine shares: partial blocks, and the
    block with the last token of a prompt.
    """
    path = whole_trace(name)
    cached, found, blocks = set[int](), 0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        usable = (fields["input_length"] * 16 // 512 - 1) // 16
        leading = 0
        for block in fields["hash_ids"][: max(0, usable)]:
            if block not in cached:
                break
            leading += 1
        cached.update(fields["hash_ids"][: fields["input_length"] // 512])
        found += leading
        blocks += len(fields["hash_ids"])
    assert 0.8 * stated < found / blocks <= stated

    config = EngineConfig(
        num_blocks=300_000,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=16384,
    )
    model = VirtualClockModel(LengthModel(), Clock(), ConstantCost())
    engine = Engine(model, config)
    trace = TraceWorkload(open_trace(path), scale=1 / 32, max_output_tokens=1)
    World(engine, model, trace).run()
    assert engine.scheduler.pool.num_evictions == 0
    assert engine.scheduler.num_cached_tokens == 16 * found


@pytest.mark.soak
@pytest.mark.parametrize("name", ["azure2023_conv.public.csv", "azure2023_code.public.csv"])
def test_a_real_trace_can_be_repeated_for_long(name: str) -> None:
    trace = open_trace(whole_trace(name))
    rows = list(trace)
    *_, last = TraceWorkload(trace, num_requests=5 * len(rows), max_prompt_tokens=1).arrivals()
    own = (len(rows) - 1) / rows[-1].at_ns
    assert (5 * len(rows) - 1) / last.at_ns == pytest.approx(own, rel=1e-6)
