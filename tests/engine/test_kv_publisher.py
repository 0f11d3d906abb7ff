"""Published KV events: what a subscriber folds is what the cache holds, and no step waits for one.

The subscriber reads vLLM's wire form with its own few lines, and shares no code with the publisher.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest

from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.kv_event_options import KVEventOptions
from forge.kv_events import DEVICE, DISK, HOST, BlockRemoved, BlockStored, KVEvent, KVEventSink
from forge.kv_publisher import KVEventCounts, KVEventPublisher, ReplayBuffer
from forge.llm import LLM
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.request import Delta
from forge.seam import StepPlan
from tests.core.host_worlds import draw_host_world
from tests.core.worlds import (
    RandomWorld,
    RecordingModel,
    arbitrary_policy,
    build_engine,
    draw_world,
    run_world,
)

pytest.importorskip("msgspec", reason="the wire form needs msgspec")
zmq: Any = pytest.importorskip("zmq", reason="the socket needs pyzmq")
msgpack: Any = pytest.importorskip("msgspec.msgpack")

TIMEOUT_S = 60.0
WIRE_MEDIA = {"GPU": DEVICE, "CPU": HOST, "DISK": DISK}
ANY_PORT = "tcp://127.0.0.1:*"
A, B = b"a" * 64, b"b" * 64
STORED_A = BlockStored((A,), None, (1, 2), 2, DEVICE)

Content = dict[str, frozenset[int]]
NOTHING: Content = {medium: frozenset() for medium in WIRE_MEDIA.values()}


def await_published(publisher: KVEventPublisher, count: int) -> None:
    """Wait until the thread of the socket has sent or lost so many batches."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while sum(publisher.counts) < count:
        assert time.monotonic() < deadline_s, "the thread of the socket stands still"
        threading.Event().wait(0.001)


class Subscriber:
    """Folds the messages of a publisher in the order of their numbers.

    folds   content after each message, by its number
    """

    def __init__(self, publisher: KVEventPublisher, topic: bytes = b"", hwm: int = 0) -> None:
        self._publisher = publisher
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(hwm)
        self._live.subscribe(topic)
        self._live.connect(publisher.endpoint)
        if publisher.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.connect(publisher.replay_endpoint)
        self.folds: dict[int, Content] = {}
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self._content = NOTHING

    def close(self) -> None:
        self._context.destroy(linger=0)

    def await_live(self, publisher: KVEventPublisher) -> int:
        """Publish empty batches until one arrives; return the number of the next batch."""
        deadline_s = time.monotonic() + TIMEOUT_S
        number = 0
        while not self._live.poll(10):
            assert time.monotonic() < deadline_s, "the subscription does not arrive"
            publisher([])
            number += 1
        return number

    def read(self, timeout_s: float = TIMEOUT_S) -> int | None:
        """Fold the next live message and return its number; None if none comes."""
        if not self._live.poll(int(1000 * timeout_s)):
            return None
        _, number, payload = self._live.recv_multipart()
        return self._fold(int.from_bytes(number, "big"), payload)

    def read_until(self, last_number: int) -> None:
        """Fold live messages up to the one of this number."""
        while last_number not in self.folds:
            assert self.read() is not None, f"message {last_number} does not come"

    def replay(self, first_number: int) -> list[int]:
        """Fold the messages from this number on that the publisher still has.

        Its thread first makes those of all calls so far: a replay does not wait for it.
        """
        await_published(self._publisher, self._publisher._next_number)
        self._replay.send_multipart((b"", first_number.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self._replay.poll(int(1000 * TIMEOUT_S)), "the replay does not end"
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return numbers
            numbers.append(self._fold(int.from_bytes(number, "big"), payload))

    def _fold(self, number: int, payload: bytes) -> int:
        time_s, events, rank = msgpack.decode(payload)
        assert time_s > 1.7e9 and rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._content = NOTHING
                continue
            medium, hashes = WIRE_MEDIA[event["medium"]], frozenset(event["block_hashes"])
            if event["type"] == "BlockStored":
                size = event["block_size"] * len(hashes)
                assert len(event["token_ids"]) == (size if medium == DEVICE else 0)
                held = self._content[medium] | hashes
            else:
                held = self._content[medium] - hashes
            self._content = {**self._content, medium: held}
        self.folds[number] = self._content
        self.batches[number] = events
        return number


@contextmanager
def publish(
    max_queued_batches: int = 1000, is_replaying: bool = True, **options: Any
) -> Iterator[KVEventPublisher]:
    """Open a publisher on free ports of the loopback address."""
    replay = {"kv_events_replay": ANY_PORT} if is_replaying else {}
    publisher = KVEventPublisher(
        KVEventOptions(kv_events=ANY_PORT, **replay, **options), max_queued_batches
    )
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribe(
    publisher: KVEventPublisher, topic: bytes = b"", hwm: int = 0
) -> Iterator[Subscriber]:
    subscriber = Subscriber(publisher, topic, hwm)
    try:
        yield subscriber
    finally:
        subscriber.close()


class ObservedEngine(Engine):
    """An engine that notes what its caches hold after each call that published something."""

    def step(self) -> list[Delta]:
        deltas = super().step()
        self._note()
        return deltas

    def resize(self, num_blocks: int | None = None, num_host_blocks: int | None = None) -> None:
        super().resize(num_blocks, num_host_blocks)
        self._note()

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._note()

    def _note(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        device = {pool.hash_of(block) for block in range(pool.num_blocks)} - {None}
        held = {
            DEVICE: device,
            HOST: set(scheduler.host_cache._block_by_hash),
            DISK: set(scheduler.disk_cache._keys),
        }
        self.contents[self.sink.next_number - 1] = {
            medium: frozenset(int.from_bytes(each[-8:], "big") for each in hashes if each)
            for medium, hashes in held.items()
        }

    contents: dict[int, Content]
    sink: CountingSink


class CountingSink:
    """Hands events to a publisher. `next_number` is the number that their batch gets."""

    def __init__(self, sink: KVEventSink, next_number: int) -> None:
        self.next_number = next_number
        self._sink = sink

    def __call__(self, events: Sequence[KVEvent]) -> None:
        self.next_number += 1
        self._sink(events)


def run_observed(world: RandomWorld, sink: CountingSink) -> dict[int, Content]:
    """Run the world, and return what its caches held when each batch was published."""
    contents: dict[int, Content] = {}

    def create(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, plain = build_engine(world)
        policy = POLICIES.get(world.policy) or arbitrary_policy(Random(world.seed))
        engine = ObservedEngine(recorder, world.config, plain.tokenizer, policy, kv_events=sink)
        engine.contents, engine.sink = contents, sink
        return model, recorder, engine

    run_world(world, create=create)
    return contents


def is_part_of(part: Content, whole: Content) -> bool:
    return all(part[medium] <= whole[medium] for medium in whole)


# The content of the cache.


@pytest.mark.parametrize("draw", [draw_world, draw_host_world], ids=["device", "tiers"])
def test_a_subscriber_folds_the_content_of_every_medium_at_every_message(draw: Any) -> None:
    """In worlds with resets, resizes, failed steps, tiers, sessions, salts and drafts."""
    reached: Counter[str] = Counter()
    for seed in (*range(5), 37, 45):  # the last two forget files
        with publish() as publisher, subscribe(publisher) as subscriber:
            first = subscriber.await_live(publisher)
            contents = run_observed(draw(seed), sink := CountingSink(publisher, first))
            subscriber.read_until(sink.next_number - 1)
        numbers = [number for number in subscriber.folds if number >= first]
        assert numbers == list(range(first, sink.next_number)), "a number is missing"
        contents.pop(first - 1, None)  # calls before the first batch
        assert {number: subscriber.folds[number] for number in contents} == contents
        for number in numbers:
            for event in subscriber.batches[number]:
                reached[f"{event['type']} {event.get('medium')}"] += 1
    media = ["GPU", "CPU", "DISK"] if draw is draw_host_world else ["GPU"]
    expected = [f"{what} {medium}" for medium in media for what in ("BlockStored", "BlockRemoved")]
    assert [name for name in expected if not reached[name]] == []


def test_a_late_subscriber_gets_what_it_missed_from_the_replay_and_goes_on_live() -> None:
    with publish() as publisher:
        contents = run_observed(draw_host_world(5), sink := CountingSink(publisher, 0))
        with subscribe(publisher) as subscriber:
            subscriber.await_live(publisher)
            missed = subscriber.replay(0)
            assert missed[: sink.next_number] == list(range(sink.next_number))
            contents.pop(-1, None)
            assert len(contents) > 10
            assert {number: subscriber.folds[number] for number in contents} == contents


def test_the_first_batch_clears_what_a_subscriber_holds_of_an_engine_before() -> None:
    with publish() as publisher, subscribe(publisher) as subscriber:
        publisher([STORED_A])
        publisher([BlockRemoved((A,), DEVICE)])
        subscriber.replay(0)
    types = [[event["type"] for event in batch] for batch in subscriber.batches.values()]
    assert types == [["AllBlocksCleared", "BlockStored"], ["BlockRemoved"]]


# Batches that are dropped.


class StallingBatch(list[KVEvent]):
    """Events whose reader waits until the gate is open: the thread of the socket stalls there."""

    def __init__(self, events: Sequence[KVEvent], gate: threading.Event) -> None:
        super().__init__(events)
        self._gate = gate

    def __iter__(self) -> Iterator[KVEvent]:
        assert self._gate.wait(TIMEOUT_S)
        return super().__iter__()


def test_while_the_socket_stalls_calls_return_and_dropped_batches_leave_a_gap() -> None:
    """The queue has room for two. The batch after the gap clears what came before it."""
    gate = threading.Event()
    with publish(max_queued_batches=2) as publisher, subscribe(publisher) as subscriber:
        publisher([STORED_A])
        await_published(publisher, 1)
        publisher(StallingBatch([], gate))  # 1
        while publisher._queue.qsize():
            threading.Event().wait(0.001)
        for _ in range(5):  # two are queued, 2 and 3; 4, 5 and 6 are dropped
            publisher([])
        assert publisher.counts == KVEventCounts(num_published=1, num_dropped=3)
        gate.set()
        await_published(publisher, 7)
        publisher([BlockStored((B,), A, (3, 4), 2, DEVICE)])
        await_published(publisher, 8)
        assert subscriber.replay(0) == [0, 1, 2, 3, 7]
    assert subscriber.folds[3][DEVICE] == {int.from_bytes(A[-8:], "big")}
    assert subscriber.folds[7][DEVICE] == {int.from_bytes(B[-8:], "big")}


def test_what_is_folded_after_drops_is_always_a_part_of_the_cache() -> None:
    """The socket stalls for five calls of eight, and its queue has room for two batches."""
    reached: Counter[str] = Counter()
    for seed in range(6):
        gate = threading.Event()
        num_calls = 0
        with publish(max_queued_batches=2) as publisher, subscribe(publisher) as subscriber:

            def stall(
                events: Sequence[KVEvent],
                publisher: KVEventPublisher = publisher,
                gate: threading.Event = gate,
            ) -> None:
                nonlocal num_calls
                num_calls += 1
                if num_calls % 8 < 5:
                    gate.clear()
                publisher(StallingBatch(events, gate))
                if num_calls % 8 >= 5:
                    gate.set()
                    await_published(publisher, num_calls)

            contents = run_observed(draw_host_world(seed), CountingSink(stall, 0))
            gate.set()
            await_published(publisher, num_calls)
            reached["dropped"] += publisher.counts.num_dropped
            subscriber.replay(0)
        for number, fold in subscriber.folds.items():
            assert number not in contents or is_part_of(fold, contents[number])
            reached["held"] += any(fold.values())
    assert reached["dropped"] > 20 and reached["held"] > 20


def test_a_batch_that_cannot_be_sent_is_counted_and_the_next_one_clears(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with publish() as publisher, subscribe(publisher) as subscriber:
        publisher([STORED_A])
        publisher([None])  # type: ignore[list-item]
        publisher([BlockStored((B,), A, (3, 4), 2, DEVICE)])
        await_published(publisher, 3)
        assert publisher.counts == KVEventCounts(num_published=2, num_dropped=1)
        assert subscriber.replay(0) == [0, 2]
    assert subscriber.folds[2][DEVICE] == {int.from_bytes(B[-8:], "big")}
    assert [record.getMessage() for record in caplog.records] == [
        "a batch of KV events is lost: None is no event of a cache. "
        "Subscribers find its number missing"
    ]


# Subscribers that read slowly.


@pytest.mark.long
def test_a_subscriber_that_does_not_read_delays_no_other_and_finds_the_gap_later() -> None:
    """30,000 messages of a kilobyte are more than the sockets of the slow one hold."""
    count = 30_000
    events = [BlockStored((A,), None, tuple(range(300)), 300, DEVICE)]
    with ExitStack() as stack:
        publisher = stack.enter_context(publish(max_queued_batches=count))
        slow, fast = (stack.enter_context(subscribe(publisher, hwm=hwm)) for hwm in (10, 0))
        first = max(each.await_live(publisher) for each in (slow, fast))
        for _ in range(count):
            publisher(events)
        await_published(publisher, first + count)
        assert publisher.counts.num_dropped == 0
        numbers = []
        while (number := slow.read(1.0)) is not None:
            numbers.append(number)
        num_published = publisher.counts.num_published
        assert numbers != list(range(numbers[0], num_published)), "nothing was lost"
        assert slow.replay(num_published - 1000) == list(range(num_published))[-1000:]


# The protocol.


def test_a_replay_begins_at_the_number_that_is_asked_for() -> None:
    with publish() as publisher, subscribe(publisher) as subscriber:
        for _ in range(5):
            publisher([])
        await_published(publisher, 5)
        assert subscriber.replay(3) == [3, 4]
        assert subscriber.replay(5) == []
        assert subscriber.replay(2**63 - 1) == []


def test_a_request_that_is_no_number_gets_no_reply_and_the_next_one_does() -> None:
    with publish() as publisher, subscribe(publisher) as subscriber:
        publisher([])
        await_published(publisher, 1)
        for parts in ((b"",), (b"", b"x"), (b"x", bytes(8)), (b"", bytes(8), b"")):
            subscriber._replay.send_multipart(parts)
        assert subscriber.replay(0) == [0]


def test_subscribers_choose_by_topic() -> None:
    with publish(kv_events_topic="kv@pod@model") as publisher:
        with subscribe(publisher, b"kv@") as chosen, subscribe(publisher, b"other") as other:
            chosen.await_live(publisher)
            assert chosen.read() is not None
            assert other.read(0.0) is None


def test_messages_are_sent_before_the_publisher_closes() -> None:
    with publish() as publisher, subscribe(publisher) as subscriber:
        first = subscriber.await_live(publisher)
        for _ in range(500):
            publisher([STORED_A])
        publisher.close()
        subscriber.read_until(first + 499)
        await_published(publisher, first + 500)  # the count follows the message
    assert publisher.counts == (first + 500, 0)


def test_without_a_replay_address_nothing_is_kept() -> None:
    with publish(is_replaying=False) as publisher:
        assert publisher.replay_endpoint is None
        publisher([])
        await_published(publisher, 1)
        assert publisher._buffer.messages_from(0) == []


def test_the_oldest_messages_beyond_either_limit_are_forgotten() -> None:
    buffer = ReplayBuffer(max_messages=3, max_bytes=10)
    for number, size in enumerate((1, 1, 1, 1)):
        buffer.append(number, bytes(size))
    assert [number for number, _ in buffer.messages_from(0)] == [1, 2, 3]
    buffer.append(4, bytes(9))
    assert [number for number, _ in buffer.messages_from(0)] == [3, 4]
    buffer.append(5, bytes(11))
    assert buffer.messages_from(0) == []


def test_an_address_in_use_is_refused_by_the_name_of_its_option() -> None:
    with publish() as publisher:
        for name, other in (("kv_events", {}), ("kv_events_replay", {"kv_events": ANY_PORT})):
            options = KVEventOptions(**{**other, name: publisher.endpoint})
            with pytest.raises(InvalidConfig, match=f"^{name}: .*in use"):
                KVEventPublisher(options)


# Options.


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5557", "tcp://127.9.9.9:1", "tcp://[::1]:65535", "tcp://localhost:5557",
        "tcp://127.0.0.1:*", "ipc:///run/forge/kv.sock",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_need_no_word(endpoint: str) -> None:
    assert KVEventOptions(kv_events=endpoint).kv_events == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.0.0.1:5557",
        "tcp://gpu-7:5557", "tcp://localhost.example:5557", "tcp://eth0:5557", "tcp://127.1:5557",
        "tcp://[::ffff:8.8.8.8]:5557",
    ],
)  # fmt: skip
def test_addresses_of_other_machines_need_the_word(endpoint: str) -> None:
    for fields in ({"kv_events": endpoint}, {"kv_events": ANY_PORT, "kv_events_replay": endpoint}):
        with pytest.raises(InvalidConfig, match=r"other machines can reach .* tokens of prompts"):
            KVEventOptions(**fields)
        KVEventOptions(**fields, kv_events_public=True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000", "", 5557,
        "http://127.0.0.1:5557", "inproc://kv", "ipc://kv", "tcp://127.0.0.1;0.0.0.0:5557",
        "tcp://127.0.0.1:5557 ", "tcp://user@127.0.0.1:5557", "ipc:///a b", "tcp://::1:5557",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(endpoint: Any) -> None:
    with pytest.raises(InvalidConfig, match="is not tcp://ADDRESS:PORT or ipc:///PATH"):
        KVEventOptions(kv_events=endpoint, kv_events_public=True)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kv_events_replay": ANY_PORT}, "kv_events_replay: no events are published"),
        ({"kv_events_topic": "kv@"}, "kv_events_topic: no events are published"),
        ({"kv_events_public": True}, "kv_events_public: no events are published"),
        ({"kv_events": ANY_PORT, "kv_events_public": 1}, "kv_events_public: 1 is no boolean"),
        ({"kv_events": ANY_PORT, "kv_events_topic": "é" * 129}, "kv_events_topic: .* 256 bytes"),
        ({"kv_events": ANY_PORT, "kv_events_topic": 5}, "kv_events_topic: '5' is no text"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{error}"):
        KVEventOptions(**fields)


def test_an_engine_without_prefix_caching_publishes_nothing() -> None:
    with pytest.raises(InvalidConfig, match=r"^kv_events: .*enable_prefix_caching is False"):
        LLM("hash", kv_events=ANY_PORT, enable_prefix_caching=False)


# An engine's steps.


def test_an_engine_makes_the_same_plans_with_and_without_a_publisher() -> None:
    plans: list[list[StepPlan]] = []
    with publish() as publisher:
        for sink in (None, publisher):
            world = draw_host_world(5)
            model, recorder, plain = build_engine(world)
            policy = POLICIES.get(world.policy) or arbitrary_policy(Random(world.seed))

            def create(
                world: RandomWorld,
                parts: Any = (model, recorder, plain, policy),
                sink: KVEventSink | None = sink,
            ) -> tuple[HashModel, RecordingModel, Engine]:
                model, recorder, plain, policy = parts
                engine = Engine(recorder, world.config, plain.tokenizer, policy, kv_events=sink)
                return model, recorder, engine

            run_world(world, create=create)
            plans.append([each for each in recorder.log if isinstance(each, StepPlan)])
    assert plans[0] == plans[1] and len(plans[0]) > 10
    assert publisher.counts.num_published > 0
