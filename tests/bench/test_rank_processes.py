"""Parts of a measurement on rank processes: results, failures, and ranks that do not end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from forge.bench.rank_processes import run_parts


def run_named_parts(rank: int, world_size: int, start: int, parts: Sequence[str]) -> Iterator[Any]:
    """Set up and run parts that are named by what they do."""
    yield None
    for part in parts:
        if part == "hang" and rank == 1:
            threading.Event().wait()
        if part == "raise" and rank == 0:
            raise ValueError("a wrong sum")
        if part == "exit" and rank == 1:
            os._exit(3)
        yield part, rank, start


def fail_to_set_up(rank: int, world_size: int, start: int, parts: Sequence[str]) -> Iterator[Any]:
    raise ValueError("no such device")
    yield None


def run(set_up: Any, parts: Sequence[str], limit_s: float) -> tuple[dict[str, Any], list[str]]:
    results: dict[str, Any] = {}
    failures = run_parts(set_up, 2, parts, limit_s, results.__setitem__)
    return results, failures


@pytest.mark.long
def test_every_part_has_the_results_of_all_ranks_in_their_order() -> None:
    results, failures = run(run_named_parts, ["a", "b"], 50)
    assert failures == []
    assert results == {each: [(each, 0, 0), (each, 1, 0)] for each in ("a", "b")}


@pytest.mark.long
def test_a_rank_that_hangs_costs_its_part_and_the_next_parts_run_on_new_ranks() -> None:
    results, failures = run(run_named_parts, ["a", "hang", "b"], 2)
    assert failures == ["hang: rank 1 did not end it within 2 s"]
    assert results == {"a": [("a", 0, 0), ("a", 1, 0)], "b": [("b", 0, 1), ("b", 1, 1)]}


@pytest.mark.long
def test_an_exception_and_the_end_of_a_process_are_failures_of_their_parts() -> None:
    results, failures = run(run_named_parts, ["raise", "exit", "a"], 50)
    assert list(results) == ["a"]
    assert failures[0].startswith("raise: rank 0 failed: ") and "a wrong sum" in failures[0]
    assert failures[1] == "exit: rank 1 failed: its process ended"


@pytest.mark.long
def test_ranks_that_cannot_be_set_up_run_no_part() -> None:
    results, failures = run(fail_to_set_up, ["a"], 50)
    assert results == {}
    assert "no such device" in failures[0]
    assert failures[1] == "1 parts did not run, the first is 'a'"
