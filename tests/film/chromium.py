"""Headless Chromium: the self-test of a page as a value, and screenshots.

Owns the command line. Tests without Chromium are skipped, unless FORGE_REQUIRE_CHROMIUM is set.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome, or None."""
    names = (os.environ.get("FORGE_CHROMIUM", ""), "chromium", "google-chrome", "chromium-browser")
    return next((path for path in map(shutil.which, filter(None, names)) if path), None)


def require_chromium() -> str:
    """Return the path; skip the test where there is none, or fail where it is required."""
    path = find_chromium()
    if path is None:
        reason = "there is no Chromium: apt-get install chromium, or set FORGE_CHROMIUM"
        if os.environ.get("FORGE_REQUIRE_CHROMIUM"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def run_chromium(chromium: str, profile: Path, *arguments: str) -> str:
    """Run Chromium without a window, and return what it printed."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run")
    found = subprocess.run(
        [chromium, *flags, f"--user-data-dir={profile}", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return found.stdout


def run_selftest(chromium: str, page: Path, profile: Path) -> dict[str, Any]:
    """Open the page at #selftest, and return what it found."""
    text = run_chromium(chromium, profile, "--dump-dom", f"{page.as_uri()}#selftest")
    found = re.search(r'<pre id="selftest">(.*?)</pre>', text, re.DOTALL)
    assert found is not None, "the page did not write its self-test"
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


def take_screenshot(
    chromium: str, address: str, picture: Path, profile: Path, size: tuple[int, int], *flags: str
) -> None:
    """Write a picture of the page at an address to a PNG file."""
    width, height = size
    run_chromium(
        chromium,
        profile,
        f"--screenshot={picture}",
        f"--window-size={width},{height}",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        *flags,
        address,
    )
