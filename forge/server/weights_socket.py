"""WeightsSocket: updates of weights from the memory of trainers on this machine.

Owns a Unix socket, its thread, and the check of users. Knows no tensor: a message says where they
are, and the engine opens them. See forge.weights_client for the other side.

    trainer ── connect ──► same user? ── length, JSON, a descriptor ──► key? fields? ──┐
       ▲                    else closed                                                ▼
       └────────── {"status", "weight_version", "seconds"} or {"error"} ◄── AsyncLLM.update_weights

    message    8 bytes, big-endian: the length of the JSON that follows. With the first byte comes
               at most one descriptor (SCM_RIGHTS), of a memory file that cannot shrink
    response   the same, without a descriptor

Always true: one update at a time, and a message that is refused changes nothing. The file has mode
0600, and only processes of the server's user are read.
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
from forge.server.weights_message import parse_message
from forge.trainer_access import TrainerAccess
from forge.weights import SharedWeights

LOG = logging.getLogger("forge.server")

MAX_MESSAGE_BYTES = 16 * 2**20
READ_TIMEOUT_S = 10.0
"""Seconds in which a trainer must send something, and read something."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that the thread may take to end. An update takes a second for each few gigabytes."""
MAX_DESCRIPTORS = 4
"""Descriptors read with a message, of which one is used: others are closed."""

_LENGTH = struct.Struct(">Q")
_PEER = struct.Struct("3i")


class _Refusal(Exception):
    """A message that is refused: its code and what is wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WeightsSocket:
    """A listening socket, until `close`. Connections wait until `start`.

    peer_uid   returns the user of the other end of a connection
    """

    def __init__(
        self,
        path: str,
        admin_key: str,
        peer_uid: Callable[[socket.socket], int] | None = None,
    ) -> None:
        self._path = path
        self._admin_key = admin_key
        self._peer_uid = peer_uid or _peer_uid
        self._listener = _listen(path)
        self._thread: threading.Thread | None = None

    def start(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        """Serve connections on a thread. Updates run on the loop."""
        self._thread = threading.Thread(
            target=self._accept, args=(llm, loop), name="forge-weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, and remove the file. An update that runs is carried out."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self._path)

    def _accept(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError):  # the trainer has left
                connection.settimeout(READ_TIMEOUT_S)
                _respond(connection, self._serve(connection, llm, loop))

    def _serve(
        self, connection: socket.socket, llm: AsyncLLM, loop: asyncio.AbstractEventLoop
    ) -> dict[str, Any]:
        """Read a message and carry it out; return the response."""
        try:
            if self._peer_uid(connection) != os.getuid():
                raise _Refusal("wrong_user", "the socket is for processes of the server's user")
            with _receive(connection) as (text, descriptor):
                message = parse_message(text)
                if not hmac.compare_digest(message.key.encode(), self._admin_key.encode()):
                    raise _Refusal("invalid_api_key", "key: it is wrong. Send the admin key")
                weights = message.weights(*_check_memory(descriptor))
                return _update(llm, loop, weights, message.weight_version)
        except TimeoutError:
            refusal = _Refusal("request_timeout", f"nothing came for {READ_TIMEOUT_S:g} s")
        except _Refusal as error:
            refusal = error
        except InvalidWeights as error:
            refusal = _Refusal("invalid_weights", str(error))
        except EngineDead as error:
            refusal = _Refusal("engine_dead", str(error))
        except ForgeError as error:
            refusal = _Refusal("refused", str(error))
        except Exception:  # one message must not end the thread
            LOG.exception("an update of weights failed")
            refusal = _Refusal("internal_error", "the server failed. Its log has the reason")
        LOG.warning("an update of weights was refused: %s", refusal.code)
        return {"error": {"code": refusal.code, "message": str(refusal)}}


def open_weights_socket(path: str | None, access: TrainerAccess | None) -> WeightsSocket | None:
    """Return the socket at this path, or None without one. Raises InvalidConfig."""
    if path is None:
        return None
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


@contextmanager
def _receive(connection: socket.socket) -> Iterator[tuple[bytes, int | None]]:
    """Yield the text of a message and its descriptor, which is closed afterwards.

    Raises _Refusal for one that is too long, that ends early or that has several descriptors.
    """
    # Closed in processes that this one starts meanwhile.
    flags = socket.MSG_CMSG_CLOEXEC
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_DESCRIPTORS, flags)
    try:
        head += _read(connection, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise _Refusal(
                "request_too_large", f"{length} bytes, at most {MAX_MESSAGE_BYTES}. Send less"
            )
        if len(descriptors) > 1:
            raise _Refusal("too_many_items", f"{len(descriptors)} descriptors came. Send one")
        yield _read(connection, length), descriptors[0] if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises _Refusal where the message ends before."""
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 2**16))
        if not part:
            raise _Refusal("bad_framing", f"the message ends {count} bytes early. Send all of it")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


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


def _update(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, weights: SharedWeights, version: str | None
) -> dict[str, Any]:
    """Update the weights, and return the response. Raises ForgeError."""
    update = asyncio.run_coroutine_threadsafe(llm.update_weights(weights, version), loop)
    times = update.result()
    return {
        "status": "updated",
        "weight_version": llm.weight_version,
        "seconds": {name: round(seconds, 6) for name, seconds in times.items()},
    }


def _respond(connection: socket.socket, response: dict[str, Any]) -> None:
    """Send the response, and read what is left of the message.

    The kernel resets a connection that is closed with unread bytes: the response could be lost.
    """
    text = json.dumps(response).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    connection.shutdown(socket.SHUT_WR)
    deadline_s = time.monotonic() + READ_TIMEOUT_S
    while time.monotonic() < deadline_s and connection.recv(2**16):
        pass
