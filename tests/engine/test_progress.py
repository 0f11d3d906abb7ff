"""The bar of LLM.generate: on a terminal, after two seconds, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, cast

import pytest

from forge.llm import LLM
from forge.outputs import OutputBatch
from forge.progress import GenerationProgress
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.tokenizer import ByteTokenizer


class Terminal(StringIO):
    """A stream that says that it is a terminal, and counts how often it did."""

    num_checks = 0

    def isatty(self) -> bool:
        self.num_checks += 1
        return True


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of forge and of tqdm. Skips where tqdm is not installed."""
    tqdm_std = pytest.importorskip("tqdm.std")
    made = Clock()
    monkeypatch.setattr(tqdm_std, "time", made)
    return made


def create_batch() -> OutputBatch:
    """Return a batch of four requests without tokens."""
    return OutputBatch([Request(i, (1,)) for i in range(4)], ByteTokenizer())


def run_batch(
    clock: Callable[[], float], batch: OutputBatch, step: Callable[[int], object], num_steps: int
) -> str:
    """Return what a terminal shows of a run: each step adds a token to each of four requests."""
    terminal = Terminal()
    with redirect_stderr(terminal):
        with GenerationProgress(batch, is_enabled=True, clock=clock) as progress:
            for index in range(num_steps):
                step(index)
                finish = FinishReason.LENGTH if index == num_steps - 1 else None
                batch.extend([Delta(i, 0, (66,), finish) for i in range(4)])
                progress.update()
    return terminal.getvalue()


@pytest.mark.torch
def test_a_run_of_less_than_two_seconds_shows_nothing(clock: Clock) -> None:
    def step(index: int) -> None:
        clock.now_s += 0.1

    assert run_batch(clock, create_batch(), step, 19) == ""


@pytest.mark.torch
def test_a_longer_run_shows_requests_and_tokens_per_second_until_its_end(clock: Clock) -> None:
    def step(index: int) -> None:
        clock.now_s += 0.25

    lines = run_batch(clock, create_batch(), step, 12).replace("\n", "\r").split("\r")
    shown = [line.strip() for line in lines if line.strip()]
    first, *_, last = shown
    assert first.startswith("generating:   0%|") and "| 0/4 [00:02<" in first
    assert first.endswith(" 16 tokens/s]"), first
    assert last.startswith("generating: 100%|") and "| 4/4 [00:03<00:00, " in last
    assert sum("| 0/4 [" in line for line in shown) == 2, "at 2 and 2.5 s"
    assert lines[-1] == "", "the bar ends with its line"


@pytest.mark.torch
def test_a_bar_that_was_shown_is_closed_by_an_error(clock: Clock) -> None:
    def step(index: int) -> None:
        clock.now_s += 3.0
        if index == 2:
            raise KeyboardInterrupt

    batch, terminal = create_batch(), Terminal()
    with redirect_stderr(terminal), pytest.raises(KeyboardInterrupt):
        with GenerationProgress(batch, is_enabled=True, clock=clock) as progress:
            for index in range(3):
                step(index)
                progress.update()
    assert terminal.getvalue().endswith("\n")


def test_nothing_is_shown_where_it_is_turned_off_or_there_is_no_terminal() -> None:
    clock = Clock()
    for terminal, is_enabled in ((Terminal(), False), (StringIO(), True)):
        with redirect_stderr(terminal):
            with GenerationProgress(create_batch(), is_enabled=is_enabled, clock=clock) as progress:
                clock.now_s += 10.0
                progress.update()
        assert terminal.getvalue() == ""


def test_generate_looks_for_a_terminal_unless_the_bar_is_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)  # a bar would also look for it
    terminal, params = Terminal(), SamplingParams(max_tokens=2)
    with redirect_stderr(terminal), LLM("hash") as llm:
        llm.generate("abc", params, use_tqdm=False)
        assert terminal.num_checks == 0
        llm.generate("abc", params)
        assert terminal.num_checks == 1


def test_a_program_without_a_standard_error_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert LLM("hash").generate("abc", SamplingParams(max_tokens=2)) != []


class Logger:
    """A standard error that only takes text, as some programs set it."""

    def write(self, text: str) -> int:
        return len(text)


def test_a_standard_error_that_is_closed_or_no_file_is_no_terminal() -> None:
    closed = StringIO()
    closed.close()
    for stream in (closed, cast(Any, Logger())):
        with redirect_stderr(stream):
            assert LLM("hash").generate("abc", SamplingParams(max_tokens=2)) != []


def test_a_terminal_without_tqdm_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    clock, terminal = Clock(), Terminal()
    with redirect_stderr(terminal):
        with GenerationProgress(create_batch(), is_enabled=True, clock=clock) as progress:
            clock.now_s += 10.0
            progress.update()
    assert terminal.getvalue() == ""
