"""Kernels of all_reduce.cu on the CPU: ranks that share memory, each with its own calls in flight.

    all_reduce.cu ─ cuda_emulator_ranks.h ─► a library for each Variant ─ ctypes ─► EmulatedRanks

Each run draws the order in which the warps of all ranks go on, and when their stores arrive.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from operator import add
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from forge.models.all_reduce_layout import (
    KERNELS,
    MAX_VECTORS,
    AllReduceLayout,
    has_flags,
)
from tests.models.emulated_kernels import HERE, compile_emulated, decode

SOURCE = HERE.parents[1] / "forge/models/hf/parallel/all_reduce.cu"
MAX_THREADS = 64
NO_NUMBER = {"F32": 0x7FC00000, "BF16": 0x7FFF, "F16": 0x7FFF}


class Variant(NamedTuple):
    """Macros of a build."""

    world_size: int
    dtype: str


class Call(NamedTuple):
    """An all-reduce, or an all-gather.

    row_elements   elements of a row where there is a norm; else None
    """

    num_elements: int
    has_residual: bool = False
    row_elements: int | None = None
    is_gather: bool = False


class RankResult(NamedTuple):
    """Outputs of a call on one rank, as bits."""

    out: array[Any]
    normed: array[Any]


class Inputs(NamedTuple):
    """Numbers of a call, as bits: x of each rank, and what is equal on all ranks."""

    xs: list[array[Any]]
    residual: array[Any]
    weight: array[Any]


class _CCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("kernel", "has_flags", "num_ctas", "num_threads")),
        *((name, ctypes.c_longlong) for name in ("num_vectors", "chunk_vectors", "num_bytes")),
        ("eps", ctypes.c_double),
    )


class Reached(ctypes.Structure):
    """Counts of what a run has seen.

    early_calls   calls that a rank began while another was in an earlier one
    late_stores   stores that arrived after their rank had started another call
    """

    _fields_ = (("early_calls", ctypes.c_longlong), ("late_stores", ctypes.c_longlong))


def to_bits(values: Sequence[float], dtype: str) -> array[Any]:
    """Return the values rounded to nearest even."""
    if dtype == "F32":
        return array("I", array("f", values).tobytes())
    if dtype == "F16":
        return array("H", struct.pack(f"{len(values)}e", *values))
    words = array("I", array("f", values).tobytes())
    return array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words])


def from_bits(bits: array[Any], dtype: str) -> list[float]:
    return array("f", bits.tobytes()).tolist() if dtype == "F32" else decode(bits, dtype)


def expected_sum(inputs: Inputs, dtype: str, has_residual: bool) -> array[Any]:
    """Return the sum in the order of ranks in single precision, and the residual, rounded once."""
    total = from_bits(inputs.xs[0], dtype)
    for each in [*inputs.xs[1:], *([inputs.residual] if has_residual else [])]:
        total = array("f", map(add, total, from_bits(each, dtype))).tolist()
    return to_bits(total, dtype)


def compile_ranks(variant: Variant, folder: Path) -> Path:
    """Return the library of all_reduce.cu with the emulator, in a folder of libraries."""
    macros = {
        "WORLD": variant.world_size,
        "MAX_THREADS": MAX_THREADS,
        "MAX_VECTORS": MAX_VECTORS,
        f"FLOAT_{variant.dtype}": 1,
    }
    sources = (HERE / "cuda_emulator_ranks.h", SOURCE, HERE / "all_reduce_kernel_entry.cpp")
    return compile_emulated(folder, macros, sources)


class EmulatedRanks:
    """Ranks that make calls. Memory and counters stay between runs, as on devices.

    first_call   number of the first call of each kernel
    """

    def __init__(
        self, library: Path, variant: Variant, layout: AllReduceLayout, seed: int, first_call: int
    ) -> None:
        self._variant = variant
        self._layout = layout
        self._rng = Random(seed)
        self._library = ctypes.CDLL(str(library))
        world_size = layout.world_size
        self._memory = [aligned_zeros(layout.total_bytes + 64) for _ in range(world_size)]
        for memory, start in self._memory:
            memory[-48:] = b"\xa5" * 48
            assert start % 16 == 0
        self.counters = [
            [array("I", [first_call] * layout.max_ctas) for _ in range(2)]
            for _ in range(world_size)
        ]

    def run(
        self, calls: Sequence[Call], inputs: Sequence[Inputs], store_delay: int, eps: float
    ) -> tuple[list[list[RankResult]], Reached]:
        """Make the calls on every rank. Return the results by call and rank, and what was seen."""
        layout, dtype, world_size = self._layout, self._variant.dtype, self._layout.world_size
        c_calls = (_CCall * len(calls))()
        kept: list[Any] = []
        addresses: list[int] = []
        results: list[list[RankResult]] = []
        for call, given, c_call in zip(calls, inputs, c_calls, strict=True):
            item = given.weight.itemsize
            num_bytes = call.num_elements * item
            row_bytes = None if call.row_elements is None else call.row_elements * item
            launch = (
                layout.select_gather(num_bytes)
                if call.is_gather
                else layout.select_launch(num_bytes, row_bytes)
            )
            c_call.kernel = KERNELS.index(launch.kernel)
            c_call.has_flags = has_flags(launch.kernel)
            c_call.num_ctas, c_call.num_threads = launch.num_ctas, launch.num_threads
            c_call.num_vectors, c_call.chunk_vectors = num_bytes // 16, launch.chunk_vectors
            c_call.num_bytes, c_call.eps = num_bytes, eps
            results.append([])
            for x in given.xs:
                blank = array(given.weight.typecode, [NO_NUMBER[dtype]] * call.num_elements)
                late_x, late_residual, weight = map(aligned_copy, (x, given.residual, given.weight))
                num_outputs = world_size if call.is_gather else 1
                copies = [aligned_copy(blank * each) for each in (1, 1, num_outputs, 1)]
                kept += [late_x, late_residual, weight, copies]
                early_x, early_residual, out, normed = (start for _, start in copies)
                has_norm = call.row_elements is not None
                addresses += (
                    late_x[1],
                    late_residual[1],
                    early_x,
                    early_residual if call.has_residual else 0,
                    weight[1] if has_norm else 0,
                    out,
                    normed if has_norm else 0,
                )
                results[-1].append((copies[2], copies[3]))  # type: ignore[arg-type]
        reached = Reached()
        self._run(len(calls), c_calls, array("Q", addresses), store_delay, reached)
        bits = [
            [RankResult(*(read_bits(each, dtype) for each in pair)) for pair in row]
            for row in results
        ]
        return bits, reached

    def _run(
        self, num_calls: int, c_calls: Any, arrays: array[int], store_delay: int, reached: Reached
    ) -> None:
        layout = self._layout
        buffers = array("Q", [start for _, start in self._memory])
        counters = array("Q", [each.buffer_info()[0] for pair in self.counters for each in pair])
        regions = array("q", [value for kernel in KERNELS for value in layout.region(kernel)])
        function = self._library.run_calls
        function.restype = ctypes.c_char_p
        longs = ctypes.c_longlong
        error = function(
            ctypes.c_uint(self._rng.getrandbits(31)),
            longs(store_delay),
            longs(num_calls),
            c_calls,
            *(
                ctypes.c_void_p(each.buffer_info()[0])
                for each in (arrays, buffers, counters, regions)
            ),
            longs(layout.max_ctas),
            longs(layout.max_threads),
            ctypes.byref(reached),
        )
        assert error is None, error
        for memory, _ in self._memory:
            assert memory[-48:] == b"\xa5" * 48, "a write beyond the shared memory"


def aligned_zeros(size: int) -> tuple[Any, int]:
    """Return a buffer and the first address in it that is a multiple of 16."""
    whole = (ctypes.c_char * (size + 16))()
    offset = -ctypes.addressof(whole) % 16
    buffer = (ctypes.c_char * size).from_buffer(whole, offset)
    return buffer, ctypes.addressof(buffer)


def aligned_copy(bits: array[Any]) -> tuple[Any, int]:
    """Return a buffer with these numbers, aligned, and its address."""
    data = bits.tobytes()
    buffer, start = aligned_zeros(len(data))
    buffer[:] = data
    return buffer, start


def read_bits(copy: tuple[Any, int], dtype: str) -> array[Any]:
    return array("I" if dtype == "F32" else "H", copy[0][:])
