"""Every page runs: what the pages at the root, in docs/ and in wiki/ show is executed as written.

    ```python       in order, in one interpreter per page: later blocks see earlier names
    ```sh ```bash   command by command; a server that one starts stays up until the page ends
    ```json         must parse
    ```text         right after a python or sh block: exactly what that block prints. Else not run

A python block of wiki/ that prints has its output after it. tests/docs/page_outputs.py writes them.
A page says 127.0.0.1:8080; the server it starts here gets a free port, and the address is replaced
in all that follows on the page. A comment says what else to expect: `# exit 2` is the exit status
of a command, `# 404` the HTTP status that curl gets. NOT_RUN lists the commands left alone.

Loading forge takes longer than most commands of pages. So one process loads it, and each `forge`
and each interpreter is a fork of that process, with the descriptors, the environment and the folder
of the caller. `python -m forge` itself is tested by tests/cli/test_cli.py.

    page ──► bash ──► CLIENT "forge info" ──► FORKS ──► fork ──► main(["info"])
                        └── ends as it does ◄── status ◄──┘
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("wiki/**/*.md")])
LIMIT_S = 60.0
POLL_S = 0.004  # between two polls

# How a command begins -> why it is left alone. Everything else on a page is run.
SKIPPED_COMMANDS = {
    "cd": "the pages already run at the root of the repository",
    "git clone": "needs a network, and what it gets is already here",
    "pip install": "needs a network",
    "make test": "would run this file again",
    "make check": "would run this file again",
    "make coverage": "runs the tests: minutes",
    "make mutants": "runs tests once per mutant: minutes",
    "make test-long": "runs for minutes",
    "make test-all": "runs for minutes",
    "make stress": "runs the tests many times",
    "make test-soak": "runs for minutes",
    "make test-clients": "installs the clients, and runs for minutes",
    "make test-torch": "installs torch, and runs for minutes",
    "make test-gpu": "needs a GPU",
    "make test-ray": "installs Ray, and runs for minutes",
    "make model-classes": "runs for half an hour",
    "make bench": "measures, and the pages that run at the same time would disturb it",
    "make clean": "would remove the interpreter that runs this",
    "make format": "would rewrite the sources",
    "make lint": "continuous integration runs it",
    "make types": "continuous integration runs it",
    "make help": "shows, does nothing",
}
# How a command begins -> what runs in its place: the recipe without the installation.
REPLACEMENTS = {"make serve": "forge serve"}
# What begins with one of these words must be in a table above.
LISTED_PROGRAMS = ("cd", "git", "make", "pip")
SERVERS = ("forge serve",)
CURL_HTTP_ERROR = 22  # its exit status, under --fail-with-body, for a status of 400 or more

# Listens at argv[1]. Each connection gets a fork of this process, which runs `forge words`, or
# argv[2] if a descriptor for answers is sent too. A fork runs the exit functions and ends without
# finalising the interpreter, which would copy most of its memory first.
FORKS = """
import atexit, gc, os, signal, socket, sys
import forge.bench.commands, forge.server.http_server, forge.sim.commands
from forge.cli.main import main

def run(folder, count, *rest, given):
    words, pairs = rest[: int(count)], rest[int(count) :]
    for number, descriptor in enumerate(given[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(pair.split("=", 1) for pair in pairs)
    os.chdir(folder)
    if given[3:]:
        os.environ["FORGE_ANSWERS"] = str(given[3])
        exec(sys.argv[2], {})
    else:
        end(main(list(words)))

def end(status):
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

def answer(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, given, _, _ = socket.recv_fds(connection, 1 << 20, 4)
    while more := connection.recv(1 << 20):
        data += more
    child = os.fork()
    if child == 0:
        connection.close()
        run(*data.decode("utf-8", "surrogateescape").split("\\0"), given=given)
        sys.exit()
    for descriptor in given:
        os.close(descriptor)
    connection.sendall(b"%d\\n" % child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(b"%d\\n" % status)
    os._exit(0)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.freeze()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print(flush=True)
while True:
    connection, _ = listener.accept()
    if os.fork() == 0:
        listener.close()
        answer(connection)
    connection.close()
"""
# Its arguments are the address and the words of a command. It ends with the status of their fork.
CLIENT = """
import os, signal, socket, sys
answers = [int(os.environ["FORGE_ANSWERS"])] if "FORGE_ANSWERS" in os.environ else []
_, address, *words = sys.argv
parts = [os.getcwd(), str(len(words)), *words, *map("=".join, os.environ.items())]
server = socket.socket(socket.AF_UNIX)
server.connect(address)
data = "\\0".join(parts).encode("utf-8", "surrogateescape")
socket.send_fds(server, [data], [0, 1, 2, *answers])
server.shutdown(socket.SHUT_WR)
for descriptor in answers:
    os.close(descriptor)
replies = server.makefile()
child = int(replies.readline())
def pass_on(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass  # it has ended, and how comes next
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, pass_on)
status = int(replies.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
# Runs each [page, source] line and answers on a descriptor of its own, where no block prints.
INTERPRETER = """
import json, os, sys, types
answers = int(os.environ.pop("FORGE_ANSWERS"))
sys.modules["__main__"] = page = types.ModuleType("__main__")
for line in sys.stdin:
    name, source = json.loads(line)
    exec(compile(source, name, "exec"), page.__dict__)
    sys.stdout.flush()
    os.write(answers, b"x")
"""


class PageError(AssertionError):
    """Raised when a page does not do what it shows."""


class Block(NamedTuple):
    """One fenced block. `line` is that of its first line of text, counted from 1."""

    language: str
    text: str
    line: int

    @property
    def end(self) -> int:
        """Return the line of the closing fence."""
        return self.line + self.text.count("\n")


def parse_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order, without the indentation of their fence."""
    found: list[Block] = []
    fence, language, indent, lines = "", "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        opening = re.match(r"( *)(`{3,}|~{3,})\s*(\S*)", line)
        if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            found.append(Block(language, "".join(lines), number - len(lines)))
            fence = ""
        elif fence:
            lines.append(line.removeprefix(" " * indent) + "\n")
        elif opening:
            indent, fence, language, lines = len(opening[1]), opening[2], opening[3], []
    if fence:
        raise PageError(f"the last {language} block is not closed")
    return found


def text_outside_blocks(text: str) -> str:
    """Return the lines of a page that are in no fenced block."""
    lines: list[str | None] = [*text.splitlines()]
    for block in parse_blocks(text):
        lines[block.line - 2 : block.end] = [None] * (block.end - block.line + 2)
    return "\n".join(line for line in lines if line is not None)


def shown_outputs(text: str) -> dict[Block, Block]:
    """Return the output block of each python or sh block: a text block right after it."""
    lines, blocks = text.splitlines(), parse_blocks(text)
    return {
        block: after
        for block, after in pairwise(blocks)
        if block.language in {"python", "sh", "bash"}
        and after.language == "text"
        and not "".join(lines[block.end : after.line - 2]).strip()
    }


def parse_commands(block: Block) -> list[tuple[int, str]]:
    """Return the commands of a shell block, each with its line.

    A command continues on the next line until bash can parse it: open quotes, backslashes, loops.
    """
    commands: list[tuple[int, str]] = []
    pending: list[str] = []
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending.append(line)
        if not line.endswith("\\") and _is_complete("\n".join(pending)):
            commands.append((number - len(pending) + 1, "\n".join(pending)))
            pending = []
    if pending:
        raise PageError(f"bash cannot parse {pending[0]!r}")
    return commands


def _is_complete(command: str) -> bool:
    run = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    # An open here-document is a warning and no error.
    return run.returncode == 0 and not run.stderr


def starts_with(command: str, words: str) -> bool:
    """Return True if `command` begins with `words`, after any NAME=value and .venv/bin/."""
    bare = re.sub(r"^(\w+=\S*\s+)*(\./)?(\.venv/bin/)?", "", command.strip())
    return re.match(re.escape(words) + r"(?![\w-])", bare) is not None


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def skip_reason(command: str) -> str | None:
    """Return why `command` is skipped, or None if it is to be run."""
    for target in re.findall(r"\bmake ([a-z][\w-]*)", command):
        if target not in make_targets():
            raise PageError(f"the Makefile has no target {target}")
    for words, reason in SKIPPED_COMMANDS.items():
        if starts_with(command, words):
            return reason
    known = any(starts_with(command, words) for words in REPLACEMENTS)
    if not known and any(starts_with(command, word) for word in LISTED_PROGRAMS):
        raise PageError(f"{command!r} is in no table of tests/docs/test_pages.py")
    return None


class Program:
    """One process and its output. It has a separate session, so its children end with it."""

    def __init__(
        self, command: list[str], environment: dict[str, str], pass_fds: tuple[int, ...] = ()
    ) -> None:
        self._output = tempfile.TemporaryFile()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FORGE_")}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | environment,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )

    def write_line(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.flush()

    def terminate(self) -> None:
        self._process.terminate()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """Return everything it has printed so far; stdout and stderr together."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait(self, expected: set[int]) -> str:
        """Wait for its end and return what it printed, or raise PageError."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline_s = time.monotonic() + LIMIT_S
        # Not wait(LIMIT_S): it polls twenty times a second, and most commands take less than that.
        while (status := self._process.poll()) is None:
            if time.monotonic() > deadline_s:
                raise PageError(f"still running after {LIMIT_S:.0f} s\n{self.output()}")
            time.sleep(POLL_S)
        if status not in expected:
            raise PageError(f"exit status {status}\n{self.output()}")
        return self.output()

    def close(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._output.close()


class ForkServer:
    """One process that has loaded forge and forks for pages. Their commands begin with `call`."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "forks")
        self.call = [sys.executable, "-I", "-S", "-c", CLIENT, address]
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS, address, INTERPRETER],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as ready:
            assert ready.readline(), "it ends at its start"

    def close(self) -> None:
        """End the process and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Interpreter:
    """One Python program, given block by block."""

    def __init__(self, forks: ForkServer, environment: dict[str, str], cleanup: ExitStack) -> None:
        self._answers, theirs = os.pipe()
        cleanup.callback(os.close, self._answers)
        environment = environment | {"FORGE_ANSWERS": str(theirs)}
        self.program = Program(forks.call, environment, (theirs,))
        cleanup.callback(self.program.close)
        os.close(theirs)

    def run(self, page: str, source: str) -> str:
        """Run `source` and return what it prints. Raises PageError with the traceback."""
        printed = len(self.program.output())
        self.program.write_line(json.dumps([page, source]))
        answered, _, _ = select.select([self._answers], [], [], LIMIT_S)
        if not answered:
            raise PageError(f"still running after {LIMIT_S:.0f} s\n{self.program.output()}")
        if not os.read(self._answers, 1):
            self.program.wait({0})
            raise PageError(f"the block ends the program\n{self.program.output()}")
        return self.program.output()[printed:]


class PageRun:
    """The run of one page: its interpreter, its servers, and the ports in place of those shown."""

    def __init__(self, name: str, forks: ForkServer, scratch: Path, cleanup: ExitStack) -> None:
        self._name = name
        self._forks = forks
        self._cleanup = cleanup
        self._environment = {
            "PATH": os.pathsep.join([str(create_programs(scratch, forks)), os.environ["PATH"]]),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        self._interpreter: Interpreter | None = None
        self._servers: dict[int, Program] = {}
        # Until the page starts a server, no program listens on its address.
        self._port_by_shown_port = {8080: free_port()}

    def run(self, block: Block) -> str:
        """Do what `block` shows and return what it prints. Raises PageError."""
        printed = ""
        match block.language:
            case "python":
                printed = self._python(block)
            case "sh" | "bash":
                for line, command in parse_commands(block):
                    try:
                        printed += self._command(command)
                    except PageError as error:
                        raise PageError(f"line {line}: {command}\n{error}") from None
            case "json":
                json.loads(block.text)
            case "text":
                pass
            case other:
                raise PageError(f"line {block.line}: {other!r} is no language that a page may use")
        return self._restore_addresses(printed)

    def finish(self) -> None:
        """End the interpreter and the servers, and check their status."""
        if self._interpreter is not None:
            self._interpreter.program.wait({0})
        for port in list(self._servers):
            self._stop_server(port)

    def _python(self, block: Block) -> str:
        if self._interpreter is None:
            self._interpreter = Interpreter(self._forks, self._environment, self._cleanup)
        # Empty lines first, so that a traceback names lines of the page.
        return self._interpreter.run(
            self._name, "\n" * (block.line - 1) + self._replace_addresses(block.text)
        )

    def _command(self, command: str) -> str:
        if skip_reason(command) is not None:
            return ""
        for words, replacement in REPLACEMENTS.items():
            if starts_with(command, words):
                # ARGS="--a --b" of make are the arguments of the program.
                command = re.sub(
                    r"""ARGS=(["']?)(.*)\1""", r"\2", command.replace(words, replacement)
                )
        command = command.replace(".venv/bin/", "")
        exits = re.search(r"#\s*exit (\d+)", command)
        answers = re.search(r"#\s*([45]\d\d)\b", command)
        if exits is None and any(starts_with(command, words) for words in SERVERS):
            self._serve(command)
            return ""
        expected = int(exits[1]) if exits else CURL_HTTP_ERROR if answers else 0
        program = self._start(
            ["bash", "-o", "pipefail", "-c", self._replace_addresses(command)], {}
        )
        printed = program.wait({expected})
        if answers and f"error: {answers[1]}" not in printed:
            raise PageError(f"the answer is not {answers[1]}\n{printed}")
        return printed

    def _serve(self, command: str) -> None:
        """Start the server of `command` on a free port, and wait until it is ready."""
        shown = re.search(r"(?:--port[= ]|FORGE_ADDR=\S*:)(\d+)", command)
        port = int(shown[1]) if shown else 8080
        self._stop_server(port)
        while True:
            self._port_by_shown_port[port] = here = free_port()
            words = command
            if shown:
                words = command[: shown.start(1)] + str(here) + command[shown.end(1) :]
            # exec, so that SIGTERM reaches the server and no shell before it.
            server = self._start(
                ["bash", "-c", "exec env " + words.rstrip(" &")],
                {"FORGE_ADDR": f"127.0.0.1:{here}"},
            )
            if self._wait_until_ready(server, here):
                break
        self._servers[port] = server

    def _wait_until_ready(self, server: Program, port: int) -> bool:
        """Wait until the server is ready. Return False if another program uses the port."""
        deadline_s = time.monotonic() + LIMIT_S
        while not is_ready(port):
            if not server.is_running() or time.monotonic() > deadline_s:
                printed = server.output()
                if f"{port} is in use" in printed:
                    return False
                raise PageError(f"the server is not ready\n{printed}")
            time.sleep(POLL_S)
        return True

    def _stop_server(self, port: int) -> None:
        server = self._servers.pop(port, None)
        if server is not None:
            server.terminate()
            server.wait({0, -signal.SIGTERM})

    def _start(self, command: list[str], environment: dict[str, str]) -> Program:
        program = Program(command, self._environment | environment)
        self._cleanup.callback(program.close)
        return program

    def _replace_addresses(self, text: str) -> str:
        """Return `text` with the addresses of this run in place of the page's."""
        for port, here in self._port_by_shown_port.items():
            text = re.sub(rf"\b(127\.0\.0\.1|localhost):{port}\b", f"127.0.0.1:{here}", text)
        return text

    def _restore_addresses(self, text: str) -> str:
        """Return `text` with the addresses of the page in place of this run's."""
        for port, here in self._port_by_shown_port.items():
            text = text.replace(f"127.0.0.1:{here}", f"127.0.0.1:{port}")
        return text


def create_programs(folder: Path, forks: ForkServer) -> Path:
    """Return a folder for PATH: `forge` and `python` under test, `curl` that fails on errors."""
    bodies = {
        "forge": shlex.join(forks.call),
        "python": f"'{sys.executable}'",
        "python3": f"'{sys.executable}'",
        "curl": f"'{shutil.which('curl')}' --fail-with-body --show-error --max-time 60",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {body} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def run_blocks(path: Path, forks: ForkServer) -> dict[Block, str]:
    """Do everything that the page shows, and return what each block prints. Raises PageError."""
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        page = PageRun(path.name, forks, scratch, cleanup)
        printed = {block: page.run(block) for block in parse_blocks(path.read_text("utf-8"))}
        page.finish()
    return printed


def run_page(path: Path, forks: ForkServer) -> None:
    """Do everything that the page shows. Raises PageError with what did not happen."""
    shown = shown_outputs(path.read_text(encoding="utf-8"))
    for block, printed in run_blocks(path, forks).items():
        required = path.parent.name == "wiki" and block.language == "python"
        if block not in shown and not (required and printed):
            continue
        expected = shown[block].text if block in shown else ""
        if expected != comparable(printed):
            raise PageError(
                f"line {block.line}: the page does not show what the block prints. "
                f"Write it with: python -m tests.docs.page_outputs {path}\n{printed}"
            )


def comparable(printed: str) -> str:
    """Return the text of an output block: no spaces at the ends of lines, one line end at last."""
    return "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())


def heading_anchors(path: Path) -> set[str]:
    """Return the anchors of the page's headings."""
    headings = re.findall(
        r"^#{1,6} +(.+)$", text_outside_blocks(path.read_text("utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", text.strip().lower()).replace(" ", "-") for text in headings}


def find_dead_links(path: Path) -> list[str]:
    """Return links to files or headings that do not exist. Links to the web are not checked."""
    prose = re.sub(r"`[^`\n]*`", "", text_outside_blocks(path.read_text("utf-8")))
    dead = []
    for link in re.findall(r"\]\(<?([^)\s>]+)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in heading_anchors(target)
        ):
            dead.append(link)
    return dead


@cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all test functions and test files."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    functions = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    return frozenset([*functions, *(file.stem for file in files)])
