"""An engine in a separate process: its end, its start and the messages of the pipe."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from forge import engine_process
from forge.async_llm import AsyncLLM
from forge.engine_messages import EngineStatus, PauseResult, StepReport
from forge.engine_process import _pack_report, _unpack_report
from forge.errors import (
    BlocksInUse,
    ContextTooLong,
    EngineDead,
    ForgeError,
    InvalidConfig,
    InvalidRequest,
    OutOfBlocks,
    UnknownSequence,
)
from forge.kv_publisher import KVEventCounts
from forge.policy import FCFS
from forge.request import (
    CachedTokens,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.tier_status import TierStatus
from forge.timings import ChoiceTimings, TimedEvent
from tests.engine.test_async_llm import BlockingPolicy

LONG = SamplingParams(max_tokens=8000, ignore_eos=True, temperature=0.0)
SLOW = "hash:step_ms=5"
TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], limit_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happens"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def engine_pid(llm: AsyncLLM) -> int:
    pid: int = llm._host._process.pid  # type: ignore[attr-defined]
    return pid


# The end.


def test_streams_of_a_killed_process_end_with_an_error() -> None:
    async def killed(llm: AsyncLLM) -> tuple[str | None, str | None]:
        async with aclosing(llm.stream("abc", LONG)) as stream:
            await anext(stream)
            os.kill(engine_pid(llm), signal.SIGKILL)
            *_, last = [delta async for delta in stream]
        return last.finish_reason, last.error

    llm = AsyncLLM.spawn(SLOW)
    try:
        finish, error = asyncio.run(asyncio.wait_for(killed(llm), TIMEOUT_S))
        assert finish == "error"
        assert error == "the engine has ended: its process ended with exit code -9"
        with pytest.raises(EngineDead, match=r"exit code -9\. Start it again"):
            asyncio.run(llm.generate("abc"))
    finally:
        llm.close()


def test_closing_ends_the_process() -> None:
    llm = AsyncLLM.spawn("hash")
    pid = engine_pid(llm)
    assert is_alive(pid)
    llm.close()
    assert not is_alive(pid)
    assert llm.failure == "it was closed"


def test_signals_of_a_terminal_do_not_end_it() -> None:
    """Ctrl-C goes to every process of the terminal: the parent decides when this one ends."""
    llm = AsyncLLM.spawn("hash")
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine_pid(llm), number)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        output = asyncio.run(asyncio.wait_for(llm.generate("abc", params), TIMEOUT_S))
        assert len(output.token_ids) == 5
    finally:
        llm.close()


PARENT = """
import asyncio, sys
from forge.async_llm import AsyncLLM
from forge.request import SamplingParams

async def stream(llm):
    async for delta in llm.stream("abc", SamplingParams(max_tokens=8000, ignore_eos=True)):
        print(llm._host._process.pid, flush=True)
        if sys.argv[1] == "leaves":
            return

if __name__ == "__main__":
    llm = AsyncLLM.spawn("hash:step_ms=5")
    if sys.argv[1] == "is killed while idle":  # nothing is written to the pipe that has closed
        print(llm._host._process.pid, flush=True)
        sys.stdin.read()
    asyncio.run(stream(llm))
"""


@pytest.mark.parametrize("way", ["is killed while idle", "is killed", "leaves"])
def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path, way: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            if way != "leaves":
                assert is_alive(pid)
                parent.kill()
            parent.stdout.close()
            assert parent.wait(TIMEOUT_S) == (0 if way == "leaves" else -9)
            wait_until(lambda: not is_alive(pid))
        finally:  # no process stays after a failure
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_an_engine_that_does_not_read_delays_no_caller() -> None:
    """Ten megabytes of requests are posted to a process that is stopped; then it is closed."""
    llm = AsyncLLM.spawn("hash", max_model_len=9000)
    pid = engine_pid(llm)
    os.kill(pid, signal.SIGSTOP)

    def post_and_close() -> None:
        for number in range(500):
            llm._host.post(Request(number, (5,) * 8000, LONG))
        llm._host._stop_timeout_s = 0.5  # type: ignore[attr-defined]
        llm.close()

    thread = threading.Thread(target=post_and_close, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and not is_alive(pid)


def test_an_engine_is_seen_to_stall_after_its_readers_have_left(tmp_path: Path) -> None:
    moved_s: list[float] = []

    async def come_and_go(llm: AsyncLLM) -> None:
        reader = asyncio.create_task(llm.generate("abc", LONG))
        # A request that leaves before the engine has it never reaches the blocking policy.
        while not (llm._mailboxes and held.is_blocked()):
            await asyncio.sleep(0.01)
        moved_s.append(llm._last_progress_s)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    held = BlockingPolicy(tmp_path)
    llm = AsyncLLM.spawn("hash", policy=held.policy)
    try:
        assert llm.stalled_s == 0
        for _ in range(3):
            asyncio.run(come_and_go(llm))
        assert len(set(moved_s)) == 1, "a later request restarted the stall's clock"
        wait_until(lambda: llm.stalled_s > 0.05)
        held.release()
        wait_until(lambda: llm.stalled_s == 0)
    finally:
        held.release()
        llm.close()


HANGING_POLICY = """
import atexit, time
from forge.policy import FCFS
atexit.register(time.sleep, 600)
def admit(waiting, context):
    raise RuntimeError("poison")
policy = FCFS._replace(admit=admit)
"""


def test_a_process_that_hangs_after_its_engine_failed_is_not_waited_for(tmp_path: Path) -> None:
    policy = tmp_path / "hangs.py"
    policy.write_text(HANGING_POLICY)
    llm = AsyncLLM.spawn("hash", policy=str(policy))
    output = asyncio.run(asyncio.wait_for(llm.generate("abc"), TIMEOUT_S))
    assert output.finish_reason == "error" and "poison" in str(output.choices[0].error)
    pid, start_s = engine_pid(llm), time.monotonic()
    llm.close()
    assert time.monotonic() - start_s < TIMEOUT_S
    assert not is_alive(pid)


# The start.


def test_an_error_of_the_engine_at_its_start_is_raised_here() -> None:
    with pytest.raises(InvalidConfig, match=r"^num_blocks: ") as exc_info:
        AsyncLLM.spawn("hash", num_blocks=0)
    assert exc_info.value.option == "num_blocks"


def test_a_process_that_ends_at_its_start_is_no_engine(tmp_path: Path) -> None:
    policy = tmp_path / "ends.py"
    policy.write_text("import os\nos._exit(3)\n")
    with pytest.raises(EngineDead, match=r"did not start: its process ended with exit code 3$"):
        AsyncLLM.spawn("hash", policy=str(policy))


def test_the_end_of_a_process_is_seen_while_packages_are_imported_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports of a checkpoint take seconds, and longer on a busy machine."""
    policy, is_seen, imported = tmp_path / "ends.py", threading.Event(), list[bool]()
    policy.write_text("import os\nos._exit(3)\n")
    monkeypatch.setattr(
        engine_process,
        "import_checkpoint_packages",
        lambda model: imported.append(is_seen.wait(TIMEOUT_S)),
    )
    with pytest.raises(EngineDead, match="exit code 3"):
        AsyncLLM.spawn("hash", policy=str(policy))
    assert not imported
    is_seen.set()


@pytest.fixture
def unfrozen_gc() -> Iterator[None]:
    """Unfreeze what the tests themselves have frozen, as in a server that starts."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.long
@pytest.mark.usefixtures("unfrozen_gc")
def test_no_collection_visits_the_objects_of_the_start_until_the_engine_is_closed() -> None:
    llm = AsyncLLM.spawn("hash")
    kept = [llm]
    assert gc.get_freeze_count() > 10_000
    assert any(each is kept for each in gc.get_objects()), "later objects are visited"
    llm.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfrozen_gc")
def test_nothing_stays_frozen_where_the_engine_did_not_start() -> None:
    with pytest.raises(InvalidConfig, match=r"^num_blocks: "):
        AsyncLLM.spawn("hash", num_blocks=0)
    assert gc.get_freeze_count() == 0


def test_functions_do_not_go_to_another_process() -> None:
    with pytest.raises(InvalidConfig, match=r"^policy: .* Give a name or a FILE\.py$"):
        AsyncLLM.spawn("hash", policy=FCFS)


# Messages of the pipe.


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("prompt", "it is bad", "Fix it", "its_code"),
        ContextTooLong("prompt", "it is long", "Shorten it"),
        InvalidConfig("depth", "it is 3", "Give 1"),
        OutOfBlocks(3, 2),
        UnknownSequence(7),
        BlocksInUse(4, 2),
        EngineDead("it has ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_a_pipe(error: ForgeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


SCORES = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -2.0))),)
EVENT = TimedEvent(2.5, "admitted", "new")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tokens": (3,)},
        {"tokens": (3, 4), "finish": FinishReason.STOP, "stop_token": 4},
        {"tokens": (3,), "logprobs": SCORES},
        {"prompt_logprobs": SCORES},
        {"finish": FinishReason.ERROR, "error": "why"},
        {"finish": FinishReason.STOP, "cached_tokens": CachedTokens(4, 3, 2)},
        {"finish": FinishReason.STOP, "timings": ChoiceTimings(1.5, 2.5, events=(EVENT,))},
    ],
    ids=str,
)
def test_a_delta_is_the_same_after_a_pipe(fields: dict[str, Any]) -> None:
    delta = Delta(2**40, 1, **fields)
    tiers = TierStatus(*range(20, 35))
    status = EngineStatus(
        *range(1, 6), True, False, "keep", True, 0, "0", *range(6, 19), tiers, KVEventCounts(3, 1)
    )
    figures = ([1.5, 2.5], [11], [(12, True)], [(13, None)], [PauseResult(14)], 12.5)
    report = StepReport([delta], [(8, "taken")], status, 0.5, *figures)
    again = _unpack_report(*pickle.loads(pickle.dumps(_pack_report(report))))
    assert again == report
    assert type(again.deltas[0]) is Delta and type(again.status) is EngineStatus
