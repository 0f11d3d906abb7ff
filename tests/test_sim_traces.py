"""Traces: what a file says is what arrives, and what is bent is bent exactly.

Whole traces are not shipped. Where FORGE_TRACES names a folder with them, `make test-soak` reads
them too.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.request import SamplingParams
from sim.clock import Clock, TimedModel
from sim.cost import Constant
from sim.lengths import LengthModel
from sim.traces import SAMPLE, Asked, Trace, TraceFile, mean_rate, trace_file
from sim.world import World

SECOND = 1_000_000_000
CHAT = [
    {"timestamp": 100, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 100, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 350, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 900, "input_length": 513, "output_length": 9, "hash_ids": [4, 5]},
]


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def chat(tmp_path: Path) -> TraceFile:
    """Four requests; the first two share 1024 tokens, the third has the first block alone."""
    return trace_file(written(tmp_path / "chat.jsonl", *map(json.dumps, CHAT)))


def prompts(trace: Trace) -> list[tuple[int, ...]]:
    return [arrival.request.prompt for arrival in trace.arrivals()]


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Tokens at the beginning that are the same."""
    for count, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return count
    return min(len(first), len(second))


def test_the_sample_is_read_as_another_reader_reads_it() -> None:
    with SAMPLE.open() as file:
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
    arrivals = list(Trace(trace_file(SAMPLE)).arrivals())
    assert expected == [
        (a.at_ns, len(a.request.prompt), a.request.params.max_tokens) for a in arrivals
    ]
    assert [a.request.id for a in arrivals] == list(range(300))
    assert len({a.request.prompt[0] for a in arrivals}) == 300


def test_the_sample_says_whose_it_is() -> None:
    said = (SAMPLE.parent / "README.md").read_text(encoding="utf-8")
    assert "CC-BY-4.0" in said and "github.com/Azure/AzurePublicDataset" in said


def test_times_go_on_over_days_months_and_leap_years(tmp_path: Path) -> None:
    """By the hour, from before the end of a leap year's February until March, and over New Year."""
    times = [
        datetime(year, month, day, hour, 59, 59, 123_456, tzinfo=UTC)
        for year in (1999, 2000, 2023, 2024, 2100)
        for month, day in ((1, 1), (2, 28), (3, 1), (4, 30), (12, 31))
        for hour in (0, 23)
    ]
    lines = [f"{time:%Y-%m-%d %H:%M:%S.%f}0,1,1" for time in times]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    trace = trace_file(written(tmp_path / "a.csv", header, *lines))
    since = [(time - times[0]).total_seconds() for time in times]
    assert [asked.at_ns for asked in trace] == [round(s) * SECOND for s in since]


def test_a_time_may_have_fewer_digits_and_a_zone(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines = ("2024-05-10 00:00:00+00:00,5,6", "2024-05-10 00:00:01.25+00:00,7,0")
    trace = trace_file(written(tmp_path / "a.csv", header, *lines))
    assert list(trace) == [Asked(0, 5, 6), Asked(SECOND * 5 // 4, 7, 0)]
    outputs = [arrival.request.params.max_tokens for arrival in Trace(trace).arrivals()]
    assert outputs == [6, 1]


def test_every_output_has_its_length_whatever_its_tokens_are() -> None:
    (arrival,) = Trace([Asked(0, 3, 8)]).arrivals()
    assert arrival.request.params == SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_prompts_share_their_tokens_as_far_as_they_share_hash_ids(chat: TraceFile) -> None:
    first, second, third, fourth = prompts(Trace(chat))
    assert [len(p) for p in (first, second, third, fourth)] == [1300, 1536, 512, 513]
    assert common(first, second) == 1024
    assert common(first, third) == common(second, third) == 512
    assert common(first, fourth) == common(second, fourth) == common(third, fourth) == 0


def test_times_of_milliseconds_count_from_the_first(chat: TraceFile) -> None:
    assert [a.at_ns for a in Trace(chat).arrivals()] == [0, 0, 250_000_000, 800_000_000]


def test_scaled_prompts_share_as_many_blocks_as_before(chat: TraceFile) -> None:
    """A block of 512 becomes one of 16, and what is begun of a block stays begun."""
    first, second, third, fourth = prompts(Trace(chat, scale=1 / 32))
    assert [len(p) for p in (first, second, third, fourth)] == [32 + 276 // 32, 48, 16, 16]
    assert common(first, second) == 32
    assert common(first, third) == 16
    assert common(first, fourth) == 0


def test_lengths_are_scaled_then_cut_and_never_nothing() -> None:
    requests = [Asked(0, 100, 40), Asked(1, 1, 1), Asked(2, 300, 7)]
    trace = Trace(requests, scale=0.3, longest_prompt=60, longest_output=5)
    lengths = [(len(a.request.prompt), a.request.params.max_tokens) for a in trace.arrivals()]
    assert lengths == [(30, 5), (1, 1), (60, 2)]


def test_what_is_cut_keeps_what_it_shares(chat: TraceFile) -> None:
    whole, cut = prompts(Trace(chat)), prompts(Trace(chat, longest_prompt=1100))
    assert [len(p) for p in cut] == [1100, 1100, 512, 513]
    assert [p[:1100] for p in whole] == cut


def test_a_trace_twice_as_fast_takes_half_the_time(chat: TraceFile) -> None:
    plain = [a.at_ns for a in Trace(chat).arrivals()]
    assert [2 * a.at_ns for a in Trace(chat, speed=2.0).arrivals()] == plain


def test_a_lap_begins_a_mean_gap_after_the_one_before_and_shares_nothing_with_it(
    chat: TraceFile,
) -> None:
    arrivals = list(Trace(chat, count=10).arrivals())
    assert [a.request.id for a in arrivals] == list(range(10))
    lap_ns = 800_000_000 + 800_000_000 // 3
    first = [a.at_ns for a in arrivals[:4]]
    assert [a.at_ns - lap_ns for a in arrivals[4:8]] == first
    assert [a.at_ns - 2 * lap_ns for a in arrivals[8:]] == first[:2]
    asked = [a.request.prompt for a in arrivals]
    assert common(asked[4], asked[5]) == 1024
    assert {common(p, q) for p in asked[:4] for q in asked[4:]} == {0}


def test_a_long_run_has_the_rate_of_its_trace() -> None:
    trace = trace_file(SAMPLE)
    *_, last = Trace(trace, count=1500).arrivals()
    assert 1499 / (last.at_ns / SECOND) == pytest.approx(mean_rate(trace), rel=1e-6)
    rows = list(trace)
    assert mean_rate(trace) == pytest.approx(299 * SECOND / rows[-1].at_ns)


def test_a_trace_ends_early_where_fewer_are_asked_for(chat: TraceFile) -> None:
    assert len(list(Trace(chat, count=3).arrivals())) == 3
    assert list(Trace(chat, count=0).arrivals()) == []
    assert list(Trace([], count=5).arrivals()) == []


def test_one_request_alone_comes_every_second() -> None:
    assert [a.at_ns for a in Trace([Asked(0, 1, 1)], count=3).arrivals()] == [
        0,
        SECOND,
        2 * SECOND,
    ]


def test_requests_are_read_one_at_a_time() -> None:
    """So memory is bounded: of a trace without end only what was asked for is read."""
    read = 0

    def endless() -> Iterator[Asked]:
        nonlocal read
        while True:
            read += 1
            yield Asked(read, 4, 4, (read,))

    class Endless:
        def __iter__(self) -> Iterator[Asked]:
            return endless()

    assert len(list(islice(Trace(Endless()).arrivals(), 50))) == 50
    assert read == 50


def test_a_run_of_the_sample_serves_everybody() -> None:
    config = EngineConfig(num_blocks=3000, max_num_seqs=64, max_model_len=16384)
    model = TimedModel(LengthModel(), Clock(), Constant(20_000_000))
    trace = Trace(trace_file(SAMPLE), speed=4.0, count=60)
    measures = World(Engine(model, config), model, trace).run()
    assert dict(measures.endings) == {"length": 60}
    assert measures.output_tokens == sum(row.output for row in islice(trace.requests, 60))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:17:03.9799600,10,2"


@pytest.mark.parametrize(
    ("lines", "told"),
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
    lines: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    trace = trace_file(written(tmp_path / "broken.txt", *lines))
    with pytest.raises(InvalidConfig) as refusal:
        list(trace)
    assert f"broken.txt, {told}" in str(refusal.value)
    assert str(refusal.value).startswith("workload: ") and "\n" not in str(refusal.value)


def test_empty_lines_and_a_byte_order_mark_are_no_requests(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"\ufeff{AZURE}", ROW, "", ROW, "")
    assert len(list(trace_file(path))) == 2
    path = written(tmp_path / "b.jsonl", f"\ufeff{json.dumps(CHAT[0])}", " ", json.dumps(CHAT[1]))
    assert len(list(trace_file(path))) == 2


def test_a_file_that_is_no_trace_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"begins with 'a,b,c', which is no trace"):
        trace_file(written(tmp_path / "other.csv", "a,b,c"))
    with pytest.raises(InvalidConfig, match=r"absent\.csv cannot be read"):
        trace_file(tmp_path / "absent.csv")
    with pytest.raises(InvalidConfig, match=r"cannot be read"):
        trace_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9f" * 9)
    with pytest.raises(InvalidConfig, match=r"binary cannot be read"):
        trace_file(tmp_path / "binary")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_or_scale_must_be_positive(value: float) -> None:
    with pytest.raises(InvalidConfig, match=r"speed: .* is not above 0"):
        Trace([], speed=value)
    with pytest.raises(InvalidConfig, match=r"scale: .* is not above 0"):
        Trace([], scale=value)


def whole_trace(name: str) -> Path:
    folder = os.environ.get("FORGE_TRACES")
    if folder is None or not (Path(folder) / name).is_file():
        pytest.skip(f"FORGE_TRACES names no folder with {name}")
    return Path(folder) / name


MOONCAKE = [
    # Of an infinite cache, as a share of the trace's blocks.
    ("mooncake_conversation.public.jsonl", 0.3456),
    ("mooncake_synthetic.public.jsonl", 0.3293),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stated"), MOONCAKE)
def test_a_real_trace_has_the_hit_rate_that_is_stated_for_it(name: str, stated: float) -> None:
    seen, hits, blocks = set[int](), 0, 0
    for asked in trace_file(whole_trace(name)):
        blocks += len(asked.blocks)
        hits += sum(block in seen for block in asked.blocks)
        seen.update(asked.blocks)
    assert hits / blocks == pytest.approx(stated, abs=0.00005)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stated"), MOONCAKE)
def test_an_engine_with_blocks_for_all_finds_what_a_real_trace_shares(
    name: str, stated: float
) -> None:
    """Blocks of 16 in place of 512. Of the trace's own figure is missing what no engine shares: a
    block that is not full, and the one with the last token of a prompt."""
    path = whole_trace(name)
    seen, found, blocks = set[int](), 0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        usable = (said["input_length"] * 16 // 512 - 1) // 16
        leading = 0
        for block in said["hash_ids"][: max(0, usable)]:
            if block not in seen:
                break
            leading += 1
        seen.update(said["hash_ids"][: said["input_length"] // 512])
        found += leading
        blocks += len(said["hash_ids"])
    assert 0.8 * stated < found / blocks <= stated

    config = EngineConfig(
        num_blocks=300_000,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=16384,
    )
    model = TimedModel(LengthModel(), Clock(), Constant())
    engine = Engine(model, config)
    trace = Trace(trace_file(path), scale=1 / 32, longest_output=1)
    World(engine, model, trace).run()
    assert engine.scheduler.pool.evictions == 0
    assert engine.scheduler.cached_tokens == 16 * found


@pytest.mark.soak
@pytest.mark.parametrize("name", ["azure2023_conv.public.csv", "azure2023_code.public.csv"])
def test_a_real_trace_can_be_repeated_for_long(name: str) -> None:
    trace = trace_file(whole_trace(name))
    rows = sum(1 for _ in trace)
    *_, last = Trace(trace, count=5 * rows, longest_prompt=1).arrivals()
    assert (5 * rows - 1) / (last.at_ns / SECOND) == pytest.approx(mean_rate(trace), rel=1e-6)
