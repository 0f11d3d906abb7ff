"""Runs the tests in random order on a machine that is busy and that stalls: they pass or are wrong.

    python tests/tools/stress.py                           one run of the quick tests
    python tests/tools/stress.py --runs 20 -m "not soak"   what follows our own flags goes to pytest
    python tests/tools/stress.py --seed 7 -k server        the order of a run is its seed's
    python tests/tools/stress.py --busy 0                  alongside other runs, which keep it busy

While a run lasts, up to `--busy` other processes use the processors, and from time to time all its
processes, or some of them, are stopped for 0.3 to 3 s. The exit status is 1 when a run failed.
Files and the tests in each are shuffled: fixtures of a file are made once, as always.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "stress"
STALL_S = (0.3, 3.0)
RUN_S = (0.5, 6.0)
TEST_LIMIT_S = 900
"""The 120 s of other runs may be reached by a test that is stopped half of the time."""
RUN_LIMIT_S = 2 * 3600


# The plugin: pytest -p tests.tools.stress --shuffle SEED


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flag of the order."""
    parser.addoption("--shuffle", type=int, help="run files, and the tests of each, in this order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles the files and the tests of each. Every worker comes to the same order."""
    rng = random.Random(config.getoption("shuffle"))
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    for found in files.values():
        rng.shuffle(found)
    order = list(files.values())
    rng.shuffle(order)
    items[:] = [item for found in order for item in found]


# The machine.


BUSY = f"""
import os
while os.getppid() == {os.getpid()}:
    pass
"""
"""A program that keeps a processor busy until the process that started it has ended."""


@contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """So many processes compute while the block lasts."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def list_processes(root: int) -> list[int]:
    """Return the process and all its descendants, without those that are stopped already."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True)
    children, stopped = defaultdict(list), set()
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split()
        children[int(parent)].append(int(pid))
        if state[0] in "TZ":
            stopped.add(int(pid))
    found = [root]
    for pid in found:
        found += children[pid]
    return [pid for pid in found if pid not in stopped]


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stall_processes(root: int, rng: random.Random, done: threading.Event) -> None:
    """Stops all processes below `root`, or a few of them, time and again."""
    while not done.wait(rng.uniform(*RUN_S)):
        pids = list_processes(root)
        if rng.random() < 0.7:
            pids = rng.sample(pids, rng.randint(1, len(pids)))
        send(pids, signal.SIGSTOP)
        try:
            done.wait(rng.uniform(*STALL_S))
        finally:
            send(pids, signal.SIGCONT)


def run(seed: int, most_busy: int, words: list[str]) -> tuple[int, str]:
    """The exit status of one run, and what it printed."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "pytest", "-p", "tests.tools.stress", f"--shuffle={seed}"]
    command += ["-n", "auto", "--dist", "worksteal", f"--timeout={TEST_LIMIT_S}", *words]
    log, over = LOGS / f"{seed}.log", threading.Event()
    with (
        keep_busy(rng.randint(min(1, most_busy), most_busy)),
        log.open("w") as out,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        stalls = threading.Thread(target=stall_processes, args=(process.pid, rng, over))
        stalls.start()
        try:
            status = process.wait(RUN_LIMIT_S)
        finally:
            over.set()
            stalls.join()
            process.kill()
    return status, log.read_text()


def failed_lines(lines: list[str]) -> list[str]:
    """The lines of pytest's summary that name a test; a server's log has lines of errors too."""
    return [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]


def main(words: list[str]) -> int:
    """The command line: 1 when a run failed."""
    parser = argparse.ArgumentParser("stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="how many runs")
    parser.add_argument("--seed", type=int, help="of the first; the others follow it")
    most_busy = 2 * (os.cpu_count() or 1)
    parser.add_argument("--busy", type=int, default=most_busy, help=f"({most_busy})")
    args, words = parser.parse_known_args(words)
    first = random.randrange(10**6) if args.seed is None else args.seed
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for seed in range(first, first + args.runs):
        start_s = time.monotonic()
        status, printed = run(seed, args.busy, words)
        lines = printed.splitlines()
        print(f"seed {seed}: {lines[-1] if lines else status}", flush=True)
        for line in failed_lines(lines):
            print(f"  {line}", flush=True)
        if status:
            failed += 1
            took_s = time.monotonic() - start_s
            print(f"  exit status {status} after {took_s:.0f} s: {LOGS}/{seed}.log")
    print(f"{args.runs - failed} of {args.runs} runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
