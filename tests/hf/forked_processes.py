"""Processes that fork from one that has imported torch: engines, ranks and modules in tests.

Owns how such a process starts, and what it has imported. A fresh interpreter takes seconds to
import torch, so each test of several processes would take many. What depends on a fresh interpreter
is for tests that start one: test_http.py, test_rank_processes.py.

    worker of the tests ─► fork server: imports PRELOADED, once ─┬─► engine
                                                                 ├─► rank 1
                                                                 └─► python -m MODULE

The environment is that of the worker when its first process starts, without later changes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext

import pytest

from forge import engine_process
from forge.ranks import rank_group

PRELOADED = (
    *("forge.models.hf", "forge.async_llm", "torch.distributed", "tests.hf.gloo_rank"),
    *("transformers.generation.utils", "transformers.models.qwen3.modeling_qwen3"),
)
"""Modules that each process has from its start."""


def fork_context() -> ForkServerContext:
    """Return the context in which processes start as forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def fork_engines_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes of engines and ranks as forks until the test ends."""
    for module in (engine_process, rank_group):
        monkeypatch.setattr(module, "get_context", lambda method: fork_context())


class ForkedModule:
    """`python -m MODULE WORDS...` as a fork, with the methods of subprocess.Popen to wait and end.

    Its output is that of the fork server, which no test reads.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], text: bool) -> None:
        assert tuple(command[:2]) == (sys.executable, "-m"), command
        self._process = fork_context().Process(target=_run_module, args=(command[2:], dict(env)))
        self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.join()


def _run_module(words: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
