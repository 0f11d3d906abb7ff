"""Headless Chromium: the self-test of a page as a value, and screenshots.

Owns the command line. Tests without Chromium are skipped, unless FORGE_REQUIRE_CHROMIUM is set.
"""

from __future__ import annotations

import fcntl
import html
import json
import os
import re
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run")


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
    found = subprocess.run(
        [chromium, *FLAGS, f"--user-data-dir={profile}", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return found.stdout


class OpenPage:
    """A page in Chromium, over the pipe of its DevTools protocol: messages of JSON end with 0."""

    def __init__(self, chromium: str, profile: Path, address: str) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def set_descriptors() -> None:
            """Let Chromium read descriptor 3 and write descriptor 4, as its protocol has it."""
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
            for descriptor, copy in zip((3, 4), copies, strict=True):
                os.dup2(copy, descriptor)

        self._process = subprocess.Popen(
            [chromium, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=set_descriptors,
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._rest = b""
        self._num_calls = 0
        target = self._call("Target.createTarget", url=address)["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise."""
        call = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", self._session, **call)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """End Chromium."""
        os.close(self._commands)
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        os.close(self._answers)

    def _call(self, method: str, session: dict[str, str] | None = None, **params: Any) -> Any:
        self._num_calls += 1
        command = {"id": self._num_calls, "method": method, "params": params, **(session or {})}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = json.loads(self._read_message())
            if message.get("id") == self._num_calls:
                assert "error" not in message, message
                return message["result"]

    def _read_message(self) -> bytes:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], TIMEOUT_S)
            assert ready, "Chromium does not answer"
            data = os.read(self._answers, 2**16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return message


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
