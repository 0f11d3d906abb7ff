"""Mutants in forks of one process, which has imported and collected all of their tests.

    pytest ── imports, collects ──┬── fork: functions of mutant 1 replaced ── its test
                                  ├── fork: functions of mutant 2 replaced ── its test
                                  └── ...

Starting pytest and importing take longer than most tests. What runs at import is not replaced, nor
is what a test imports later or starts. So only a failure counts. Other mutants must be planted in a
file.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Protocol

import pytest
from function_code import ImportedFunctions, changed_functions

NOT_PLANTED = 71
"""Exit status of a fork that cannot have its mutant."""
RESULT_SIZE = 16
"""Bytes of a result: the index of a mutant, a space, the exit status, spaces."""


class Mutant(Protocol):
    """A bug: in `path`, `old` becomes `new`; `test` must fail."""

    @property
    def path(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...
    @property
    def test(self) -> str: ...


class MutantForks:
    """Plugin of pytest that runs collected tests once for each mutant, in a fork each.

    mutants     whose tests are collected
    tree        the unchanged sources
    writer      file descriptor to which a result of each mutant is written
    max_running forks at a time
    timeout_s   after which a test hangs, which is a failure
    """

    def __init__(
        self, mutants: Sequence[Mutant], tree: Path, writer: int, max_running: int, timeout_s: float
    ) -> None:
        self._mutants = mutants
        self._tree = tree
        self._writer = writer
        self._max_running = max_running
        self._timeout_s = timeout_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Find all functions, before tests/conftest.py hides them from the garbage collector."""
        for path in {mutant.path for mutant in self._mutants}:
            with suppress(ImportError):
                import_module(module_name(path))
        self._functions = ImportedFunctions()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests of each mutant in a fork, instead of all tests here."""
        if session.testsfailed:
            return True  # a file cannot be collected
        items: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            for name in {item.nodeid, item.nodeid.partition("[")[0]}:
                items.setdefault(name, []).append(item)
        running: dict[int, tuple[int, float]] = {}
        for index, mutant in enumerate(self._mutants):
            while len(running) >= self._max_running:
                self._wait(running)
            code = compiled(self._tree / mutant.path)
            pid = os.fork()
            if not pid:
                os.setsid()
                os.close(self._writer)  # what a test leaves must not hold it open
                os._exit(self._run(session, mutant, code, items.get(mutant.test, [])))
            running[pid] = index, time.monotonic() + self._timeout_s
        while running:
            self._wait(running)
        return True

    def _run(
        self, session: pytest.Session, mutant: Mutant, code: CodeType, items: list[pytest.Item]
    ) -> int:
        """Run tests with the mutant; return 1 as soon as one fails, 0 where none does."""
        if not self._plant(mutant, code):
            return NOT_PLANTED
        # Forks that shared pytest's folder would remove each other's files.
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(dir=self._tree.parent)
        for item, next_item in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if session.testsfailed:
                return 1
        return 0

    def _plant(self, mutant: Mutant, old: CodeType) -> bool:
        """Replace the functions that the mutant changes; return whether that is all it changes."""
        path = self._tree / mutant.path
        source = path.read_text("utf-8")
        if source.count(mutant.old) != 1:
            return False
        try:
            new = compile(source.replace(mutant.old, mutant.new), path, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        changes = changed_functions(old, new)
        return bool(changes) and self._functions.replace(path.resolve(), changes)

    def _wait(self, running: dict[int, tuple[int, float]]) -> None:
        """Report a fork that has ended, or wait a little; kill one that is late."""
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid:
            index, _ = running.pop(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what its tests have left
            status = 1 if os.WIFSIGNALED(wait_status) else os.waitstatus_to_exitcode(wait_status)
            os.write(self._writer, f"{index} {status}".ljust(RESULT_SIZE).encode())
            return
        for pid, (_, deadline_s) in running.items():
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def module_name(path: str) -> str:
    """Return the name by which the source at a path is imported: sim and bench are links."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("forge") else f"forge.{name}"


@cache
def compiled(path: Path) -> CodeType:
    """Return the code of an unchanged source, as Python has compiled it."""
    code = SourceFileLoader("", str(path)).get_code("")
    assert code is not None, path
    return code
