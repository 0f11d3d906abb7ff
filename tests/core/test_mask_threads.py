"""Threads that compute masks: those of one lexer in one order, and none before it is written."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from forge.mask_threads import MaskThreads, divide, num_mask_threads

TIMEOUT_S = 20.0


@pytest.mark.parametrize("lexers", ["ab", "abc", "abcdefg", "a"])
def test_the_masks_of_a_lexer_stay_together_and_in_order(lexers: str) -> None:
    drawn = [lexers[i * i % len(lexers)] for i in range(40)]
    shares = divide(drawn, 3)
    assert sorted(index for share in shares for index in share) == list(range(40))
    for lexer in set(drawn):
        expected = [index for index, each in enumerate(drawn) if each == lexer]
        found = [[index for index in share if drawn[index] == lexer] for share in shares]
        assert [each for each in found if each] == [expected]


def test_threads_have_similar_numbers_of_masks() -> None:
    assert divide("abcabcabca", 3) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert sorted(map(len, divide("aabbccddee", 4))) == [2, 2, 2, 4]
    assert divide("aa", 4) == [[0, 1]]


class WrittenMasks:
    """An executor whose masks are the matchers, here bytes, once `permit` is set."""

    def __init__(self, permit: threading.Event, before: threading.Event) -> None:
        self.permit, self.before = permit, before
        self.written = threading.Event()
        self.addresses: list[int] = []

    def unsafe_compute_mask_ptr(
        self, share: list[tuple[bytes, int]], address: int, mask_bytes: int, count: int
    ) -> None:
        self.addresses.append(address)
        self.before.set()
        assert self.permit.wait(TIMEOUT_S)
        for mask, index in share:
            assert index < count and len(mask) == mask_bytes
            ctypes.memmove(address + index * mask_bytes, mask, mask_bytes)
        self.written.set()


def matchers_of(*masks: bytes) -> list[Any]:
    return [(index % 2, mask) for index, mask in enumerate(masks)]


def create_threads() -> tuple[MaskThreads, WrittenMasks, WrittenMasks]:
    """Return two threads with executors that write: the caller's, and the other one."""
    threads, free = MaskThreads(2), threading.Event()
    free.set()
    own = WrittenMasks(free, threading.Event())
    other = WrittenMasks(threading.Event(), threading.Event())
    threads._executors = [own, other]  # type: ignore[list-item]
    return threads, own, other


def test_masks_are_returned_after_all_threads_have_written_them() -> None:
    """The other thread writes at the same time as this one, and only after it."""
    threads, own, other = create_threads()
    other.permit = own.written
    assert threads.compute(matchers_of(b"aaaa", b"bbbb", b"cccc"), 4) == [
        b"aaaa",
        b"bbbb",
        b"cccc",
    ]
    assert threads.compute(matchers_of(b"dddd", b"eeee"), 4) == [b"dddd", b"eeee"]
    assert len(set(own.addresses)) == 1, "its memory is used again"


def test_memory_of_an_interrupted_call_is_not_used_again() -> None:
    threads, own, other = create_threads()
    other.permit.set()
    threads.compute(matchers_of(b"aaaa", b"bbbb"), 4)
    interrupted = own.unsafe_compute_mask_ptr

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    own.unsafe_compute_mask_ptr = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        threads.compute(matchers_of(b"cccc", b"dddd"), 4)
    own.unsafe_compute_mask_ptr = interrupted  # type: ignore[method-assign]
    assert threads._buffer is None
    assert threads.compute(matchers_of(b"eeee", b"ffff"), 4) == [b"eeee", b"ffff"]


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (7, 1), (8, 2), (15, 3), (64, 4)])
def test_the_engine_keeps_most_of_the_cpus(cpus: int, count: int) -> None:
    assert num_mask_threads(cpus) == count
