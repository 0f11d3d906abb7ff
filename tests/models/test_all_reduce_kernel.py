"""The kernels of all_reduce.cu on emulated ranks, against plain Python. Needs a C++ compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import sqrt
from random import Random

import pytest

from forge.models.all_reduce_layout import AllReduceLayout
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
from tests.models.emulated_kernels import COMPILER, library_folder

pytestmark = [
    # Compiling a variant takes longer than its tests, so all of them are in one run.
    pytest.mark.long,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are those of Linux"),
]

EPS = 1e-3
MAX_CTAS = 3
VARIANTS = (Variant(2, "BF16"), Variant(3, "F32"), Variant(4, "F16"))
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
STEPS = {"BF16": 2**-7, "F16": 2**-10, "F32": 2**-20}
"""Largest relative difference of a norm: two roundings, and the order of the sum of squares."""

Open = Callable[..., EmulatedRanks]


@pytest.fixture(scope="module")
def open_ranks(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Return a function that opens ranks. It compiles each variant once."""
    folder = library_folder(tmp_path_factory)

    def open_ranks(
        variant: Variant,
        seed: int,
        *,
        packet_bytes: int = 512,
        max_bytes: int = 2048,
        first_call: int = 1,
    ) -> EmulatedRanks:
        layout = AllReduceLayout(variant.world_size, MAX_CTAS, MAX_THREADS, packet_bytes, max_bytes)
        return EmulatedRanks(compile_ranks(variant, folder), variant, layout, seed, first_call)

    return open_ranks


def draw_call(rng: Random, dtype: str, max_bytes: int) -> Call:
    """Return a call: mostly short, sometimes as long as may be."""
    item = 4 if dtype == "F32" else 2
    num_vectors = rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, max_bytes // 16)))
    drawn = rng.random()
    if drawn < 0.15:
        return Call(min(num_vectors, 512 // 16) * 16 // item, is_gather=True)
    if drawn < 0.5:
        return Call(num_vectors * 16 // item, rng.random() < 0.5)
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
    if call.is_gather:
        gathered = [x for each in inputs.xs for x in each]
        assert all(list(each.out) == gathered for each in results), call
        return
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


@each_variant
@pytest.mark.parametrize("store_delay", [1, 50])
def test_ranks_get_exact_sums_of_calls_of_any_size_in_any_order_of_their_warps(
    open_ranks: Open, variant: Variant, store_delay: int
) -> None:
    rng = Random(str((variant, store_delay)))
    ranks = open_ranks(variant, store_delay)
    early_calls = late_stores = 0
    for _ in range(6):
        calls = [draw_call(rng, variant.dtype, 2048) for _ in range(25)]
        reached = run_calls(ranks, variant, calls, rng, store_delay)
        early_calls += reached.early_calls
        late_stores += reached.late_stores
    assert early_calls
    assert late_stores or store_delay == 1


@pytest.mark.parametrize("packet_bytes", [0, 2048])
def test_a_rank_that_is_ahead_leaves_what_others_have_not_read(
    open_ranks: Open, packet_bytes: int
) -> None:
    variant, rng = VARIANTS[0], Random(packet_bytes)
    ranks = open_ranks(variant, 2, packet_bytes=packet_bytes)
    reached = run_calls(ranks, variant, [Call(8)] * 400, rng, store_delay=1)
    assert reached.early_calls > 100


@pytest.mark.parametrize("packet_bytes", [0, 8192])
def test_each_kernel_alone_adds_messages_of_any_size(open_ranks: Open, packet_bytes: int) -> None:
    variant, rng = VARIANTS[0], Random(packet_bytes)
    ranks = open_ranks(variant, 3, packet_bytes=packet_bytes, max_bytes=8192)
    calls = [Call(8 * vectors, vectors % 2 == 0) for vectors in (1, 31, 32, 33, 100, 128)]
    # The last: each CTA has four rows, of two warps.
    shapes = ((7, 5), (1, 128), (4, 32), *[(4 * MAX_CTAS, 40)] * 5)
    rows = [Call(8 * rows * width, True, 8 * width) for rows, width in shapes]
    run_calls(ranks, variant, calls + rows, rng, 20)
    used, unused = (1, 0) if packet_bytes == 0 else (0, 1)
    for counters in ranks.counters:
        assert list(counters[used]) == [1 + len(calls + rows)] * MAX_CTAS
        assert list(counters[unused]) == [1] * MAX_CTAS


def test_numbers_of_calls_begin_again_after_the_last_and_skip_that_of_unwritten_memory(
    open_ranks: Open,
) -> None:
    variant, rng = VARIANTS[0], Random(7)
    ranks = open_ranks(variant, 7, first_call=0xFFFFFFFD)
    calls = [draw_call(rng, variant.dtype, 512) for _ in range(8)]
    run_calls(ranks, variant, calls, rng, 10)
    for counters in ranks.counters:
        # 0xFFFFFFFD to 0xFFFFFFFF, then from 2: even and odd take turns.
        assert list(counters[0]) == [2 + 8 - 3] * MAX_CTAS


def test_equal_inputs_have_equal_norms_in_any_message_and_on_any_run(open_ranks: Open) -> None:
    """A row's norm depends on the row, not on rows next to it, the kernel or the time.

    A CTA has four rows, each of two warps.
    """
    variant, rng, width, num_rows = VARIANTS[0], Random(11), 8 * 40, 4 * MAX_CTAS
    one_row = draw_inputs(rng, Call(width, True, width), variant)
    call = Call(num_rows * width, True, width)
    xs = [x * num_rows for x in one_row.xs]
    many = Inputs(xs, one_row.residual * num_rows, one_row.weight)
    norms = []
    for packet_bytes in (0, 8192):
        ranks = open_ranks(variant, 11, packet_bytes=packet_bytes, max_bytes=8192)
        for _ in range(2):
            results, _ = ranks.run([call], [many], 5, EPS)
            bits = results[0][0].normed
            norms += [bits[first : first + width] for first in range(0, len(bits), width)]
    assert len(norms) == 4 * num_rows
    assert all(each == norms[0] for each in norms)


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_hundreds_of_calls_of_changing_sizes_have_exact_sums(
    open_ranks: Open, variant: Variant
) -> None:
    rng = Random(str(variant))
    ranks = open_ranks(variant, 5)
    early_calls = late_stores = 0
    for batch in range(8):
        calls = [draw_call(rng, variant.dtype, 2048) for _ in range(100)]
        reached = run_calls(ranks, variant, calls, rng, (2, 10, 50, 400)[batch % 4])
        early_calls += reached.early_calls
        late_stores += reached.late_stores
    assert early_calls > 200
    assert late_stores > 200
