"""ServerProcess: `forge serve` as a process, with its memory, its processor time and its counters.

Owns the command line and what is read from /proc. Linux only.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import httpx

from tests.forge_process import start_server
from tests.server.http_wire import KEY, Address
from tests.server.local_server import create_client, unexpected_log
from tests.soak.catalogue import SIZES

GOOD_KEY = "poppy"
"""Key of the good clients. The hostile ones have http_wire.KEY, so they are another tenant."""
EXIT_TIMEOUT_S = 60.0
STORE_MIB = 4
"""Store of responses, half of it for the good clients. It is full after about 3,500 requests, so
within ten minutes on a slow machine too. A response stays until its next turn."""
WRITE_WARNING = "WARNING asyncio: socket.send() raised exception.\n"
"""Line of asyncio for the fifth event of one turn to a client that left in that turn."""


class MemorySample(NamedTuple):
    """Memory of the server's processes, added up, at a time of the run.

    rss    resident: pages that processes share count for each
    anon   of it what no file has: heaps, stacks and shared memory

    The system drops pages of files when other programs need memory, and reads them again. So
    `rss` falls and grows without the server; `anon` does not.
    """

    at_s: float
    rss: float
    anon: float


class ServerProcess:
    """A running server."""

    def __init__(
        self, process: subprocess.Popen[str], url: str, client: httpx.Client, log: IO[str]
    ) -> None:
        self.process = process
        self._log = log
        self.address: Address = (str(httpx.URL(url).host), int(httpx.URL(url).port or 80))
        self._client = client

    def pids(self) -> list[int]:
        """Return the ids of the server's process and of all that it started."""
        return process_tree(self.process.pid)

    def sample_memory(self, at_s: float) -> MemorySample:
        """Return the memory of all processes in MiB."""
        found = [memory_mib(pid) for pid in self.pids()]
        return MemorySample(at_s, *(sum(each) for each in zip(*found, strict=True)))

    def cpu_s(self) -> float:
        """Return the processor seconds of the processes that run."""
        return sum(map(process_cpu_s, self.pids()))

    def counters(self) -> dict[str, float]:
        """Return the values of /metrics, by name and labels."""
        return parse_metrics(self._client.get("/metrics").text)

    def num_open_requests(self) -> int:
        """Return the requests that the server has open."""
        return int(self._client.get("/load").json()["server_load"])

    def read_log(self) -> str:
        """Return what the server has written to its log."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> tuple[int, str, int]:
        """End the server as an operator does.

        Return its exit status, what is odd in its log, and how often WRITE_WARNING was there.
        """
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(EXIT_TIMEOUT_S)
        log = unexpected_log(self.read_log())
        return status, log.replace(WRITE_WARNING, ""), log.count(WRITE_WARNING)


def process_tree(pid: int) -> list[int]:
    """Return the process and those that it has started, which still run."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in process_tree(int(child)))]


def memory_mib(pid: int) -> tuple[float, float]:
    """Return MemorySample's `rss` and `anon` of a process in MiB; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    kib = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return kib["Rss:"] / 1024, (kib["Anonymous:"] + kib.get("Pss_Shmem:", 0)) / 1024


def process_cpu_s(pid: int) -> float:
    """Return the processor seconds of a process; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of an exposition of Prometheus, by name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@contextmanager
def serve_in_process(step_ms: float) -> Iterator[ServerProcess]:
    """Run `forge serve hash` until the end of the block."""
    words = [
        *(f"hash:step_ms={step_ms:g}", "--served-model-name=hash"),
        *(f"--api-key={KEY}", f"--api-key={GOOD_KEY}", "--admin-key=admin"),
        *("--read-timeout=15", f"--response-store-mib={STORE_MIB}", "--drain-timeout=30"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()),
    ]
    # The log is a file: a pipe that is full would stop the server.
    with TemporaryFile("w+") as log, start_server(*words, stderr=log) as (process, url):
        with create_client(url) as client:
            client.headers["authorization"] = f"Bearer {GOOD_KEY}"
            yield ServerProcess(process, url, client, log)


# Checks of what was read.


def memory_growth(
    samples: Sequence[MemorySample], from_s: float, span_s: float
) -> dict[str, float] | None:
    """Return the memory at the end relative to that at `from_s`; None for a shorter run.

    Each is the median of the samples within `span_s` of its time.
    """
    end_s = samples[-1].at_s if samples else 0.0
    first = [each for each in samples if abs(each.at_s - from_s) <= span_s / 2]
    last = [each for each in samples if each.at_s >= end_s - span_s]
    if not first or not last or end_s < from_s + 2 * span_s:
        return None
    return {name: round(_median(last, name) / _median(first, name), 4) for name in ("rss", "anon")}


def memory_by_minute(samples: Sequence[MemorySample]) -> dict[str, list[float]]:
    """Return the median memory of each minute in MiB."""
    minutes: dict[int, list[MemorySample]] = {}
    for sample in samples:
        minutes.setdefault(int(sample.at_s // 60), []).append(sample)
    return {
        name: [round(_median(each, name), 1) for each in minutes.values()]
        for name in ("rss", "anon")
    }


def _median(samples: Sequence[MemorySample], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in samples))


def find_counter_faults(
    before: Mapping[str, float], after: Mapping[str, float], expected: Mapping[str, float]
) -> list[str]:
    """Return the counters that did not grow by what was expected of them between two scrapes."""
    return [
        f"{name} grew by {after[name] - before[name]:g}, and the clients have {value:g}"
        for name, value in expected.items()
        if after[name] - before[name] != value
    ]


def find_idle_faults(counters: Mapping[str, float]) -> list[str]:
    """Return what an idle server may not have."""
    names = (
        *("forge_requests_running", "forge_requests_waiting", "forge_kv_blocks_used"),
        'forge_requests_total{finish="error"}',
    )
    return [f"{name} is {counters[name]:g} at the end" for name in names if counters[name]]
