"""CHANGELOG.md has the form of Keep a Changelog, and its newest version is the package's."""

from __future__ import annotations

import re

from forge.version import VERSION
from tests.docs.pages import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_first_section_is_unreleased_and_the_second_is_the_version() -> None:
    sections = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d", sections[1])


def test_every_part_of_a_section_has_a_known_kind() -> None:
    assert set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE)) <= KINDS
