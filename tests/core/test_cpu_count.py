"""CPUs that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge.cpu_count import num_usable_cpus


@pytest.mark.parametrize(
    ("content", "num_cpus"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), (None, None)],
)
def test_the_limit_of_a_container_counts(content: str | None, num_cpus: int | None, tmp_path: Path):
    """With a limit of one CPU on 64, 16 compilers would use up the server's time."""
    cpu_max = tmp_path / "cpu.max"
    if content is not None:
        cpu_max.write_text(f"{content}\n")
    assert num_usable_cpus(cpu_max) == (num_cpus or len(os.sched_getaffinity(0)))
