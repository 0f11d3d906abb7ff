"""Run real clients against a real server: each in its own environment, as its users have it.

    python -m tests.clients.run [--write] [CLIENT ...]

Owns the environments in .venv-clients/ and two servers on this machine. Knows nothing of what a
client does: with_NAME.py does, and lists the packages it needs in its head, as a script of PEP 723.
The first of them is the client. After it run the commands that the client's page shows.

    with_openai.py ── pip, once ──► .venv-clients/openai ──┐
    with_llm.py    ── pip, once ──► .venv-clients/llm    ──┼─► one after the other ──► forge serve
    ...                                                    ┘       status 0, in time
                                                                          │
    docs/Clients.md  ◄── --write: client, version, package, task, result ─┘

Only pip uses a network. Between two clients the server must have no work left and no block in use.
At the end it must stop on its signal and have logged nothing but statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.clients.client_pages import shown_commands, write_rows
from tests.clients.client_scripts import ROOT, Client, clients
from tests.forge_process import start_server

INSTALL_LIMIT_S = 3600.0
CLIENT_LIMIT_S = 600.0
SERVER_LIMIT_S = 30.0

# Steps of 5 ms: tokens leave in many events, even on a busy machine, so that a client that does not
# stream is detected. The prompts of agents have tens of thousands of bytes, each of them a token.
WIDE = (
    *("hash:step_ms=5", "--served-model-name", "hash"),
    *("--max-model-len", "131072", "--num-blocks", "16384"),
)
# A stream of a few thousand tokens holds the only slot for as long as a client needs.
NARROW = (
    *("hash:step_ms=20", "--served-model-name", "hash"),
    *("--max-num-seqs", "1", "--max-queue", "1"),
)
KEY = "none"
"""Key of both servers: that of the pages, whose commands run as they are."""

# No proxy of the user's is used for this machine.
LOCAL_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ClientOutcome(NamedTuple):
    """A row of the table."""

    name: str
    version: str
    seconds: float
    failure: str | None
    output: str


def install(client: Client) -> None:
    """Install the client's requirements in its environment, which is made again if they change."""
    stamp = client.folder / "installed.txt"
    wanted = "\n".join([sys.version, *client.requirements])
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    print(f"installing {' '.join(client.requirements)} into {client.folder.name}", flush=True)
    run = [sys.executable, "-m", "venv", "--clear", str(client.folder)]
    subprocess.run(run, check=True, timeout=INSTALL_LIMIT_S)
    pip = [client.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *client.requirements], check=True, timeout=INSTALL_LIMIT_S)
    # Written last, so that an installation that failed is tried again.
    stamp.write_text(wanted, "utf-8")


def version_of(client: Client) -> str:
    """Return the installed version of the client."""
    ask = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    run = subprocess.run([client.python, "-c", ask], capture_output=True, text=True, check=True)
    return run.stdout.strip()


class ServerProcess:
    """A running `forge serve` and its log."""

    def __init__(self, process: subprocess.Popen[str], log: Path, url: str) -> None:
        self.url = url
        self._process = process
        self._log = log

    def find_leftover(self) -> str | None:
        """Return what the idle server still holds, or None."""
        deadline_s = time.monotonic() + 5
        while True:
            if self._process.poll() is not None:
                return f"the server has ended: {self._process.returncode}"
            try:
                with LOCAL_OPENER.open(self.url + "/healthz", timeout=5) as answer:
                    health = json.load(answer)
            except OSError as error:
                return f"the server does not answer: {error}"
            nonzero = {key: health[key] for key in ("running", "waiting", "kv_blocks_used")}
            if not any(nonzero.values()):
                return None
            if time.monotonic() > deadline_s:
                return f"the server still holds {nonzero}"
            time.sleep(0.02)

    def stop(self) -> str | None:
        """Stop the server; return what went wrong at the end or in its log, or None."""
        self._process.terminate()
        try:
            status = self._process.wait(SERVER_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the server does not stop"
        lines = self._log.read_text("utf-8", "replace").splitlines()
        bad = [line for line in lines if not line.startswith("INFO ")]
        if status or bad:
            return "\n".join([f"the server ended with {status} and logged", *bad[:40]])
        return None


@contextmanager
def run_server(words: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and kill it at the end."""
    with (
        log.open("w+") as errors,
        start_server(*words, stderr=errors, FORGE_API_KEY=KEY) as (process, url),
    ):
        yield ServerProcess(process, log, url)


def run_client(client: Client, addresses: dict[str, str]) -> ClientOutcome:
    """Run the client's script, and then the commands of its page, each within a time limit."""
    try:
        install(client)
        version = version_of(client)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return ClientOutcome(client.name, "", 0.0, "it cannot be installed", str(error))
    commands = shown_commands(client.name, addresses["SERVER_URL"].removeprefix("http://"))
    begun_s = time.monotonic()
    failure, output = None, ""
    with tempfile.TemporaryDirectory() as scratch:
        environ = environment(client, scratch) | addresses
        for words in ([client.python, str(client.script)], ["bash", "-euc", commands]):
            if failure is None:
                failure, text = run_to_end(words, scratch, environ)
                output += text
    return ClientOutcome(client.name, version, time.monotonic() - begun_s, failure, output)


def run_to_end(
    words: Sequence[str], folder: str, environ: dict[str, str]
) -> tuple[str | None, str]:
    """Run a command within its time limit; return what went wrong, or None, and its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(CLIENT_LIMIT_S)
            failure = f"exit status {status} of {Path(words[0]).name}" if status else None
        except subprocess.TimeoutExpired:
            failure = f"still running after {CLIENT_LIMIT_S:.0f} s"
        finally:
            # Its children too: some clients are programs of their own.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return failure, os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")


def environment(client: Client, scratch: str) -> dict[str, str]:
    """Return the variables that a client needs: no key, option or home of the user's.

    A request to any other machine goes to a proxy that does not exist, and fails at once.
    """
    nowhere = "http://127.0.0.1:9"
    return {
        "PATH": f"{client.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "HOME": scratch,
        "TMPDIR": scratch,
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "ALL_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
    }


def table(outcomes: Sequence[ClientOutcome]) -> str:
    rows = [("client", "version", "seconds", "outcome")]
    rows += [
        (each.name, each.version, f"{each.seconds:.1f}", "FAILED" if each.failure else "passed")
        for each in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def main() -> int:
    every = {client.name: client for client in clients()}
    parser = argparse.ArgumentParser(description="Run real clients against a real server.")
    parser.add_argument("--write", action="store_true", help="replace the rows in docs/Clients.md")
    parser.add_argument("client", nargs="*", help=f"all, unless named: {', '.join(every)}")
    options = parser.parse_args()
    names = options.client or list(every)
    if unknown := [name for name in names if name not in every]:
        parser.error(f"no client {unknown[0]!r}. There are {', '.join(every)}")
    outcomes = []
    with ExitStack() as cleanup:
        logs = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        wide = cleanup.enter_context(run_server(WIDE, logs / "wide"))
        narrow = cleanup.enter_context(run_server(NARROW, logs / "narrow"))
        addresses = {"SERVER_URL": wide.url, "NARROW_SERVER_URL": narrow.url, "SERVER_KEY": KEY}
        for name in names:
            outcome = run_client(every[name], addresses)
            leftover = outcome.failure or wide.find_leftover() or narrow.find_leftover()
            outcomes.append(outcome._replace(failure=leftover))
            print(f"--- {name} {outcome.version}: {leftover or 'passed'}", flush=True)
            print(outcome.output.strip(), flush=True)
        faults = list(filter(None, (wide.stop(), narrow.stop())))
    print("", table(outcomes), *faults, sep="\n")
    if options.write:
        rows = [every[each.name].row(each.failure or "passed") for each in outcomes]
        write_rows(rows, list(every))
    return 1 if faults or any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
