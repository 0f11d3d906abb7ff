"""A listening server around the application, from the first connection to the last.

Owns the socket, the signals and the way to the end. Knows no route.

    bind ──► on_ready(url) ──► serve ─┬─► SIGINT or SIGTERM ──► new requests are refused, open ones
                                      │                         go on for drain_timeout seconds, or
                                      │                         until a second signal
                                      └─► the engine has died ─► every request hears of it, DEAD_S
                                                               │
                                                               ▼
                                          no connections, no engine, no process
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from forge.async_llm import AsyncLLM
from forge.engine_thread import CLOSED
from forge.errors import EngineDead, InvalidConfig
from forge.limits import DEFAULT_LIMITS, Limits
from forge.server.app import ANSWERED, create_app
from forge.server.connection import SEND_BUFFER, Connection, Places
from forge.server.guard import CLOSING, MAX_HEAD_BYTES, is_name

DEAD_S = 1.0
"""Seconds that a server without an engine goes on saying so."""
CUT_S = 1.0
"""Seconds after that until connections that still do not end are cut."""
POLL_S = 0.05
KEEP_ALIVE_S = 60
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
ACCEPTED = 32
"""Connections that are accepted at once. More would be open before the first is refused."""
SPARE_DESCRIPTORS = 300
"""Open files beside the connections that have a place: those reserved, those just accepted, those
just refused, and what the process has for itself."""


def run(
    llm: AsyncLLM,
    *,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    on_ready: Callable[[str], None],
    allowed_hosts: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    metrics_compat: str | None = None,
) -> None:
    """The server has run and ended by SIGINT or SIGTERM; the engine is closed, whatever happened.

    on_ready        called with the server's URL once it listens; port 0 is a free one
    allowed_hosts   names, with commas between, that requests may call the server by
    Raises InvalidConfig when it cannot listen as asked, and EngineDead when the engine ended by
    itself. Runs in the main thread.
    """
    try:
        make_room(limits.max_connections)
        if api_key == "":
            raise InvalidConfig("api_key", "it is empty", "Give a key, or leave it out")
        with listener(host, port, api_key) as socket_:
            app = create_app(
                llm,
                served_model_name=served_model_name,
                api_key=api_key,
                hosts=hosts_of(socket_, host, allowed_hosts),
                limits=limits,
                metrics_compat=metrics_compat,
            )
            Server(app, llm, on_ready, limits).run(sockets=[socket_])
    finally:
        llm.close()
    if llm.failure != CLOSED:
        raise EngineDead(f"the engine has ended: {llm.failure}. Start it again")


def make_room(max_connections: int) -> None:
    """The process may open files for so many connections. Raises InvalidConfig."""
    needed = max_connections + SPARE_DESCRIPTORS
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or needed <= now:
        return
    if most != resource.RLIM_INFINITY and needed > most:
        raise InvalidConfig(
            "max_connections",
            f"{max_connections} take {needed} open files, and this process may have {most}",
            f"Raise its limit (ulimit -Hn), or give at most {max(1, most - SPARE_DESCRIPTORS)}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def hosts_of(socket_: socket.socket, host: str, allowed: str | None) -> frozenset[str] | None:
    """The names that a request may call the server by; None: any. Raises InvalidConfig.

    A page in a browser can call a server on its reader's machine by a name of its own (DNS
    rebinding). So where only this machine is listened to, it must be called by a name of it.
    """
    if allowed is None:
        address = socket_.getsockname()[0].partition("%")[0]
        return frozenset({host.lower()}) if ipaddress.ip_address(address).is_loopback else None
    names = [name.strip().lower() for name in allowed.split(",")]
    for name in names:
        if name != "*" and not is_name(name):
            raise InvalidConfig(
                "allowed_hosts", f"{name[:64]!r} is not a name", "Give a.example,b.example, say"
            )
    return None if "*" in names else frozenset({host.lower(), *names})


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
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
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


class Server(uvicorn.Server):
    """uvicorn with our limits and our way to end: no signal is raised again after it."""

    def __init__(
        self,
        app: Starlette,
        llm: AsyncLLM,
        on_ready: Callable[[str], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        answered = getattr(app.state, ANSWERED, lambda status: None)
        kind = partial(Connection, limits=limits, places=Places(), answered=answered)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, kind),
                loop="asyncio",  # its transports read READ_BYTES at once
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTED,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=None,  # `shutdown` sees to it
            )
        )
        self._llm = llm
        self._on_ready = on_ready
        self._limits = limits
        self._in_haste = False
        self._died_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections are served and `on_ready` was told where."""
        await super().startup(sockets)
        if self.started and sockets:
            sockets[0].listen(BACKLOG)  # asyncio takes one number for this and for ACCEPTED
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """It is time to end: somebody asked for it, or the engine has died a while ago."""
        if self._llm.failure is not None:
            now_s = asyncio.get_running_loop().time()
            self._died_s = now_s if self._died_s is None else self._died_s
            if now_s - self._died_s > DEAD_S:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Open requests have ended: by themselves, or as aborted when patience did."""
        self.lifespan.state[CLOSING] = True
        clock = asyncio.get_running_loop()
        patience_s = clock.time() + self._limits.drain_timeout
        while self._has_requests() and not self._in_haste and clock.time() < patience_s:
            await asyncio.sleep(POLL_S)
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending

    def _has_requests(self) -> bool:
        """Somebody is being answered, or is asking. Without an engine there is nothing to say."""
        return self._llm.failure is None and any(
            each.cycle is not None and not each.cycle.response_complete
            for each in cast(set[Connection], self.server_state.connections)
        )

    async def _end_requests(self) -> None:
        """End each request with an error, and `CUT_S` later connections that are still open."""
        self._llm.end()
        # Short sleeps: after a stall of the process, requests still get turns before the cut.
        for _ in range(round(CUT_S / POLL_S)):
            await asyncio.sleep(POLL_S)
        for connection in cast(list[Connection], list(self.server_state.connections)):
            connection.transport.abort()  # its client does not read, or does not finish asking

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
