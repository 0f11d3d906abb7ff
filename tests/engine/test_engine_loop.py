"""EngineLoop: commands in, reports out, whoever sits at either end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_loop import Abort, CheckedRequest, EngineLoop, StepReport
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.models.hash import HashModel
from forge.request import FinishReason, Request, SamplingParams, Structure
from forge.sequence import GrammarMatcher
from forge.tokenizer import ByteTokenizer
from tests.virtual_time import VirtualTime

TIMEOUT_S = 60.0
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)


class ReportLog:
    """Every report, and a wait for those that say something."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self._news = threading.Condition()

    def add(self, report: StepReport) -> None:
        with self._news:
            self.reports.append(report)
            self._news.notify_all()

    def finish_reasons(self) -> dict[int, FinishReason]:
        """How each request that has ended has ended."""
        deltas = [delta for report in self.reports for delta in report.deltas]
        return {delta.request_id: delta.finish for delta in deltas if delta.finish is not None}

    def wait_until_ended(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.finish_reasons()) >= count, TIMEOUT_S)


@contextmanager
def run_loop(engine: Engine, reports: ReportLog) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, reports.add)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def create_engine(step_s: float = 0.0) -> Engine:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256)
    return Engine(HashModel(num_blocks=64, block_size=4, step_s=step_s), config)


def test_a_request_is_served_and_its_last_report_shows_an_empty_engine() -> None:
    heard = ReportLog()
    with run_loop(create_engine(), heard) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        heard.wait_until_ended(1)
    tokens = [t for report in heard.reports for delta in report.deltas for t in delta.tokens]
    assert len(tokens) == 3
    last = heard.reports[-1].status
    assert (last.num_running, last.num_waiting, last.num_used_blocks, last.has_work) == (
        0,
        0,
        0,
        False,
    )
    assert last.num_steps == len(heard.reports) == 3


def test_what_the_engine_does_not_take_is_reported_and_nothing_else_suffers() -> None:
    """The same id twice, as two commands between two steps."""
    heard = ReportLog()
    engine = create_engine()
    loop = EngineLoop(engine, heard.add)
    for _ in range(2):
        loop.post(Request(7, (5, 6, 7), SHORT))
    loop.post(Request(8, (5, 6, 7), SHORT))
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.wait_until_ended(2)
    loop.stop()
    thread.join(TIMEOUT_S)
    refused = [each for report in heard.reports for each in report.rejections]
    assert [number for number, _ in refused] == [7]
    assert refused[0][1].startswith("id: request 7")
    assert heard.finish_reasons() == {7: FinishReason.LENGTH, 8: FinishReason.LENGTH}


def test_a_request_has_waited_since_it_was_posted_whatever_was_refused_before(
    virtual_time: VirtualTime,
) -> None:
    """Request 7 is posted again while it runs, which is refused, and 5 s later once more."""
    heard = ReportLog()

    def tell(report: StepReport) -> None:
        heard.add(report)
        if len(heard.reports) == 1:
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(heard.reports) == 3:
            assert heard.finish_reasons() == {7: FinishReason.LENGTH}
            virtual_time.sleep(5.0)
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(heard.reports) == 6:
            loop.stop()

    loop = EngineLoop(create_engine(), tell)
    loop.post(Request(7, (5, 6, 7), SHORT))
    loop.run()
    assert [len(report.rejections) for report in heard.reports] == [0, 1, 0, 0, 0, 0]
    assert [list(report.queue_times_s) for report in heard.reports] == [
        [0.0],
        [],
        [],
        [0.0],
        [],
        [],
    ]


def test_an_abort_ends_a_request_and_one_of_nobody_changes_nothing() -> None:
    heard = ReportLog()
    with run_loop(create_engine(step_s=0.05), heard) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        loop.post(Abort(99))
        while not heard.reports:
            time.sleep(0.001)
        loop.post(Abort(7))
        heard.wait_until_ended(1)
    assert heard.finish_reasons() == {7: FinishReason.ABORT}
    assert heard.reports[-1].status.num_used_blocks == 0


def test_without_work_it_sleeps_and_tells_nothing() -> None:
    heard = ReportLog()
    with run_loop(create_engine(), heard) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        heard.wait_until_ended(1)
        told = len(heard.reports)
        time.sleep(0.05)
        assert len(heard.reports) == told


def test_it_ends_after_the_step_it_is_in_with_work_left() -> None:
    heard = ReportLog()
    engine = create_engine(step_s=0.05)
    with run_loop(engine, heard) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        while not heard.reports:
            time.sleep(0.001)
    assert engine.has_work and not heard.finish_reasons()


class GatedCompiler:
    """Structures of an engine. Those of the last lane are compiled once `permit` is set.

    started              texts, in the order in which their compilation began
    compiled_by_engine   texts that the engine would compile itself
    """

    def __init__(self, engine: Engine) -> None:
        self.permit = threading.Event()
        self.requested = threading.Event()
        self.started: list[str] = []
        self.compiled_by_engine: list[str] = []
        self._real = engine.grammar_backend

    def check(self, structure: Structure) -> None:
        if self.compiled_grammar(structure) is None:
            self.compiled_by_engine.append(structure.text)
        self._real.check(structure)

    def compile(self, structure: Structure, lane: QueueLevel) -> object:
        self.started.append(structure.text)
        self.requested.set()
        assert lane is not COMPILE_LEVELS[-1] or self.permit.wait(TIMEOUT_S)
        return self._real.compile(structure, lane)

    def compiled_grammar(self, structure: Structure) -> object | None:
        return self._real.compiled_grammar(structure)

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        return self._real.create_matcher(structure, allow_end=allow_end)


STRUCTURED = SamplingParams(max_tokens=3, structure=Structure.regex("[ab]{3}"))


def create_gated_engine() -> tuple[Engine, GatedCompiler]:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256)
    engine = Engine(HashModel(num_blocks=64, block_size=4), config, ByteTokenizer())
    engine.grammar_backend = structures = GatedCompiler(engine)  # type: ignore[misc]
    return engine, structures


def test_others_do_not_wait_for_a_structure_to_be_compiled() -> None:
    engine, structures = create_gated_engine()
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        loop.post(Request(1, (5,), SHORT))
        heard.wait_until_ended(1)
        assert heard.finish_reasons() == {1: FinishReason.LENGTH}
        structures.permit.set()
        heard.wait_until_ended(2)
    assert heard.finish_reasons()[0] is FinishReason.STOP


def test_a_request_that_is_left_while_its_structure_is_compiled_never_runs() -> None:
    engine, structures = create_gated_engine()
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        assert structures.requested.wait(TIMEOUT_S)
        loop.post(Abort(0))
        structures.permit.set()
        loop.post(Request(1, (5,), STRUCTURED))
        heard.wait_until_ended(1)
    assert heard.finish_reasons() == {1: FinishReason.STOP}


def regex_request(id: int, pattern: str) -> Request:
    return Request(id, (5,), SamplingParams(max_tokens=9, structure=Structure.regex(pattern)))


def test_a_structure_of_a_quick_lane_waits_for_none_of_a_slow_one() -> None:
    engine, structures = create_gated_engine()
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        for number in range(8):
            loop.post(CheckedRequest(regex_request(number, f"a{{{number}}}b"), COMPILE_LEVELS[-1]))
        loop.post(CheckedRequest(regex_request(8, "ab"), COMPILE_LEVELS[0]))
        heard.wait_until_ended(1)
        assert heard.finish_reasons() == {8: FinishReason.STOP}
        structures.permit.set()
        heard.wait_until_ended(9)


def test_one_that_is_left_in_a_lane_takes_no_turn_in_it() -> None:
    engine, structures = create_gated_engine()
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        loop.post(regex_request(0, "a"))
        assert structures.requested.wait(TIMEOUT_S)
        loop.post(regex_request(1, "b"))
        loop.post(regex_request(2, "c"))
        loop.post(Abort(1))
        structures.permit.set()
        heard.wait_until_ended(2)
    assert structures.started == ["a", "c"]


def test_a_structure_stays_compiled_until_its_request_is_submitted() -> None:
    """Forty of them between two steps: more than are kept for requests to come."""
    engine, structures = create_gated_engine()
    structures.permit.set()
    heard = ReportLog()
    loop = EngineLoop(engine, heard.add)
    for number in range(40):
        loop.post(regex_request(number, f"a{{{number}}}b"))
    while len(loop._inbox) < 40:
        time.sleep(0.001)
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.wait_until_ended(40)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert structures.compiled_by_engine == [] and len(structures.started) == 40


def evicted_structure_loop() -> tuple[EngineLoop, GatedCompiler, ReportLog]:
    """Request 0 is to be submitted, and a guide with its structure has failed meanwhile."""
    engine, structures = create_gated_engine()
    structures.permit.set()
    heard = ReportLog()
    loop = EngineLoop(engine, heard.add)
    loop.post(regex_request(0, "ab"))
    while not loop._inbox:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="does not fit"):
        structures.create_matcher(Structure.regex("ab"), allow_end=True).feed(50)
    return loop, structures, heard


def test_a_structure_forgotten_before_its_request_is_submitted_is_compiled_in_its_lane() -> None:
    loop, structures, heard = evicted_structure_loop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    heard.wait_until_ended(1)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert (structures.compiled_by_engine, structures.started) == ([], ["ab", "ab"])


def test_an_abort_reaches_a_request_whose_structure_is_compiled_again() -> None:
    loop, _, heard = evicted_structure_loop()
    loop.post(Abort(0))
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.post(Request(1, (5,), SHORT))
    heard.wait_until_ended(1)
    while loop._compiling:
        time.sleep(0.001)
    loop.post(Request(2, (5,), LONG))
    heard.wait_until_ended(2)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert set(heard.finish_reasons()) == {1, 2}


def test_a_panic_of_the_library_refuses_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As a library's that is written in Rust."""

    def panics(structure: Structure, lane: QueueLevel) -> None:
        raise Panic(f"at {structure.text}")

    engine, structures = create_gated_engine()
    monkeypatch.setattr(structures, "compile", panics)
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        loop.post(regex_request(0, "a"))
        while loop._compiling:
            time.sleep(0.001)
        loop.post(Request(1, (5,), SHORT))
        heard.wait_until_ended(1)
    refused = [each for report in heard.reports for each in report.rejections]
    assert refused == [(0, "structure: it failed: Panic('at a'). Simplify it")]


def test_a_structure_that_cannot_be_compiled_is_tried_once() -> None:
    engine, structures = create_gated_engine()
    structures.permit.set()
    heard = ReportLog()
    with run_loop(engine, heard) as loop:
        loop.post(regex_request(0, "["))
        loop.post(regex_request(1, "b"))
        heard.wait_until_ended(1)
    refused = [each for report in heard.reports for each in report.rejections]
    assert [number for number, _ in refused] == [0]
    assert "unclosed character class" in refused[0][1]
    assert (structures.compiled_by_engine, structures.started) == ([], ["[", "b"])


def test_no_thread_of_a_loop_that_ended_compiles_what_waits() -> None:
    engine, structures = create_gated_engine()
    before = set(threading.enumerate())
    with run_loop(engine, ReportLog()) as loop:
        loop.post(regex_request(0, "a"))
        assert structures.requested.wait(TIMEOUT_S)
        loop.post(regex_request(1, "b"))
        compilers = [t for t in set(threading.enumerate()) - before if "compiler" in t.name]
    structures.permit.set()
    assert compilers
    for thread in compilers:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert structures.started == ["a"]


def test_a_loop_that_ends_does_not_wait_for_a_structure() -> None:
    engine, structures = create_gated_engine()
    with run_loop(engine, ReportLog()) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        assert structures.requested.wait(TIMEOUT_S)
    structures.permit.set()
