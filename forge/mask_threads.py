"""MaskThreads: the masks of many matchers, computed on several threads.

Owns the threads and the memory that llguidance writes to. Knows no structure, token or sequence.

    lexer A   m0 ─► m3 ─► m5     this thread        copies of one compiled structure share a lexer
    lexer B   m1 ─► m2 ─► m4     another thread     and its lock, so they take turns

Always true: the masks of one lexer are computed one after the other, in the order of the caller.
So a lexer's states, its fuel and its errors do not depend on how the threads are scheduled.

Each thread has an executor of llguidance with one thread, which releases Python's lock once for all
of its masks. Python's threads alone would wait for that lock after each mask.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import Array, addressof, c_char, create_string_buffer

import llguidance

MAX_THREADS = 4
CPUS_PER_THREAD = 4
"""The engine, its server and the tokenizer need the other CPUs."""

MIN_MASKS = 8
"""Fewer masks than these are computed one by one: waking a thread takes as long."""


def num_mask_threads(num_cpus: int) -> int:
    """Return how many threads compute masks: 1 below eight CPUs, and at most 4."""
    return max(1, min(MAX_THREADS, num_cpus // CPUS_PER_THREAD))


class MaskThreads:
    """Threads that compute masks. The calling thread is one of them."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads > 1, f"{num_threads} threads: compute the masks one by one"
        self._pool = ThreadPoolExecutor(num_threads - 1, "forge-masks")
        self._executors = [llguidance.LLExecutor(1) for _ in range(num_threads)]
        self._buffer: Array[c_char] | None = None

    def compute(
        self, matchers: Sequence[tuple[Hashable, llguidance.LLMatcher]], mask_bytes: int
    ) -> list[bytes]:
        """Return the mask of each matcher. One that has failed by then has another mask.

        matchers     the lexer and the matcher of each; no matcher occurs twice
        mask_bytes   size of a mask, whole words of 32 bits
        """
        size = len(matchers) * mask_bytes
        # Threads of an interrupted call may still write to its memory: it is not used again.
        buffer, self._buffer = self._buffer, None
        if buffer is None or len(buffer) < size:
            buffer = create_string_buffer(size)
        lexers = [lexer for lexer, _ in matchers]
        shares = [
            [(matchers[index][1], index) for index in share]
            for share in divide(lexers, len(self._executors))
        ]
        futures = [
            self._pool.submit(_compute, executor, share, buffer, mask_bytes)
            for executor, share in zip(self._executors[1:], shares[1:], strict=False)
        ]
        _compute(self._executors[0], shares[0], buffer, mask_bytes)
        for future in futures:
            future.result()
        self._buffer = buffer
        view = memoryview(buffer)
        return [
            bytes(view[end - mask_bytes : end]) for end in range(mask_bytes, size + 1, mask_bytes)
        ]


def _compute(
    executor: llguidance.LLExecutor,
    share: list[tuple[llguidance.LLMatcher, int]],
    buffer: Array[c_char],
    mask_bytes: int,
) -> None:
    """Write the mask of each matcher to its place in the buffer, in the order of the share."""
    executor.unsafe_compute_mask_ptr(
        share, addressof(buffer), mask_bytes, len(buffer) // mask_bytes
    )


def divide(lexers: Iterable[Hashable], num_shares: int) -> list[list[int]]:
    """Divide the indices of the lexers into at most `num_shares` lists of similar length.

    Those of one lexer stay together and in order.
    """
    by_lexer: dict[Hashable, list[int]] = {}
    for index, lexer in enumerate(lexers):
        by_lexer.setdefault(lexer, []).append(index)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for group in sorted(by_lexer.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]
