"""BlockMoves on streams that run in any order that their events allow, without a GPU.

The host queues all plans of a run before the first operation is done. Then streams are advanced at
random: an operation may be done while anything that it does not wait for is not. What rows read,
and all blocks at the end, must be as if plans were done one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from forge.models.hf.block_moves import BlockMoves  # noqa: E402
from forge.models.hf.checked_moves import CheckedMoves  # noqa: E402
from forge.models.hf.kv_cache import KVCacheSpec  # noqa: E402
from forge.seam import HostLoad, HostStore, StepPlan  # noqa: E402
from tests.hf.test_block_moves import cache_of, pool_of  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
BLOCKS, HOST_BLOCKS, PLANS = 6, 4, 25


class Event:
    """Is done once the stream that it was recorded on has come to it."""

    def __init__(self, **_: bool) -> None:
        self.is_done = False

    def record(self) -> None:
        Device.current.queue.append((None, lambda: setattr(self, "is_done", True)))

    def wait(self) -> None:
        Device.current.wait_event(self)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class Stream:
    """Operations that are done in order: an event to wait for, or a call."""

    def __init__(self, *_: Any) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, lambda: None))

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


class Device(TorchDispatchMode):
    """Streams, and the one that operations are queued on while the context is open."""

    current: Stream

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.store, self.load = Stream(), Stream(), Stream()
        Device.current = self.compute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Queue what writes, and return the tensor it writes to; views are made at once."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in ("aten::copy_", "aten::index_copy_", "aten::index_select", "aten::fill_"):
            return func(*args, **kwargs)
        Device.current.queue.append((None, lambda: func(*args, **kwargs)))
        return kwargs.get("out", args[0])

    @staticmethod
    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        """Queue operations on a stream while the context is open."""
        before, Device.current = Device.current, stream
        yield
        Device.current = before

    def run(self, rng: Random) -> None:
        """Do all operations, streams advanced at random."""
        streams = [self.compute, self.store, self.load]
        weights = [rng.random() + 0.02 for _ in streams]
        while any(each.queue for each in streams):
            ready = [
                i
                for i, each in enumerate(streams)
                if each.queue and (each.queue[0][0] is None or each.queue[0][0].is_done)
            ]
            assert ready, "the streams wait for each other"
            [index] = rng.choices(ready, [weights[i] for i in ready])
            streams[index].queue.popleft()[1]()


class QueuedChecks(CheckedMoves):
    """CheckedMoves whose sums are operations of the stream on which they are queued.

    compared   whether each load of a plan is damaged, once the stream has come to it
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compared: list[Any] = []

    def _record(self, blocks: list[int], host_blocks: list[int]) -> None:
        record = super()._record
        Device.current.queue.append((None, lambda: record(blocks, host_blocks)))

    def _compare(self, loads: tuple[HostLoad, ...]) -> Any:
        compare, is_damaged = super()._compare, torch.ones(len(loads), dtype=torch.bool)
        Device.current.queue.append(
            (None, lambda: is_damaged.copy_(compare(loads).is_damaged)),
        )
        self.compared.append(is_damaged)
        return None


@pytest.mark.parametrize("seed", range(20))
def test_checks_in_any_order_that_the_events_allow_find_nothing_wrong(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum before its copy, or after that of the next plan, would be that of another content."""
    rng = Random(seed)
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), BLOCKS)
    pool = pool_of(cache, HOST_BLOCKS)
    moves, device = QueuedChecks(cache, pool), Device()
    cache.data.zero_()
    for host_block in range(HOST_BLOCKS):
        pool.block(host_block).zero_()
    inner = moves._moves
    inner._uses_streams = True
    inner._store_stream, inner._load_stream = device.store, device.load
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Device.use)
    with torch.inference_mode(), device:
        for step in range(PLANS):
            moved = rng.sample(range(BLOCKS), rng.randint(0, 4))
            pairs = list(zip(moved, rng.sample(range(HOST_BLOCKS), len(moved)), strict=True))
            num_stores = rng.randint(0, len(pairs))
            plan = StepPlan(
                step,
                (),
                BLOCKS,
                4,
                num_host_blocks=HOST_BLOCKS,
                stores=tuple(HostStore(*pair) for pair in pairs[:num_stores]),
                loads=tuple(HostLoad(0, 0, *pair) for pair in pairs[num_stores:]),
            )
            moves.begin(plan)
            for block in set(range(BLOCKS)) - set(moved):
                cache.data[:, block].fill_(float(100 * step + block))
            moves.queue(plan)
    with torch.inference_mode():
        device.run(rng)
    assert len(moves.compared) > 5
    assert not any(is_damaged.any() for is_damaged in moves.compared)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_that_the_events_allow_is_the_order_of_plans(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), BLOCKS)
    pool = pool_of(cache, HOST_BLOCKS)
    moves = BlockMoves(cache, pool, None, rng.choice((1, 2)) * cache.block_bytes)
    data = cache.data
    data.zero_()
    device = Device()
    moves._uses_streams = True
    moves._store_stream, moves._load_stream = device.store, device.load
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Device.use)
    found: list[float] = []
    expected: list[float] = []
    blocks, host_blocks = [0.0] * BLOCKS, [0.0] * HOST_BLOCKS
    for host_block in range(HOST_BLOCKS):
        pool.block(host_block).zero_()
    with torch.inference_mode(), device:
        for step in range(PLANS):
            moved = rng.sample(range(BLOCKS), rng.randint(0, 4))
            pairs = list(zip(moved, rng.sample(range(HOST_BLOCKS), len(moved)), strict=True))
            num_stores = rng.randint(0, len(pairs))
            stores, loads = pairs[:num_stores], pairs[num_stores:]
            plan = StepPlan(
                step,
                (),
                BLOCKS,
                4,
                num_host_blocks=HOST_BLOCKS,
                stores=tuple(HostStore(*pair) for pair in stores),
                loads=tuple(HostLoad(0, 0, *pair) for pair in loads),
            )
            moves.begin(plan)
            assert not moves._moved, "an event is waited for once"
            for block in set(range(BLOCKS)) - set(moved):
                if rng.random() < 0.5:
                    expected.append(blocks[block])
                    read = data[:, block]
                    device.compute.queue.append(
                        (None, lambda read=read: found.append(read.mean().item()))
                    )
                if rng.random() < 0.5:
                    blocks[block] = float(100 * step + block)
                    data[:, block].fill_(blocks[block])
            moves.queue(plan)
            before = list(blocks)
            for block, host_block in loads:
                blocks[block] = host_blocks[host_block]
            for block, host_block in stores:
                host_blocks[host_block] = before[block]
    with torch.inference_mode():
        device.run(rng)
    assert found == expected
    assert [data[:, block].unique().tolist() for block in range(BLOCKS)] == [[b] for b in blocks]
    found_host = [pool.block(h).view(torch.float32).unique().tolist() for h in range(HOST_BLOCKS)]
    assert found_host == [[number] for number in host_blocks]
