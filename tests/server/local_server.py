"""A server in a thread of the test, as every test of HTTP wants it: no delay of a machine shows.

The clock of its event loop stands still. What the server would do after a while it does when the
test puts the clock forward, and not before, however long a machine stalls meanwhile. The engine
goes on by itself; a Stepwise model takes a step when the test lets it.

    test     ask ──► forward(30.0) ────────────► let.release() ──────► leave the block
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
from forge.models.hash import HashModel
from forge.models.loader import LETTERS
from forge.seam import PendingStep, StepPlan
from forge.server.http_server import HTTPServer
from forge.tokenizer import Vocabulary

TIMEOUT_S = 60.0
"""Seconds after which a test gives up: more than any machine stalls, less than a test may take."""


class ManualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on which no time passes but what it is put forward by, until it is let go."""

    def __init__(self) -> None:
        self._is_manual = True
        self._offset_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Seconds; the start is any."""
        return self._offset_s + (0.0 if self._is_manual else super().time())

    def advance(self, seconds: float) -> None:
        """It is so much later. For callbacks of this loop."""
        self._offset_s += seconds

    def advance_and_wait(self, seconds: float) -> None:
        """It is so much later, and what was due has been called. For all other threads."""
        done = threading.Event()

        def advance() -> None:
            self.advance(seconds)
            self.call_later(0.0, self.call_soon, done.set)  # after all that is due, and its close

        self.call_soon_threadsafe(advance)
        assert done.wait(TIMEOUT_S), "the loop does not turn"

    def resume(self) -> None:
        """Time passes as everywhere. For all other threads."""
        self.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._offset_s -= super().time()
        self._is_manual = False


class GatedModel(HashModel):
    """A model that takes a step for each `permits.release()`.

    Its tokens are letters: all are shown.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        likely = [byte + 1 for byte in LETTERS]
        super().__init__(num_blocks=num_blocks, block_size=block_size, likely_tokens=likely)
        self.permits = threading.Semaphore(0)

    def forward(self, plan: StepPlan) -> PendingStep:
        """When it is let."""
        assert self.permits.acquire(timeout=TIMEOUT_S), "nobody lets it"
        return super().forward(plan)

    @contextmanager
    def open_at_exit(self) -> Iterator[None]:
        """It is let for good after the block, so that its engine can end."""
        try:
            yield
        finally:
            self.permits.release(2**14)  # more than any test has steps; each release takes a moment


@contextmanager
def block_compilation(llm: AsyncLLM) -> Iterator[threading.Event]:
    """No structure is compiled in the block. The event says that the first one waits."""
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
    """The application's URL and a client of it. Server and engine are gone with the block."""
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
        with suppress(RuntimeError):  # it has ended already
            loop.resume()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server does not end"
        llm.close()


def create_client(url: str) -> httpx.Client:
    """A client of a server of this machine, to be closed. Nothing in the environment leads it away.

    It reads no certificates, which nobody asks it for: that takes longer than most tests.
    """
    return httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=False)


def unexpected_log(written: str) -> str:
    """What a server wrote, but for its figures of every ten seconds: a slow machine has some."""
    lines = written.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("INFO forge.statistics: "))


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """The condition holds, soon enough."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not after {timeout_s} s"
        time.sleep(0.005)
