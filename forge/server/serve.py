"""A listening server around the application, from the first connection to the last.

Owns the socket, the signals and the way to the end. Knows no route.

    bind ──► on_ready(url) ──► serve ──► SIGINT or SIGTERM ──► no new connections
                                                               open requests go on for DRAIN_S,
                                                               or until a second signal; then
                                                               end, and the engine is closed
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.server.app import create_app
from forge.server.refusal import envelope

DRAIN_S = 5.0
"""Seconds that open requests may take after the signal to end."""
CUT_S = 1.0
"""Seconds after that until connections that still do not end are cut."""
POLL_S = 0.05
KEEP_ALIVE_S = 60
BACKLOG = 2048


def run(
    llm: AsyncLLM,
    *,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    on_ready: Callable[[str], None],
) -> None:
    """The server has run and ended by SIGINT or SIGTERM; the engine is closed, whatever happened.

    on_ready   called with the server's URL once it listens; port 0 is a free one
    Raises InvalidConfig when it cannot listen as asked. Runs in the main thread.
    """
    try:
        if api_key == "":
            raise InvalidConfig("api_key", "it is empty", "Give a key, or leave it out")
        with listener(host, port, api_key) as socket_:
            app = create_app(llm, served_model_name=served_model_name, api_key=api_key)
            Server(app, llm, on_ready).run(sockets=[socket_])
    finally:
        llm.close()


def listener(host: str, port: int, api_key: str | None) -> socket.socket:
    """A socket that listens. Raises InvalidConfig, also for a public address without a key."""
    if not 0 <= port <= 65535:
        raise InvalidConfig("port", f"{port} is no port", "Give 0 to 65535; 0 is a free one")
    family, address = _resolved(host, port)
    if api_key is None and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise InvalidConfig(
            "host",
            f"{host} can be reached from other machines and there is no key",
            "Give --api-key, or use 127.0.0.1",
        )
    # The protocol is named, or asyncio would leave Nagle's algorithm on: 40 ms for small answers.
    socket_ = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_.bind(address)
        socket_.listen(BACKLOG)
    except OSError as fault:
        socket_.close()
        raise _unbound(fault, host, port) from None
    return socket_


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address to bind. Of several, IPv4 first: `localhost` is then what it was written for."""
    try:
        if not host:
            raise OSError("no host")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidConfig(
            "host", f"{host[:64]!r} is no address of a machine", "Give 127.0.0.1, say"
        ) from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _unbound(fault: OSError, host: str, port: int) -> InvalidConfig:
    if fault.errno == errno.EADDRNOTAVAIL:
        return InvalidConfig(
            "host", f"{host} is not an address of this machine", "Give 127.0.0.1, say"
        )
    if fault.errno == errno.EADDRINUSE:
        return InvalidConfig("port", f"{port} is in use", "Stop its user, or give another --port")
    return InvalidConfig("port", f"{port} cannot be bound: {fault.strerror}", "Give another --port")


class Protocol(H11Protocol):
    """HTTP/1.1 whose own refusals look like all others."""

    def send_400_response(self, msg: str) -> None:
        """The connection is closed, after an envelope if nothing else is being said on it."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            error = envelope(400, f"{msg.rstrip('.')}. Send HTTP/1.1", None, "bad_framing")
            body = json.dumps(error).encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (len(body), body)
            )
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn with our limits and our way to end: no signal is raised again after it."""

    def __init__(self, app: ASGIApp, llm: AsyncLLM, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=16384,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=None,  # `_end_requests` sees to it
            )
        )
        self._llm = llm
        self._on_ready = on_ready
        self._in_haste = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections are served and `on_ready` was told where."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Open requests have ended: by themselves, or as aborted after DRAIN_S or in haste."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending

    async def _end_requests(self) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.time() + DRAIN_S
        while not self._in_haste and loop.time() < patience:
            await asyncio.sleep(POLL_S)
        closing = loop.run_in_executor(None, self._llm.close)  # each hears why it ends
        await asyncio.sleep(CUT_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read, or does not finish asking
        await closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server once open requests have; another ends those too."""
        self._in_haste = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server, not the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self.handle_exit) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
