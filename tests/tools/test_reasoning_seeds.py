"""The command that runs seeds of outputs with reasoning: it counts, and names what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.reasoning_matcher import ReasoningMatcher
from tests.tools import reasoning_seeds


def test_a_run_counts_schemas_and_how_their_outputs_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert reasoning_seeds.main(["--seeds", "1", "--first", "0", "--json", str(path)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["worlds"], line["schemas"], line["failed"]) == (1, 4, [])
    assert sum(line["endings"].values()) == 4
    assert json.loads(path.read_text())["figures"] == line


def test_a_world_that_fails_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is checked against a mask of its own."""
    monkeypatch.setattr(
        ReasoningMatcher, "draft_masks", lambda self, drafts: [self.mask for _ in drafts]
    )
    assert reasoning_seeds.main(["--seeds", "2", "--first", "1"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["worlds"] == 2 and [each["seed"] for each in line["failed"]] == [2]
    assert "does not fit" in line["failed"][0]["reason"]
