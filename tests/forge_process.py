"""`forge serve` in a process of its own, started as a user starts it, with its address.

Owns the environment of the process, and what it prints until it is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def start_server(
    *words: str,
    stderr: int | IO[str] | None = None,
    launcher: Sequence[str] = (sys.executable,),
    **variables: str,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `forge serve` on a free port, in a session of its own; kill it after the block.

    Yields the process and its address, once it is ready.

    stderr      where its log goes: a pipe, a file to read and write, or None: that of this process
    launcher    command that takes `-m` and a module
    variables   environment besides that of this process, without options of forge
    """
    outer = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    with subprocess.Popen(
        [*launcher, "-m", "forge", "serve", *words, "--port=0"],
        cwd=ROOT,
        env={**outer, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                name, _, rest = line.partition(" ")
                url = rest.strip() if name == "address" else url
                if name == "try":  # the last line
                    break
            else:
                raise AssertionError(f"the server ends: {_read_log(process.stderr or stderr)}")
            yield process, url
        finally:
            process.kill()


def _read_log(log: int | IO[str] | None) -> str:
    """Return what a server that has ended wrote to a pipe or a file."""
    if log is None or isinstance(log, int):
        return "its log is above"
    if log.seekable():
        log.seek(0)
    return log.read()
