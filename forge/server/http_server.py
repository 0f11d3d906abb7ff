"""HTTPServer: a listening server around the application, from its start to its shutdown.

Owns the socket, the signals and the shutdown. Knows no route.

    bind ──► on_ready(url) ──► serve ─┬─► SIGINT or SIGTERM ──► new requests are refused, open ones
                                      │                         go on for drain_timeout seconds, or
                                      │                         until a second signal
                                      └─► the engine has died ─► requests get errors for
                                                               │ DEAD_ENGINE_GRACE_S
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
from forge.engine_thread import CLOSE_REASON
from forge.errors import EngineDead, InvalidConfig
from forge.limits import DEFAULT_LIMITS, Limits
from forge.server.app import COUNT_RESPONSE, create_app
from forge.server.connection import SEND_BUFFER_BYTES, HTTPConnection, OpenConnections
from forge.server.film import FilmFeed
from forge.server.middleware import MAX_HEAD_BYTES, SHUTTING_DOWN, is_host_name
from forge.server.request_defaults import NO_DEFAULTS, RequestDefaults
from forge.server.traces import RequestTraces
from forge.server.weights_socket import WeightsSocket
from forge.trainer_access import TrainerAccess

DEAD_ENGINE_GRACE_S = 1.0
"""Seconds that a server without an engine keeps answering requests with an error."""
CLOSE_GRACE_S = 1.0
"""Seconds from the end of all requests until connections that are still open are cut."""
POLL_INTERVAL_S = 0.05
KEEP_ALIVE_S = 60
BACKLOG = 2048
"""Connections that the kernel queues until they are accepted."""
MAX_ACCEPTS = 32
"""Connections that are accepted at once. More would be open before the first is refused."""
SPARE_DESCRIPTORS = 300
"""Open files in addition to max_connections: overflow connections, those just accepted, those just
refused, and the process's own files."""


def run_server(
    llm: AsyncLLM,
    *,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    served_model_name: str | None,
    on_ready: Callable[[str], None],
    allowed_hosts: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    metrics_compat: str | None = None,
    reasoning_parser: str | None = None,
    reasoning_config: str | None = None,
    tool_call_parser: str | None = None,
    request_defaults: RequestDefaults = NO_DEFAULTS,
    root_path: str = "",
    trainer_access: TrainerAccess | None = None,
    film: FilmFeed | None = None,
    traces: RequestTraces | None = None,
    weights_socket: WeightsSocket | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. The engine is closed at the end, also after an error.

    on_ready        called with the server's URL once it listens; port 0 is a free one
    allowed_hosts   comma-separated names that requests may use for the server

    Raises InvalidConfig when it cannot listen as configured, and EngineDead when the engine failed.
    Must run in the main thread.
    """
    try:
        raise_file_limit(limits.max_connections)
        if "" in api_keys:
            raise InvalidConfig("api_key", "it is empty", "Give a key, or leave it out")
        with create_listener(host, port, api_keys) as socket_:
            app = create_app(
                llm,
                served_model_name=served_model_name,
                api_keys=api_keys,
                hosts=parse_allowed_hosts(socket_, host, allowed_hosts),
                limits=limits,
                metrics_compat=metrics_compat,
                reasoning_parser=reasoning_parser,
                reasoning_config=reasoning_config,
                tool_call_parser=tool_call_parser,
                request_defaults=request_defaults,
                root_path=root_path,
                trainer_access=trainer_access,
                film=film,
                traces=traces,
                weights_socket=weights_socket,
            )
            stop = (lambda: None) if weights_socket is None else weights_socket.stop
            HTTPServer(app, llm, on_ready, limits, stop).run(sockets=[socket_])
    finally:
        llm.close()
    if llm.failure != CLOSE_REASON:
        raise EngineDead(f"the engine has ended: {llm.failure}. Start it again")


def raise_file_limit(max_connections: int) -> None:
    """Raise the limit of open files for so many connections. Raises InvalidConfig."""
    num_needed = max_connections + SPARE_DESCRIPTORS
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY or num_needed <= soft_limit:
        return
    if hard_limit != resource.RLIM_INFINITY and num_needed > hard_limit:
        raise InvalidConfig(
            "max_connections",
            f"{max_connections} take {num_needed} open files, and this process may have "
            f"{hard_limit}",
            "Raise its limit (ulimit -Hn), or give at most "
            f"{max(1, hard_limit - SPARE_DESCRIPTORS)}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_needed, hard_limit))


def parse_allowed_hosts(
    socket_: socket.socket, host: str, allowed_hosts: str | None
) -> frozenset[str] | None:
    """Return the host names that requests may use for the server; None: any. Raises InvalidConfig.

    A web page can call a server on its reader's machine by a name of the page's own (DNS
    rebinding). So a server on a loopback address accepts only the names of this machine.
    """
    if allowed_hosts is None:
        address = socket_.getsockname()[0].partition("%")[0]
        return frozenset({host.lower()}) if ipaddress.ip_address(address).is_loopback else None
    names = [name.strip().lower() for name in allowed_hosts.split(",")]
    for name in names:
        if name != "*" and not is_host_name(name):
            raise InvalidConfig(
                "allowed_hosts", f"{name[:64]!r} is not a name", "Give a.example,b.example, say"
            )
    return None if "*" in names else frozenset({host.lower(), *names})


def create_listener(host: str, port: int, api_keys: tuple[str, ...]) -> socket.socket:
    """Return a listening socket. Raises InvalidConfig, also for a public address without a key."""
    if not 0 <= port <= 65535:
        raise InvalidConfig("port", f"{port} is no port", "Give 0 to 65535; 0 is a free one")
    family, address = _resolve(host, port)
    if not api_keys and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise InvalidConfig(
            "host",
            f"{host} can be reached from other machines and there is no key",
            "Give --api-key, or use 127.0.0.1",
        )
    # With IPPROTO_TCP named, asyncio turns Nagle's algorithm off: it delays small answers by 40 ms.
    socket_ = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        socket_.bind(address)
        socket_.listen(BACKLOG)
    except OSError as error:
        socket_.close()
        raise _bind_error(error, host, port) from None
    return socket_


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the address to bind. IPv4 comes first, which `localhost` usually means."""
    try:
        if not host:
            raise OSError("no host")
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidConfig(
            "host", f"{host[:64]!r} is no address of a machine", "Give 127.0.0.1, say"
        ) from None
    addresses.sort(key=lambda info: info[0] != socket.AF_INET)
    family, _, _, _, address = addresses[0]
    return family, (str(address[0]), port)


def _bind_error(exc: OSError, host: str, port: int) -> InvalidConfig:
    if exc.errno == errno.EADDRNOTAVAIL:
        return InvalidConfig(
            "host", f"{host} is not an address of this machine", "Give 127.0.0.1, say"
        )
    if exc.errno == errno.EADDRINUSE:
        return InvalidConfig(
            "port", f"{port} is in use", "Stop the program that uses it, or give another --port"
        )
    return InvalidConfig("port", f"{port} cannot be bound: {exc.strerror}", "Give another --port")


class HTTPServer(uvicorn.Server):
    """uvicorn with forge's limits and shutdown: it does not raise signals again at its end.

    on_shutdown   called once new requests are refused; must not wait
    """

    def __init__(
        self,
        app: Starlette,
        llm: AsyncLLM,
        on_ready: Callable[[str], None],
        limits: Limits = DEFAULT_LIMITS,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        count_response = getattr(app.state, COUNT_RESPONSE, lambda status: None)
        create_connection = partial(
            HTTPConnection, limits=limits, connections=OpenConnections(), on_response=count_response
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, create_connection),
                loop="asyncio",  # its transports read MAX_READ_BYTES at once
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=MAX_ACCEPTS,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=None,  # `shutdown` applies drain_timeout
            )
        )
        self._llm = llm
        self._on_ready = on_ready
        self._limits = limits
        self._on_shutdown = on_shutdown
        self._skip_drain = False
        self._engine_died_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve connections, and call `on_ready` with the URL."""
        await super().startup(sockets)
        if self.started and sockets:
            sockets[0].listen(BACKLOG)  # asyncio has one number for this and for MAX_ACCEPTS
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down: after a signal, or some time after the engine failed."""
        if self._llm.failure is not None:
            now_s = asyncio.get_running_loop().time()
            self._engine_died_s = now_s if self._engine_died_s is None else self._engine_died_s
            if now_s - self._engine_died_s > DEAD_ENGINE_GRACE_S:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests until `drain_timeout`, abort the rest, then close everything."""
        self.lifespan.state[SHUTTING_DOWN] = True
        self._on_shutdown()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limits.drain_timeout
        while self._has_open_requests() and not self._skip_drain and loop.time() < deadline_s:
            await asyncio.sleep(POLL_INTERVAL_S)
        abort_task = asyncio.create_task(self._abort_requests())
        try:
            await super().shutdown(sockets)
        finally:
            abort_task.cancel()
            with suppress(asyncio.CancelledError):
                await abort_task

    def _has_open_requests(self) -> bool:
        """Return whether a request is being received or answered; False without an engine."""
        return self._llm.failure is None and any(
            connection.cycle is not None and not connection.cycle.response_complete
            for connection in cast(set[HTTPConnection], self.server_state.connections)
        )

    async def _abort_requests(self) -> None:
        """End each request with an error; after CLOSE_GRACE_S, cut connections still open."""
        self._llm.abort_all()
        # Short sleeps: after the process was stopped, requests still get turns before the cut.
        for _ in range(round(CLOSE_GRACE_S / POLL_INTERVAL_S)):
            await asyncio.sleep(POLL_INTERVAL_S)
        for connection in cast(list[HTTPConnection], list(self.server_state.connections)):
            connection.transport.abort()  # its client stopped reading, or sending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at the first signal; at a second one, abort open requests."""
        self._skip_drain = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the server instead of the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        old_handlers = [signal.signal(number, self.handle_exit) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, old_handlers, strict=True):
                signal.signal(number, handler)
