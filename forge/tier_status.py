"""TierStatus: figures of the KV tiers below the device, for metrics and logs.

Owns the names of the figures. Knows no clock and no label. The Scheduler and its caches count.

    Scheduler ──► HostCache, DiskCache ── from_scheduler ──► TierStatus ──► EngineStatus.tiers

Always true: a total never falls while the engine lives.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from forge.scheduler import Scheduler


class TierStatus(NamedTuple):
    """Figures of the host pool and of the files of blocks.

    num_host_blocks        blocks of the host pool
    num_used_host_blocks   those of them whose content can be loaded
    num_files              files that sequences can read

    Totals since the engine was made:

    num_stored_blocks      device to host pool
    num_loaded_blocks      host pool to device
    num_spilled_blocks     host pool to files
    num_fetched_blocks     files to host pool
    num_failed_spills      files that could not be written
    num_failed_fetches     files that were missing, or not as they were written
    num_dropped_moves      files given up: a step failed, a reset, a resize, or too long a wait
    num_host_evictions     blocks of the host pool whose content gave way to another
    num_host_tokens        tokens of sequences that the host pool had when they were first admitted
    num_disk_tokens        those that files had
    num_resumed_host_tokens   those of num_host_tokens in later turns of a session
    num_resumed_disk_tokens   those of num_disk_tokens
    """

    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_files: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_spilled_blocks: int = 0
    num_fetched_blocks: int = 0
    num_failed_spills: int = 0
    num_failed_fetches: int = 0
    num_dropped_moves: int = 0
    num_host_evictions: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_resumed_host_tokens: int = 0
    num_resumed_disk_tokens: int = 0

    @classmethod
    def from_scheduler(cls, scheduler: Scheduler) -> Self | None:
        """Return the figures, or None where the engine has no host pool."""
        if scheduler.config.host_tier is None:
            return None
        host_cache, disk_cache = scheduler.host_cache, scheduler.disk_cache
        cached, resumed = scheduler.cached_tokens, scheduler.resumed_tokens
        return cls(
            host_cache.num_blocks,
            host_cache.num_held_blocks,
            disk_cache.num_files,
            host_cache.num_stored_blocks,
            host_cache.num_loaded_blocks,
            disk_cache.num_spilled_blocks,
            disk_cache.num_fetched_blocks,
            disk_cache.num_failed_spills,
            disk_cache.num_missed_blocks,
            disk_cache.num_dropped_moves,
            host_cache.num_evictions,
            cached.host,
            cached.disk,
            resumed.host,
            resumed.disk,
        )


NO_TIERS = TierStatus()
"""Figures of an engine without a host pool."""
