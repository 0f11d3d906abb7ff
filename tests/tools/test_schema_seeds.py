"""The command that runs seeds of JSON schemas: it counts, and names what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.schema_check import SchemaCheck
from forge.server.call_check import CallCheck
from forge.server.tool_formats import FORMATS
from tests.tools import schema_seeds

pytest.importorskip("jsonschema")


def test_a_run_counts_how_outputs_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    assert schema_seeds.main(["--seeds", "60", "--first", "40", "--json", str(path)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["schemas"], line["failed"]) == (60, [])
    assert line["endings"].keys() >= {
        "stop",
        "refused",
        "masks of drafts",
        "violation: repeated name",
    }
    assert json.loads(path.read_text())["figures"] == line


def test_tools_of_every_format_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema_seeds.main(["--worlds", "tool", "--seeds", "15", "--first", "30"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["schemas"], line["failed"]) == (15, [])
    assert {ending.partition(":")[0] for ending in line["endings"]} == set(FORMATS)
    assert {ending.partition(": ")[2] for ending in line["endings"]} >= {"calls", "violation"}


def test_a_call_that_nothing_checks_fails_its_world(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallCheck, "add", lambda self, events, **_: events)
    assert schema_seeds.main(["--worlds", "tool", "--seeds", "15", "--first", "30"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"]


def test_a_world_that_fails_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output is compared with its schema."""
    monkeypatch.setattr(SchemaCheck, "find_violation", lambda self, text: None)
    assert schema_seeds.main(["--seeds", "60", "--first", "0"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["schemas"] == 60 and 0 < len(line["failed"]) < 30
