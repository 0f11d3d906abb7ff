"""EngineLoop: commands in, reports out, whoever sits at either end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_loop import Abort, Accepted, EngineLoop, Report
from forge.lanes import LANES, Lane
from forge.models.hash import HashModel
from forge.request import FinishReason, Request, SamplingParams, Structure
from forge.sequence import Guide
from forge.tokenizer import ByteTokenizer
from tests.virtual import VirtualTime

LIMIT_S = 60.0
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)


class Heard:
    """Every report, and a wait for those that say something."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._news = threading.Condition()

    def tell(self, report: Report) -> None:
        with self._news:
            self.reports.append(report)
            self._news.notify_all()

    def endings(self) -> dict[int, FinishReason]:
        """How each request that has ended has ended."""
        deltas = [delta for report in self.reports for delta in report.deltas]
        return {delta.request_id: delta.finish for delta in deltas if delta.finish is not None}

    def until_ended(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.endings()) >= count, LIMIT_S)


@contextmanager
def running(engine: Engine, heard: Heard) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, heard.tell)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.end()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def made(step_s: float = 0.0) -> Engine:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256)
    return Engine(HashModel(num_blocks=64, block_size=4, step_s=step_s), config)


def test_a_request_is_served_and_its_last_report_shows_an_empty_engine() -> None:
    heard = Heard()
    with running(made(), heard) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        heard.until_ended(1)
    tokens = [t for report in heard.reports for delta in report.deltas for t in delta.tokens]
    assert len(tokens) == 3
    last = heard.reports[-1].status
    assert (last.running, last.waiting, last.blocks_used, last.has_work) == (0, 0, 0, False)
    assert last.num_steps == len(heard.reports) == 3


def test_what_the_engine_does_not_take_is_reported_and_nothing_else_suffers() -> None:
    """The same id twice, as two commands between two steps."""
    heard = Heard()
    engine = made()
    loop = EngineLoop(engine, heard.tell)
    for _ in range(2):
        loop.post(Request(7, (5, 6, 7), SHORT))
    loop.post(Request(8, (5, 6, 7), SHORT))
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.until_ended(2)
    loop.end()
    thread.join(LIMIT_S)
    refused = [each for report in heard.reports for each in report.refused]
    assert [number for number, _ in refused] == [7]
    assert refused[0][1].startswith("id: request 7")
    assert heard.endings() == {7: FinishReason.LENGTH, 8: FinishReason.LENGTH}


def test_a_request_has_waited_since_it_was_posted_whatever_was_refused_before(
    virtual_time: VirtualTime,
) -> None:
    """Request 7 is posted again while it runs, which is refused, and 5 s later once more."""
    heard = Heard()

    def tell(report: Report) -> None:
        heard.tell(report)
        if len(heard.reports) == 1:
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(heard.reports) == 3:
            assert heard.endings() == {7: FinishReason.LENGTH}
            virtual_time.sleep(5.0)
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(heard.reports) == 6:
            loop.end()

    loop = EngineLoop(made(), tell)
    loop.post(Request(7, (5, 6, 7), SHORT))
    loop.run()
    assert [len(report.refused) for report in heard.reports] == [0, 1, 0, 0, 0, 0]
    assert [list(report.waits_s) for report in heard.reports] == [[0.0], [], [], [0.0], [], []]


def test_an_abort_ends_a_request_and_one_of_nobody_changes_nothing() -> None:
    heard = Heard()
    with running(made(step_s=0.05), heard) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        loop.post(Abort(99))
        while not heard.reports:
            time.sleep(0.001)
        loop.post(Abort(7))
        heard.until_ended(1)
    assert heard.endings() == {7: FinishReason.ABORT}
    assert heard.reports[-1].status.blocks_used == 0


def test_without_work_it_sleeps_and_tells_nothing() -> None:
    heard = Heard()
    with running(made(), heard) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        heard.until_ended(1)
        told = len(heard.reports)
        time.sleep(0.05)
        assert len(heard.reports) == told


def test_it_ends_after_the_step_it_is_in_with_work_left() -> None:
    heard = Heard()
    engine = made(step_s=0.05)
    with running(engine, heard) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        while not heard.reports:
            time.sleep(0.001)
    assert engine.has_work and not heard.endings()


class Slow:
    """Structures of an engine. Those of the last lane are compiled once `go` is set.

    begun   texts, in the order in which their compilation began
    late    texts that the engine would compile itself
    """

    def __init__(self, engine: Engine) -> None:
        self.go = threading.Event()
        self.asked = threading.Event()
        self.begun: list[str] = []
        self.late: list[str] = []
        self._real = engine.structures

    def check(self, structure: Structure) -> None:
        if self.compiled(structure) is None:
            self.late.append(structure.text)
        self._real.check(structure)

    def compile(self, structure: Structure, lane: Lane) -> object:
        self.begun.append(structure.text)
        self.asked.set()
        assert lane is not LANES[-1] or self.go.wait(LIMIT_S)
        return self._real.compile(structure, lane)

    def compiled(self, structure: Structure) -> object | None:
        return self._real.compiled(structure)

    def guide(self, structure: Structure, *, ends: bool) -> Guide:
        return self._real.guide(structure, ends=ends)


STRUCTURED = SamplingParams(max_tokens=3, structure=Structure.regex("[ab]{3}"))


def slow() -> tuple[Engine, Slow]:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256)
    engine = Engine(HashModel(num_blocks=64, block_size=4), config, ByteTokenizer())
    engine.structures = structures = Slow(engine)  # type: ignore[misc]
    return engine, structures


def test_others_do_not_wait_for_a_structure_to_be_compiled() -> None:
    engine, structures = slow()
    heard = Heard()
    with running(engine, heard) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        loop.post(Request(1, (5,), SHORT))
        heard.until_ended(1)
        assert heard.endings() == {1: FinishReason.LENGTH}
        structures.go.set()
        heard.until_ended(2)
    assert heard.endings()[0] is FinishReason.STOP


def test_a_request_that_is_left_while_its_structure_is_compiled_never_runs() -> None:
    engine, structures = slow()
    heard = Heard()
    with running(engine, heard) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        assert structures.asked.wait(LIMIT_S)
        loop.post(Abort(0))
        structures.go.set()
        loop.post(Request(1, (5,), STRUCTURED))
        heard.until_ended(1)
    assert heard.endings() == {1: FinishReason.STOP}


def with_regex(id: int, pattern: str) -> Request:
    return Request(id, (5,), SamplingParams(max_tokens=9, structure=Structure.regex(pattern)))


def test_a_structure_of_a_quick_lane_waits_for_none_of_a_slow_one() -> None:
    engine, structures = slow()
    heard = Heard()
    with running(engine, heard) as loop:
        for number in range(8):
            loop.post(Accepted(with_regex(number, f"a{{{number}}}b"), LANES[-1]))
        loop.post(Accepted(with_regex(8, "ab"), LANES[0]))
        heard.until_ended(1)
        assert heard.endings() == {8: FinishReason.STOP}
        structures.go.set()
        heard.until_ended(9)


def test_one_that_is_left_in_a_lane_takes_no_turn_in_it() -> None:
    engine, structures = slow()
    heard = Heard()
    with running(engine, heard) as loop:
        loop.post(with_regex(0, "a"))
        assert structures.asked.wait(LIMIT_S)
        loop.post(with_regex(1, "b"))
        loop.post(with_regex(2, "c"))
        loop.post(Abort(1))
        structures.go.set()
        heard.until_ended(2)
    assert structures.begun == ["a", "c"]


def test_a_structure_stays_compiled_until_its_request_is_submitted() -> None:
    """Forty of them between two steps: more than are kept for requests to come."""
    engine, structures = slow()
    structures.go.set()
    heard = Heard()
    loop = EngineLoop(engine, heard.tell)
    for number in range(40):
        loop.post(with_regex(number, f"a{{{number}}}b"))
    while len(loop._inbox) < 40:
        time.sleep(0.001)
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.until_ended(40)
    loop.end()
    thread.join(LIMIT_S)
    assert structures.late == [] and len(structures.begun) == 40


def forgotten() -> tuple[EngineLoop, Slow, Heard]:
    """Request 0 is to be submitted, and a guide with its structure has failed meanwhile."""
    engine, structures = slow()
    structures.go.set()
    heard = Heard()
    loop = EngineLoop(engine, heard.tell)
    loop.post(with_regex(0, "ab"))
    while not loop._inbox:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="does not fit"):
        structures.guide(Structure.regex("ab"), ends=True).feed(50)
    return loop, structures, heard


def test_a_structure_forgotten_before_its_request_is_submitted_is_compiled_in_its_lane() -> None:
    loop, structures, heard = forgotten()
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.until_ended(1)
    loop.end()
    thread.join(LIMIT_S)
    assert (structures.late, structures.begun) == ([], ["ab", "ab"])


def test_an_abort_reaches_a_request_whose_structure_is_compiled_again() -> None:
    loop, _, heard = forgotten()
    loop.post(Abort(0))
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.post(Request(1, (5,), SHORT))
    heard.until_ended(1)
    while loop._unready:
        time.sleep(0.001)
    loop.post(Request(2, (5,), LONG))
    heard.until_ended(2)
    loop.end()
    thread.join(LIMIT_S)
    assert set(heard.endings()) == {1, 2}


def test_a_panic_of_the_library_refuses_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As a library's that is written in Rust."""

    def panics(structure: Structure, lane: Lane) -> None:
        raise Panic(f"at {structure.text}")

    engine, structures = slow()
    monkeypatch.setattr(structures, "compile", panics)
    heard = Heard()
    with running(engine, heard) as loop:
        loop.post(with_regex(0, "a"))
        while loop._unready:
            time.sleep(0.001)
        loop.post(Request(1, (5,), SHORT))
        heard.until_ended(1)
    refused = [each for report in heard.reports for each in report.refused]
    assert refused == [(0, "structure: it failed: Panic('at a'). Mend it")]


def test_a_structure_that_cannot_be_compiled_is_tried_once() -> None:
    engine, structures = slow()
    structures.go.set()
    heard = Heard()
    with running(engine, heard) as loop:
        loop.post(with_regex(0, "["))
        loop.post(with_regex(1, "b"))
        heard.until_ended(1)
    refused = [each for report in heard.reports for each in report.refused]
    assert [number for number, _ in refused] == [0]
    assert "unclosed character class" in refused[0][1]
    assert (structures.late, structures.begun) == ([], ["[", "b"])


def test_no_thread_of_a_loop_that_ended_compiles_what_waits() -> None:
    engine, structures = slow()
    before = set(threading.enumerate())
    with running(engine, Heard()) as loop:
        loop.post(with_regex(0, "a"))
        assert structures.asked.wait(LIMIT_S)
        loop.post(with_regex(1, "b"))
        compilers = [t for t in set(threading.enumerate()) - before if "compiler" in t.name]
    structures.go.set()
    assert compilers
    for thread in compilers:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert structures.begun == ["a"]


def test_a_loop_that_ends_does_not_wait_for_a_structure() -> None:
    engine, structures = slow()
    with running(engine, Heard()) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        assert structures.asked.wait(LIMIT_S)
    structures.go.set()
