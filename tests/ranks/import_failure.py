"""A rank whose module cannot be imported by the process of that rank."""

from __future__ import annotations

import multiprocessing

from tests.ranks.stand_in import follow

if multiprocessing.current_process().name == "forge-rank-2":
    raise ImportError("libcuda.so.1 is not there")


def follow_after_import(*args: object) -> None:
    """Run a rank in the process that could import this module."""
    follow(*args)  # type: ignore[arg-type]
