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
from forge.models.load import LETTERS
from forge.seam import PendingStep, StepPlan
from forge.server.serve import Server
from forge.tokenizer import Vocabulary

LIMIT_S = 60.0
"""Seconds after which a test gives up: more than any machine stalls, less than a test may take."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop on which no time passes but what it is put forward by, until it is let go."""

    def __init__(self) -> None:
        self._stands = True
        self._ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Seconds; the start is any."""
        return self._ahead_s + (0.0 if self._stands else super().time())

    def put(self, seconds: float) -> None:
        """It is so much later. For callbacks of this loop."""
        self._ahead_s += seconds

    def forward(self, seconds: float) -> None:
        """It is so much later, and what was due has been called. For all other threads."""
        over = threading.Event()

        def put() -> None:
            self.put(seconds)
            self.call_later(0.0, self.call_soon, over.set)  # after all that is due, and its close

        self.call_soon_threadsafe(put)
        assert over.wait(LIMIT_S), "the loop does not turn"

    def let_go(self) -> None:
        """Time passes as everywhere. For all other threads."""
        self.call_soon_threadsafe(self._go)

    def _go(self) -> None:
        self._ahead_s -= super().time()
        self._stands = False


class Stepwise(HashModel):
    """A model that takes a step for each `let.release()`. Its tokens are letters: all are shown."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        likely = [byte + 1 for byte in LETTERS]
        super().__init__(num_blocks=num_blocks, block_size=block_size, likely=likely)
        self.let = threading.Semaphore(0)

    def forward(self, plan: StepPlan) -> PendingStep:
        """When it is let."""
        assert self.let.acquire(timeout=LIMIT_S), "nobody lets it"
        return super().forward(plan)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """It is let for good after the block, so that its engine can end."""
        try:
            yield
        finally:
            self.let.release(2**14)  # more than any test has steps; each release takes a moment


@contextmanager
def withheld_vocabulary(llm: AsyncLLM) -> Iterator[threading.Event]:
    """No structure is compiled in the block. The event says that the first one waits."""
    structures = llm.engine.structures
    begun, go, real = threading.Event(), threading.Event(), structures.vocabulary

    def vocabulary() -> Vocabulary:
        begun.set()
        assert go.wait(LIMIT_S)
        return real()

    structures.vocabulary = vocabulary  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        go.set()


@contextmanager
def listening(
    llm: AsyncLLM,
    app: Starlette,
    socket_: socket.socket,
    limits: Limits = DEFAULT_LIMITS,
    clock: Clock | None = None,
) -> Iterator[tuple[str, httpx.Client]]:
    """The application's URL and a client of it. Server and engine are gone with the block."""
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(app, llm, on_ready, limits)
    loop = clock or Clock()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(sockets=[socket_]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(LIMIT_S), "the server does not start"
        with client_of(urls[0]) as client:
            yield urls[0], client
    finally:
        server.should_exit = True
        with suppress(RuntimeError):  # it has ended already
            loop.let_go()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server does not end"
        llm.close()


def client_of(url: str) -> httpx.Client:
    """A client of a server of this machine, to be closed. Nothing in the environment leads it away.

    It reads no certificates, which nobody asks it for: that takes longer than most tests.
    """
    return httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False, verify=False)


def complaints(written: str) -> str:
    """What a server wrote, but for its figures of every ten seconds: a slow machine has some."""
    lines = written.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("INFO forge.statistics: "))


def wait_until(holds: Callable[[], bool], within_s: float = LIMIT_S) -> None:
    """The condition holds, soon enough."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not after {within_s} s"
        time.sleep(0.005)
