"""The command that runs seeds of worlds with KV tiers: it counts, and a failure is in its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core import file_worlds
from tests.tools import tier_seeds


def test_a_run_counts_worlds_and_what_they_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert tier_seeds.main(["--seeds", "6", "--first", "0", "--json", str(path)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["worlds"], line["audited worlds"], line["failed"]) == (6, 2, [])
    assert line["reached"]["files written"] and line["choices compared"]
    record = json.loads(path.read_text())
    assert record["figures"] == line
    assert record["command"].startswith("python -m tests.tools.tier_seeds --seeds 6")


@pytest.mark.long
def test_a_world_that_fails_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are damaged are read all the same, in the worlds where some are."""
    monkeypatch.setattr("forge.models.file_format.crc32", lambda data: 0)
    monkeypatch.setattr(file_worlds, "DAMAGES", ("changed",))
    assert tier_seeds.main(["--seeds", "14", "--first", "0"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["worlds"] == 14 and 0 < len(line["failed"]) < 14
    assert "AssertionError: damaged files are read" in line["failed"][0]["reason"]
