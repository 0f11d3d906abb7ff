"""The command that sends random requests over connections: it counts, and names what failed."""

from __future__ import annotations

import json

import pytest

from forge.server.connection import HTTPConnection
from tests.tools import framing_seeds


def test_each_request_of_a_connection_gets_its_one_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert framing_seeds.main(["--requests", "250"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["requests"] >= 250 and line["failed"] == []
    kinds = " ".join(line["kinds"])
    for kind in ("echo chunks", "refuse length", "refuse chunks", "head: ", "chunk: ", "long head"):
        assert kind in kinds


def test_a_world_that_fails_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes after the last request of a connection are parsed before its response."""
    monkeypatch.setattr(HTTPConnection, "_is_parsing", lambda self: True)
    assert framing_seeds.main(["--requests", "200"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["worlds"] > len(line["failed"]) > 0
    assert "400" in line["failed"][0]["reason"]
