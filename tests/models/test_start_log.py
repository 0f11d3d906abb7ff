"""The account of a start: every second belongs to one phase, and what has none is shown."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import pytest

from forge import start_log as start_log_module
from forge.start_log import StartLog, process_age_s


def ticks(*times_s: float) -> Iterator[float]:
    yield from times_s


def start_log(*times_s: float, began_s: float | None = None, first: str = "other") -> StartLog:
    clock = ticks(*times_s)
    return StartLog(began_s, first, lambda: next(clock))


def test_time_outside_of_phases_is_other():
    start = start_log(0.0, 0.0, 1.0, 4.0, 6.0)
    with start.phase("weights"):
        pass
    assert start.seconds() == {"weights": 3.0, "other": 3.0}


def test_an_inner_phase_stops_the_clock_of_the_outer_one():
    start = start_log(0.0, 0.0, 0.0, 1.0, 5.0, 7.0, 7.0)
    with start.phase("comparison"), start.phase("kernels"):
        pass
    assert start.seconds() == {"comparison": 3.0, "kernels": 4.0, "other": 0.0}


def test_a_phase_that_fails_is_closed():
    start = start_log(0.0, 0.0, 1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="no"), start.phase("weights"):
        raise ValueError("no")
    assert start.seconds() == {"weights": 1.0, "other": 2.0}


def test_a_start_that_began_before_has_its_first_phase():
    start = start_log(10.0, 10.0, began_s=8.0, first="process")
    assert start.seconds() == {"process": 2.0, "other": 0.0}


def test_the_line_adds_up_to_the_total(caplog: pytest.LogCaptureFixture):
    start = start_log(0.0, 0.0, 0.0, 9.5, 9.5, 9.54, 9.54, 9.58, 10.0)
    for name in ("imports", "configuration", "step costs"):
        with start.phase(name):
            pass
    start.log_summary()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("forge.start", logging.INFO)
    assert record.getMessage() == "model ready in 10.0 s: imports 9.5, other 0.5"


def test_the_age_of_this_process_grows():
    first_s = process_age_s()
    if first_s is None:
        pytest.skip("the system does not say when a process started")
    second_s = process_age_s()
    assert second_s is not None and 0.0 < first_s <= second_s


@pytest.mark.parametrize(
    ("before", "after"), [(logging.NOTSET, logging.INFO), (logging.ERROR, logging.ERROR)]
)
def test_a_level_that_the_program_has_set_stays(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_log_module.LOG, "level", before)
    importlib.reload(start_log_module)
    assert start_log_module.LOG.level == after
