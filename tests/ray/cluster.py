"""A Ray cluster in this process's machine, with a fleet on it, for tests and measurements."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_S = 300.0
"""Seconds to wait for processes of Ray, each of which imports for seconds on a busy machine."""
ENGINE_TITLE = b"ray::ServeReplica:default:engine"


class Fleet(NamedTuple):
    """A fleet that serves."""

    url: str

    def redeploy(self, **options: Any) -> None:
        """Replace the replicas one after the other, and return when all are new."""
        from ray import serve

        from forge.ray import app

        serve.run(app(options))


@contextmanager
def open_cluster() -> Iterator[None]:
    """Run Ray and its proxy, on loopback addresses and a free port, until the end of the block."""
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="fleet", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": 8123})
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(**options: Any) -> Fleet:
    """Serve a fleet with these options."""
    fleet = Fleet("http://127.0.0.1:8123")
    fleet.redeploy(**options)
    return fleet


def engine_pids() -> list[int]:
    """Return the processes of replicas that descend from this process."""
    return [pid for pid, title in _processes().items() if title.startswith(ENGINE_TITLE)]


def child_pids(pid: int) -> list[int]:
    """Return the processes that a process has started: a replica's engine."""
    return [each for each in _processes() if _parent(each) == pid]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def wait_for(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not after {timeout_s} s"
        threading.Event().wait(0.05)


def _processes() -> dict[int, bytes]:
    """Return command line by process id, of this process's descendants."""
    found: dict[int, bytes] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _is_descendant(int(path.name)):
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _is_descendant(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False
