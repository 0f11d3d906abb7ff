"""The lists of the peers' tests, and how outcomes are compared with them. No peer is needed."""

from pathlib import Path

import pytest

from tests.peers.expected import (
    FAILS,
    NOT_APPLICABLE,
    PASSES,
    Expectation,
    Total,
    compare,
    count,
    find_expected,
    find_faults,
    read_expected,
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def expectation(outcome: str = FAILS, **fields: object) -> Expectation:
    values = {"tests": (), "why": "so", "page": "", "sentence": "", "weights": "", **fields}
    return Expectation(outcome, "a.py", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_every_quoted_sentence_is_on_its_page(name: str) -> None:
    assert find_faults(read_expected(HERE / f"{name}.toml"), ROOT) == []


def test_a_sentence_that_is_on_no_page_is_a_fault() -> None:
    absent = expectation(NOT_APPLICABLE, page="README.md", sentence="It makes coffee.")
    neither = expectation(NOT_APPLICABLE)
    assert [text.partition(": ")[2] for text in find_faults([absent, neither], ROOT)] == [
        "a.py : README.md has no 'It makes coffee.'",
        "a.py : give a sentence of the documentation, or the weights",
    ]


def test_a_name_stands_for_all_its_parameters_and_no_other_test() -> None:
    listed = [expectation(tests=("test_x", "test_y[1]"))]
    ids = ("a.py::test_x", "a.py::test_x[2]", "a.py::test_y[1]")
    assert [find_expected(listed, each) for each in ids] == [FAILS] * 3
    others = ("a.py::test_y[2]", "a.py::test_xx", "b.py::test_x", "a.py")
    assert [find_expected(listed, each) for each in others] == [PASSES] * 4


def test_every_difference_from_the_list_is_reported() -> None:
    listed = [expectation(tests=("test_x",)), expectation(tests=("test_gone",))]
    outcomes = {"a.py::test_x": PASSES, "a.py::test_y": FAILS, "a.py::test_z": PASSES}
    assert compare(listed, outcomes, ["a.py"]) == [
        "a.py::test_x: passes, expected: fails",
        "a.py::test_y: fails, expected: passes",
        "a.py test_gone: there is no such test",
    ]
    assert compare(listed, {}, ["b.py"]) == [], "what was not run is not compared"


def test_totals_count_each_outcome_by_file() -> None:
    outcomes = {"a.py::x": PASSES, "a.py::y": FAILS, "b.py::x": NOT_APPLICABLE, "a.py::z": PASSES}
    assert count(outcomes) == [Total("a.py", 2, 1, 0), Total("b.py", 0, 0, 1)]
