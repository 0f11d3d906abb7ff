"""StatLogger: what the server does, in a line of the log every ten seconds.

Owns the line and its period. Knows no request. The numbers are those of /metrics, as changes since
the previous line. An idle server writes no line.

    12 running, 3 waiting; tokens/s: 1,840 in, 431 out; cache 45 % used, 12 % hit
"""

from __future__ import annotations

import asyncio
import logging

from forge.server.metrics import ServerStats

LOG = logging.getLogger("forge.statistics")
PERIOD_S = 10.0


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
        num_prompt_tokens, num_output_tokens, num_queried_tokens, num_cached_tokens = (
            now - then for now, then in zip(self._last_counts, last_counts, strict=True)
        )
        if not (
            num_prompt_tokens
            or num_output_tokens
            or num_queried_tokens
            or status.num_running
            or status.num_waiting
        ):
            return None
        used_percent = 100 * status.num_used_blocks / status.num_blocks
        return (
            f"{status.num_running} running, {status.num_waiting} waiting; tokens/s: "
            f"{num_prompt_tokens / elapsed_s:,.0f} in, {num_output_tokens / elapsed_s:,.0f} out; "
            f"cache {used_percent:.0f} % used, "
            f"{100 * num_cached_tokens / num_queried_tokens if num_queried_tokens else 0:.0f} % hit"
        )

    def _counts(self) -> tuple[int, int, int, int]:
        """Return the tokens of prompts, of outputs, of admitted sequences, and those cached."""
        status = self._stats.status
        stats = self._stats
        return (
            stats.num_prompt_tokens,
            stats.num_generation_tokens,
            status.num_queried_tokens,
            status.num_cached_tokens,
        )
