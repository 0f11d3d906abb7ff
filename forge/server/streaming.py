"""GeneratedStream: what the engine generates for one HTTP request, as server-sent events.

Owns the order of a stream: deltas, the end, an error, a client that leaves. Knows no event's data:
a StreamEncoder has that.

    deltas ──► encode_delta ──► events ...
    nothing for a while ──► encode_ping
    after the last delta ──► encode_end ──► events, and the response ends
    an error, after the first event ──► encode_error ──► events, and the response ends
    any of these, or the client left ──► close

Always true: an error before the first event is raised, so that it gets its own status.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.outputs import TextDelta
from forge.request import Request
from forge.server import generation
from forge.server.admission import AdmissionQueue
from forge.server.errors import APIError, ClientDisconnected
from forge.server.sse import EventStream
from forge.server.time_slicing import ENTRIES_PER_SLICE, MIN_ENTRY_BYTES, SliceBudget, num_entries


class StreamEncoder(Protocol):
    """Writes the events of one stream, each with its line breaks."""

    def encode_ping(self) -> str:
        """Return what a silent stream sends."""

    def encode_delta(self, index: int, delta: TextDelta) -> Iterable[str]:
        """Return the events for a delta of the request at this index.

        Raises StreamEnded, and APIError for a delta that no event can show.
        """

    def encode_end(self) -> Iterable[str]:
        """Return the last events of a stream that was not cut."""

    def encode_error(self, error: APIError) -> Iterable[str]:
        """Return the last events of a stream that fails."""

    def close(self) -> None:
        """Called once at the end of each stream, also where the client has left."""


class StreamEnded(Exception):
    """The stream ends before its output: the requests are aborted and `encode_end` follows."""


class GeneratedStream(Response):
    """A response whose events an encoder makes of the engine's deltas."""

    def __init__(
        self,
        queue: AdmissionQueue,
        requests: Sequence[Request],
        http_request_id: str,
        encoder: StreamEncoder,
    ) -> None:
        self._queue = queue
        self._requests = requests
        self._http_request_id = http_request_id
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event, unless the client leaves. Raises APIError before the first event."""
        events = EventStream(send, self._queue.limits.ping_interval, self._encoder.encode_ping)
        try:
            # Deltas wait in memory while the client does not read.
            count = generation.count_many_logprobs(self._queue.llm, self._requests)
            with self._queue.admit_logprobs(count):
                await generation.run_until_disconnect(
                    receive, events.run_with_pings(self._write(events))
                )
        except ClientDisconnected:
            return
        except APIError as error:
            if not events.started:
                raise
            for event in self._encoder.encode_error(error):
                await events.send(event)
            await events.end()
        finally:
            self._encoder.close()

    async def _write(self, events: EventStream) -> None:
        encoder, budget = self._encoder, SliceBudget()

        async def send_delta(index: int, delta: TextDelta) -> None:
            for event in encoder.encode_delta(index, delta):
                await events.send(event)
                await budget.spend(len(event) // MIN_ENTRY_BYTES)
            await budget.spend(1 + num_entries(delta.token_ids, delta.logprobs))
            if delta.finish_reason is not None:  # a choice may be compared with its schema there
                await budget.spend(ENTRIES_PER_SLICE)

        try:
            await generation.run_requests(
                self._queue, self._requests, send_delta, self._http_request_id
            )
        except StreamEnded:
            pass
        for event in encoder.encode_end():
            await events.send(event)
        await events.end()
