"""Count of the CPUs that this process may use, by its affinity and the limits of its container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of CPU time that a container has in each period, and the period."""


def num_usable_cpus(cpu_max: Path = CPU_MAX) -> int:
    """Return the CPUs that this process may run on, at most as many as its container has time of.

    A container that has used its time stands still, whatever the priority of its processes.
    """
    num_cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file, or "max" in place of a number
        quota_us, period_us = map(int, cpu_max.read_text().split())
        num_cpus = min(num_cpus, max(1, quota_us // period_us))
    return num_cpus
