"""Rank processes of a measurement: parts that all ranks run in order, each within a limit.

Owns the processes. Knows nothing of what they measure.

    parent   spawn ── results of part 1 ── results of part 2 ── limit passed: kill all, spawn again
    ranks    [ set-up | part 1 | part 2 | part 3 ...            [ set-up | part 4 ...

Always true: a part that does not end, or ends a rank, costs that part and no other. No process is
left when `run_parts` returns.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

SETUP = "set-up"
SETUP_LIMIT_S = 180.0
MAX_STARTS = 6
"""Starts of the ranks in one run, the first included."""


SetUp = Callable[[int, int, int, Sequence[str]], Iterable[Any]]
"""Sets a rank up, yields None, then yields the result of each part in order.

Takes the rank, the world size, the number of the start, and the names of the parts. The rendezvous
of each start has a name of its own.
"""

Report = Callable[[str, list[Any]], None]
"""Receives the name of a part and the results of all ranks, in the order of ranks."""


class _Failure(NamedTuple):
    """Part at which the ranks were ended, counted from the set-up as 0, and why."""

    part_index: int
    reason: str


def run_parts(
    set_up: SetUp, world_size: int, parts: Sequence[str], limit_s: float, report: Report
) -> list[str]:
    """Run the parts on spawned ranks. Return what went wrong, a sentence for each part.

    set_up    importable by a new process
    limit_s   seconds after which a part has failed; all ranks are then ended and started again
    """
    failures: list[str] = []
    rest = list(parts)
    for start in range(MAX_STARTS):
        failure = _run_once(set_up, world_size, start, rest, limit_s, report)
        if failure is None:
            return failures
        failures.append(failure.reason)
        rest = rest[failure.part_index :]
        if failure.part_index == 0 or not rest:
            break
    if rest:
        failures.append(f"{len(rest)} parts did not run, the first is {rest[0]!r}")
    return failures


def _run_once(
    set_up: SetUp,
    world_size: int,
    start: int,
    parts: Sequence[str],
    limit_s: float,
    report: Report,
) -> _Failure | None:
    """Start ranks, run the parts, end the ranks. Return where they failed, or None."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        spawn.Process(
            target=_run_rank,
            args=(set_up, rank, world_size, start, parts, sender),
            daemon=True,
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that the end of a rank ends its pipe
        return _collect([receiver for receiver, _ in pipes], parts, limit_s, report)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _run_rank(
    set_up: SetUp,
    rank: int,
    world_size: int,
    start: int,
    parts: Sequence[str],
    connection: Connection,
) -> None:
    try:
        for result in set_up(rank, world_size, start, parts):
            connection.send((result, None))
    except BaseException:
        connection.send((None, traceback.format_exc()))
        raise


def _collect(
    receivers: Sequence[Connection], parts: Sequence[str], limit_s: float, report: Report
) -> _Failure | None:
    """Report each part that all ranks have ended. Return the first failure, or None."""
    names = [SETUP, *parts]
    results: list[list[Any]] = [[] for _ in receivers]
    deadlines_s = [time.monotonic() + SETUP_LIMIT_S for _ in receivers]
    num_reported = 0
    while num_reported < len(names):
        # What a rank that is ahead has sent waits: the first part that fails is the failure.
        active = [rank for rank, each in enumerate(results) if len(each) == num_reported]
        remaining_s = min(deadlines_s[rank] for rank in active) - time.monotonic()
        ready = wait([receivers[rank] for rank in active], max(0.0, remaining_s))
        for rank in active:
            index = len(results[rank])
            if receivers[rank] in ready:
                try:
                    result, error = receivers[rank].recv()
                except EOFError:
                    result, error = None, "its process ended"
                if error is not None:
                    return _Failure(index, f"{names[index]}: rank {rank} failed: {error}")
                results[rank].append(result)
                deadlines_s[rank] = time.monotonic() + limit_s
            elif time.monotonic() > deadlines_s[rank]:
                limit = limit_s if index else SETUP_LIMIT_S
                return _Failure(
                    index, f"{names[index]}: rank {rank} did not end it within {limit:g} s"
                )
        while num_reported < min(map(len, results)):
            if num_reported:
                report(names[num_reported], [each[num_reported] for each in results])
            num_reported += 1
    return None
