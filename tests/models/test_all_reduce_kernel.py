"""The kernels of all_reduce.cu on emulated ranks, against plain Python. Needs a C++ compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from random import Random

import pytest

from forge.models.hf.parallel.all_reduce_layout import AllReduceLayout
from tests.models.emulated_all_reduce import (
    MAX_THREADS,
    Call,
    EmulatedRanks,
    Inputs,
    RankResult,
    Reached,
    Variant,
    compile_ranks,
    expected_sum,
    from_bits,
    to_bits,
)
from tests.models.emulated_kernels import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are those of Linux"),
]

EPS = 1e-3
MAX_CTAS = 3
VARIANTS = (Variant(2, "BF16"), Variant(2, "F16"), Variant(3, "F32"), Variant(4, "BF16"))
STEPS = {"BF16": 2**-7, "F16": 2**-10, "F32": 2**-20}
"""Largest relative difference of a norm: two roundings, and the order of the sum of squares."""

Open = Callable[..., EmulatedRanks]


@pytest.fixture(scope="module")
def open_ranks(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Return a function that opens ranks. It compiles each variant once."""
    folder = tmp_path_factory.mktemp("all_reduce")
    libraries: dict[Variant, Path] = {}

    def open_ranks(
        variant: Variant,
        seed: int,
        *,
        packet_bytes: int = 512,
        max_bytes: int = 2048,
        epoch: int = 1,
    ) -> EmulatedRanks:
        if variant not in libraries:
            libraries[variant] = folder / f"{len(libraries)}.so"
            compile_ranks(variant, libraries[variant])
        layout = AllReduceLayout(variant.world_size, MAX_CTAS, MAX_THREADS, packet_bytes, max_bytes)
        return EmulatedRanks(libraries[variant], variant, layout, seed, epoch)

    return open_ranks


def draw_call(rng: Random, dtype: str, max_bytes: int) -> Call:
    """Return a call: mostly short, sometimes as long as may be."""
    item = 4 if dtype == "F32" else 2
    num_vectors = rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, max_bytes // 16)))
    if rng.random() < 0.5:
        return Call(num_vectors * 16 // item, rng.random() < 0.5, None)
    row_vectors = rng.randint(1, min(num_vectors, 3 * MAX_THREADS))
    num_rows = num_vectors // row_vectors
    return Call(num_rows * row_vectors * 16 // item, True, row_vectors * 16 // item)


def draw_inputs(rng: Random, call: Call, variant: Variant) -> Inputs:
    """Return numbers whose sum in single precision depends on the order."""

    def draw(count: int) -> list[float]:
        return [rng.uniform(-1, 1) * 2.0 ** rng.randint(-3, 3) for _ in range(count)]

    def bits(count: int) -> Sequence[int]:
        return to_bits(draw(count), variant.dtype)

    size = call.num_elements
    xs = [bits(size) for _ in range(variant.world_size)]
    return Inputs(xs, bits(size), bits(call.row_elements or 1))  # type: ignore[arg-type]


def assert_results(
    call: Call, inputs: Inputs, results: Sequence[RankResult], variant: Variant
) -> None:
    """Assert that every rank has the exact sum, and the same norm of it."""
    dtype = variant.dtype
    expected = expected_sum(inputs, dtype, call.has_residual)
    for rank, each in enumerate(results):
        assert each.out == expected, (call, rank)
        assert each.normed == results[0].normed, (call, rank)
    if call.row_elements is None:
        return
    width = call.row_elements
    total, normed = from_bits(expected, dtype), from_bits(results[0].normed, dtype)
    weight = from_bits(inputs.weight, dtype)
    for first in range(0, len(total), width):
        row = total[first : first + width]
        scale = 1 / sqrt(sum(x * x for x in row) / width + EPS)
        for x, factor, y in zip(row, weight, normed[first : first + width], strict=True):
            exact = x * scale * factor
            assert abs(y - exact) <= STEPS[dtype] * abs(exact) + 1e-6, (call, x, factor, y)


def run_calls(
    ranks: EmulatedRanks, variant: Variant, calls: Sequence[Call], rng: Random, store_delay: int
) -> Reached:
    """Make the calls and compare their results."""
    inputs = [draw_inputs(rng, call, variant) for call in calls]
    results, reached = ranks.run(calls, inputs, store_delay, EPS)
    for call, given, result in zip(calls, inputs, results, strict=True):
        assert_results(call, given, result, variant)
    return reached


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("store_delay", [1, 50])
def test_ranks_get_exact_sums_of_calls_of_any_size_in_any_order_of_their_warps(
    open_ranks: Open, variant: Variant, store_delay: int
) -> None:
    rng = Random(str((variant, store_delay)))
    ranks = open_ranks(variant, store_delay)
    early_calls = late_stores = 0
    for _ in range(4):
        calls = [draw_call(rng, variant.dtype, 2048) for _ in range(15)]
        reached = run_calls(ranks, variant, calls, rng, store_delay)
        early_calls += reached.early_calls
        late_stores += reached.late_stores
    assert early_calls
    assert late_stores or store_delay == 1
