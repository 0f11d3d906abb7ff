"""Statistics: what the server does, in a line of the log every ten seconds.

Owns the line and when it is written. The numbers are those of /metrics, and say what has changed
since the line before. A server with nothing to do says nothing.

    12 running, 3 waiting; tokens/s: 1,840 in, 431 out; cache 45 % used, 12 % hit
"""

from __future__ import annotations

import asyncio
import logging

from forge.server.metrics import Figures

LOG = logging.getLogger("forge.statistics")
PERIOD_S = 10.0


class Statistics:
    """Lines about one engine."""

    def __init__(self, figures: Figures, period_s: float = PERIOD_S) -> None:
        self._figures = figures
        self._period_s = period_s
        self._before = self._counts()

    async def run(self) -> None:
        """A line each period, until cancelled."""
        clock = asyncio.get_running_loop().time
        last_s = clock()
        while True:
            await asyncio.sleep(self._period_s)
            elapsed_s, last_s = clock() - last_s, clock()
            line = self.line(elapsed_s)
            if line is not None:
                LOG.info(line)

    def line(self, elapsed_s: float) -> str | None:
        """What the last seconds were like, or None where nothing happened in them."""
        status = self._figures.status
        before, self._before = self._before, self._counts()
        came, went, queried, hit = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        if not (came or went or queried or status.running or status.waiting):
            return None
        used = 100 * status.blocks_used / status.num_blocks
        return (
            f"{status.running} running, {status.waiting} waiting; tokens/s: "
            f"{came / elapsed_s:,.0f} in, {went / elapsed_s:,.0f} out; "
            f"cache {used:.0f} % used, {100 * hit / queried if queried else 0:.0f} % hit"
        )

    def _counts(self) -> tuple[int, int, int, int]:
        """Tokens of prompts, of outputs, of admitted sequences, and of these those found."""
        status = self._figures.status
        figures = self._figures
        return (
            figures.prompt_tokens,
            figures.generation_tokens,
            status.queried_tokens,
            status.cached_tokens,
        )
