"""A model over two processes serves the tokens of one, and ends with the rank that ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forge.async_llm import AsyncLLM  # noqa: E402
from forge.bench.served_traffic import find_free_port  # noqa: E402
from forge.engine_options import Options  # noqa: E402
from forge.llm import LLM  # noqa: E402
from forge.models.embedded import embedded_folder  # noqa: E402
from forge.request import SamplingParams  # noqa: E402
from tests.hf.forked_processes import fork_engines_and_ranks  # noqa: E402
from tests.ranks.test_rank_group import is_alive, wait_until  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(480)]

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""
ON_CPU: Options = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
PROMPTS = ("Once upon a time", "The quick")
PARAMS = (
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=16, seed=5, top_k=7, repetition_penalty=1.2, ignore_eos=True),
)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
ROOT = Path(__file__).resolve().parents[2]
PARENT = 1
"""Number of the field of /proc/PID/stat after the name that is the parent's id."""


def child_pids(parent: int) -> list[int]:
    """Return the processes that one has started with multiprocessing's spawn, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[PARENT]) == parent and b"spawn_main" in command:
            found.append(int(stat.parent.name))
    return sorted(found)


def test_two_processes_serve_the_tokens_of_one_and_end_when_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank schedules too and compares its plans. Then rank 1 is killed during a request."""
    fork_engines_and_ranks(monkeypatch)
    with LLM(TINY, **ON_CPU) as alone:
        outputs = alone.generate(list(PROMPTS), list(PARAMS), use_tqdm=False)
        expected = [list(output.choices[0].token_ids) for output in outputs]
    llm = AsyncLLM.spawn(TINY, **ON_CPU, tensor_parallel_size=2, check_ranks=True)
    pids = {child.name: child.pid or 0 for child in multiprocessing.active_children()}
    rank_0, rank_1 = pids["forge-engine"], pids["forge-rank-1"]

    async def serve() -> list[list[int]]:
        requests = [llm.generate(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        return [list(each.choices[0].token_ids) for each in await asyncio.gather(*requests)]

    async def kill_during_a_request() -> str | None:
        error = None
        async for delta in llm.stream("Once", LONG):
            with suppress(ProcessLookupError):
                os.kill(rank_1, signal.SIGKILL)
            error = delta.error
        return error

    try:
        assert asyncio.run(serve()) == expected
        error = asyncio.run(kill_during_a_request())
        assert error is not None and "rank 1 ended (signal 9, Killed)" in error
        wait_until(lambda: not is_alive(rank_0) and not is_alive(rank_1))
        assert llm.failure is not None and "rank 1 ended (signal 9, Killed)" in llm.failure
    finally:
        llm.close()


@pytest.mark.parametrize("stopped", ["forge-engine", "forge-rank-1"])
def test_close_kills_all_ranks_at_once_where_one_is_stopped(
    stopped: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that wait for the stopped one are not waited for in turn."""
    fork_engines_and_ranks(monkeypatch)
    llm = AsyncLLM.spawn(TINY, **ON_CPU, tensor_parallel_size=2)
    pids = {child.name: child.pid or 0 for child in multiprocessing.active_children()}

    async def stop_during_a_request() -> None:
        async for _ in llm.stream("Once", LONG):
            os.kill(pids[stopped], signal.SIGSTOP)
            break

    asyncio.run(stop_during_a_request())
    monkeypatch.setattr(llm._host, "_stop_timeout_s", 0.5)
    llm.close()
    assert not any(map(is_alive, pids.values()))
    assert "the engine did not end within 0.5 s and is killed" in caplog.text
    assert "rank 1 did not end" not in caplog.text, "it had no time of its own"


def test_ranks_of_a_program_end_with_it() -> None:
    """LLM runs rank 0 in the program's own thread."""
    code = (
        "from forge import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    with LLM({TINY!r}, device='cpu', num_blocks=64, tensor_parallel_size=2) as llm:\n"
        "        params = SamplingParams(max_tokens=4, temperature=0.0)\n"
        "        print(len(llm.generate('Once', params)[0].choices[0].token_ids))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=400, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "4\n"), ended.stderr
    assert "killed" not in ended.stderr


def torchrun_command() -> list[str]:
    """Return the words that start two ranks on this host."""
    port = str(find_free_port())
    words = ("--nproc-per-node", "2", "--master-port", port)
    return [sys.executable, "-m", "torch.distributed.run", *words]


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_a_command() -> None:
    """Rank 0 runs the command, and the other process follows it and ends with it."""
    with LLM(TINY, **ON_CPU) as alone:
        (output,) = alone.generate(["Once"], PARAMS[0], use_tqdm=False)
    options = "--device cpu --dtype float32 --num-blocks 256 --tensor-parallel-size 2".split()
    sampling = "--temperature 0 --max-tokens 16 --ignore-eos".split()
    words = [*torchrun_command(), *f"-m forge generate Once --model {TINY}".split()]
    ended = subprocess.run(
        [*words, *options, *sampling], cwd=ROOT, capture_output=True, timeout=400, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, output.choices[0].text + "\n"), ended.stderr
