"""Session metrics: how long sessions take, how often turns end, and how evenly time is divided.

Owns the times of sessions and the record of block accesses. Knows no engine. A sub-agent's turns
count as turns of the session that started it, so the times of a session contain them.

    first turn arrives ──► answer ──► pause ──► turn ──► ... ──► last answer
    |------------------------ completion ------------------------|

Memory grows with the number of sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forge.blocks import BlockHash
from forge.sim.block_accesses import BlockAccesses
from forge.sim.metrics import DurationHistogram
from forge.sim.units import NS_PER_S

PREFIX_CACHE, HOST, RECOMPUTED = "prefix_cache", "host", "recomputed"
"""Sources of resumed tokens."""


def jain_index(values: Sequence[float]) -> float:
    """Return 1 where all values are equal, and 1 / n where one of n has everything.

    Jain, Chiu, Hawe 1984. 1 where there is nothing to divide.
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


@dataclass(slots=True)
class _SessionTimes:
    """Times of a session.

    tenant       owner of the session
    begin_ns     arrival of its first turn
    end_ns       end of its last answer so far
    latency_ns   sum over turns, from arrival to end
    """

    tenant: str
    begin_ns: int
    end_ns: int = 0
    latency_ns: int = 0
    num_turns: int = 0


class SessionMetrics:
    """Metrics of the sessions of a run.

    accesses   block accesses of their turns
    """

    def __init__(self) -> None:
        self.accesses = BlockAccesses()
        self._sessions: dict[int, _SessionTimes] = {}
        self._open_turns: dict[int, tuple[_SessionTimes, int]] = {}

    def record_arrival(
        self, session: int, tenant: str, request_id: int, now_ns: int, hashes: list[BlockHash]
    ) -> None:
        """Record a turn that was accepted. The engine extends `hashes` with its blocks."""
        times = self._sessions.setdefault(session, _SessionTimes(tenant, now_ns))
        self._open_turns[request_id] = times, now_ns
        self.accesses.record_arrival(request_id, hashes)

    def record_admissions(self, request_ids: Iterable[int]) -> None:
        """Record requests that were admitted a first time; those without a session are ignored."""
        self.accesses.record_admissions(request_ids)

    def record_finish(self, request_id: int, now_ns: int) -> None:
        """Record the end of a request; one without a session is ignored."""
        if request_id in self._open_turns:
            times, arrival_ns = self._open_turns.pop(request_id)
            times.end_ns = now_ns
            times.latency_ns += now_ns - arrival_ns
            times.num_turns += 1
            self.accesses.record_finish(request_id)

    def summary(
        self, num_cached_tokens: int, block_size: int, num_loaded_tokens: int = 0
    ) -> dict[str, Any]:
        """Return all figures; none where no turn of a session has ended.

        num_cached_tokens   prompt tokens that admission found in the prefix cache
        num_loaded_tokens   tokens that came from the host pool
        Resumed tokens are those that an infinite cache would have had. Times are milliseconds.
        """
        ended = [times for times in self._sessions.values() if times.num_turns]
        if not ended:
            return {}
        completion = DurationHistogram()
        tenants: dict[str, Counter[str]] = {}
        for times in ended:
            completion.add(times.end_ns - times.begin_ns)
            totals = tenants.setdefault(times.tenant, Counter())
            totals.update(latency_ns=times.latency_ns, turns=times.num_turns)
        num_turns = sum(times.num_turns for times in ended)
        makespan_ns = max(t.end_ns for t in ended) - min(t.begin_ns for t in ended)
        num_resumable = self.accesses.num_known_blocks * block_size
        num_found = num_cached_tokens + num_loaded_tokens
        resumed_tokens = {PREFIX_CACHE: num_cached_tokens}
        if num_loaded_tokens:
            resumed_tokens[HOST] = num_loaded_tokens
        resumed_tokens[RECOMPUTED] = num_resumable - num_found
        return {
            "sessions": len(ended),
            "turns": num_turns,
            "turns_per_s": num_turns * NS_PER_S / makespan_ns if makespan_ns else 0.0,
            "completion_ms": completion.summary(),
            "makespan_ms": makespan_ns / 1e6,
            "resumed_tokens": resumed_tokens,
            "fairness": {
                "sessions": jain_index([t.latency_ns / t.num_turns for t in ended]),
                "tenants": jain_index([t["latency_ns"] / t["turns"] for t in tenants.values()]),
            },
        }
