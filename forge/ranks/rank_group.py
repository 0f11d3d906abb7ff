"""RankGroup: the processes of all ranks but 0, and a thread that ends all ranks when one ends.

Owns the processes, the memory that ranks share, and why the group has failed. Knows no model.
Rank 0 is either another process, which the group watches too, or a thread of this one.

    this process    RankGroup ─ watch thread ── sentinels, reports ──┐
                        │ contexts                                   │ one ends: log why,
                        ├──► rank 1 ─────────────────────────────────┤ kill the others
                        ├──► rank 2 ─────────────────────────────────┤
                        └──► rank 0: the engine's process, or here ──┘

    begins ──► all ranks report that they are ready ──► steps ──► close: rank 0 ends the ring,
                                                                  the others read its end

A rank that ends leaves the others waiting in a kernel, which no signal but SIGKILL ends. So ranks
are killed, in `LEADER_GRACE_S` at most. Rank 0 alone gets that time, to report the
failure to open streams.

Always true: when this process ends, whatever the reason, so do all ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from forge.errors import EngineDead
from forge.ranks.process_end import collect_exit_code, has_ended
from forge.ranks.rank_context import (
    FollowerContext,
    LeaderContext,
    create_memory_file,
    memory_file_path,
)
from forge.ranks.rank_process import FAILED_PREFIX, READY, RunRank, run_rank_process
from forge.ranks.step_ring import NUM_SLOTS, SLOT_BYTES, RingMemory
from forge.ranks.torchrun import SiblingProcess, SiblingRanks

LOG = logging.getLogger("forge.ranks")

LEADER_GRACE_S = 2.0
"""Seconds that rank 0 has to report a failure of another rank before it is killed."""

ORPHAN_GRACE_S = 2.0
"""Seconds that ranks have to end by themselves once rank 0 has ended."""

EXIT_CODE_TIMEOUT_S = 0.5
"""Seconds to wait for the end of a process whose pipes have closed."""

STOP_TIMEOUT_S = 10.0
"""Seconds that ranks have to end by themselves, after their last step, when the group closes."""

KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed process: a driver that hangs may keep it indefinitely."""


class RankProcess(Protocol):
    """Process of a rank: a child of this one, or one that torchrun has started."""

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class _Follower(NamedTuple):
    """A rank other than 0, and the other ends of its pipes."""

    rank: int
    process: RankProcess
    reports: Connection
    lifeline: Connection


class RankGroup:
    """Ranks 1 to world_size - 1, running, and what rank 0 needs to lead them.

    leader_context   context of rank 0
    failure       None, or why the ranks have ended
    """

    def __init__(
        self,
        world_size: int,
        run_rank: RunRank,
        args: Sequence[Any] = (),
        siblings: SiblingRanks | None = None,
    ) -> None:
        """Start the processes. Return at once; `wait_until_ready` waits for them.

        run_rank   importable function that runs a rank: see rank_process.RunRank
        args       its further arguments, which must be picklable
        siblings   processes that torchrun has started; None: the group starts processes
        Raises InvalidConfig on a system without the means.
        """
        self._context = get_context("spawn")
        self._siblings = siblings
        self._store_fd = create_memory_file("forge-store", 0)
        self._ring_fd = create_memory_file("forge-ring", NUM_SLOTS * SLOT_BYTES)
        self._memory = RingMemory(memory_file_path(self._ring_fd))
        self._condition = threading.Condition()
        self._not_ready = set(range(1, world_size))
        self._is_closing = False
        self.failure: str | None = None
        self._follower_failure: str | None = None
        self._leader: BaseProcess | None = None
        self._leader_ends: list[Connection] = []
        self._followers: list[_Follower] = []
        self._watcher: threading.Thread | None = None
        # multiprocessing waits for child processes at exit, and these ignore its signal.
        self._finalizer = Finalize(self, _kill_all, (self._followers,), exitpriority=10)
        notices, acks = [], []
        for rank in range(1, world_size):
            notice, ack = self._start_follower(rank, world_size, run_rank, tuple(args))
            notices.append(notice)
            acks.append(ack)
        store_path = memory_file_path(self._store_fd)
        self.leader_context = LeaderContext(
            world_size, store_path, self._memory, tuple(notices), tuple(acks)
        )

    def _start_follower(
        self, rank: int, world_size: int, run_rank: RunRank, args: tuple[Any, ...]
    ) -> tuple[Connection, Connection]:
        """Start a rank. Return rank 0's ends of its pipes in the ring."""
        pipe = self._context.Pipe
        (notices, notices_end), (acks_end, acks) = pipe(duplex=False), pipe(duplex=False)
        (reports, reports_end), (lifeline, lifeline_end) = pipe(duplex=False), pipe(duplex=False)
        store_path = memory_file_path(self._store_fd)
        rank_context = FollowerContext(
            *(rank, world_size, store_path, self._memory),
            *(notices, acks, reports_end, lifeline),
        )
        process: RankProcess
        if self._siblings is None:
            process = child = self._context.Process(
                target=run_rank_process,
                args=(rank_context, run_rank, args),
                name=f"forge-rank-{rank}",
                daemon=True,
            )
            child.start()
        else:
            process = self._siblings.start(rank_context, run_rank, args)
        for end in (notices, acks, reports_end, lifeline):
            end.close()
        self._followers.append(_Follower(rank, process, reports, lifeline_end))
        return notices_end, acks_end

    def context_of_process(self) -> LeaderContext:
        """Return the context of a rank 0 that is another process; `watch` gets it once started."""
        lifeline, lifeline_end = self._context.Pipe(duplex=False)
        self._leader_ends.append(lifeline_end)
        return self.leader_context._replace(lifeline=lifeline)

    def watch_process(self, leader: BaseProcess, rank_context: LeaderContext) -> None:
        """Watch all ranks from now on, rank 0 in another process.

        rank_context   from `context_of_process`; its pipes belong to that process, and close here
        """
        self._leader = leader
        for end in (*rank_context.notices, *rank_context.acks, rank_context.lifeline):
            if end is not None:
                end.close()
        self._watch(lambda: _end_process(leader, LEADER_GRACE_S))

    def watch_thread(self, is_stuck: Callable[[], bool]) -> None:
        """Watch all ranks from now on, rank 0 in a thread of this process.

        is_stuck   returns whether that thread waits for the other ranks
        Where it still waits `LEADER_GRACE_S` after another rank has ended, this process ends: no
        other way is left to end a kernel that waits for that rank.
        """
        self._watch(lambda: _end_stuck_thread(is_stuck, LEADER_GRACE_S))

    def _watch(self, end_leader: Callable[[], None]) -> None:
        self._watcher = threading.Thread(
            target=self._watch_ranks, args=(end_leader,), name="forge-ranks", daemon=True
        )
        self._watcher.start()

    def wait_until_ready(self) -> None:
        """Wait until every rank has reported that it is ready. Raises EngineDead where one ends."""
        with self._condition:
            self._condition.wait_for(lambda: not self._not_ready or self.failure is not None)
            if self.failure is not None:
                raise EngineDead(self.failure)

    def follower_failure(self, timeout_s: float) -> str | None:
        """Return why a rank other than 0 ended, or None if none has within the time.

        Where rank 0 reports an error, the cause may be on another rank, whose end is seen later.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, timeout_s)
            return self._follower_failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.kill()
        self.close()

    def kill(self) -> None:
        """Kill the ranks at once: rank 0 has failed before all were ready. `close` comes next."""
        self.expect_end()
        _kill_all(self._followers)

    def expect_end(self) -> None:
        """Let ranks end from now on: rank 0 is about to end the ring."""
        with self._condition:
            self._is_closing = True

    def close(self) -> None:
        """End the ranks: by themselves where rank 0 has ended the ring, else by SIGKILL."""
        if self._ring_fd < 0:
            return  # They were closed before.
        self.expect_end()
        for follower in _wait_for_ends(self._followers, STOP_TIMEOUT_S):
            LOG.warning("rank %d did not end and is killed", follower.rank)
        self._finalizer()
        if self._watcher is not None:
            self._watcher.join(KILL_TIMEOUT_S)
        for end in (*(end for each in self._followers for end in each[2:]), *self._leader_ends):
            end.close()
        for follower in self._followers:
            # Once it is stored: `close` refuses a process that still seems to run.
            if isinstance(follower.process, SiblingProcess) or (
                collect_exit_code(follower.process, 0.0) is not None
            ):
                follower.process.close()
        for fd in (self._store_fd, self._ring_fd):
            os.close(fd)
        self._store_fd = self._ring_fd = -1

    def _watch_ranks(self, end_leader: Callable[[], None]) -> None:
        """Wait until all ranks have ended in order, or end all once one has not."""
        reports = {each.reports: each.rank for each in self._followers}
        followers = {each.process.sentinel: each for each in self._followers}
        leaders = [] if self._leader is None else [self._leader.sentinel]
        words: dict[int, str] = {}
        while followers:
            ready = wait([*reports, *followers, *leaders])
            for pipe in [each for each in ready if isinstance(each, Connection)]:
                self._read_report(reports, pipe, words)
            if self._leader is not None and self._leader.sentinel in ready:
                exit_code = collect_exit_code(self._leader, KILL_TIMEOUT_S)
                failure = f"rank 0 ended (exit code {exit_code})"
                if exit_code == 1:  # An error: perhaps that another rank has ended.
                    failures = self._describe_failed_followers(reports, words)
                    failure = "; ".join([*failures, failure])
                if self._fail(failure):
                    _wait_for_ends(self._followers, ORPHAN_GRACE_S)
                    _kill_all(self._followers)
                return
            for sentinel in [each for each in followers if each in ready]:
                ended = followers.pop(sentinel)
                if (
                    collect_exit_code(ended.process, KILL_TIMEOUT_S) == 0
                ):  # Rank 0 has ended the ring.
                    continue
                while ended.reports in reports and ended.reports.poll():
                    self._read_report(reports, ended.reports, words)
                failure = _describe_end(ended, words.get(ended.rank))
                self._follower_failure = failure
                if self._fail(failure):
                    LOG.error("%s; all ranks end", failure)
                    _kill_all(self._followers)
                    end_leader()
                return
        self._fail("rank 0 has ended the ring")

    def _describe_failed_followers(
        self, reports: dict[Connection, int], words: dict[int, str]
    ) -> list[str]:
        """Return how the ranks whose pipes have closed ended, without those that ended in order.

        Rank 0 sees that such a rank's pipes have closed, and may end before its process is seen to.
        """
        failures = []
        for follower in self._followers:
            while follower.reports in reports and follower.reports.poll():
                self._read_report(reports, follower.reports, words)
            if follower.reports in reports:
                continue
            failure = _describe_end(follower, words.get(follower.rank))
            if collect_exit_code(follower.process, 0.0) != 0:
                failures.append(failure)
        return failures

    def _read_report(
        self, reports: dict[Connection, int], pipe: Connection, words: dict[int, str]
    ) -> None:
        """Read a rank's next report: it is ready, its last words, or the end of its pipe."""
        rank = reports[pipe]
        try:
            report = pipe.recv_bytes()
        except (EOFError, OSError):
            del reports[pipe]
            return
        if report == READY:
            with self._condition:
                self._not_ready.discard(rank)
                self._condition.notify_all()
        elif report.startswith(FAILED_PREFIX):
            words[rank] = report.removeprefix(FAILED_PREFIX).decode(errors="replace")

    def _fail(self, failure: str) -> bool:
        """Set why the ranks have ended. Return False where the group was to end."""
        with self._condition:
            is_failure = not self._is_closing
            self.failure = self.failure or failure
            self._condition.notify_all()
        return is_failure


def _describe_end(follower: _Follower, words: str | None) -> str:
    """Return which rank ended, and why as far as that is known."""
    # Its pipes close just before it ends.
    exit_code = collect_exit_code(follower.process, EXIT_CODE_TIMEOUT_S)
    cause = f"exit code {exit_code}"
    if exit_code is None:
        cause = "torchrun has its exit code"
    elif exit_code < 0:
        cause = f"signal {-exit_code}, {signal.strsignal(-exit_code)}"
    return f"rank {follower.rank} ended ({cause})" + (f": {words}" if words else "")


def _wait_for_ends(followers: Sequence[_Follower], timeout_s: float) -> list[_Follower]:
    """Wait until the processes have ended, and return those that still run.

    Not by `is_alive`, which is True for a moment while another thread collects the exit code.
    """
    deadline_s = time.monotonic() + timeout_s
    running = list(followers)
    while running:
        timeout_s = max(0.0, deadline_s - time.monotonic())
        ended = wait([each.process.sentinel for each in running], timeout_s)
        if not ended:
            break
        running = [each for each in running if each.process.sentinel not in ended]
    return running


def _kill_all(followers: Sequence[_Follower]) -> None:
    for follower in _wait_for_ends(followers, 0.0):
        follower.process.kill()
    _wait_for_ends(followers, KILL_TIMEOUT_S)


def _end_process(process: BaseProcess, grace_s: float) -> None:
    if not has_ended(process, grace_s):
        LOG.error("rank 0 waits for a rank that has ended, and is killed")
        process.kill()


def _end_stuck_thread(is_stuck: Callable[[], bool], grace_s: float) -> None:
    deadline_s = time.monotonic() + grace_s
    while is_stuck():
        if time.monotonic() > deadline_s:
            LOG.error("rank 0 waits for a rank that has ended, and this process ends")
            sys.stderr.flush()
            os._exit(1)
        time.sleep(0.01)
