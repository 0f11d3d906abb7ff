"""Traffic over HTTP: a server that a run starts and stops, and an open loop on it.

Owns the command of each engine's server and the figures of a served cell. The client is the same
for every engine: bench/http_client.py.

    command ─► process ─► GET /health ... 200 ─► warm-up ─► round ─► round ─► round ─► SIGTERM
               log        start_s                10 s       TTFT, ITL, tok/s: median, min, max
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from forge.bench.http_client import Endpoint
from forge.bench.load_generator import (
    Figures,
    LatencySLO,
    LoadRun,
    open_loop_figures,
    run_open_loop,
)
from forge.bench.peer import ENVIRONMENT
from forge.bench.shapes import has_no_weights
from forge.bench.traffic_cells import Cell, OpenLoop
from forge.bench.traffic_requests import Arrival, RequestDraw
from forge.errors import InvalidConfig, RequestFailed

HOST = "127.0.0.1"

START_TIMEOUT_S = 420.0
"""Longest start of a server: a first start compiles kernels."""

STOP_TIMEOUT_S = 30.0

POLL_S = 0.25

WARM_UP_S = 10.0
"""Seconds of the warm-up round whose requests are sent."""

PROGRAMS: Mapping[str, Sequence[str]] = {
    "forge": ("-m", "forge", "serve"),
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
}
"""Arguments of Python that start a server; the model follows."""


class Server(NamedTuple):
    """The address of a running server, and the seconds of its start."""

    url: str
    start_s: float


def server_command(
    engine: str, model: str, port: int, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the command that serves the model on `port`. Options become flags."""
    all_options = {"host": HOST, "port": port, **options}
    if has_no_weights(model):
        all_options["load_format"] = "dummy"
    flags: list[str] = []
    for name, value in all_options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return (sys.executable, *PROGRAMS[engine], model, *flags)


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextmanager
def open_server(engine: str, model: str, options: Mapping[str, Any], log: Path) -> Iterator[Server]:
    """Start a server and yield it when it is ready; stop it at the end.

    log   file of everything that the server prints
    Raises InvalidConfig where the server ends at its start or takes too long.
    """
    port = find_free_port()
    command = server_command(engine, model, port, options)
    with log.open("w") as output:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,
        )
        try:
            while not answers_health(port):
                seconds = time.perf_counter() - start_s
                check_starting(process, seconds, log)
                time.sleep(POLL_S)
            yield Server(f"http://{HOST}:{port}", round(time.perf_counter() - start_s, 1))
        finally:
            stop(process)


def check_starting(process: subprocess.Popen[bytes], seconds: float, log: Path) -> None:
    """Raise InvalidConfig where the process has ended or started too long ago."""
    status = process.poll()
    if status is not None:
        lines = log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        raise InvalidConfig(
            "server", f"it ended with status {status} at its start: {last[:200]}", f"Read {log}"
        )
    if seconds > START_TIMEOUT_S:
        raise InvalidConfig("server", f"it is not ready after {seconds:.0f} s", f"Read {log}")


def answers_health(port: int) -> bool:
    """Return True where the server answers GET /health with 200."""
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and its whole process group where it does not end by itself."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def run_round(server: Endpoint, arrivals: Sequence[Arrival]) -> LoadRun:
    """Send each request when it is due. Raises RequestFailed for an output of another length."""
    requests = [each.request for each in arrivals]
    messages = [server.build_request(each.prompt, each.output, each.params) for each in requests]
    times = [each.due_s for each in arrivals]
    run = await run_open_loop(server, zip(times, messages, strict=True))
    return check_lengths(run, [each.output for each in requests])


def check_lengths(run: LoadRun, outputs: Sequence[int]) -> LoadRun:
    """Return the run. Raises RequestFailed unless each output has its requested length.

    outputs   of all requests that were sent, those that the server rejected included
    """
    extra = Counter(each.num_tokens for each in run.completed) - Counter(outputs)
    if extra:
        lengths = ", ".join(map(str, sorted(extra)))
        raise RequestFailed(f"outputs of {lengths} tokens came, which were not requested")
    return run


def measure_served(
    url: str, cell: Cell, draw: RequestDraw, rounds: int, first: Sequence[Arrival]
) -> list[Figures]:
    """Return the figures of each round on a running server, after a warm-up.

    first   arrivals of the first round; later rounds have other token ids
    Raises RequestFailed.
    """
    assert isinstance(cell.load, OpenLoop), cell.load
    server = Endpoint(url, None, None)
    warm_up = [each for each in draw.arrivals(cell, 0) if each.due_s <= WARM_UP_S]
    asyncio.run(run_round(server, warm_up))
    figures = []
    for index in range(1, rounds + 1):
        arrivals = first if index == 1 else draw.arrivals(cell, index)
        run = asyncio.run(run_round(server, arrivals))
        figures.append(open_loop_figures(run, cell.load.rate, LatencySLO()))
    return figures
