"""The log: output that is not read blocks no thread. Pipes and devices are real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from forge.log import MAX_QUEUED_TEXTS, MAX_TEXT_CHARS, NonBlockingWriter
from tests.server.local_server import TIMEOUT_S, create_client, wait_until
from tests.server.test_limits import EXITING_POLICY, ROOT, check_error


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe that has no room for a byte. Writing to it blocks."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 2**16)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x")
        os.set_blocking(writer, True)
        yield reader, writer
    finally:
        os.close(writer)
        with suppress(OSError):  # a test has closed it
            os.close(reader)


def read_until(reader: int, end: str) -> str:
    """Return the text up to and including `end`, without the text that filled the pipe."""
    data = b""
    while not data.endswith(end.encode()):
        data += os.read(reader, 2**16)
    return data.decode().lstrip("x")


def test_a_text_comes_as_it_was_written() -> None:
    reader, writer = os.pipe()
    stream = NonBlockingWriter(writer)
    assert stream.write("a\n") == 2 and stream.drain(TIMEOUT_S)
    stream.write("\ud800é\n")
    assert read_until(reader, "é\n") == "a\n\\ud800é\n"
    assert (stream.fileno(), stream.isatty(), stream.writable()) == (writer, False, True)
    os.close(reader)


def test_a_full_pipe_blocks_no_writer_and_lost_lines_are_counted() -> None:
    with full_pipe() as (reader, writer):
        stream = NonBlockingWriter(writer)
        for number in range(MAX_QUEUED_TEXTS + 1000):
            stream.write(f"{number}\n")
        assert not stream.drain(0.0)
        lines = read_until(reader, "Read it faster\n").splitlines()
    assert lines[: MAX_QUEUED_TEXTS - 1] == [str(number) for number in range(MAX_QUEUED_TEXTS - 1)]
    lost = MAX_QUEUED_TEXTS + 1000 - (len(lines) - 1)
    warning = "lines were lost: their reader was too slow. Read it faster"
    assert lines[-1] == f"WARNING forge.log: {lost} {warning}"
    assert lost in (999, 1000), "all that waited were written, and one that was being written"


def test_a_pipe_whose_reader_has_left_loses_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    stream = NonBlockingWriter(writer)
    os.close(reader)
    stream.write("lost\n")
    assert stream.drain(TIMEOUT_S)


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    """Another process that shares a terminal or a pipe may have made it non-blocking."""
    with full_pipe() as (reader, writer):
        os.set_blocking(writer, False)
        stream = NonBlockingWriter(writer)
        stream.write("late\n")
        assert not stream.drain(0.0)
        assert read_until(reader, "late\n") == "late\n"


def test_of_a_text_without_end_the_middle_is_lost() -> None:
    reader, writer = os.pipe()
    NonBlockingWriter(writer).write("a" * 10**7 + "\n")
    text = read_until(reader, "\n")
    assert MAX_TEXT_CHARS < len(text) < MAX_TEXT_CHARS + 16 and "a [...] a" in text
    os.close(reader)


# A server whose output goes nowhere.


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def run_with_outputs(
    stdout: int | None, stderr: int | None, *words: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """Run `forge serve` with these outputs, None for a closed one; yield a client of it."""
    closed = [number for number, given in ((1, stdout), (2, stderr)) if given is None]
    port = free_port()
    command = [sys.executable, "-m", "forge", "serve", "hash", f"--port={port}", *words]
    shell = ["sh", "-c", 'exec "$0" "$@"' + "".join(f" {number}>&-" for number in closed)]
    with (
        subprocess.Popen(
            [*shell, *command],
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
            env={
                name: value for name, value in os.environ.items() if not name.startswith("FORGE_")
            },
        ) as process,
        create_client(f"http://127.0.0.1:{port}") as client,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_ready(client))
            assert process.poll() is None, "it has ended"
            yield process, client
        finally:
            process.kill()


def is_ready(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/readyz").status_code == 200
    return False


OUTPUT_KINDS = [
    ("broken", "closed"),
    *(pytest.param(way, way, marks=pytest.mark.soak) for way in ("full", "device", "broken")),
]


@pytest.mark.long
@pytest.mark.parametrize(("stdout", "stderr"), OUTPUT_KINDS)
def test_a_server_starts_serves_and_ends_where_nothing_can_be_written(
    stdout: str, stderr: str
) -> None:
    with (
        full_pipe() as (_, full),
        full_pipe() as (reader, broken),
        open("/dev/full", "wb") as device,
    ):
        os.close(reader)
        ways = {"full": full, "broken": broken, "device": device.fileno(), "closed": None}
        words = ("--record", "/dev/full")
        with run_with_outputs(ways[stdout], ways[stderr], *words) as (process, client):
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            assert client.post("/generate", json=body).json()["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0


@pytest.mark.long
def test_a_server_whose_log_is_full_reports_that_its_engine_has_died(tmp_path: Path) -> None:
    """The engine's process has the same log, and writes more to it."""
    file = tmp_path / "deadly.py"
    file.write_text(EXITING_POLICY.format("raise RuntimeError('detail')"))
    with full_pipe() as (_, log), open("/dev/full", "wb") as device:
        with run_with_outputs(device.fileno(), log, "--policy", str(file)) as (process, client):
            assert client.post("/generate", json={"prompt": "a"}).status_code == 200
            check_error(client.post("/generate", json={"prompt": "x" * 13}), 503, "engine_dead")
            assert process.wait(TIMEOUT_S) == 1
