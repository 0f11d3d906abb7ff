"""The kernels of decode.cu on the CPU, against plain Python. Needs a C++ compiler and no GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import isnan, sqrt
from random import Random

import pytest

from tests.models.emulated_decode import Case, DecodeKernels, Step, Variant, compile_kernels
from tests.models.emulated_kernels import COMPILER, library_folder

pytestmark = [
    # Compiling a variant takes longer than its tests, so all of them are in one run.
    pytest.mark.long,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are those of Linux"),
]

BOUNDS = {"BF16": 3e-2, "F16": 4e-3}
"""Relative errors of a head, by norm. Keys are drawn with large norms, so weights differ a lot."""

GROUP_4 = Variant(4)
GROUP_1 = Variant(1, tile=32, block_size=64, stages=3, cell_type="F16")
GROUP_12 = Variant(12, kv_heads=1, head_dim=128, block_size=16, min_tiles=2, cell_type="F16")

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 129)
"""Lengths around the ends of tiles and blocks."""

CASES = {
    "one position": Case(GROUP_4, (1,)),
    "the new token alone in its tile": Case(GROUP_4, (17, 33, 65), norms=True),
    "lengths at edges": Case(GROUP_4, EDGES, norms=True),
    "lengths at edges, given queries": Case(GROUP_4, (0, *EDGES, 0, 0), fused_qkv=False),
    "rows of one position": Case(GROUP_4, (1,) * 40),
    "a row over all warps": Case(GROUP_4, (300,), num_ctas=4),
    "a long row among short ones": Case(GROUP_4, (3, 9, 400, 1, 20), num_ctas=2),
    "more warps than tiles": Case(GROUP_4, (20, 5), num_ctas=8),
    "padding rows": Case(GROUP_4, (40, 70, 1, 1, 1), num_padding=3),
    "nothing to read": Case(GROUP_4, (0, 0, 0), fused_qkv=False),
    "no groups, tiles of 32": Case(GROUP_1, (1, 31, 32, 33, 65, 129), norms=True),
    "no groups, tiles of 32, given queries": Case(GROUP_1, (1, 32, 33, 97), fused_qkv=False),
    "12 heads of 128 for a key head": Case(GROUP_12, (1, 16, 41), norms=True),
    "12 heads of 128, given queries": Case(GROUP_12, (16, 0, 41), fused_qkv=False),
}
GROUP_CASES = [
    Case(Variant(group, head_dim=128, cell_type="F16"), (1, 16, 33, 100), norms=True)
    for group in (2, 5, 8, 16)
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], DecodeKernels]:
    """Return a function that returns the kernels of a variant, compiled once."""
    folder = library_folder(tmp_path_factory)

    def build(variant: Variant) -> DecodeKernels:
        return DecodeKernels(compile_kernels(variant, folder), variant)

    return build


def error(got: Sequence[float], expected: Sequence[float]) -> float:
    """Return the relative error, by norm."""
    difference = sqrt(sum((x - y) ** 2 for x, y in zip(got, expected, strict=True)))
    return difference / sqrt(sum(x * x for x in expected))


def check_case(kernels: DecodeKernels, case: Case) -> None:
    """Check all that the kernel writes, and that the order of its warps changes nothing."""
    step = Step(case, Random(str(case)))
    result = kernels.run(step, seed=1)
    again = kernels.run(step, seed=2)
    assert repr(again.outputs) == repr(result.outputs), "warps in another order"
    assert not any(result.counters)
    bound = BOUNDS[case.variant.cell_type]
    outputs, writes = step.expected()
    for index, (got, expected) in enumerate(zip(result.outputs, outputs, strict=True)):
        where = divmod(index, step.num_heads)
        if isnan(expected[0]):
            assert all(map(isnan, got)), (where, "must be unchanged")
        else:
            assert error(got, expected) < bound, where
    # Padding rows overwrite each other's key and value at the end, in the scratch block.
    blocks, dim = step.blocks.values(), case.variant.head_dim
    scratch = len(blocks) // (step.scratch_block + 1) * step.scratch_block
    num_different = 0
    for at, expected in writes.items():
        written = result.blocks[at : at + dim]
        assert at >= scratch or error(written, expected) < bound, at
        num_different += sum(map(float.__ne__, written, expected)) if at < scratch else 0
        blocks[at : at + dim] = written
    # A step that is not rounded to the type changes a tenth of the numbers.
    assert num_different <= 0.03 * dim * len(writes)
    assert repr(result.blocks) == repr(blocks), "a position that is not new was written"


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_plain_python(build: Callable[[Variant], DecodeKernels], name: str):
    check_case(build(CASES[name].variant), CASES[name])


@pytest.mark.parametrize("case", GROUP_CASES, ids=lambda case: f"groups of {case.variant.group}")
def test_every_size_of_a_group(build: Callable[[Variant], DecodeKernels], case: Case):
    check_case(build(case.variant), case)


def count_parts(lengths: Sequence[int], num_heads: int, num_warps: int, start_tiles: int) -> int:
    """Return the parts of cut heads where every warp has the same work, by counting units."""
    units: list[int | None] = []
    for item, length in enumerate(length for length in lengths for _ in range(num_heads)):
        units += [None] * start_tiles + [item] * -(-length // 16)
    workers = max(1, min(num_warps, len(units)))
    parts = {
        (item, index)
        for index in range(workers)
        for item in units[index * len(units) // workers : (index + 1) * len(units) // workers]
        if item is not None
    }
    by_item = Counter(item for item, _ in parts)
    return sum(count for count in by_item.values() if count > 1)


@pytest.mark.parametrize("start_tiles", [0, 2])
@pytest.mark.parametrize(
    ("lengths", "num_ctas", "num_parts"),
    [
        # Two key heads of 8 tiles for 4 warps: each has half a head.
        ((128,), 2, {0: 4, 2: 4}),
        # 4 rows of 2 tiles, two heads, for 8 warps: each has one head of a row.
        ((32, 32, 32, 32), 4, {0: 0, 2: 0}),
        # Two heads of 10 tiles for 4 warps.
        ((160,), 2, {0: 4, 2: 4}),
        # Two heads of 3 tiles for 4 warps: 1, 2, 1 and 2, or two warps have a start alone.
        ((48,), 2, {0: 4, 2: 0}),
        # The same, in rows of 2 tiles and of 1: only heads of the first row are cut.
        ((32, 16), 2, {0: 4, 2: 4}),
        # 26 tiles for 4 warps. With their starts, the short rows have as much work as the long one.
        ((160, 16, 16, 16), 2, {0: 5, 2: 4}),
        ((96, 1, 1, 1, 1, 1, 1, 1, 1), 2, {0: 2, 2: 0}),
    ],
)
def test_warps_have_the_same_work(
    build: Callable[[Variant], DecodeKernels],
    lengths: tuple[int, ...],
    num_ctas: int,
    num_parts: dict[int, int],
    start_tiles: int,
):
    variant = GROUP_4._replace(start_tiles=start_tiles)
    case = Case(variant, lengths, num_ctas=num_ctas)
    assert build(variant).run(Step(case, Random(1)), seed=3).num_parts == num_parts[start_tiles]
    expected = count_parts(lengths, variant.kv_heads, num_ctas * variant.warps, start_tiles)
    assert expected == num_parts[start_tiles]
