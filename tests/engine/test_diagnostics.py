"""Diagnostics fail in every way that a disk or a peer has: the engine's outputs stay the same.

A recording is written through the buffers of a real file, onto a disk that takes so many bytes.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import pytest

from forge import LLM, AsyncLLM
from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_options import RecordingFile
from forge.failure_log import FailureLog
from forge.models.hash import HashModel
from forge.recording import RecordingWriter, build_header
from forge.request import Delta, Request, SamplingParams
from forge.sim.replay import replay

LOG = logging.getLogger("tests.diagnostics")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EFBIG)
CONFIG = EngineConfig(num_blocks=16, block_size=2, max_num_seqs=2)


class FullDisk(io.RawIOBase):
    """A file that takes so many bytes, and then raises so often; it may raise when it is closed."""

    def __init__(
        self, max_bytes: int, error: int, num_errors: int = 2**20, close_error: int | None = None
    ) -> None:
        super().__init__()
        self.content = b""
        self._max_bytes = max_bytes
        self._error = error
        self._num_errors = num_errors
        self._close_error = close_error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if self._num_errors:
            piece = piece[: self._max_bytes - len(self.content)]
        if not piece:
            self._num_errors -= 1
            raise OSError(self._error, os.strerror(self._error))
        self.content += piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._close_error is not None:
                raise OSError(self._close_error, os.strerror(self._close_error))


def run_engine(write: Callable[[str], object] | None) -> list[Delta]:
    """Serve two requests with a recording, if there is a place for it; return the deltas."""
    model = HashModel(vocab_size=50, num_blocks=16, block_size=2)
    engine = Engine(model, CONFIG)
    recording = None
    if write is not None:
        header = build_header(engine.config, 50, model.eos_token(), "fcfs", "0")
        recording = engine.recorder = RecordingWriter(write, count().__next__, header)
    deltas: list[Delta] = []
    for number in range(2):
        engine.submit(Request(number, (1, 2, number), SamplingParams(max_tokens=4)))
        while engine.can_step:
            deltas += engine.step()
    if recording is not None:
        recording.close()
    return deltas


def record_on(disk: FullDisk, buffer_bytes: int) -> tuple[list[Delta], FailureLog]:
    failures = FailureLog(LOG, "the recording has ended", "Free some space")
    text = io.TextIOWrapper(io.BufferedWriter(disk, buffer_bytes), encoding="utf-8", newline="\n")
    text._CHUNK_SIZE = 64  # type: ignore[attr-defined]  # bytes that it keeps before the buffer
    file = RecordingFile(text, failures)
    deltas = run_engine(file.write)
    file.close()
    file.close()
    return deltas, failures


def whole_recording() -> str:
    lines: list[str] = []
    run_engine(lines.append)
    return "".join(lines)


def test_a_disk_that_is_full_at_any_byte_ends_the_recording_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was written replays up to there, and the replay says that the end is missing.

    Every other disk has room again after one error.
    """
    expected, whole = run_engine(None), whole_recording()
    first_line = whole.index("\n") + 1
    for number, size in enumerate(range(0, len(whole), 7)):
        caplog.clear()
        disk = FullDisk(size, ERRORS[number % len(ERRORS)], (1, 2**20)[number % 2])
        deltas, failures = record_on(disk, buffer_bytes=(1, 64, 2**20)[number % 3])
        assert (deltas, failures.num_failures, len(caplog.records)) == (expected, 1, 1)
        content = disk.content.decode()
        assert whole.startswith(content)
        if size > first_line:
            found = replay(content.splitlines(keepends=True))
            assert (found.difference, found.is_complete) == (None, content == whole)
            assert found.lines == content.count("\n")


def test_a_recording_whose_file_cannot_be_closed_is_counted_and_complete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FullDisk(2**20, errno.ENOSPC, close_error=errno.EIO)
    deltas, failures = record_on(disk, 2**20)
    assert (deltas, failures.num_failures) == (run_engine(None), 1)
    assert len(caplog.records) == 1 and "Input/output error" in caplog.text
    assert replay(disk.content.decode().splitlines(keepends=True)).is_complete


def test_failures_in_a_row_are_logged_once_and_all_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureLog(LOG, "files cannot be written", "Free some space")
    for _ in range(3):
        failures.fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    failures.succeed()
    failures.fail("the peer has left")
    assert failures.num_failures == 4
    assert [record.getMessage() for record in caplog.records] == [
        "files cannot be written: [Errno 28] No space left on device. Free some space",
        "files cannot be written: the peer has left. Free some space",
    ]


# Through the options, on real files.

PROMPTS = [[200 + (i + j) % 50 for j in range(8_000)] for i in range(40)]
"""Prompts whose recording is larger than the buffer of the file."""
OPTIONS: dict[str, Any] = {"num_blocks": 1200, "max_num_batched_tokens": 8_000}
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process, nor of those that it starts, grow beyond so many bytes."""
    limits = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, limits)


def generate(**options: Any) -> list[list[int]]:
    with LLM("hash", **OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.choices[0].token_ids for output in outputs]


def test_an_llm_goes_on_when_the_disk_of_its_recording_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate()
    assert generate(record="/dev/full") == expected
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    caplog.clear()
    path = tmp_path / "cut.jsonl"
    with file_size_limit(2**20 + 5):
        assert generate(record=str(path)) == expected
    assert len(caplog.records) == 1 and "File too large" in caplog.text
    found = replay(path.read_text().splitlines(keepends=True))
    assert (found.difference, found.is_complete) == (None, False)


@pytest.mark.parametrize("form", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_an_engine_counts_the_recording_that_ended_and_goes_on(form: Callable[..., Any]) -> None:
    async def test() -> None:
        async with form("hash", record="/dev/full", **OPTIONS) as llm:
            assert llm.status.num_failed_recordings == 0
            for prompt in PROMPTS:
                output = await llm.generate(prompt, PARAMS)
                assert len(output.choices[0].token_ids) == 2
            assert llm.status.num_failed_recordings == 1

    asyncio.run(test())


def test_a_recording_whose_folder_is_removed_is_written_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with LLM("hash", record=str(folder / "run.jsonl")) as llm:
        shutil.rmtree(folder)
        assert llm.generate("a", PARAMS, use_tqdm=False)[0].choices[0].token_ids
