"""StatLogger: what the server does, in a line of the log every ten seconds.

Owns the line and its period. Knows no request. The numbers are those of /metrics, as changes since
the previous line. An idle server writes no line.

    12 running, 3 waiting; tokens/s: 1,840 in, 431 out; cache 45 % used, 12 % hit

With a host pool: "; host 80 % used, 20 % hit, 3 % in files". Each share is of the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
from operator import sub
from typing import NamedTuple

from forge.server.server_stats import ServerStats
from forge.tier_status import NO_TIERS, TierStatus

LOG = logging.getLogger("forge.statistics")
PERIOD_S = 10.0


class _Counts(NamedTuple):
    """Tokens of prompts, of outputs, of admitted sequences, and those of these in each tier."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_host_tokens: int
    num_disk_tokens: int

    def percent(self, num_tokens: int) -> str:
        """Return the share of the tokens of admitted sequences."""
        share = num_tokens / self.num_queried_tokens if self.num_queried_tokens else 0
        return f"{100 * share:.0f}"


class StatLogger:
    """Writes lines about one engine."""

    def __init__(self, stats: ServerStats, period_s: float = PERIOD_S) -> None:
        self._stats = stats
        self._period_s = period_s
        self._last_counts = self._counts()

    async def run(self) -> None:
        """Write a line each period, until cancelled."""
        clock = asyncio.get_running_loop().time
        last_s = clock()
        while True:
            await asyncio.sleep(self._period_s)
            elapsed_s, last_s = clock() - last_s, clock()
            line = self.format_line(elapsed_s)
            if line is not None:
                LOG.info(line)

    def format_line(self, elapsed_s: float) -> str | None:
        """Return the line for the past `elapsed_s` seconds, or None where nothing happened."""
        status = self._stats.status
        last_counts, self._last_counts = self._last_counts, self._counts()
        changes = _Counts(*map(sub, self._last_counts, last_counts))
        if not (
            changes.num_prompt_tokens
            or changes.num_output_tokens
            or changes.num_queried_tokens
            or status.num_running
            or status.num_waiting
        ):
            return None
        used_percent = 100 * status.num_used_blocks / status.num_blocks
        return (
            f"{status.num_running} running, {status.num_waiting} waiting; tokens/s: "
            f"{changes.num_prompt_tokens / elapsed_s:,.0f} in, "
            f"{changes.num_output_tokens / elapsed_s:,.0f} out; "
            f"cache {used_percent:.0f} % used, {changes.percent(changes.num_cached_tokens)} % hit"
            f"{_format_tiers(status.tiers, changes)}"
        )

    def _counts(self) -> _Counts:
        stats, status = self._stats, self._stats.status
        tiers = status.tiers or NO_TIERS
        return _Counts(
            stats.num_prompt_tokens,
            stats.num_generation_tokens,
            status.num_queried_tokens,
            status.num_cached_tokens,
            tiers.num_host_tokens,
            tiers.num_disk_tokens,
        )


def _format_tiers(tiers: TierStatus | None, changes: _Counts) -> str:
    """Return the part of the line about host memory and files: "" where there are none."""
    if tiers is None:
        return ""
    num_blocks = tiers.num_host_blocks
    used_percent = 100 * tiers.num_used_host_blocks / num_blocks if num_blocks else 0
    return (
        f"; host {used_percent:.0f} % used, {changes.percent(changes.num_host_tokens)} % hit, "
        f"{changes.percent(changes.num_disk_tokens)} % in files"
    )
