"""LingeringTransport: a transport that lets its client read the last response before it is closed.

Owns the end of a connection. Knows no HTTP. The kernel resets a connection that is closed while
bytes of its client are unread, and a reset can delete a response before the client reads it. So
such a connection ends in two steps (RFC 9112, 9.6).

    close() ─┬─ the client may send ──► no more is written; bytes are read and dropped
             │                            ├─ MAX_DRAIN_BYTES ──► nothing more is read
             │                            └─ DRAIN_S, or the client closes ──► closed
             └─ it does not ──────────► closed

Always true: after `close`, at most MAX_DRAIN_BYTES and one read are read, within DRAIN_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_DRAIN_BYTES = 64 * 2**10
"""Bytes of a request that are read after its response."""
DRAIN_S = 1.0
"""Seconds for which they are read."""


class LingeringTransport(asyncio.Transport):
    """The methods of a transport that uvicorn uses, with another `close`.

    client_sends   returns whether bytes of the client may be on their way
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        client_sends: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._client_sends = client_sends
        self._is_closing = False
        self._num_drained = 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection, after a while where the client may still send."""
        if self.is_closing():
            return
        self._is_closing = True
        if not self._client_sends():
            self.end()
            return
        self._timer = self._loop.call_later(DRAIN_S, self.end)
        with suppress(OSError):  # the client has reset the connection
            self._transport.write_eof()
        self._transport.resume_reading()

    def drain(self, num_bytes: int) -> None:
        """Count bytes that arrived after `close`; read no more where they are too many."""
        self._num_drained += num_bytes
        if self._num_drained >= MAX_DRAIN_BYTES:
            self._transport.pause_reading()

    def end(self) -> None:
        """Close the connection once all is written, without waiting for the client."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once; what is not written is lost."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be."""
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the bytes, unless the connection is closing."""
        if not self._is_closing:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        if not self._is_closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if not self._is_closing:
            self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the transport's information of this name, or the default."""
        return self._transport.get_extra_info(name, default)
