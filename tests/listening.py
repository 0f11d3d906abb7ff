"""A server in a thread of the test, as every test of HTTP wants it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from starlette.applications import Starlette

from forge.async_llm import AsyncLLM
from forge.limits import DEFAULT_LIMITS, Limits
from forge.server.serve import Server


@contextmanager
def listening(
    llm: AsyncLLM, app: Starlette, socket_: socket.socket, limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[str, httpx.Client]]:
    """The application's URL and a client of it. Server and engine are gone with the block."""
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(app, llm, on_ready, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket_]})
    thread.start()
    try:
        assert ready.wait(20), "the server does not start"
        with httpx.Client(base_url=urls[0], timeout=20, trust_env=False) as client:
            yield urls[0], client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not end"
        llm.close()


def wait_until(holds: Callable[[], bool], within_s: float) -> None:
    """The condition holds, soon enough."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not after {within_s} s"
        time.sleep(0.005)
