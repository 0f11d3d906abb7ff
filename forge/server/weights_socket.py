"""WeightsSocket: updates of weights from the memory of trainers on this machine.

Owns a Unix socket, its threads, and the check of users. Knows no tensor: a message says where they
are, and the engine opens them. See forge.weights_client for the other side.

    trainer ── connect ──► same user? ── length, JSON, a descriptor ──► key? fields? ──┐
       ▲                    else closed                                                ▼
       └────────── {"status", "weight_version", "seconds"} or {"error"} ◄── AsyncLLM.update_weights

    message    8 bytes, big-endian: the length of the JSON that follows. With the first byte comes
               at most one descriptor (SCM_RIGHTS), of a memory file that cannot shrink
    response   the same, without a descriptor

Always true: a message that is refused changes nothing, and a connection that sends none delays no
other one indefinitely. The file has mode 0600, and only processes of the server's user are read.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from forge.async_llm import AsyncLLM
from forge.errors import EngineDead, ForgeError, InvalidConfig, InvalidWeights
from forge.server.trainers import command_response
from forge.server.weights_message import parse_key, parse_message
from forge.trainer_access import TrainerAccess
from forge.weights import SharedWeights

LOG = logging.getLogger("forge.server")

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_CONNECTIONS = 4
"""Connections that are served at once: each may hold a message in memory."""
READ_TIMEOUT_S = 10.0
"""Seconds in which a trainer must send a whole message, and read the response."""
DRAIN_TIMEOUT_S = 1.0
"""Seconds in which a trainer must close the connection after the response."""
RETRY_INTERVAL_S = 0.1
"""Seconds until the next attempt to accept a connection, after one that failed."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that the threads may take to end. An update takes a second for each few gigabytes."""
MAX_DESCRIPTORS = 4
"""Descriptors read with a message, of which one is used: others are closed."""

_LENGTH = struct.Struct(">Q")
_PEER = struct.Struct("3i")


class _Refusal(Exception):
    """A message that is refused: its code and what is wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _shutting_down() -> _Refusal:
    return _Refusal("shutting_down", "the server is shutting down. Start it again")


class WeightsSocket:
    """A listening socket, until `close`. Connections wait until `start`.

    peer_uid   returns the user of the other end of a connection
    clock_s    returns seconds, by which a message has its deadline
    """

    def __init__(
        self,
        path: str,
        admin_key: str,
        peer_uid: Callable[[socket.socket], int] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._admin_key = admin_key
        self._peer_uid = peer_uid or _peer_uid
        self._clock_s = clock_s
        self._listener = _listen(path)
        self._file_id = _file_id(path)  # the path may become that of a later server's file
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread: threading.Thread | None = None

    def start(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        """Serve connections on threads. Updates run on the loop."""
        self._thread = threading.Thread(
            target=self._accept, args=(llm, loop), name="forge-weights", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Refuse updates from now on, and remove the file. Updates that run are carried out."""
        with self._lock:
            self._is_closing.set()
            for connection in self._connections:
                _stop_reading(connection)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            if self._file_id is not None and _file_id(self._path) == self._file_id:
                with suppress(OSError):
                    os.unlink(self._path)
            self._file_id = None

    def close(self) -> None:
        """Stop, and wait for updates that run, for `CLOSE_TIMEOUT_S` at most."""
        self.stop()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._lock:
            threads = [*self._connections.values(), *filter(None, (self._thread,))]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._listener.close()

    def _accept(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        """Accept connections until `stop`, each for a thread of its own."""
        is_failing = False
        while not self._is_closing.is_set():
            self._slots.acquire()  # further connections wait in the kernel
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # also where no descriptor is free for a moment
                self._slots.release()
                if not self._is_closing.wait(RETRY_INTERVAL_S) and not is_failing:
                    LOG.warning("no connection for weights is accepted now: %s", error)
                is_failing = True
                continue
            is_failing = False
            thread = threading.Thread(
                target=self._respond,
                args=(connection, llm, loop),
                name="forge-weights-update",
                daemon=True,
            )
            with self._lock:
                self._connections[connection] = thread
                if self._is_closing.is_set():
                    _stop_reading(connection)
                thread.start()  # `close` joins each thread that it finds

    def _respond(
        self, connection: socket.socket, llm: AsyncLLM, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Serve one message of a connection, and close it."""
        try:
            with suppress(OSError):  # the trainer has left
                _send_response(connection, self._serve(connection, llm, loop))
        finally:
            with self._lock:
                del self._connections[connection]
                connection.close()
            self._slots.release()

    def _serve(
        self, connection: socket.socket, llm: AsyncLLM, loop: asyncio.AbstractEventLoop
    ) -> dict[str, Any]:
        """Read a message and carry it out; return the response."""
        try:
            if self._peer_uid(connection) != os.getuid():
                raise _Refusal("wrong_user", "the socket is for processes of the server's user")
            reader = _Reader(connection, self._clock_s)
            with _receive(reader) as (text, descriptor):
                if not hmac.compare_digest(parse_key(text).encode(), self._admin_key.encode()):
                    raise _Refusal("invalid_api_key", "key: it is wrong. Send the admin key")
                message = parse_message(text)
                weights = message.weights(*_check_memory(descriptor))
                return self._update(llm, loop, weights, message.weight_version)
        except TimeoutError:
            refusal = _Refusal(
                "request_timeout", f"the message was not complete after {READ_TIMEOUT_S:g} s"
            )
        except _Refusal as error:
            refusal = error
        except InvalidWeights as error:
            refusal = _Refusal("invalid_weights", str(error))
        except EngineDead as error:
            refusal = _Refusal("engine_dead", str(error))
        except ForgeError as error:
            refusal = _Refusal("refused", str(error))
        except Exception:  # the trainer must get a response
            LOG.exception("an update of weights failed")
            refusal = _Refusal("internal_error", "the server failed. Its log has the reason")
        if self._is_closing.is_set() and refusal.code == "bad_framing":  # `stop` ended the reading
            refusal = _shutting_down()
        LOG.warning("an update of weights was refused: %s", refusal.code)
        return {"error": {"code": refusal.code, "message": str(refusal)}}

    def _update(
        self,
        llm: AsyncLLM,
        loop: asyncio.AbstractEventLoop,
        weights: SharedWeights,
        version: str | None,
    ) -> dict[str, Any]:
        """Update the weights, and return the response. Raises ForgeError, or _Refusal."""
        with self._lock:  # after `stop` the loop may be closed
            if self._is_closing.is_set():
                raise _shutting_down()
            update = asyncio.run_coroutine_threadsafe(llm.update_weights(weights, version), loop)
        result = update.result()
        return command_response("updated", result.version, result.seconds)


def open_weights_socket(path: str | None, access: TrainerAccess | None) -> WeightsSocket | None:
    """Return the socket at this path, or None without one. Raises InvalidConfig."""
    if path is None:
        return None
    if not path:
        raise InvalidConfig("weights_socket", "it is empty", "Name a new file, or leave it out")
    if access is None:
        raise InvalidConfig(
            "weights_socket", "updates of weights need a key", "Give admin_key too, or leave it out"
        )
    if not hasattr(socket, "SO_PEERCRED") or not hasattr(fcntl, "F_GET_SEALS"):
        raise InvalidConfig(
            "weights_socket", "this system has no memory files that are sealed", "Use Linux"
        )
    return WeightsSocket(path, access.admin_key)


def _listen(path: str) -> socket.socket:
    """Return a listening socket with mode 0600. Raises InvalidConfig."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # before `bind`: a later chmod would leave a moment to others
    try:
        if "\0" in path:
            raise ValueError("it has a null character")  # `bind` would cut it there
        listener.bind(path)
        listener.listen()
    except (OSError, ValueError) as error:
        listener.close()
        raise InvalidConfig(
            "weights_socket", f"{path[:128]!r} cannot be made: {error}", "Name a new file"
        ) from None
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that has ended. Raises InvalidConfig for any other file."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            if stat.S_ISSOCK(mode):
                probe.setblocking(False)  # it may be a server with a full backlog
                probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass
    raise InvalidConfig("weights_socket", f"there is a file {path[:128]!r}", "Name a new file")


def _peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end, by the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(data)[1]
    return uid


class _Reader:
    """Reads a connection until a deadline, which is one for the whole message."""

    def __init__(self, connection: socket.socket, clock_s: Callable[[], float]) -> None:
        self._connection = connection
        self._clock_s = clock_s
        self._deadline_s = clock_s() + READ_TIMEOUT_S

    def read_head(self) -> tuple[bytes, list[int]]:
        """Return the first bytes of the message, and its descriptors. Raises TimeoutError."""
        self._set_timeout()
        # Closed in processes that this one starts meanwhile.
        flags = socket.MSG_CMSG_CLOEXEC
        head, descriptors, _, _ = socket.recv_fds(
            self._connection, _LENGTH.size, MAX_DESCRIPTORS, flags
        )
        return head, descriptors

    def read(self, count: int) -> bytes:
        """Return so many bytes. Raises TimeoutError, or _Refusal where the message ends before."""
        parts: list[bytes] = []
        while count:
            self._set_timeout()
            part = self._connection.recv(min(count, 2**16))
            if not part:
                raise _Refusal(
                    "bad_framing", f"the message ends {count} bytes early. Send all of it"
                )
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _set_timeout(self) -> None:
        left_s = self._deadline_s - self._clock_s()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


@contextmanager
def _receive(reader: _Reader) -> Iterator[tuple[bytes, int | None]]:
    """Yield the text of a message and its descriptor, which is closed afterwards.

    Raises TimeoutError, and _Refusal for one that is too long, that ends early or that has several
    descriptors.
    """
    head, descriptors = reader.read_head()
    try:
        head += reader.read(_LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise _Refusal(
                "request_too_large", f"{length} bytes, at most {MAX_MESSAGE_BYTES}. Send less"
            )
        if len(descriptors) > 1:
            raise _Refusal("too_many_items", f"{len(descriptors)} descriptors came. Send one")
        yield reader.read(length), descriptors[0] if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check_memory(descriptor: int | None) -> tuple[str | None, int]:
    """Return the path and the size of a memory file; (None, 0) without one.

    Raises InvalidWeights for a file that can shrink: reading what is gone would end the engine.
    """
    if descriptor is None:
        return None, 0
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidWeights(
            "storages", "the memory may shrink", "Send a memory file with F_SEAL_SHRINK"
        )
    # The engine's process opens it there: it is of the same user.
    return f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_size


def _send_response(connection: socket.socket, response: dict[str, Any]) -> None:
    """Send the response, and read what is left of the message.

    The kernel resets a connection that is closed with unread bytes: the response could be lost.
    """
    text = json.dumps(response).encode()
    connection.settimeout(READ_TIMEOUT_S)  # of all that is sent
    connection.sendall(_LENGTH.pack(len(text)) + text)
    connection.shutdown(socket.SHUT_WR)
    deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
    while (timeout_s := deadline_s - time.monotonic()) > 0:
        connection.settimeout(timeout_s)
        if not connection.recv(2**16):
            return


def _stop_reading(connection: socket.socket) -> None:
    """End the reading of a connection, also one that another thread waits in."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def _file_id(path: str) -> tuple[int, int] | None:
    """Return what identifies the file at this path, or None where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
