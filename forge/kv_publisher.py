"""KVEventPublisher: an engine's KV events on a socket, numbered, without a wait in any step.

Owns the queue between the engine's thread and the socket's, the numbers, and the messages that can
be sent again. Knows no cache and no scheduler. ZeroMQ drops messages of a subscriber that reads too
slowly, so no subscriber delays another one, or the engine.

    engine.step()                     thread forge-kv-events            thread forge-kv-replay
    publisher(events) ──► queue ──► encode ──► PUB ──► subscribers        ROUTER ◄─► late ones
      number 7            at most     │                                      │
      full: dropped       1000        └──► last messages, up to 64 MiB ◄─────┘

Always true: what a subscriber has folded is a part of what the cache held when the last message was
made, whatever was lost on the way. A batch that is dropped keeps its number, so the gap is visible,
and the next batch begins with AllBlocksCleared. The first batch does too: a subscriber may have
followed an engine that is gone.

The messages are vLLM's (vllm/distributed/kv_events.py): topic, number and batch; a request for a
replay is a number, answered by (number, batch) from there on and by (-1, b"").
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.failure_log import FailureLog
from forge.kv_event_options import KVEventOptions
from forge.kv_event_wire import batch_encoder, message, named_batch
from forge.kv_events import AllBlocksCleared, KVEvent

LOG = logging.getLogger("forge.kv_events")

MAX_QUEUED_BATCHES = 1000
"""Batches that wait for the socket's thread: seconds of steps."""
MAX_UNREAD_MESSAGES = 10_000
"""Messages that ZeroMQ keeps for a subscriber that reads slowly; more are lost for it."""
MAX_REPLAY_MESSAGES = 10_000
MAX_REPLAY_BYTES = 64 * 2**20
"""Most bytes of the messages that can be sent again."""
POLL_INTERVAL_MS = 100
"""Milliseconds after which the thread of replays sees that the publisher is closed."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that batches in the queue may take to be sent when the publisher closes."""
REPLAY_END = (-1).to_bytes(8, "big", signed=True)


class KVEventCounts(NamedTuple):
    """Batches of KV events since the publisher was made.

    num_published   handed to the socket
    num_dropped     found the queue full, or could not be sent; the number of each is missing in
                    the messages
    """

    num_published: int = 0
    num_dropped: int = 0


NO_KV_EVENTS = KVEventCounts()


class _NumberedBatch(NamedTuple):
    """Events of a step.

    follows_gap   the batch before was dropped, or there is none
    """

    number: int
    time_s: float
    events: Sequence[KVEvent]
    follows_gap: bool


class ReplayBuffer:
    """The latest messages, up to `max_messages` and `max_bytes`. Any thread may call it."""

    def __init__(
        self, max_messages: int = MAX_REPLAY_MESSAGES, max_bytes: int = MAX_REPLAY_BYTES
    ) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._messages: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def append(self, number: int, payload: bytes) -> None:
        """Keep the message, and forget the oldest ones that exceed a limit."""
        with self._lock:
            self._messages.append((number, payload))
            self._num_bytes += len(payload)
            while self._num_bytes > self._max_bytes or len(self._messages) > self._max_messages:
                self._num_bytes -= len(self._messages.popleft()[1])

    def messages_from(self, first_number: int) -> list[tuple[int, bytes]]:
        """Return the messages that are kept, from the one of this number on."""
        with self._lock:
            return [each for each in self._messages if each[0] >= first_number]


class KVEventPublisher:
    """A sink of KV events that sends them to subscribers. One thread calls it; see `Engine`.

    endpoint          address on which it publishes, with its port
    replay_endpoint   address of replays, or None
    """

    def __init__(
        self, options: KVEventOptions, max_queued_batches: int = MAX_QUEUED_BATCHES
    ) -> None:
        assert options.kv_events is not None, "no address to publish on"
        self._encode = batch_encoder()
        zmq = _import_zmq()
        self._topic = options.kv_events_topic.encode()
        self._max_queued_batches = max_queued_batches
        self._queue: SimpleQueue[_NumberedBatch | None] = SimpleQueue()
        self._next_number = 0
        self._follows_gap = True
        self._num_dropped = 0  # written by the engine's thread
        self._num_published = self._num_failed = 0  # written by the socket's thread
        self._closing = threading.Event()
        self._context = zmq.Context()
        try:
            self._publish_socket, self.endpoint = _bind(
                self._context, zmq.PUB, MAX_UNREAD_MESSAGES, "kv_events", options.kv_events
            )
            self.replay_endpoint = None
            self._threads = [threading.Thread(target=self._publish, name="forge-kv-events")]
            if options.kv_events_replay is not None:
                self._buffer = ReplayBuffer()
                # Room for all messages of a replay, and its end, for a client that does not read.
                socket, self.replay_endpoint = _bind(
                    self._context,
                    zmq.ROUTER,
                    MAX_REPLAY_MESSAGES + 1,
                    "kv_events_replay",
                    options.kv_events_replay,
                )
                thread = threading.Thread(
                    target=self._serve_replays, args=(socket,), name="forge-kv-replay"
                )
                self._threads.append(thread)
            else:
                self._buffer = ReplayBuffer(0)
        except InvalidConfig:
            self._context.destroy(linger=0)
            raise
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def counts(self) -> KVEventCounts:
        """Return the batches so far. Any thread may read them."""
        return KVEventCounts(self._num_published, self._num_dropped + self._num_failed)

    def __call__(self, events: Sequence[KVEvent]) -> None:
        """Queue the events of a step, or drop them where the queue is full. Does not block."""
        number = self._next_number
        self._next_number += 1
        if self._queue.qsize() >= self._max_queued_batches:
            self._num_dropped += 1
            self._follows_gap = True
            return
        self._queue.put(_NumberedBatch(number, time.time(), events, self._follows_gap))
        self._follows_gap = False

    def close(self) -> None:
        """Send what is queued, for at most `CLOSE_TIMEOUT_S`, and close the sockets."""
        self._closing.set()
        self._queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=0)

    def _publish(self) -> None:
        """Encode and send batches until the publisher closes. Only this thread uses the socket."""
        has_failed = False
        failures = FailureLog(
            LOG, "a batch of KV events is lost", "Subscribers find its number missing"
        )
        while (batch := self._queue.get()) is not None:
            number, time_s, events, follows_gap = batch
            try:
                if follows_gap or has_failed:
                    events = [AllBlocksCleared(), *events]
                payload = self._encode(named_batch(events, time_s))
                self._publish_socket.send_multipart(message(number, payload, self._topic))
                self._buffer.append(number, payload)
                self._num_published += 1
                has_failed = False
                failures.succeed()
            except Exception as error:  # without this thread the queue would fill
                failures.fail(error)
                self._num_failed += 1
                has_failed = True
        self._publish_socket.close(linger=int(1000 * CLOSE_TIMEOUT_S))

    def _serve_replays(self, socket: Any) -> None:
        """Answer requests for replays until the publisher closes."""
        while not self._closing.is_set():
            if socket.poll(POLL_INTERVAL_MS):
                with suppress(Exception):  # a client that left, or sent no number
                    client, delimiter, first_number = socket.recv_multipart()
                    if delimiter or len(first_number) != 8:
                        continue
                    for number, payload in self._buffer.messages_from(
                        int.from_bytes(first_number, "big")
                    ):
                        socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
                    socket.send_multipart((client, b"", REPLAY_END, b""))
        socket.close(linger=0)


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise InvalidConfig(
            "kv_events",
            "the package pyzmq is not installed",
            "pip install pyzmq",
        ) from None
    return zmq


def _bind(
    context: Any, socket_type: int, max_messages: int, name: str, endpoint: str
) -> tuple[Any, str]:
    """Return a socket that listens there, and its address. Raises InvalidConfig."""
    zmq = _import_zmq()
    socket = context.socket(socket_type)
    socket.set_hwm(max_messages)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise InvalidConfig(
            name, f"cannot listen on {endpoint}: {error.strerror}", "Give another address"
        ) from None
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
