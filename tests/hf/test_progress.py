"""Output of a start: a bar on a terminal, elsewhere one log line at the end of a phase."""

from __future__ import annotations

import logging
import os
import pty
import select
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.utils import logging as hf_logging  # noqa: E402

from forge.config import DeviceOptions  # noqa: E402
from forge.models.hf.loading.decoder_loader import run_concurrently  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.models.hf.progress import show_progress  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    torch.set_num_threads(1)
    return save_checkpoint(tmp_path_factory.mktemp("saved"))


@contextmanager
def open_terminal() -> Iterator[Callable[..., str]]:
    """Make standard error a terminal; yield a function that waits for a text on it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))

    def shown(wanted: str, wait_s: float = 20.0) -> str:
        text = b""
        while wanted.encode() not in text and select.select([ours], [], [], wait_s)[0]:
            text += os.read(ours, 65536)
        return text.decode()

    try:
        with open(theirs, "w", encoding="utf-8") as stream, redirect_stderr(stream):
            yield shown
    finally:
        os.close(ours)


def phase_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records without the one of each start that names the end tokens."""
    return [each for each in caplog.records if "tokens that end an output" not in each.msg]


def test_a_start_on_a_terminal_shows_bars_and_logs_no_phase(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in ("without a record", "with a record"):
        with open_terminal() as shown, open_model(str(checkpoint), {}, DeviceOptions(device="cpu")):
            text = shown("Loading weights: 100%")
        assert "Loading weights: 100%" in text
        assert phase_records(caplog) == []


def test_a_start_elsewhere_is_one_line_for_each_phase_and_nothing_on_standard_error(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_model(str(checkpoint), {}, DeviceOptions(device="cpu")):
        (record,) = phase_records(caplog)
    assert (record.name, record.levelno) == ("forge.start", logging.INFO)
    assert record.getMessage().startswith("loading weights: 0.0 GiB in ")
    assert capfd.readouterr() == ("", "")


def test_random_weights_are_a_phase_too(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = DeviceOptions(device="cpu", load_format="dummy")
    with open_terminal() as shown, open_model(str(checkpoint), {}, options):
        assert "initializing weights: 100%" in shown("initializing weights: 100%")
    with open_model(str(checkpoint), {}, options):
        (record,) = phase_records(caplog)
    assert record.getMessage().startswith("initializing weights: ")


def test_kernels_are_counted_as_they_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []
    with open_terminal() as shown:
        run_concurrently([lambda: made.append(1)] * 3)
        assert "3/3" in shown("3/3")
    assert made == [1, 1, 1]
    run_concurrently([lambda: made.append(1)] * 3)
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling kernels: 3 in ")


def test_a_phase_that_fails_closes_its_bar_and_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_terminal() as shown:
        with pytest.raises(ValueError, match="no"), show_progress("work", 2) as advance:
            advance(1)
            raise ValueError("no")
        assert shown("\n").endswith("\n")
    with pytest.raises(ValueError, match="no"), show_progress("work", 2):
        raise ValueError("no")
    assert caplog.records == []


def test_lines_are_printed_where_progress_bars_are_off(caplog: pytest.LogCaptureFixture) -> None:
    hf_logging.disable_progress_bar()
    try:
        with open_terminal() as shown:
            with show_progress("work", 1) as advance:
                advance(1)
            assert shown("never", 0.5) == ""
    finally:
        hf_logging.enable_progress_bar()
    assert len(caplog.records) == 1
