"""FileMoves: when a thread may use a host block, and which output answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import pytest

from forge.models.file_moves import MAX_DROPPED_MOVES, FileMoves
from forge.seam import FileAnswer, HostFile, Row, StepPlan

KEY = b"k" * 64


class LateExecutor(Executor):
    """Runs calls when `run` is called, in order."""

    def __init__(self) -> None:
        self.starts_threads = True
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, call: Callable[[], Any], *_: object) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self._calls.append((call, future))
        if not self.starts_threads:  # as ThreadPoolExecutor: the call stays queued
            raise RuntimeError("can't start new thread")
        return future

    def run(self) -> None:
        """Run the calls that were submitted."""
        for call, future in self._calls:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        self._calls.clear()


class WorldWriter(NamedTuple):
    """Writer of a host block, in place."""

    world: World
    host_block: int

    def write(self, piece: memoryview) -> bool:
        self.world.log.append("piece written")
        content = self.world.blocks[self.host_block]
        self.world.blocks[self.host_block] = content[len(piece) :] + bytes(piece)
        return True

    def complete(self) -> bool:
        self.world.log.append("block complete")
        return len(self.world.blocks[self.host_block]) == 4


class World:
    """Host blocks of four bytes, files, and a log of what was done to them."""

    def __init__(self) -> None:
        self.blocks = [bytes([i]) * 4 for i in range(4)]
        self.contents: dict[bytes, bytes] = {}
        self.log: list[str] = []
        self.executor = LateExecutor()
        self.after_piece: Callable[[], None] = lambda: None
        self.is_sound = True
        self.moves = FileMoves(self, self.executor)

    # The files.

    def write(self, key: bytes, content: bytes | memoryview) -> bool:
        self.log.append("file written")
        self.contents[key] = bytes(content)
        return True

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        self.log.append("file read")
        content = memoryview(self.contents.get(key, b""))
        if not content or not write(content[:2]):
            return False
        self.after_piece()
        return write(content[2:]) and self.is_sound

    # The host blocks, as a device has them: threads use them in place.

    def wait(self) -> None:
        self.log.append("earlier plans complete")

    def reader(self, host_block: int) -> Callable[[], bytes]:
        def read() -> bytes:
            self.log.append("block read")
            return self.blocks[host_block]

        return read

    def writer(self, host_block: int) -> WorldWriter:
        return WorldWriter(self, host_block)

    def begin(self, step: int, **fields: Any) -> StepPlan:
        """Begin a plan, and return it."""
        plan = StepPlan(step, fields.pop("rows", ()), 4, 4, num_host_blocks=4, **fields)
        self.moves.begin(plan, self)
        return plan


def test_a_thread_uses_a_host_block_after_earlier_plans_are_complete() -> None:
    world = World()
    spill = world.begin(0, spills=(HostFile(1, KEY),))
    world.executor.run()
    assert world.log == ["earlier plans complete", "block read", "file written"]
    assert world.moves.end(spill) == (FileAnswer(0, 1, is_good=True),)
    world.log.clear()
    fetch = world.begin(1, fetches=(HostFile(2, KEY),))
    world.executor.run()
    pieces = ["piece written", "piece written", "block complete"]
    assert world.log == ["earlier plans complete", "file read", *pieces]
    assert world.moves.end(fetch) == (FileAnswer(1, 2, is_good=True),)
    assert world.blocks[2] == world.blocks[1]


def test_a_spill_that_was_dropped_writes_no_file() -> None:
    """The plan that drops it stores something else to the host block before the thread reads it."""
    world = World()
    world.begin(0, spills=(HostFile(1, KEY),))
    world.begin(1, file_epoch=1)
    world.blocks[1] = b"else"
    world.executor.run()
    assert world.contents == {}


def test_a_fetch_that_was_dropped_leaves_its_host_block() -> None:
    world = World()
    world.contents[KEY] = b"file"
    world.begin(0, fetches=(HostFile(1, KEY),))
    world.begin(1, file_epoch=1)
    world.blocks[1] = b"else"
    world.executor.run()
    assert world.blocks[1] == b"else"


def test_a_fetch_that_is_dropped_between_two_pieces_leaves_its_host_block() -> None:
    """The plan that drops it stores to the host block while the thread reads the second piece."""
    world = World()
    world.contents[KEY] = b"file"
    world.begin(0, fetches=(HostFile(1, KEY),))

    def drop() -> None:
        assert world.blocks[1].endswith(b"fi"), "the first piece is in place"
        world.begin(1, file_epoch=1)
        world.blocks[1] = b"else"

    world.after_piece = drop
    world.executor.run()
    assert world.blocks[1] == b"else" and "block complete" not in world.log


def test_a_content_whose_second_piece_is_damaged_is_a_miss() -> None:
    """The host block has the first piece, and is not answered as good."""
    world = World()
    world.contents[KEY] = b"file"
    plan = world.begin(0, fetches=(HostFile(1, KEY),))

    def fail() -> None:
        raise OSError("the checksum of a piece is wrong")

    world.after_piece = fail
    world.executor.run()
    assert world.blocks[1].endswith(b"fi") and "block complete" not in world.log
    assert world.moves.end(plan) == (FileAnswer(0, 1, is_good=False),)


def test_what_a_store_takes_back_at_the_end_is_a_miss() -> None:
    world = World()
    world.contents[KEY], world.is_sound = b"file", False
    plan = world.begin(0, fetches=(HostFile(1, KEY),))
    world.executor.run()
    assert world.blocks[1] == b"file" and "block complete" not in world.log
    assert world.moves.end(plan) == (FileAnswer(0, 1, is_good=False),)


def test_a_dropped_move_is_not_answered_when_it_ends_before_the_drop() -> None:
    world = World()
    world.begin(0, spills=(HostFile(1, KEY),))
    world.executor.run()
    assert world.moves.end(world.begin(1, file_epoch=1)) == ()


def test_an_output_answers_no_move_of_a_later_plan() -> None:
    """With two plans in flight, the second starts before the output of the first is read."""
    world = World()
    first = world.begin(0, spills=(HostFile(1, KEY),))
    second = world.begin(1, spills=(HostFile(2, KEY),))
    world.executor.run()
    assert world.moves.end(first) == (FileAnswer(0, 1, is_good=True),)
    assert world.moves.end(second) == (FileAnswer(1, 2, is_good=True),)


@pytest.mark.parametrize(
    ("rows", "num_awaited"), [((), [2]), ((Row(0, 0, 0, 0, (1,)),), [])], ids=["none", "rows"]
)
def test_a_plan_without_rows_waits_for_its_fetches_unless_a_newer_plan_has_rows(
    rows: tuple[Row, ...], num_awaited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no spill, which only the disk needs, and for no fetch of the newer plan."""
    world, awaited = World(), []
    monkeypatch.setattr(
        "forge.models.file_moves.wait", lambda futures, _: awaited.append(len(futures))
    )
    files = [HostFile(host_block, bytes([host_block]) * 64) for host_block in range(4)]
    first = world.begin(0, spills=(files[0],), fetches=(files[1], files[2]))
    world.begin(1, rows=rows, fetches=(files[3],))
    assert world.moves.end(first) == ()
    assert awaited == num_awaited


def test_a_move_whose_thread_cannot_be_started_has_failed_and_does_nothing_later() -> None:
    """A thread of an earlier move may still run the call, once its host block has other content."""
    world = World()
    world.contents[KEY] = b"file"
    world.executor.starts_threads = False
    fetch, spill = HostFile(1, KEY), HostFile(2, b"s" * 64)
    plan = world.begin(0, fetches=(fetch,), spills=(spill,))
    answers = world.moves.end(plan)
    assert answers == (FileAnswer(0, 2, is_good=False), FileAnswer(0, 1, is_good=False))
    world.blocks[1] = world.blocks[2] = b"else"
    world.executor.run()
    assert world.blocks[1] == b"else" and world.contents == {KEY: b"file"}


def test_what_a_store_raises_is_a_move_that_failed() -> None:
    world = World()
    plan = world.begin(0, fetches=(HostFile(1, KEY),))
    world.contents = None  # type: ignore[assignment]  # reading raises
    world.executor.run()
    assert world.moves.end(plan) == (FileAnswer(0, 1, is_good=False),)


def test_dropped_moves_that_go_on_are_bounded_and_those_that_have_ended_do_not_count() -> None:
    """A disk that hangs must not fill memory: each move that goes on has a content."""
    world, epoch = World(), 0
    while epoch < MAX_DROPPED_MOVES:
        plan = world.begin(epoch, spills=(HostFile(1, KEY),), file_epoch=epoch)
        assert world.moves.end(plan) == (), "it goes on"
        epoch += 1
    failed = world.begin(epoch, spills=(HostFile(1, KEY),), file_epoch=epoch)
    assert world.moves.end(failed) == (FileAnswer(epoch, 1, is_good=False),)
    world.executor.run()
    assert world.log.count("file written") == 0, "all of them were dropped"
    again = world.begin(epoch + 1, spills=(HostFile(1, KEY),), file_epoch=epoch + 1)
    world.executor.run()
    assert world.moves.end(again) == (FileAnswer(epoch + 1, 1, is_good=True),)
