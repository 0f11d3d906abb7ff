"""Measurement of a step's message between processes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from forge.bench import step_messages
from tests.hf.forked_processes import fork_engines_and_ranks


@pytest.mark.torch
@pytest.mark.long
def test_every_part_of_a_message_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_engines_and_ranks(monkeypatch)
    words = ["--rows", "3", "--ranks", "3", "--steps", "4", "--period-ms", "0"]
    assert step_messages.run_cli(words) == 0
    figures = json.loads(capsys.readouterr().out.removeprefix("RESULT "))
    parts = ("encode_us", "send_us", "latency_us", "decode_us")
    assert all(0 < figures[f"{part}_p50"] <= figures[f"{part}_p99"] for part in parts)
    assert figures["latency_us_p50"] > figures["encode_us_p50"]
