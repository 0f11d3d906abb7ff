"""ResponseEvents: the stream of a response; and ResponseRecorder, which stores it.

Owns when a response is stored, and its end before its output. Knows no tenant.

    the first delta      created, in_progress       stored in progress
    every delta          events of items
    the last             completed or incomplete    stored
    a cancel             incomplete                 stored as cancelled, the request is aborted
    a pause that aborts  incomplete                 stored as cancelled
    an error             failed                     stored
    the client left                                 stored as cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from forge.outputs import TextDelta
from forge.server.errors import APIError
from forge.server.responses_api.items import encode_items
from forge.server.responses_api.output import Event, ResponseOutput
from forge.server.responses_api.store import ResponseStore, StoredResponse
from forge.server.sse import comment_ping, encode_named_event
from forge.server.streaming import StreamEnded


class ResponseRecorder:
    """Stores one response, from its start or at its end.

    items   items of its conversation, encoded
    store   None: the response is not stored
    """

    def __init__(self, output: ResponseOutput, items: bytes, store: ResponseStore | None) -> None:
        self._output = output
        self._items = items
        self._store = store

    def record_start(self, cancel: Callable[[], None]) -> None:
        """Store a response in progress."""
        if self._store is not None:
            self._put(self._store, cancel)

    def record_end(self) -> None:
        """Store a response that has ended, unless it was deleted or dropped meanwhile."""
        if self._store is not None and self._store.get(self._output.id, _now_s()) is not None:
            self._put(self._store, None)

    def record_whole(self) -> None:
        """Store a response of which no client knew before."""
        if self._store is not None:
            self._put(self._store, None)

    def _put(self, store: ResponseStore, cancel: Callable[[], None] | None) -> None:
        response, now_s = self._output.encode().encode(), _now_s()
        output = encode_items(self._output.output())
        status = self._output.status
        stored = StoredResponse(response, self._items, output, status, now_s, cancel)
        store.put(self._output.id, stored, now_s)


class ResponseEvents:
    """StreamEncoder of a response.

    abort   ends the request in the engine; called where the response is cancelled by its id
    """

    def __init__(
        self, output: ResponseOutput, recorder: ResponseRecorder, abort: Callable[[], None]
    ) -> None:
        self._output = output
        self._recorder = recorder
        self._abort = abort
        self._has_started = False
        self._last_events: list[Event] = []

    def encode_ping(self) -> str:
        """Return a comment."""
        return comment_ping()

    def encode_delta(self, index: int, delta: TextDelta) -> Iterator[str]:
        """Yield the events of a delta. Raises StreamEnded where the response was cancelled.

        All are built before the first is sent, so that a cancel meanwhile comes after them. Raises
        APIError for a last delta that violates its schema, after the events of the start.
        """
        if self._output.status != "in_progress":
            raise StreamEnded
        events: list[Event] = []
        if not self._has_started:
            self._has_started = True
            self._recorder.record_start(self._cancel)
            events += self._output.start_events()
        violation = None
        try:
            events += self._output.delta_events(delta)
        except APIError as error:
            violation = error
        yield from map(_encode, events)
        if violation is not None:
            raise violation

    def encode_end(self) -> Iterable[str]:
        """Return the last events."""
        self._end(None, None)
        return map(_encode, self._last_events)

    def encode_error(self, error: APIError) -> Iterable[str]:
        """Return the last events of a response that fails."""
        self._end("failed", error)
        return map(_encode, self._last_events)

    def close(self) -> None:
        """End a response whose client has left as one that was cancelled."""
        if self._has_started:
            self._end("cancelled", None)

    def _cancel(self) -> None:
        self._end("cancelled", None)
        self._abort()  # the stream then gets a last delta, even in a pause of the engine

    def _end(self, status: str | None, error: APIError | None) -> None:
        """End and store the response, unless it has ended."""
        if self._output.status == "in_progress":
            self._last_events = list(self._output.end_events(status, error))
            self._recorder.record_end()


def _encode(event: Event) -> str:
    return encode_named_event(event.kind, event.data)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
