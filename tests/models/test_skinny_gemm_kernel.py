"""The kernels of skinny_gemm.cu on the CPU against float64. Needs a C++ compiler and no GPU."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.models.emulated_kernels import (
    COMPILER,
    HERE,
    compile_emulated,
    decode,
    encode,
    library_folder,
    pointer_or_integer,
)

SOURCE = HERE.parents[1] / "forge/models/hf/ops/skinny_gemm.cu"

pytestmark = [
    # Compiling a variant takes longer than its tests, so all of them are in one run.
    pytest.mark.long,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are those of Linux"),
]


class Variant(NamedTuple):
    """Macros of a build."""

    row_tiles: int
    steps: int
    input_steps: int
    warps: int
    dtype: str


class Case(NamedTuple):
    """Shapes of a GEMM: x [m, k] and n outputs."""

    variant: Variant
    m: int
    k: int
    n: int


SMALL = Variant(1, 2, 2, 2, "BF16")
LARGE = Variant(2, 4, 2, 4, "F16")
CASES = (
    Case(SMALL, 8, 256, 32),
    # Warps with 5 and 6 steps, which end within a group of steps.
    Case(SMALL, 5, 352, 16),
    Case(SMALL, 1, 32, 48),
    Case(LARGE, 16, 384, 32),
    Case(LARGE, 9, 1056, 16),
    # More warps than steps: one has none.
    Case(LARGE, 3, 96, 16),
)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], ctypes.CDLL]:
    """Return a function that compiles the kernels with the emulator, each variant once."""
    folder = library_folder(tmp_path_factory)

    def load(variant: Variant) -> ctypes.CDLL:
        numbers = variant._asdict()
        dtype = numbers.pop("dtype")
        macros = {name.upper(): value for name, value in numbers.items()}
        macros |= {f"HALF_{dtype}": 1, "MIN_CTAS": 1}
        sources = (HERE / "cuda_emulator_gemm.h", SOURCE, HERE / "gemm_kernel_entry.cpp")
        return ctypes.CDLL(str(compile_emulated(folder, macros, sources)))

    return load


def random_matrix(rng: Random, rows: int, columns: int, dtype: str) -> array[Any]:
    return encode([rng.uniform(-2, 2) for _ in range(rows * columns)], dtype)


def unwritten(x: array[Any]) -> array[Any]:
    """Return memory for x, every number NaN."""
    return array("H", [0x7FFF] * len(x))


def product(x: array[Any], w: array[Any], k: int, dtype: str) -> list[list[float]]:
    """Return x @ w.T."""
    first, second = decode(x, dtype), decode(w, dtype)
    return [
        [
            sum(a * b for a, b in zip(first[i : i + k], second[j : j + k], strict=True))
            for j in range(0, len(second), k)
        ]
        for i in range(0, len(first), k)
    ]


def launch(library: ctypes.CDLL, name: str, *arguments: array[Any] | int | None) -> None:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    error = function(*map(pointer_or_integer, arguments))
    assert error is None, (name, error)


def assert_close(out: array[Any], expected: Sequence[Sequence[float]], dtype: str) -> None:
    """Assert that the outputs differ by their rounding, and that nothing is written after them."""
    assert out.pop() == 0xABCD
    step = 2**-8 if dtype == "BF16" else 2**-11
    for value, exact in zip(decode(out, dtype), (y for row in expected for y in row), strict=True):
        assert abs(value - exact) <= step * abs(exact) + 1e-4, (value, exact)


@each_case
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_and_the_bias(
    load: Callable[[Variant], ctypes.CDLL], case: Case, has_bias: bool
) -> None:
    (variant, m, k, n), dtype = case, case.variant.dtype
    rng = Random(str((case, has_bias)))
    x, w = random_matrix(rng, m, k, dtype), random_matrix(rng, n, k, dtype)
    bias = random_matrix(rng, 1, n, dtype) if has_bias else None
    out = array("H", [0xABCD] * (m * n + 1))
    seed = rng.getrandbits(31)
    launch(load(variant), "run_linear", seed, unwritten(x), x, w, bias, out, m, k, n)
    shifts = decode(bias, dtype) if bias is not None else [0.0] * n
    expected = [
        [y + shift for y, shift in zip(row, shifts, strict=True)] for row in product(x, w, k, dtype)
    ]
    assert_close(out, expected, dtype)


@each_case
def test_gate_up_is_the_product_of_silu_gate_and_up(
    load: Callable[[Variant], ctypes.CDLL], case: Case
) -> None:
    (variant, m, k, n), dtype = case, case.variant.dtype
    rng = Random(str(case))
    x, w = random_matrix(rng, m, k, dtype), random_matrix(rng, 2 * n, k, dtype)
    out = array("H", [0xABCD] * (m * n + 1))
    seed = rng.getrandbits(31)
    launch(load(variant), "run_gate_up", seed, unwritten(x), x, w, out, m, k, n)
    expected = [
        [gate / (1 + exp(-gate)) * up for gate, up in zip(row[:n], row[n:], strict=True)]
        for row in product(x, w, k, dtype)
    ]
    assert_close(out, expected, dtype)
