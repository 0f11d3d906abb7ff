"""Start forge for the tests of another server, on a model folder that stands for theirs.

Imports nothing of forge: the tests run in the environment of the other server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(os.environ["FORGE_PEERS_ROOT"])
FOLDERS = Path(os.environ["FORGE_PEERS_MODELS"])
STOP_LIMIT_S = 30.0


class UnsupportedFlag(Exception):
    """A flag of the other server that forge has no counterpart of."""


def folder_of(name: str, *, thinking: bool) -> Path:
    """Return the model folder that stands for a model's name or path."""
    # SGLang's default model is a Llama. Mistral's end token has an id that its tests list, 2.
    if name.startswith("mistralai/") or name == "peers/default_model_name_for_test":
        return FOLDERS / "mistral-tools"
    if "zephyr" in name.lower():
        return FOLDERS / "mistral"
    return FOLDERS / ("qwen-thinking" if thinking else "qwen")


def folder_with_template(folder: Path, template: str) -> Path:
    """Return a folder with the same model and another chat template, a file or its text."""
    other = Path(tempfile.mkdtemp())
    for part in folder.iterdir():
        (other / part.name).symlink_to(part)
    (other / "chat_template.jinja").unlink()
    is_file = len(template) < 256 and Path(template).is_file()
    text = Path(template).read_text("utf-8") if is_file else template
    (other / "chat_template.jinja").write_text(text, "utf-8")
    return other


class ForgeServer:
    """A running `forge serve`.

    port   0: a free one
    """

    def __init__(self, folder: Path, flags: Sequence[str], port: int = 0) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("FORGE_")
        }
        run = [sys.executable, "-m", "forge", "serve", str(folder), *flags]
        run += ["--port", str(port), "--device", "cpu", "--dtype", "float32"]
        self.process = subprocess.Popen(
            run,
            env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("address"):
                self.url = line.split()[1]
                return
        raise RuntimeError(f"forge does not start: {' '.join(run)}")

    def stop(self) -> None:
        """Stop the server and its engine."""
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
