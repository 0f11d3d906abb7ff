"""EngineLoop: commands in, reports out, with the ends of both in the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from forge.config import EngineConfig, HostTier
from forge.engine import Engine
from forge.engine_loop import EngineLoop
from forge.engine_messages import Abort, CheckedRequest, Pause, Resize, StepReport
from forge.errors import InvalidConfig
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.models.hash import HashModel
from forge.pause import PauseMode
from forge.request import FinishReason, Request, SamplingParams, Structure
from forge.sequence import GrammarMatcher
from forge.tokenizer import ByteTokenizer
from tests.virtual_time import VirtualTime

TIMEOUT_S = 60.0
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)


class ReportLog:
    """Keeps every report, and waits for those with endings."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self._news = threading.Condition()

    def add(self, report: StepReport) -> None:
        with self._news:
            self.reports.append(report)
            self._news.notify_all()

    def finish_reasons(self) -> dict[int, FinishReason]:
        """Return the finish reason of each request that has ended."""
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
    log = ReportLog()
    with run_loop(create_engine(), log) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        log.wait_until_ended(1)
    tokens = [t for report in log.reports for delta in report.deltas for t in delta.tokens]
    assert len(tokens) == 3
    last = log.reports[-1].status
    assert (last.num_running, last.num_waiting, last.num_used_blocks, last.has_work) == (
        0,
        0,
        0,
        False,
    )
    assert last.num_steps == len(log.reports) == 3


def test_a_request_that_was_aborted_before_its_first_step_waits_no_longer() -> None:
    log = ReportLog()
    loop = EngineLoop(create_engine(), log.add)
    loop.post(Request(7, (5, 6, 7), SHORT))
    loop.post(Abort(7))
    thread = threading.Thread(target=loop.run)
    thread.start()
    log.wait_until_ended(1)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert log.finish_reasons() == {7: FinishReason.ABORT}
    assert [report.oldest_post_s for report in log.reports] == [None]


def test_a_refused_request_is_reported_and_others_are_served() -> None:
    """The same id twice, as two commands between two steps."""
    log = ReportLog()
    engine = create_engine()
    loop = EngineLoop(engine, log.add)
    for _ in range(2):
        loop.post(Request(7, (5, 6, 7), SHORT))
    loop.post(Request(8, (5, 6, 7), SHORT))
    thread = threading.Thread(target=loop.run)
    thread.start()
    log.wait_until_ended(2)
    loop.stop()
    thread.join(TIMEOUT_S)
    rejections = [each for report in log.reports for each in report.rejections]
    assert [number for number, _ in rejections] == [7]
    assert rejections[0][1].startswith("id: request 7")
    assert log.finish_reasons() == {7: FinishReason.LENGTH, 8: FinishReason.LENGTH}


def test_a_request_has_waited_since_it_was_posted_whatever_was_refused_before(
    virtual_time: VirtualTime,
) -> None:
    """Request 7 is posted again while it runs, which is refused, and 5 s later once more."""
    log = ReportLog()

    def on_report(report: StepReport) -> None:
        log.add(report)
        if len(log.reports) == 1:
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(log.reports) == 3:
            assert log.finish_reasons() == {7: FinishReason.LENGTH}
            virtual_time.sleep(5.0)
            loop.post(Request(7, (5, 6, 7), SHORT))
        elif len(log.reports) == 6:
            loop.stop()

    loop = EngineLoop(create_engine(), on_report)
    loop.post(Request(7, (5, 6, 7), SHORT))
    loop.run()
    assert [len(report.rejections) for report in log.reports] == [0, 1, 0, 0, 0, 0]
    assert [list(report.queue_times_s) for report in log.reports] == [
        [0.0],
        [],
        [],
        [0.0],
        [],
        [],
    ]


def test_an_abort_ends_a_request_and_one_of_an_unknown_id_changes_nothing() -> None:
    log = ReportLog()
    with run_loop(create_engine(step_s=0.05), log) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        loop.post(Abort(99))
        while not log.reports:
            time.sleep(0.001)
        loop.post(Abort(7))
        log.wait_until_ended(1)
    assert log.finish_reasons() == {7: FinishReason.ABORT}
    assert log.reports[-1].status.num_used_blocks == 0


def test_without_work_it_sleeps_and_reports_nothing() -> None:
    log = ReportLog()
    with run_loop(create_engine(), log) as loop:
        loop.post(Request(7, (5, 6, 7), SHORT))
        log.wait_until_ended(1)
        num_reports = len(log.reports)
        time.sleep(0.05)
        assert len(log.reports) == num_reports


def test_it_ends_after_the_step_it_is_in_with_work_left() -> None:
    log = ReportLog()
    engine = create_engine(step_s=0.05)
    with run_loop(engine, log) as loop:
        loop.post(Request(7, (5, 6, 7), LONG))
        while not log.reports:
            time.sleep(0.001)
    assert engine.has_work and not log.finish_reasons()


class GatedCompiler:
    """A backend that compiles structures of the last level only once `permit` is set.

    started              texts, in the order in which their compilation started
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

    def compile(self, structure: Structure, level: QueueLevel | None) -> object:
        self.started.append(structure.text)
        self.requested.set()
        assert level is COMPILE_LEVELS[0] or self.permit.wait(TIMEOUT_S)
        return self._real.compile(structure, level)

    def compiled_grammar(self, structure: Structure) -> object | None:
        return self._real.compiled_grammar(structure)

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        return self._real.create_matcher(structure, allow_end=allow_end)

    def advance_matchers(self, pairs: Sequence[tuple[GrammarMatcher, int]]) -> None:
        self._real.advance_matchers(pairs)


STRUCTURED = SamplingParams(max_tokens=3, structure=Structure.regex("[ab]{3}"))


def create_gated_engine() -> tuple[Engine, GatedCompiler]:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=256)
    engine = Engine(HashModel(num_blocks=64, block_size=4), config, ByteTokenizer())
    engine.grammar_backend = structures = GatedCompiler(engine)  # type: ignore[misc]
    return engine, structures


def test_others_do_not_wait_for_a_structure_to_be_compiled() -> None:
    engine, structures = create_gated_engine()
    log = ReportLog()
    with run_loop(engine, log) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        loop.post(Request(1, (5,), SHORT))
        log.wait_until_ended(1)
        assert log.finish_reasons() == {1: FinishReason.LENGTH}
        structures.permit.set()
        log.wait_until_ended(2)
    assert log.finish_reasons()[0] is FinishReason.STOP


def test_a_request_aborted_while_its_structure_is_compiled_never_runs() -> None:
    engine, structures = create_gated_engine()
    log = ReportLog()
    with run_loop(engine, log) as loop:
        loop.post(Request(0, (5,), STRUCTURED))
        assert structures.requested.wait(TIMEOUT_S)
        loop.post(Abort(0))
        structures.permit.set()
        loop.post(Request(1, (5,), STRUCTURED))
        log.wait_until_ended(1)
    assert log.finish_reasons() == {1: FinishReason.STOP}


def regex_request(id: int, pattern: str) -> Request:
    return Request(id, (5,), SamplingParams(max_tokens=9, structure=Structure.regex(pattern)))


def test_a_structure_of_a_quick_level_waits_for_none_of_a_slow_one() -> None:
    engine, structures = create_gated_engine()
    log = ReportLog()
    with run_loop(engine, log) as loop:
        for number in range(8):
            loop.post(CheckedRequest(regex_request(number, f"a{{{number}}}b"), COMPILE_LEVELS[-1]))
        loop.post(CheckedRequest(regex_request(8, "ab"), COMPILE_LEVELS[0]))
        log.wait_until_ended(1)
        assert log.finish_reasons() == {8: FinishReason.STOP}
        structures.permit.set()
        log.wait_until_ended(9)


def test_an_aborted_request_takes_no_turn_in_its_level() -> None:
    engine, structures = create_gated_engine()
    log = ReportLog()
    with run_loop(engine, log) as loop:
        loop.post(regex_request(0, "a"))
        assert structures.requested.wait(TIMEOUT_S)
        loop.post(regex_request(1, "b"))
        loop.post(regex_request(2, "c"))
        loop.post(Abort(1))
        structures.permit.set()
        log.wait_until_ended(2)
    assert structures.started == ["a", "c"]


def test_a_structure_stays_compiled_until_its_request_is_submitted() -> None:
    """Forty structures between two steps: more than are kept for later requests."""
    engine, structures = create_gated_engine()
    structures.permit.set()
    log = ReportLog()
    loop = EngineLoop(engine, log.add)
    for number in range(40):
        loop.post(regex_request(number, f"a{{{number}}}b"))
    while len(loop._inbox) < 40:
        time.sleep(0.001)
    thread = threading.Thread(target=loop.run)
    thread.start()
    log.wait_until_ended(40)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert structures.compiled_by_engine == [] and len(structures.started) == 40


def evicted_structure_loop() -> tuple[EngineLoop, GatedCompiler, ReportLog]:
    """Return a loop where request 0 waits for submission and its structure was dropped."""
    engine, structures = create_gated_engine()
    structures.permit.set()
    log = ReportLog()
    loop = EngineLoop(engine, log.add)
    loop.post(regex_request(0, "ab"))
    while not loop._inbox:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="does not fit"):
        structures.create_matcher(Structure.regex("ab"), allow_end=True).feed(50)
    return loop, structures, log


def test_a_structure_dropped_before_its_request_is_submitted_is_compiled_in_its_level() -> None:
    loop, structures, log = evicted_structure_loop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    log.wait_until_ended(1)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert (structures.compiled_by_engine, structures.started) == ([], ["ab", "ab"])


def test_an_abort_reaches_a_request_whose_structure_is_compiled_again() -> None:
    loop, _, log = evicted_structure_loop()
    loop.post(Abort(0))
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.post(Request(1, (5,), SHORT))
    log.wait_until_ended(1)
    while loop._compiling:
        time.sleep(0.001)
    loop.post(Request(2, (5,), LONG))
    log.wait_until_ended(2)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert set(log.finish_reasons()) == {1, 2}


def test_a_panic_of_the_library_refuses_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """An exception as a library written in Rust raises it."""

    def panics(structure: Structure, level: QueueLevel) -> None:
        raise Panic(f"at {structure.text}")

    engine, structures = create_gated_engine()
    monkeypatch.setattr(structures, "compile", panics)
    log = ReportLog()
    with run_loop(engine, log) as loop:
        loop.post(regex_request(0, "a"))
        while loop._compiling:
            time.sleep(0.001)
        loop.post(Request(1, (5,), SHORT))
        log.wait_until_ended(1)
    rejections = [each for report in log.reports for each in report.rejections]
    assert rejections == [(0, "structure: it failed: Panic('at a'). Simplify it")]


def test_a_structure_that_cannot_be_compiled_is_tried_once() -> None:
    engine, structures = create_gated_engine()
    structures.permit.set()
    log = ReportLog()
    with run_loop(engine, log) as loop:
        loop.post(regex_request(0, "["))
        loop.post(regex_request(1, "b"))
        log.wait_until_ended(1)
    rejections = [each for report in log.reports for each in report.rejections]
    assert [number for number, _ in rejections] == [0]
    assert "unclosed character class" in rejections[0][1]
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


def test_a_host_pool_that_began_empty_stays_empty() -> None:
    """No memory was allocated for a block of it."""
    config = EngineConfig(num_blocks=64, block_size=4, host_tier=HostTier(num_blocks=0))
    engine, log = Engine(HashModel(num_blocks=64, block_size=4), config), ReportLog()
    with run_loop(engine, log) as loop:
        for ticket, num_host_blocks in enumerate((0, 1)):
            loop.post(Resize(ticket, 32, num_host_blocks))
        loop.post(Request(7, (5, 6, 7), SHORT))
        log.wait_until_ended(1)
    (_, accepted), (_, refused) = [each for report in log.reports for each in report.resizes]
    assert accepted is None and isinstance(refused, InvalidConfig)
    assert "1 blocks, and memory was allocated for 0" in str(refused)


def test_requests_that_end_before_their_first_step_wait_no_more() -> None:
    has_ended, reports = threading.Event(), list[StepReport]()

    def on_report(report: StepReport) -> None:
        reports.append(report)
        if not report.status.has_work:
            has_ended.set()

    engine = Engine(HashModel(num_blocks=64), EngineConfig(num_blocks=64, max_num_seqs=1))
    loop = EngineLoop(engine, on_report)
    for number in range(2):
        loop.post(Request(number, (1, 2, 3), SamplingParams(max_tokens=64, ignore_eos=True)))
    loop.post(Pause(2, PauseMode.ABORT))
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert has_ended.wait(60)
    loop.stop()
    thread.join()
    assert reports[-1].oldest_post_s is None
