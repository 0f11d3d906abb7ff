"""Tests for forge.ranks.step_ring: every reader receives every message, in order and unchanged."""

from __future__ import annotations

import os
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import EngineDead
from forge.ranks.rank_context import create_memory_file, memory_file_path
from forge.ranks.step_ring import (
    LONG_SPIN_S,
    SPIN_S,
    RingMemory,
    RingReader,
    RingWriter,
    select_spin_s,
)

SLOT_BYTES = 16
NUM_SLOTS = 3
TIMEOUT_S = 60.0

messages_of_many_sizes = st.lists(st.binary(max_size=4 * SLOT_BYTES + 1), max_size=12)


@contextmanager
def ring(num_readers: int, spin_s: float = SPIN_S) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    """Yield both ends of a ring with small slots. The test closes the writer."""
    with ExitStack() as exit_stack:
        fd = create_memory_file("test-ring", NUM_SLOTS * SLOT_BYTES)
        exit_stack.callback(os.close, fd)
        memory = RingMemory(memory_file_path(fd), NUM_SLOTS, SLOT_BYTES)
        notices, acks = [Pipe(False) for _ in range(num_readers)], []
        readers = []
        for notice, _ in notices:
            acks_end, acks_start = Pipe(False)
            acks.append(acks_end)
            readers.append(RingReader(memory, notice, acks_start, spin_s))
        yield RingWriter(memory, [end for _, end in notices], acks), readers


@pytest.mark.parametrize(("num_readers", "spin_s"), [(1, SPIN_S), (3, 0.0), (3, LONG_SPIN_S)])
@given(messages=messages_of_many_sizes)
def test_every_reader_receives_every_message_in_order_and_then_the_end(
    num_readers: int, spin_s: float, messages: list[bytes]
) -> None:
    """Messages of 0 to 4 slots and a byte; the writer waits for readers in threads."""
    with ring(num_readers, spin_s) as (writer, readers):
        received: list[list[bytes]] = [[] for _ in readers]

        def read(reader: RingReader, messages: list[bytes]) -> None:
            while (message := reader.receive()) is not None:
                messages.append(message)

        threads = [
            threading.Thread(target=read, args=each) for each in zip(readers, received, strict=True)
        ]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.send([message])
        writer.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert received == [messages] * num_readers


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "spin_s"),
    [(2, 7, SPIN_S), (2, 8, LONG_SPIN_S), (4, 15, SPIN_S), (4, 16, LONG_SPIN_S)],
)
def test_ranks_poll_for_longer_where_each_has_four_cores(
    num_ranks: int, num_cores: int, spin_s: float
) -> None:
    assert select_spin_s(num_ranks, num_cores) == spin_s


@given(parts=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), max_size=4))
def test_buffers_of_a_message_lie_one_after_the_other(parts: list[list[int]]) -> None:
    with ring(1) as (writer, [reader]):
        writer.send([array("i", part) for part in parts[:1]])
        message = reader.receive()
        assert message is not None
        assert array("i", message).tolist() == [n for part in parts[:1] for n in part]
        writer.close()


def test_a_slot_is_not_written_again_before_the_slowest_reader_has_copied_it() -> None:
    """Three messages fill the ring. The fourth waits, though one of two readers has read all."""
    with ring(2) as (writer, [fast, slow]):
        for number in range(3):
            writer.send([bytes([number])])
        fourth = threading.Thread(target=writer.send, args=([b"\3"],))
        fourth.start()
        assert [fast.receive() for _ in range(3)] == [b"\0", b"\1", b"\2"]
        assert fourth.is_alive()
        assert [slow.receive() for _ in range(3)] == [b"\0", b"\1", b"\2"]
        fourth.join(TIMEOUT_S)
        assert not fourth.is_alive()
        assert (fast.receive(), slow.receive()) == (b"\3", b"\3")
        writer.close()


def test_a_reader_that_has_ended_is_an_error_of_the_writer() -> None:
    """Rank 2 is the second reader. Its pipes are closed, as the end of its process closes them."""
    with ring(2) as (writer, [_, reader]):
        reader.close()
        with pytest.raises(EngineDead, match="rank 2 has ended"):
            writer.send([b"x"])
        writer.close()


def test_a_writer_that_waits_for_a_reader_sees_its_end() -> None:
    with ring(1) as (writer, [reader]):
        errors = []

        def send_four() -> None:
            with pytest.raises(EngineDead, match="rank 1 has ended") as raised:
                for _ in range(4):
                    writer.send([b"x"])
            errors.append(raised.value)

        thread = threading.Thread(target=send_four)
        thread.start()
        reader.close()
        thread.join(TIMEOUT_S)
        assert len(errors) == 1
        writer.close()


def test_a_message_of_which_only_some_parts_arrived_is_dropped_when_the_writer_ends() -> None:
    """The first part is announced with 16 more bytes, which never come."""
    fd = create_memory_file("test-ring", NUM_SLOTS * SLOT_BYTES)
    (notices, notices_end), (acks_end, acks) = Pipe(False), Pipe(False)
    reader = RingReader(RingMemory(memory_file_path(fd), NUM_SLOTS, SLOT_BYTES), notices, acks)
    os.write(notices_end.fileno(), struct.pack("<QII", 0, SLOT_BYTES, SLOT_BYTES))
    notices_end.close()
    assert reader.receive() is None
    assert acks_end.poll()
    os.close(fd)
