"""A server in a test thread whose clock the test controls, so that slow machines do not matter.

The clock of its event loop stands still until the test advances it. So timeouts fire when the test
advances the clock, and not before, however long a machine stalls meanwhile. The engine runs by
itself; a GatedModel takes a step when the test permits it.

    test     request ──► advance(30.0) ─────────► permits.release() ───► leave the block
    server       .......... 408, ping, 503 .................. event .. time passes again, the end
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
from starlette.applications import Starlette

from forge.async_llm import AsyncLLM
from forge.limits import DEFAULT_LIMITS, Limits
from forge.models.embedded import LETTERS
from forge.models.hash import HashModel
from forge.seam import PendingStep, StepPlan
from forge.server.http_server import HTTPServer
from forge.tokenizer import Vocabulary

TIMEOUT_S = 60.0
"""Seconds after which a test gives up: more than any machine stalls, less than a test may take."""


class ManualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when it is advanced, until `resume`."""

    def __init__(self) -> None:
        self._is_manual = True
        self._offset_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Return the loop's time in seconds, from any start."""
        return self._offset_s + (0.0 if self._is_manual else super().time())

    def advance(self, seconds: float) -> None:
        """Advance the clock. For callbacks of this loop."""
        self._offset_s += seconds

    def advance_and_wait(self, seconds: float) -> None:
        """Advance the clock and wait until the due callbacks have run. For all other threads."""
        done = threading.Event()

        def advance() -> None:
            self.advance(seconds)
            self.call_later(0.0, self.call_soon, done.set)  # after all that is due, and its effects

        self.call_soon_threadsafe(advance)
        assert done.wait(TIMEOUT_S), "the loop does not turn"

    def resume(self) -> None:
        """Let time pass as usual. For all other threads."""
        self.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._offset_s -= super().time()
        self._is_manual = False
        self._skip(turns=10)

    def _skip(self, turns: int) -> None:
        """Advance the clock in some turns: a shutdown sleeps 0.1 s twice though none waits."""
        if turns:
            self.advance(0.05)
            self.call_soon(self._skip, turns - 1)


class GatedModel(HashModel):
    """A model that takes a step for each `permits.release()`.

    Its tokens are letters, so that each has a visible text.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        likely = [byte + 1 for byte in LETTERS]
        super().__init__(num_blocks=num_blocks, block_size=block_size, likely_tokens=likely)
        self.permits = threading.Semaphore(0)

    def forward(self, plan: StepPlan) -> PendingStep:
        """Run the step once it is permitted."""
        assert self.permits.acquire(timeout=TIMEOUT_S), "the test did not permit the step"
        return super().forward(plan)

    @contextmanager
    def open_at_exit(self) -> Iterator[None]:
        """Permit all further steps after the block, so that the engine can end."""
        try:
            yield
        finally:
            self.permits.release(2**14)  # more than any test has steps; each release takes a moment


@contextmanager
def block_compilation(llm: AsyncLLM) -> Iterator[threading.Event]:
    """Block all compilations in the block; the event yielded is set once the first one waits."""
    structures = llm.engine.grammar_backend
    waiting, released, real = threading.Event(), threading.Event(), structures.vocabulary

    def vocabulary() -> Vocabulary:
        waiting.set()
        assert released.wait(TIMEOUT_S)
        return real()

    structures.vocabulary = vocabulary  # type: ignore[method-assign]
    try:
        yield waiting
    finally:
        released.set()


@contextmanager
def serve_app(
    llm: AsyncLLM,
    app: Starlette,
    socket_: socket.socket,
    limits: Limits = DEFAULT_LIMITS,
    clock: ManualClockLoop | None = None,
) -> Iterator[tuple[str, httpx.Client]]:
    """Serve the application in the block; yield its URL and a client of it."""
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = HTTPServer(app, llm, on_ready, limits)
    loop = clock or ManualClockLoop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(sockets=[socket_]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S), "the server does not start"
        with create_client(urls[0]) as client:
            yield urls[0], client
    finally:
        server.should_exit = True
        with suppress(RuntimeError):  # the loop has ended already
            loop.resume()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server does not end"
        llm.close()


def create_client(url: str) -> httpx.Client:
    """Return a client of a server of this machine, without proxies. The caller closes it.

    It loads no certificates: that takes longer than most tests.
    """
    return httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=False)


EXPECTED_LOG = ("INFO forge.statistics: ", "INFO forge.start: ready ")
"""First words of a slow machine's statistics, and of the time that every start took."""


def unexpected_log(written: str) -> str:
    """Return a server's log without the lines that servers of these tests may write."""
    lines = written.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(EXPECTED_LOG))


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the condition holds; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not after {timeout_s} s"
        time.sleep(0.005)
