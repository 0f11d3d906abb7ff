"""A rank that ends at any stage ends all ranks, with the reason, and nothing is left of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forge.errors import EngineDead, InvalidConfig
from forge.ranks.rank_group import RankGroup
from forge.ranks.rank_process import RunRank, log_failure
from tests.ranks.import_failure import follow_after_import
from tests.ranks.stand_in import LAST_STEP, STEP, follow, lead

TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], limit_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happens"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def num_memory_files() -> int:
    """Return the open or mapped memory files of this process that belong to ranks."""
    paths = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:forge" in text for text in (*paths, *mapped))


class Ranks:
    """Three ranks, of which rank 0 is a process too."""

    def __init__(
        self,
        stage: str,
        failing_rank: int = 2,
        run_rank: RunRank = follow,
        watch: bool = True,
    ) -> None:
        self.group = RankGroup(3, run_rank, (stage, failing_rank))
        rank_context = self.group.context_of_process()
        context = multiprocessing.get_context("spawn")
        self.leader = context.Process(target=lead, args=(rank_context, stage), daemon=True)
        self.leader.start()
        self._rank_context = rank_context
        if watch:
            self.watch()

    def watch(self) -> None:
        self.group.watch_process(self.leader, self._rank_context)

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        processes = [self.leader, *(each.process for each in self.group._followers)]
        return [process.pid for process in processes if process.pid is not None]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = num_memory_files()
    yield
    assert num_memory_files() == before
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("forge-rank")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        pytest.param(
            *("killed while loading", r"rank 2 ended \(signal 9, Killed\)"), marks=pytest.mark.long
        ),
        ("raises while loading", r"rank 2 ended .*ValueError: no weights for rank 2"),
        ("killed in a step", r"rank 2 ended \(signal 9, Killed\)"),
        pytest.param(
            *("raises in a step", r"rank 2 ended .*ArithmeticError: an illegal memory access"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_ends_ends_all_ranks_with_its_last_words(
    stage: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a step, rank 1 and rank 0 hang with the interpreter, as in a kernel that waits."""
    ranks = Ranks(stage)
    pids = ranks.pids
    wait_until(lambda: ranks.group.failure is not None)
    wait_until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(EngineDead, match=words):
        ranks.group.wait_until_ready()
    assert "; all ranks end" in caplog.text
    ranks.group.close()


@pytest.mark.long
def test_a_rank_that_cannot_be_imported_ends_all_ranks() -> None:
    ranks = Ranks("none", run_rank=follow_after_import)
    pids = ranks.pids
    with pytest.raises(EngineDead, match=r"rank 2 ended \(exit code 1\)"):
        ranks.group.wait_until_ready()
    wait_until(lambda: not any(map(is_alive, pids)))
    ranks.group.close()


@pytest.mark.long
def test_the_cause_is_named_where_rank_0_has_ended_of_it_before_anybody_looks() -> None:
    """Rank 0 ends with an error soon after the rank that it has lost."""
    ranks = Ranks("none", run_rank=follow_after_import, watch=False)
    wait_until(lambda: not is_alive(ranks.pids[0]) and not is_alive(ranks.pids[2]))
    ranks.watch()
    wait_until(lambda: ranks.group.failure is not None)
    assert ranks.group.failure is not None
    assert ranks.group.failure.startswith("rank 2 ended (exit code 1)")
    assert ranks.group.failure.endswith("; rank 0 ended (exit code 1)")
    ranks.group.close()


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_while_it_waits_for_a_step_ends_all_ranks(rank: int) -> None:
    ranks = Ranks("killed while serving")
    pids = ranks.pids
    ranks.group.wait_until_ready()
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))
    assert ranks.group.failure == f"rank {rank} ended (signal 9, Killed)"
    ranks.group.close()


@pytest.mark.long
def test_the_end_of_rank_0_ends_ranks_that_hang_in_a_step() -> None:
    ranks = Ranks("rank 0 killed in a step")
    pids = ranks.pids
    wait_until(lambda: not any(map(is_alive, pids)))
    assert ranks.group.failure == "rank 0 ended (exit code -9)"
    ranks.group.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [
        "none",
        pytest.param("killed at shutdown", marks=pytest.mark.long),
        pytest.param("hangs at shutdown", marks=pytest.mark.long),
    ],
)
def test_ranks_end_with_the_ring_or_are_killed(
    stage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown is no failure, even where a rank does not end by itself.

    A process that has ended seems alive while another thread collects its exit code.
    """
    ranks = Ranks(stage)
    pids = ranks.pids
    ranks.group.expect_end()
    ranks.leader.join(TIMEOUT_S)
    with monkeypatch.context() as patch:
        for follower in ranks.group._followers:
            patch.setattr(follower.process, "is_alive", lambda: True)
        ranks.group.close()
    assert not any(map(is_alive, pids))
    assert "; all ranks end" not in caplog.text
    assert ("rank 2 did not end and is killed" in caplog.text) is (stage == "hangs at shutdown")


@pytest.mark.parametrize(
    "stage", [pytest.param("none", marks=pytest.mark.long), "killed in a step"]
)
def test_ranks_end_when_the_process_that_started_them_is_killed(stage: str) -> None:
    """Rank 1 hangs with the interpreter in one case, so no Python of it could notice."""
    code = (
        "import sys, time\n"
        "from tests.ranks.test_rank_group import Ranks\n"
        "if __name__ == '__main__':\n"
        f"    ranks = Ranks({stage!r}, failing_rank=0)\n"
        "    ranks.group.wait_until_ready()\n"
        "    print(*ranks.pids, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(pids) == 3
        starter.kill()
        wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (InvalidConfig("tensor_parallel_size", "4 heads, 3 ranks", "Give a divisor of 4"), False),
        (ValueError("no weights"), True),
    ],
)
def test_a_refused_option_is_one_line_in_the_log_of_a_rank(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    log_failure(2, error)
    (record,) = caplog.records
    assert record.getMessage() == f"rank 2 has ended: {error}"
    assert bool(record.exc_info) is has_traceback


def test_rank_0_in_a_thread_leads_and_its_group_closes() -> None:
    group = RankGroup(2, follow, ("none", 1))
    group.watch_thread(lambda: False)
    writer = group.leader_context.open_writer()
    group.wait_until_ready()
    writer.send([STEP])
    group.expect_end()
    writer.close()
    group.close()
    assert group.failure is None or "torchrun" not in group.failure


def test_a_process_whose_own_thread_waits_for_a_rank_that_ended_ends_too() -> None:
    code = (
        "import time\n"
        "from forge.ranks.rank_group import RankGroup\n"
        "from tests.ranks.stand_in import LAST_STEP, follow\n"
        "if __name__ == '__main__':\n"
        "    group = RankGroup(2, follow, ('killed in a step', 1))\n"
        "    group.watch_thread(lambda: True)\n"
        "    group.leader_context.open_writer().send([LAST_STEP])\n"
        "    time.sleep(1000)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=TIMEOUT_S, text=True
    )
    assert ended.returncode == 1
    assert "rank 1 ended (signal 9, Killed)" in ended.stderr
    assert "this process ends" in ended.stderr


def test_rank_0_of_this_thread_gets_an_error_when_a_rank_has_ended() -> None:
    group = RankGroup(2, follow, ("killed in a step", 1))
    group.watch_thread(lambda: False)
    with group.leader_context.open_writer() as writer:
        writer.send([LAST_STEP])
        wait_until(lambda: group.failure is not None)
        with pytest.raises(EngineDead, match="rank 1 has ended"):
            writer.send([STEP])
    group.close()
