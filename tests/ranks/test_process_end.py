"""The end of a process is seen, with its exit code, by each of several threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

import pytest

from forge.ranks.process_end import collect_exit_code, has_ended

TIMEOUT_S = 60.0


class WatchedProcess:
    """A process that says when its exit code was read and not there yet."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self.sentinel = process.sentinel
        self.was_missing = threading.Event()
        self._process = process

    @property
    def exitcode(self) -> int | None:
        exit_code = self._process.exitcode
        if exit_code is None:
            self.was_missing.set()
        return exit_code


def test_an_exit_code_that_another_thread_collects_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That thread is stopped between waitpid and the line that stores the exit code."""
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    process.start()
    watched, is_collected, waitpid = WatchedProcess(process), threading.Event(), os.waitpid

    def stop_after_waitpid(pid: int, options: int) -> tuple[int, int]:
        result = waitpid(pid, options)
        if result[0] == process.pid:
            is_collected.set()
            assert watched.was_missing.wait(TIMEOUT_S)
        return result

    monkeypatch.setattr(os, "waitpid", stop_after_waitpid)
    other = threading.Thread(target=process.join)
    other.start()
    assert is_collected.wait(TIMEOUT_S)
    assert has_ended(process, 0.0)
    assert collect_exit_code(watched, TIMEOUT_S) == 3
    assert watched.was_missing.is_set()
    other.join(TIMEOUT_S)
    process.close()


def test_a_process_that_runs_has_no_exit_code() -> None:
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    assert not has_ended(process, 0.0)
    assert collect_exit_code(process, 0.0) is None
    process.kill()
    assert collect_exit_code(process, TIMEOUT_S) == -9
    process.close()
