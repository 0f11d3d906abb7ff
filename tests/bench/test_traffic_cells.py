"""Traffic cells: what the file may say, and the requests that every engine gets."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge.bench.traffic_cells import (
    Batch,
    Cell,
    Conversations,
    OpenLoop,
    TraceBatch,
    Traffic,
)
from forge.bench.traffic_requests import RequestDraw, digest, read_trace
from forge.errors import InvalidConfig
from forge.sim.workloads.traces import SAMPLE_TRACE, TraceRequest

CELL: dict[str, Any] = {
    "name": "some",
    "label": "some requests",
    "requests": 3,
    "input": 20,
    "output": [4, 9],
    "params": {"temperature": 0.8},
}
TRAFFIC: dict[str, Any] = {
    "seed": "s",
    "rounds": 2,
    "options": {"max_model_len": 100},
    "cells": [CELL],
}


def read(folder: Path, **changes: Any) -> Traffic:
    """Return the cells of a file with TRAFFIC and these changes."""
    path = folder / "cells.json"
    path.write_text(json.dumps({"traffic": {**TRAFFIC, **changes}}))
    return Traffic.read(path)


def draw(cell: Cell, *trace: TraceRequest, seed: str = "s") -> RequestDraw:
    """Return the source of the requests of one cell."""
    traffic = Traffic(seed, 1, {"max_model_len": 100}, (cell,))
    return RequestDraw(traffic, trace, (10, 90))


def trace_of(*rows: tuple[float, int, int]) -> list[TraceRequest]:
    """Return requests of (seconds, prompt, output)."""
    return [TraceRequest(round(at_s * 1e9), prompt, output) for at_s, prompt, output in rows]


# The file of this repository.


def test_the_cells_have_each_kind_of_load_and_every_sampling_parameter() -> None:
    cells = {cell.name: cell for cell in Traffic.read().cells}
    assert {type(cell.load) for cell in cells.values()} == {
        Batch,
        TraceBatch,
        Conversations,
        OpenLoop,
    }
    for name in ("temperature", "top_p", "top_k", "top_k_top_p", "min_p", "mixed_params"):
        for streams in (64, 256):
            load = cells[f"{name}{streams}"].load
            assert load == Batch(streams, (200, 200), (128, 256))
    used = {name for cell in cells.values() for each in cell.params for name in each}
    assert used == {
        *("temperature", "top_p", "top_k", "min_p", "logprobs", "structured_outputs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
    kinds = [tuple(sorted(each)) for each in cells["mixed_params64"].params]
    assert len({*kinds}) == 6, "greedy and temperature have the same field"
    assert len(kinds) == 7
    assert cells["served25"].load == OpenLoop(25.0, 120.0)
    assert cells["turns16"].load == Conversations(16, 6, 1000, (50, 200), (100, 200))


# Checks.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"requests": 0}, "traffic some requests is 0, not a positive integer"),
        ({"requests": True}, "traffic some requests is True"),
        ({"input": []}, r"traffic some input is \[\], not a length or two"),
        ({"output": [9, 4]}, r"traffic some output is \[9, 4\], which is empty"),
        ({"output": [4, 81]}, "traffic some has a request of 101 tokens. Shorten it, or raise max"),
        ({"turns": 2}, "traffic some has input, output, requests, turns, which is no load. Use"),
        ({"params": {"top_q": 1}}, "traffic some params top_q is unknown. Use frequency_penalty"),
        ({"params": {"max_tokens": 4}}, "params max_tokens is unknown"),
        ({"params": {"top_p": 1.5}}, "traffic some top_p 1.5 is not a number from 0 to 1"),
        ({"params": []}, "traffic some has no params"),
        ({"params": 3}, "traffic some params is 3"),
        ({"params": {"structured_outputs": {}}}, 'structured_outputs is no schema. Give {"json"'),
    ],
)
def test_a_wrong_cell_is_refused_with_its_name_and_field(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        read(tmp_path, cells=[{**CELL, **change}])


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ({"name": "a", "label": "b", "rate": 0, "seconds": 9, "params": {}}, "a rate is 0, not a"),
        ({"name": "a", "label": "b", "rate": 2, "params": {}}, "a has rate, which is no load"),
        ({"name": "a", "requests": 2, "params": {}}, "cell 'a' has no label"),
        ([], r"cells \[\] is no object"),
    ],
)
def test_an_entry_that_is_no_cell_is_refused(cell: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        read(tmp_path, cells=[cell])


def test_the_longest_turn_of_a_conversation_has_to_fit(tmp_path: Path) -> None:
    """A prefix of 40, and two turns of 20 + 10: 100 tokens fit, 101 do not."""
    cell = {"name": "talk", "label": "t", "conversations": 2, "turns": 2, "prefix": 40}
    cell |= {"input": [5, 20], "output": 10, "params": {}}
    (found,) = read(tmp_path, cells=[cell]).cells
    assert found.load == Conversations(2, 2, 40, (5, 20), (10, 10))
    with pytest.raises(InvalidConfig, match="talk has a request of 101 tokens"):
        read(tmp_path, cells=[{**cell, "prefix": 41}])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cells": [CELL, CELL]}, "some is there twice"),
        ({"rounds": 0}, "rounds is 0"),
        ({"seed": 3}, "seed is no name"),
        ({"options": {"max_model_len": 100, "depth": 2}}, "options depth is unknown"),
        ({"options": {}}, "options has no max_model_len"),
        ({"more": 1}, "other keys than cells, options, rounds, seed"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        read(tmp_path, **change)


def test_cells_are_selected_by_name_in_the_order_of_the_names(tmp_path: Path) -> None:
    cells = [{**CELL, "name": name} for name in "abc"]
    traffic = read(tmp_path, cells=cells)
    assert [cell.name for cell in traffic.select(["c", "a", "c"]).cells] == ["c", "a"]
    with pytest.raises(InvalidConfig, match=r"there is no cell 'd'\. Use some of: a, b, c"):
        traffic.select(["a", "d"])


# Draws.


def test_rounds_have_the_same_lengths_and_other_tokens() -> None:
    cell = Cell("a", "", Batch(20, (5, 30), (2, 9)), ({},))
    first, second = (draw(cell).batch(cell, index) for index in (1, 2))
    assert [(len(a.prompt), a.output) for a in first] == [(len(b.prompt), b.output) for b in second]
    assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))
    assert len({len(each.prompt) for each in first}) > 3
    assert all(5 <= len(a.prompt) <= 30 and 2 <= a.output <= 9 for a in first)
    assert draw(cell).batch(cell, 1) == first
    assert draw(cell, seed="t").batch(cell, 1) != first


def test_cells_of_one_load_have_the_same_lengths() -> None:
    load = Batch(20, (5, 30), (2, 9))
    one, other = Cell("a", "", load, ({},)), Cell("b", "", load, ({"top_p": 0.9},))
    lengths = [
        [(len(each.prompt), each.output) for each in draw(cell).batch(cell, 1)]
        for cell in (one, other)
    ]
    assert lengths[0] == lengths[1]


def test_requests_alternate_through_the_parameters() -> None:
    cell = Cell("a", "", Batch(5, (3, 3), (2, 2)), ({"temperature": 0.0}, {"top_k": 5}))
    params = [each.params for each in draw(cell).batch(cell, 1)]
    assert params == [{"temperature": 0.0}, {"top_k": 5}] * 2 + [{"temperature": 0.0}]


def test_lengths_of_a_trace_are_drawn_and_clipped() -> None:
    """The longest sequence is 100: 300 + 2 is cut to 98 + 2, and 0 + 70 becomes 1 + 50."""
    cell = Cell("a", "", TraceBatch(50), ({},))
    trace = trace_of((0, 300, 2), (1, 0, 70), (2, 20, 30))
    lengths = {(len(each.prompt), each.output) for each in draw(cell, *trace).batch(cell, 1)}
    assert lengths == {(98, 2), (1, 50), (20, 30)}


def test_conversations_share_a_prefix_that_no_other_round_has() -> None:
    cell = Cell("a", "", Conversations(3, 2, 12, (4, 6), (2, 3)), ({},))
    first, second = (draw(cell).conversations(cell, index) for index in (1, 2))
    assert len(first[0].prefix) == 12
    assert [each.prefix for each in first] == [first[0].prefix] * 3
    assert first[0].prefix != second[0].prefix
    assert [len(each.turns) for each in first] == [2, 2, 2]
    prompts = [tuple(turn.prompt) for each in first for turn in each.turns]
    assert len({*prompts}) == 6
    assert all(4 <= len(prompt) <= 6 for prompt in prompts)


def test_arrivals_keep_the_gaps_of_the_trace_at_another_rate() -> None:
    """Gaps of 1, 3 and 2 s are 0.5, 1.5 and 1 s at 1 request a second: four take three."""
    cell = Cell("a", "", OpenLoop(1.0, 4.0), ({"top_p": 0.9},))
    trace = trace_of((0, 5, 2), (1, 6, 3), (4, 7, 4), (6, 8, 5))
    arrivals = draw(cell, *trace).arrivals(cell, 1)
    assert [each.due_s for each in arrivals] == pytest.approx([0.0, 0.5, 2.0, 3.0])
    assert [(len(a.request.prompt), a.request.output) for a in arrivals] == [
        *((5, 2), (6, 3), (7, 4), (8, 5))
    ]


def test_a_short_trace_is_repeated_one_mean_gap_after_its_end() -> None:
    cell = Cell("a", "", OpenLoop(2.0, 3.0), ({},))
    arrivals = draw(cell, *trace_of((0, 5, 2), (1, 6, 3), (4, 7, 4))).arrivals(cell, 1)
    # Gaps 1, 3, 2, 1, 3 are 10 s, scaled to the 2.5 s of six requests at 2 a second.
    assert [each.due_s for each in arrivals] == pytest.approx([0.0, 0.25, 1.0, 1.5, 1.75, 2.5])
    assert [each.request.output for each in arrivals] == [2, 3, 4, 2, 3, 4]


def test_a_long_trace_gives_a_part_of_it_that_the_seed_chooses() -> None:
    cell = Cell("a", "", OpenLoop(1.0, 4.0), ({},))
    trace = trace_of(*((index, 1 + index, 1) for index in range(90)))
    parts = []
    for seed in "abc":
        sizes = [len(a.request.prompt) for a in draw(cell, *trace, seed=seed).arrivals(cell, 1)]
        assert all(after == before + 1 for before, after in pairwise(sizes))
        parts.append(sizes[0])
    assert len({*parts}) > 1


def test_a_trace_without_a_rate_is_refused() -> None:
    cell = Cell("a", "", OpenLoop(1.0, 4.0), ({},))
    with pytest.raises(InvalidConfig, match="at the same time and have no rate"):
        draw(cell, *trace_of((3, 5, 2))).arrivals(cell, 1)


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(SAMPLE_TRACE.read_text().splitlines()[0] + "\n")
    with pytest.raises(InvalidConfig, match="has no request"):
        read_trace(path)
    assert len(read_trace(SAMPLE_TRACE)) == 300


def test_equal_work_has_an_equal_digest_and_any_change_another_one() -> None:
    cell = Cell("a", "", Batch(2, (5, 30), (2, 9)), ({"top_p": 0.9},))
    work = draw(cell).batch(cell, 1)
    assert digest(work) == digest(draw(cell).batch(cell, 1))
    changes = [
        [work[0]._replace(output=1), work[1]],
        [work[0]._replace(params={"top_p": 0.8}), work[1]],
        [work[0]._replace(prompt=[*work[0].prompt[:-1], 99]), work[1]],
        work[::-1],
    ]
    assert len({digest(each) for each in (work, *changes)}) == 5
