"""SkinnyGemm: shapes of launches on any machine; the kernels against float64 on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.nvrtc")

from forge.models.hf.attention.interface import LayerSpec  # noqa: E402
from forge.models.hf.decoders.fused_decoder import FusedDecoder, LayerWeights  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.hf.ops.skinny_gemm import (  # noqa: E402
    MAX_ROWS_OF_SMALL_WEIGHT,
    SkinnyGemm,
    select_build,
)

SHAPES = ((1024, 4096), (2048, 1024), (3072, 1024), (1024, 6144), (4096, 2560), (9728, 2560))
"""k and n of some weights [n, k]."""


@pytest.mark.parametrize(("k", "n"), [*SHAPES, (32, 16), (5120, 151936), (17408, 5120)])
def test_every_number_of_rows_has_a_build_that_fits_a_multiprocessor(k: int, n: int) -> None:
    for rows in range(1, MAX_ROWS_OF_SMALL_WEIGHT + 1):
        build = select_build(rows, k, n, 132)
        assert 8 * build.row_tiles >= rows
        assert build.steps % build.input_steps == 0
        # Of 65,536 registers: weights, x and sums, and 24 for addresses.
        registers = 8 * build.steps + 4 * build.row_tiles * (build.input_steps + 1) + 24
        assert build.min_ctas * build.num_warps * 32 * registers <= 65536
        # The sums of all warps, in static shared memory.
        assert build.num_warps * 8 * build.row_tiles * 20 * 4 <= 48 * 1024


class SmallRowOps(TorchOps):
    """Operations in plain torch with the limit of a GPU that has the kernels."""

    max_small_rows = 2


@pytest.mark.parametrize(
    ("hidden", "heads", "intermediate"), [(1024, 16, 3072), (2560, 32, 9728), (5120, 40, 17408)]
)
def test_warmup_calls_need_every_build_of_a_step(hidden: int, heads: int, intermediate: int):
    def weight(*size: int) -> Any:
        return torch.empty(size, device="meta")

    norm, o = weight(hidden), weight(hidden, heads * 128)
    qkv, gate_up = weight((heads + 16) * 128, hidden), weight(2 * intermediate, hidden)
    down, head = weight(hidden, intermediate), weight(151936, hidden)
    layer = LayerWeights(norm, qkv, None, None, None, o, None, norm, gate_up, down)
    rope = (weight(64, 128), weight(64, 128))
    spec = LayerSpec(heads, 8, 128, 1.0)
    fused = FusedDecoder(SmallRowOps(), spec, 1e-6, head, rope, [layer], norm, head)
    kv_cache = KVCache(
        KVCacheSpec(1, 8, 128, torch.float32),
        num_blocks=1, block_size=64, num_slots=1, max_model_len=64, device=norm.device,
    )  # fmt: skip
    operands = [
        call.args[:2]
        for call in fused.warmup_calls(kv_cache)
        if call.func.__name__ in ("linear", "gate_up")
    ]
    assert all(x.shape[1] == w.shape[1] for x, w in operands)
    compiled = {select_build(len(x), *w.T.shape, 132) for x, w in operands}
    for w in (qkv, o, gate_up, down, head):
        for rows in range(1, MAX_ROWS_OF_SMALL_WEIGHT + 1):
            assert select_build(rows, *w.T.shape, 132) in compiled, (rows, w.shape)


def draw(seed: int, *size: int) -> Any:
    """Return a random matrix on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda", dtype=torch.float64)


def relative_error(value: Any, exact: Any) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def gemms() -> dict[str, Any]:
    return {
        name: SkinnyGemm(getattr(torch, name), torch.device("cuda"))
        for name in ("bfloat16", "float16")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16, 24, 32])
@pytest.mark.parametrize(("k", "n"), [*SHAPES, (544, 208), (32, 16)])
def test_compiled_kernels_agree_with_float64(
    gemms: dict[str, Any], dtype: str, rows: int, k: int, n: int
) -> None:
    gemm, reference, low_dtype = gemms[dtype], TorchOps(), getattr(torch, dtype)
    x, w, bias = (draw(i, *size).to(low_dtype) for i, size in enumerate(((rows, k), (n, k), (n,))))
    w /= 8
    if not gemm.takes(x, w):
        pytest.skip("a library's GEMM is faster")
    exact = [each.double() for each in (x, w, bias)]
    bound = 4e-3 if dtype == "bfloat16" else 5e-4
    assert relative_error(gemm.linear(x, w, bias), reference.linear(*exact)) < bound
    assert relative_error(gemm.gate_up(x, w), reference.gate_up(*exact[:2])) < bound


@pytest.mark.gpu
def test_a_row_depends_on_no_other_row_and_a_product_is_the_same_every_time(
    gemms: dict[str, Any],
) -> None:
    gemm = gemms["bfloat16"]
    x, w = draw(1, 16, 2560).bfloat16(), draw(2, 6144, 2560).bfloat16()
    whole = gemm.linear(x, w)
    for _ in range(20):
        assert torch.equal(gemm.linear(x, w), whole)
    x[1:] = float("nan")
    assert torch.equal(gemm.linear(x, w)[0], whole[0])


@pytest.mark.gpu
def test_operands_that_the_kernels_do_not_model_are_left_to_others(gemms: dict[str, Any]) -> None:
    gemm, x, w = gemms["bfloat16"], draw(1, 8, 64).bfloat16(), draw(2, 32, 64).bfloat16()
    assert gemm.takes(x, w)
    assert not gemm.takes(x.half(), w)
    assert not gemm.takes(x, w.half())
    assert not gemm.takes(x[:0], w)
    assert not gemm.takes(draw(1, 33, 64).bfloat16(), w)
    assert gemm.takes(draw(1, 32, 64).bfloat16(), w)
    assert not gemm.takes(draw(1, 17, 4096).bfloat16(), draw(2, 4096, 4096).bfloat16())
    assert not gemm.takes(draw(1, 64, 8).bfloat16().T, w)
    assert not gemm.takes(draw(1, 8, 48).bfloat16(), draw(2, 32, 48).bfloat16())
    assert not gemm.takes(x, draw(2, 40, 64).bfloat16())
    assert not gemm.takes(x, draw(2, 32 * 64 + 1).bfloat16()[1:].view(32, 64))
